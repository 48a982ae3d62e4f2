"""Versions of installed packages, found without importing them: torch alone takes a second."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata, util
from pathlib import Path

PACKAGES = ("torch", "mujoco", "robosuite", "dm_control", "gymnasium")


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        found["torch.cuda"] = _torch_cuda()
    return tuple(found.items())


def installed() -> dict[str, str]:
    """Give the versions of those that are installed, and the CUDA or ROCm version that torch was built for.

    :return: by package; ``"torch.cuda"`` is ``""`` for a build without CUDA and ``"rocm <version>"`` for AMD's
    """
    return dict(_installed())


def major(version: str) -> int:
    """Give the first number of a version.

    :param version: such as ``"3.9.0"``
    :return: such as 3; 0 if there is none
    """
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


def _torch_cuda() -> str:
    spec = util.find_spec("torch")
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if source is None or not source.is_file():
        return ""
    text = source.read_text(encoding="utf-8")
    hip = _assigned(text, "hip")
    return f"rocm {hip}" if hip else _assigned(text, "cuda")


def _assigned(source: str, name: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match[1] if match else ""

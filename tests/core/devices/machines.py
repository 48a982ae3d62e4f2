"""Inventories of machines with any GPUs, EGL order and versions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rl_ext_core.devices import EglDevice, Gpu, Inventory

VERSIONS = {
    "torch": "2.13.0",
    "torch.cuda": "12.6",
    "mujoco": "3.9.0",
    "robosuite": "1.5.1",
    "dm_control": "1.0.41",
    "gymnasium": "1.4.0",
}
GIB = 2**30


def uuid(number: int) -> str:
    """Return the UUID of GPU ``number``. Those of GPUs 0 and 1 have a common prefix."""
    head = ("aaaa0000", "aaaa1111", "bbbb2222", "cccc3333", "dddd4444", "eeee5555", "ffff6666", "0a0a7777")[number]
    return f"GPU-{head}-0000-4000-8000-{number:012d}"


def gpus(count: int = 4, *, mig: Mapping[int, Sequence[str]] | None = None) -> tuple[Gpu, ...]:
    """Return ``count`` H100 GPUs that differ only in index, address and free memory."""
    return tuple(
        Gpu(
            uuid=uuid(number),
            name="NVIDIA H100",
            pci=f"0000:{0x1A + 0x10 * number:02x}:00.0",
            index=number,
            memory_total=80 * GIB,
            memory_free=(80 - number) * GIB,
            mig=tuple((mig or {}).get(number, ())),
        )
        for number in range(count)
    )


def egl(order: Sequence[int], *, software: bool = True) -> tuple[EglDevice, ...]:
    """Create EGL's devices: the GPUs in this order, then Mesa's software device."""
    devices = [EglDevice(place, False, uuid(n), f"/dev/dri/renderD{128 + n}", True) for place, n in enumerate(order)]
    return (*devices, EglDevice(len(order), True)) if software else tuple(devices)


def machine(
    count: int = 4,
    *,
    order: Sequence[int] | None = None,
    fastest_first: Sequence[int] | None = None,
    software: bool = True,
    osmesa: bool = True,
    versions: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    mig: Mapping[int, Sequence[str]] | None = None,
) -> Inventory:
    """Create a machine with ``count`` GPUs. EGL and CUDA list them in nvidia-smi's order by default."""
    return Inventory(
        gpus=gpus(count, mig=mig),
        egl=egl(range(count) if order is None else order, software=software),
        fastest_first=tuple(uuid(n) for n in (range(count) if fastest_first is None else fastest_first)),
        versions={name: text for name, text in {**VERSIONS, **(versions or {})}.items() if name not in without},
        osmesa=osmesa,
        nvml_error=None if count else "no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)",
    )


def run_shell_line(line: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Apply a line of ``export`` and ``unset`` commands to variables, as a shell does."""
    variables = dict(environ)
    for command in line.split("; "):
        verb, *words = shlex.split(command)
        assert verb in ("export", "unset"), line
        for word in words:
            name, _, value = word.partition("=")
            variables.pop(name, None)
            if verb == "export":
                variables[name] = value
    return variables

"""Environments in Ray actors return the same as in processes of this machine."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError
from sb3_ext import RayVecEnv
from tests.environments import Counting
from tests.ray_scripts import run_ray_script

SCRIPT = Path(__file__).with_name("ray_checks.py")


@pytest.mark.slow
def test_ray_vec_env_passes_all_ray_checks() -> None:
    if find_spec("ray") is None and "CI" not in os.environ:
        pytest.skip("ray is not installed: pip install './rl-ext[ray]'")
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as root:
        lines = run_ray_script([str(SCRIPT), str(Path(root, "ray"))], Path(root), limit_s=800).splitlines()
    found: dict[str, str] = json.loads(lines[-1])
    assert len(found) > 8
    assert not any(found.values()), "\n".join(found.values())


def test_options_are_checked_before_ray_starts() -> None:
    with pytest.raises(InvalidArgumentError, match="n_workers=0"):
        RayVecEnv([Counting], n_workers=0)
    with pytest.raises(InvalidArgumentError, match="env_fns is empty"):
        RayVecEnv([])


def test_error_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r'rl-ext\[ray\]"'):
        RayVecEnv([Counting])

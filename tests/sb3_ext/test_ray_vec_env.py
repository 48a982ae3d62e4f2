from __future__ import annotations

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
        options = ["--noconftest", "-c", os.devnull, "--rootdir", root, "--basetemp", f"{root}/pytest"]
        options += ["-p", "no:cacheprovider", "-W", "error", "-W", "ignore::DeprecationWarning:ray"]
        run_ray_script(["-m", "pytest", *options, str(SCRIPT)], Path(root), limit_s=800)


def test_options_are_checked_before_ray_starts() -> None:
    with pytest.raises(InvalidArgumentError, match="n_workers=0"):
        RayVecEnv([Counting], n_workers=0)
    with pytest.raises(InvalidArgumentError, match="env_fns is empty"):
        RayVecEnv([])


def test_error_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r'rl-ext\[ray\]"'):
        RayVecEnv([Counting])

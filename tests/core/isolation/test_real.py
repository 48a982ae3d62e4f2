"""The verdicts on real environments: harmless ones, and libraries that are known for bearing a single instance."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rl_ext_core.isolation import Isolation, probe
from tests.core.devices.fakes.build import give_up
from tests.core.isolation.fmu import Decay, make_fmu
from tests.core.isolation.swmm import Tank


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        give_up(f"{module} is not installed")


def pong() -> gymnasium.Env[Any, Any]:
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5")


def airstriker() -> gymnasium.Env[Any, Any]:
    import stable_retro

    env: gymnasium.Env[Any, Any] = stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")
    return env


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize(
    "source",
    [
        "CartPole-v1",
        "HalfCheetah-v5",
        gymnasium.spec("FrozenLake-v1"),
        pytest.param(pong, marks=pytest.mark.slow),  # every seeded reset loads the game anew
    ],
)
def test_independent_ones(source: Any) -> None:
    verdict = probe(source, cache=False)
    assert verdict.isolation is Isolation.INDEPENDENT, verdict
    assert verdict.in_process
    assert (verdict.step_seconds or 0) > 1e-6
    assert (verdict.build_seconds or 0) > 1e-5
    assert verdict.private_bytes is None or 2**20 < verdict.private_bytes < 2**30


@pytest.mark.slow
def test_stable_retro_bears_one_emulator() -> None:
    needs("stable_retro")
    verdict = probe(airstriker, cache=False)
    assert verdict.isolation is Isolation.SINGLE_INSTANCE
    assert "building the second raises RuntimeError: Cannot create multiple emulator instances" in verdict.explanation
    assert any("_retro" in Path(library).name for library in verdict.libraries)


@pytest.mark.slow
def test_pyswmm_bears_one_simulation() -> None:
    needs("pyswmm")
    verdict = probe(Tank, cache=False)
    assert verdict.isolation is Isolation.SINGLE_INSTANCE
    assert "building the second raises MultiSimulationError" in verdict.explanation
    assert any("swmm" in Path(library).name for library in verdict.libraries)


def test_an_fmu_that_says_so_bears_one_instance(tmp_path: Path, compiler: str) -> None:
    needs("fmpy")
    fmu = make_fmu(tmp_path / "decay.fmu", compiler)
    verdict = probe(functools.partial(Decay, str(fmu)), cache=False)
    assert verdict.isolation is Isolation.SINGLE_INSTANCE
    assert verdict.declared_by == "environment"
    assert "canBeInstantiatedOnlyOncePerProcess" in verdict.explanation
    assert verdict.step_seconds is not None


@pytest.mark.slow
def test_an_fmu_that_does_not_say_so_is_tried(tmp_path: Path, compiler: str) -> None:
    needs("fmpy")
    fmu = make_fmu(tmp_path / "decay.fmu", compiler, flag="")
    # FMPy unpacks a copy of the library for each instance: they share nothing.
    assert probe(functools.partial(Decay, str(fmu)), cache=False).isolation is Isolation.INDEPENDENT

"""Device decisions of workers: their variables are there before anything reads them, also in fork servers."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import DeviceConflictError, InvalidArgumentError, WorkerError
from tests.core.devices.binding import EXPECTED, MACHINE, UNSET
from tests.core.devices.machines import machine
from tests.core.devices.reporting import NAMES, variables
from tests.torchrl_ext.parallel_checks import no_workers_left
from tests.torchrl_ext.parallel_environments import Looking, Well
from torchrl_ext import ParallelEnv

__all__ = ["no_workers_left"]

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of this process's own: robosuite makes some when it is imported, as by tests before these."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def on_gpus(inventory: Any = MACHINE, **options: Any) -> list[Decision]:
    options = {"render": "same", "renderer": "robosuite", "environ": {}, **options}
    return [resolve("auto", worker=number, inventory=inventory, **options) for number in range(3)]


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(
    ("form", "method"),
    [("class", "forkserver"), ("instance", "forkserver"), pytest.param("instance", "spawn", marks=slow)],
)
def test_each_worker_has_its_gpu_before_mujoco_is_imported(form: str, method: str) -> None:
    """Fork servers have imported mujoco, with TorchRL: it reads the backend at import, the number of the GPU later."""
    source: Any = Looking if form == "class" else Looking()
    env = ParallelEnv(3, source, devices=on_gpus(), mp_start_method=method)
    env.reset()
    at_construction, now, read_by_mujoco, device = zip(*env.seen(), strict=True)
    env.close()
    assert list(now) == EXPECTED
    assert list(at_construction) == (EXPECTED if source is Looking else [UNSET] * 3)
    assert read_by_mujoco == ("egl",) * 3
    assert device == (("cuda:0", "cuda:1", "cuda:2") if source is Looking else ("none",) * 3)
    assert variables() == UNSET


def test_forked_workers_refuse_what_comes_too_late() -> None:
    """This process has imported mujoco, and so have its forks."""
    with pytest.raises(WorkerError, match="DeviceConflictError") as caught:
        ParallelEnv(3, Looking(), devices=on_gpus(renderer="mujoco"), mp_start_method="fork")
    assert isinstance(caught.value.__cause__, DeviceConflictError)


def test_round_robin_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renderer's rule is known by the instance."""
    asked = []

    def resolve_there(*args: Any, **kwargs: Any) -> Decision:
        asked.append(kwargs)
        return resolve(*args, **kwargs, inventory=machine(2), environ={})

    monkeypatch.setattr("rl_ext_core.factory.factory.resolve", resolve_there)
    env = ParallelEnv(3, Looking, devices="round-robin")
    env.reset()
    assert [device for *_, device in env.seen()] == ["cuda:0", "cuda:1", "cuda:0"]
    env.close()
    asked.clear()
    with pytest.raises(InvalidArgumentError):  # what comes after the decisions
        ParallelEnv(3, gymnasium.make("HalfCheetah-v5"), devices="round-robin", verify=False, create_env_kwargs=[])
    assert [(options["worker"], options["render"], options["renderer"]) for options in asked] == [
        (worker, "same", "gymnasium") for worker in range(3)
    ]


@slow
def test_workers_render_with_mesa() -> None:
    env = gymnasium.make("HalfCheetah-v5", render_mode="rgb_array", width=32, height=32)
    decision = resolve("cpu", render="same", renderer="gymnasium")
    parallel = ParallelEnv(2, env, devices=decision)
    parallel.reset()
    assert [image.shape for image in parallel.render()] == [(32, 32, 3)] * 2
    parallel.close()


@pytest.mark.parametrize("devices", ["slowest", [3, 4], 7])
def test_what_is_no_decision(devices: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"(?s)devices=.*resolve\("):
        ParallelEnv(2, Well, devices=devices)

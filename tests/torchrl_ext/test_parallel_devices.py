from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import pytest

from rl_ext_core.devices import Decision, resolve
from rl_ext_core.errors import DeviceConflictError, WorkerError
from tests.core.devices.machines import machine
from tests.core.devices.run_code import run
from tests.torchrl_ext.parallel_environments import DEVICE_VARIABLES, DeviceReporting, variables
from tests.worker_servers import cold_server
from torchrl_ext import ParallelEnv

pytestmark = pytest.mark.usefixtures("no_workers_left")


MACHINE = machine(4, order=(2, 0, 3, 1))
# The variables of GPUs 0, 1 and 2, which workers can only have from the decision.
EXPECTED = [["egl", "1", "egl"], ["egl", "3", "egl"], ["egl", "0", "egl"]]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_device_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this process's device variables, which importing robosuite in earlier tests sets."""
    for name in DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def gpu_decisions(inventory: Any = MACHINE, **options: Any) -> list[Decision]:
    options = {"render": "same", "renderer": "robosuite", "environ": {}, **options}
    return [resolve("auto", worker=number, inventory=inventory, **options) for number in range(3)]


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize(
    ("form", "method"),
    [("class", "forkserver"), ("instance", "forkserver"), pytest.param("instance", "spawn", marks=slow)],
)
def test_each_worker_has_its_gpu_before_mujoco_is_imported(form: str, method: str) -> None:
    """Fork servers import mujoco with TorchRL; it reads its backend then, and the GPU later."""
    source: Any = DeviceReporting if form == "class" else DeviceReporting()
    with cold_server():
        env = ParallelEnv(3, source, devices=gpu_decisions(), mp_start_method=method)
        env.reset()
        at_construction, now, read_by_mujoco, device = zip(*env.device_settings(), strict=True)
        env.close()
    assert list(now) == EXPECTED
    assert list(at_construction) == EXPECTED  # copies are made in their workers
    assert read_by_mujoco == ("egl",) * 3
    assert device == (("cuda:0", "cuda:1", "cuda:2") if source is DeviceReporting else ("none",) * 3)
    assert variables() == [None, None, None]


def test_forked_workers_reject_decisions_after_mujoco_is_imported() -> None:
    """This process has imported mujoco, so its forks have too."""
    with pytest.raises(WorkerError, match="DeviceConflictError") as caught:
        ParallelEnv(3, DeviceReporting(), devices=gpu_decisions(renderer="mujoco"), mp_start_method="fork")
    assert isinstance(caught.value.__cause__, DeviceConflictError)


def test_round_robin_devices_cycle_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance also determines the renderer."""
    resolve_on_two_gpus = mock.Mock(side_effect=functools.partial(resolve, inventory=machine(2), environ={}))
    monkeypatch.setattr("rl_ext_core.factory.factory.resolve", resolve_on_two_gpus)
    env = ParallelEnv(3, DeviceReporting, devices="round-robin")
    env.reset()
    assert [device for *_, device in env.device_settings()] == ["cuda:0", "cuda:1", "cuda:0"]
    env.close()
    resolve_on_two_gpus.reset_mock()
    ParallelEnv(3, gymnasium.make("HalfCheetah-v5"), devices="round-robin", verify=False).close(raise_if_closed=False)
    asked = [call.kwargs for call in resolve_on_two_gpus.call_args_list]
    assert [options["worker"] for options in asked] == [0, 1, 2]
    assert {(options["render"], options["renderer"]) for options in asked} == {("same", "gymnasium")}


TORCHRL = """
import gymnasium, json
from torchrl.envs import GymWrapper, ParallelEnv
from rl_ext_core.factory import as_factory
def build():
    with open("called", "a") as file:
        file.write(json.dumps(variables()) + "\\n")
    return GymWrapper(gymnasium.make("CartPole-v1"), device="cpu")
options = dict(render="same", inventory=machine(4, order=(2, 0, 3, 1)), environ={})
factories = as_factory(build).for_workers(3, devices=[resolve("auto", worker=i, **options) for i in range(3)])
env = ParallelEnv(3, factories, mp_start_method="fork", metadata_from_workers=True, use_buffers=False)
env.close(raise_if_closed=False)
answer = sorted(json.loads(line) for line in open("called"))
"""


@pytest.mark.slow
def test_mujoco_renderer_needs_apply_before_importing_torchrl(tmp_path: Path) -> None:
    # Importing TorchRL imports mujoco, which reads MUJOCO_GL at import.
    ended = run(f"os.chdir({str(tmp_path)!r})", TORCHRL)
    assert "call resolve(...).apply() above `import torchrl`, which imports mujoco, in the script" in ended.stderr
    applied = "resolve('cpu', render='same').apply()"
    assert run(f"os.chdir({str(tmp_path)!r})", applied, TORCHRL).answer == sorted(EXPECTED)

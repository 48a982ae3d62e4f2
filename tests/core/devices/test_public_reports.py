"""Machines and variables of public bug reports, rebuilt with the fake drivers: what is found, and what cures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from rl_ext_core.devices import Inventory, check_environment, resolve
from rl_ext_core.devices.program import plan_program
from rl_ext_core.errors import DeviceUnavailableError
from tests.core.devices.fakes import build
from tests.core.devices.machines import VERSIONS, uuid

MASK, INDEX, RANK, EGL = "CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "LOCAL_RANK", {"MUJOCO_GL": "egl"}
# EGL index 2 is GPU 0, and EGL index 3 is GPU 5, as measured in google-deepmind/mujoco#3245 on seven RTX 3090.
SEVEN = {"gpus": 7, "egl_order": (2, 1, 0, 5, 6, 3, 4, -1)}


def read_machine(drivers: build.Drivers, settings: Mapping[str, object], *packages: str) -> Inventory:
    """Read a machine from its drivers, on which torch and these packages are installed."""
    found = drivers.inventory(build.configuration(**settings))  # type: ignore[arg-type]
    versions = {name: text for name, text in VERSIONS.items() if name.split(".")[0] in ("torch", *packages)}
    return dataclasses.replace(found, versions=versions)


@pytest.mark.parametrize(("gpu", "renders_on"), [(2, 0), (3, 5), (0, 2), (1, 1)])
def test_mask_read_as_egl_index(gpu: int, renders_on: int, drivers: build.Drivers) -> None:
    """google-deepmind/mujoco#3245, ARISE-Initiative/robosuite#692: the mask selects another GPU for rendering."""
    there = read_machine(drivers, SEVEN, "mujoco", "robosuite")
    environ = {**EGL, MASK: str(gpu)}
    effects = [found.effect for found in check_environment(environ, inventory=there) if "robosuite" in found.effect]
    assert [f"(nvidia-smi {renders_on})" in effect for effect in effects] == [True] * (gpu != renders_on)
    plan = plan_program(("python", "eval.py"), there, EGL, gpu=str(gpu))
    assert plan.decision.render_gpu == plan.decision.gpu == there.gpus[gpu]
    assert check_environment(plan.environment(EGL), inventory=there) == ()


@pytest.mark.parametrize("rank", range(8))
def test_all_ranks_render_on_egl_device_0(rank: int, drivers: build.Drivers) -> None:
    """TensorAuto/OpenTau#402: without an index, the ranks share a GPU; the rank itself is not the index."""
    order = (3, 2, 1, 0, 7, 6, 5, 4, -1)
    there = read_machine(drivers, {"gpus": 8, "egl_order": order}, "mujoco")
    for environ in ({**EGL, RANK: str(rank)}, {**EGL, RANK: str(rank), INDEX: str(rank)}):
        found = check_environment(environ, inventory=there)
        assert [f"while cuda:{rank}" in entry.effect for entry in found] == [True] * (
            order[int(environ.get(INDEX, 0))] != rank
        )
    plan = plan_program(("python", "train.py"), there, {RANK: str(rank)}, per_rank=True)
    assert plan.variables[INDEX] == str(order.index(rank))
    assert MASK not in plan.variables


def test_egl_lacks_the_gpus_of_other_ranks(drivers: build.Drivers) -> None:
    """GuanxingLu/vlarl#16, TensorAuto/OpenTau#404: EGL lists one device of eight."""
    there = read_machine(drivers, {"gpus": 8, "egl_order": (0,)}, "mujoco", "robosuite")
    unlisted, failing = check_environment({**EGL, MASK: "7"}, inventory=there)
    assert f"EGL does not list NVIDIA H100 {uuid(7)}" in unlisted.effect
    assert "between 0 and 0 (inclusive), got 7" in failing.effect
    with pytest.raises(DeviceUnavailableError, match=f"EGL lists other GPUs, but not {uuid(7)}"):
        resolve("cuda:0", render="same", renderer="robosuite", inventory=there, environ={MASK: "7"})
    # The index 0 of the answer to the report fails the import check under this mask, and the decision's mask does not.
    found = check_environment({**EGL, MASK: "7", INDEX: "0"}, inventory=there)
    assert any("AssertionError" in entry.effect for entry in found)
    decision = resolve("cuda:0", render="egl:0", renderer="robosuite", inventory=there, environ={MASK: "7"})
    assert (decision.variables[MASK], decision.gpu) == ("7,-1,0", there.gpus[7])


def test_more_ranks_than_gpus(drivers: build.Drivers) -> None:
    """pytorch/torchtitan#423: "CUDA error: invalid device ordinal"."""
    there = read_machine(drivers, {"gpus": 4})
    (found,) = check_environment({RANK: "7", "GROUP_RANK": "0"}, inventory=there)
    assert (found.variable, found.fix) == (RANK, "torchrun --nproc-per-node=4 train.py")
    assert "invalid device ordinal" in found.effect


def test_unequal_gpus_are_counted_by_speed(drivers: build.Drivers) -> None:
    """gpustack/gpustack#6041, NVIDIA/DIGITS#1358: number 0 is another GPU than nvidia-smi's 0."""
    settings = {"gpus": 2, "names": "RTX 3060,RTX 4090", "fastest_first": (1, 0)}
    there = read_machine(drivers, settings)
    (found,) = check_environment({MASK: "0"}, inventory=there)
    assert found.fix == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert f"number 0 is RTX 4090 {uuid(1)} (nvidia-smi 1)" in found.effect
    assert plan_program(("python",), there, {}, gpu="0").decision.gpu == there.gpus[1]


def test_index_that_dm_control_does_not_read(drivers: build.Drivers) -> None:
    """google-deepmind/dm_control#345."""
    there = read_machine(drivers, {"gpus": 4}, "mujoco", "dm_control")
    found = check_environment({**EGL, MASK: "2", "EGL_DEVICE_ID": "2"}, inventory=there)
    assert [(entry.variable, entry.fix) for entry in found] == [("EGL_DEVICE_ID", f"export {INDEX}=2")]

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_ext_core import devices
from rl_ext_core.devices import Decision, EglDevice, Inventory, check_environment, cuda, decide
from rl_ext_core.errors import (
    DeviceConflictError,
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    RlExtError,
)
from tests.core.devices.machines import GIB, egl, machine, uuid

MASK, ORDER, INDEX, BACKEND = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUJOCO_EGL_DEVICE_ID", "MUJOCO_GL"
RANK, TASK = "LOCAL_RANK", "SLURM_LOCALID"
OMPI, HYDRA = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"
MPI = (OMPI, "MV2_COMM_WORLD_LOCAL_RANK", HYDRA, "PMI_LOCAL_RANK")
TORCHRUN = {"GROUP_RANK": "0"}
SLICE, OTHER_SLICE = "MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"

FOUR = machine(4, order=(2, 3, 0, 1))
NONE = machine(0)
DIFFERENT_GPUS = machine(3, fastest_first=(2, 0, 1))
UNKNOWN_ORDER = dataclasses.replace(DIFFERENT_GPUS, fastest_first=None)
WITH_MIG = machine(3, mig={1: [SLICE, OTHER_SLICE]})
CPU_BUILD = machine(4, versions={"torch": "2.13.0+cpu", "torch.cuda": ""})
NO_TORCH = machine(2, without=("torch", "torch.cuda"))
MUJOCO_4 = machine(4, order=(2, 3, 0, 1), versions={"mujoco": "4.0.0"})
NO_NVIDIA_EGL = dataclasses.replace(FOUR, egl=egl(()))
NO_EGL = dataclasses.replace(FOUR, egl=(), osmesa=False, egl_error="libEGL.so.1 is not installed")
ONLY_OSMESA = dataclasses.replace(NO_EGL, osmesa=True)
EGL_LACKS_ONE = dataclasses.replace(FOUR, egl=egl((2, 3, 0)))
WITH_INTEGRATED = dataclasses.replace(FOUR, egl=(*(FOUR.egl or ()), EglDevice(5, False, None, "/dev/dri/renderD140")))
FREE = dataclasses.replace(FOUR, gpus=tuple(dataclasses.replace(g, memory_free=g.index * GIB) for g in FOUR.gpus))
# Three devices of Mesa come before the GPUs. The last GPU is the eleventh device, and renderers query ten.
_BEFORE = tuple(EglDevice(place, software=True) for place in range(3))
_BEHIND = tuple(dataclasses.replace(device, index=device.index + 3) for device in egl(range(8), software=False))
CROWDED = dataclasses.replace(machine(8), egl=_BEFORE + _BEHIND)
# Vulkan does not depend on EGL: SAPIEN also renders on a machine whose EGL fails.
SAPIEN = dataclasses.replace(machine(4, versions={"sapien": "3.0.3"}), egl=(), egl_error="no libEGL")
FAR = dataclasses.replace(SAPIEN, gpus=tuple(dataclasses.replace(g, pci=f"0001:{g.pci[5:]}") for g in machine(4).gpus))
# Without renderers, findings are about CUDA only.
_RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
BARE_ONE, BARE_FOUR = (machine(count, without=_RENDERERS) for count in (1, 4))
BARE_MIG = machine(2, mig={0: [SLICE, OTHER_SLICE]}, without=_RENDERERS)

Decided = tuple[Inventory, dict[str, str], dict[str, Any], str, int | None, Any, str]
Refused = tuple[Inventory, dict[str, str], dict[str, Any], type[RlExtError], str, str]


def expect_gpu(
    gpu: int, ordinal: int, there: Inventory, environ: Any = None, *, renders: Any = None, says: str = "", **ask: Any
) -> Decided:
    """Create a case that decides on a GPU by its indices in nvidia-smi and torch.

    :param renders: index of the EGL device, variables, name of the rendering device, or None
    """
    return there, environ or {}, ask, f"cuda:{ordinal}", gpu, renders, says


def expect_cpu(there: Inventory, environ: Any = None, *, renders: Any = None, says: str = "", **ask: Any) -> Decided:
    return there, environ or {}, ask, "cpu", None, renders, says


def expect_error(
    error: type[RlExtError], says: str, fix: str, there: Inventory, environ: Any = None, **ask: Any
) -> Refused:
    return there, environ or {}, ask, error, says, fix


UNAVAILABLE, WRONG, TYPE, MISSING = (
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
)
SAME = {"render": "same"}
# fmt: off
# Ranks of launchers, from public bug reports.
RANKS: list[Decided] = [
    # Slurm shows a GPU to each task (ignite#3843, ignite#3259).
    expect_gpu(0, 0, BARE_ONE, {TASK: "3", MASK: "0"},
        says=f"{TASK}='3', and {MASK}='0' shows this process one GPU of its own"),
    expect_gpu(3, 0, BARE_FOUR, {TASK: "3", MASK: "3"}, says="one GPU of its own"),
    expect_gpu(0, 0, BARE_ONE, {TASK: "3", RANK: "3", MASK: "0"}, says=f"{RANK}='3', and {MASK}='0'"),
    expect_gpu(3, 3, BARE_FOUR, {TASK: "3", MASK: "0,1,2,3"}, says="place on this machine"),
    # MPI, and nested launchers.
    *(expect_gpu(2, 2, BARE_FOUR, {name: "2"}, says=f"{name}='2'") for name in MPI),
    expect_gpu(3, 3, BARE_FOUR, {OMPI: "3", TASK: "0"}, says=f"{OMPI}='3'"),
    # Ray Train sets the mask of each worker, and so does torchrun --virtual-local-rank.
    expect_gpu(2, 0, BARE_FOUR, {RANK: "2", MASK: "2", "RAY_JOB_ID": "01"}, says="one GPU"),
    expect_gpu(3, 2, BARE_FOUR, {RANK: "2", MASK: "1,2,3", "RAY_JOB_ID": "01"}, says="place on this machine"),
    expect_gpu(2, 0, BARE_FOUR, {RANK: "0", MASK: "2", **TORCHRUN}, says="place on this machine"),
    # A MIG slice for each process.
    expect_gpu(0, 0, BARE_MIG, {RANK: "0", MASK: OTHER_SLICE}, says="place on this machine"),
    expect_gpu(0, 0, BARE_MIG, {TASK: "1", MASK: OTHER_SLICE}, says="one GPU of its own"),
]
RANKS_TOO_HIGH: list[Refused] = [
    expect_error(UNAVAILABLE, "sees 4 GPUs", "srun --ntasks-per-node=4", BARE_FOUR, {TASK: "6", MASK: "0,1,2,3"}),
    expect_error(UNAVAILABLE, 'device="cuda:0"', "srun --ntasks-per-node=2", BARE_FOUR, {TASK: "2", MASK: "2,3"}),
    expect_error(UNAVAILABLE, f"{RANK}='3'", "torchrun", BARE_ONE, {TASK: "0", RANK: "3", MASK: "0"}),
    expect_error(UNAVAILABLE, f"{RANK}='3'", "torchrun", BARE_ONE, {TASK: "3", RANK: "3", MASK: "0", **TORCHRUN}),
    # pytorch/torchtitan#423
    expect_error(UNAVAILABLE, f"{RANK}='7' asks for cuda:7", "torchrun --nproc-per-node=4", BARE_FOUR,
        {RANK: "7", **TORCHRUN}),
    expect_error(UNAVAILABLE, f"{MASK}='1'", "--nproc-per-node=1", BARE_FOUR, {RANK: "1", MASK: "1", **TORCHRUN}),
    expect_error(UNAVAILABLE, f"{OMPI}='4'", "mpirun --map-by ppr:4:node", BARE_FOUR, {OMPI: "4"}),
    expect_error(UNAVAILABLE, f"{HYDRA}='5'", "mpiexec -ppn 4", BARE_FOUR, {HYDRA: "5"}),
    expect_error(UNAVAILABLE, "sees 1 GPU", "torchrun --nproc-per-node=1", BARE_MIG,
        {RANK: "1", MASK: f"{SLICE},{OTHER_SLICE}"}),
]
# nvidia-smi's index of a GPU that a mask moves, as device and as rendering device.
MOVED = (("device", 6), ("device", "cuda:6"), ("render", "cuda:6"))
DECIDED: list[Decided] = [
    expect_gpu(0, 0, FOUR, says="auto: cuda:0, because it is the first of 4 visible"),
    expect_gpu(0, 0, machine(1), says="the only one visible"),
    expect_cpu(NONE, says="no NVIDIA driver"),
    # Every form of a device finds its GPU under a mask.
    expect_gpu(3, 0, FOUR, {MASK: "3,1,2"}, device="cuda"),
    expect_gpu(2, 2, FOUR, {MASK: "3,1,2"}, device=2),
    expect_gpu(1, 1, FOUR, {MASK: "3,1,2"}, device=torch.device("cuda", 1)),
    expect_gpu(1, 1, FOUR, {MASK: "3,1,2"}, device="GPU-AAAA1"),
    expect_gpu(3, 0, FOUR, {MASK: "3,1,2"}, device="nvidia-smi:3"),
    expect_gpu(2, 2, FOUR, {MASK: "3,1,2"}, device="pci:00000000:3A:00.0"),
    expect_gpu(1, 1, FOUR, {MASK: "3,1,2"}, device="pci:2a:00.0"),
    expect_cpu(NONE, device="cuda", on_missing="cpu", says="in place of cuda"),
    expect_cpu(CPU_BUILD, device=0, on_missing="cpu", says="on_missing"),
    # Entries of the mask without effect cause a warning.
    expect_gpu(1, 0, FOUR, {MASK: "1,9,2"}, says="stops reading at '9'"),
    expect_cpu(FOUR, {MASK: "NoDevFiles"}, says="'NoDevFiles'"),
    # CUDA's device order.
    expect_gpu(2, 0, DIFFERENT_GPUS, device="nvidia-smi:2"),
    expect_gpu(0, 0, DIFFERENT_GPUS, {ORDER: "PCI_BUS_ID"}),
    expect_gpu(2, 0, DIFFERENT_GPUS, {ORDER: "pci_bus_id"}),  # CUDA ignores it in lower case
    expect_gpu(1, 1, UNKNOWN_ORDER, {ORDER: "PCI_BUS_ID"}, device="cuda:1"),
    # Launchers.
    expect_gpu(1, 1, FOUR, {RANK: "1", MASK: "3,1"}),
    expect_cpu(NONE, {RANK: "3"}),
    expect_gpu(0, 0, FOUR, {RANK: "3"}, device="cuda"),  # a named device does not depend on ranks
    expect_cpu(FOUR, {MASK: "", "RAY_JOB_ID": "1"}, says=f"{MASK}=''"),
    expect_gpu(0, 0, FOUR, {RANK: "3"}, rank=0),
    expect_gpu(1, 1, FOUR, {RANK: "3"}, rank=1),
    expect_gpu(3, 1, FOUR, {MASK: "1,3"}, worker=5),
    expect_gpu(3, 3, FREE, pick="free-memory", says="3.0 GiB"),
    expect_gpu(2, 1, FREE, {MASK: "1,2,0"}, pick="free-memory"),
    # MIG slices.
    expect_gpu(1, 0, WITH_MIG, {MASK: SLICE}, render="cpu", renders=3),
    # Builds of torch.
    expect_cpu(CPU_BUILD, says="torch 2.13.0+cpu is built without CUDA"),
    expect_cpu(CPU_BUILD, render="cuda:1", renders=1),
    expect_cpu(CPU_BUILD, **SAME, renders=4, says="because that is"),
    expect_gpu(1, 1, NO_TORCH, device="cuda:1"),
    expect_cpu(NO_TORCH, device="cpu", render="nvidia-smi:1", renders=1),
    # Rendering.
    expect_gpu(1, 1, FOUR, device="cuda:1", renders={}),
    expect_gpu(1, 1, FOUR, {MASK: "3,1"}, device="cuda:1", **SAME, renders={BACKEND: "egl",
        "PYOPENGL_PLATFORM": "egl", INDEX: "3"}),
    expect_gpu(0, 0, FOUR, {MASK: "0"}, **SAME, renderer="robosuite", renders={INDEX: "2"}),
    expect_gpu(3, 3, FOUR, {RANK: "3"}, **SAME, renderer="gymnasium", renders=1),
    expect_gpu(1, 1, MUJOCO_4, {MASK: "3,1"}, device="cuda:1", **SAME, renders={INDEX: "1"}),
    expect_gpu(0, 0, FOUR, {INDEX: "77", BACKEND: "glfw"}, **SAME, renders={INDEX: "2", BACKEND: "egl"}),
    expect_cpu(NONE, **SAME, renders=0),
    expect_gpu(0, 0, FOUR, render="cuda:1", renders=3),
    expect_gpu(0, 0, FOUR, render="GPU-bbbb", renders=0),
    expect_gpu(1, 0, FOUR, {MASK: "1"}, render="nvidia-smi:0", renders=2),  # the mask hides it
    expect_cpu(FOUR, device="cpu", render="auto", worker=5, renders=3),
    expect_gpu(0, 0, FOUR, render="egl:3", renders=3),
    expect_gpu(0, 0, WITH_INTEGRATED, render="egl:5", renders=5),
    expect_gpu(0, 0, FOUR, render="cpu", renders={INDEX: "4"}),
    expect_gpu(0, 0, ONLY_OSMESA, render="cpu", renders={BACKEND: "osmesa", INDEX: None}),
    expect_gpu(6, 6, CROWDED, device=6, **SAME, renders=9),
    expect_gpu(1, 1, NO_NVIDIA_EGL, device="cuda:1", **SAME, on_missing="cpu", renders=0, says="10_nvidia.json"),
    expect_cpu(FOUR, device="cuda:9", on_missing="cpu", **SAME, renders=4, says="on_missing: device='cuda:9'"),
    # SAPIEN gets a name, LIBERO renders with robosuite.
    expect_gpu(1, 1, SAPIEN, {MASK: "3,1"}, device="cuda:1", **SAME, renderer="mani_skill", renders="cuda:1"),
    expect_gpu(1, 0, SAPIEN, {MASK: "1"}, render="nvidia-smi:3", renderer="sapien", renders="pci:4a:00.0"),
    expect_gpu(1, 0, FAR, {MASK: "1"}, render="nvidia-smi:3", renderer="sapien", renders="pci:0001:4a:00.0"),
    expect_gpu(0, 0, FOUR, {MASK: "0"}, **SAME, renderer="libero", renders={INDEX: "2"}),
    *RANKS,
]
REFUSED: list[Refused] = [
    expect_error(UNAVAILABLE, "'cuda:4'", 'device="cuda:3"', FOUR, device="cuda:4"),
    *(expect_error(UNAVAILABLE, repr(str(asked)), 'Use device="cpu"', NONE, device=asked)
      for asked in ("cuda", 0, torch.device("cuda:0"), "nvidia-smi:0", "GPU-aa")),
    expect_error(UNAVAILABLE, "GPU-0123", f'device="{uuid(0)}"', FOUR, device="GPU-0123"),
    expect_error(WRONG, "'GPU-aaaa' fits 2", f'device="{uuid(0)}"', FOUR, device="GPU-aaaa"),
    expect_error(UNAVAILABLE, "pci:ff:00.0", "pci:0000:1a", FOUR, device="pci:ff:00.0"),
    expect_error(WRONG, "cuda:1000000000000", 'device="auto"', FOUR, device=10**12),
    *(expect_error(WRONG, repr(str(asked)), 'Use device="auto"', FOUR, device=asked)
      for asked in ("", "CPU", "cuda:-1", "cuda: 1", "'cuda:0'", "cuda:¹", "1", torch.device("meta"), "same", "egl:0")),
    *(expect_error(TYPE, repr(asked), 'Use device="auto"', FOUR, device=asked)
      for asked in (-1, True, None, b"cpu", 1.0, ["cpu"])),
    expect_error(UNAVAILABLE, f"{MASK}='1'", f"export {MASK}={uuid(0)}", FOUR, {MASK: "1"}, device=uuid(0)),
    expect_error(UNAVAILABLE, "'NoDevFiles'", 'device="auto"', FOUR, {MASK: "NoDevFiles"}, device="cuda"),
    expect_error(UNAVAILABLE, f"{ORDER}=None", f"export {ORDER}=PCI_BUS_ID", UNKNOWN_ORDER),
    *(expect_error(WRONG, f"LOCAL_RANK={rank!r}", "unset LOCAL_RANK", FOUR, {RANK: rank})
      for rank in ("one", "", "-1", "²")),
    expect_error(UNAVAILABLE, "rank=8", "--nproc-per-node=4", FOUR, rank=8),
    expect_error(TYPE, "rank='1'", "rank=0", FOUR, rank="1"),
    expect_error(WRONG, "worker=-1", "worker=0", FOUR, worker=-1),
    expect_error(WRONG, "pick='memory'", 'pick="rank"', FOUR, pick="memory"),
    expect_error(WRONG, "on_missing='gpu'", 'on_missing="error"', FOUR, device="cuda:9", on_missing="gpu"),
    expect_error(UNAVAILABLE, f"{MASK}='{SLICE}'", f"export {MASK}={uuid(0)}", WITH_MIG, {MASK: SLICE},
        device="nvidia-smi:0"),
    expect_error(UNAVAILABLE, "does not show next to", f"export {MASK}={uuid(2)}", WITH_MIG, device="nvidia-smi:2"),
    expect_error(UNAVAILABLE, SLICE, 'render="cpu"', WITH_MIG, {MASK: SLICE}, **SAME),
    expect_error(UNAVAILABLE, "'cuda:1'", 'device="cpu"', CPU_BUILD, device="cuda:1"),
    expect_error(UNAVAILABLE, "'egl:9'", 'render="same"', FOUR, render="egl:9"),
    expect_error(UNAVAILABLE, "'cuda:0'", 'render="cpu"', NONE, device="cpu", render="cuda:0"),
    expect_error(UNAVAILABLE, f"{MASK}=''", 'render="cpu"', FOUR, {MASK: ""}, device="cpu", render="cuda"),
    expect_error(UNAVAILABLE, "render='same': mujoco 3.9.0 asks", "NVIDIA_VISIBLE_DEVICES", CROWDED, device="cuda:7",
        **SAME),
    expect_error(UNAVAILABLE, f"{uuid(0)}", "NVIDIA_DRIVER_CAPABILITIES=all", NO_NVIDIA_EGL, **SAME),
    expect_error(UNAVAILABLE, "libEGL.so.1 is not installed", 'render="cpu"', NO_EGL, **SAME),
    expect_error(UNAVAILABLE, uuid(1), 'render="cpu"', EGL_LACKS_ONE, device="cuda:1", **SAME),
    expect_error(UNAVAILABLE, "render='cpu'", "apt-get install", NO_EGL, render="cpu", on_missing="cpu"),
    expect_error(MISSING, "renderer='mujoco'", "pip install", machine(1, without=("mujoco",)), **SAME),
    expect_error(MISSING, "renderer='robosuite'", 'rl-ext[robosuite]"', machine(1, without=("robosuite",)), **SAME,
        renderer="robosuite"),
    expect_error(MISSING, "'mujoco'", "pip install", machine(1, without=("mujoco",)), render="cpu",
        renderer="gymnasium"),
    expect_error(WRONG, "renderer='pyrender'", 'renderer="mujoco"', FOUR, renderer="pyrender"),
    expect_error(WRONG, "render='yes'", 'render="same"', FOUR, render="yes"),
    expect_error(TYPE, "render=None", 'render="none"', FOUR, render=None),
    expect_error(UNAVAILABLE, "sapien 3.0.3 renders on GPUs only", "", SAPIEN, device="cpu", **SAME, renderer="sapien"),
    expect_error(UNAVAILABLE, "sapien 3.0.3 does not render through EGL", "", SAPIEN, render="egl:0",
        renderer="sapien"),
    expect_error(UNAVAILABLE, "MIG slices", "do not render", WITH_MIG, {MASK: "0"}, render="egl:1"),
    *(expect_error(UNAVAILABLE, f"{name}={asked!r} is not visible: expected cuda:0 to cuda:3",
        f'Use {name}="nvidia-smi:6" (nvidia-smi:6 -> cuda:2)', machine(8), {MASK: "4,5,6,7"}, **{name: asked})
      for name, asked in MOVED),
    *(expect_error(UNAVAILABLE, "", f'Use {name}="cuda:1", or {name}="auto"', machine(8), {MASK: "4,5"},
        **{name: asked}) for name, asked in MOVED),
    *RANKS_TOO_HIGH,
]
# fmt: on


@pytest.fixture(autouse=True)
def clear_logged_sentences() -> None:
    decide._log_once.cache_clear()


def resolve(device: Any = "auto", *, inventory: Inventory = FOUR, environ: Any = None, **options: Any) -> Decision:
    return devices.resolve(device, inventory=inventory, environ=environ or {}, **options)


@pytest.mark.parametrize(("there", "environ", "ask", "device", "gpu", "renders", "says"), DECIDED)
def test_resolve_returns_expected_decision(
    there: Inventory,
    environ: dict[str, str],
    ask: dict[str, Any],
    device: str,
    gpu: int | None,
    renders: Any,
    says: str,
) -> None:
    before = dict(environ)
    decision = resolve(inventory=there, environ=environ, **ask)
    assert environ == before
    assert decision.device == device
    assert (decision.gpu.index if decision.gpu else None) == gpu
    assert says in " ".join((decision.reason, *decision.warnings))
    if there in (BARE_ONE, BARE_FOUR, BARE_MIG):
        assert decision.warnings == ()
        assert not [found for found in check_environment(environ, inventory=there) if found.severity == "error"]
    assert pickle.loads(pickle.dumps(decision)) == decision
    if isinstance(renders, dict):
        assert renders.items() <= decision.variables.items()
        assert bool(renders) == bool(decision.variables)
    elif isinstance(renders, str):
        assert (decision.render_device, decision.variables) == (renders, {})
        assert f"pass     {renders!r} as the device to render on" in decision.explain()
    else:
        assert (decision.egl.index if decision.egl else None) == renders
    if ask.get("render") == "same" and gpu is not None and "on_missing" not in ask:
        assert decision.render_gpu == decision.gpu


@pytest.mark.parametrize(("there", "environ", "ask", "error", "says", "fix"), REFUSED)
def test_resolve_raises_with_value_and_fix(
    there: Inventory, environ: dict[str, str], ask: dict[str, Any], error: type[RlExtError], says: str, fix: str
) -> None:
    with pytest.raises(RlExtError) as caught:
        resolve(inventory=there, environ=environ, **ask)
    text = str(caught.value)
    assert type(caught.value) is error
    assert says in text
    assert fix in text
    assert len(re.findall(r"[^.\s]\.\s+[A-Z]", text)) <= 1, f"more than two sentences: {text}"
    if there in (BARE_ONE, BARE_FOUR, BARE_MIG):
        (found,) = (found for found in check_environment(environ, inventory=there) if found.severity == "error")
        assert found.variable == next(name for name in (RANK, *MPI, TASK) if name in environ)
        assert found.fix.split(" train.py")[0] in text


def test_resolve_cpu_does_not_read_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inventory, "current", lambda **_: pytest.fail("not needed"))
    assert devices.resolve("cpu").device == "cpu"
    assert devices.resolve_device("cpu") == torch.device("cpu")


def test_auto_logs_fallback_to_cpu_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rl_ext_core.devices"):
        assert resolve().compute == torch.device("cuda:0")
        decisions = [resolve(inventory=NONE) for _ in range(3)]
    assert {decision.compute for decision in decisions} == {torch.device("cpu")}
    assert [record.getMessage() for record in caplog.records] == [decisions[0].reason]


def test_resolve_works_without_torch_but_compute_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    decision = resolve("cuda:1", inventory=NO_TORCH, render="same")
    with pytest.raises(MissingDependencyError, match=r'rl-ext\[sb3\]"'):
        _ = decision.compute


def test_resolve_respects_devices_that_torch_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    monkeypatch.setattr(cuda, "torch_current_device", lambda: 2)
    assert resolve("auto").device == resolve("cuda").device == "cuda:2"
    monkeypatch.undo()
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    monkeypatch.setattr(cuda, "_uuids_seen_by_torch", lambda: (uuid(0), uuid(1)))
    assert devices.resolve("auto", environ={MASK: "0,1"}).device == "cuda:0"
    with pytest.raises(DeviceConflictError, match=r"CUDA_VISIBLE_DEVICES='1'.*before the program starts"):
        devices.resolve("auto", environ={MASK: "1"})


def test_decision_is_explained_serialized_and_frozen() -> None:
    environ = {MASK: "3,1,9", RANK: "1"}
    decision = resolve(render="same", renderer="robosuite", environ=environ)
    text = decision.explain()
    for part in (
        *("cuda:1", uuid(1), "nvidia-smi 1", "PCI 0000:2a:00.0", "EGL device 3", "/dev/dri/renderD129"),
        *("robosuite 1.5.1", f"{INDEX}=3", f"{MASK}='3,1,9'", "LOCAL_RANK='1'", "CUDA stops reading at '9'"),
    ):
        assert part in text
    data = json.loads(json.dumps(dataclasses.asdict(decision)))
    assert (data["device"], data["variables"][INDEX]) == ("cuda:1", "3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.reason = "other"


# Pieces of valid values, so that generated values are almost valid.
_PIECES = ["0", "1", "3", "9", "-", "-1", ",", ";", " ", "'", "GPU-", "GPU-aaaa", uuid(1), "MIG-", SLICE, "cuda:"]
_PIECES += ["egl:", "nvidia-smi:", "pci:", "2a:00.0", "same", "none", "auto", "cpu", "osmesa", "egl", "²٣", "9" * 5000]
ANY_TEXT = st.text() | st.lists(st.sampled_from([*_PIECES, "PCI_BUS_ID", "/", ".."]), max_size=5).map("".join)
_KNOWN = (MASK, ORDER, BACKEND, INDEX, "PYOPENGL_PLATFORM", RANK, TASK, HYDRA, "GROUP_RANK", "RAY_JOB_ID", "DISPLAY")
_KNOWN += ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "cuda_visible_devices")
KNOWN = st.sampled_from(_KNOWN)
MACHINES = (
    *(FOUR, NONE, DIFFERENT_GPUS, UNKNOWN_ORDER, WITH_MIG, CPU_BUILD, NO_TORCH, MUJOCO_4, NO_NVIDIA_EGL, NO_EGL),
    *(CROWDED, Inventory(), BARE_FOUR, BARE_MIG, dataclasses.replace(FOUR, egl=None)),
)
OPTIONS = {
    "pick": st.sampled_from(["rank", "free-memory"]),
    "rank": st.integers(),
    "worker": st.integers(),
    "on_missing": st.sampled_from(["error", "cpu"]),
}


@pytest.mark.slow
@settings(max_examples=700)
@given(
    st.sampled_from(MACHINES),
    st.dictionaries(KNOWN, ANY_TEXT) | st.dictionaries(st.text() | KNOWN, ANY_TEXT),
    ANY_TEXT | st.integers(),
    ANY_TEXT | st.integers(),
    st.sampled_from(["mujoco", "robosuite", "gymnasium", "dm_control"]) | ANY_TEXT,
    st.fixed_dictionaries({}, optional=OPTIONS),
)
@example(UNKNOWN_ORDER, {MASK: "MIG-"}, "auto", "none", "mujoco", {})
def test_any_arguments_give_a_decision_or_an_rl_ext_error_and_findings(
    there: Inventory, environ: dict[str, str], device: Any, render: Any, renderer: str, options: dict[str, Any]
) -> None:
    before = dict(environ)
    for finding in check_environment(environ, inventory=there):
        assert finding.effect
        assert finding.fix
        assert finding.severity in ("error", "warning")
    with contextlib.suppress(RlExtError):
        decision = devices.resolve(
            device, render=render, renderer=renderer, inventory=there, environ=environ, **options
        )
        assert re.fullmatch(r"cpu|cuda:\d+", decision.device)
        assert (decision.gpu is None) == (decision.device == "cpu")
    assert environ == before

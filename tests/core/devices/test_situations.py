"""Environments as users have them, beside what resolve() makes of each: the right device, or a text that helps."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.devices import Decision, EglDevice, Inventory, resolve
from rl_ext_core.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingDependencyError,
    RlExtError,
)
from tests.core.devices.machines import GIB, egl, machine, uuid

MASK, ORDER, INDEX, BACKEND = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUJOCO_EGL_DEVICE_ID", "MUJOCO_GL"
SLICE, OTHER_SLICE = "MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"

ONE = machine(1)
FOUR = machine(4, order=(2, 3, 0, 1))
NONE = machine(0)
UNLIKE = machine(3, fastest_first=(2, 0, 1))
UNKNOWN = dataclasses.replace(UNLIKE, fastest_first=None)
CUT = machine(3, mig={1: [SLICE, OTHER_SLICE]})
CPU_BUILD = machine(4, versions={"torch": "2.13.0+cpu", "torch.cuda": ""})
NO_TORCH = machine(2, without=("torch", "torch.cuda"))
MUJOCO_4 = machine(4, order=(2, 3, 0, 1), versions={"mujoco": "4.0.0"})
NO_NVIDIA_EGL = dataclasses.replace(FOUR, egl=egl(()))
NO_EGL = dataclasses.replace(FOUR, egl=(), osmesa=False, egl_error="libEGL.so.1 is not installed")
ONLY_OSMESA = dataclasses.replace(NO_EGL, osmesa=True)
EGL_LACKS_ONE = dataclasses.replace(FOUR, egl=egl((2, 3, 0)))
NOT_NVIDIA = EglDevice(5, False, None, "/dev/dri/renderD140")
WITH_INTEGRATED = dataclasses.replace(FOUR, egl=(*(FOUR.egl or ()), NOT_NVIDIA))
FREE = dataclasses.replace(FOUR, gpus=tuple(dataclasses.replace(g, memory_free=g.index * GIB) for g in FOUR.gpus))
# Three devices before the GPUs, as Mesa's on a laptop: the last GPU is the eleventh, and renderers ask for ten.
_BEFORE = tuple(EglDevice(place, software=True) for place in range(3))
_BEHIND = tuple(dataclasses.replace(device, index=device.index + 3) for device in egl(range(8), software=False))
CROWDED = dataclasses.replace(machine(8), egl=_BEFORE + _BEHIND)


@dataclass(frozen=True)
class Situation:
    """What there is and what is asked; then what is to come of it.

    :param compute: the expected device; None where the request is to be refused
    :param gpu: nvidia-smi's number of the GPU that computes
    :param rendering: the expected EGL index, ``"osmesa"`` or None
    :param variables: those that are to be set or unset, in part
    :param says: what reason and warnings are to contain, or the error
    :param fix: the line that the error is to end with, in part
    """

    there: Inventory
    environ: dict[str, str] = field(default_factory=dict)
    ask: dict[str, Any] = field(default_factory=dict)
    compute: str | None = None
    gpu: int | None = None
    rendering: int | str | None = None
    variables: dict[str, str | None] = field(default_factory=dict)
    says: str = ""
    error: type[RlExtError] | None = None
    fix: str = ""


def on(gpu: int, ordinal: int, there: Inventory, environ: dict[str, str] | None = None, **more: Any) -> Situation:
    return Situation(there, environ or {}, compute=f"cuda:{ordinal}", gpu=gpu, **_split(more))


def on_cpu(there: Inventory, environ: dict[str, str] | None = None, **more: Any) -> Situation:
    return Situation(there, environ or {}, compute="cpu", **_split(more))


def refused(
    error: type[RlExtError], says: str, fix: str, there: Inventory, environ: dict[str, str] | None = None, **ask: Any
) -> Situation:
    return Situation(there, environ or {}, ask, error=error, says=says, fix=fix)


def _split(more: dict[str, Any]) -> dict[str, Any]:
    expected = ("rendering", "variables", "says")
    ask = {name: value for name, value in more.items() if name not in expected}
    return {"ask": ask, **{name: value for name, value in more.items() if name in expected}}


GONE, WRONG, TYPE, MISSING = DeviceUnavailableError, InvalidArgumentError, InvalidTypeError, MissingDependencyError

REQUESTS = {
    "auto takes the first": on(0, 0, FOUR, says="the first of 4 visible"),
    "auto on one GPU": on(0, 0, ONE, says="the only one visible"),
    "auto without a GPU": on_cpu(NONE, says="no NVIDIA driver"),
    "cpu though there are GPUs": on_cpu(FOUR, device="cpu"),
    "cuda": on(0, 0, FOUR, device="cuda"),
    "cuda:3": on(3, 3, FOUR, device="cuda:3"),
    "an index": on(2, 2, FOUR, device=2),
    "a torch.device": on(1, 1, FOUR, device=torch.device("cuda", 1)),
    "a torch.device without index": on(0, 0, FOUR, device=torch.device("cuda")),
    "a whole UUID": on(2, 2, FOUR, device=uuid(2)),
    "the beginning of a UUID": on(1, 1, FOUR, device="GPU-aaaa1"),
    "nvidia-smi's number": on(3, 3, FOUR, device="nvidia-smi:3"),
    "nvidia-smi's number where CUDA counts otherwise": on(2, 0, UNLIKE, device="nvidia-smi:2"),
    "a PCI address": on(1, 1, FOUR, device="pci:0000:2a:00.0"),
    "a PCI address as nvidia-smi writes it": on(1, 1, FOUR, device="pci:00000000:2A:00.0"),
    "an index beyond": refused(GONE, "'cuda:4'", 'device="cuda:3"', FOUR, device="cuda:4"),
    "a number beyond": refused(GONE, "'17'", 'device="cuda:3"', FOUR, device=17),
    "cuda where there is none": refused(GONE, "'cuda'", 'device="cpu"', NONE, device="cuda"),
    "cuda where there is none, and the CPU will do": on_cpu(
        NONE, device="cuda", on_missing="cpu", says="in place of cuda"
    ),
    "a UUID of another machine": refused(GONE, "GPU-0123", f'device="{uuid(0)}"', FOUR, device="GPU-0123"),
    "a UUID that fits two": refused(WRONG, "'GPU-aaaa' fits 2", f'device="{uuid(0)}"', FOUR, device="GPU-aaaa"),
    "nvidia-smi's number beyond": refused(GONE, "nvidia-smi:9", "nvidia-smi:0", FOUR, device="nvidia-smi:9"),
    "a PCI address of another machine": refused(GONE, "pci:ff:00.0", "pci:0000:1a", FOUR, device="pci:ff:00.0"),
    "a negative index": refused(TYPE, "-1", 'device="auto"', FOUR, device=-1),
    "an absurd index": refused(WRONG, "0xe8d4a51000", 'device="auto"', FOUR, device=10**12),
    "gpu": refused(WRONG, "'gpu'", 'device="auto"', FOUR, device="gpu"),
    "cuda with a blank": refused(WRONG, "'cuda: 1'", 'device="cuda:1"', FOUR, device="cuda: 1"),
    "CUDA in capitals": refused(WRONG, "'CUDA:1'", 'device="cuda:1"', FOUR, device="CUDA:1"),
    "quotes in the request": refused(WRONG, "cuda:0", 'device="cuda:0"', FOUR, device="'cuda:0'"),
    "Apple's": refused(WRONG, "'mps'", 'device="auto"', FOUR, device="mps"),
    "nothing": refused(TYPE, "None", 'device="auto"', FOUR, device=None),
    "a list": refused(TYPE, "[0, 1]", 'device="auto"', FOUR, device=[0, 1]),
}

MASKS = {
    "a mask of one": on(2, 0, FOUR, {MASK: "2"}),
    "a mask in another order": on(3, 0, FOUR, {MASK: "3,1"}),
    "cuda:1 counts under the mask": on(1, 1, FOUR, {MASK: "3,1"}, device="cuda:1"),
    "a mask of UUIDs": on(3, 0, FOUR, {MASK: f"{uuid(3)},{uuid(0)}"}),
    "a mask with blanks": on(1, 0, FOUR, {MASK: " 1 , 2"}),
    "a mask that ends in a comma": on(1, 0, FOUR, {MASK: "1,"}, says="where nothing stands"),
    "a blank between numbers hides the second": on(0, 0, FOUR, {MASK: "0 1"}),
    "a mask with an index beyond": on(1, 0, FOUR, {MASK: "1,9,2"}, says="stops reading at '9'"),
    "a negative number in the middle": on(0, 0, FOUR, {MASK: "0,-1,2"}, says="stops reading at '-1'"),
    "an empty mask": on_cpu(FOUR, {MASK: ""}, says="CUDA_VISIBLE_DEVICES='' shows none"),
    "-1": on_cpu(FOUR, {MASK: "-1"}, says="'-1'"),
    "all": on_cpu(FOUR, {MASK: "all"}, says="'all'"),
    "quotes in the mask": on_cpu(FOUR, {MASK: "'0'"}, says="not a number"),
    "cuda:1 as a mask": on_cpu(FOUR, {MASK: "cuda:1"}, says="not a number"),
    "a number twice": on_cpu(FOUR, {MASK: "1,1"}, says="stands there twice"),
    "a UUID in small letters": on_cpu(FOUR, {MASK: uuid(1).lower()}, says="not a number"),
    "a UUID prefix that fits two": on_cpu(FOUR, {MASK: "GPU-aaaa"}, says="fits 2 GPUs"),
    "numbers and UUIDs mixed": on(0, 0, FOUR, {MASK: f"0,{uuid(1)}"}, says="not a number"),
    "a mask on a machine without GPUs": on_cpu(NONE, {MASK: "0"}, says="no NVIDIA driver"),
    "the mask hides the UUID": refused(
        GONE, f"{MASK}='1'", f"export {MASK}={uuid(0)}", FOUR, {MASK: "1"}, device=uuid(0)
    ),
    "the mask leaves fewer": refused(GONE, f"{MASK}='0,1'", 'device="cuda:1"', FOUR, {MASK: "0,1"}, device=2),
    "the mask leaves none": refused(GONE, f"{MASK}=''", 'device="cpu"', FOUR, {MASK: ""}, device="cuda:0"),
    "the mask leaves none, and the CPU will do": on_cpu(
        FOUR, {MASK: ""}, device="cuda:0", on_missing="cpu", says=f"{MASK}=''"
    ),
    "the last number beyond is all there is": refused(
        GONE, "'4'", 'device="cpu"', FOUR, {MASK: "4"}, device="cuda", render="same"
    ),
}

ORDERS = {
    "the fastest first": on(2, 0, UNLIKE),
    "by PCI address": on(0, 0, UNLIKE, {ORDER: "PCI_BUS_ID"}),
    "a mask counts the fastest first": on(0, 0, UNLIKE, {MASK: "1"}),
    "a mask counts by PCI address": on(1, 0, UNLIKE, {MASK: "1", ORDER: "PCI_BUS_ID"}),
    "an order in small letters is ignored": on(2, 0, UNLIKE, {ORDER: "pci_bus_id"}),
    "an unknown order": refused(GONE, f"{ORDER}=None", f"export {ORDER}=PCI_BUS_ID", UNKNOWN),
    "an unknown order and another word for it": refused(
        GONE, "'PCI'", f"export {ORDER}=PCI_BUS_ID", UNKNOWN, {ORDER: "PCI"}, device="cuda:1"
    ),
    "an unknown order that nobody needs": on(1, 0, UNKNOWN, {MASK: uuid(1)}),
    "an unknown order by PCI address": on(1, 1, UNKNOWN, {ORDER: "PCI_BUS_ID"}, device="cuda:1"),
}

LAUNCHERS = {
    "torchrun: the rank is an index": on(2, 2, FOUR, {"LOCAL_RANK": "2", "WORLD_SIZE": "4"}),
    "torchrun with a mask": on(1, 1, FOUR, {"LOCAL_RANK": "1", MASK: "3,1"}),
    "torchrun --virtual-local-rank": on(2, 0, FOUR, {"LOCAL_RANK": "0", MASK: "2"}),
    "torchrun without a GPU": on_cpu(NONE, {"LOCAL_RANK": "3"}),
    "torchrun with too many processes": refused(
        GONE, "LOCAL_RANK='4'", "--nproc-per-node=4", FOUR, {"LOCAL_RANK": "4"}
    ),
    "torchrun with too many processes for the mask": refused(
        GONE, f"{MASK}='0'", "--nproc-per-node=1", FOUR, {"LOCAL_RANK": "1", MASK: "0"}
    ),
    "no rank": refused(WRONG, "LOCAL_RANK='one'", "unset LOCAL_RANK", FOUR, {"LOCAL_RANK": "one"}),
    "an empty rank": refused(WRONG, "LOCAL_RANK=''", "unset LOCAL_RANK", FOUR, {"LOCAL_RANK": ""}),
    "a negative rank": refused(WRONG, "LOCAL_RANK='-1'", "unset LOCAL_RANK", FOUR, {"LOCAL_RANK": "-1"}),
    "a rank in other digits": refused(WRONG, "'²'", "unset LOCAL_RANK", FOUR, {"LOCAL_RANK": "²"}),
    "a named device heeds no rank": on(0, 0, FOUR, {"LOCAL_RANK": "3"}, device="cuda"),
    "Ray gives one GPU": on(3, 0, FOUR, {MASK: "3", "RAY_JOB_ID": "1"}),
    "Ray gives none": on_cpu(FOUR, {MASK: "", "RAY_JOB_ID": "1"}, says=f"{MASK}=''"),
    "SLURM gives none": on_cpu(FOUR, {MASK: "NoDevFiles"}, says="'NoDevFiles'"),
    "SLURM gives none, and one was named": refused(
        GONE, "'NoDevFiles'", 'device="auto"', FOUR, {MASK: "NoDevFiles"}, device="cuda"
    ),
    "Ray Train sets a rank as well": on(3, 1, FOUR, {MASK: "1,3", "LOCAL_RANK": "1"}),
    "SLURM shows all GPUs to all tasks": on(2, 2, FOUR, {"SLURM_LOCALID": "2"}),
    "SLURM shows each task its own": on(
        3, 0, FOUR, {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", MASK: "3"}, says="its own GPU"
    ),
    "SLURM binds by the closest": on(1, 0, FOUR, {"SLURM_LOCALID": "2", "SLURM_GPU_BIND": "closest", MASK: "1"}),
    "SLURM with too many tasks": refused(
        GONE, "SLURM_LOCALID='4'", "srun --ntasks-per-node=4", FOUR, {"SLURM_LOCALID": "4"}
    ),
    "torchrun inside SLURM": on(1, 1, FOUR, {"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}),
    "a rank that is given": on(1, 1, FOUR, {"LOCAL_RANK": "3"}, rank=1),
    "a rank that is given and beyond": refused(GONE, "rank=8", "--nproc-per-node=4", FOUR, rank=8),
    "a rank that is none": refused(TYPE, "rank='1'", "rank=0", FOUR, rank="1"),
    "workers share in turn": on(2, 2, FOUR, worker=6),
    "workers share what the mask shows": on(3, 1, FOUR, {MASK: "1,3"}, worker=5),
    "a worker below zero": refused(WRONG, "worker=-1", "worker=0", FOUR, worker=-1),
    "the most free memory": on(3, 3, FREE, pick="free-memory", says="3.0 GiB"),
    "the most free memory of the visible": on(2, 1, FREE, {MASK: "1,2,0"}, pick="free-memory"),
    "another pick": refused(WRONG, "pick='memory'", 'pick="rank"', FOUR, pick="memory"),
}

SLICES = {
    "a slice": on(1, 0, CUT, {MASK: SLICE}),
    "two slices show the first": on(1, 0, CUT, {MASK: f"{OTHER_SLICE},{SLICE}"}, says="one MIG slice"),
    "a slice as old drivers write it": on(1, 0, CUT, {MASK: f"MIG-{uuid(1)}/2/0"}),
    "no slice of this machine": on_cpu(CUT, {MASK: "MIG-00000000"}, says="no MIG slice"),
    "a slice, and another GPU is named": refused(
        GONE, f"{MASK}='{SLICE}'", f"export {MASK}={uuid(0)}", CUT, {MASK: SLICE}, device="nvidia-smi:0"
    ),
    "a mask of the GPU itself shows its first slice": on(1, 0, CUT, {MASK: "1"}, says=SLICE),
    "no mask shows a slice and nothing beside it": on(1, 0, CUT, says="nothing beside it"),
    "beside a slice no GPU is visible": refused(
        GONE, "does not show beside", f"export {MASK}={uuid(2)}", CUT, device="nvidia-smi:2"
    ),
    "GPUs that are not cut": on(2, 1, CUT, {MASK: "0,2"}, device="cuda:1"),
    "a slice does not render": refused(GONE, SLICE, 'render="cpu"', CUT, {MASK: SLICE}, render="same"),
    "a slice computes and the CPU renders": on(1, 0, CUT, {MASK: SLICE}, render="cpu", rendering=3),
}

TORCH = {
    "torch for the CPU": on_cpu(CPU_BUILD, says="torch 2.13.0+cpu is built without CUDA"),
    "torch for the CPU, and a GPU is named": refused(GONE, "'cuda:1'", 'device="cpu"', CPU_BUILD, device="cuda:1"),
    "torch for the CPU, and the CPU will do": on_cpu(CPU_BUILD, device=0, on_missing="cpu", says="on_missing"),
    "torch for the CPU, and a GPU renders": on_cpu(CPU_BUILD, render="cuda:1", rendering=1),
    "torch for the CPU, and the same renders": on_cpu(CPU_BUILD, render="same", rendering=4, says="because that is"),
    "torch is not installed": on(1, 1, NO_TORCH, device="cuda:1"),
    "torch is not installed, and a GPU renders": on_cpu(NO_TORCH, device="cpu", render="nvidia-smi:1", rendering=1),
    "an order that is not one": refused(
        WRONG, "on_missing='gpu'", 'on_missing="error"', FOUR, device="cuda:9", on_missing="gpu"
    ),
}

RENDERING = {
    "nothing renders": on(1, 1, FOUR, device="cuda:1", variables={}),
    "the same GPU": on(1, 1, FOUR, device="cuda:1", render="same", rendering=3, variables={INDEX: "3"}),
    "the same GPU under a mask": on(2, 0, FOUR, {MASK: "2"}, render="same", rendering=0, variables={INDEX: "0"}),
    "the same GPU for robosuite": on(
        0, 0, FOUR, {MASK: "0"}, render="same", renderer="robosuite", rendering=2, variables={INDEX: "2"}
    ),
    "the same GPU for gymnasium": on(3, 3, FOUR, {"LOCAL_RANK": "3"}, render="same", renderer="gymnasium", rendering=1),
    "the same GPU for dm_control": on(0, 0, FOUR, render="same", renderer="dm_control", rendering=2),
    "the same GPU for mujoco 4": on(
        1, 1, MUJOCO_4, {MASK: "3,1"}, device="cuda:1", render="same", rendering=3, variables={INDEX: "1"}
    ),
    "a wrong index is replaced": on(
        0, 0, FOUR, {INDEX: "77", BACKEND: "glfw"}, render="same", rendering=2, variables={INDEX: "2", BACKEND: "egl"}
    ),
    "the same where the CPU computes": on_cpu(NONE, render="same", rendering=0, variables={BACKEND: "egl"}),
    "another GPU by ordinal": on(0, 0, FOUR, render="cuda:1", rendering=3),
    "another GPU by index": on(0, 0, FOUR, render=3, rendering=1),
    "another GPU by UUID": on(0, 0, FOUR, render="GPU-bbbb", rendering=0),
    "another GPU by nvidia-smi": on(0, 0, FOUR, render="nvidia-smi:3", rendering=1),
    "another GPU by PCI address": on(0, 0, FOUR, render="pci:1a:00.0", rendering=2),
    "a GPU that the mask hides": on(1, 0, FOUR, {MASK: "1"}, render="nvidia-smi:0", rendering=2),
    "any visible GPU": on_cpu(FOUR, {MASK: "2"}, device="cpu", render="auto", rendering=0),
    "workers render in turn": on_cpu(FOUR, device="cpu", render="auto", worker=5, rendering=3),
    "a raw EGL index": on(0, 0, FOUR, render="egl:3", rendering=3),
    "an EGL device that is no GPU of NVIDIA's": on(0, 0, WITH_INTEGRATED, render="egl:5", rendering=5),
    "Mesa's device": on(0, 0, FOUR, render="cpu", rendering=4, variables={INDEX: "4"}),
    "OSMesa where EGL is missing": on(
        0, 0, ONLY_OSMESA, render="cpu", rendering="osmesa", variables={BACKEND: "osmesa", INDEX: None}
    ),
    "the ninth GPU behind three others": on(6, 6, CROWDED, device=6, render="same", rendering=9),
    "an EGL index beyond": refused(GONE, "'egl:9'", 'render="same"', FOUR, render="egl:9"),
    "a rendering GPU beyond": refused(GONE, "'cuda:4'", 'render="cuda:3"', FOUR, render="cuda:4"),
    "a rendering GPU where there is none": refused(
        GONE, "'cuda:0'", 'render="cpu"', NONE, device="cpu", render="cuda:0"
    ),
    "a rendering GPU under an empty mask": refused(
        GONE, f"{MASK}=''", 'render="cpu"', FOUR, {MASK: ""}, device="cpu", render="cuda"
    ),
    "beyond the ten that renderers ask for": refused(
        GONE, "render='same': mujoco 3.9.0 asks", "NVIDIA_VISIBLE_DEVICES", CROWDED, device="cuda:7", render="same"
    ),
    "NVIDIA's EGL is missing": refused(
        GONE, f"{uuid(0)}", "NVIDIA_DRIVER_CAPABILITIES=all", NO_NVIDIA_EGL, render="same"
    ),
    "NVIDIA's EGL is missing, and the CPU will do": on(
        0, 0, NO_NVIDIA_EGL, render="same", on_missing="cpu", rendering=0, says="10_nvidia.json"
    ),
    "EGL is not installed": refused(GONE, "libEGL.so.1 is not installed", 'render="cpu"', NO_EGL, render="same"),
    "EGL lacks one GPU": refused(GONE, uuid(1), 'render="cpu"', EGL_LACKS_ONE, device="cuda:1", render="same"),
    "nothing renders on the CPU": refused(GONE, "render='cpu'", "apt-get install", NO_EGL, render="cpu"),
    "nothing renders on the CPU, on_missing or not": refused(
        GONE, "render='cpu'", "apt-get install", NO_EGL, render="cpu", on_missing="cpu"
    ),
    "mujoco is not installed": refused(
        MISSING, "renderer='mujoco'", "pip install", machine(1, without=("mujoco",)), render="same"
    ),
    "robosuite is not installed": refused(
        MISSING,
        "renderer='robosuite'",
        'pip install "rl-ext[robosuite]"',
        machine(1, without=("robosuite",)),
        render="same",
        renderer="robosuite",
    ),
    "gymnasium without mujoco": refused(
        MISSING, "'mujoco'", "pip install", machine(1, without=("mujoco",)), render="cpu", renderer="gymnasium"
    ),
    "another renderer": refused(
        WRONG, "renderer='pyrenderer'", 'renderer="mujoco"', FOUR, render="same", renderer="pyrenderer"
    ),
    "another word for rendering": refused(WRONG, "render='yes'", 'render="same"', FOUR, render="yes"),
    "a switch for rendering": refused(TYPE, "render=True", 'render="same"', FOUR, render=True),
    "none without quotes": refused(TYPE, "render=None", 'render="none"', FOUR, render=None),
}

TABLE = {
    f"{group}: {name}": situation
    for group, table in (
        ("request", REQUESTS),
        ("mask", MASKS),
        ("order", ORDERS),
        ("launcher", LAUNCHERS),
        ("slice", SLICES),
        ("torch", TORCH),
        ("render", RENDERING),
    )
    for name, situation in table.items()
}
_SENTENCE_ENDS = re.compile(r"[^.\s]\.\s+[A-Z]")


def decide(situation: Situation) -> Decision:
    return resolve(**situation.ask, inventory=situation.there, environ=situation.environ)


def those(*, refused: bool) -> list[Any]:
    return [pytest.param(found, id=name) for name, found in TABLE.items() if (found.error is not None) == refused]


@pytest.mark.parametrize("situation", those(refused=False))
def test_what_can_be_decided_is_decided_right(situation: Situation) -> None:
    decision = decide(situation)
    assert decision.device == situation.compute
    assert (decision.gpu.index if decision.gpu else None) == situation.gpu
    rendering = decision.egl.index if decision.egl else decision.variables.get(BACKEND)
    assert rendering == situation.rendering
    assert situation.variables.items() <= decision.variables.items()
    assert situation.says in " ".join((decision.reason, *decision.warnings))


@pytest.mark.parametrize("situation", those(refused=True))
def test_what_cannot_is_refused_with_the_value_and_the_line_to_write(situation: Situation) -> None:
    assert situation.error is not None
    with pytest.raises(RlExtError) as caught:
        decide(situation)
    text = str(caught.value)
    assert type(caught.value) is situation.error
    assert situation.says in text
    assert situation.fix in text
    assert len(_SENTENCE_ENDS.findall(text)) <= 1, f"more than two sentences: {text}"


@pytest.mark.parametrize("situation", [pytest.param(found, id=name) for name, found in TABLE.items()])
def test_a_decision_changes_no_variable(situation: Situation) -> None:
    before = dict(situation.environ)
    with contextlib.suppress(RlExtError):
        decide(situation)
    assert situation.environ == before


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(TABLE) >= 70


# Pieces of right values, so that wrong ones are nearly right.
_PIECES = [
    "0",
    "1",
    "3",
    "9",
    "-",
    "-1",
    ",",
    ";",
    " ",
    "'",
    "GPU-",
    "GPU-aaaa",
    uuid(1),
    "MIG-",
    SLICE,
    "cuda:",
    "egl:",
]
_PIECES += [
    "nvidia-smi:",
    "pci:",
    "2a:00.0",
    "same",
    "none",
    "auto",
    "cpu",
    "osmesa",
    "egl",
    "²",
    "٣",
    "9" * 5000,
    "PCI_BUS_ID",
]
ANY_TEXT = st.text() | st.lists(st.sampled_from(_PIECES), max_size=5).map("".join)
_VARIABLES = (
    MASK,
    ORDER,
    BACKEND,
    INDEX,
    "PYOPENGL_PLATFORM",
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "SLURM_GPU_BIND",
    "DISPLAY",
)
ANY_ENVIRON = st.dictionaries(st.sampled_from(_VARIABLES), ANY_TEXT)
MACHINES = (
    FOUR,
    NONE,
    UNLIKE,
    UNKNOWN,
    CUT,
    CPU_BUILD,
    NO_TORCH,
    MUJOCO_4,
    NO_NVIDIA_EGL,
    NO_EGL,
    CROWDED,
    Inventory(),
)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(MACHINES),
    ANY_ENVIRON,
    ANY_TEXT | st.integers(),
    ANY_TEXT | st.integers(),
    st.sampled_from(["mujoco", "robosuite", "gymnasium", "dm_control"]) | ANY_TEXT,
    st.fixed_dictionaries(
        {},
        optional={
            "pick": st.sampled_from(["rank", "free-memory"]),
            "rank": st.integers(),
            "worker": st.integers(),
            "on_missing": st.sampled_from(["error", "cpu"]),
        },
    ),
)
def test_whatever_is_asked_is_decided_or_refused_by_an_error_of_ours(
    there: Inventory,
    environ: dict[str, str],
    device: str | int,
    render: str | int,
    renderer: str,
    options: dict[str, Any],
) -> None:
    with contextlib.suppress(RlExtError):
        decision = resolve(device, render=render, renderer=renderer, inventory=there, environ=environ, **options)
        assert re.fullmatch(r"cpu|cuda:\d+", decision.device)
        assert (decision.gpu is None) == (decision.device == "cpu")

"""Every mistake is found and mended by the line that is offered; a right environment has no findings."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import shlex
import sys
import types
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_ext_core.devices import (
    EglDevice,
    Finding,
    Inventory,
    _apply,
    _cuda,
    _renderers,
    check_environment,
    resolve,
)
from rl_ext_core.devices.doctor import examine
from tests.core.devices.machines import egl, machine, uuid
from tests.core.devices.processes import run

RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
SLICE, OTHER_SLICE = "MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"
FOUR = machine(4)
TURNED = machine(4, order=(2, 3, 0, 1))
NONE = machine(0)
# Where nothing renders, the mask is CUDA's alone.
BARE = machine(4, without=RENDERERS)
EIGHT = machine(8, without=RENDERERS)
CUT = machine(3, mig={1: [SLICE, OTHER_SLICE]}, without=RENDERERS)
UNLIKE = machine(2, fastest_first=(1, 0), without=RENDERERS)
UNKNOWN = dataclasses.replace(UNLIKE, fastest_first=None)
NO_NVIDIA_EGL = dataclasses.replace(FOUR, egl=egl(()))
EGL = {"MUJOCO_GL": "egl"}
SCREEN = {"DISPLAY": ":0"}


def only(inventory: Inventory, *renderers: str) -> Inventory:
    """The machine with mujoco and these renderers."""
    others = set(RENDERERS) - {"mujoco", *renderers}
    versions = {name: text for name, text in inventory.versions.items() if name not in others}
    return dataclasses.replace(inventory, versions=versions)


def check(environ: Mapping[str, str], inventory: Inventory = FOUR) -> tuple[Finding, ...]:
    return check_environment(environ, inventory=inventory)


def one(environ: Mapping[str, str], inventory: Inventory = FOUR) -> Finding:
    found = check(environ, inventory)
    assert len(found) == 1, found
    return found[0]


def of(variable: str, environ: Mapping[str, str], inventory: Inventory = FOUR) -> Finding:
    (found,) = (finding for finding in check(environ, inventory) if finding.variable == variable)
    return found


def typed(line: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Do what a shell does with such a line."""
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


MASKS = {
    # value: (severity, the fix, what the effect says)
    "": ("error", "export CUDA_VISIBLE_DEVICES=0", 'a blank in "export CUDA_VISIBLE_DEVICES= 1"'),
    "  ": ("error", "export CUDA_VISIBLE_DEVICES=0", "hides all 4 GPUs"),
    " 1": ("warning", "export CUDA_VISIBLE_DEVICES=1", "skips the blank in ' 1'"),
    "0, 1": ("warning", "export CUDA_VISIBLE_DEVICES=0,1", "2 GPUs, nvidia-smi 0, 1"),
    "0 1": ("error", "export CUDA_VISIBLE_DEVICES=0,1", "reads '0 1' as 0"),
    "0;1": ("error", "export CUDA_VISIBLE_DEVICES=0,1", "reads '0;1' as 0"),
    "0-3": ("error", "export CUDA_VISIBLE_DEVICES=0,1,2,3", "reads '0-3' as 0"),
    "2..3": ("error", "export CUDA_VISIBLE_DEVICES=2,3", "reads '2..3' as 2"),
    "'1'": ("error", "export CUDA_VISIBLE_DEVICES=1", "quotes and brackets are part of the value"),
    '"0,1"': ("error", "export CUDA_VISIBLE_DEVICES=0,1", "quotes and brackets"),
    "[0,1]": ("error", "export CUDA_VISIBLE_DEVICES=0,1", "quotes and brackets"),
    "all": ("error", "unset CUDA_VISIBLE_DEVICES", "knows no such word"),
    "none": ("warning", "unset CUDA_VISIBLE_DEVICES", "hides all 4 GPUs"),
    "-1": ("warning", "unset CUDA_VISIBLE_DEVICES", "hides all 4 GPUs"),
    "0,-1,2": ("warning", "export CUDA_VISIBLE_DEVICES=0", "at any negative number"),
    "cuda:1": ("error", "export CUDA_VISIBLE_DEVICES=1", "No CUDA GPUs are available"),
    "cuda:0,cuda:2": ("error", "export CUDA_VISIBLE_DEVICES=0,2", "No CUDA GPUs"),
    "gpu1": ("error", "export CUDA_VISIBLE_DEVICES=1", "'gpu1', which is not a number"),
    "GPU 1": ("error", "export CUDA_VISIBLE_DEVICES=1", "not a number"),
    "/dev/nvidia2": ("error", "export CUDA_VISIBLE_DEVICES=2", "not a number"),
    "1gpu": ("error", "export CUDA_VISIBLE_DEVICES=0", "reads '1gpu' as 1"),
    "+1": ("warning", "export CUDA_VISIBLE_DEVICES=1", "reads '+1' as 1"),
    "0,0": ("error", "export CUDA_VISIBLE_DEVICES=0", "stands there twice"),
    "1,1,2": ("error", "export CUDA_VISIBLE_DEVICES=1,2", "stands there twice"),
    "1,9": ("error", "export CUDA_VISIBLE_DEVICES=1", "stops reading at '9'"),
    "1,9,2": ("error", "export CUDA_VISIBLE_DEVICES=1,2", "one GPU, NVIDIA H100"),
    "4": ("error", "export CUDA_VISIBLE_DEVICES=0", "the GPUs are 0 to 3"),
    "9" * 30: ("error", "export CUDA_VISIBLE_DEVICES=0", "stops reading"),
    "1,": ("warning", "export CUDA_VISIBLE_DEVICES=1", "where nothing stands"),
    "0,,1": ("error", "export CUDA_VISIBLE_DEVICES=0,1", "where nothing stands"),
    "GPU-aaaa": ("error", f"export CUDA_VISIBLE_DEVICES={uuid(0)}", "fits 2 GPUs"),
    "GPU-0123": ("error", "export CUDA_VISIBLE_DEVICES=0", "fits no GPU"),
    uuid(1).lower(): ("error", f"export CUDA_VISIBLE_DEVICES={uuid(1)}", "not a number"),
    uuid(2)[4:]: ("error", f"export CUDA_VISIBLE_DEVICES={uuid(2)}", "not a number"),
    f"0,{uuid(2)}": ("error", f"export CUDA_VISIBLE_DEVICES={uuid(0)},{uuid(2)}", "not a number"),
    f"{uuid(1)},0": ("error", f"export CUDA_VISIBLE_DEVICES={uuid(1)},{uuid(0)}", "no UUID like those"),
    f"{uuid(1)}, {uuid(0)}": ("error", f"export CUDA_VISIBLE_DEVICES={uuid(1)},{uuid(0)}", "no UUID like those"),
    f"{uuid(1)},{uuid(1)}": ("error", f"export CUDA_VISIBLE_DEVICES={uuid(1)}", "stands there twice"),
    SLICE: ("error", "export CUDA_VISIBLE_DEVICES=0", "no MIG slice of this machine"),
    "GPU0 and GPU1": ("error", "export CUDA_VISIBLE_DEVICES=0,1", "not a number"),
    "abc": ("error", "export CUDA_VISIBLE_DEVICES=0", "'abc', which is not a number"),
    "²": ("error", "export CUDA_VISIBLE_DEVICES=0", "'²', which is not a number"),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_cuda_reads_otherwise_is_found_with_what_was_meant(mask: str) -> None:
    severity, fix, effect = MASKS[mask]
    found = one({"CUDA_VISIBLE_DEVICES": mask}, BARE)
    assert (found.variable, found.value, found.severity, found.fix) == ("CUDA_VISIBLE_DEVICES", mask, severity, fix)
    assert effect in found.effect


@pytest.mark.parametrize("mask", MASKS)
def test_after_typing_the_line_the_mask_is_right(mask: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": mask}
    assert check(typed(one(environ, BARE).fix, environ), BARE) == ()


@pytest.mark.parametrize(
    ("mask", "line"),
    [("0,0", "0"), ("0,1,00", "0,1"), (" 2,3, 2,7", "2,3"), ("GPU-1,GPU-1", "GPU-1")],
)
def test_what_stands_twice_in_a_mask_is_found_without_a_gpu_too(mask: str, line: str) -> None:
    """CUDA shows no device then, on any machine, and the mask is for the machine that the job will run on."""
    (found,) = check_environment({"CUDA_VISIBLE_DEVICES": mask}, inventory=machine(0, without=RENDERERS))
    assert (found.variable, found.severity) == ("CUDA_VISIBLE_DEVICES", "warning")
    assert "stands there twice, so CUDA shows no device at all, on any machine" in found.effect
    assert found.fix == f"export CUDA_VISIBLE_DEVICES={line}"
    assert check_environment({"CUDA_VISIBLE_DEVICES": line}, inventory=machine(0, without=RENDERERS)) == ()


def test_a_uuid_that_begins_with_digits_is_not_taken_for_a_number() -> None:
    found = one({"CUDA_VISIBLE_DEVICES": "0a0a7777"}, EIGHT)
    assert "reads '0a0a7777' as 0" in found.effect
    assert found.fix == f"export CUDA_VISIBLE_DEVICES={uuid(7)}"


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "@ray.remote(num_gpus=1)"),
        ({"CUDA_VISIBLE_DEVICES": "", "RAY_JOB_ID": "1"}, "@ray.remote(num_gpus=1)"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "1"}, "srun --gpus-per-task=1 python train.py"),
    ],
)
def test_what_a_launcher_hides_is_asked_of_the_launcher(environ: dict[str, str], fix: str) -> None:
    assert one(environ, BARE).fix == fix
    assert one({**environ, **SCREEN}).fix == fix  # and robosuite's failure on it is no mistake of its own


@pytest.mark.parametrize(
    ("mask", "severity", "fix"),
    [
        (f"{SLICE},{OTHER_SLICE}", "warning", SLICE),
        (SLICE.lower(), "error", SLICE),
        (SLICE[4:], "error", "0"),
        ("MIG-3333", "error", SLICE),
        ("1", "warning", SLICE),
        (uuid(1), "warning", SLICE),
        (f"MIG-{uuid(0)}/1/0", "error", uuid(0)),  # that GPU is not cut
        ("0,1", "error", SLICE),
    ],
)
def test_a_mask_that_shows_no_slice_or_not_all_of_them(mask: str, severity: str, fix: str) -> None:
    found = one({"CUDA_VISIBLE_DEVICES": mask}, CUT)
    assert (found.severity, found.fix) == (severity, f"export CUDA_VISIBLE_DEVICES={fix}")


def test_without_a_mask_a_slice_hides_the_other_gpus() -> None:
    found = one({}, CUT)
    assert (found.value, found.severity) == (None, "warning")
    assert f"{SLICE}, and nothing beside it" in found.effect


def test_robosuite_fails_on_masks_that_cuda_accepts() -> None:
    robosuite = only(FOUR, "robosuite")
    robust, mask = check({**SCREEN, "CUDA_VISIBLE_DEVICES": "1,"}, robosuite)
    assert (mask.severity, mask.fix) == ("warning", "export CUDA_VISIBLE_DEVICES=1")
    assert "ValueError: invalid literal for int() with base 10: ''" in robust.effect
    assert typed(robust.fix, {})["MUJOCO_EGL_DEVICE_ID"] == "1"
    found = one({**SCREEN, "CUDA_VISIBLE_DEVICES": uuid(1)}, robosuite)
    assert 'robosuite 1.5.1: rendering ends in "ValueError: invalid literal for int()' in found.effect
    assert typed(found.fix, {})["MUJOCO_EGL_DEVICE_ID"] == "1"


RIGHT = {
    "nothing set, nothing renders": ({}, BARE),
    "nothing set, no GPU": ({}, machine(0, without=RENDERERS)),
    "a desktop": (SCREEN, FOUR),
    "egl on a machine that counts alike": (EGL, FOUR),
    "egl without a GPU": (EGL, NONE),
    "a mask of one": ({**EGL, "CUDA_VISIBLE_DEVICES": "1", "MUJOCO_EGL_DEVICE_ID": "1"}, FOUR),
    "a mask of three": ({**EGL, "CUDA_VISIBLE_DEVICES": "2,0,1", "MUJOCO_EGL_DEVICE_ID": "0"}, TURNED),
    "a mask of UUIDs": ({"CUDA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(0)}"}, BARE),
    "the beginning of a UUID": ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, BARE),
    "a slice": ({"CUDA_VISIBLE_DEVICES": SLICE}, CUT),
    "a slice as old drivers write it": ({"CUDA_VISIBLE_DEVICES": f"MIG-{uuid(1)}/1/0"}, CUT),
    "GPUs beside a cut one": ({"CUDA_VISIBLE_DEVICES": "0,2"}, CUT),
    "osmesa": ({"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}, FOUR),
    "by PCI address": ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, UNLIKE),
    "the fastest first, as said": ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, UNLIKE),
    "UUIDs need no order": ({"CUDA_VISIBLE_DEVICES": uuid(1)}, UNKNOWN),
    "a rank of torchrun": ({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, BARE),
    "a virtual rank of torchrun": ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}, BARE),
    "many processes on the CPU": ({"LOCAL_RANK": "7"}, machine(0, without=RENDERERS)),
    "SLURM with a GPU for each task": (
        {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "3"},
        BARE,
    ),
    "a container with all that it needs": (
        {**EGL, "NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,graphics,utility"},
        FOUR,
    ),
    "Kubernetes gives GPUs in another way": ({**EGL, "NVIDIA_VISIBLE_DEVICES": "void"}, FOUR),
    "a mask where there is nothing to hide": ({"CUDA_VISIBLE_DEVICES": "0"}, machine(0, without=RENDERERS)),
    "torch for the CPU without a GPU": (EGL, machine(0, versions={"torch": "2.13.0+cpu", "torch.cuda": ""})),
}


@pytest.mark.parametrize(("environ", "inventory"), RIGHT.values(), ids=RIGHT)
def test_a_right_environment_has_no_findings(environ: dict[str, str], inventory: Inventory) -> None:
    assert check(environ, inventory) == ()


@pytest.mark.parametrize("renderer", RENDERERS)
def test_what_a_decision_sets_has_no_findings(renderer: str) -> None:
    mujoco = only(TURNED, renderer)
    variables = resolve("auto", render="same", renderer=renderer, inventory=mujoco, environ={}).variables
    assert check({name: value for name, value in variables.items() if value is not None}, mujoco) == ()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("cuda_visible_devices", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("Cuda_Visible_Devices", "cuda:1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISIBLE_DEVICE", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISIBLE_DEVICESS", "0-1", "export CUDA_VISIBLE_DEVICES=0,1"),
        ("CUDA_VISIBEL_DEVICES", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISABLE_DEVICES", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISIBLE_DEVICES ", " 1", "export CUDA_VISIBLE_DEVICES=1"),
        ("export CUDA_VISIBLE_DEVICES", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA-VISIBLE-DEVICES", "1", "export CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISIBLE_DEVICE", "a b", "export CUDA_VISIBLE_DEVICES='a b'"),
        ("CUDA_DEVICES_ORDER", "PCI_BUS_ID", "export CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("MUJOCO_Gl", "EGL", "export MUJOCO_GL=egl"),
        ("MUJCOO_GL", "osmesa", "export MUJOCO_GL=osmesa"),
        ("MUJOCO_EGL", "1", "export MUJOCO_GL=egl"),
        ("MUJOCO_EGL_DEVICE_IDS", "0", "export MUJOCO_EGL_DEVICE_ID=0"),
        ("PYOPENGL_PLATTFORM", "egl", "export PYOPENGL_PLATFORM=egl"),
        ("LOCALRANK", "1", "export LOCAL_RANK=1"),
    ],
)
def test_a_misspelled_name_is_found_with_the_right_one(name: str, value: str, line: str) -> None:
    found = of(name, {**SCREEN, name: value}, only(FOUR))
    assert (found.value, found.fix, found.severity) == (value, line, "error")
    assert repr(name) in found.effect


NEIGHBOURS = """
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
    ASCEND_VISIBLE_DEVICES MUSA_VISIBLE_DEVICES XPU_VISIBLE_DEVICES ZE_AFFINITY_MASK CUDA_HOME CUDA_PATH CUDA_VERSION
    CUDA_CACHE_PATH CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS RANK WORLD_SIZE NODE_RANK
    LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MPI_LOCALRANKID OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK SLURM_PROCID
    EGL_DEVICE_ID EGL_PLATFORM MUJOCO_PATH MUJOCO_PY_MUJOCO_PATH MUJOCO_PLUGIN_PATH MUJOCO_LOG PYGLET_HEADLESS
    PYOPENGL_ERROR_CHECKING PATH HOME
"""


@pytest.mark.parametrize("name", NEIGHBOURS.split())
def test_a_variable_of_its_own_right_is_no_misspelling(name: str) -> None:
    assert check({**SCREEN, name: "1"}, only(FOUR)) == ()


def test_a_misspelled_name_beside_the_right_one_matters_where_they_differ() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "1", "cuda_visible_devices": "1"}
    assert check(both, BARE) == ()
    found = one({**both, "cuda_visible_devices": "2"}, BARE)
    assert (found.severity, found.fix) == ("warning", "export CUDA_VISIBLE_DEVICES=1")


@pytest.mark.parametrize(
    ("value", "inventory", "severity", "fix"),
    [
        ("PCI", UNLIKE, "error", "PCI_BUS_ID"),
        ("pci_bus_id", UNLIKE, "error", "PCI_BUS_ID"),
        ("pci_bus_id", BARE, "warning", "PCI_BUS_ID"),
        ("fastest", UNLIKE, "error", "FASTEST_FIRST"),
        (None, UNLIKE, "warning", "PCI_BUS_ID"),
        (None, UNKNOWN, "error", "PCI_BUS_ID"),
        ("FASTEST_FIRST", UNKNOWN, "error", "PCI_BUS_ID"),
    ],
)
def test_an_order_that_is_not_the_one_of_nvidia_smi(
    value: str | None, inventory: Inventory, severity: str, fix: str
) -> None:
    found = one({} if value is None else {"CUDA_DEVICE_ORDER": value}, inventory)
    assert (found.value, found.severity, found.fix) == (value, severity, f"export CUDA_DEVICE_ORDER={fix}")
    if inventory is UNLIKE:
        assert f"number 0 is NVIDIA H100 {uuid(1)} (nvidia-smi 1)" in found.effect


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        ({"LOCAL_RANK": "one"}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": ""}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": "'2'"}, "export LOCAL_RANK=2"),
        ({"LOCAL_RANK": "²"}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": "9" * 5000}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": "4"}, "torchrun --nproc-per-node=4 train.py"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, "torchrun --nproc-per-node=1 train.py"),
        ({"SLURM_LOCALID": "-1"}, "unset SLURM_LOCALID"),
        ({"SLURM_LOCALID": "6"}, "srun --ntasks-per-node=4 python train.py"),
    ],
)
def test_a_rank_that_is_none_or_has_no_gpu(environ: dict[str, str], fix: str) -> None:
    found = one(environ, BARE)
    assert (found.variable, found.fix) == (next(iter(environ)), fix)


@pytest.mark.parametrize(
    ("value", "renderers", "who", "fix"),
    [
        ("EGL", ("gymnasium",), "gymnasium 1.4.0", "egl"),
        ("egl ", ("dm_control",), "dm_control 1.0.41", "egl"),
        ("'egl'", (), "mujoco 3.9.0", "egl"),
        ("", ("gymnasium",), "gymnasium 1.4.0", "egl"),
        ("OSMesa", ("gymnasium",), "gymnasium 1.4.0", "osmesa"),
        ("vulkan", ("robosuite",), "robosuite 1.5.1: import", "egl"),
    ],
)
def test_a_backend_that_a_renderer_refuses(value: str, renderers: tuple[str, ...], who: str, fix: str) -> None:
    environ = {**SCREEN, "MUJOCO_GL": value}
    found = one(environ, only(FOUR, *renderers))
    assert (found.value, found.severity) == (value, "error")
    assert typed(found.fix, {})["MUJOCO_GL"] == fix
    assert who in found.effect
    assert check(typed(found.fix, environ), only(FOUR, *renderers)) == ()


def test_an_index_of_egl_beside_a_window_and_a_backend_that_robosuite_replaces() -> None:
    there, environ = machine(2), {"DISPLAY": ":0", "MUJOCO_GL": "glfw", "MUJOCO_EGL_DEVICE_ID": "0"}
    (finding,) = check_environment(environ, inventory=there)
    assert "MUJOCO_EGL_DEVICE_ID is for EGL alone" in finding.effect
    assert finding.severity == "warning"
    assert finding.fix == "export MUJOCO_GL=egl PYOPENGL_PLATFORM=egl"
    seen = {found.name: found.why for found in examine(there, environ).renderers}
    assert "robosuite takes EGL in place of MUJOCO_GL='glfw'" in seen["robosuite"]
    assert not check_environment({"DISPLAY": ":0", "MUJOCO_GL": "glfw"}, inventory=there)


def test_without_a_display_glfw_fails_and_is_what_they_take_where_nothing_is_set() -> None:
    unset, glfw = one({}, FOUR), one({"MUJOCO_GL": "glfw"}, FOUR)
    assert (unset.severity, glfw.severity) == ("warning", "error")
    assert "mujoco 3.9.0, gymnasium 1.4.0 (mujoco 3.9.0), dm_control 1.0.41: " in unset.effect
    assert check(typed(unset.fix, {})) == check(typed(glfw.fix, {"MUJOCO_GL": "glfw"})) == ()


@pytest.mark.parametrize(
    ("environ", "renderers"),
    [
        ({**EGL, "PYOPENGL_PLATFORM": "osmesa"}, RENDERERS),
        ({**EGL, "PYOPENGL_PLATFORM": "EGL"}, ("dm_control",)),
        ({"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "egl"}, RENDERERS),
        ({**SCREEN, "PYOPENGL_PLATFORM": "osmesa"}, ("robosuite",)),
    ],
)
def test_variables_that_contradict_each_other(environ: dict[str, str], renderers: tuple[str, ...]) -> None:
    found = one(environ, only(FOUR, *renderers))
    assert (found.variable, found.severity) == ("PYOPENGL_PLATFORM", "error")
    assert check(typed(found.fix, environ), only(FOUR, *renderers)) == ()


@pytest.mark.parametrize("value", ["", "x", "-1", "5", "99", "0x1", "1.0", "²"])
def test_an_index_that_no_device_has_is_found_once_for_all_renderers(value: str) -> None:
    found = one({**EGL, "MUJOCO_EGL_DEVICE_ID": value})
    assert (found.variable, found.value, found.severity) == ("MUJOCO_EGL_DEVICE_ID", value, "error")
    assert found.effect.startswith("mujoco 3.9.0, gymnasium 1.4.0 (mujoco 3.9.0), dm_control 1.0.41, robosuite 1.5.1: ")
    assert typed(found.fix, EGL)["MUJOCO_EGL_DEVICE_ID"] == "0"


def test_an_index_beyond_the_ten_that_they_ask_for() -> None:
    before = tuple(EglDevice(place, software=True) for place in range(4))
    behind = tuple(dataclasses.replace(device, index=device.index + 4) for device in egl(range(8), software=False))
    found = one({**EGL, "MUJOCO_EGL_DEVICE_ID": "11"}, dataclasses.replace(machine(8), egl=before + behind))
    assert "must be an integer between 0 and 9 (inclusive), got 11" in found.effect
    assert "it asks EGL for 10 devices of 12" in found.effect


def test_a_list_of_indices_is_for_robosuite_only() -> None:
    assert "dm_control 1.0.41: rendering ends" in one({**EGL, "MUJOCO_EGL_DEVICE_ID": "0,1"}).effect


def test_robosuites_assertion_is_foreseen() -> None:
    environ = {**EGL, "CUDA_VISIBLE_DEVICES": "0", "MUJOCO_EGL_DEVICE_ID": "2"}
    found = one(environ, TURNED)
    assert 'robosuite 1.5.1: import robosuite ends in "AssertionError: MUJOCO_EGL_DEVICE_ID needs' in found.effect
    assert found.fix == (
        'from rl_ext_core.devices import resolve\nresolve("auto", render="same", renderer="robosuite").apply()'
    )


def test_another_gpu_than_the_one_that_computes_is_found_with_both_names() -> None:
    found = check({**EGL, "CUDA_VISIBLE_DEVICES": "2"}, TURNED)
    assert [finding.variable for finding in found] == ["CUDA_VISIBLE_DEVICES"]  # EGL lists that one first
    assert found[0].effect == (
        "robosuite 1.5.1: it takes the first entry of CUDA_VISIBLE_DEVICES='2' for EGL's own index: EGL device 2, "
        f"NVIDIA H100 {uuid(0)} (nvidia-smi 0), while cuda:0, NVIDIA H100 {uuid(2)} (nvidia-smi 2), computes"
    )


def test_the_cpu_where_a_gpu_computes_is_found() -> None:
    software_first = dataclasses.replace(
        FOUR,
        egl=(
            EglDevice(0, True),
            *(dataclasses.replace(device, index=device.index + 1) for device in egl(range(4), software=False)),
        ),
    )
    found = one(EGL, software_first)
    assert found.severity == "error"
    assert "EGL device 0, Mesa's on the CPU, while cuda:0" in found.effect
    # Who writes its number may want it.
    assert one({**EGL, "MUJOCO_EGL_DEVICE_ID": "0"}, software_first).severity == "warning"


def test_a_slice_computes_and_cannot_render() -> None:
    cut = machine(3, mig={1: [SLICE]}, without=("robosuite",))
    found = one({**EGL, "CUDA_VISIBLE_DEVICES": SLICE, "MUJOCO_EGL_DEVICE_ID": "1"}, cut)
    assert "cut into MIG slices, which do not render" in found.effect
    assert 'render="cpu"' in found.fix
    assert check({**EGL, "CUDA_VISIBLE_DEVICES": SLICE, "MUJOCO_EGL_DEVICE_ID": "3"}, cut) == ()


def test_under_a_launcher_no_line_for_the_shell_suits_all_processes() -> None:
    found = one({**EGL, "LOCAL_RANK": "2"})
    assert "while cuda:2" in found.effect
    assert found.fix.endswith(".apply()")


def test_a_rank_without_a_gpu_hides_no_other_mistake() -> None:
    rank, index = check({**EGL, "LOCAL_RANK": "9", "MUJOCO_EGL_DEVICE_ID": "x"})
    assert (rank.variable, index.variable) == ("LOCAL_RANK", "MUJOCO_EGL_DEVICE_ID")
    assert index.fix.endswith(".apply()")


GRID = [
    pytest.param(renderer, mujoco, id=f"{renderer}, mujoco {mujoco}")
    for renderer, mujoco in [
        *((renderer, "3.9.0") for renderer in RENDERERS),
        ("mujoco", "4.0.0"),
        ("gymnasium", "4.0.0"),
    ]
]


@pytest.mark.parametrize(("renderer", "mujoco"), GRID)
def test_over_all_orders_and_masks_there_is_a_finding_where_the_rule_leads_elsewhere_and_its_fix_leads_right(
    renderer: str, mujoco: str
) -> None:
    findings = 0
    masks = [",".join(numbers) for length in (1, 2, 3) for numbers in itertools.permutations("012", length)]
    for order, mask in itertools.product(itertools.permutations(range(3)), [None, *masks]):
        there = machine(
            3, order=order, versions={"mujoco": mujoco}, without=tuple(set(RENDERERS) - {"mujoco", renderer})
        )
        environ = EGL if mask is None else {**EGL, "CUDA_VISIBLE_DEVICES": mask}
        right = _leads(renderer, environ, there) == (mask or "0").split(",")[0]
        about = [finding for finding in check(environ, there) if f"{renderer} " in finding.effect]
        assert len(about) == (not right)
        for finding in about:
            after = _applied_line(finding, renderer, environ, there)
            assert _leads(renderer, after, there) == (mask or "0").split(",")[0]
        findings += len(about)
    assert findings


def _leads(renderer: str, environ: Mapping[str, str], there: Inventory) -> str:
    visible = tuple(uuid(int(number)) for number in environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(","))
    rule = _renderers.find(renderer, there.versions)
    world = _renderers.EglWorld(there.egl or (), visible)
    owner = world.devices[rule.selects(environ, world)].uuid
    return "" if owner is None else str(int(owner[-12:]))


def _applied_line(finding: Finding, renderer: str, environ: Mapping[str, str], there: Inventory) -> dict[str, str]:
    if finding.fix.startswith("export"):
        after = typed(finding.fix, environ)
        index, mask = after["MUJOCO_EGL_DEVICE_ID"], after.get("CUDA_VISIBLE_DEVICES", "")
        assert renderer != "robosuite" or not mask or index in mask  # or the import would fail
        return after
    assert f'renderer="{renderer}"' in finding.fix
    decision = resolve("auto", render="same", renderer=renderer, inventory=there, environ=environ)
    return {**environ, **{name: value for name, value in decision.variables.items() if value is not None}}


CONTAINER = {**EGL, "NVIDIA_VISIBLE_DEVICES": "all"}
MACHINES: dict[str, tuple[dict[str, str], Inventory, str, str, str]] = {
    "torch for the CPU": (
        {},
        machine(2, versions={"torch": "2.13.0+cpu", "torch.cuda": ""}, without=RENDERERS),
        "torch",
        "Torch not compiled with CUDA enabled",
        "pip install --force-reinstall torch==2.13.0",
    ),
    "no graphics in the container": (
        {**EGL, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
        NO_NVIDIA_EGL,
        "NVIDIA_DRIVER_CAPABILITIES",
        f"EGL does not list NVIDIA H100 {uuid(0)}",
        "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ...",
    ),
    "no vendor file in the container": (
        CONTAINER,
        NO_NVIDIA_EGL,
        "NVIDIA_DRIVER_CAPABILITIES",
        "10_nvidia.json",
        "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ...",
    ),
    "no vendor file": (EGL, NO_NVIDIA_EGL, "EGL", "Mesa's CPU device", "apt-get install nvidia-egl-icd"),
    "drivers that are replaced": (
        {**EGL, "__EGL_VENDOR_LIBRARY_FILENAMES": "/mesa.json"},
        NO_NVIDIA_EGL,
        "__EGL_VENDOR_LIBRARY_FILENAMES",
        "replaces the drivers",
        "unset __EGL_VENDOR_LIBRARY_FILENAMES",
    ),
    "a part of /dev/dri": (
        {**EGL, "CUDA_VISIBLE_DEVICES": "3"},
        only(dataclasses.replace(FOUR, egl=egl((0, 1, 2)))),
        "EGL",
        f"does not list NVIDIA H100 {uuid(3)}",
        "docker run",
    ),
    "no EGL": (
        EGL,
        dataclasses.replace(FOUR, egl=(), egl_error="libEGL.so.1 is not installed"),
        "EGL",
        "libEGL.so.1 is not installed",
        "apt-get install libegl1",
    ),
    "no EGL and no GPU": (
        EGL,
        dataclasses.replace(machine(0, osmesa=False), egl=()),
        "EGL",
        "no device",
        "libegl-mesa0",
    ),
    "no OSMesa": ({"MUJOCO_GL": "osmesa"}, machine(4, osmesa=False), "MUJOCO_GL", "OSMesa", "export MUJOCO_GL=egl"),
    "no OSMesa and no EGL": (
        {"MUJOCO_GL": "osmesa"},
        dataclasses.replace(machine(0, osmesa=False), egl=()),
        "MUJOCO_GL",
        "OSMesa",
        "apt-get install libegl1",
    ),
    "a container that is given none": (
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        machine(0, without=RENDERERS),
        "NVIDIA_VISIBLE_DEVICES",
        "keeps NVIDIA's container runtime",
        "docker run --gpus all",
    ),
    "a container that was started without": (
        {"NVIDIA_VISIBLE_DEVICES": "all"},
        machine(0, without=RENDERERS),
        "NVIDIA_VISIBLE_DEVICES",
        "started without them",
        "docker run --gpus all",
    ),
}


@pytest.mark.parametrize(("environ", "inventory", "variable", "effect", "fix"), MACHINES.values(), ids=MACHINES)
def test_what_the_machine_lacks_is_found(
    environ: dict[str, str], inventory: Inventory, variable: str, effect: str, fix: str
) -> None:
    found = one(environ, inventory)
    assert found.variable == variable
    assert effect in found.effect
    assert fix in found.fix


def test_errors_come_before_warnings_and_what_follows_from_one_is_told_as_such() -> None:
    found = check({"cuda_visible_devices": "1", **EGL}, only(TURNED, "gymnasium"))
    assert [finding.variable for finding in found] == ["cuda_visible_devices", "MUJOCO_EGL_DEVICE_ID"]
    assert "once the other lines are typed, MUJOCO_EGL_DEVICE_ID is not set" in found[1].effect
    mixed = check({"CUDA_VISIBLE_DEVICES": "-1", "LOCAL_RANK": "x"}, BARE)
    assert [finding.severity for finding in mixed] == ["error", "warning"]


def test_every_finding_of_a_table_of_mistakes_is_one_sentence_about_the_value() -> None:
    environs = [{"CUDA_VISIBLE_DEVICES": mask} for mask in MASKS] + [environ for environ, *_ in MACHINES.values()]
    for environ, inventory in itertools.product(environs, (FOUR, TURNED, CUT, NONE, NO_NVIDIA_EGL)):
        for finding in check(environ, inventory):
            assert not re.search(r"[a-z]\. [A-Z]", finding.effect)
            assert finding.value == (
                environ.get(finding.variable) if finding.variable != "torch" else inventory.versions["torch"]
            )


PIECES = [
    "0",
    "1",
    "9",
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
    "egl",
    "osmesa",
    "²",
]
ANY_TEXT = st.text() | st.lists(st.sampled_from([*PIECES, "9" * 5000, "٣", "/", "-", ".."]), max_size=5).map("".join)
KNOWN = st.sampled_from(
    (
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM"),
        *("LOCAL_RANK", "SLURM_LOCALID", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "DISPLAY"),
        *("cuda_visible_devices", "RAY_JOB_ID"),
    )
)
ANY_MACHINE = st.sampled_from(
    (
        *(
            FOUR,
            TURNED,
            NONE,
            BARE,
            CUT,
            UNLIKE,
            UNKNOWN,
            NO_NVIDIA_EGL,
            Inventory(),
            dataclasses.replace(FOUR, egl=None),
        ),
        *(machine(2, versions={"mujoco": "4.0.0"}), machine(2, versions={"torch.cuda": ""})),
        machine(3, mig={1: [SLICE]}),
    )
)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.dictionaries(KNOWN, ANY_TEXT) | st.dictionaries(st.text() | KNOWN, ANY_TEXT), ANY_MACHINE)
def test_whatever_the_environment_holds_it_is_judged_and_left_as_it_is(
    environ: dict[str, str], inventory: Inventory
) -> None:
    before = dict(environ)
    for finding in check(environ, inventory):
        assert finding.effect
        assert finding.fix
        assert finding.severity in ("error", "warning")
    assert environ == before


def test_checking_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        check({"CUDA_VISIBLE_DEVICES": "1,9"})
        check({}, NONE)
    assert not caplog.records


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process on a machine with four GPUs, where no library has read anything."""
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    monkeypatch.setattr(_cuda, "_started_uuids", lambda: None)
    monkeypatch.setattr(_apply, "current", None)
    monkeypatch.setattr(_apply, "_held", lambda _: None)
    for module in ("mujoco.rendering.classic.gl_context", "mujoco.gl_context", "dm_control._render", "OpenGL.platform"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "robosuite.utils.binding_utils", types.ModuleType("binding_utils"))
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "MUJOCO_EGL_DEVICE_ID",
        "PYOPENGL_PLATFORM",
        "LOCAL_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    return monkeypatch


def test_a_process_in_which_nothing_is_late(here: pytest.MonkeyPatch) -> None:
    assert check_environment() == ()


def test_a_mask_that_was_set_after_cuda_had_started(here: pytest.MonkeyPatch) -> None:
    here.setenv("CUDA_VISIBLE_DEVICES", "0")
    here.setattr(_cuda, "_started_uuids", lambda: (uuid(1),))
    (found,) = check_environment()
    assert (found.variable, found.fix) == ("CUDA_VISIBLE_DEVICES", "export CUDA_VISIBLE_DEVICES=0")
    assert "torch started CUDA in this process with 1, other ones" in found.effect
    # Neither other variables nor another machine are this process's.
    assert check_environment({**EGL, "CUDA_VISIBLE_DEVICES": "0"}) == ()


def test_a_display_that_was_made_elsewhere(here: pytest.MonkeyPatch) -> None:
    here.setattr(_apply, "_held", lambda module: "display" if module == "mujoco.egl" else None)
    here.setattr(_apply, "index_of", lambda _: 3)
    assert check_environment() == ()  # nobody has asked for another one
    here.setenv("MUJOCO_EGL_DEVICE_ID", "0")
    (found,) = check_environment()  # once, though mujoco and gymnasium share it
    assert (found.variable, found.fix) == ("MUJOCO_EGL_DEVICE_ID", "export MUJOCO_EGL_DEVICE_ID=0")
    assert "mujoco.egl renders on EGL device 3 already" in found.effect


def test_a_decision_that_was_applied_is_not_judged(here: pytest.MonkeyPatch) -> None:
    decision = resolve("cuda:1", render="same", renderer="robosuite", inventory=TURNED, environ={})
    assert decision.variables["MUJOCO_EGL_DEVICE_ID"] == "3"
    for name, value in decision.variables.items():
        here.setenv(name, str(value))
    here.setenv("CUDA_VISIBLE_DEVICES", "0")  # robosuite's assertion would fail on it, and is seen to
    assert len(check_environment()) == 2
    here.setattr(_apply, "current", decision)
    assert check_environment() == ()
    here.setenv("MUJOCO_EGL_DEVICE_ID", "2")
    assert len(check_environment()) == 2


@pytest.mark.parametrize("module", ["mujoco", "dm_control._render"])
def test_a_backend_that_was_set_after_the_import(module: str) -> None:
    ended = run(
        f"""
        import warnings; warnings.simplefilter("ignore")
        import {module}
        from rl_ext_core.devices import check_environment
        before = [finding.effect for finding in check_environment() if finding.severity == "error"]
        os.environ["MUJOCO_GL"] = "osmesa"
        errors = [found for found in check_environment() if found.severity == "error"]
        answer = before, [[found.variable, found.effect, found.fix] for found in errors]
        """
    )
    assert ended.error == ""
    before, after = ended.answer
    assert before == []
    assert [(variable, fix) for variable, _, fix in after] == [("MUJOCO_GL", "export MUJOCO_GL=osmesa")] * len(after)
    assert any(f"{module}" in effect and "took MUJOCO_GL" in effect for _, effect, _ in after)


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"MUJOCO_GL": "vulkan"}, "import mujoco"),
        ({**EGL, "MUJOCO_EGL_DEVICE_ID": "x"}, "import mujoco; mujoco.GLContext(9, 9)"),
        ({**EGL, "MUJOCO_EGL_DEVICE_ID": "7"}, "import mujoco; mujoco.GLContext(9, 9)"),
        ({**EGL, "PYOPENGL_PLATFORM": "osmesa"}, "import mujoco; mujoco.Renderer"),
        (
            {"MUJOCO_GL": "glfw"},
            "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 9, 9)",
        ),
        (
            {**EGL, "CUDA_VISIBLE_DEVICES": "1", "MUJOCO_EGL_DEVICE_ID": "0"},
            "import robosuite",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_the_error_that_a_finding_quotes_is_the_one_that_the_library_raises(environ: dict[str, str], code: str) -> None:
    ended = run(code, timeout_s=60, **environ)
    quoted = re.findall(r'"((?:\w|\.)+Error: [^"]+)"', " ".join(finding.effect for finding in check(environ, NONE)))
    patterns = [re.escape(text).replace(re.escape("..."), ".*") for text in quoted]
    assert any(re.match(pattern, ended.error) for pattern in patterns), (ended.error, quoted)

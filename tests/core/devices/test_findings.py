from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import types
from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest

from rl_ext_core.devices import EglDevice, Finding, Inventory, check_environment, cuda, renderers, resolve
from rl_ext_core.devices import decision as decision_module
from rl_ext_core.devices.cuda import Machine
from tests.core.devices.machines import egl, machine, run_shell_line, uuid
from tests.core.devices.run_code import run

MASK, ORDER, GL, INDEX = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID"
PLATFORM, RANK, SHOWN, CAN = "PYOPENGL_PLATFORM", "LOCAL_RANK", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
EVERY_MUJOCO_RENDERER = "mujoco 3.9.0, gymnasium 1.4.0 (mujoco 3.9.0), dm_control 1.0.41"
SLICE, OTHER = "MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"
FOUR, REORDERED, NONE = machine(4), machine(4, order=(2, 3, 0, 1)), machine(0)
# Without a renderer, only CUDA reads the mask.
WITHOUT_RENDERERS = machine(4, without=RENDERERS)
WITH_MIG = machine(3, mig={1: [SLICE, OTHER]}, without=RENDERERS)
MIG_WITHOUT_ROBOSUITE = machine(3, mig={1: [SLICE]}, without=("robosuite",))
DIFFERENT_GPUS = machine(2, fastest_first=(1, 0), without=RENDERERS)
UNKNOWN_ORDER = dataclasses.replace(DIFFERENT_GPUS, fastest_first=None)
NO_NVIDIA_EGL = dataclasses.replace(FOUR, egl=egl(()))
NO_EGL = dataclasses.replace(FOUR, egl=(), egl_error="libEGL.so.1 is not installed")
NOTHING_RENDERS = dataclasses.replace(machine(0, osmesa=False), egl=())
CPU_TORCH = {"torch": "2.13.0+cpu", "torch.cuda": ""}


def shift_indices(devices: tuple[EglDevice, ...], by: int) -> tuple[EglDevice, ...]:
    return tuple(dataclasses.replace(device, index=device.index + by) for device in devices)


SOFTWARE_FIRST = dataclasses.replace(FOUR, egl=(EglDevice(0, True), *shift_indices(egl(range(4), software=False), 1)))
_SOFTWARE = tuple(EglDevice(place, software=True) for place in range(4))
TWELVE = dataclasses.replace(machine(8), egl=_SOFTWARE + shift_indices(egl(range(8), software=False), 4))
EGL, SCREEN = {GL: "egl"}, {"DISPLAY": ":0"}
CONTAINER = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all ..."


def with_renderers(inventory: Inventory, *renderers: str) -> Inventory:
    """Return the machine with only mujoco and these renderers."""
    others = set(RENDERERS) - {"mujoco", *renderers}
    versions = {name: text for name, text in inventory.versions.items() if name not in others}
    return dataclasses.replace(inventory, versions=versions)


def find_mistakes(environ: Mapping[str, str], inventory: Inventory = FOUR) -> tuple[Finding, ...]:
    return check_environment(environ, inventory=inventory)


GYMNASIUM, DM_CONTROL, ROBOSUITE = (with_renderers(FOUR, name) for name in ("gymnasium", "dm_control", "robosuite"))
TO_EGL, TO_PCI = f"export {GL}=egl*", f"export {ORDER}=PCI_BUS_ID"
# By value of CUDA_VISIBLE_DEVICES, on a machine with four GPUs: severity, right value, part of the effect.
MASKS: dict[str, tuple[str, str | None, str]] = {
    "": ("error", "0", 'blanks around = in "export CUDA_VISIBLE_DEVICES= 1"'),
    " 1": ("warning", "1", "skips the blank in ' 1'"),
    "0, 1": ("warning", "0,1", "nvidia-smi 0, 1"),
    "0 1": ("error", "0", "reads '0 1' as 0"),
    "'1'": ("error", "1", "the number of a GPU; torch sees no GPU"),
    "all": ("error", None, "'all' hides all 4 GPUs"),
    "NoDevFiles": ("warning", None, "hides all 4 GPUs"),
    "0,-1,2": ("error", "0", "reading at '-1'"),
    "1,1,2": ("error", "0", "is listed twice"),
    "1,9,2": ("error", "1", "stops reading at '9'"),
    "9" * 30: ("error", "0", "stops reading"),
    "GPU-aaaa": ("error", "0", "fits 2 GPUs"),
    f"{uuid(1)}, {uuid(0)}": ("error", f"{uuid(1)},{uuid(0)}", "not a UUID like those"),
    "²": ("error", "0", "'²', which is not the number"),
}
# Other mistakes: variables, machine; then the finding's variable, severity and fix as patterns, and part of its effect.
Mistake = tuple[dict[str, str], Inventory, str, str, str, str]
# fmt: off
MISTAKES: list[Mistake] = [
    *(({MASK: mask}, WITHOUT_RENDERERS, MASK, severity, f"unset {MASK}" if line is None else f"export {MASK}={line}",
       effect) for mask, (severity, line, effect) in MASKS.items()),
    ({MASK: f"{SLICE},{OTHER}"}, WITH_MIG, MASK, "warning", f"export {MASK}={SLICE}", ""),
    ({}, WITH_MIG, MASK, "warning", "*", f"{SLICE}, and no other device"),
    ({**EGL, MASK: "${GPU}"}, NONE, MASK, "error", f"export {PLATFORM}=egl *{MASK}='${{GPU}},-1,0'", "robosuite"),
    ({**SCREEN, MASK: uuid(1)}, ROBOSUITE, "*", "*", f"*{INDEX}=1", 'rendering ends in "ValueError: inv'),
    ({ORDER: "PCI"}, DIFFERENT_GPUS, ORDER, "error", TO_PCI, f"0 is NVIDIA H100 {uuid(1)} (nvidia-smi 1)"),
    ({}, DIFFERENT_GPUS, ORDER, "warning", TO_PCI, "(nvidia-smi 1)"),
    ({}, UNKNOWN_ORDER, ORDER, "error", TO_PCI, ""),
    ({RANK: "one"}, WITHOUT_RENDERERS, RANK, "error", f"unset {RANK}", ""),
    ({RANK: "'2'"}, WITHOUT_RENDERERS, RANK, "error", f"export {RANK}=2", ""),
    ({RANK: "9" * 5000}, WITHOUT_RENDERERS, RANK, "error", f"unset {RANK}", ""),
    ({RANK: "4"}, WITHOUT_RENDERERS, RANK, "error", "torchrun --nproc-per-node=4 train.py", ""),
    ({**SCREEN, GL: "EGL"}, GYMNASIUM, GL, "error", TO_EGL, "gymnasium 1.4.0"),
    ({**SCREEN, GL: "egl "}, DM_CONTROL, GL, "error", TO_EGL, "dm_control 1.0.41"),
    ({**SCREEN, GL: "'egl'"}, with_renderers(FOUR), GL, "error", TO_EGL, "mujoco 3.9.0"),
    ({**SCREEN, GL: "OSMesa"}, GYMNASIUM, GL, "error", f"export {GL}=osmesa*", "gymnasium 1.4.0"),
    ({**SCREEN, GL: "glfw", INDEX: "0"}, machine(2), "*", "warning", f"export {GL}=egl {PLATFORM}=egl", "EGL alone"),
    ({}, FOUR, GL, "warning", TO_EGL, f"{EVERY_MUJOCO_RENDERER}: "),
    ({GL: "glfw"}, FOUR, GL, "error", TO_EGL, ""),
    ({**EGL, PLATFORM: "osmesa"}, FOUR, PLATFORM, "error", "export *", ""),
    ({**EGL, PLATFORM: "EGL"}, DM_CONTROL, PLATFORM, "error", "export *", ""),
    # An index without a device is one finding for all renderers.
    *(({**EGL, INDEX: value}, FOUR, INDEX, "error", f"export *{INDEX}=0", f"{EVERY_MUJOCO_RENDERER}, robosuite 1.5.1: ")
      for value in ("", "x", "-1", "5", "²")),
    ({**EGL, INDEX: "11"}, TWELVE, INDEX, "error", "*", "(inclusive), got 11\" (it asks EGL for 10 devices of 12)"),
    ({**EGL, MASK: "0", INDEX: "2"}, REORDERED, "*", "error", f"export {PLATFORM}=egl {MASK}=0,-1,2",
     f'robosuite 1.5.1: import robosuite ends in "AssertionError: {INDEX} needs'),
    # EGL lists another GPU at the mask's index.
    ({**EGL, MASK: "2"}, REORDERED, MASK, "*", "*", f"robosuite 1.5.1: {MASK}='2' selects EGL device 2, NVIDIA H100 "
     f"{uuid(0)} (nvidia-smi 0), while cuda:0, NVIDIA H100 {uuid(2)} (nvidia-smi 2), computes"),
    (EGL, SOFTWARE_FIRST, "*", "error", "*", "EGL device 0, Mesa's on the CPU, while cuda:0"),
    ({**EGL, INDEX: "0"}, SOFTWARE_FIRST, "*", "warning", "*", ""),  # a number may be intended
    ({**EGL, MASK: SLICE, INDEX: "1"}, MIG_WITHOUT_ROBOSUITE, "*", "*", '*render="cpu"*', "which do not render"),
    ({**EGL, RANK: "2"}, FOUR, "*", "*", "*.apply()", "while cuda:2"),  # each process needs other variables
    ({**EGL, CAN: "compute,utility"}, NO_NVIDIA_EGL, CAN, "*", f"*{CONTAINER}*", f"not list NVIDIA H100 {uuid(0)}"),
    ({**EGL, SHOWN: "all"}, NO_NVIDIA_EGL, CAN, "*", f"*{CONTAINER}*", "10_nvidia.json"),
    (EGL, NO_NVIDIA_EGL, "EGL", "*", "*apt-get install nvidia-egl-icd*", "Mesa's CPU device"),
    ({**EGL, MASK: "3"}, with_renderers(dataclasses.replace(FOUR, egl=egl((0, 1, 2)))), "EGL", "*", "*docker run*",
     f"does not list NVIDIA H100 {uuid(3)}"),
    (EGL, NO_EGL, "EGL", "*", "*apt-get install libegl1*", "libEGL.so.1 is not installed"),
    (EGL, NOTHING_RENDERS, "EGL", "*", "*libegl-mesa0*", "no device"),
    ({GL: "osmesa"}, machine(4, osmesa=False), GL, "*", f"*export {GL}=egl*", "OSMesa"),
    # An index that MuJoCo does not read: google-deepmind/dm_control#310, pytorch/rl#155.
    ({**EGL, "EGL_DEVICE_ID": "2", MASK: "2"}, FOUR, "EGL_DEVICE_ID", "error", f"export {INDEX}=2",
     "dm_control and robosuite ignore it and read"),
    # Names of variables, as from .env files. Values are corrected in a second step.
    *(({**SCREEN, name: "1"}, with_renderers(FOUR), name, "error", f"export {MASK}=1", "no effect")
      for name in ("cuda_visible_devices", "CUDA_VISIBLE_DEVICE")),
    ({**SCREEN, "MUJOCO_GL ": " egl"}, with_renderers(FOUR), "MUJOCO_GL ", "error", f"export {GL}=egl", "'MUJOCO_GL '"),
]
# fmt: on


@pytest.mark.parametrize(
    ("environ", "inventory", "variable", "severity", "fix", "effect"), MISTAKES, ids=lambda v: str(v)[:60]
)
def test_mistake_is_found_and_fixed_by_its_line(
    environ: dict[str, str],
    inventory: Inventory,
    variable: str,
    severity: str,
    fix: str,
    effect: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = dict(environ)
    (found,) = find_mistakes(environ, inventory)
    assert effect in found.effect
    assert not re.search(r"[a-z]\. [A-Z]", found.effect)  # one sentence
    assert fnmatchcase(found.variable, variable)
    assert fnmatchcase(found.severity, severity)
    assert fnmatchcase(found.fix, fix)
    assert found.value == environ.get(found.variable)
    assert environ == before
    assert not caplog.records
    if found.fix.startswith(("export", "unset")):
        assert find_mistakes(run_shell_line(found.fix, environ), inventory) == ()


NEIGHBOURS = """
    NVIDIA_DRIVER_CAPABILITIES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
    ASCEND_VISIBLE_DEVICES MUSA_VISIBLE_DEVICES XPU_VISIBLE_DEVICES ZE_AFFINITY_MASK CUDA_HOME CUDA_PATH CUDA_VERSION
    CUDA_CACHE_PATH CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS RANK WORLD_SIZE NODE_RANK
    LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MPI_LOCALRANKID OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK SLURM_PROCID
    EGL_DEVICE_ID EGL_PLATFORM MUJOCO_PATH MUJOCO_PY_MUJOCO_PATH MUJOCO_PLUGIN_PATH MUJOCO_LOG PYGLET_HEADLESS
    PYOPENGL_ERROR_CHECKING PATH HOME
"""
VALID_ENVIRONMENTS: list[tuple[dict[str, str], Inventory]] = [
    ({**SCREEN, **dict.fromkeys(NEIGHBOURS.split(), "1")}, with_renderers(FOUR)),
    ({}, WITHOUT_RENDERERS),
    ({**SCREEN, GL: "glfw"}, machine(2)),
    (EGL, FOUR),
    (EGL, NONE),
    ({**EGL, MASK: "1", INDEX: "1"}, FOUR),
    ({**EGL, MASK: "2,0,1", INDEX: "0"}, REORDERED),
    ({**EGL, MASK: SLICE, INDEX: "3"}, MIG_WITHOUT_ROBOSUITE),
    ({MASK: f"{uuid(1)},{uuid(0)}"}, WITHOUT_RENDERERS),
    ({MASK: "GPU-bbbb"}, WITHOUT_RENDERERS),
    ({MASK: SLICE}, WITH_MIG),
    ({MASK: f"MIG-{uuid(1)}/1/0"}, WITH_MIG),  # as old drivers write it
    ({GL: "osmesa", PLATFORM: "osmesa"}, FOUR),
    ({ORDER: "PCI_BUS_ID"}, DIFFERENT_GPUS),
    ({ORDER: "FASTEST_FIRST"}, DIFFERENT_GPUS),
    ({MASK: uuid(1)}, UNKNOWN_ORDER),
    ({RANK: "3", "WORLD_SIZE": "4"}, WITHOUT_RENDERERS),
    ({RANK: "0", MASK: "2"}, WITHOUT_RENDERERS),  # torchrun --virtual-local-rank
    ({"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1", MASK: "3"}, WITHOUT_RENDERERS),
    ({SHOWN: "2", MASK: "2"}, WITHOUT_RENDERERS),
    (EGL, machine(2, versions=CPU_TORCH)),
    ({MASK: "1", "cuda_visible_devices": "1"}, WITHOUT_RENDERERS),
]


@pytest.mark.parametrize(("environ", "inventory"), VALID_ENVIRONMENTS, ids=str)
def test_valid_environment_has_no_findings(environ: dict[str, str], inventory: Inventory) -> None:
    assert find_mistakes(environ, inventory) == ()


@pytest.mark.parametrize("renderer", RENDERERS)
def test_variables_of_a_decision_have_no_findings(renderer: str) -> None:
    there = with_renderers(REORDERED, renderer)
    variables = resolve("auto", render="same", renderer=renderer, inventory=there, environ={}).variables
    assert find_mistakes({name: value for name, value in variables.items() if value is not None}, there) == ()


def test_several_mistakes_have_separate_findings() -> None:
    """Errors come before warnings, and consequences of another mistake are described as such."""
    found = find_mistakes({"cuda_visible_devices": "1", **EGL}, with_renderers(REORDERED, "gymnasium"))
    assert [finding.variable for finding in found] == ["cuda_visible_devices", INDEX]
    assert f"once the other lines are typed, {INDEX} is not set" in found[1].effect
    assert [entry.severity for entry in find_mistakes({MASK: "-1", RANK: "x"}, WITHOUT_RENDERERS)] == [
        "error",
        "warning",
    ]
    rank, index = find_mistakes({**EGL, RANK: "9", INDEX: "x"})
    assert (rank.variable, index.variable) == (RANK, INDEX)
    assert index.fix.endswith(".apply()")
    robust, mask = find_mistakes({**SCREEN, MASK: "1,"}, ROBOSUITE)
    assert "ValueError: invalid literal for int() with base 10: ''" in robust.effect
    assert (run_shell_line(robust.fix, {})[INDEX], mask.severity, mask.fix) == ("1", "warning", f"export {MASK}=1")


GRID = [(renderer, "3.9.0") for renderer in RENDERERS] + [("mujoco", "4.0.0"), ("gymnasium", "4.0.0")]


@pytest.mark.parametrize(("renderer", "mujoco"), GRID)
def test_findings_and_fixes_match_rules_over_all_orders_and_masks(renderer: str, mujoco: str) -> None:
    findings = 0
    masks = [",".join(numbers) for length in (1, 2, 3) for numbers in itertools.permutations("012", length)]
    for order, mask in itertools.product(itertools.permutations(range(3)), [None, *masks]):
        there = with_renderers(machine(3, order=order, versions={"mujoco": mujoco}), renderer)
        environ = EGL if mask is None else {**EGL, MASK: mask}
        right = _selected_gpu(renderer, environ, there) == (mask or "0").split(",")[0]
        about = [finding for finding in find_mistakes(environ, there) if f"{renderer} " in finding.effect]
        assert len(about) == (not right)
        for finding in about:
            after = _apply_fix(finding, renderer, environ, there)
            assert _selected_gpu(renderer, after, there) == (mask or "0").split(",")[0]
        findings += len(about)
    assert findings


def _selected_gpu(renderer: str, environ: Mapping[str, str], there: Inventory) -> str:
    """Return the number of the GPU that a renderer selects, or "" for the software device."""
    rule = renderers.find_renderer(renderer, there.versions)
    owner = there.egl[rule.select_egl_device(Machine(there, environ))].uuid
    return "" if owner is None else str(int(owner[-12:]))


def _apply_fix(finding: Finding, renderer: str, environ: Mapping[str, str], there: Inventory) -> dict[str, str]:
    """Return the variables after the user has followed a finding's fix."""
    if finding.fix.startswith("export"):
        after = run_shell_line(finding.fix, environ)
        assert (
            renderer != "robosuite" or not after.get(MASK) or after[INDEX] in after[MASK]
        )  # otherwise the import would fail
        return after
    assert f'renderer="{renderer}"' in finding.fix
    decision = resolve("auto", render="same", renderer=renderer, inventory=there, environ=environ)
    return {**environ, **{name: value for name, value in decision.variables.items() if value is not None}}


@pytest.fixture
def this_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Put this process on a machine with four GPUs, before any library has read a variable."""
    monkeypatch.setattr(Inventory, "current", lambda **_: FOUR)
    monkeypatch.setattr(cuda, "_uuids_seen_by_torch", lambda: None)
    monkeypatch.setattr(decision_module, "_applied", None)
    monkeypatch.setattr(decision_module, "display_of", lambda _: None)
    for module in ("mujoco.rendering.classic.gl_context", "mujoco.gl_context", "dm_control._render", "OpenGL.platform"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "robosuite.utils.binding_utils", types.ModuleType("binding_utils"))
    for name in (MASK, ORDER, INDEX, PLATFORM, RANK):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(GL, "egl")
    assert check_environment() == ()
    return monkeypatch


def test_mask_set_after_cuda_started_is_found(this_process: pytest.MonkeyPatch) -> None:
    this_process.setenv(MASK, "0")
    this_process.setattr(cuda, "_uuids_seen_by_torch", lambda: (uuid(1),))
    (found,) = check_environment()
    assert (found.variable, found.fix) == (MASK, f"export {MASK}=0")
    assert "was changed after torch had started CUDA: it shows 1 GPU, but torch uses 1 GPU" in found.effect
    # With given variables, torch in this process is not checked.
    assert check_environment({**EGL, MASK: "0"}) == ()


def test_index_set_by_torchrl_is_not_a_finding(this_process: pytest.MonkeyPatch) -> None:
    this_process.setenv("EGL_DEVICE_ID", "1")
    this_process.delitem(sys.modules, "torchrl.envs.libs.dm_control", raising=False)
    assert [found.variable for found in check_environment()] == ["EGL_DEVICE_ID", INDEX]
    this_process.setitem(sys.modules, "torchrl.envs.libs.dm_control", types.ModuleType("dm_control"))
    assert check_environment() == ()


def test_display_on_another_device_is_found(this_process: pytest.MonkeyPatch) -> None:
    shared = {"mujoco": "display", "gymnasium": "display"}
    this_process.setattr(decision_module, "display_of", shared.get)
    this_process.setattr(decision_module, "egl_index_of", lambda _: 3)
    assert check_environment() == ()  # no variable selects another device
    this_process.setenv(INDEX, "0")
    (found,) = check_environment()  # one finding, because mujoco and gymnasium share the display
    assert (found.variable, found.fix) == (INDEX, f"export {INDEX}=0")
    assert "mujoco.egl already renders on EGL device 3" in found.effect


def test_applied_decision_is_not_a_finding(this_process: pytest.MonkeyPatch) -> None:
    decision = resolve("cuda:1", render="same", renderer="robosuite", inventory=REORDERED, environ={})
    for name, value in decision.variables.items():
        this_process.setenv(name, str(value))
    this_process.setenv(MASK, "0")  # robosuite's assertion would fail on it, and is seen to
    assert len(check_environment()) == 2
    this_process.setattr(decision_module, "_applied", decision)
    assert check_environment() == ()
    this_process.setenv(INDEX, "2")
    assert len(check_environment()) == 2


@pytest.mark.parametrize("renderer", ["mujoco", "dm_control"])
def test_backend_set_after_import_is_found(renderer: str, this_process: pytest.MonkeyPatch) -> None:
    for module, attribute in renderers.find_renderer(renderer, FOUR.versions).reads_at_import:
        this_process.setattr(sys.modules[module], attribute, "egl", raising=False)
    assert check_environment() == ()
    this_process.setenv(GL, "osmesa")
    (found,) = (found for found in check_environment() if "read MUJOCO_GL" in found.effect)
    assert (found.variable, found.severity, found.fix) == (GL, "error", f"export {GL}=osmesa")
    assert re.match(rf"{renderer}\.\S+ read MUJOCO_GL='egl' when it was imported", found.effect)


@pytest.mark.sample(quick=1)
@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({GL: "vulkan"}, "import mujoco"),
        ({**EGL, INDEX: "x"}, "import mujoco; mujoco.GLContext(9, 9)"),
        ({**EGL, INDEX: "7"}, "import mujoco; mujoco.GLContext(9, 9)"),
        ({**EGL, PLATFORM: "osmesa"}, "import mujoco; mujoco.Renderer"),
        ({GL: "glfw"}, "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 9, 9)"),
        ({**EGL, MASK: "1", INDEX: "0"}, "import robosuite"),
    ],
    ids=str,
)
def test_quoted_error_is_raised_by_the_library(environ: dict[str, str], code: str) -> None:
    ended = run(code, **environ)
    quoted = re.findall(
        r'"((?:\w|\.)+Error: [^"]+)"', " ".join(finding.effect for finding in find_mistakes(environ, NONE))
    )
    patterns = [re.escape(text).replace(re.escape("..."), ".*") for text in quoted]
    assert any(re.match(pattern, ended.error) for pattern in patterns), (ended.error, quoted)

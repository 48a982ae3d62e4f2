"""SAPIEN and ManiSkill render by Vulkan, pyrender by a variable of its own, LIBERO through robosuite."""

from __future__ import annotations

import dataclasses
import pickle
from importlib import util

import pytest

from rl_ext_core.devices import Decision, Inventory, check_environment
from rl_ext_core.devices import resolve as real_resolve
from rl_ext_core.devices._check import Situation, predict
from rl_ext_core.devices._renderers import find
from rl_ext_core.errors import DeviceUnavailableError, MissingDependencyError
from tests.core.devices.machines import gpus, machine, uuid
from tests.core.devices.processes import run

MASK = "CUDA_VISIBLE_DEVICES"
FOUR = machine(4, order=(2, 3, 0, 1), versions={"sapien": "3.0.3", "pyrender": "0.1.45"})
# What matters to Vulkan is no EGL: a machine whose EGL tells nothing renders with SAPIEN all the same.
NO_EGL = dataclasses.replace(FOUR, egl=(), egl_error="libEGL.so.1 is not installed")
VULKAN_ONLY = dataclasses.replace(FOUR, versions={"sapien": "3.0.3", "torch": "2.13.0", "torch.cuda": "12.6"})


def resolve(device: str, render: str = "same", *, inventory: Inventory = FOUR, **environ: str) -> Decision:
    return real_resolve(device, render=render, renderer="sapien", inventory=inventory, environ=environ)


@pytest.mark.parametrize("inventory", [FOUR, NO_EGL])
@pytest.mark.parametrize(("mask", "device", "name"), [("0,1,2,3", "cuda:2", "cuda:2"), ("3,1", "cuda:1", "cuda:1")])
def test_sapien_is_handed_the_device_as_cuda_counts(inventory: Inventory, mask: str, device: str, name: str) -> None:
    decision = resolve(device, inventory=inventory, **{MASK: mask})
    assert (decision.render_device, decision.render_gpu, decision.variables) == (name, decision.gpu, {})
    assert f"pass     {name!r} as the device to render on" in decision.explain()
    assert "the same GPU = NVIDIA H100" in decision.explain()
    assert pickle.loads(pickle.dumps(decision)) == decision


def test_a_gpu_that_the_mask_hides_is_handed_to_sapien_by_its_address() -> None:
    decision = resolve("cuda:0", "nvidia-smi:3", **{MASK: "1"})
    assert (decision.render_gpu, decision.render_device) == (FOUR.gpus[3], "pci:4a:00.0")
    far = dataclasses.replace(FOUR, gpus=tuple(dataclasses.replace(g, pci=f"0001:{g.pci[5:]}") for g in gpus(4)))
    assert resolve("cuda:0", "nvidia-smi:3", inventory=far, **{MASK: "1"}).render_device == "pci:0001:4a:00.0"


def test_mani_skill_is_sapien_and_libero_is_robosuite() -> None:
    options = {"render": "same", "inventory": FOUR, "environ": {MASK: "3,1"}}
    assert real_resolve("cuda:1", renderer="mani_skill", **options) == resolve("cuda:1", **{MASK: "3,1"})
    libero = real_resolve("cuda:1", renderer="libero", **options)
    assert libero == real_resolve("cuda:1", renderer="robosuite", **options)
    assert libero.renderer == "robosuite 1.5.1"


def test_what_sapien_cannot_render_on_is_refused() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"sapien 3\.0\.3 renders on GPUs only"):
        resolve("cpu")
    with pytest.raises(DeviceUnavailableError, match=r"sapien 3\.0\.3 does not render through EGL"):
        resolve("cuda:0", "egl:0")
    cut = machine(2, mig={0: ["MIG-11111111-0000"]}, versions={"sapien": "3.0.3"})
    with pytest.raises(DeviceUnavailableError, match=r"MIG slices .* do not render"):
        resolve("cuda:0", inventory=cut, **{MASK: "0"})
    with pytest.raises(MissingDependencyError, match="pip install sapien"):
        resolve("cuda:0", inventory=machine(1))


@pytest.mark.parametrize(
    ("version", "mask", "where", "finding"),
    [("3.0.3", "1", "gpu", False), ("3.0.3", "1,2", "unknown", True), ("2.2.2", "1", "unknown", True)],
)
def test_the_doctor_says_where_sapien_lands_by_itself(version: str, mask: str, where: str, finding: bool) -> None:
    """In release 2 on GPU 0 whatever the mask: mani-skill/ManiSkill#161, #447, haosulab/SAPIEN#101, #139."""
    there = dataclasses.replace(VULKAN_ONLY, versions={**VULKAN_ONLY.versions, "sapien": version})
    found = predict(find("sapien", there.versions), Situation(there, {MASK: mask}, {MASK: mask}))
    assert found.where == where
    findings = check_environment({MASK: mask}, inventory=there)
    assert len(findings) == finding
    for entry in findings:
        assert (entry.severity, entry.variable) == ("warning", MASK)
        assert entry.fix.endswith('resolve("auto", render="same", renderer="sapien").render_device')


def test_pyrender_reads_its_own_variables() -> None:
    decision = real_resolve("cuda:1", render="same", renderer="pyrender", inventory=FOUR, environ={MASK: "3,1"})
    assert decision.variables == {"PYOPENGL_PLATFORM": "egl", "EGL_DEVICE_ID": "3"}
    alone = dataclasses.replace(FOUR, versions={"pyrender": "0.1.45", "torch": "2.13.0", "torch.cuda": "12.6"})
    environ = {"PYOPENGL_PLATFORM": "egl", MASK: "1"}
    (finding,) = check_environment(environ, inventory=alone)
    assert finding.variable == "EGL_DEVICE_ID"
    assert finding.fix == "export EGL_DEVICE_ID=3"
    assert check_environment({**environ, "EGL_DEVICE_ID": "3"}, inventory=alone) == ()
    assert uuid(2) in finding.effect


@pytest.mark.skipif(util.find_spec("pyrender") is None, reason="pyrender is not installed")
def test_pyrender_renders_on_mesa_under_a_decision() -> None:
    ended = run(
        """
        import sys
        from rl_ext_core.devices._verify import verify
        seen = verify("pyrender", "cpu")
        answer = [seen.problem, "llvmpipe" in seen.gl_renderer]
        """
    )
    assert ended.answer == [None, True], ended


@pytest.mark.skipif(util.find_spec("sapien") is None, reason="sapien is not installed")
def test_sapien_understands_the_names_that_it_is_handed() -> None:
    ended = run(
        """
        from sapien import pysapien
        answer = []
        for name in ("cuda:7", "pci:4a:00.0", "nonsense"):
            try:
                answer.append(pysapien.Device(name).name)
            except RuntimeError as error:
                answer.append(str(error))
        """
    )
    # No such device is here; an address is told from a number of another form all the same.
    assert ended.answer == [f'failed to find device "{name}"' for name in ("cuda:7", "pci:4a:00.0", "nonsense")]

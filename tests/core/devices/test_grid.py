from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from rl_ext_core.cli.run import plan_program
from rl_ext_core.devices import Inventory, renderers, resolve
from rl_ext_core.devices.cuda import Machine
from tests.core.devices import machines
from tests.core.devices.fakes import build
from tests.core.devices.test_mask import shown_by_torch
from tests.requirements import find_python

# The installed renderers, and mujoco 4 from a virtual environment of its own.
INSTALLED = {name: metadata.version(name) for name in ("mujoco", "dm_control", "robosuite")}
VERSIONS = dict.fromkeys(INSTALLED, INSTALLED) | {"mujoco 4": {"mujoco": "4.0.0"}}
every_renderer = pytest.mark.parametrize("renderer", sorted(VERSIONS))

# 24 orders, to which Mesa's software device is appended, and 64 masks.
ORDERS = list(itertools.permutations(range(4)))
MASKS = [mask for size in (1, 2, 3, 4) for mask in itertools.permutations(range(4), size)]
# Number of the 1536 cases in which a renderer selects the right GPU by the mask alone, as docs/benchmarks.md reports.
# A new release of a renderer may change it.
CORRECT_BY_MASK_ALONE = {"robosuite": 384, "mujoco": 384, "dm_control": 384, "mujoco 4": 984}
VALUES = (None, "0", "1", "2", "3", "4", "5", "", "x", "-1")

Case = dict[str, str]
Ask = Callable[[str, Sequence[Case]], list[int | None]]


@pytest.fixture
def select_gpus(drivers: build.Drivers, tmp_path: Path) -> Ask:
    """Return a function that runs a renderer's own selection; -1 is the software device, None a failure."""

    def select_gpus(renderer: str, cases: Sequence[Case]) -> list[int | None]:
        python = find_python("mujoco4") if renderer == "mujoco 4" else Path(sys.executable)
        asked, answered = tmp_path / "cases.json", tmp_path / "choices.json"
        asked.write_text(json.dumps(cases))
        drivers.run(
            [python, build.SOURCES / "upstream.py", without_version(renderer), asked, answered], build.configuration()
        )
        choices: list[int | None] = json.loads(answered.read_text())
        return choices

    return select_gpus


def without_version(renderer: str) -> str:
    return renderer.split()[0]


def machine_of(order: Sequence[int], renderer: str, count: int = 4) -> Inventory:
    """Create a machine whose EGL lists the GPUs in this order; -1 is the software device."""
    egl = [
        dataclasses.replace(machines.egl((max(number, 0),))[number < 0], index=index)
        for index, number in enumerate(order)
    ]
    return dataclasses.replace(machines.machine(count, versions=VERSIONS[renderer]), egl=tuple(egl))


def orders_and_masks() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for order in ORDERS:
        for mask in MASKS:
            yield (*order, -1), mask


def case(order: Sequence[int], environ: Mapping[str, str | None], **more: str) -> Case:
    """Return the variables of a call: those of the fake machine, and those that select devices."""
    steering = {name: text for name, text in environ.items() if text is not None}
    return {"FAKE_GPUS": "4", "FAKE_EGL_ORDER": str(build.join_numbers(order)), **steering, **more}


@pytest.mark.sample
@every_renderer
def test_render_same_selects_compute_gpu_over_all_orders_and_masks(renderer: str, select_gpus: Ask) -> None:
    """CUDA's order, and whether masks have indices or UUIDs, are random.

    The mask is changed only where robosuite's import check would reject the index, and never for CUDA.
    """
    draw, cases, plain, wanted, changed = random.Random(8), [], [], [], []
    upstream = "robosuite_import" if renderer == "robosuite" else renderer
    for number, (order, mask) in enumerate([*orders_and_masks(), *(((*order, -1), None) for order in ORDERS)]):
        fastest_first = draw.sample(range(4), 4)
        text = None if mask is None else mask_text(mask, draw.choice(["index", "uuid"]))
        environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
        if draw.random() < 0.7:
            environ["CUDA_DEVICE_ORDER"] = draw.choice(["PCI_BUS_ID", "FASTEST_FIRST"])
        counted = range(4) if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else fastest_first
        visible = visible_to_torch(text or "0,1,2,3", counted)
        fake = {"FAKE_FASTEST_FIRST": str(build.join_numbers(fastest_first))}
        ask = {
            "render": "same",
            "renderer": without_version(renderer),
            "inventory": dataclasses.replace(
                machine_of(order, renderer), fastest_first=tuple(machines.uuid(gpu) for gpu in fastest_first)
            ),
        }
        for device, gpu in (("auto", visible[0]), (f"cuda:{number % len(visible)}", visible[number % len(visible)])):
            decision = resolve(device, environ=environ, **ask)
            assert decision.gpu.index == gpu
            variables = decision.variables
            after = {**environ, **variables}
            changed.append("CUDA_VISIBLE_DEVICES" in variables)
            if changed[-1]:
                assert visible_to_torch(after["CUDA_VISIBLE_DEVICES"], counted) == visible
                # A second decision does not change the mask again, and nothing is reported about it.
                del variables["CUDA_VISIBLE_DEVICES"]
                assert resolve(device, environ=after, **ask).variables == variables
            cases.append(case(order, after, **fake))
            plain.append(case(order, {**environ, **variables}, **fake))
            wanted.append(gpu)
    assert len(cases) == 2 * (1536 + 24)
    for name in {upstream, "mujoco" if renderer == "robosuite" else renderer}:
        assert select_gpus(name, cases) == wanted
    assert [choice is None for choice in select_gpus(upstream, plain)] == changed
    assert any(changed) == (renderer == "robosuite")
    alone = [case(order, {"CUDA_VISIBLE_DEVICES": str(build.join_numbers(mask))}) for order, mask in orders_and_masks()]
    right = [
        choice == mask[0] for choice, (_, mask) in zip(select_gpus(upstream, alone), orders_and_masks(), strict=True)
    ]
    assert sum(right) == CORRECT_BY_MASK_ALONE[renderer]


def selected_gpu(
    rule: renderers.Renderer, environ: Mapping[str, str], machine: Inventory, order: Sequence[int]
) -> int | None:
    try:
        return order[rule.select_egl_device(Machine(machine, environ))]
    except renderers.RendererFailsError:
        return None


@pytest.mark.sample
@pytest.mark.parametrize(
    ("renderer", "lacks"),
    [
        *((name, "") for name in sorted(INSTALLED)),
        *(("mujoco 4", lacks) for lacks in ("", "cuda")),  # only mujoco 4 reads that property
    ],
)
def test_rule_matches_renderer(renderer: str, lacks: str, select_gpus: Ask) -> None:
    """All unusual masks and values, and random ones of the ordinary masks in all orders."""
    rule = renderers.find_renderer(without_version(renderer), VERSIONS[renderer])
    # The last one has eleven devices, of which renderers query ten.
    orders = ((2, 3, 0, 1, -1), (1, -1, 0, 2, 3), (-1,), (), (-1, -1, -1, 7, 6, 5, 4, 3, 2, 1, 0))
    whole = machines.uuid(3)
    masks = (None, "", " ", "x", "-1", "9", "0,0", "1,2,9", "3,,1", "0, 1", " 2", "2,x", "1x", "+1", "1,-1", ",1", "01")
    odd = (*masks, whole, f"{whole},{machines.uuid(0)}", "GPU-aaaa", "GPU-bbbb,GPU-aaaa1")
    cases, expected = [], []
    unusual = itertools.product(orders, odd, (*VALUES, " 1", "10", "1.0", "1,0", "+1", "1_0", "²"))
    ordinary = [(order, mask_text(mask, "index"), value) for order, mask in orders_and_masks() for value in VALUES]
    for order, mask, value in (*unusual, *random.Random(8).sample(ordinary, 3072)):
        machine = machine_of(order, renderer, 8)
        egl = tuple(dataclasses.replace(device, cuda=device.cuda and not lacks) for device in machine.egl or ())
        environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        steering = environ if value is None else {**environ, "MUJOCO_EGL_DEVICE_ID": value}
        cases.append(case(order, steering, FAKE_GPUS="8", FAKE_EGL_LACKS=lacks))
        expected.append(selected_gpu(rule, steering, dataclasses.replace(machine, egl=egl), order))
    assert {None, -1, 0, 1} <= set(expected)
    assert select_gpus(renderer, cases) == expected


@pytest.mark.sample
@pytest.mark.parametrize("renderer", ["robosuite", "mujoco", "mujoco 4"])
def test_program_under_rl_ext_run_computes_and_renders_on_its_gpu(renderer: str, select_gpus: Ask) -> None:
    masks = [None, "3,1", "2,0,1,3", mask_text((3, 0), "uuid")]
    cases, wanted = [], []
    for order, mask in itertools.product(ORDERS, masks):
        machine = machine_of((*order, -1), renderer)
        environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        for number, gpu in enumerate(visible_to_torch(mask, range(4)) if mask else range(4)):
            plan = plan_program(("python",), machine, environ, gpu=str(number), renderer=without_version(renderer))
            after = plan.environment(environ)
            assert visible_to_torch(after["CUDA_VISIBLE_DEVICES"], range(4)) == [gpu]
            cases.append(case((*order, -1), after))
            wanted.append(gpu)
    assert len(cases) == 288
    assert select_gpus("robosuite_import" if renderer == "robosuite" else renderer, cases) == wanted


def mask_text(mask: Sequence[int], by: str) -> str:
    return ",".join(str(number) if by == "index" else machines.uuid(number)[: 9 + 7 * number] for number in mask)


def visible_to_torch(mask: str, counted: Sequence[int]) -> list[int]:
    """Return the GPUs that a mask shows, by torch's own parser; indices count in CUDA's order."""
    uuids = tuple(map(machines.uuid, range(8)))
    return [uuids.index(found) for found in shown_by_torch(mask, uuids, tuple(map(machines.uuid, counted)))]


CONTEXT = """
import importlib, sys
from rl_ext_core.devices import resolve
from rl_ext_core.devices.decision import display_of, egl_index_of
renderer, module, name = sys.argv[1:]
decision = resolve("cpu", render="nvidia-smi:3", renderer=renderer)
decision.apply()
context = getattr(importlib.import_module(module), name)(64, 64)
print(decision.egl.index, egl_index_of(display_of(renderer)))
"""


@pytest.mark.sample
@pytest.mark.parametrize(
    ("renderer", "module", "context"),
    [
        ("mujoco", "mujoco.egl", "GLContext"),
        ("gymnasium", "mujoco.egl", "GLContext"),
        ("dm_control", "dm_control._render.pyopengl.egl_renderer", "EGLContext"),
        ("robosuite", "robosuite.renderers.context.egl_context", "EGLGLContext"),
    ],
)
def test_display_of_context_is_on_decided_device(
    renderer: str, module: str, context: str, drivers: build.Drivers
) -> None:
    settings = {**build.configuration(egl_order=(0, 2, 3, 1, -1)), "CUDA_VISIBLE_DEVICES": "1"}
    printed = drivers.run([sys.executable, "-c", CONTEXT, renderer, module, context], settings)
    assert printed.split() == ["2", "2"]

"""The verdicts on simulators that bear a second instance, or a second process, in all the ways that were met."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe, trials
from rl_ext_core.isolation.experiments import APART, operations
from tests.boundaries import ROOT
from tests.core.isolation import simulator
from tests.core.isolation.conftest import Variant
from tests.core.isolation.variants import COLLIDE, COLLIDING, HANGING, INDEPENDENT, SHARED, SINGLE, UNKNOWN, VARIANTS


def check(variant: Variant, name: str, own_cache: Path) -> None:
    expected, text = VARIANTS[name]
    verdict = probe(variant(name))
    assert verdict.isolation is expected, verdict
    # The others are no knowledge.
    assert len(list(own_cache.glob("*"))) == (expected in (INDEPENDENT, SINGLE, SHARED))
    assert text in verdict.explanation
    assert verdict.in_process is (expected is INDEPENDENT)
    assert verdict.cure is None
    assert verdict.declared_by == "probe"


def check_colliding(variant: Variant, name: str) -> None:
    cure, in_process = COLLIDING[name]
    verdict = probe(variant(name), cache=False)
    assert verdict.isolation is COLLIDE, verdict
    assert verdict.cure == (None if cure == "cwd" else cure), verdict
    assert ('cwd="own"' in verdict.explanation) is (cure == "cwd")
    assert verdict.in_process is in_process, verdict
    assert "in processes of their own" in verdict.explanation


@pytest.mark.sample(ci=4)
@pytest.mark.parametrize("name", ["SEEDED_BY_CLOCK", *(name for name in VARIANTS if name != "SEEDED_BY_CLOCK")])
def test_the_verdict_on_each_variant(name: str, variant: Variant, own_cache: Path) -> None:
    check(variant, name, own_cache)


@pytest.mark.sample(quick=0, ci=1)  # and one more for its cure
@pytest.mark.parametrize("name", [*COLLIDING][::-1])
def test_processes_that_collide_and_what_cures_them(name: str, variant: Variant) -> None:
    check_colliding(variant, name)


@pytest.mark.slow
def test_a_second_one_that_hangs(variant: Variant) -> None:
    verdict = probe(variant(HANGING), cache=False, timeout=2)
    assert verdict.isolation is SINGLE
    assert "building the second hangs" in verdict.explanation


@pytest.mark.exhaustive
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", [*VARIANTS, *COLLIDING])
def test_the_verdict_is_the_same_every_time(name: str, turn: int, variant: Variant, own_cache: Path) -> None:
    check(variant, name, own_cache) if name in VARIANTS else check_colliding(variant, name)


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize(
    ("source", "expected", "text"),
    [
        (simulator.Plain, INDEPENDENT, "in 100 steps"),
        (simulator.DrawsFromNumPy, SHARED, "such as self.np_random"),
        (simulator.DrawsFromPython, SHARED, "such as self.np_random"),
        (simulator.DrawsWhenBuilt, INDEPENDENT, "bit for bit"),
        (simulator.ClassAttribute, SHARED, "They share state. Use"),
        (simulator.ActsOnAll, SHARED, "returns something else from its step"),
        (simulator.IgnoresSeeds, INDEPENDENT, "bit for bit"),
        (simulator.SharedOutput, SHARED, "what the first has returned is overwritten before its step"),
        (simulator.OwnOutput, INDEPENDENT, "bit for bit"),
        (simulator.BadClose, INDEPENDENT, "bit for bit"),
        (simulator.BadCloseOfSecond, SINGLE, "closing one raises RuntimeError: another one is there"),
        (simulator.exits, UNKNOWN, "could not be tried: building it raises SystemExit: no license"),
        (simulator.NotAnEnvironment, UNKNOWN, "how a tests.core.isolation.simulator.NotAnEnvironment is stepped"),
    ],
)
def test_the_verdict_on_environments_without_a_library(source: Any, expected: Isolation, text: str) -> None:
    verdict = probe(source, cache=False)
    assert verdict.isolation is expected
    assert text in verdict.explanation


@pytest.mark.exhaustive
def test_torch_is_seeded_whenever_it_is_imported() -> None:
    assert probe(simulator.BuiltFromTorch, cache=False).isolation is INDEPENDENT


@pytest.mark.sample
@pytest.mark.parametrize("modes", [("alone",), ("first",), ("second",), APART])
def test_instances_are_used_in_the_order_of_the_script(modes: Sequence[str], own_cache: Path) -> None:
    notes = own_cache / "notes.txt"  # which trials may write to
    notes.parent.mkdir(parents=True)
    source = as_factory(functools.partial(simulator.WritesDown, str(notes)))
    with trials.TrialRunner([source]) as runner:
        runs = runner.run(modes, 12)
    expected = [operation for operation in operations(modes[0], 12) if operation.what != "done"]
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert [line[0].partition("(")[0] for line in lines] == [operation.what for operation in expected]
    seeds = [f"reset({operation.seed})" for operation in expected if operation.what == "reset"]
    assert [line[0] for line in lines if line[0].startswith("reset")] == seeds
    by_process = {(process, operation.who) for (_, process), operation in zip(lines, expected, strict=True)}
    assert len({process for process, _ in by_process}) == len(modes)
    assert all(run.done for run in runs)


REGISTERS = """
import gymnasium
from rl_ext_core.isolation import probe
from tests.core.isolation.simulator import Plain
gymnasium.register("OfThisScript" + "-v0", Plain)
def make():
    return gymnasium.make("-".join(["OfThisScript", "v0"]))
if __name__ == "__main__":
    print(probe(make, cache=False).isolation.value)
"""


@pytest.mark.slow
def test_an_id_that_only_the_script_registers_is_known(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REGISTERS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("independent\n", "")


@pytest.mark.slow
def test_steps_that_take_long_are_fewer() -> None:
    verdict = probe(simulator.Slow, cache=False)
    assert verdict.isolation is INDEPENDENT
    assert verdict.step_seconds is not None
    # Clocks of virtual machines let a sleep end a little early.
    assert verdict.step_seconds > 0.1
    found = re.search(r"in (\d+) steps", verdict.explanation)
    assert found is not None
    assert 10 <= int(found[1]) < 20

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, judge, probe
from rl_ext_core.isolation.verdict import declared_by_instance
from tests.core.isolation import simulator
from tests.core.isolation.simulator import Plain, SaysIndependent, SaysNonsense, SaysSingle

SINGLE = Isolation.SINGLE_INSTANCE


@pytest.fixture
def forbid_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge.Judge, "verdict", None)


@pytest.fixture(scope="module", autouse=True)
def register_envs() -> Iterator[None]:
    ids = {"ByClass-v0": SaysSingle, "ByName-v0": f"{simulator.__name__}:SaysSingle"}
    for name, entry_point in ids.items():
        gymnasium.register(name, entry_point)
    yield
    for name in ids:
        del gymnasium.registry[name]


@pytest.mark.parametrize(
    "source",
    [
        lambda: SaysSingle,
        lambda: functools.partial(SaysSingle),
        lambda: as_factory(SaysSingle).then(functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=7)),
        lambda: gymnasium.wrappers.TimeLimit(SaysSingle(), 7),
        lambda: "ByClass-v0",
        lambda: "ByName-v0",
        lambda: gymnasium.spec("ByName-v0"),
        lambda: [SaysIndependent, SaysSingle],
    ],
)
def test_declaration_of_a_known_class_is_used_without_building(source: Any, forbid_trials: None) -> None:
    verdict = probe(source())
    assert (verdict.isolation, verdict.declared_by, verdict.in_process) == (SINGLE, "environment", False)
    assert verdict.step_seconds is None
    assert verdict.explanation == (
        'SaysSingle.metadata["isolation"] says "single-instance". Use one process per environment.'
    )


def test_declaration_of_a_built_instance_is_used_with_measurements() -> None:
    verdict = probe(simulator.make_declared_single)
    assert (verdict.isolation, verdict.declared_by) == (SINGLE, "environment")
    assert verdict.step_seconds is not None


@pytest.mark.parametrize(("value", "in_process"), [("process", False), ("in-process", True), ("INDEPENDENT", True)])
def test_declaration_accepts_values_of_make_vec_env_and_capitals(
    value: str, in_process: bool, forbid_trials: None
) -> None:
    class Says(Plain):
        metadata = {**Plain.metadata, "isolation": value}  # noqa: RUF012

    assert probe(Says).in_process is in_process


@pytest.mark.sample
@pytest.mark.parametrize("source", [SaysNonsense, lambda: SaysNonsense()])
def test_unknown_value_is_rejected_by_name(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r'SaysNonsense.metadata\["isolation"\] is .?True.*single-instance'):
        probe(source)


def test_fmi_flag_is_found_in_nested_attributes_without_getattr() -> None:
    class Slotted:
        """Object that stores FMI's flag in a slot, and fails the test if another attribute is read."""

        __slots__ = ("canBeInstantiatedOnlyOncePerProcess",)

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    found = []
    for value in (True, False, "true", None):
        env, slotted, cycle = Plain(), Slotted(), list[Any]()
        if value is not None:
            slotted.canBeInstantiatedOnlyOncePerProcess = value
        cycle += [cycle, slotted]
        env.model = types.SimpleNamespace(parts=({"cycle": cycle},))  # type: ignore[attr-defined]
        found.append(declared_by_instance(gymnasium.wrappers.TimeLimit(env, 5)) is not None)
    assert found == [True, False, False, False]

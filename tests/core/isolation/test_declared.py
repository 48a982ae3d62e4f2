"""What an environment says of itself goes before a probe, and needs no building where the class is known."""

from __future__ import annotations

import functools
import types
from typing import Any

import gymnasium
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe, trials
from rl_ext_core.isolation.verdict import declared_by_instance
from tests.core.isolation import simulator

SINGLE = Isolation.SINGLE_INSTANCE


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(trials.TrialRunner, "__enter__", refuse)


@pytest.fixture
def registered() -> Any:
    for name, entry_point in (("ByClass-v0", simulator.SaysSingle), ("ByName-v0", f"{simulator.__name__}:SaysSingle")):
        gymnasium.register(name, entry_point)
    yield
    for name in ("ByClass-v0", "ByName-v0"):
        del gymnasium.registry[name]


@pytest.mark.parametrize(
    "source",
    [
        simulator.SaysSingle,
        functools.partial(simulator.SaysSingle),
        as_factory(simulator.SaysSingle),
        as_factory(simulator.SaysSingle).then(functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=7)),
        simulator.SaysSingle(),
        gymnasium.wrappers.TimeLimit(simulator.SaysSingle(), 7),
    ],
)
def test_it_is_believed_without_building(source: Any, no_process: None) -> None:
    verdict = probe(source)
    assert (verdict.isolation, verdict.declared_by, verdict.in_process) == (SINGLE, "environment", False)
    assert verdict.step_seconds is None
    assert verdict.explanation == (
        'SaysSingle.metadata["isolation"] says "single-instance". Use one process per environment.'
    )


@pytest.mark.parametrize("name", ["ByClass-v0", "ByName-v0"])
def test_ids_lead_to_their_class(name: str, registered: None, no_process: None) -> None:
    assert probe(name).declared_by == "environment"
    assert probe(gymnasium.spec(name)).declared_by == "environment"


def test_what_a_function_builds_says_it_when_it_is_built() -> None:
    verdict = probe(simulator.builds_what_says_single, cache=False)
    assert (verdict.isolation, verdict.declared_by) == (SINGLE, "environment")
    assert verdict.step_seconds is not None


def test_capitals_and_independence_are_understood(no_process: None) -> None:
    verdict = probe(simulator.SaysIndependent)
    assert (verdict.isolation, verdict.in_process) == (Isolation.INDEPENDENT, True)


@pytest.mark.parametrize(("said", "in_process"), [("process", False), ("in-process", True)])
def test_it_may_be_said_as_make_vec_env_says_it(said: str, in_process: bool, no_process: None) -> None:
    class Says(simulator.Plain):
        metadata = {**simulator.Plain.metadata, "isolation": said}  # noqa: RUF012

    assert probe(Says).in_process is in_process


@pytest.mark.sample
@pytest.mark.parametrize("source", [simulator.SaysNonsense, lambda: simulator.SaysNonsense()])
def test_nonsense_is_refused_by_name(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r'SaysNonsense.metadata\["isolation"\] is .?True.*single-instance'):
        probe(source, cache=False)


def test_the_flag_of_fmi_is_found_wherever_it_is_kept() -> None:
    class Slotted:
        __slots__ = ("canBeInstantiatedOnlyOncePerProcess",)

        def __init__(self, value: object) -> None:
            self.canBeInstantiatedOnlyOncePerProcess = value

    class Treacherous:
        __slots__ = ("__dict__", "unfilled")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    def holds(value: object) -> Any:
        env = simulator.Plain()
        cycle: list[Any] = [Treacherous()]
        cycle.append(cycle)
        env.model = types.SimpleNamespace(parts=({"cycle": cycle}, [Slotted(value)]))  # type: ignore[attr-defined]
        return gymnasium.wrappers.TimeLimit(env, 5)

    assert declared_by_instance(holds(True)) is not None
    assert declared_by_instance(holds(False)) is None
    assert declared_by_instance(holds("true")) is None
    assert declared_by_instance(simulator.Plain()) is None

"""The line that a person would write: where it has no dots, it builds an equal."""

from __future__ import annotations

import functools
import linecache
from typing import Any

import gymnasium
import gymnasium as gym
import numpy as np
import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.factory.record import line_of_callable, line_of_instance, line_of_spec
from tests.core.factory import worlds
from tests.core.factory.worlds import EzLine, Line, Scaled, Told, rollout

NAMES: dict[str, Any] = {**vars(worlds), **vars(gymnasium.wrappers), "gymnasium": gymnasium}


class Bare(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that takes nothing else."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)


# The layouts in which people write them are the point.
# fmt: off
alone = lambda: Line(2.0)  # noqa: E731
in_call = functools.partial(as_factory, lambda: Line(3.0))
in_list = [lambda: Line(1.0), lambda: Line(2.0), lambda: Line(2.0)]
over_lines = [
    lambda: Line(
        gain=4.0,
        length=8,
    ),
]
with_text = (lambda: Line(5.0), "lambda: Line(6.0)")
nested = (lambda: (lambda: Line(7.0)))  # noqa: E731
taking = dict(make=lambda gain=2.0, *, length=3, **kwargs: Line(gain, length, **kwargs))  # noqa: C408
# fmt: on


def local() -> Any:
    def make_line() -> Line:
        return Line(2.0)

    return make_line


LAMBDAS = [
    (alone, "lambda: Line(2.0)"),
    (in_call.args[0], "lambda: Line(3.0)"),
    (in_list[0], "lambda: Line(1.0)"),
    (in_list[2], "lambda: Line(2.0)"),
    (over_lines[0], "lambda: Line(gain=4.0, length=8)"),
    (with_text[0], "lambda: Line(5.0)"),
    (nested, "lambda: (lambda: Line(7.0))"),
    (nested(), "lambda: Line(7.0)"),
    (taking["make"], "lambda gain=2.0, *, length=3, **kwargs: Line(gain, length, **kwargs)"),
]


@pytest.mark.parametrize(("build", "line"), LAMBDAS)
def test_lambdas_are_shown_as_they_are_written(build: Any, line: str) -> None:
    assert line_of_callable(build) == line
    assert as_factory(build).line() == line


def test_a_lambda_without_a_source_is_shown_with_dots() -> None:
    assert line_of_callable(eval("lambda: Line(2.0)")) == "lambda: ..."


def test_a_lambda_of_a_notebook_cell_is_shown() -> None:
    source = "make = (\n    lambda: Line(9.0)\n)\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), names)
    try:
        assert line_of_callable(names["make"]) == "lambda: Line(9.0)"
    finally:
        del linecache.cache["<cell 1>"]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (Line, "lambda: Line()"),
        (local, "local"),
        (local(), "make_line"),
        (functools.partial(Line, 2.0, length=5), "lambda: Line(2.0, length=5)"),
        (functools.partial(functools.partial(Line, 2.0), length=5), "lambda: Line(2.0, length=5)"),
        (functools.partial(Line, np.arange(100)), "lambda: Line(...)"),
        (functools.partial(Scaled, Line(2.0)), "lambda: Scaled(Line(2.0))"),
        (Line(2.0)._seen, "Line._seen"),
        (worlds.Rewards(), "Rewards(...)"),
    ],
)
def test_what_else_can_be_called_is_named(build: Any, line: str) -> None:
    assert line_of_callable(build) == line


class Unrecorded(Line):
    """One with a ``__new__`` of its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)


def double(action: Any) -> Any:
    return 2 * action


INSTANCES = [
    (gym.make("worlds/Line-v0"), "lambda: gymnasium.make('worlds/Line-v0')"),
    (gym.make("worlds/Line-v0", gain=3.0, length=4), "lambda: gymnasium.make('worlds/Line-v0', gain=3.0, length=4)"),
    (
        gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=9),
        "lambda: gymnasium.make('CartPole-v1', render_mode='rgb_array', max_episode_steps=9)",
    ),
    (
        gym.wrappers.TimeLimit(Told(gym.make("worlds/Line-v0", gain=2.0)), 7),
        "lambda: TimeLimit(Told(gymnasium.make('worlds/Line-v0', gain=2.0)), 7)",
    ),
    (EzLine(3.0, 8), "lambda: EzLine(3.0, 8)"),
    (Bare(Line(3.0)), "lambda: Bare(Line(3.0))"),
    (Scaled(Line(), scale=3.0), "lambda: Scaled(Line(), scale=3.0)"),
    (gym.wrappers.TransformReward(Line(), double), "lambda: TransformReward(Line(), double)"),
    (gym.wrappers.TransformReward(Line(), lambda r: r), "lambda: TransformReward(Line(), lambda r: r)"),
    (Scaled(Unrecorded(3.0)), "lambda: Scaled(Unrecorded(...))"),
    (EzLine(np.arange(100)), "lambda: EzLine(...)"),  # type: ignore[arg-type]
]


def _line_of(part: Any) -> str:
    return part if isinstance(part, str) else ""


@pytest.mark.parametrize(("env", "line"), INSTANCES, ids=_line_of)
def test_lines_of_instances(env: Any, line: str) -> None:
    assert line_of_instance(env) == line


@pytest.mark.parametrize(("env", "line"), [case for case in INSTANCES if "..." not in case[1]], ids=_line_of)
def test_a_line_without_dots_builds_an_equal(env: Any, line: str) -> None:
    built = eval(line, {**NAMES, "Bare": Bare, "double": double})()
    assert rollout(built) == rollout(as_factory(env, verify=False)())


SPECS = [
    (gym.spec("FrozenLake-v1"), "lambda: gymnasium.make('FrozenLake-v1')"),
    (
        gym.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True).spec,
        "lambda: gymnasium.make('CartPole-v1', max_episode_steps=-1, disable_env_checker=True)",
    ),
    (Told(gym.make("worlds/Line-v0"), 5.0).spec, "lambda: Told(gymnasium.make('worlds/Line-v0'), scale=5.0)"),
]


@pytest.mark.parametrize(("spec", "line"), SPECS, ids=_line_of)
def test_lines_of_specifications(spec: Any, line: str) -> None:
    assert line_of_spec(spec) == line


def test_a_made_environment_that_gymnasium_no_longer_knows_has_a_line() -> None:
    gym.register("worlds/Gone-v0", entry_point="tests.core.factory.worlds:Line", max_episode_steps=5)
    env = gym.make("worlds/Gone-v0", gain=2.0)
    del gym.registry["worlds/Gone-v0"]
    assert line_of_instance(env) == "lambda: gymnasium.make('worlds/Gone-v0', gain=2.0)"
    assert as_factory(env)().unwrapped.gain == 2.0

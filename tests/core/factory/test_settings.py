from __future__ import annotations

import collections
import enum
import itertools
import os
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers

from rl_ext_core.factory import as_factory
from tests.core.factory.copying import COPIED, EITHER, NOT_SILENT, Case, HoldingEnv, Line, Scaled, rollout, try_rollout

Change = Callable[[Any], object]


def _change_base(name: str, value: Any) -> Change:
    return lambda env: setattr(env.unwrapped, name, value)


LINE: dict[str, tuple[set[str], Change]] = {
    "_max_episode_steps": (COPIED, lambda env: env.set_wrapper_attr("_max_episode_steps", 5)),
    "gain": (COPIED, _change_base("gain", 3.5)),
    "bonus": (COPIED, lambda env: setattr(env.unwrapped.rewards, "bonus", 11.0)),
    "weights": (COPIED, lambda env: env.unwrapped.weights.__setitem__(1, -2.0)),
    "ticks": (COPIED, _change_base("ticks", 1_000)),
    "drift": (COPIED, _change_base("drift", 0.5)),  # This sets the instance's attribute, not the class's.
    "push": (EITHER, _change_base("push", lambda action: 0.5 * action)),
    "action_space": (EITHER, _change_base("action_space", gym.spaces.Discrete(2))),
    "note": (COPIED, _change_base("note", {"mine": [1, (2.5, "x")]})),
}


def _make_registered() -> Any:
    return gym.make("copies/Line-v0", max_episode_steps=9)


MAKERS: dict[str, Callable[[], Any]] = {
    "by its id": _make_registered,
    "by its id with arguments": lambda: gym.make("copies/Line-v0", gain=2.0, length=4, max_episode_steps=9),
    "constructed": lambda: wrappers.TimeLimit(Line(gain=2.0), 9),
    "under a wrapper without specification": lambda: wrappers.TimeLimit(Scaled(_make_registered(), 3.0), 20),
}


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize("name", LINE)
def test_single_change_is_copied_or_reported(name: str, copy_outcome: Any) -> None:
    env, (allowed, change) = _make_registered(), LINE[name]
    rollout(env)
    change(env)
    assert copy_outcome(env, name.strip()) in allowed


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_several_changes_together_are_copied(make: Any, used: bool, copy_outcome: Any) -> None:
    env = make()
    if used:
        rollout(env)
    for allowed, change in LINE.values():
        if allowed is COPIED:
            change(env)
    assert copy_outcome(env) == "copied"


# -- Objects that environments store, each changed after seven steps.


class Body:
    def __init__(self, mass: float) -> None:
        self.mass = mass


class Heavy(Body):
    """Object whose property has the name of the instance attribute that stores its value."""

    @property
    def mass(self) -> float:
        return 2.0 + float(vars(self)["mass"])

    @mass.setter
    def mass(self, value: float) -> None:
        vars(self)["mass"] = value


class Point:
    __slots__ = ("__private", "a")

    def set(self, value: float) -> Point:
        self.a = self.__private = value
        return self

    def get(self) -> float:
        """Return the sum of both slots, so that a lost one shows."""
        return self.a + self.__private


class Immutable(np.ndarray[Any, Any]):
    """Array that cannot be written to, as JAX's arrays."""

    def __setitem__(self, *arguments: Any) -> None:
        raise TypeError("use .at[]")


class Mode(enum.Enum):
    SLOW, FAST = 1.0, 4.0


def _replace_stored(value: Any) -> Change:
    return lambda env: setattr(env, "held", value() if callable(value) else value)


def _set_on_stored(**values: Any) -> Change:
    return lambda env: [setattr(env.held, name, value) for name, value in values.items()]


def _make_cycle() -> dict[str, Any]:
    made: dict[str, Any] = {"v": 1.0}
    made["itself"] = made
    return made


def _make_views() -> list[Any]:
    whole = np.zeros(10)
    return [whole, whole[::2]]


def _make_closures() -> Any:
    count = 0

    def add(by: int) -> int:
        nonlocal count
        count += by
        return count

    return add, lambda: count * 10


def _make_torch_module() -> Any:
    import torch

    made = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    made.register_buffer("b", torch.ones(1), persistent=False)
    return made


CASES: dict[str, Case] = {
    # Plain data is always copied.
    "number": Case(COPIED, lambda: 1.0, float, _replace_stored(7.0)),
    "nested": Case(COPIED, lambda: {"a": [1.0, (2, {"b": 3.0})]}, lambda h: h["a"][1][1]["b"],
                   lambda env: env.held["a"][1][1].update(b=5.0)),
    "key taken": Case(COPIED, lambda: {"a": 1.0, "b": 9.0}, lambda h: sum(h.values()), lambda env: env.held.pop("b")),
    "array": Case(COPIED, lambda: np.ones((2, 3)), np.sum, lambda env: env.held.__setitem__((1, 1), 7)),
    "immutable array": Case(COPIED, lambda: np.ones(3).view(Immutable), np.sum,
                            _replace_stored(lambda: np.full(3, 7.0).view(Immutable))),
    "attribute": Case(COPIED, lambda: Body(1.0), lambda h: h.mass, _set_on_stored(mass=4.0)),
    "attribute deleted": Case(EITHER, lambda: Body(1.0), lambda h: hasattr(h, "mass"),
                              lambda env: delattr(env.held, "mass")),
    "slots": Case(EITHER, lambda: Point().set(1.0), lambda h: h.get(), lambda env: env.held.set(7.0)),
    "enumerated": Case(COPIED, lambda: Mode.SLOW, lambda h: h.value + (h is Mode.FAST), _replace_stored(Mode.FAST)),
    "torch tensor": Case(COPIED, lambda: pytest.importorskip("torch").zeros(4), lambda h: h.sum(),
                         lambda env: env.held.fill_(3.0)),
    # Structured objects are copied or rejected.
    "cycle": Case(EITHER, _make_cycle, lambda h: h["itself"]["itself"]["v"], lambda env: env.held.update(v=3.0)),
    "one object twice": Case(EITHER, lambda: [[1.0]] * 2, lambda h: h[0].append(1.0) or sum(h[1]),
                             lambda env: env.held[0].append(5.0)),
    "one object no longer twice": Case(EITHER, lambda: [[1.0]] * 2, lambda h: h[0].append(1.0) or sum(h[1]),
                                       lambda env: env.held.__setitem__(0, [1.0] * len(env.held[0]))),
    "views": Case(EITHER, _make_views, lambda h: h[1].__iadd__(1) is None or h[0].sum(),
                  lambda env: env.held[0].fill(3)),
    "read-only array": Case(EITHER, lambda: np.ones(2), lambda h: h.flags.writeable,
                            lambda env: env.held.setflags(write=False)),
    "property": Case(EITHER, lambda: Heavy(1.0), lambda h: h.mass, _set_on_stored(mass=4.0)),
    "containers": Case(EITHER, lambda: [collections.deque([1.0, 2.0], maxlen=3), collections.Counter("aab"),
                                        collections.ChainMap({}, {"a": 1}), collections.defaultdict(float)],
                       lambda h: h[0].append(h[0][0]) or sum(h[0]) + h[1]["a"] + h[2]["a"] + h[3]["q"],
                       lambda env: [env.held[0].append(5.0), env.held[2].update(a=9), env.held[3].update(q=2.0)]),
    "set of texts": Case(COPIED, lambda: set("abcdefgh"), lambda h: sum(map(ord, h)),
                         lambda env: env.held.add("z")),
    "keyed by id": Case(EITHER, lambda: (lambda o: [o, {id(o): 1.0}])(Body(1.0)), lambda h: h[1].get(id(h[0]), -9),
                        lambda env: env.held[1].update({id(env.held[0]): 5.0})),
    # Functions.
    "function": Case(EITHER, lambda: lambda: 1.0, lambda h: h(), _replace_stored(lambda: lambda: 5.0)),
    "closure": Case(EITHER, lambda: (lambda k: [k, lambda: k[0]])([1.0]), lambda h: h[1](),
                    lambda env: env.held[0].__setitem__(0, 9.0)),
    "shared variable": Case(EITHER, _make_closures, lambda h: h[0](1) + h[1](), lambda env: env.held[0](50)),
    # The progress of iterators outlasts resets.
    "iterator of a list": Case(EITHER, lambda: iter(list(range(90))), next, lambda env: next(env.held)),
    "generator": Case(NOT_SILENT, lambda: (i * i for i in range(900)), next, lambda env: next(env.held)),
    "queue": Case(EITHER, lambda: types.SimpleNamespace(q=queue.Queue()),
                  lambda h: h.q.qsize(), lambda env: env.held.q.put(1)),
    # Libraries.
    "torch module": Case(EITHER, _make_torch_module, lambda h: h[0].weight.sum() + h.b.sum() + h.training,
                         lambda env: [env.held.b.data.mul_(7), env.held[0].weight.data.fill_(2.0), env.held.eval()]),
}  # fmt: skip


@pytest.mark.sample(quick=6, ci=22)
@pytest.mark.parametrize("case", CASES)
def test_changed_object_in_an_environment_is_copied_or_reported(case: str, copy_outcome: Any) -> None:
    env = HoldingEnv(__name__, case)
    rollout(env)
    CASES[case].change(env)
    assert copy_outcome(env, "held") in CASES[case].allowed


def test_an_immutable_array_is_replaced_in_a_constructed_copy() -> None:
    env = HoldingEnv(__name__, "immutable array")
    CASES["immutable array"].change(env)
    factory = as_factory(env)
    assert factory.origin == "constructor"
    assert repr(factory().held) == repr(env.held)


class Resetting(gym.Env[Any, Any]):
    """Environment whose resets write to attributes that contain settings."""

    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (7,), np.float64)

    def __init__(self) -> None:
        self.lazy: float | None = None
        self.world: list[float] | None = None
        self.params: dict[str, float] = {"gain": 1.0}
        self.weights, self.goal, self.is_fixed = np.ones(2), 0.0, False
        self.numbers = collections.OrderedDict(a=1.0, b=2.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.lazy = 10.0 if self.lazy is None else self.lazy
        self.world = [1.0, 2.0] if self.world is None else self.world
        self.params = {**self.params, "time": 0.0}
        self.weights = self.weights / self.weights.sum()
        self.goal = self.goal if self.is_fixed else float(self.np_random.random())
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.params["time"] += 1
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        held = [
            float(self.lazy or 0),
            sum(self.world or ()),
            *self.params.values(),
            self.goal,
            self.weights[0],
            next(iter(self.numbers.values())),
        ]
        return np.array(held)


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda env: setattr(env, "lazy", 50.0),
        lambda env: setattr(env, "world", [9.0, 9.0]),
        lambda env: env.params.update(gain=3.0),
        lambda env: setattr(env, "weights", np.array([1.0, 9.0])),
        lambda env: [setattr(env, "is_fixed", True), setattr(env, "goal", 7.0)],
        lambda env: env.numbers.move_to_end("a"),
    ],
    ids=[
        "created at the first reset",
        "list created at the first reset",
        "in a dict that resets replace",
        "normalized",
        "fixed goal",
        "order",
    ],
)
def test_setting_in_an_attribute_that_resets_write_is_copied(change: Change, used: bool, copy_outcome: Any) -> None:
    env = Resetting()
    if used:
        rollout(env)
    change(env)
    assert copy_outcome(env) == "copied"


class Counting(Line):
    """Environment that counts its episodes in a dict of the caller's."""

    def __init__(self, options: dict[str, float]) -> None:
        super().__init__()
        self.options = options

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options["episodes"] = self.options.get("episodes", 0) + 1
        return super().reset(seed=seed)

    def push(self, action: Any) -> float:
        return self.options["episodes"] + self.options.get("wind", 0.0)


class Optioned(Scaled):
    def __init__(self, env: Any, options: dict[str, float]) -> None:
        super().__init__(env)
        self.options = options


@pytest.mark.parametrize("change", [{}, {"wind": 5.0}])
def test_dict_that_two_layers_share_is_copied_with_what_resets_added(
    change: dict[str, float], copy_outcome: Any
) -> None:
    options: dict[str, float] = {"size": 1.0}
    env = Optioned(Counting(options), options)
    rollout(env)
    options.update(change)
    assert copy_outcome(env, "options") in EITHER


# -- gymnasium's wrappers, and changes of their options.


def _make_cartpole(**options: Any) -> Any:
    return gym.make("CartPole-v1", **options)


# Names of wrappers, with arguments, by the function that makes the environment under them.
WRAPPED: dict[Callable[[], Any], dict[str, tuple[Any, ...]]] = {
    _make_cartpole: {
        "Autoreset": (), "DelayObservation": (2,), "FrameStackObservation": (4,), "NumpyToTorch": (),
        "PassiveEnvChecker": (), "RepeatAction": (2,), "StickyAction": (0.3,), "TimeAwareObservation": (),
        "TransformReward": (lambda reward: reward * 2,),
    },
    lambda: gym.make("Pendulum-v1"): {
        "ClipAction": (), "DiscretizeObservation": (5,), "RescaleAction": (-1, 1),
        "TransformAction": (lambda action: action * 0.5, gym.spaces.Box(-1, 1, (1,))),
    },
    lambda: wrappers.AddRenderObservation(_make_cartpole(render_mode="rgb_array")): {
        "GrayscaleObservation": (), "MaxAndSkipObservation": (2,), "ObstructView": (0.3, 3),
    },
    lambda: wrappers.TimeAwareObservation(_make_cartpole(), flatten=False): {"FilterObservation": (["time"],)},
    lambda: _make_cartpole(render_mode="rgb_array"): {"RenderCollection": ()},
}  # fmt: skip


@pytest.mark.sample(quick=3, ci=14)
@pytest.mark.parametrize(
    ("make", "name", "arguments"),
    [(make, name, arguments) for make, wrapped in WRAPPED.items() for name, arguments in wrapped.items()],
)
def test_environment_under_each_wrapper_is_copied(
    make: Callable[[], Any], name: str, arguments: tuple[Any, ...], copy_outcome: Any
) -> None:
    env = getattr(wrappers, name)(make(), *arguments)
    rollout(env)
    assert copy_outcome(env, steps=6) == "copied"
    env.close()


# -- Environments and wrappers of unusual classes.

_ports = itertools.count(5000)


class Connecting(Line):
    def __init__(self) -> None:
        super().__init__()
        self.port = next(_ports)

    def push(self, action: Any) -> float:
        return float(self.port)


class Locking(Line):
    """Environment with two locks whose names begin with ``gain``. The first step creates one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain_lock, self.gain_window = threading.Lock(), None

    def step(self, action: Any) -> Any:
        self.gain_window = self.gain_window or threading.Lock()
        return super().step(action)


class Raising(Line):
    def step(self, action: Any) -> Any:
        raise ArithmeticError("no move here")


class AbortsWhenRendered(Line):
    render_mode = "rgb_array"

    def render(self) -> Any:
        os.abort()


class Forwarding(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that forwards unknown attributes, even before it has an environment."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class Refusing(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        vars(self)["_closed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_closed" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Sides(enum.Flag):  # It caches combinations of its members.
    LEFT, RIGHT = 1, 2


class Sided(Line):
    sides = Sides.LEFT

    def push(self, action: Any) -> float:
        return float((self.sides | Sides(0)).value)


def test_combined_flag_is_copied(copy_outcome: Any) -> None:
    env = Sided()
    env.sides = Sides.LEFT | Sides.RIGHT
    assert copy_outcome(env) == "copied"


@pytest.mark.parametrize("kind", [Locking, Raising, AbortsWhenRendered, Forwarding, Refusing])
def test_setting_in_an_unusual_environment_is_copied(kind: Any, copy_outcome: Any) -> None:
    env = kind(Line()) if issubclass(kind, gym.Wrapper) else kind()
    try_rollout(env)
    env.unwrapped.gain = 3.5
    assert copy_outcome(env, "gain") == "copied"
    assert as_factory(env)().unwrapped.gain == 3.5


def test_value_that_differs_in_each_instance_is_named(copy_outcome: Any) -> None:
    env = Connecting()
    env.port = 7777
    assert copy_outcome(env, ".port") == "warned"

from __future__ import annotations

import functools
import gc
import re
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
import torchrl.envs
from torchrl.data import Bounded, NonTensor
from torchrl.envs import CatFrames, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper

from rl_ext_core.errors import (
    EnvironmentOutputError,
    InvalidArgumentError,
    InvalidTypeError,
    NotCopyableError,
    WorkerError,
)
from rl_ext_core.factory import EnvFactory
from rl_ext_core.factory.compare import run_in_subprocess
from rl_ext_core.factory.record import source_of_environment
from rl_ext_core.factory.walk import fingerprint
from rl_ext_core.vector.environments import PoolOptions
from tests.environments import Counting, count_events
from tests.leaks import running_workers
from tests.torchrl_ext.parallel_environments import NativeEnv
from torchrl_ext import GymWrapper, ParallelEnv, as_factory
from torchrl_ext.parallel.plan import WorkerPlan

pytestmark = pytest.mark.usefixtures("no_workers_left")

slow = pytest.mark.slow

EVENTS = ("built", "reset", "stepped", "closed")


def observed_depths(env: ParallelEnv) -> list[float]:
    return env.rollout(3)["observation"][:, 0, 2].tolist()


def make_changed_counting(depth: float = 3.0) -> Counting:
    source = Counting()
    source.depth = depth
    return source


def make_transformed_counting() -> TransformedEnv:
    env = TransformedEnv(GymWrapper(Counting()), RewardSum())
    env.base_env._env.depth = 3.0
    env.append_transform(StepCounter(5))
    return env


def make_counting(depth: float = 3.0) -> GymWrapper:
    return GymWrapper(Counting(depth))


SOURCES: dict[str, Any] = {
    "an instance": make_changed_counting,
    "an instance of TorchRL's": lambda: GymWrapper(make_changed_counting()),
    "a transformed instance": make_transformed_counting,
    # The buffer of CatFrames is uninitialized before a reset.
    "an instance with unused CatFrames": lambda: TransformedEnv(
        GymWrapper(make_changed_counting()), CatFrames(1, dim=-1, in_keys=["observation"])
    ),
    "a function": lambda: make_counting,
    "a lambda": lambda: lambda: GymWrapper(Counting(3.0)),
    "a partial": lambda: functools.partial(Counting, 3.0),
    "a factory": lambda: as_factory(make_changed_counting()),
    "a list of functions": lambda: [make_counting, lambda: Counting(3.0)],
    "a list of instances": lambda: [make_changed_counting(), make_changed_counting()],
    "a list of one instance": lambda: [make_changed_counting()] * 2,
}
FORMS_FOR_OTHER_METHODS = ("a transformed instance", "a lambda")


@pytest.mark.sample(quick=3, ci=7)
@pytest.mark.parametrize(
    ("form", "method"),
    [
        *((form, None) for form in SOURCES),
        *(pytest.param(form, method, marks=slow) for form in FORMS_FOR_OTHER_METHODS for method in ("spawn", "fork")),
    ],
)
def test_sources_are_not_built_in_the_parent_process(form: str, method: str | None, event_log: Path) -> None:
    source = SOURCES[form]()
    before = [count_events(event, in_this_process=True) for event in EVENTS]
    env = ParallelEnv(2, source, mp_start_method=method)
    assert env.observation_spec["observation"].shape == (2, 3)
    assert observed_depths(env) == [3.0, 3.0]
    env.close()
    assert [count_events(event, in_this_process=True) for event in EVENTS] == before
    assert count_events("closed", in_this_process=False) >= 2


def make_with_import() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


@pytest.mark.parametrize(
    ("source", "is_needed"), [(lambda: make_with_import(), True), (make_with_import, True), (Counting, False)]
)
def test_torchrl_is_imported_once_for_workers_that_need_it(source: Any, is_needed: bool) -> None:
    plan = WorkerPlan(source, 2, PoolOptions())
    assert plan.is_gymnasium
    assert ("torchrl_ext" in plan.factories[0].preload) == is_needed


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("make", [make_counting, make_changed_counting, NativeEnv, make_transformed_counting])
def test_instances_stay_unchanged_and_usable(make: Any, event_log: Path) -> None:
    instance = make()
    instance.reset()
    before = fingerprint(instance)
    env = ParallelEnv(2, instance, seed=0)
    env.rollout(3)
    env.close()
    del env
    gc.collect()
    assert before.differences(fingerprint(instance)) == []
    assert count_events("closed", in_this_process=True) == 0
    if isinstance(instance, Counting):
        assert instance.step(0)[0][0] == 1
    else:
        assert instance.rollout(2).shape == (2,)


def test_instance_is_compared_with_its_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compares the copy also reads the metadata for buffers."""
    compare = mock.Mock(side_effect=run_in_subprocess)
    monkeypatch.setattr("rl_ext_core.factory.compare.run_in_subprocess", compare)
    ParallelEnv(2, make_changed_counting())
    compare.assert_called_once()
    factory = as_factory(make_changed_counting())
    compare.reset_mock()
    ParallelEnv(2, factory)
    compare.assert_not_called()


def test_each_worker_gets_only_its_own_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all factories for each worker, the start of N workers would take N² pickles."""
    pickled, reduce = [], EnvFactory.__reduce__
    monkeypatch.setattr(EnvFactory, "__reduce__", lambda factory: pickled.append(factory) or reduce(factory))
    env = ParallelEnv(4, as_factory(make_changed_counting()), seed=0)
    env.reset()
    assert len(pickled) == 4
    env.close()


@pytest.mark.slow
def test_environments_are_built_with_num_sub_threads_and_have_the_same_specs() -> None:
    def make_env() -> NativeEnv:
        if torch.get_num_threads() != 3:
            raise RuntimeError(f"{torch.get_num_threads()} threads")
        return NativeEnv(size=2)

    env = ParallelEnv(create_env_fn=[make_env, NativeEnv(size=2)], num_sub_threads=3)
    assert env.rollout(3)["observation"].shape == (2, 3, 2)
    env.close()


CHANGED_SPACE = r"environment \d has observation_space=.*expected .*3"
NO_BUFFERS = r"environment 1 has .* Use torchrl.envs.ParallelEnv\(num"
# A source, its overrides, and an error.
OTHER_SPECS: list[tuple[Any, Any, str]] = [
    ([NativeEnv, functools.partial(NativeEnv, size=4)], None, NO_BUFFERS),
    ([NativeEnv, functools.partial(NativeEnv, note="a")], None, NO_BUFFERS),
    ([NativeEnv, functools.partial(NativeEnv, high=2)], None, NO_BUFFERS),
    (Counting(), [{"observation_space": gymnasium.spaces.Box(-1, 1, (size,))} for size in (3, 5)], CHANGED_SPACE),
    (NativeEnv, [{"size": 3}, {"size": 5}], CHANGED_SPACE),
]


@pytest.mark.parametrize(("source", "overrides", "text"), OTHER_SPECS)
def test_environments_with_other_specs_are_refused(source: Any, overrides: Any, text: str) -> None:
    env = ParallelEnv(2, source, overrides=overrides)
    with pytest.raises(EnvironmentOutputError, match=text):
        env.reset()


class Prompted(NativeEnv):
    """``NativeEnv`` whose spec contains the first text of an environment."""

    def __init__(self, note: str) -> None:
        super().__init__(note=note)
        self.observation_spec["note"] = NonTensor((), example_data=note)


def test_texts_in_specs_may_differ() -> None:
    env = ParallelEnv(2, [functools.partial(Prompted, "a"), functools.partial(Prompted, "b")])
    assert env.reset()["note"] == ["a", "b"]
    assert env.fake_tensordict()["note"] == "a"
    env.close()


# -- overrides


def make_counting_of_width(width: float) -> Counting:
    return Counting(width)


OVERRIDDEN: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "arguments": (lambda **kwargs: Counting(**kwargs), {"overrides": [{"depth": 1.0}, {"depth": 2.0}]}, [1.0, 2.0]),
    "attributes": (make_changed_counting, {"overrides": [{"depth": 1.0}, {"depth": 2.0}]}, [1.0, 2.0]),
    "classes": ([Counting, make_counting_of_width], {"overrides": [{"depth": 1.0}, {"width": 2.0}]}, [1.0, 2.0]),
    "one function twice": (
        [make_changed_counting, make_counting_of_width, make_changed_counting],
        {"overrides": [{}, {"width": 2.0}, {"depth": 4.0}]},
        [3.0, 2.0, 4.0],
    ),
    "create_env_kwargs": (
        *(make_counting, {"create_env_kwargs": {"depth": 1.0}, "overrides": [{}, {"depth": 2.0}]}, [1.0, 2.0]),
    ),
}


@pytest.mark.sample(quick=1, ci=4)
@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overrides_apply_to_each_environment(name: str) -> None:
    source, options, expected = OVERRIDDEN[name]
    source = GymWrapper(source()) if name == "attributes" else source
    env = ParallelEnv(np.int64(len(expected)), source, seed=np.int64(0), **options)
    assert observed_depths(env) == expected
    env.close()


def test_unsuitable_overrides_and_arguments_are_rejected() -> None:
    with pytest.raises(
        (InvalidArgumentError, WorkerError), match=r"no layer of Counting has the attribute depht.*depth"
    ):
        ParallelEnv(2, make_changed_counting(), overrides=[{"depht": 1.0}, {}]).reset()
    with pytest.raises(InvalidArgumentError, match=r"'depth': 4.0.* cannot be set later: .*create_env_kwargs="):
        ParallelEnv(2, make_counting).update_kwargs({"depth": 4.0})


@pytest.mark.parametrize("name", ["frame_skip", "_categorical_action_encoding", "_env"])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())])
def test_overrides_of_torchrls_wrapper_are_refused(name: str, wrap: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"no layer of Counting has .*{name}|set {name} of GymWrapper: .*\[make_first"
    ):
        ParallelEnv(2, wrap(GymWrapper(Counting())), overrides=[{}, {name: True}])


# -- invalid arguments


def test_sources_that_are_not_environments_or_not_copyable_are_rejected() -> None:
    with pytest.raises(WorkerError, match=r"TorchRL has no wrapper for .* of type builtins\.dict") as caught:
        ParallelEnv(2, dict)
    assert isinstance(caught.value.__cause__, InvalidTypeError)
    source = make_changed_counting()
    source.rope = (number for number in range(3))  # type: ignore[attr-defined]
    with pytest.raises(NotCopyableError, match=r"(?s)Counting .*rope.*generator.*lambda: Counting\("):
        ParallelEnv(2, source)
    assert not running_workers()


def test_verify_false_skips_the_comparison_of_copies() -> None:
    source = make_changed_counting()
    source.__class__ = type("Counting", (Counting,), {})  # a class that its module does not contain
    env = ParallelEnv(2, source, verify=False)
    assert observed_depths(env) == [3.0, 3.0]
    env.close()


TWO = (2, Counting)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((2, 7), {}, InvalidTypeError, "7 builds no environment"),
        ((0, Counting), {}, InvalidArgumentError, "num_workers=0"),
        *(
            (TWO, {name: value}, InvalidArgumentError, f"{name}={value} is not a time")
            for name, value in (("start_timeout", 0), ("step_timeout", 0), ("shutdown_timeout", -1))
        ),
        ((True, Counting), {}, InvalidTypeError, "num_workers=True"),
        ((3, [Counting] * 2), {}, InvalidArgumentError, r"has length 2 for num_workers=3.*ParallelEnv\(2"),
        ((Counting,), {}, InvalidTypeError, r"no environment; num_workers is of type type\. Use ParallelEnv\(4, env\)"),
        ((np.float64(2), Counting), {}, InvalidTypeError, "num_workers=np.float64"),
        (TWO, {"overrides": {"depth": 1.0}}, InvalidTypeError, "overrides=.* is not a list of mappings"),
        (TWO, {"overrides": [{}]}, InvalidArgumentError, "overrides has length 1: expected one entry for each"),
        (
            TWO,
            {"create_env_kwargs": [{}] * 3},
            InvalidArgumentError,
            "create_env_kwargs has length 3 for num_workers=2",
        ),
        (TWO, {"seed": -1}, InvalidArgumentError, "seed=-1"),
        (TWO, {"devices": "fastest"}, InvalidArgumentError, r"(?s)devices='fastest'.*resolve\("),
        (TWO, {"devices": [3, 4]}, InvalidArgumentError, r"(?s)devices=.*resolve\("),
        (TWO, {"mp_start_method": "telepathy"}, InvalidArgumentError, "telepathy"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ParallelEnv(*arguments, **options)


# -- environments of other libraries


@slow
@pytest.mark.parametrize(
    ("make", "shape", "copied"),
    [
        (lambda: gymnasium.vector.SyncVectorEnv([Counting] * 3), (2, 3, 3), False),
        (lambda: pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11").parallel_env(), (2, 3), True),
        (lambda: pytest.importorskip("dm_control.suite").load("cartpole", "balance"), (2, 3), True),
    ],
)
def test_environments_of_other_libraries_run_in_workers(make: Any, shape: tuple[int, ...], copied: bool) -> None:
    env = ParallelEnv(2, make() if copied else make)
    rollout = env.rollout(3)
    assert rollout.shape == shape
    assert "position" not in rollout or not torch.equal(rollout["position"][0], rollout["position"][1])
    env.close()


CHANGES: dict[str, Any] = {
    "reward_spec": Bounded(0, 1, (1,)),
    "extra": 3,  # wrappers of TorchRL have no such attribute
    "read_obs": lambda observation: {"observation": torch.ones(3)},
}


@pytest.mark.sample(quick=1, ci=3)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_wrappers_are_kept(name: str) -> None:
    def make() -> UpstreamGymWrapper:
        env = UpstreamGymWrapper(Counting())
        setattr(env, name, CHANGES[name])
        return env

    expected, env = make(), ParallelEnv(2, make)
    assert env.reward_spec == expected.reward_spec.expand(2, 1)
    assert (env.reset()["observation"][:, [0, 2]] == expected.reset()["observation"][[0, 2]]).all()
    assert name != "extra" or list(env.extra) == [3, 3]
    env.close()


# -- recorded calls of constructors

NAMES = {**vars(torchrl.envs), "gymnasium": gymnasium, "GymWrapper": GymWrapper}


@pytest.mark.parametrize(
    "line",
    [
        "GymEnv('CartPole-v1')",
        "GymEnv('CartPole-v1', frame_skip=2, device='cpu', max_episode_steps=9)",
        "GymWrapper(gymnasium.make('CartPole-v1'), frame_skip=3)",
        "SerialEnv(2, GymEnv, create_env_kwargs={'env_name': 'CartPole-v1'})",
        "TransformedEnv(GymEnv('CartPole-v1'), Compose(StepCounter(5), RewardSum()))",
    ],
)
def test_source_lines_are_the_calls_that_made_the_environment_without_transforms(line: str) -> None:
    assert source_of_environment(eval(line, NAMES)) == re.sub(r"Compose\(.*\)", "...)", line)


def test_appended_transforms_are_part_of_the_recorded_call() -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5)).append_transform(RewardSum())
    copied = as_factory(env)()
    assert [type(one) for one in copied.transform] == [StepCounter, RewardSum]
    assert set(copied.rollout(9).keys(True)) == set(env.rollout(9).keys(True))
    assert copied.base_env is not env.base_env

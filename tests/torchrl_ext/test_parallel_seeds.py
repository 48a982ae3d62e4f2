"""Workers draw differently; with a seed they draw what upstream's do after its ``set_seed``."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv as UpstreamGymEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper
from torchrl.envs import ParallelEnv as Upstream

from tests.torchrl_ext.parallel_checks import diary, no_workers_left
from tests.torchrl_ext.parallel_environments import Native, Well
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["diary", "no_workers_left"]

slow = pytest.mark.slow


def lived(env: Any, seed: int | None = None) -> Any:
    """Give a rollout over the ends of episodes, with the same actions for whoever is asked."""
    if seed is not None:
        env.set_seed(seed)
    torch.manual_seed(0)
    rollout = env.rollout(30, break_when_any_done=False)
    env.close()
    return rollout


def own_cartpole() -> Any:
    return UpstreamGymEnv("CartPole-v1")


def own_native() -> Any:
    return Native()


FORMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a function": (own_cartpole, lambda: own_cartpole),
    "an id": (own_cartpole, lambda: "CartPole-v1"),
    "an instance": (own_cartpole, lambda: gymnasium.make("CartPole-v1")),
    "an instance of TorchRL's": (own_cartpole, own_cartpole),
    "torch's generator": (own_native, lambda: own_native),
    "torch's generator, copied": (own_native, own_native),
}


@functools.cache
def upstreams(reference: Callable[[], Any]) -> Any:
    return lived(Upstream(3, reference, mp_start_method="fork"), 7)


@pytest.mark.sample(quick=0, ci=6)
@pytest.mark.parametrize("use_buffers", [True, pytest.param(False, marks=slow)], ids=["buffers", "pipes"])
@pytest.mark.parametrize("form", list(FORMS))
def test_a_seed_does_what_upstreams_set_seed_does(form: str, use_buffers: bool) -> None:
    reference, source = FORMS[form]
    expected = upstreams(reference)
    found = lived(ParallelEnv(3, source(), seed=7, use_buffers=use_buffers))
    assert (expected == found).all()
    assert len({tuple(row) for row in found["observation"][:, 0].tolist()}) == 3


class Drawing(gymnasium.Env[Any, Any]):
    """Draws from the generators that all share."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([np.random.rand(), random.random(), torch.rand((), dtype=torch.float64).item()]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


def seeds_itself(number: int) -> Any:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return UpstreamGymWrapper(Drawing())


@pytest.mark.slow
def test_a_function_that_seeds_is_left_its_seed() -> None:
    functions = [functools.partial(seeds_itself, number) for number in (5, 6)]
    expected, found = (lived(kind(2, functions, mp_start_method="fork")) for kind in (Upstream, ParallelEnv))
    assert (expected == found).all()


SOURCES: dict[str, Callable[[], Any]] = {
    "a class": lambda: Well,
    "an instance": Well,
    "an instance that was used": lambda: GymWrapper(used(Well())),
    "an instance of TorchRL's": Native,
    "a list": lambda: [used(Well()), Well],
    "a list of one": lambda: [used(Well())] * 2,
}
QUICK = ("a class", "an instance that was used")
forms = pytest.mark.parametrize("form", [pytest.param(form, marks=() if form in QUICK else slow) for form in SOURCES])


def used(well: Well) -> Well:
    well.reset(seed=5)
    return well


def draws(env: ParallelEnv) -> list[list[float]]:
    rollout = env.rollout(4)
    found = [part["observation"][:, -1].tolist() for part in rollout.unbind(0)]
    env.close()
    return found


@pytest.mark.sample
@forms
def test_workers_draw_differently_without_a_seed(form: str) -> None:
    source = SOURCES[form]()
    first = draws(ParallelEnv(2, source))
    assert first[0] != first[1]
    assert draws(ParallelEnv(2, source)) != first


@pytest.mark.sample
@forms
def test_workers_draw_the_same_in_every_run_with_a_seed(form: str) -> None:
    source = SOURCES[form]()
    first = draws(ParallelEnv(2, source, seed=3))
    assert draws(ParallelEnv(2, source, seed=3)) == first
    assert first[0] != first[1]


def test_pickles_draw_differently_without_a_seed() -> None:
    """Collectors send one to each of their processes."""
    packed = pickle.dumps(ParallelEnv(2, used(Well())))
    first, second = draws(pickle.loads(packed)), draws(pickle.loads(packed))
    assert len({tuple(row) for row in first + second}) == 4


def test_an_instance_does_not_go_on_where_its_copies_began() -> None:
    well = used(Well())
    expected = used(Well()).np_random.normal()
    env = ParallelEnv(2, well)
    found = draws(env)
    assert well.np_random.normal() == expected
    assert all(expected not in row for row in found)


def test_seeds_have_no_effect_on_this_process() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    env = ParallelEnv(2, functools.partial(Native), seed=3)
    env.reset()
    assert torch.equal(torch.rand(3), expected)
    env.close()


@pytest.mark.slow
def test_environments_that_take_no_seed() -> None:
    env = ParallelEnv(2, Unseeded, seed=3)
    first = draws(env)
    assert first == draws(ParallelEnv(2, Unseeded, seed=3))
    assert first[0] != first[1]


class Unseeded(Native):
    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("form", ["an instance", "torch's generator"])
def test_all_methods_do_as_upstream_does(form: str, method: str) -> None:
    reference, source = FORMS[form]
    expected = upstreams(reference)
    assert (lived(ParallelEnv(3, source(), seed=7, mp_start_method=method)) == expected).all()

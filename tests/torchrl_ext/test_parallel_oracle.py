"""Whatever upstream's ``ParallelEnv`` gives, ours gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchrl.envs import ParallelEnv as Upstream
from torchrl.envs import RewardSum, TransformedEnv

from tests.torchrl_ext.parallel_checks import no_workers_left
from tests.torchrl_ext.parallel_environments import Native
from torchrl_ext import ParallelEnv

__all__ = ["no_workers_left"]


def make_native() -> Native:
    return Native()


def close(*envs: Any) -> None:
    for env in envs:
        env.close(raise_if_closed=False)


@pytest.fixture(scope="module", params=[True, False], ids=["buffers", "pipes"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Upstream's and ours, which live through the same."""
    theirs = Upstream(3, make_native, mp_start_method="fork", use_buffers=request.param)
    ours = ParallelEnv(3, make_native, use_buffers=request.param)
    theirs.reset(), ours.reset()
    yield theirs, ours
    close(theirs, ours)


def result(do: Callable[[Any], Any], env: Any) -> Any:
    env.set_seed(3)
    torch.manual_seed(0)
    return do(env)


def equal(one: Any, other: Any) -> bool:
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


def partly(env: Any) -> Any:
    td = env.rollout(2)[:, -1].exclude("next")
    td["_reset"] = torch.tensor([[True], [False], [True]])
    return env.reset(td)


def masked(env: Any) -> Any:
    td = env.rand_action(env.reset())
    td["_step"] = torch.tensor([True, False, True])
    return env.step(td)["next", "observation"][[0, 2]]


def viewed(env: Any) -> Any:
    env.reset()
    first, rest = env[0], env[1:]
    return torch.cat([first.rollout(2)["observation"].flatten(), rest.rollout(2)["observation"].flatten()])


def stored(env: Any) -> Any:
    env.rollout(4)
    state = env.state_dict()
    env.rollout(4)
    before = [int(one["total"]) for one in env.state_dict().values()]
    env.load_state_dict(state)
    return before, [int(one["total"]) for one in env.state_dict().values()]


DEEDS: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda env: env.rollout(5),
    "rollout, cast": lambda env: env.rollout(5, auto_cast_to_device=True, break_when_any_done=False),
    "reset of some": partly,
    "step of some": masked,
    "views": viewed,
    "an attribute": lambda env: list(env.size),
    "a method": lambda env: env.add(1, b=2),
    "a reset with options": lambda env: env.reset(list_of_kwargs=[{}] * 3),
    "specs": lambda env: (str(env.specs), str(env.fake_tensordict()), str(env)),
    "a transform": lambda env: TransformedEnv(env, RewardSum()).rollout(4),
    "states": stored,  # the last one: afterwards, upstream is out of step
}


@pytest.mark.sample(quick=0, ci=13)
@pytest.mark.parametrize("deed", list(DEEDS))
def test_does_what_upstream_does(deed: str, pair: tuple[Any, Any]) -> None:
    assert equal(*(result(DEEDS[deed], env) for env in pair))


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(
    "options",
    [
        {"share_individual_td": True},
        {"memmap": True, "shared_memory": False},
        {"consolidate": False, "use_buffers": False},
        {"device": "cpu", "non_blocking": True},
        {"num_threads": 1, "num_sub_threads": 1},
        {"daemon": True},
        {"metadata_from_workers": True},
    ],
    ids=str,
)
def test_takes_upstreams_options(options: dict[str, Any]) -> None:
    ours = ParallelEnv(2, make_native, **options)
    try:
        assert equal(result(lambda env: env.rollout(3), ours), without_options())
    finally:
        close(ours)


@functools.cache
def without_options() -> Any:
    theirs = Upstream(2, make_native, mp_start_method="fork")
    try:
        return result(lambda env: env.rollout(3), theirs)
    finally:
        close(theirs)


# -- where it is better


def load(env: Any) -> None:
    env.load_state_dict(env.state_dict())


def write(env: Any) -> None:
    with pytest.raises(NotImplementedError, match="do not support snapshot writeback"):
        env[0:2] = [make_native(), make_native()]


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("call", [load, write])
@pytest.mark.parametrize(
    "cls", [pytest.param(Upstream, marks=pytest.mark.xfail(reason="0.14.1 does not wait")), ParallelEnv]
)
def test_the_next_call_waits_for_its_own_data(cls: Any, call: Callable[[Any], None]) -> None:
    env = cls(2, functools.partial(Native, pause=0.3), **({"mp_start_method": "fork"} if cls is Upstream else {}))
    try:
        env.set_seed(3)
        first = env.reset()["observation"]
        call(env)
        env.set_seed(3)
        assert torch.equal(env.reset()["observation"], first)
        call(env)
        env.set_seed(4)
        assert not torch.equal(env.reset()["observation"], first)
    finally:
        close(env)

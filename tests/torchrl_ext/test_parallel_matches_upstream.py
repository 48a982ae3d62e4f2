"""Tests that ``ParallelEnv`` returns the same as upstream's, and of its seeds."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv as UpstreamGymEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper
from torchrl.envs import ParallelEnv as Upstream
from torchrl.envs import RewardSum, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.parallel_checks import no_workers_left
from tests.torchrl_ext.parallel_environments import NativeEnv, Well
from torchrl_ext import GymWrapper, ParallelEnv

__all__ = ["no_workers_left"]


def make_native() -> NativeEnv:
    """Make a TorchRL environment that needs no gymnasium."""
    return NativeEnv()


def make_cartpole() -> Any:
    """Make a CartPole with TorchRL's ``GymEnv``."""
    return UpstreamGymEnv("CartPole-v1")


@pytest.fixture(scope="module", params=[True, False], ids=["buffers", "pipes"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Yield TorchRL's environment and ours, on which the same operations run."""
    theirs = Upstream(3, make_native, mp_start_method="fork", use_buffers=request.param)
    ours = ParallelEnv(3, make_native, use_buffers=request.param)
    theirs.reset(), ours.reset()
    yield theirs, ours
    for env in (theirs, ours):
        env.close(raise_if_closed=False)


def seeded_result(do: Callable[[Any], Any], env: Any) -> Any:
    """Seed an environment, and return the result of an operation on it."""
    env.set_seed(3)
    torch.manual_seed(0)
    return do(env)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two results are equal in all their elements."""
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


def reset_some(env: Any) -> Any:
    """Reset the first and the last of three rows, and return the result."""
    td = env.rollout(2)[:, -1].exclude("next")
    td["_reset"] = torch.tensor([[True], [False], [True]])
    return env.reset(td)


def step_some(env: Any) -> Any:
    """Step the first and the last of three rows, and return their observations."""
    td = env.rand_action(env.reset())
    td["_step"] = torch.tensor([True, False, True])
    return env.step(td)["next", "observation"][[0, 2]]


def use_views(env: Any) -> Any:
    """Roll out through views of some workers, and return the observations."""
    env.reset()
    first, rest = env[0], env[1:]
    return torch.cat([first.rollout(2)["observation"].flatten(), rest.rollout(2)["observation"].flatten()])


def restore_states(env: Any) -> Any:
    """Load an earlier state; return the workers' totals before and after."""
    env.rollout(4)
    state = env.state_dict()
    env.rollout(4)
    before = [int(one["total"]) for one in env.state_dict().values()]
    env.load_state_dict(state)
    return before, [int(one["total"]) for one in env.state_dict().values()]


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda env: env.rollout(5),
    "rollout, cast": lambda env: env.rollout(5, auto_cast_to_device=True, break_when_any_done=False),
    "reset of some": reset_some,
    "step of some": step_some,
    "views": use_views,
    "an attribute": lambda env: list(env.size),
    "a method": lambda env: env.add(1, b=2),
    "a reset with options": lambda env: env.reset(list_of_kwargs=[{}] * 3),
    "specs": lambda env: (str(env.specs), str(env.fake_tensordict()), str(env)),
    "a transform": lambda env: TransformedEnv(env, RewardSum()).rollout(4),
    "states": restore_states,  # last, since upstream's workers are out of step afterwards
}


@pytest.mark.slow
def test_operations_equal_upstream(pair: tuple[Any, Any]) -> None:
    for name, operation in OPERATIONS.items():
        assert are_equal(*(seeded_result(operation, env) for env in pair)), name


@functools.cache
def upstream_default_rollout() -> Any:
    """Return a rollout of TorchRL's ParallelEnv with its default options."""
    theirs = Upstream(2, make_native, mp_start_method="fork")
    try:
        return seeded_result(lambda env: env.rollout(3), theirs)
    finally:
        theirs.close()


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(
    "options",
    [
        {"share_individual_td": True, "metadata_from_workers": True},
        {"memmap": True, "shared_memory": False, "num_threads": 1, "num_sub_threads": 1},
        {"consolidate": False, "use_buffers": False, "daemon": True},
        {"device": "cpu", "non_blocking": True},
    ],
    ids=str,
)
def test_upstream_options_are_accepted(options: dict[str, Any]) -> None:
    ours = ParallelEnv(2, make_native, **options)
    assert are_equal(seeded_result(lambda env: env.rollout(3), ours), upstream_default_rollout())
    ours.close()


def test_unshared_buffers_with_fork_are_rejected() -> None:
    """An error replaces the zeros that upstream returns."""
    with pytest.raises(InvalidArgumentError, match="Leave shared_memory out"):
        ParallelEnv(2, make_native, shared_memory=False, mp_start_method="fork").reset()


@pytest.mark.slow
def test_configure_parallel_changes_options() -> None:
    env = ParallelEnv(2, make_native).configure_parallel(use_buffers=False, mp_start_method="fork", shutdown_timeout=20)
    env.reset()
    assert env._workers[0].popen.method == env._mp_start_method == "fork"
    assert not env._use_buffers
    env.close()


@pytest.mark.slow
def test_reset_waits_for_its_own_data_after_state_dict_calls() -> None:
    """Upstream's reset returns too early after these calls."""
    env = ParallelEnv(2, functools.partial(NativeEnv, pause=0.3))
    env.set_seed(3)
    first = env.reset()["observation"]
    for seed, same in ((3, True), (4, False), (3, True), (4, False)):
        if same:
            env.load_state_dict(env.state_dict())
        else:
            with pytest.raises(NotImplementedError, match="do not support snapshot writeback"):
                env[0:2] = [make_native(), make_native()]
        env.set_seed(seed)
        assert torch.equal(env.reset()["observation"], first) == same
    env.close()


# -- seeds


def run_to_end(env: Any, seed: int | None = None) -> Any:
    """Return a rollout across episodes with seeded actions, and close the environment."""
    if seed is not None:
        env.set_seed(seed)
    torch.manual_seed(0)
    rollout = env.rollout(30, break_when_any_done=False)
    env.close()
    return rollout


FORMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a function": (make_cartpole, lambda: make_cartpole),
    "an id": (make_cartpole, lambda: "CartPole-v1"),
    "an instance": (make_cartpole, lambda: gymnasium.make("CartPole-v1")),
    "an instance of TorchRL's": (make_cartpole, make_cartpole),
    "torch's generator": (make_native, lambda: make_native),
    "torch's generator, copied": (make_native, make_native),
}


@functools.cache
def upstream_rollout(reference: Callable[[], Any]) -> Any:
    """Return a rollout of TorchRL's ParallelEnv with seed 7."""
    return run_to_end(Upstream(3, reference, mp_start_method="fork"), 7)


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in FORMS),
        ("a function", {"use_buffers": False}),
        ("torch's generator, copied", {"use_buffers": False}),
        ("an instance", {"mp_start_method": "spawn"}),
        ("an instance", {"mp_start_method": "fork"}),
        pytest.param("torch's generator", {"mp_start_method": "spawn"}, marks=pytest.mark.exhaustive),
        ("torch's generator", {"mp_start_method": "fork"}),
    ],
)
def test_seed_argument_equals_upstream_set_seed(form: str, options: dict[str, Any]) -> None:
    reference, source = FORMS[form]
    found = run_to_end(ParallelEnv(3, source(), seed=7, **options))
    assert (upstream_rollout(reference) == found).all()
    assert len({tuple(row) for row in found["observation"][:, 0].tolist()}) == 3


class GlobalRandomEnv(gymnasium.Env[Any, Any]):
    """Environment that draws from the global generators of NumPy, random and torch."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([np.random.rand(), random.random(), torch.rand((), dtype=torch.float64).item()]), {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


def make_self_seeding_env(number: int) -> Any:
    """Seed the global generators, and make an environment that draws from them."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return UpstreamGymWrapper(GlobalRandomEnv())


@pytest.mark.slow
def test_function_that_seeds_global_generators_keeps_its_seed() -> None:
    functions = [functools.partial(make_self_seeding_env, number) for number in (5, 6)]
    expected, found = (run_to_end(kind(2, functions, mp_start_method="fork")) for kind in (Upstream, ParallelEnv))
    assert (expected == found).all()


def reset_with_seed(well: Well) -> Well:
    """Reset an environment with seed 5, and return it."""
    well.reset(seed=5)
    return well


class Unseeded(NativeEnv):
    """``NativeEnv`` that cannot be seeded."""

    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


SOURCES: dict[str, Callable[[], Any]] = {
    "an instance that was used": lambda: GymWrapper(reset_with_seed(Well())),
    "a class": lambda: Well,
    "a class that takes no seed": lambda: Unseeded,
    "an instance": Well,
    "a list": lambda: [reset_with_seed(Well()), Well],
}


def random_draws(env: ParallelEnv) -> list[list[float]]:
    """Return the random numbers that each worker observes, and close the environment."""
    rollout = env.rollout(4)
    found = [part["observation"][:, -1].tolist() for part in rollout.unbind(0)]
    env.close()
    return found


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("form", SOURCES)
def test_workers_draw_differently_and_reproducibly_with_a_seed(form: str) -> None:
    source = SOURCES[form]()
    torch.manual_seed(1)
    first, again = (random_draws(ParallelEnv(2, source)) for _ in range(2))
    assert first[0] != first[1]
    assert again != first
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    seeded = ParallelEnv(2, source, seed=3)
    seeded.reset()
    assert torch.equal(torch.rand(3), expected)  # this process's generators are unchanged
    seeded.close()
    first, again = (random_draws(ParallelEnv(2, source, seed=3)) for _ in range(2))
    assert first[0] != first[1]
    assert again == first


def test_instance_and_copies_and_pickles_draw_different_numbers() -> None:
    """Pickles matter, since collectors send one to each of their processes."""
    well, expected = reset_with_seed(Well()), reset_with_seed(Well()).np_random.normal()
    env = ParallelEnv(2, well)
    packed = pickle.dumps(env)
    found = [row for each in (env, pickle.loads(packed), pickle.loads(packed)) for row in random_draws(each)]
    assert len({tuple(row) for row in found}) == 6
    assert well.np_random.normal() == expected
    assert all(expected not in row for row in found)

"""Wrappers that are pickled, copied and moved, and environments that wrappers have made speak torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import pytest
import torch
from gymnasium import wrappers
from torchrl import envs as upstream
from torchrl.envs import StepCounter, check_env_specs

from tests.torchrl_ext.comparing import assert_same, assert_same_rollouts, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Isaac, IsaacByIds, Sampled, VectorRewards, Walk, box
from torchrl_ext import GymEnv, GymWrapper

ENVIRONMENTS: dict[str, Any] = {
    "single": lambda: GymWrapper(Walk()),
    "by its id": lambda: GymEnv("CartPole-v1"),
    "nested": lambda: GymWrapper(DictWalk()),
    "batch": lambda: GymWrapper(vector(Walk, 3, "SameStep")),
    "batch, reset in the next step": lambda: GymWrapper(vector(Walk, 3, "NextStep")),
    "CartPole": lambda: GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=3)),
    "torch batch": lambda: GymWrapper(IsaacByIds(3, final_obs=True)),
    "torch batch that remembers": lambda: GymWrapper(Isaac(3), missing_final_obs="previous"),
    "with infos": lambda: GymWrapper(Walk()).set_info_dict_reader(upstream.default_info_dict_reader(["age"])),
    "under a transform": lambda: GymWrapper(vector(Walk, 3, "NextStep")).append_transform(StepCounter(4)),
}
COPIES: dict[str, Any] = {
    "pickle": lambda env: pickle.loads(pickle.dumps(env)),
    "cloudpickle": lambda env: pickle.loads(cloudpickle.dumps(env)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.sample
@pytest.mark.parametrize("played", [False, True], ids=["fresh", "played"])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_copies_play_on_alike(name: str, way: str, played: bool) -> None:
    env = ENVIRONMENTS[name]()
    if played:
        seeded_rollout(env, 30)
    other = COPIES[way](env)
    assert_same(seeded_rollout(other, 40), seeded_rollout(env, 40))
    assert other._env is not env._env if hasattr(env, "_env") else True


@pytest.mark.parametrize("name", ["single", "batch", "batch, reset in the next step", "CartPole", "torch batch"])
def test_copies_go_on_in_the_middle_of_an_episode(name: str) -> None:
    env = ENVIRONMENTS[name]()
    env.set_seed(0)
    torch.manual_seed(0)
    data = env.reset()
    for _ in range(10):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
    other, state = copy.deepcopy(env), data.clone()

    def go_on(env: Any, data: Any) -> Any:
        torch.manual_seed(1)
        steps = []
        for _ in range(20):
            before, data = env.step_and_maybe_reset(env.rand_action(data))
            steps.append(before)
        return torch.stack(steps)

    assert_same(go_on(other, state), go_on(env, data))


def test_an_environment_that_was_reset_behind_the_wrappers_back() -> None:
    inner = Walk()
    observation, _ = inner.reset(seed=0)
    env = GymWrapper(inner)
    data = env.step(env.rand_action())
    assert data["next", "observation"][1] == 1
    batch = Isaac(3)
    batch.reset()
    env = GymWrapper(batch)
    assert env.step(env.rand_action())["next", "policy"][:, 2].tolist() == [1, 1, 1]
    assert not observation[1]


@pytest.mark.parametrize("name", ["single", "nested", "batch", "torch batch"])
def test_moves(name: str) -> None:
    env, other = ENVIRONMENTS[name](), ENVIRONMENTS[name]()
    seeded_rollout(env, 5)
    device = torch.device("cpu")
    moved = env.to(device)
    assert moved is env
    assert env.device == device
    found, expected = seeded_rollout(env, 40), seeded_rollout(other, 40)
    assert found.device == device
    assert_same(found, expected.to(device))
    check_env_specs(env)
    assert env.to(device) is env


def test_a_move_in_the_middle_of_an_episode() -> None:
    env = GymWrapper(vector(Walk, 2, "NextStep"))
    data = env.reset()
    env.to("cpu")
    data = env.step(env.rand_action(data.to("cpu")))
    assert data["next", "observation"][:, 1].tolist() == [1, 1]
    nested = GymWrapper(DictWalk(9, 9))
    data = nested.reset()
    nested.to("cpu")
    assert nested.step(nested.rand_action(data.to("cpu")))["next", "inner", "place"][1] == 1


def test_another_environment_in_the_same_wrapper() -> None:
    env = GymWrapper(Walk())
    env.rollout(3)
    env.set_spec_lock_(False)
    env.rebuild_with_kwargs(env=Sampled(box(2), gymnasium.spaces.Discrete(2)))
    env.set_spec_lock_(True)
    assert env.rollout(3)["observation"].shape == (3, 2)


# -- gymnasium.wrappers.NumpyToTorch


@pytest.mark.parametrize(
    "make", [partial(gymnasium.make, "CartPole-v1"), partial(gymnasium.make, "Pendulum-v1"), DictWalk]
)
def test_numpy_to_torch(make: Any) -> None:
    env, plain = GymWrapper(wrappers.NumpyToTorch(make())), GymWrapper(make())
    found, expected = seeded_rollout(env, 80), seeded_rollout(plain, 80)
    assert_same(found, expected)
    check_env_specs(env)
    asked = GymWrapper(wrappers.NumpyToTorch(make()), env_type="torch")
    assert_same(seeded_rollout(asked, 9), seeded_rollout(plain, 9))


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])  # gymnasium's wrapper cannot convert final_obs
def test_numpy_to_torch_of_a_batch(mode: str) -> None:
    env = GymWrapper(wrappers.vector.NumpyToTorch(vector(Walk, 3, mode)))
    assert_same(seeded_rollout(env, 40), seeded_rollout(GymWrapper(vector(Walk, 3, mode)), 40))


# -- what is left to upstream


def test_rewards_of_two_parts() -> None:
    env = GymWrapper(VectorRewards())
    check_env_specs(env)
    reward = seeded_rollout(env, 20)["next", "reward"]
    assert reward.shape == (20, 2)
    assert torch.equal(reward[:, 0], -reward[:, 1])


@pytest.mark.slow
def test_a_compiled_step() -> None:
    plain, compiled = GymWrapper(Walk()), GymWrapper(Walk())
    compiled.compile(backend="eager")
    try:
        assert_same_rollouts(compiled, plain, 12)
    finally:
        compiled.eager()
    assert_same_rollouts(compiled, plain, 12)


def test_fast_encoding_changes_nothing() -> None:
    env, plain = GymWrapper(DictWalk()), GymWrapper(DictWalk())
    env.fast_encoding()
    assert_same_rollouts(env, plain, 30)


def test_closing() -> None:
    env = GymWrapper(vector(Walk, 2, "SameStep", asynchronous=True))
    env.rollout(3)
    env.close()
    assert env.is_closed
    assert repr(env) == f"GymWrapper(env={env._env}, batch_size=torch.Size([2]))"


MOVES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda env: pickle.loads(pickle.dumps(env)),
    "to": lambda env: env.to("cpu"),
}


@pytest.mark.parametrize("way", MOVES)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_moves_between_a_step_and_its_reset(mode: str, way: str, at: int) -> None:
    """Who has reset itself within the step is not reset again."""

    def played(move: Callable[[Any], Any]) -> list[Any]:
        env = GymWrapper(vector([partial(Walk, n, n) for n in (2, 3, 4)], 3, mode), missing_final_obs="previous")
        env.set_seed(0)
        torch.manual_seed(0)
        data, seen = env.reset(), []
        for turn in range(9):
            data = env.step(env.rand_action(data))
            if turn == at:
                env = move(env)
            seen.append(data["next", "observation"].clone())
            data = env.maybe_reset(env.step_mdp(data))
            seen.append(data["observation"].clone())
        return seen

    for one, other in zip(played(MOVES[way]), played(lambda env: env), strict=True):
        assert torch.equal(one, other)

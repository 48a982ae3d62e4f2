"""What goes wrong with TorchRL's wrappers, shown, and right with ours.

Each test asserts upstream's outcome too: when one of them fails there, upstream has mended it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl import envs as upstream
from torchrl.envs import check_env_specs
from torchrl.envs.libs.mjlab import MJLabWrapper

from tests.torchrl_ext.comparing import seeded_rollout, storages, vector
from tests.torchrl_ext.environments import Buffered, Isaac, IsaacByIds, Sampled, Walk, box, fake_isaaclab
from tests.torchrl_ext.test_oracle_batched import STAGGERED
from torchrl_ext import GymEnv, GymWrapper


@pytest.fixture
def isaac_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_isaaclab(monkeypatch) as wrapper:
        yield lambda env, **kwargs: wrapper(env, device="cpu", **kwargs)


def expected_next(rollout: Any) -> torch.Tensor:
    """What follows from Isaac's observations and actions, resets left aside."""
    after = rollout["policy"].clone()
    after[..., 2] += 1
    after[..., 3:5] += rollout["action"]
    return after


# 1. environments that write into what they have returned


def test_rewards_and_flags_of_buffers_that_are_reused() -> None:
    theirs = seeded_rollout(MJLabWrapper(IsaacByIds(4)), 12)["next"]
    for key in ("reward", "truncated"):
        assert (theirs[key] == theirs[key][:, -1:]).all()
    ours = seeded_rollout(GymWrapper(IsaacByIds(4, final_obs=True)), 12)
    reward = ours["next", "policy"][..., 2] * 10 + ours["policy"][..., 0]
    assert torch.equal(ours["next", "reward"], reward.unsqueeze(-1))
    assert 0 < ours["next", "truncated"].sum() < ours["next", "done"].sum() < 20


def test_frames_of_torch_buffers_that_are_reused(isaac_lab: Any) -> None:
    theirs = isaac_lab(Isaac(4, lengths=[20] * 4)).rollout(8)["next", "policy"]
    assert (theirs == theirs[:, -1:]).all()
    ours = GymWrapper(Isaac(4, lengths=[20] * 4)).rollout(8)
    assert torch.equal(ours["next", "policy"], expected_next(ours))


def test_frames_of_a_numpy_buffer_that_is_reused() -> None:
    theirs = upstream.GymWrapper(Buffered("one buffer"))
    check_env_specs(theirs)
    assert (theirs.rollout(8)["next", "observation"] == 8).all()
    ours = GymWrapper(Buffered("one buffer")).rollout(8)
    assert ours["next", "observation"][:, 0].tolist() == list(range(1, 9))


def test_a_vectorised_environment_that_does_not_copy() -> None:
    def make() -> Any:
        return vector(lambda: Walk(9, 9), 2, "Disabled", copy=False)

    theirs = upstream.GymWrapper(make())
    check_env_specs(theirs)
    theirs = theirs.rollout(5)
    assert (theirs["observation"] == theirs["observation"][:, :1]).all()
    ours = GymWrapper(make()).rollout(5)
    assert not (ours["observation"][:, 1:] == ours["observation"][:, :-1]).all(-1).any()


# 2. NaN for observations that the environment gives


def test_last_observations_are_read_and_buffers_left_alone(isaac_lab: Any) -> None:
    env = Isaac(4, final_obs=True)
    theirs = isaac_lab(env).rollout(12, break_when_any_done=False)
    done = theirs["next", "done"].squeeze(-1)
    assert done.any()
    assert env.state.isnan().any()
    env = Isaac(4, final_obs=True, in_place=False)
    theirs = isaac_lab(env).rollout(12, break_when_any_done=False)
    assert theirs["next", "policy"][theirs["next", "done"].squeeze(-1)].isnan().all()
    env = Isaac(4, final_obs=True)
    ours = GymWrapper(env).rollout(12, break_when_any_done=False)
    assert ours["next", "done"].any()
    assert env.state.isfinite().all()
    assert torch.equal(ours["next", "policy"], expected_next(ours))


# 3. native autoreset, and resets that happen twice


def test_the_last_frame_of_a_rollout(isaac_lab: Any) -> None:
    theirs = isaac_lab(Isaac(2, lengths=[4, 9], final_obs=True, in_place=False), native_autoreset=True)
    data = theirs.rollout(4, break_when_any_done=False)
    assert data["next", "done"][0, -1]
    assert (data["next", "policy"][0, -1, 2:] == 0).all()  # of the episode after
    ours = GymWrapper(Isaac(2, lengths=[4, 9], final_obs=True))
    data = ours.rollout(4, break_when_any_done=False)
    assert torch.equal(data["next", "policy"], expected_next(data))


def test_all_done_at_once_are_reset_once(isaac_lab: Any) -> None:
    for make, twice in ((isaac_lab, True), (GymWrapper, False)):
        env = Isaac(3, lengths=[4] * 3, final_obs=True, in_place=False)
        data = make(env).rollout(10, break_when_any_done=False)
        # Each reset begins another episode.
        episodes = data["policy"][0, :, 1] - data["policy"][0, 0, 1]
        assert episodes.unique().tolist() == ([0, 2, 4] if twice else [0, 1, 2])
    for cls, twice in ((upstream.GymWrapper, True), (GymWrapper, False)):
        env: Any = cls(vector(lambda: Walk(4, 4), 3, "SameStep"))
        episodes = seeded_rollout(env, 10)["observation"][0, :, 0]
        assert (episodes - episodes[0]).unique().tolist() == ([0, 2, 4] if twice else [0, 1, 2])


# 4. gymnasium's autoreset modes


class NoWrapper(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Changes nothing."""


@pytest.mark.parametrize("mode", ["SameStep", "Disabled", "NextStep"])
def test_vector_wrappers(mode: str) -> None:
    with pytest.raises(AttributeError, match="autoreset_mode"):
        upstream.GymWrapper(NoWrapper(vector(Walk, 2, mode)))
    check_env_specs(GymWrapper(NoWrapper(vector(Walk, 2, mode))))


def test_make_vec() -> None:
    with pytest.raises(AttributeError, match="autoreset_mode"):
        upstream.GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=2))
    check_env_specs(GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=2)))


def test_gymnasiums_default_mode() -> None:
    with pytest.raises(RuntimeError, match="auto-reset mode"):
        upstream.GymWrapper(vector(Walk, 2, "NextStep"))
    check_env_specs(GymWrapper(vector(Walk, 2, "NextStep")))


def test_environments_by_their_id_take_a_step_that_only_resets() -> None:
    def rewards(cls: Any) -> set[float]:
        env = cls("CartPole-v1", num_envs=2)
        env.base_env if hasattr(env, "base_env") else env
        try:
            return set(seeded_rollout(env, 80)["next", "reward"].flatten().tolist())
        finally:
            env.close()

    assert rewards(GymEnv) == {1.0}
    assert rewards(upstream.GymEnv) == {0.0, 1.0}


# 5. torch environments that are not Isaac Lab's


def test_any_torch_environment_that_is_vectorised() -> None:
    theirs = upstream.GymWrapper(Isaac(3), convert_actions_to_numpy=False, batch_size=[])
    with pytest.raises(RuntimeError, match="Partial resets are not handled"):
        theirs.rollout(10, break_when_any_done=False)
    assert GymWrapper(Isaac(3)).rollout(10, break_when_any_done=False).shape == (3, 10)


def test_spaces_of_nobodys_known() -> None:
    with pytest.raises(ImportError, match="Could not find the library"):
        upstream.GymWrapper(Isaac(3, foreign=True))
    env = GymWrapper(Isaac(3, foreign=True))
    check_env_specs(env)
    assert env.action_spec.shape == (3, 2)


# 6. tensors that do not fit, graphs and shared actions


class InDouble(gymnasium.Env[Any, Any]):
    """A differentiable environment of float64."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = box(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.state = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        return self.state, {}

    def step(self, action: torch.Tensor) -> Any:
        self.state = self.state * 0.9 + action
        return self.state, self.state.sum(), False, False, {}


def test_dtypes_and_graphs() -> None:
    torch.manual_seed(0)
    theirs = upstream.GymWrapper(InDouble(), convert_actions_to_numpy=False)
    step = theirs.rand_step(theirs.reset())
    assert step["next", "observation"].requires_grad
    assert step["next", "reward"].requires_grad
    ours = GymWrapper(InDouble())
    step = ours.rand_step(ours.reset())
    for key in ("observation", "reward"):
        assert not step["next", key].requires_grad
        assert step["next", key].dtype is torch.float32
    check_env_specs(ours)


def test_float64_stays_where_the_space_says_float32() -> None:
    space = box(2)
    env = Sampled(space, spaces.Discrete(2))
    env.observation_space.sample = lambda: torch.zeros(2, dtype=torch.float64)  # type: ignore[assignment, method-assign]
    theirs = upstream.GymWrapper(env)
    assert theirs.reset()["observation"].dtype is torch.float64
    assert GymWrapper(env, env_type="torch").reset()["observation"].dtype is torch.float32


@pytest.mark.parametrize("torch_tensors", [True, False])
def test_actions_that_the_environment_edits(torch_tensors: bool) -> None:
    def played(cls: Any, **kwargs: Any) -> torch.Tensor:
        env = cls(Buffered("fresh", torch_tensors=torch_tensors), **kwargs)
        data = env.reset().set("action", torch.tensor([0.25, -0.5]))
        return env.step(data)["action"]

    assert played(upstream.GymWrapper, convert_actions_to_numpy=not torch_tensors).tolist() == [99.0, 99.0]
    assert played(GymWrapper).tolist() == [0.25, -0.5]


# 7. actions


def test_discrete_actions_of_torch_environments() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)

    def received(cls: Any, **kwargs: Any) -> Any:
        env = Sampled(space, spaces.Discrete(3))
        wrapped = cls(env, **kwargs)
        wrapped.step(wrapped.reset().set("action", torch.tensor([0, 0, 1])))
        return env.received[0].tolist()

    assert received(upstream.GymWrapper, convert_actions_to_numpy=False) == [0, 0, 1]
    assert received(GymWrapper, convert_actions_to_numpy=False) == 2


def test_random_actions_of_half_bounded_boxes() -> None:
    low, high = np.array([-np.inf, 0, -1], np.float32), np.array([np.inf, np.inf, 1], np.float32)
    theirs, ours = (cls(Sampled(box(2), spaces.Box(low, high))) for cls in (upstream.GymWrapper, GymWrapper))
    assert theirs.rand_action()["action"][:2].isnan().any() or theirs.rand_action()["action"].isinf().any()
    actions = torch.stack([ours.rand_action()["action"] for _ in range(50)])
    assert actions.isfinite().all()
    assert (actions[:, 1] >= 0).all()
    assert (actions[:, 2].abs() <= 1).all()


# 8. devices and infos


def test_the_device_is_that_of_the_environment(isaac_lab: Any) -> None:
    from torchrl.envs.libs.isaac_lab import IsaacLabWrapper

    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        IsaacLabWrapper(Isaac(2))
    assert GymWrapper(Isaac(2)).device == torch.device("cpu")


def test_infos_by_name_in_a_batch() -> None:
    reader = upstream.default_info_dict_reader(["age"])
    with pytest.raises(ValueError, match="shape"):
        upstream.GymWrapper(vector(Walk, 3, "Disabled")).set_info_dict_reader(reader)
    env = GymWrapper(vector(Walk, 3, "Disabled")).set_info_dict_reader(reader)
    rollout = seeded_rollout(env, 30)
    assert torch.equal(rollout["next", "age"].float(), rollout["next", "observation"][..., 1])
    assert reader.info_spec.shape == ()  # it can be used again


# 9. and one more: a reset after an episode's end


def test_a_reset_after_a_rollout_that_an_episode_ended() -> None:
    def after(cls: Any) -> tuple[Any, Any]:
        env = cls(vector(STAGGERED, 3, "SameStep"))
        seeded_rollout(env, 50, break_when_any_done=True)
        inner = env.base_env._env if hasattr(env, "base_env") else env._env
        return env.reset()["observation"], torch.from_numpy(np.stack(inner._env_obs))

    data, truth = after(upstream.GymWrapper)
    assert not torch.equal(data, truth)  # that of the step before
    data, truth = after(GymWrapper)
    assert torch.equal(data, truth)


def test_what_is_returned_lies_in_no_buffer_of_the_environment() -> None:
    env = Isaac(3, final_obs=True)
    rollout = GymWrapper(env).rollout(10, break_when_any_done=False, return_contiguous=False)
    own = storages([env.state, env.reward_buf, env.terminated, env.truncated, env.extras])
    assert not storages(rollout.to_dict()) & own

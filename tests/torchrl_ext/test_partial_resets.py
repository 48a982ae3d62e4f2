"""Partial resets go through every wrapper; what cannot pass them on is refused in words."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import StepCounter, TransformedEnv

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from torchrl_ext import GymWrapper


class Sim(gymnasium.Env[Any, Any]):
    """A torch simulator of three that resets itself within the step, and some by ``env_ids``.

    An observation is the row's number plus one, and the steps since its reset.
    """

    num_envs, device = 3, torch.device("cpu")
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (3, 2), np.float32)
    action_space = spaces.Box(-1, 1, (3, 1), np.float32)

    def __init__(self, lengths: tuple[int, int, int] = (2, 99, 99)) -> None:
        self.lengths = torch.tensor(lengths)
        self.steps = torch.zeros(3)
        self.asked: list[list[int]] = []

    def observation(self) -> torch.Tensor:
        return torch.stack([torch.arange(1.0, 4.0), self.steps], -1)

    def reset(self, *, seed: Any = None, options: Any = None, env_ids: Any = None) -> Any:
        if env_ids is not None:
            self.asked.append(env_ids.tolist())
        self.steps[slice(None) if env_ids is None else env_ids] = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        done = self.steps >= self.lengths
        final = self.observation()
        self.steps[done] = 0
        return self.observation(), torch.ones(3), done, torch.zeros(3, dtype=torch.bool), {"final_obs": final}


class Tenfold(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What a wrapper that normalises does, with a reset that passes on what it is given."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation * 10, info

    def step(self, action: Any) -> Any:
        observation, *rest, info = self.env.step(action)
        return observation * 10, *rest, {"final_obs": info["final_obs"] * 10}


class ForeignTenfold:
    """The same, of no library."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    reset, step = Tenfold.reset, Tenfold.step


class Rewards(gymnasium.RewardWrapper[Any, Any]):
    """Has no reset of its own."""

    def reward(self, reward: Any) -> Any:
        return reward * 2


class Narrow(Tenfold):
    """The same with the signature of gymnasium's."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation * 10, info


CHAINS = {
    "the environment alone": (lambda env: env, 1),
    "a wrapper": (Tenfold, 10),
    "two": (lambda env: Tenfold(Tenfold(env)), 100),
    "one of no library": (ForeignTenfold, 10),
    "under one without a reset": (lambda env: Rewards(Tenfold(env)), 10),
    "under gymnasium's own": (lambda env: gymnasium.wrappers.OrderEnforcing(Tenfold(env)), 10),
}


@pytest.mark.parametrize("name", CHAINS)
def test_every_wrapper_sees_a_partial_reset(name: str) -> None:
    wrap, factor = CHAINS[name]
    sim = Sim()
    env = TransformedEnv(GymWrapper(wrap(sim)), StepCounter(max_steps=5))
    rollout = env.rollout(24, break_when_any_done=False)
    assert [1, 2] in sim.asked
    for data in (rollout, rollout["next"]):
        assert torch.equal(data["observation"][..., 0], torch.arange(1.0, 4.0)[:, None].expand(3, 24) * factor)
    assert torch.equal(rollout["next", "observation"][..., 1], (rollout["step_count"].squeeze(-1) + 1.0) * factor)


def test_a_wrapper_that_cannot_pass_it_on_is_named() -> None:
    env = TransformedEnv(GymWrapper(Narrow(Sim())), StepCounter(max_steps=5))
    with pytest.raises(
        InvalidArgumentError, match=r"Narrow\.reset takes no env_ids.*Write def reset\(self, \*\*kwargs"
    ):
        env.rollout(24, break_when_any_done=False)


def test_a_wrapper_in_the_middle_that_cannot_pass_it_on_is_named() -> None:
    env = GymWrapper(Tenfold(gymnasium.wrappers.OrderEnforcing(Sim())))
    env.rollout(9, break_when_any_done=False)  # who resets itself alone needs none
    with pytest.raises(InvalidArgumentError, match=r"OrderEnforcing\.reset takes no env_ids"):
        TransformedEnv(env, StepCounter(max_steps=5)).rollout(24, break_when_any_done=False)


class NumPySim(gymnasium.Env[Any, Any]):
    """Two environments, reset by ``reset_mask``; no class that is known to leave the others alone."""

    num_envs = 2
    single_observation_space = observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = action_space = spaces.Discrete(2)

    def __init__(self, *, leaves_others: bool = True) -> None:
        self.metadata = {"autoreset_mode": "Disabled"}
        self.steps, self.leaves_others = np.zeros(2), leaves_others

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = (options or {}).get("reset_mask", np.ones(2, bool))
        self.steps[rows if self.leaves_others else slice(None)] = 0
        return self.observation(), {}

    def observation(self) -> Any:
        return (self.steps[:, None] + 1).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), np.ones(2), self.steps >= np.array([3, 5]), np.zeros(2, bool), {}


@pytest.mark.parametrize("copy", [True, False])
def test_who_edits_the_data_does_not_make_the_environment_a_suspect(copy: bool) -> None:
    env = GymWrapper(NumPySim(), copy=copy)
    data = env.reset()
    for _ in range(8):
        data = env.rand_step(data)
        data["next", "observation"].div_(255)
        data["next", "observation"].numpy()[...] += 1
        data = env.maybe_reset(env.step_mdp(data))
    env = GymWrapper(NumPySim(leaves_others=False), copy=copy)
    with pytest.raises(EnvironmentOutputError, match="also changed sub-environments that it was not to reset"):
        env.rollout(8, break_when_any_done=False)


def test_flags_that_are_edited_between_a_step_and_its_reset() -> None:
    """Who was reset within the step stays so, whatever becomes of the flags that were handed out."""
    env, plain = GymWrapper(Sim()), GymWrapper(Sim())
    ours, theirs = env.reset(), plain.reset()
    for _ in range(6):
        ours, theirs = (
            env.step(ours.set("action", torch.zeros(3, 1))),
            plain.step(theirs.set("action", torch.zeros(3, 1))),
        )
        mask = ours["next", "done"].clone()
        ours["next", "done"].fill_(True)
        ours = env.reset(env.step_mdp(ours).set("_reset", mask)) if mask.any() else env.step_mdp(ours)
        theirs = plain.maybe_reset(plain.step_mdp(theirs))
        assert torch.equal(ours["observation"], theirs["observation"])
        ours = ours.select("observation")
        ours.update(theirs.select("done", "terminated", "truncated"))


class ManiSkill(gymnasium.Env[Any, Any]):
    """As ManiSkill's environments: a batch of torch tensors, ``env_idx``, and no reset of itself."""

    num_envs, device = 3, torch.device("cpu")
    single_observation_space = spaces.Dict(state=spaces.Box(-np.inf, np.inf, (2,), np.float32))
    single_action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = spaces.Dict(state=spaces.Box(-np.inf, np.inf, (3, 2), np.float32))
    action_space = spaces.Box(-1, 1, (3, 1), np.float32)

    def __init__(self) -> None:
        self.buffer = torch.zeros(3, 2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = (options or {}).get("env_idx", torch.arange(3))
        self.buffer[rows] += torch.tensor([1.0, 0.0])
        self.buffer[rows, 1] = 0
        return {"state": self.buffer}, {}

    def step(self, action: Any) -> Any:
        self.buffer[:, 1] += 1
        done = self.buffer[:, 1] >= torch.tensor([2.0, 3.0, 5.0])
        return {"state": self.buffer}, torch.ones(3), done, torch.zeros(3, dtype=torch.bool), {}


ManiSkill.__module__ = "mani_skill.envs.sapien_env"


class ManiSkillVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """As the wrapper that ManiSkill has for them."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 gymnasium's is one for all classes

    def __init__(self, env: Any, *, auto_reset: bool) -> None:
        self.inner, self.auto_reset, self.num_envs = env, auto_reset, env.num_envs
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(env, name))

    @property
    def unwrapped(self) -> Any:
        return self.inner

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.inner.step(action)
        rows = terminated.nonzero().view(-1)
        if self.auto_reset and len(rows):
            final = {"state": observation["state"].clone()}
            observation, info = self.reset(options={"env_idx": rows})
            info["final_observation"] = final
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: ManiSkillVector(env, auto_reset=True),
        lambda env: ManiSkillVector(env, auto_reset=False),
    ],
    ids=["alone", "resets itself", "does not"],
)
def test_maniskills_environments_are_reset_without_being_asked_how(wrap: Any) -> None:
    rollout = GymWrapper(wrap(ManiSkill())).rollout(12, break_when_any_done=False)
    for row, length in enumerate((2, 3, 5)):
        steps = rollout["observation"][row, :, 1].tolist()
        assert steps == [step % length for step in range(12)]
        assert rollout["next", "observation"][row, :, 1].tolist() == [step + 1 for step in steps]
        assert rollout["observation"][row, :, 0].tolist() == [step // length + 1 for step in range(12)]

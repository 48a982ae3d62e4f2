"""GymVecEnv over torch environments in the styles of Isaac Lab, mjlab and ManiSkill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from sb3_ext import GymVecEnv, _vector_steps


class Isaac:
    """Torch environment that reuses buffers, like Isaac Lab's; row i ends after i + 3 steps.

    :param final: format of last observations: ``"batch"``, ``"objects"`` (ManiSkill's), or None
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None
    spec = None
    device = "cpu"

    def __init__(self, num_envs: int = 4, final: str | None = "batch") -> None:
        self.num_envs, self.final = num_envs, final
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_observation_space: Any = spaces.Dict({"policy": box, "critic": box})
        self.single_action_space: Any = box
        self.buffers = {"policy": torch.zeros(num_envs, 2), "critic": torch.zeros(num_envs, 2)}
        self.rewards = torch.zeros(num_envs, 1)
        self.terminated = torch.zeros(num_envs, dtype=torch.bool)
        self.truncated = torch.zeros(num_envs, dtype=torch.bool)
        self.lengths = torch.arange(num_envs) + 3
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.episodes = torch.zeros(num_envs, dtype=torch.long)

    @property
    def unwrapped(self) -> Isaac:
        return self

    def close(self) -> None:
        """Nothing to close."""

    def count(self, factor: int) -> torch.Tensor:
        """Return a tensor with one number per row, multiplied by a factor."""
        return torch.arange(self.num_envs) * factor

    def _reset(self, rows: torch.Tensor) -> None:
        """Start a new episode in some rows."""
        self.episodes[rows] += 1
        self.episode_length_buf[rows] = 0
        self.buffers["policy"][rows] = 0
        self.buffers["policy"][rows, 0] = self.episodes[rows].float()

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self._reset(torch.arange(self.num_envs))
        return dict(self.buffers), {}

    def step(self, action: torch.Tensor) -> Any:
        self.given = action.clone()
        action.fill_(99)
        self.episode_length_buf += 1
        self.buffers["policy"][:, 1] += 1
        self.rewards.fill_(2)
        ended = self.episode_length_buf >= self.lengths
        torch.logical_and(ended, self.episodes % 2 == 0, out=self.terminated)
        torch.logical_and(ended, self.episodes % 2 == 1, out=self.truncated)
        rows = ended.nonzero().squeeze(-1)
        info: dict[str, Any] = {"log": {"mean": torch.tensor(1.0)}, "success": self.terminated}
        if len(rows):
            if self.final == "batch":
                info["final_obs"] = {name: buffer.clone() for name, buffer in self.buffers.items()}
            elif self.final == "objects":
                each = np.array([None] * self.num_envs, object)
                for row in rows.tolist():
                    each[row] = {name: buffer[row].clone() for name, buffer in self.buffers.items()}
                info["final_observation"] = each
                info["final_info"] = {"success": self.terminated.clone(), "episode": {"return": self.rewards[:, 0]}}
            self._reset(rows)
        return dict(self.buffers), self.rewards, self.terminated, self.truncated, info


def test_actions_spaces_and_rewards_are_converted() -> None:
    """See tests/test_stepper.py for the other parts of a step."""
    venv = GymVecEnv(Isaac(), clip_actions=1.0)
    assert venv.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert venv.action_space == spaces.Box(-1, 1, (2,), np.float32)
    venv.reset()
    actions = np.full((4, 2), 0.5)
    observations, rewards, _, _ = venv.step(actions)
    assert (actions == 0.5).all()  # the environment has overwritten its copy
    assert venv.env.given.dtype == torch.float32
    assert observations.dtype == np.float32
    np.testing.assert_array_equal(rewards, np.full(4, 2, np.float32))  # returned as a column by the environment


def test_episode_infos_with_other_keys_get_those_of_sb3() -> None:
    venv = GymVecEnv(Isaac(2, final="objects"), clip_actions=1)
    venv.reset()
    infos = [venv.step(np.zeros((2, 2)))[3] for _ in range(3)]
    assert {name: infos[2][0]["episode"][name] for name in ("r", "l", "return")} == {"r": 6.0, "l": 3, "return": 2.0}


def test_methods_and_attributes_return_rows_of_tensors() -> None:
    venv = GymVecEnv(Isaac(3), clip_actions=1.0)
    venv.reset()
    venv.step(np.zeros((3, 2)))
    assert venv.get_attr("episode_length_buf") == [1, 1, 1]
    assert venv.get_attr("final", indices=[0]) == ["batch"]
    assert venv.env_method("count", 3) == [0, 3, 6]
    (whole,) = venv.env_method("count", 3, indices=[1])
    np.testing.assert_array_equal(whole, [0, 3, 6])
    venv.set_attr("final", None)
    assert venv.env.final is None
    with pytest.raises(InvalidArgumentError, match="Set it for all"):
        venv.set_attr("final", None, indices=[1])
    assert not venv.has_attr("missing")
    assert venv.get_attr("render_mode", [1]) == [None]


def refusal_cases() -> list[tuple[Any, dict[str, Any], type[Exception], str]]:
    """Return invalid environments and options, each with its expected error."""
    odd, small = Isaac(), Isaac()
    odd.single_observation_space = object()
    small.single_observation_space = spaces.Dict({"policy": spaces.Box(0, 1, (3,))})
    return [
        (Isaac(), {"clip_actions": None}, InvalidArgumentError, r"clip_actions=1\.0"),
        (Isaac(), {"clip_actions": -1}, InvalidArgumentError, "clip_actions=-1"),
        (Isaac(), {"observation_key": "x"}, InvalidArgumentError, r"'(policy|critic)', '(policy|critic)'"),
        (odd, {}, InvalidTypeError, "expected one of gymnasium's"),
        (Isaac(final=None), {}, EnvironmentOutputError, "compute_final_obs"),
        (small, {}, EnvironmentOutputError, "as in its observation space"),
    ]


def roll_out(env: Any, options: dict[str, Any]) -> None:
    """Wrap an environment in GymVecEnv, reset it and take three steps."""
    venv = GymVecEnv(env, **options)
    venv.reset()
    for _ in range(3):
        venv.step(np.zeros((4, 2)))


def test_invalid_torch_environments_are_refused() -> None:
    for env, options, error, said in refusal_cases():
        with pytest.raises(error, match=said):
            roll_out(env, {"clip_actions": 1, **options})


def test_spaces_of_other_libraries_are_converted_and_observation_key_selects_one() -> None:
    env = Isaac()
    box = SimpleNamespace(shape=(2,), low=-3.0, high=3.0, dtype=None)
    env.single_observation_space, env.single_action_space = SimpleNamespace(spaces={"policy": box}), box
    venv = GymVecEnv(env)
    assert venv.action_space == venv.observation_space == spaces.Box(-3, 3, (2,), np.float32)
    venv = GymVecEnv(Isaac(), clip_actions=1, env_type="numpy", observation_key="critic")
    assert venv.reset().shape == (4, 2)
    env = Isaac()
    del env.single_observation_space.spaces["policy"]
    assert set(GymVecEnv(env, clip_actions=1).reset()) == {"critic"}


def test_tensors_are_copied_to_cpu_in_one_block() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(6.0).view(3, 2).t(),
        torch.arange(3, dtype=torch.float64),
        torch.zeros(0),
        torch.tensor(7, dtype=torch.int16),
    ]
    arrays = _vector_steps._copy_in_one_block(tensors)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())

"""Check GymWrapper on VMAS's scenarios against the same scenarios without it, on the CPU.

VMAS has its own interface: lists with an entry per agent, a reward per agent, and resets one by one. :class:`Team`
adapts it to GymWrapper in thirty lines. GymWrapper's errors on VMAS's own interfaces are printed.

check_vmas.sh runs it. It prints one line per check. The exit status is 1 if a check failed.

    scripts/check_vmas.sh [scenario ...]
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.utils import check_env_specs
from vmas import make_env

from torchrl_ext import GymWrapper

SCENARIOS = ("balance", "transport")
ENVS = 4
STEPS = 150
EPISODE = 60  # Steps per episode; some of "balance" end earlier, none of "transport".
SEED = 7
_failures: list[str] = []


class Team:
    """Scenario with gymnasium's signatures, summed rewards, and resets by ``env_ids``.

    :param scenario: Name of the scenario.
    :param settings: Options of ``vmas.make_env``.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 (as in gymnasium's environments)

    def __init__(self, scenario: str, **settings: Any) -> None:
        given = {"num_envs": ENVS, "device": "cpu", "max_steps": EPISODE, "seed": SEED, **settings}
        self._env = make_env(scenario, dict_spaces=True, terminated_truncated=True, **given)
        self.num_envs, self.device = self._env.num_envs, self._env.device
        # The spaces are unbatched and of the old gym; GymWrapper detects both. Keys must differ within one TensorDict.
        self.observation_space = self._env.observation_space
        self.action_space = {f"{name}_action": space for name, space in self._env.action_space.spaces.items()}

    def reset(self, *, seed: int | None = None, env_ids: torch.Tensor | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all sub-environments, or those of ``env_ids``."""
        if seed is not None:
            self._env.seed(seed)
        if env_ids is None:
            return self._env.reset(), {}
        for index in env_ids.tolist():
            self._env.reset_at(index, return_observations=False)
        (observation,) = self._env.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )
        return observation, {}

    def step(self, action: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Step all agents."""
        actions = {name.removesuffix("_action"): part for name, part in action.items()}
        observation, rewards, terminated, truncated, info = self._env.step(actions)
        return observation, torch.stack(list(rewards.values())).sum(0), terminated, truncated, info


def check(passed: bool | torch.Tensor, text: str) -> None:
    """Print whether a check has passed, and record a failure if not."""
    print(f"  {'ok    ' if passed else 'FAILED'} {text}", flush=True)
    if not passed:
        _failures.append(text)


def step_without_wrapper(env: Team, actions: list[dict[str, torch.Tensor]]) -> TensorDictBase:
    """Step without a wrapper, and return copies of all results."""
    env.reset(seed=SEED)
    observation, _ = env.reset()
    steps = []
    for action in actions:
        before = _clone_tensors(observation)
        observation, reward, terminated, truncated, _ = env.step(_clone_tensors(action))
        after = {**_clone_tensors(observation), "reward": reward, "terminated": terminated, "truncated": truncated}
        steps.append(TensorDict({**before, "next": _as_columns(after)}, [ENVS]))
        done = (terminated | truncated).nonzero().squeeze(-1)
        if len(done):
            # VMAS draws different random numbers in full and in single resets.
            observation, _ = env.reset() if len(done) == ENVS else env.reset(env_ids=done)
    return torch.stack(steps, 1)


def _clone_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors by agent."""
    return {key: value.clone() for key, value in tensors.items()}


def _as_columns(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors, in which one-dimensional ones become columns."""
    return {key: value.clone().unsqueeze(-1) if value.ndim == 1 else value for key, value in tensors.items()}


def check_scenario(scenario: str, **settings: Any) -> None:
    """Check one scenario against the bare environment."""
    print(", ".join([scenario, *(f"{name}={value}" for name, value in settings.items())]))
    env = GymWrapper(Team(scenario, **settings), categorical_action_encoding=True)
    check(env.batch_size == (ENVS,) and env.device == torch.device("cpu"), "batch size and device")
    agents = list(env._env.observation_space.spaces)
    check(list(env.observation_spec.keys()) == agents, f"specs of {agents}")
    check(list(env.full_action_spec.keys()) == [f"{name}_action" for name in agents], "and of their actions")
    check_env_specs(env)
    check(True, "check_env_specs")

    torch.manual_seed(SEED)
    actions = [dict(env.full_action_spec.rand().items()) for _ in range(STEPS)]
    record = step_without_wrapper(Team(scenario, **settings), actions)
    env = GymWrapper(Team(scenario, **settings), categorical_action_encoding=True)
    env.set_seed(SEED)
    turns = iter(actions)
    data = env.rollout(STEPS, lambda tensordict: tensordict.update(next(turns)), break_when_any_done=False)
    for title, keys in {
        "observations": agents,
        "next observations, those at the ends of episodes too": [("next", name) for name in agents],
        **{name: [("next", name)] for name in ("reward", "terminated", "truncated")},
    }.items():
        equal = all(torch.equal(data.get(key), record.get(key)) for key in keys)
        check(equal, f"{title} as in the bare environment")
    ends = {name: int(data.get(("next", name)).sum()) for name in ("done", "terminated", "truncated")}
    check(0 < ends["done"] < data.numel() / 2, f"ends of episodes in {data.numel()} steps: {ends}")
    frames = data.get(agents[0]).unbind(1)
    check(not any(torch.equal(one, other) for one, other in pairwise(frames)), "frames differ")

    env.reset()
    for _ in range(3):
        env.rand_step(env.reset(TensorDict({"_reset": torch.zeros(ENVS, 1, dtype=torch.bool)}, [ENVS])))
    env.reset(TensorDict({"_reset": torch.arange(ENVS).unsqueeze(-1) == 1}, [ENVS]))
    lengths = env._env._env.steps.int().tolist()
    check(lengths == [3, 0, 3, 3], f"a partial reset leaves the others alone: episode lengths {lengths}")


def check_gradients(scenario: str) -> None:
    """Check that results of a differentiable simulation are detached."""
    print(f"{scenario}, grad_enabled=True")
    env = GymWrapper(Team(scenario, grad_enabled=True))
    tensordict = env.reset()
    for action in env.rand_action(tensordict).select(*env.full_action_spec.keys()).values():
        action.requires_grad_()
    after = env.step(tensordict).get("next")
    check(not any(value.requires_grad for value in after.values(True, True)), "tensors are detached")


def print_native_interfaces(scenario: str) -> None:
    """Print whether GymWrapper accepts VMAS's own interfaces, or its errors."""
    print(f"{scenario}, VMAS's own interfaces: lists of agents, and a reward for each")
    settings = {"num_envs": ENVS, "seed": SEED, "terminated_truncated": True}
    for title, extra in {
        "native": {},
        "native, dict_spaces=True": {"dict_spaces": True},
        'wrapper="gymnasium_vec"': {"wrapper": "gymnasium_vec", "wrapper_kwargs": {"return_numpy": False}},
    }.items():
        try:
            GymWrapper(make_env(scenario, **settings, **extra)).rollout(3)
            print(f"         {title}: works")
        except Exception as error:  # any error is printed
            print(f"         {title}: {type(error).__name__}: {error}")


def main() -> None:
    """Check all scenarios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("scenarios", nargs="*", default=SCENARIOS)
    warnings.simplefilter("ignore")  # hides warnings of gym, which VMAS still imports
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    for scenario in parser.parse_args().scenarios:
        check_scenario(scenario)
        check_scenario(scenario, continuous_actions=False)
        check_gradients(scenario)
        print_native_interfaces(scenario)
    print(f"failed checks: {len(_failures)}" if _failures else "all checks passed")
    sys.exit(bool(_failures))


if __name__ == "__main__":
    main()

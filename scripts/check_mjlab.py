"""Check GymWrapper on mjlab's environments against the same environments without it.

check_mjlab.sh runs it. It prints one line per check. The exit status is 1 if a check failed.

    scripts/check_mjlab.sh [task ...]
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.libs.mjlab import MJLabWrapper
from torchrl.envs.utils import check_env_specs

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext import GymWrapper

TASKS = ("Mjlab-Cartpole-Balance", "Mjlab-Velocity-Flat-Unitree-Go1")
ENVS = 4
STEPS = 24
EPISODE = 9  # Steps per episode, so that the time limit is reached twice.
SEED = 7
_failures: list[str] = []


@dataclass(frozen=True)
class Record:
    """Copied results of an environment without a wrapper, of shape (ENVS, STEPS, ...).

    :param before: Observations before the steps.
    :param after: Observations that the steps return.
    """

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor

    @property
    def done(self) -> torch.Tensor:
        """Ends of episodes, by termination or truncation."""
        return self.terminated | self.truncated


def check(passed: bool | torch.Tensor, text: str) -> None:
    """Print whether a check has passed, and record a failure if not."""
    print(f"  {'ok    ' if passed else 'FAILED'} {text}", flush=True)
    if not passed:
        _failures.append(text)


def make(task: str, **settings: Any) -> ManagerBasedRlEnv:
    """Build a task with few sub-environments and short episodes."""
    config = load_env_cfg(task)
    config.scene.num_envs, config.seed = ENVS, SEED
    config.episode_length_s = EPISODE * config.sim.mujoco.timestep * config.decimation
    for name, value in settings.items():
        setattr(config, name, value)
    return ManagerBasedRlEnv(config, device="cpu")


def step_without_wrapper(env: ManagerBasedRlEnv, actions: torch.Tensor) -> Record:
    """Step without a wrapper, and reset by indices if the environment does not autoreset."""
    env.reset(seed=SEED)
    observation, _ = env.reset()
    columns: dict[str, list[Any]] = {name: [] for name in ("before", "after", "reward", "terminated", "truncated")}
    for action in actions.unbind(1):
        columns["before"].append(_clone_tensors(observation))
        observation, *rest, _ = env.step(action.clone())
        columns["after"].append(_clone_tensors(observation))
        for name, value in zip(("reward", "terminated", "truncated"), rest, strict=True):
            columns[name].append(value.clone().unsqueeze(-1))
        done = (rest[1] | rest[2]).nonzero().squeeze(-1)
        if len(done) and not env.cfg.auto_reset:
            # Other rows continue from the step's observations, since a reset draws new noise for all rows.
            fresh, _ = env.reset(env_ids=done)
            observation = columns["after"][-1].copy()
            for key in observation:
                observation[key] = observation[key].index_copy(0, done, fresh[key][done])
    stacked = {name: torch.stack(columns[name], 1) for name in ("reward", "terminated", "truncated")}
    groups = {
        name: {key: torch.stack([one[key] for one in columns[name]], 1) for key in observation}
        for name in ("before", "after")
    }
    return Record(before=groups["before"], after=groups["after"], **stacked)


def _clone_tensors(observation: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors in an observation."""
    return {key: value.clone() for key, value in observation.items()}


def rollout(env: Any, actions: torch.Tensor) -> TensorDictBase:
    """Roll out the same actions through a wrapper."""
    env.set_seed(SEED)
    turns = iter(actions.unbind(1))
    return env.rollout(
        actions.shape[1], lambda tensordict: tensordict.set("action", next(turns)), break_when_any_done=False
    )


def equal(data: TensorDictBase, expected: Mapping[str, torch.Tensor], rows: torch.Tensor | None = None) -> bool:
    """Compare observations bit for bit, everywhere or in some rows."""
    pairs = [(data.get(key), value) for key, value in expected.items()]
    if rows is not None:
        pairs = [(one[rows.squeeze(-1)], other[rows.squeeze(-1)]) for one, other in pairs]
    return all(torch.equal(one, other) for one, other in pairs)


def check_record(data: TensorDictBase, record: Record) -> None:
    """Check the results that do not depend on the autoreset mode."""
    after = data.get("next")
    check(equal(data, record.before), "observations equal those of the bare environment")
    check(equal(after, record.after, ~record.done), "next observations equal its, except at ends of episodes")
    for name in ("reward", "terminated", "truncated", "done"):
        check(torch.equal(after.get(name), getattr(record, name)), f"{name} equals its")
    count = int(record.done.sum())
    check(0 < count < record.done.numel() / 2, f"{count} of {record.done.numel()} steps end an episode")
    for key in record.before:
        frames = data.get(key)
        repeated = [torch.equal(one, other) for one, other in pairwise(frames.unbind(1))]
        check(not any(repeated), f"frames of {key!r} differ")


def check_same_step(task: str) -> None:
    """Check mjlab's default, which resets within the step and returns no final observations."""
    print(f"{task}, which resets itself")
    env = GymWrapper(make(task))
    check(env.batch_size == (ENVS,) and env.device == torch.device("cpu"), "batch size and device")
    single = env._env.single_observation_space.spaces
    found = {key: tuple(spec.shape) for key, spec in env.observation_spec.items()}
    check(found == {key: (ENVS, *space.shape) for key, space in single.items()}, f"specs: {found}")
    check_env_specs(env)
    check(True, "check_env_specs")

    torch.manual_seed(SEED)
    actions = 0.3 * torch.randn(ENVS, STEPS, *env.action_spec.shape[1:])
    record = step_without_wrapper(make(task), actions)
    data = rollout(GymWrapper(make(task)), actions)
    check_record(data, record)
    done = record.done.squeeze(-1)
    lost = [data.get(("next", key))[done] for key in record.before]
    check(all(rows.isnan().all() for rows in lost), "last observations are NaN")
    check(not any(data.get(key).isnan().any() for key in record.before), "no other observation is NaN")
    data = rollout(GymWrapper(make(task), missing_final_obs="previous"), actions)
    before = {key: data.get(key) for key in record.before}
    check(equal(data.get("next"), before, record.done), 'with missing_final_obs="previous" the ones before them')
    env = GymWrapper(make(task), missing_final_obs="error")
    check(raises(EnvironmentOutputError, lambda: rollout(env, actions)), 'with "error" an EnvironmentOutputError')
    upstream = rollout(MJLabWrapper(make(task)), actions).get(("next", "truncated"))
    print(f"         TorchRL's MJLabWrapper: {int(upstream.sum())} truncated, {int(record.truncated.sum())} are right")


def check_disabled(task: str) -> None:
    """Check mjlab's other mode, with final observations in steps and resets by the wrapper."""
    print(f"{task}, auto_reset=False")
    env = GymWrapper(make(task, auto_reset=False), autoreset_mode="Disabled")
    check_env_specs(env)
    check(True, "check_env_specs")
    torch.manual_seed(SEED)
    actions = 0.3 * torch.randn(ENVS, STEPS, *env.action_spec.shape[1:])
    record = step_without_wrapper(make(task, auto_reset=False), actions)
    data = rollout(GymWrapper(make(task, auto_reset=False), autoreset_mode="Disabled"), actions)
    check_record(data, record)
    check(equal(data.get("next"), record.after), "last observations are the true ones")

    env.reset()
    for _ in range(3):
        env.rand_step(env.reset(TensorDict({"_reset": torch.zeros(ENVS, 1, dtype=torch.bool)}, [ENVS])))
    mask = torch.arange(ENVS).unsqueeze(-1) == 1
    env.reset(TensorDict({"_reset": mask}, [ENVS]))
    lengths = env._env.episode_length_buf.tolist()
    check(lengths == [3, 0, 3, 3], f"a partial reset leaves the others alone: episode lengths {lengths}")
    data = rollout(GymWrapper(make(task, auto_reset=False)), actions)
    check(equal(data.get("next"), record.after), "the same without autoreset_mode, which is detected")


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    """Return whether a call raises an exception of a class, and print its text."""
    try:
        call()
    except kind as error:
        print(f"         {error}")
        return True
    return False


def main() -> None:
    """Check all tasks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    for task in parser.parse_args().tasks:
        check_same_step(task)
        check_disabled(task)
    print(f"failed checks: {len(_failures)}" if _failures else "all checks passed")
    sys.exit(bool(_failures))


if __name__ == "__main__":
    main()

"""``torchrl_ext.GymWrapper`` against TorchRL's ``GymWrapper`` and ``IsaacLabWrapper``.

    python -m benchmarks.gym_wrapper [CartPole HalfCheetah image vector torch] [--rounds 15]
        [--isaac-wrapper IsaacLab/source/isaaclab_rl/isaaclab_rl/torchrl/vecenv_wrapper.py]

The environments return NumPy arrays or torch tensors. All competitors take the same actions in environments with the
same seed, and take turns in one process with one torch thread. Times are CPU seconds of the calling thread. *Overhead*
is the time that a wrapper adds to the bare environment, which takes its turn too. Ratios are medians over the rounds.
The target is printed next to each ratio.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector
from torchrl.envs import Compose, EnvBase, RewardSum, StepCounter, TransformedEnv
from torchrl.envs import GymWrapper as Upstream
from torchrl.envs.libs.isaac_lab import IsaacLabWrapper

from benchmarks import isaac_like
from benchmarks.measure import format_ratio, machine, parse_options, record, speedup, synchronized_time, time_in_turns
from torchrl_ext import GymWrapper

Run = Callable[[], object]
Pair = tuple[str, str, float | None]  # TorchRL's competitor, this package's, and the target
ACTIONS = 64  # Prepared actions, used in turn.
DEVICES = {'device="cpu"': {"device": "cpu"}, "device=None": {}}
HEADER = f"{'':49}{'bare':>8} {'TorchRL':>8} {'ours':>8}"


class Image(gymnasium.Env[np.ndarray, int]):
    """Environment that returns the same 28 KB array at no cost."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._observation = np.zeros((84, 84, 4), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._steps = 0
        return self._observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the same observation; episodes have 500 steps."""
        self._steps += 1
        return self._observation, 1.0, False, self._steps >= 500, {}


NUMPY_ENVS: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    "CartPole": lambda: gymnasium.make("CartPole-v1"),
    "HalfCheetah": lambda: gymnasium.make("HalfCheetah-v5"),
    "image": Image,
}


class PreparedPolicy(TensorDictModuleBase):
    """Policy that returns prepared actions, at the least possible cost.

    :param actions: Actions in the form of the environment's action spec.
    """

    def __init__(self, actions: list[torch.Tensor]) -> None:
        self.in_keys: list[str] = []
        self.out_keys = ["action"]
        super().__init__()
        self.__dict__.update(actions=actions, turn=0)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next action."""
        state = self.__dict__
        state["turn"] += 1
        return tensordict.set("action", state["actions"][state["turn"] % ACTIONS])


class FreeEnv(EnvBase):
    """Environment that takes no time, so that a loop around it measures the loop alone.

    :param env: Environment whose specs it has, and whose recorded step it repeats.
    """

    def __init__(self, env: EnvBase) -> None:
        super().__init__(device=env.device, batch_size=env.batch_size)
        self.__dict__.update(reset_data=env.reset(), step_data=env.rand_step()["next"])
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec"):
            setattr(self, name, getattr(env, name).clone())
        self.set_spec_lock_(True)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.reset_data.copy()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.step_data.copy()

    def _set_seed(self, seed: int | None) -> None:
        pass


# -- functions that make the work of one round


def make_stepper(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Return a function that calls ``step_and_maybe_reset``, as collectors do."""
    env.set_seed(0)
    tensordict = env.reset()

    def take_steps() -> None:
        """Take ``steps`` steps with the prepared actions in turn."""
        nonlocal tensordict
        for turn in range(steps):
            tensordict.set("action", actions[turn % ACTIONS])
            _, tensordict = env.step_and_maybe_reset(tensordict)

    return take_steps


def make_bare_stepper(env: Any, actions: list[Any], steps: int) -> Run:
    """Return a function that steps an environment without a wrapper, and resets it."""
    env.reset(seed=0)
    resets = not hasattr(env, "num_envs")

    def take_steps() -> None:
        """Take ``steps`` steps with the prepared actions in turn; reset ended episodes."""
        for turn in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[turn % ACTIONS])
            if resets and (terminated or truncated):
                env.reset()

    return take_steps


def make_collector_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Return a function that collects one batch."""
    env.set_seed(0)
    batches = iter(Collector(env, PreparedPolicy(actions), device=env.device, frames_per_batch=steps, total_frames=-1))
    return lambda: next(batches)


def make_rollout_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Return a function that rolls out with prepared actions, across episodes."""
    env.set_seed(0)
    policy = PreparedPolicy(actions)
    return lambda: env.rollout(steps, policy, break_when_any_done=False)


def make_random_rollout_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Return a function that rolls out with random actions."""
    env.set_seed(0)
    return lambda: env.rollout(steps, break_when_any_done=False)


def make_transformed_stepper(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Return a function that steps under the transforms of most training scripts."""
    return make_stepper(TransformedEnv(env, Compose(RewardSum(), StepCounter())), actions, steps)


# Loops, and the speedup over TorchRL's wrapper that each has to reach.
LOOPS: dict[str, tuple[Callable[[EnvBase, list[torch.Tensor], int], Run], float]] = {
    "Collector": (make_collector_run, 2),
    "rollout": (make_rollout_run, 3.5),
    "rollout, random": (make_random_rollout_run, 3.5),
    "RewardSum, StepCounter": (make_transformed_stepper, 1.7),
}


# -- the rows


def print_overheads(
    competitors: Mapping[str, Run],
    pairs: Mapping[str, tuple[str, str, float | None]],
    clock: Callable[[], float] = time.thread_time,
    **counts: int,
) -> None:
    """Print the overhead of TorchRL's wrappers divided by that of this package's wrapper.

    :param competitors: Work of one round by name, ``"bare"`` among them.
    :param pairs: For each row: TorchRL's competitor, this package's, and the target.
    :param clock: Clock in seconds.
    :param counts: ``rounds``, and ``steps`` per round.
    """
    seconds = time_rounds(competitors, counts["rounds"], clock)
    print("overhead of step_and_maybe_reset")
    for label, (theirs, ours, target) in pairs.items():
        ratio = float(np.median((seconds[theirs] - seconds["bare"]) / (seconds[ours] - seconds["bare"])))
        record("gym_wrapper", label, overhead_ratio=ratio)
        print_row(label, [seconds[name] for name in ("bare", theirs, ours)], ratio, target, counts["steps"])


def time_rounds(
    competitors: Mapping[str, Run], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, np.ndarray]:
    """Return the seconds of each competitor by round, after two rounds of warm-up."""
    time_in_turns(competitors, rounds=2)
    return time_in_turns(competitors, rounds=rounds, clock=clock)


def print_row(label: str, seconds: list[np.ndarray], ratio: float, target: float | None, steps: int) -> None:
    """Print microseconds per step, a ratio and its target, if there is one."""
    columns = " ".join(f"{np.median(column) / steps * 1e6:8.1f}" for column in seconds)
    print(f"  {label:46} {columns:>26} {format_ratio(ratio, target)}", flush=True)


def encode_actions(env: EnvBase, actions: list[Any]) -> list[torch.Tensor]:
    """Encode the bare environment's actions for the wrapper."""
    return [env.action_spec.encode(action) for action in actions]


def measure_numpy_env(name: str, rounds: int) -> None:
    """Measure one NumPy environment: overhead, then total times of whole loops."""
    make, steps = NUMPY_ENVS[name], 300
    space = make().action_space
    space.seed(0)
    actions = [space.sample() for _ in range(ACTIONS)]

    def both_wrappers(run: Callable[..., Run]) -> Iterator[tuple[str, Run]]:
        """Yield name and loop of TorchRL's wrapper and ours for each device."""
        for device, kwargs in DEVICES.items():
            for library, wrapper in (("TorchRL", Upstream), ("ours", GymWrapper)):
                env = wrapper(make(), **kwargs)
                yield f"{library} {device}", run(env, encode_actions(env, actions), steps)

    def without_env_time(run: Callable[..., Run]) -> Iterator[tuple[str, Run]]:
        """Yield name and loop over an environment that takes no time for each device."""
        for device, kwargs in DEVICES.items():
            env = GymWrapper(make(), **kwargs)
            yield f"free {device}", run(FreeEnv(env), encode_actions(env, actions), steps)

    pairs = {
        f"{name}, {device}": (f"TorchRL {device}", f"ours {device}", target)
        for device, target in zip(DEVICES, (4, 2.8), strict=True)
    }
    competitors = {"bare": make_bare_stepper(make(), actions, steps), **dict(both_wrappers(make_stepper))}
    print_overheads(competitors, pairs, steps=steps, rounds=rounds)
    print("total time")
    for loop, (run, target) in LOOPS.items():
        # Only TransformedEnv calls _step directly; other loops would also measure EnvBase.step.
        least = dict(without_env_time(run)) if run is make_transformed_stepper else {}
        seconds = time_rounds(
            {"bare": make_bare_stepper(make(), actions, steps), **dict(both_wrappers(run)), **least}, rounds
        )
        for device, (label, (theirs, ours, _)) in zip(DEVICES, pairs.items(), strict=True):
            ratio = speedup(seconds, ours, baseline=theirs)
            print_row(f"{label}, {loop}", [seconds[theirs], seconds[ours]], ratio, target, steps)
            if least:
                loop_itself = seconds[f"free {device}"]
                most = float(np.median(seconds[theirs] / (loop_itself + seconds["bare"])))
                print_row("  around an environment that takes no time", [loop_itself], most, None, steps)


def measure_vector_env(rounds: int) -> None:
    """Measure sixteen CartPoles in a synchronous vector environment."""

    def make_env() -> SyncVectorEnv:
        """Make sixteen CartPoles in a SyncVectorEnv that resets within the step."""
        return SyncVectorEnv([NUMPY_ENVS["CartPole"]] * 16, autoreset_mode=AutoresetMode.SAME_STEP)

    env, steps = make_env(), 100
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(ACTIONS)]
    competitors = {"bare": make_bare_stepper(env, actions, steps)}
    for library, wrapper in (("TorchRL", Upstream), ("ours", GymWrapper)):
        wrapped = wrapper(make_env())
        competitors[library] = make_stepper(wrapped, encode_actions(wrapped, actions), steps)
    print_overheads(competitors, {"16 CartPoles, SAME_STEP": ("TorchRL", "ours", 9)}, steps=steps, rounds=rounds)


# Targets by number of sub-environments: against IsaacLabWrapper, and against its native_autoreset.
TORCH_TARGETS = {64: (7, 5), 4096: (5, 3), 16384: (3, None)}


def load_isaac_lab_wrapper(path: Path) -> Callable[..., EnvBase]:
    """Load Isaac Lab's own wrapper for TorchRL from its source file, without Isaac Sim.

    Source: https://github.com/isaac-sim/IsaacLab/pull/7502
    """
    spec = importlib.util.spec_from_file_location("isaaclab_torchrl_wrapper", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapper: Callable[..., EnvBase] = module.IsaacLabTorchRLWrapper
    return wrapper


def measure_torch_envs(rounds: int, isaac_wrapper: Path | None = None, device: str = "cpu") -> None:
    """Measure environments in Isaac Lab's style, without and with final observations."""
    isaac_like.install()
    isaac_lab_wrapper = None if isaac_wrapper is None else load_isaac_lab_wrapper(isaac_wrapper)
    raise_malloc_threshold()
    for final_obs in (False, True):
        for count, (target, native_target) in TORCH_TARGETS.items():
            measure_torch_env(
                count,
                final_obs,
                isaac_lab_wrapper,
                target=target,
                native_target=native_target,
                rounds=rounds,
                device=device,
            )


def measure_torch_env(
    count: int,
    final_obs: bool,
    isaac_lab_wrapper: Callable[..., EnvBase] | None,
    *,
    target: float,
    native_target: float | None,
    rounds: int,
    device: str,
) -> None:
    """Measure one environment in Isaac Lab's style with ``count`` sub-environments."""
    steps = max(15, min(200, 160_000 // count))
    actions = list(torch.randn(ACTIONS, count, isaac_like.ACTION_SIZE, device=device))

    def make_env() -> isaac_like.IsaacLike:
        """Make ``count`` sub-environments, with or without final observations."""
        return isaac_like.IsaacLike(count, final_obs=final_obs, device=device)

    competitors = {
        "bare": make_bare_stepper(make_env(), actions, steps),
        "TorchRL": make_stepper(IsaacLabWrapper(make_env(), device=device), actions, steps),
        "ours": make_stepper(GymWrapper(make_env()), actions, steps),
    }
    name = f"torch, N={count}{', final_obs' if final_obs else ''}"
    pairs: dict[str, Pair] = {name: ("TorchRL", "ours", target)}
    if native_target is not None:
        env = IsaacLabWrapper(make_env(), device=device, native_autoreset=True)
        competitors["native"] = make_stepper(env, actions, steps)
        pairs[f"{name}, native_autoreset"] = ("native", "ours", native_target)
    if isaac_lab_wrapper is not None:
        competitors["Isaac Lab's"] = make_stepper(isaac_lab_wrapper(make_env()), actions, steps)
        pairs[f"{name}, Isaac Lab's own wrapper"] = ("Isaac Lab's", "ours", None)
    clock = time.thread_time if device == "cpu" else synchronized_time
    print_overheads(competitors, pairs, clock=clock, steps=steps, rounds=rounds)


def raise_malloc_threshold() -> None:
    """Keep freed memory in this process, by raising glibc's threshold for returning it.

    glibc returns freed memory to the system above a threshold, which grows with the size of freed blocks. With a low
    threshold, some competitors have 700 page faults per step and others none, by chance.
    """
    torch.ones(31 * 2**20, dtype=torch.uint8)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gym_wrapper", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", help="device of torch environments")
    parser.add_argument("--isaac-wrapper", type=Path, help="vecenv_wrapper.py of Isaac Lab's isaaclab_rl.torchrl")
    options = parse_options(parser, [*NUMPY_ENVS, "vector", "torch"], metavar="environment")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    print(machine())
    print(f"CPU microseconds per step, and the ratio of TorchRL's to ours ({options.rounds} rounds)")
    print(HEADER)
    for name in options.names:
        if name in NUMPY_ENVS:
            measure_numpy_env(name, options.rounds)
        elif name == "vector":
            measure_vector_env(options.rounds)
        else:
            measure_torch_envs(options.rounds, options.isaac_wrapper, options.device)


if __name__ == "__main__":
    main()

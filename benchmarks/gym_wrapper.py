"""``torchrl_ext.GymWrapper`` against TorchRL's, on environments that speak NumPy or torch.

All competitors take the same prepared actions in environments with the same seed, take turns in one process, with
torch's threads set to one, and are measured by the CPU time of the calling thread. *Overhead* is what a wrapper adds to
the bare environment, which takes its turn too; ratios of overheads and of total times are medians over the rounds.
Beside each stands the bar that it has to reach.

    python -m benchmarks.gym_wrapper [CartPole HalfCheetah image vector torch] [--rounds 15]
        [--isaac-wrapper IsaacLab/source/isaaclab_rl/isaaclab_rl/torchrl/vecenv_wrapper.py]
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
from benchmarks.measure import time_in_turns, format_ratio, machine, parse_options, record, speedup
from torchrl_ext import GymWrapper

Run = Callable[[], object]
Pair = tuple[str, str, float | None]  # TorchRL's competitor, ours, and the bar
ACTIONS = 64  # prepared ones, taken in turn
DEVICES = {'device="cpu"': {"device": "cpu"}, "device=None": {}}
HEADER = f"{'':49}{'bare':>8} {'TorchRL':>8} {'ours':>8}"


class Image(gymnasium.Env[np.ndarray, int]):
    """Costs nothing and returns 28 KB, always the same array."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._observation = np.zeros((84, 84, 4), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start counting again."""
        self._steps = 0
        return self._observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count."""
        self._steps += 1
        return self._observation, 1.0, False, self._steps >= 500, {}


NUMPY_ENVS: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {
    "CartPole": lambda: gymnasium.make("CartPole-v1"),
    "HalfCheetah": lambda: gymnasium.make("HalfCheetah-v5"),
    "image": Image,
}


class PreparedPolicy(TensorDictModuleBase):
    """A policy that takes prepared actions: it costs as little as a policy can.

    :param actions: as they stand in the TensorDict
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
    """Stands for an environment and takes no time: what a loop around it takes is the loop's own.

    :param env: whose specs it has, and of which it returns one step again and again
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


# -- what a round runs


def make_stepper(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """``step_and_maybe_reset``, as collectors call it."""
    env.set_seed(0)
    tensordict = env.reset()

    def run() -> None:
        nonlocal tensordict
        for turn in range(steps):
            tensordict.set("action", actions[turn % ACTIONS])
            _, tensordict = env.step_and_maybe_reset(tensordict)

    return run


def bare(env: Any, actions: list[Any], steps: int) -> Run:
    """The environment alone, reset where it does not reset itself."""
    env.reset(seed=0)
    resets = not hasattr(env, "num_envs")

    def run() -> None:
        for turn in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[turn % ACTIONS])
            if resets and (terminated or truncated):
                env.reset()

    return run


def make_collector_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """One batch of a collector."""
    env.set_seed(0)
    batches = iter(Collector(env, PreparedPolicy(actions), device=env.device, frames_per_batch=steps, total_frames=-1))
    return lambda: next(batches)


def make_rollout_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """One rollout through all episodes that it takes."""
    env.set_seed(0)
    policy = PreparedPolicy(actions)
    return lambda: env.rollout(steps, policy, break_when_any_done=False)


def make_random_rollout_run(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """One rollout without a policy: the environment draws the actions."""
    env.set_seed(0)
    return lambda: env.rollout(steps, break_when_any_done=False)


def make_transformed_stepper(env: EnvBase, actions: list[torch.Tensor], steps: int) -> Run:
    """Steps under the transforms that most scripts have."""
    return make_stepper(TransformedEnv(env, Compose(RewardSum(), StepCounter())), actions, steps)


# The bars: how many times as fast, against TorchRL's wrapper.
LOOPS: dict[str, tuple[Callable[[EnvBase, list[torch.Tensor], int], Run], float]] = {
    "Collector": (make_collector_run, 2),
    "rollout": (make_rollout_run, 3.5),
    "rollout, random": (make_random_rollout_run, 3.5),
    "RewardSum, StepCounter": (make_transformed_stepper, 1.7),
}


# -- the rows


def print_overheads(
    competitors: Mapping[str, Run], pairs: Mapping[str, tuple[str, str, float | None]], **counts: int
) -> None:
    """Print what TorchRL's wrappers add to the bare environment over what ours adds.

    :param competitors: one of them called "bare"
    :param pairs: of each row: TorchRL's competitor, ours, and the bar
    :param counts: rounds, and the steps of one
    """
    seconds = time_rounds(competitors, counts["rounds"])
    print("overhead of step_and_maybe_reset")
    for label, (theirs, ours, target) in pairs.items():
        ratio = float(np.median((seconds[theirs] - seconds["bare"]) / (seconds[ours] - seconds["bare"])))
        record("gym_wrapper", label, overhead_ratio=ratio)
        print_row(label, [seconds[name] for name in ("bare", theirs, ours)], ratio, target, counts["steps"])


def time_rounds(competitors: Mapping[str, Run], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each competitor, by rounds, after two that do not count."""
    time_in_turns(competitors, rounds=2)
    return time_in_turns(competitors, rounds=rounds, clock=time.thread_time)


def print_row(label: str, seconds: list[np.ndarray], ratio: float, target: float | None, steps: int) -> None:
    """Print microseconds a step, a ratio and its bar, if it has one."""
    columns = " ".join(f"{np.median(column) / steps * 1e6:8.1f}" for column in seconds)
    print(f"  {label:46} {columns:>26} {format_ratio(ratio, target)}", flush=True)


def encode_actions(env: EnvBase, actions: list[Any]) -> list[torch.Tensor]:
    """The actions of the bare environment as the wrapper takes them."""
    return [env.action_spec.encode(action) for action in actions]


def measure_numpy_env(name: str, rounds: int) -> None:
    """One environment that speaks NumPy: overhead, then total times of whole loops."""
    make, steps = NUMPY_ENVS[name], 300
    space = make().action_space
    space.seed(0)
    actions = [space.sample() for _ in range(ACTIONS)]

    def wrapped(run: Callable[..., Run]) -> Iterator[tuple[str, Run]]:
        for device, kwargs in DEVICES.items():
            for library, wrapper in (("TorchRL", Upstream), ("ours", GymWrapper)):
                env = wrapper(make(), **kwargs)
                yield f"{library} {device}", run(env, encode_actions(env, actions), steps)

    def alone(run: Callable[..., Run]) -> Iterator[tuple[str, Run]]:
        for device, kwargs in DEVICES.items():
            env = GymWrapper(make(), **kwargs)
            yield f"free {device}", run(FreeEnv(env), encode_actions(env, actions), steps)

    pairs = {
        f"{name}, {device}": (f"TorchRL {device}", f"ours {device}", target)
        for device, target in zip(DEVICES, (4, 2.8), strict=True)
    }
    competitors = {"bare": bare(make(), actions, steps), **dict(wrapped(make_stepper))}
    print_overheads(competitors, pairs, steps=steps, rounds=rounds)
    print("total time")
    for loop, (run, target) in LOOPS.items():
        # TransformedEnv calls what its environment is made of; other loops would measure EnvBase's step as well.
        least = dict(alone(run)) if run is make_transformed_stepper else {}
        seconds = time_rounds({"bare": bare(make(), actions, steps), **dict(wrapped(run)), **least}, rounds)
        for device, (label, (theirs, ours, _)) in zip(DEVICES, pairs.items(), strict=True):
            ratio = speedup(seconds, ours, baseline=theirs)
            print_row(f"{label}, {loop}", [seconds[theirs], seconds[ours]], ratio, target, steps)
            if least:
                loop_itself = seconds[f"free {device}"]
                most = float(np.median(seconds[theirs] / (loop_itself + seconds["bare"])))
                print_row("  around an environment that takes no time", [loop_itself], most, None, steps)


def vector(rounds: int) -> None:
    """Sixteen CartPoles in a synchronous vector environment."""

    def make() -> SyncVectorEnv:
        return SyncVectorEnv([NUMPY_ENVS["CartPole"]] * 16, autoreset_mode=AutoresetMode.SAME_STEP)

    env, steps = make(), 100
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(ACTIONS)]
    competitors = {"bare": bare(env, actions, steps)}
    for library, wrapper in (("TorchRL", Upstream), ("ours", GymWrapper)):
        wrapped = wrapper(make())
        competitors[library] = make_stepper(wrapped, encode_actions(wrapped, actions), steps)
    print_overheads(competitors, {"16 CartPoles, SAME_STEP": ("TorchRL", "ours", 9)}, steps=steps, rounds=rounds)


# Bars for as many sub-environments: against IsaacLabWrapper, and against its native_autoreset.
TORCH_TARGETS = {64: (7, 5), 4096: (5, 3), 16384: (3, None)}


def load_isaac_lab_wrapper(path: Path) -> Callable[..., EnvBase]:
    """Load Isaac Lab's own wrapper for TorchRL from its source file, which imports nothing of Isaac Sim.

    Source: https://github.com/isaac-sim/IsaacLab/pull/7502
    """
    spec = importlib.util.spec_from_file_location("isaaclab_torchrl_wrapper", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrapper: Callable[..., EnvBase] = module.IsaacLabTorchRLWrapper
    return wrapper


def measure_torch_envs(rounds: int, isaac_wrapper: Path | None = None) -> None:
    """An environment in Isaac Lab's style, without and with final observations, which TorchRL's wrapper ignores."""
    isaac_like.install()
    isaac_lab_wrapper = None if isaac_wrapper is None else load_isaac_lab_wrapper(isaac_wrapper)
    raise_malloc_threshold()
    for final_obs in (False, True):
        for count, (target, native_target) in TORCH_TARGETS.items():
            measure_torch_env(
                count, final_obs, isaac_lab_wrapper, target=target, native_target=native_target, rounds=rounds
            )


def measure_torch_env(
    count: int,
    final_obs: bool,
    isaac_lab_wrapper: Callable[..., EnvBase] | None,
    *,
    target: float,
    native_target: float | None,
    rounds: int,
) -> None:
    """So many sub-environments."""
    steps = max(15, min(200, 160_000 // count))
    actions = list(torch.randn(ACTIONS, count, isaac_like.ACTION_SIZE))

    def make() -> isaac_like.IsaacLike:
        return isaac_like.IsaacLike(count, final_obs=final_obs)

    competitors = {
        "bare": bare(make(), actions, steps),
        "TorchRL": make_stepper(IsaacLabWrapper(make(), device="cpu"), actions, steps),
        "ours": make_stepper(GymWrapper(make()), actions, steps),
    }
    name = f"torch, N={count}{', final_obs' if final_obs else ''}"
    pairs: dict[str, Pair] = {name: ("TorchRL", "ours", target)}
    if native_target is not None:
        env = IsaacLabWrapper(make(), device="cpu", native_autoreset=True)
        competitors["native"] = make_stepper(env, actions, steps)
        pairs[f"{name}, native_autoreset"] = ("native", "ours", native_target)
    if isaac_lab_wrapper is not None:
        competitors["Isaac Lab's"] = make_stepper(isaac_lab_wrapper(make()), actions, steps)
        pairs[f"{name}, Isaac Lab's own wrapper"] = ("Isaac Lab's", "ours", None)
    print_overheads(competitors, pairs, steps=steps, rounds=rounds)


def raise_malloc_threshold() -> None:
    """Free one block of 31 MB, as any network does on such batches.

    glibc's malloc gives freed memory back to the system above a threshold that grows with what is freed. Below it,
    some competitors pay 700 page faults a step and others none, by where their tensors happen to lie.
    """
    torch.ones(31 * 2**20, dtype=torch.uint8)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gym_wrapper", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isaac-wrapper", type=Path, help="vecenv_wrapper.py of Isaac Lab's isaaclab_rl.torchrl")
    options = parse_options(parser, [*NUMPY_ENVS, "vector", "torch"], metavar="environment")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    print(machine())
    print(f"microseconds of CPU a step, and how many times less than TorchRL's ({options.rounds} rounds)")
    print(HEADER)
    for name in options.names:
        if name in NUMPY_ENVS:
            measure_numpy_env(name, options.rounds)
        elif name == "vector":
            vector(options.rounds)
        else:
            measure_torch_envs(options.rounds, options.isaac_wrapper)


if __name__ == "__main__":
    main()

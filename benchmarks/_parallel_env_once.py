"""Single measurements of ``benchmarks.parallel_env``, each run in a fresh process.

    python -m benchmarks._parallel_env_once start|built|steps|failing ARGUMENT ...

The imports at the top are those of a user's script, since worker processes repeat them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from torchrl.envs import GymEnv, GymWrapper, ParallelEnv

import torchrl_ext
from benchmarks.measure import time_in_turns
from benchmarks.processes import cpu_s, descendants_of, private_mib, proportional_mib

ROLLOUT = 20
SPIN_S = 0.002


class CountingCartPole(CartPoleEnv):
    """CartPole that logs the processes in which it is built and reset."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._log_event("built")

    def reset(self, **kwargs: Any) -> Any:
        """Start over."""
        self._log_event("reset")
        return super().reset(**kwargs)

    def _log_event(self, event: str) -> None:
        """Append an event and this process's id to the log file."""
        with Path(self.path).open("a") as file:
            file.write(f"{event} {os.getpid()}\n")


class BusyCartPole(CartPoleEnv):
    """CartPole whose steps take two milliseconds of CPU time."""

    def step(self, action: Any) -> Any:
        """Spin for ``SPIN_S``, then step."""
        until = time.perf_counter() + SPIN_S
        while time.perf_counter() < until:
            pass
        return super().step(action)


class FailingCartPole(CartPoleEnv):
    """CartPole that fails in only one instance, once a file exists, and logs the time.

    :param failure: ``"raise"``, or the name of a signal, such as ``"SIGKILL"``.
    :param path: File that triggers the failure as soon as it exists.
    """

    def __init__(self, failure: str, path: str) -> None:
        super().__init__()
        self.failure, self.path = failure, path

    def step(self, action: Any) -> Any:
        """Fail if the file exists and no other instance has failed, else step."""
        try:
            Path(self.path).rename(f"{self.path}-taken")
        except FileNotFoundError:
            return super().step(action)
        Path(f"{self.path}-when").write_text(str(time.monotonic()))
        if self.failure == "raise":
            raise ValueError("broken on purpose")
        os.kill(os.getpid(), signal.Signals[self.failure])
        return super().step(action)


def start(library: str, count: int, name: str = "CartPole-v1") -> list[dict[str, float]]:
    """Start an environment's workers twice; the second start reuses this package's fork server."""
    starts = []
    for _ in range(2):
        begin, before = time.perf_counter(), _cpu_without_workers(())
        if library == "ours":
            env = torchrl_ext.ParallelEnv(count, gymnasium.make(name))
        else:
            env = ParallelEnv(count, lambda: GymEnv(name), mp_start_method="spawn")
        env.reset()
        wall = time.perf_counter() - begin
        processes = env._pool.processes if isinstance(env, torchrl_ext.ParallelEnv) else env._workers
        workers = [process.pid for process in processes]
        cpu = sum(map(cpu_s, workers)) / count
        others = _cpu_without_workers(workers) - before
        env.rollout(ROLLOUT, break_when_any_done=False)
        everyone = ["self", *descendants_of()]
        starts.append(
            {
                "wall": wall,
                "cpu": cpu,
                "cpu of others": others,
                "private": sum(map(private_mib, workers)) / count,
                "total": sum(map(proportional_mib, everyone)),
            }
        )
        env.close()
    return starts


def _cpu_without_workers(workers: Any) -> float:
    """Return CPU seconds of this process and the descendants that serve all workers."""
    own = time.process_time()
    return own + sum(map(cpu_s, set(descendants_of()) - set(workers)))


def built(library: str, form: str, path: str) -> int:
    """Count environments built in this process for two workers, without the user's instance."""
    parallel: Callable[..., Any] = torchrl_ext.ParallelEnv if library == "ours" else ParallelEnv
    if library == "from workers":  # TorchRL's class, with its options that avoid building in the parent
        parallel = partial(ParallelEnv, metadata_from_workers=True, use_buffers=False)

    def make_counting_env() -> Any:
        """Make a wrapped CountingCartPole, which logs each construction."""
        return GymWrapper(CountingCartPole(path))

    forms: dict[str, Callable[[], Any]] = {
        "an instance": make_counting_env,
        "a function": lambda: make_counting_env,
        "a lambda": lambda: lambda: GymWrapper(CountingCartPole(path)),
        "two lambdas": lambda: [lambda: GymWrapper(CountingCartPole(path)), lambda: GymWrapper(CountingCartPole(path))],
    }
    source = forms[form]()
    before = _read_events(path).count(f"built {os.getpid()}")
    env = parallel(2, source)
    env.reset()
    env.close()
    after = _read_events(path)
    elsewhere = {event for event in after if event.startswith("reset")} - {f"reset {os.getpid()}"}
    if len(elsewhere) < 2:
        raise RuntimeError(f"expected resets in two workers, got these events: {after}")
    return after.count(f"built {os.getpid()}") - before


def _read_events(path: str) -> list[str]:
    """Return the lines of the event log, or an empty list if there is no log."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


class Images(gymnasium.Env[Any, Any]):
    """Environment of images that takes no time."""

    observation_space, action_space = spaces.Box(0, 255, (84, 84, 3), np.uint8), spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.image = np.zeros((84, 84, 3), np.uint8)
        return self.image, {}

    def step(self, action: Any) -> Any:
        return self.image, 1.0, False, False, {}


def make_native_env() -> Any:
    """Make an environment of TorchRL."""
    from tests.torchrl_ext.parallel_environments import NativeEnv  # here, because all workers repeat imports at the top

    return NativeEnv()


# Environments of "steps", and the length of their rollouts.
KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "CartPole": (CartPoleEnv, 200),
    "busy": (BusyCartPole, 50),
    "images": (Images, 200),
    "TorchRL": (make_native_env, 200),
}


def steps(kind: str, rounds: int, workers: int = 2, start_method: str = "spawn") -> dict[str, list[float]]:
    """Return the seconds per step of rollouts, by competitor and round."""
    cls, length = KINDS[kind]

    def make_env() -> Any:
        """Make the wrapped environment to copy."""
        return cls() if kind == "TorchRL" else GymWrapper(cls())

    envs = {
        "TorchRL": ParallelEnv(workers, make_env, mp_start_method=start_method),
        "ours": torchrl_ext.ParallelEnv(workers, make_env),
        "ours, an instance": torchrl_ext.ParallelEnv(workers, cls()),
    }

    def make_rollout(env: Any) -> Callable[[], object]:
        """Return a function that rolls out a number of steps, across episodes."""
        return lambda: env.rollout(length, break_when_any_done=False)

    competitors = {name: make_rollout(env) for name, env in envs.items()}
    time_in_turns(competitors, rounds=2)
    seconds = time_in_turns(competitors, rounds=rounds)
    for env in envs.values():
        env.close()
    return {name: (column / length).tolist() for name, column in seconds.items()}


def failing(library: str, failure: str, path: str) -> list[Any]:
    """Return seconds from a worker's failure to the exception, its text, and ``close()`` time."""
    parallel = torchrl_ext.ParallelEnv if library == "ours" else ParallelEnv
    env = parallel(2, lambda: GymWrapper(FailingCartPole(failure, path)))
    env.rollout(ROLLOUT, break_when_any_done=False)
    Path(path).touch()
    try:
        env.rollout(ROLLOUT, break_when_any_done=False)
    except Exception as error:
        report = [time.monotonic() - float(Path(f"{path}-when").read_text()), f"{type(error).__name__}: {error}"]
    else:
        raise RuntimeError("the rollout succeeded, expected a failure")
    begin = time.monotonic()
    try:
        env.close()
    except Exception as error:
        return [*report, f"{type(error).__name__}: {error}"]
    return [*report, time.monotonic() - begin]


def main() -> None:
    """Run the function named first with the remaining arguments, and print its result as JSON."""
    name, *arguments = sys.argv[1:]
    converted = [int(argument) if argument.isdigit() else argument for argument in arguments]
    functions: dict[str, Callable[..., Any]] = {"start": start, "built": built, "steps": steps, "failing": failing}
    print(json.dumps(functions[name](*converted)), flush=True)


if __name__ == "__main__":
    main()

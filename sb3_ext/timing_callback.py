"""Where the time of a training run goes: environments, transfer, policy, buffer, update."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.resources import usable_cores
from rl_ext_core.vector.pool import Timings
from sb3_ext.vec_env import PoolVecEnv

__all__ = ["PARTS", "VecEnvTimingCallback"]

PARTS = {
    "environment": "step and reset of the environments",
    "waiting": "environments that wait for the slowest worker",
    "transfer": "between processes, and waiting for a core",
    "wrappers": "VecNormalize, VecFrameStack and other wrappers",
    "policy": "actions and values from the policy",
    "buffer": "storing transitions",
    "returns": "returns and advantages of a rollout",
    "sample": "batches from the buffer",
    "update": "gradients and optimizer",
    "callbacks": "all callbacks",
    "other": "the rest: conversions to tensors, logs, classes of the script",
}
# In process, environments that take less time than this are faster than the transfer to workers.
_SHORT_STEP = 100e-6


class _Stopwatch:
    """Time of the parts of a program, each without the parts within it. Only the present thread is measured."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._thread = threading.get_ident()
        self._part, self._since = "other", time.perf_counter()
        self._replacements: list[tuple[type, str, Any]] = []

    def _enter(self, part: str) -> str:
        """Begin a part, and return the one before."""
        before, now = self._part, time.perf_counter()
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def measure(
        self,
        owner: Any,
        name: str,
        part: str,
        *,
        after: Callable[[], None] | None = None,
        on_error: Callable[[], None] | None = None,
    ) -> None:
        """Measure the calls of an object's method until :meth:`stop`.

        The method is replaced in the class, since a function in the object would be saved with it.

        :param after: function that is called after each call of the method
        :param on_error: function that is called if the method raises
        """
        kind, identity = _class_outside_script(owner, name), id(owner)
        if kind is None or name in vars(owner):
            return
        original = getattr(kind, name)
        # Callbacks may use the policy or the environment, and an update the policy: that is their time.
        closed = PARTS.keys() - {"other"} if part == "policy" else {"callbacks"}
        # Each step calls this function several times: names are local, and _enter is written out.
        seconds, thread, get_thread, clock = self.seconds, self._thread, threading.get_ident, time.perf_counter

        @functools.wraps(original)
        def call_measured(this: Any, *arguments: Any, **options: Any) -> Any:
            before = self._part
            if id(this) != identity or before in closed or get_thread() != thread:
                return original(this, *arguments, **options)
            now = clock()
            seconds[before] += now - self._since
            self._part, self._since = part, now
            try:
                return original(this, *arguments, **options)
            except BaseException:
                if on_error is not None:
                    on_error()
                raise
            finally:
                now = clock()
                seconds[part] += now - self._since
                self._part, self._since = before, now
                if after is not None:
                    after()

        self._replace(kind, name, call_measured)

    def measure_batches(self, buffer: Any) -> None:
        """Measure the iterators that ``get`` of a rollout buffer returns, until :meth:`stop`."""
        kind, identity = _class_outside_script(buffer, "get"), id(buffer)
        if kind is None:
            return
        original = kind.get

        @functools.wraps(original)
        def call_measured(this: Any, *arguments: Any, **options: Any) -> Any:
            batches = original(this, *arguments, **options)
            return self._measured_iterator(batches) if id(this) == identity else batches

        self._replace(kind, "get", call_measured)

    def _measured_iterator(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of an iterator, and measure how long they take."""
        while True:
            before = self._enter("sample")
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._enter(before)
            yield item

    def _replace(self, kind: type, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of a class until :meth:`stop`."""
        vars(function)["replaced_method"] = vars(kind).get(name)
        self._replacements.append((kind, name, function))
        setattr(kind, name, function)

    def stop(self) -> None:
        """Stop measuring, and restore all methods that no other stopwatch has replaced since."""
        self._enter("other")
        while self._replacements:
            kind, name, function = self._replacements.pop()
            vars(function)["is_stopped"] = True
            # Two stopwatches, of two threads for example, may stop in any order.
            current: Any
            while getattr(current := vars(kind).get(name), "is_stopped", False):
                if current.replaced_method is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, current.replaced_method)


def _class_outside_script(owner: Any, name: str) -> Any:
    """Return the first class of an object that has a method and is not a class of the script, or None.

    Classes of the script are saved with a model, by value: they stay as they are.
    """
    return next((kind for kind in type(owner).__mro__ if kind.__module__ != "__main__" and hasattr(kind, name)), None)


class VecEnvTimingCallback(BaseCallback):
    """Callback that logs start-up and step times of environments, and reports where the time of a run goes.

    ``time/env_start`` is in seconds, ``time/env_step`` is the mean of a rollout's steps in seconds, and
    ``time/env_restarts`` counts restarted workers. Times are logged for :class:`SharedMemoryVecEnv` and
    :class:`RayVecEnv` only, next to SB3's ``time/fps``.

    With ``report=True``, it prints at the end of ``learn()`` where the time went, and what to change, also if
    ``learn()`` is interrupted. The table is in per cent, and in microseconds per step of all environments. It measures
    any algorithm of SB3 and sb3-contrib.

    :param report: whether to print the table
    :raises InvalidArgumentError: From ``learn()``, if it is inside an ``EventCallback``, such as ``EveryNTimesteps``

    :ivar seconds: seconds of each part of the last ``learn()``, if ``report`` is True. They add up to its duration

    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import VecEnvTimingCallback, make_vec_env
    >>> env = make_vec_env("CartPole-v1", n_envs=2)
    >>> PPO("MlpPolicy", env, n_steps=64).learn(128, callback=VecEnvTimingCallback()).num_timesteps
    128
    """

    def __init__(self, *, report: bool = False) -> None:
        super().__init__()
        self.report = report
        self.seconds: dict[str, float] = {}
        self._stopwatch: _Stopwatch | None = None
        self._n_steps = 0

    def _init_callback(self) -> None:
        self._require_every_step()

    def _require_every_step(self) -> None:
        """Raise if another callback calls this one only at its events."""
        if isinstance(self.parent, EventCallback):
            raise InvalidArgumentError(
                f"{type(self.parent).__name__} calls VecEnvTimingCallback only at its events; expected a call in each "
                "step. Write learn(..., callback=[other_callback, VecEnvTimingCallback()])"
            )

    def _on_training_start(self) -> None:
        self._require_every_step()  # a CallbackList sets its parent late
        if not self.report:
            return
        if self._stopwatch is not None:  # another callback has raised before the first step
            self._stopwatch.stop()
        self._n_steps = 0
        self._stopwatch = watch = _Stopwatch()
        model, vec_env = self.model, self.training_env
        base = vec_env.unwrapped
        callback = self.locals["callback"]
        if callback is not self:
            for name in ("on_step", "on_rollout_start", "on_rollout_end"):
                watch.measure(callback, name, "callbacks")
            watch.measure(callback, "on_training_end", "callbacks", on_error=self._on_training_end)
        # Exceptions of the training pass through these methods.
        for name in ("collect_rollouts", "dump_logs"):
            watch.measure(model, name, "other", on_error=self._on_training_end)
        watch.measure(model, "train", "update", on_error=self._on_training_end)
        if vec_env is not base:
            watch.measure(vec_env, "step", "wrappers")
        _measure_environments(watch, base, ("step",) if vec_env is base else ("step_async", "step_wait"))
        watch.measure(model, "_sample_action", "policy")  # of off-policy algorithms
        for name in ("forward", "predict", "predict_values"):
            watch.measure(model.policy, name, "policy")
        for buffer in filter(None, (getattr(model, name, None) for name in ("rollout_buffer", "replay_buffer"))):
            watch.measure(buffer, "add", "buffer")
            watch.measure(buffer, "compute_returns_and_advantage", "returns")
            watch.measure(buffer, "sample", "sample")
            if hasattr(buffer, "get"):
                watch.measure_batches(buffer)

    def _on_rollout_start(self) -> None:
        self._timings_before = dataclasses.replace(self._current_timings())

    def _on_rollout_end(self) -> None:
        timings, before = self._current_timings(), self._timings_before
        if steps := timings.steps - before.steps:
            self.logger.record("time/env_start", timings.start_seconds)
            self.logger.record("time/env_step", (timings.total_step_seconds - before.total_step_seconds) / steps)
            self.logger.record("time/env_restarts", timings.restarts)

    def _on_step(self) -> bool:
        self._n_steps += 1
        return True

    def _on_training_end(self) -> None:
        watch, self._stopwatch = self._stopwatch, None
        if watch is None:
            return
        watch.stop()
        self.seconds = dict(watch.seconds)
        text = format_report(self.seconds, self._n_steps, self.training_env.num_envs)
        print(text, advice(self.seconds, self._n_steps, self.model, self.training_env.unwrapped), sep="\n")  # noqa: T201

    def _current_timings(self) -> Timings:
        """Return the timings of the training environment; empty ones if it has none."""
        found = getattr(self.training_env.unwrapped, "timings", None)
        return found if isinstance(found, Timings) else Timings()


def _measure_environments(watch: _Stopwatch, base: Any, names: tuple[str, ...]) -> None:
    """Measure the steps of a VecEnv without wrappers. Workers with shared memory report how long they take.

    :param names: names of the methods that are called for a step, in order
    """
    pool = base._pool if isinstance(base, PoolVecEnv) else None
    if pool is None or pool.step_seconds() is None:
        for name in names:
            watch.measure(base, name, "environment")
        return

    def divide() -> None:
        """Divide the time of a step between environments, waiting for the slowest worker, and transfer."""
        each = pool.step_seconds() or [0.0]
        longest, mean = max(each), sum(each) / len(each)
        watch.seconds["environment"] += mean
        watch.seconds["waiting"] += longest - mean
        watch.seconds["transfer"] -= longest

    for name in names:
        watch.measure(base, name, "transfer", after=divide if name == names[-1] else None)


def format_report(seconds: Mapping[str, float], n_steps: int, n_envs: int) -> str:
    """Return a table of the parts: share in per cent, and microseconds per step of all environments.

    :param seconds: seconds of each part
    :param n_steps: number of steps
    :param n_envs: number of environments
    """
    total = sum(seconds.values())
    lines = [
        f"{total:.1f} s for {n_steps:,} steps of {n_envs} environment{'s' * (n_envs > 1)}, "
        f"{n_steps * n_envs / total:,.0f} timesteps per second"
    ]
    for part, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        if spent > 0:
            lines.append(f"{part:12}{spent / total:6.1%}{spent / max(n_steps, 1) * 1e6:12,.0f} µs  {PARTS[part]}")
    return "\n".join(lines)


def advice(seconds: Mapping[str, float], n_steps: int, model: BaseAlgorithm, base: Any) -> str:
    """Return one sentence that says what to change about the part that takes most of the time.

    :param seconds: seconds of each part
    :param n_steps: number of steps of all environments
    :param model: the trained model
    :param base: VecEnv without its wrappers
    """
    part = max(seconds, key=lambda name: seconds[name])
    start = f"Most of the time goes to {part!r}: "
    if part in ("environment", "transfer"):
        return start + _environment_advice(seconds["environment"] / max(n_steps, 1), part, base)
    if part in ("policy", "update"):
        return start + _network_advice(model)
    return (
        start
        + {
            "waiting": "use fewer workers with more environments each, n_workers=...",
            "wrappers": "use fewer wrappers around the VecEnv, or wrap the environments",
            "buffer": "store smaller observations, such as images of 84 by 84 pixels in grayscale",
            "returns": "use fewer, longer rollouts, n_steps=...",
            "sample": "use a smaller batch_size, or fewer gradient_steps",
            "callbacks": "call them less often, such as eval_freq=... and save_freq=...",
            "other": "use a larger log_interval, and move classes of the script to a module, where they are measured",
        }[part]
    )


def _environment_advice(per_step: float, part: str, base: Any) -> str:
    """Return what to change about environments.

    :param per_step: seconds of the environments in a step
    :param part: the part that takes most of the time
    :param base: VecEnv without its wrappers
    """
    cores = usable_cores()
    if base.num_envs == 1 and part == "environment":
        return f"use several environments in processes, sb3_ext.make_vec_env(..., n_envs={max(2, cores)})"
    if isinstance(base, DummyVecEnv):
        if per_step / base.num_envs > _SHORT_STEP and cores > 1:
            return f"use processes for the {cores} cores, SharedMemoryVecEnv(env_fns)"
        return "the environments are short, so processes would not be faster. Use a vectorized environment"
    if not isinstance(base, PoolVecEnv):
        return f"use SharedMemoryVecEnv(env_fns) instead of {type(base).__name__}"
    n_workers = len(base._pool.workers)
    if n_workers > cores:
        return f"{n_workers} workers share {cores} cores. Use n_workers={cores}"
    if part == "transfer":
        return "the environments are short, so processes are not faster. Use a DummyVecEnv"
    return f"{n_workers} of {cores} cores are used. Use more workers, or a faster environment"


def _network_advice(model: BaseAlgorithm) -> str:
    """Return what to change about the network."""
    if model.device.type == "cpu" and th.cuda.device_count():
        return "use the GPU, device='cuda'"
    if model.device.type == "cpu" and (threads := th.get_num_threads()) > 1:
        return f"compare {threads} threads with torch.set_num_threads(1), which is faster for small networks"
    return "use a smaller network, a larger batch_size, or fewer n_epochs or gradient_steps"

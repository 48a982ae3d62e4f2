"""``make_vec_env`` and ``AutoVecEnv``, which probe environments to choose their processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.util import dict_to_obs

from rl_ext_core import resources
from rl_ext_core._environment_source import as_gymnasium_env
from rl_ext_core._values import copy_output
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, IsolationError, NotCopyableError, WorkerError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory.factory import convert
from rl_ext_core.factory.record import game_of_id, spec_of_id
from rl_ext_core.isolation import Isolation, Verdict, probe
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.capsule import record_exception
from rl_ext_core.vector import environments
from rl_ext_core.vector.environments import PoolOptions, check_count, check_env_fns, check_seconds, make_factories
from sb3_ext.gym_vec_env import GymVecEnv
from sb3_ext.multi_agent_vec_env import MultiAgentVecEnv, is_parallel_env
from sb3_ext.vec_env import SharedMemoryVecEnv

__all__ = ["AutoVecEnv", "make_vec_env"]

IsolationChoice = Literal["auto", "process", "in-process"]

_log = logging.getLogger("sb3_ext")

# Overhead of a step in workers, and the largest ratio of worker time to in-process time at which workers are used.
_STEP_OVERHEAD_SECONDS = 150e-6
_MAX_TIME_RATIO = 0.8


def make_vec_env(
    env_id: Any,
    n_envs: int | None = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | None = None,
    wrapper_class: Any = None,
    env_kwargs: dict[str, Any] | None = None,
    vec_env_cls: Any = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    monitor_kwargs: dict[str, Any] | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    *,
    isolation: IsolationChoice = "auto",
    probe_timeout: float | None = None,
    devices: Any = None,
    cwd: str | os.PathLike[str] | None = None,
    recorder: bool | str | os.PathLike[str] | None = None,
) -> VecEnv:
    """Create a monitored vectorized environment, in one process or in several.

    By default, a probe of the environment decides on the processes. The arguments are those of Stable Baselines3's
    function, and these:

    :param env_id: what to build. A gymnasium id or the name of a stable-retro game; a class or function; an instance,
        which is copied, or an :class:`EnvFactory`. Also an environment that is vectorized already, from gymnasium or in
        Isaac Lab's style: ``vec_env_kwargs`` are then those of :class:`~sb3_ext.GymVecEnv`. Also a parallel environment
        of PettingZoo, see :class:`~sb3_ext.MultiAgentVecEnv`
    :param n_envs: number of environments; None: number of usable cores
    :param isolation: ``"process"``: one process per environment; ``"in-process"``: all in this process; ``"auto"``
        decides by probing the environment, see :class:`AutoVecEnv`
    :param probe_timeout: seconds that each call of the environment may take while it is probed, see
        :func:`~rl_ext_core.isolation.probe`
    :param devices: devices of the environments, see :meth:`EnvFactory.for_workers`
    :param cwd: ``"own"`` starts one process per environment, each in an empty working directory. A path starts each in
        a copy of that folder. ``isolation_report`` names these directories. By default workers share the working
        directory of this process
    :param recorder: folder for records of failed episodes, which ``rl-ext replay`` repeats. True: the working
        directory. False records nothing. Default: True
    :return: vectorized environment; its ``isolation_report`` explains the choice
    :raises WorkerError: If an environment cannot be built.
    :raises NotCopyableError: If an instance cannot be copied.
    :raises InvalidArgumentError: If options exclude each other, such as ``isolation`` and ``vec_env_cls``, or
        ``env_kwargs`` and an instance.
    :raises InvalidArgumentError: If an option for single environments is passed with a vectorized one.

    Source: https://github.com/openai/retro/issues/2
    """
    count = resources.usable_cores() if n_envs is None else check_count("n_envs", n_envs)
    seed = None if seed is None else check_count("seed", seed, least=0)  # gymnasium accepts only Python integers
    parallel = hasattr(env_id, "possible_agents") and is_parallel_env(env_id)
    if parallel or _is_vectorized(env_id):
        isolation_fits = isolation == "auto" or (parallel and isolation == "in-process")
        refused: dict[str, Any] = {
            **{"monitor_dir": monitor_dir, "monitor_kwargs": monitor_kwargs, "vec_env_cls": vec_env_cls, "cwd": cwd},
            **{"devices": devices, "probe_timeout": probe_timeout, "start_index": start_index or None},
            **{"recorder": recorder, "isolation": None if isolation_fits else isolation},
            **{"env_kwargs": env_kwargs, "wrapper_class": wrapper_class, "wrapper_kwargs": wrapper_kwargs},
            "vec_env_kwargs": (vec_env_kwargs or None) if parallel else None,
        }
        for name, value in refused.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name}={value!r} is for single environments, but env_id is vectorized already. Leave it out, and "
                    "wrap the sub-environments before, or the result: VecMonitor(make_vec_env(env), filename=...)"
                )
        if parallel:
            vec_env: VecEnv = MultiAgentVecEnv([as_factory(env_id)] * count)
            report = "All agents are in this process, played by one policy."
        elif n_envs in (None, 1, env_id.num_envs):
            vec_env, report = GymVecEnv(env_id, **(vec_env_kwargs or {})), "The environment is vectorized already."
        else:
            raise InvalidArgumentError(
                f"n_envs={n_envs} does not match the vectorized environment, which has {env_id.num_envs}. Leave it out"
            )
        vec_env.seed(seed)
        vec_env.action_space.seed(seed)
        return _with_report(vec_env, report)
    if isinstance(env_id, str) and env_id not in gymnasium.registry:
        env_id = game_of_id(env_id) or env_id  # stable-retro games are not in gymnasium's registry
    wrappers: list[Any] = [functools.partial(wrapper_class, **(wrapper_kwargs or {}))] if wrapper_class else []
    source = functools.cache(lambda: _factory_source(env_id, env_kwargs or {}))
    limit = (vec_env_kwargs or {}).get("start_timeout")
    base_factory = functools.cache(lambda: convert(source(), verify=True, timeout=limit).then(as_gymnasium_env))

    def probe_factories() -> list[EnvFactory[Any]]:
        # The same wrappers as in training, except that trials write no monitor files.
        return [functools.reduce(EnvFactory.then, [environments.wrap_in_monitor, *wrappers], base_factory())] * count

    def wrappers_of_rank(rank: int) -> list[Callable[[Any], Any]]:
        """Return the wrappers of environment ``rank``, innermost first."""
        seeding = [] if seed is None else [functools.partial(environments.seed_action_space, seed=seed + rank)]
        return [*seeding, _monitor_wrapper(rank, monitor_dir, monitor_kwargs or {}), *wrappers]

    def factories() -> list[EnvFactory[Any]]:
        """Return a factory of each environment, with its seed, device and wrappers."""
        made = enumerate(base_factory().for_workers(count, seed=seed, devices=devices), start_index)
        return [functools.reduce(EnvFactory.then, wrappers_of_rank(rank), factory) for rank, factory in made]

    def build_env(rank: int) -> Any:
        """Build environment ``rank`` with its wrappers, without a factory."""
        return functools.reduce(lambda env, wrap: wrap(env), wrappers_of_rank(rank), as_gymnasium_env(source()()))

    def build_in_process() -> DummyVecEnv:
        if devices is not None or isinstance(source(), EnvFactory) or not callable(source()):
            return InProcessVecEnv(list(factories()))
        # Call the caller's own function, which may share objects with the training. A factory would copy them.
        return InProcessVecEnv([functools.partial(build_env, rank) for rank in range(start_index, start_index + count)])

    options = dict(vec_env_kwargs or {})
    if vec_env_cls is None:
        options |= {} if cwd is None else {"cwd": cwd}
        options |= {} if recorder is None else {"recorder": recorder}
        # One process applies one decision.
        needed = ["devices"] if count > 1 and isinstance(devices, (str, Sequence)) else []
        how = isolation, options, probe_timeout, needed
        vec_env = _build_vec_env(factories, build_in_process, probe_factories, count, *how)
    else:
        given = {"cwd": cwd, "recorder": recorder, "isolation": None if isolation == "auto" else isolation}
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name}={value!r} is not supported with vec_env_cls. Leave vec_env_cls out, or use "
                    f"vec_env_kwargs={{{name!r}: {value!r}}} with vec_env_cls=AutoVecEnv"
                )
        vec_env = vec_env_cls(factories(), **options)
    vec_env.seed(seed)
    return vec_env


def _is_vectorized(env: Any) -> bool:
    return not isinstance(env, type) and hasattr(env, "step") and isinstance(getattr(env, "num_envs", None), int)


def _factory_source(env_id: Any, env_kwargs: dict[str, Any]) -> Any:
    """Return an argument for :func:`as_factory` that includes ``env_kwargs``."""
    if isinstance(env_id, str):
        return functools.partial(environments.make, spec_of_id(env_id), env_kwargs)
    if not env_kwargs:
        return env_id
    if isinstance(env_id, EnvFactory) or not callable(env_id):
        raise InvalidArgumentError(
            f"env_kwargs={env_kwargs!r} requires an id, a class or a function, but env_id is an instance or a "
            "factory. Leave env_kwargs out, or pass the class"
        )
    return functools.partial(env_id, **env_kwargs)


def _monitor_wrapper(rank: int, monitor_dir: str | None, monitor_kwargs: dict[str, Any]) -> Any:
    """Return the function that wraps environment ``rank`` in a ``Monitor``."""
    if monitor_dir is None and not monitor_kwargs:
        return environments.wrap_in_monitor
    if monitor_dir is None:
        return functools.partial(Monitor, **monitor_kwargs)
    folder = os.path.abspath(monitor_dir)  # workers may have another working directory
    resources.check_folder("monitor_dir", monitor_dir)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, str(rank))
    return functools.partial(_monitor_to_file, path=path, since=time.time(), monitor_kwargs=monitor_kwargs)


def _monitor_to_file(env: Any, *, path: str, since: float, monitor_kwargs: dict[str, Any]) -> Any:
    """Wrap an environment in a ``Monitor``. A replaced worker's file is continued.

    :param since: start time of this run; an older file belongs to another run
    """
    started_at = None
    with contextlib.suppress(OSError, ValueError, KeyError), open(f"{path}.{Monitor.EXT}", encoding="utf-8") as file:
        started_at = json.loads(file.readline().removeprefix("#"))["t_start"]
    if started_at is None or started_at < since:
        return Monitor(env, filename=path, **monitor_kwargs)
    monitor = Monitor(env, filename=path, **{**monitor_kwargs, "override_existing": False})
    monitor.t_start = started_at  # the origin of the times in the file
    return monitor


class AutoVecEnv:
    """Build a ``DummyVecEnv`` or a :class:`SharedMemoryVecEnv`, as suits the environment.

    For ``make_vec_env(..., vec_env_cls=AutoVecEnv)`` of Stable Baselines3, and wherever a class of vectorized
    environments is expected. A declaration decides: ``metadata["isolation"]``, or FMI's
    ``canBeInstantiatedOnlyOncePerProcess``. Otherwise the environment is probed in temporary processes, see
    :func:`rl_ext_core.isolation.probe`.

    - Independent environments share this process while their steps are fast, and several processes otherwise.
    - If a second instance fails, or instances affect each other, each gets its own process; none is built here.
    - A single environment stays in this process. So do environments that cannot be probed, with a warning.
    - ``cwd`` starts a process for each environment, without a probe.
    - Other options that only processes can use, such as ``restart`` and ``step_timeout``, choose processes. A single
      environment gets one, too.

    :param env_fns: functions that build the environments, or anything that :func:`as_factory` takes; each different one
        is probed
    :param isolation: ``"process"`` or ``"in-process"`` decides without a probe
    :param probe_timeout: seconds that each call of the environment may take while it is probed, see
        :func:`~rl_ext_core.isolation.probe`
    :param options: arguments of :class:`SharedMemoryVecEnv`
    :return: vectorized environment; its ``isolation_report`` is a paragraph that explains the choice
    :raises IsolationError: If even a single environment fails, or environments in different processes conflict.
    :raises WorkerError: If an environment cannot be built in a process.

    >>> from stable_baselines3.common.env_util import make_vec_env
    >>> from sb3_ext import AutoVecEnv
    >>> env = make_vec_env("CartPole-v1", n_envs=4, seed=0, vec_env_cls=AutoVecEnv)
    >>> env.reset().shape
    (4, 4)
    >>> env.close()
    """

    def __new__(  # type: ignore[misc]
        cls,
        env_fns: Sequence[Any],
        isolation: IsolationChoice = "auto",
        *,
        probe_timeout: float | None = None,
        **options: Any,
    ) -> VecEnv:
        """Build the vectorized environment."""
        check_env_fns(env_fns)

        def build_in_process() -> DummyVecEnv:
            # Call the caller's own functions, which may share objects with each other. A factory would copy them.
            own = all(callable(env_fn) for env_fn in env_fns)
            return InProcessVecEnv(list(env_fns) if own else list[Any](make_factories(env_fns)))

        factories, how = functools.partial(make_factories, env_fns), (isolation, options, probe_timeout)
        return _build_vec_env(factories, build_in_process, lambda: list(env_fns), len(env_fns), *how)


def _build_vec_env(
    factories: Callable[[], Sequence[EnvFactory[Any]]],
    build_in_process: Callable[[], DummyVecEnv],
    probe_factories: Callable[[], Sequence[Any]],
    n_envs: int,
    isolation: IsolationChoice,
    options: dict[str, Any],
    probe_timeout: float | None,
    needed: Sequence[str] = (),
) -> VecEnv:
    """Build a vectorized environment here or in workers, as requested or as a probe decides.

    :param factories: returns the factories that workers call
    :param build_in_process: builds all environments in this process
    :param probe_factories: returns what to probe; equal environments are the same object
    :param needed: names of arguments in addition to ``options`` that only processes can use
    """
    if isolation not in ("auto", "process", "in-process"):
        raise InvalidArgumentError(
            f'isolation={isolation!r}, expected "auto", "process" or "in-process". Use isolation="auto"'
        )
    check_seconds("probe_timeout", probe_timeout)
    known = inspect.signature(SharedMemoryVecEnv).parameters.keys() - {"env_fns"}
    if wrong := sorted(options.keys() - known):
        raise InvalidTypeError(f"unknown options {wrong}, expected those of SharedMemoryVecEnv: {sorted(known)}")
    workers = PoolOptions(**options)

    def build_here(report: str) -> VecEnv:
        """Build all environments in this process, and record their episodes."""
        vec_env = build_in_process()
        if workers.recorder is not False:
            record = functools.partial(record_exception, recorder=workers.recorder, build_factories=factories)
            for number, env in enumerate(vec_env.envs):
                vec_env.envs[number] = EpisodeRecorder(env, functools.partial(record, environment=number))
        return _with_report(vec_env, report)

    # All options except the recorder need workers.
    given = [name for name, value in options.items() if name != "recorder" and value is not None]
    needed = sorted([*needed, *given])
    if isolation == "in-process":
        if needed:
            raise InvalidArgumentError(
                f'isolation="in-process" does not use {needed}, which are for processes. Leave them out'
            )
        return build_here("All environments run in this process, as requested.")
    reason = f"because only processes can use {', '.join(f'{name}=' for name in needed)}" if needed else ""
    if isolation == "process" or workers.cwd is not None or (needed and n_envs == 1):
        vec_env = SharedMemoryVecEnv(factories(), **options)
        why = "as requested" if isolation == "process" else reason
        report = f"{_describe_sharing(min(workers.n_workers or n_envs, n_envs), n_envs)}, {why}."
        if vec_env.working_directory is not None:
            report += f" Each process has its own working directory in {vec_env.working_directory}."
        return _with_report(vec_env, report)
    if n_envs == 1:
        return build_here("There is only one environment, so it runs in this process, without a probe.")
    try:
        verdict = probe(probe_factories(), timeout=probe_timeout)
    except NotCopyableError as error:
        text = f"The environments cannot be sent to another process: {error}."
        verdict = Verdict(Isolation.UNKNOWN, text, "probe")
    except (WorkerError, OSError) as error:
        text = f'The environments could not be probed: {error}. For one process each, use isolation="process".'
        verdict = Verdict(Isolation.UNKNOWN, text, "probe")
    n_workers, sentence = _choose_n_workers(verdict, n_envs, workers.n_workers, reason)
    report = f"{verdict.explanation} {sentence}"
    is_guess = verdict.isolation is Isolation.UNKNOWN and n_workers == 0
    _log.log(logging.WARNING if is_guess else logging.INFO, "%s", report)
    if n_workers == 0:
        return build_here(report)
    made = factories()
    if warning := resources.memory_warning(verdict.private_bytes or 0, n_workers):
        _log.warning("%s", warning)
    return _with_report(SharedMemoryVecEnv(made, **{**options, "n_workers": n_workers}), report)


class InProcessVecEnv(DummyVecEnv):
    """``DummyVecEnv`` whose steps take less time: it copies results without ``copy.deepcopy`` where it can.

    As in workers, environments may write to their actions, and reset what they returned.
    """

    def step_wait(self) -> Any:
        """Step all environments, and return copies of the results."""
        rewards, dones, infos, actions, save = (
            self.buf_rews,
            self.buf_dones,
            self.buf_infos,
            copy_output(self.actions),
            self._save_obs,
        )
        for index, env in enumerate(self.envs):
            observation, rewards[index], terminated, truncated, info = env.step(actions[index])
            infos[index] = info = copy_output(info)
            info["TimeLimit.truncated"] = truncated and not terminated
            dones[index] = terminated or truncated
            if dones[index]:
                info["terminal_observation"] = copy_output(observation)
                observation, reset_info = env.reset()
                self.reset_infos[index] = copy_output(reset_info)
            save(index, observation)
        return self._obs_from_buf(), rewards.copy(), dones.copy(), [*infos]

    def reset(self) -> Any:
        """Reset all environments, and return a copy of the observations."""
        observations = super().reset()
        self.reset_infos = [*map(copy_output, self.reset_infos)]
        return observations

    def _obs_from_buf(self) -> Any:
        """Return a copy of the last observations."""
        copied = OrderedDict((key, array.copy()) for key, array in self.buf_obs.items())
        return dict_to_obs(self.observation_space, copied)


def _describe_sharing(n_workers: int, n_envs: int) -> str:
    """Return a clause that describes how processes share the environments."""
    if n_workers == n_envs:
        return "Each has its own process"
    return f"{n_workers} process{'es share' if n_workers > 1 else ' runs'} the {n_envs} environments"


def _with_report(vec_env: VecEnv, report: str) -> VecEnv:
    """Set ``isolation_report``; return the environment, with float32 rewards."""
    vec_env.isolation_report = report  # type: ignore[attr-defined]
    if isinstance(vec_env, SharedMemoryVecEnv):
        vec_env.reward_dtype = np.float32  # as in DummyVecEnv: the choice changes no numbers
    return vec_env


def _choose_n_workers(verdict: Verdict, n_envs: int, n_workers: int | None, reason: str) -> tuple[int, str]:
    """Return the number of processes, 0 for this process alone, and a sentence that explains it.

    :param reason: clause on options that only processes can use; empty if there are none
    :raises IsolationError: If even a single environment fails, or environments in different processes conflict.
    """
    if verdict.isolation is Isolation.BROKEN:
        raise IsolationError(f"{verdict.explanation} Test one alone: env_fn().reset()")
    if verdict.isolation is Isolation.PROCESSES_COLLIDE:
        if verdict.in_process and not reason:
            return 0, "So they share this process."
        advice = "Or use one environment, n_envs=1"
        if verdict.in_process:
            advice = f"They could share this process, but not with these options, {reason}. Leave them out"
        raise IsolationError(f"{verdict.explanation} {advice}")
    if verdict.isolation is Isolation.UNKNOWN and reason:
        return n_envs, f"{_describe_sharing(n_envs, n_envs)}, {reason}."
    if verdict.isolation is Isolation.UNKNOWN:  # SB3's choice
        return 0, "All environments run in this process, although it may not support several of them."
    if verdict.isolation is not Isolation.INDEPENDENT:
        return n_envs, f"So each of the {n_envs} has its own process."
    if n_workers is not None:
        n_workers = min(n_workers, n_envs)
        return n_workers, f"{_describe_sharing(n_workers, n_envs)}, as requested."
    n_workers, seconds = min(n_envs, resources.usable_cores()), verdict.step_seconds
    if reason:
        return n_workers, f"{_describe_sharing(n_workers, n_envs)}, {reason}."
    if seconds is None or n_workers < 2:
        return 0, "So they share this process."
    process_seconds, worker_seconds = n_envs * seconds, -(-n_envs // n_workers) * seconds + _STEP_OVERHEAD_SECONDS
    figures = (
        f"a step of {n_envs} takes {process_seconds * 1e3:.2f} ms here, and about {worker_seconds * 1e3:.2f} ms in "
        f"{n_workers} processes"
    )
    if worker_seconds >= _MAX_TIME_RATIO * process_seconds:
        return 0, f"So they share this process: {figures}."
    how = "each has its own process" if n_workers == n_envs else f"{n_workers} processes share them"
    return n_workers, f"So {how}: {figures}."

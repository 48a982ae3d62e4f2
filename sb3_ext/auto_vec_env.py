"""``make_vec_env`` and ``AutoVecEnv``: environments in one process or in several, as they need it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, IsolationError, NotCopyableError, WorkerError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory.convert import convert
from rl_ext_core.factory.record import game_of_id, spec_of_id
from rl_ext_core.isolation import Isolation, Verdict, probe
from rl_ext_core.vector import environments
from rl_ext_core.vector.environments import PoolOptions, check_count, check_env_fns, check_seconds, make_factories
from sb3_ext.gym_vec_env import GymVecEnv
from sb3_ext.multi_agent_vec_env import MultiAgentVecEnv, is_parallel_env
from sb3_ext.vec_env import SharedMemoryVecEnv

__all__ = ["AutoVecEnv", "make_vec_env"]

IsolationChoice = Literal["auto", "process", "in-process"]

_log = logging.getLogger("sb3_ext")

# What a step of workers costs beside their environments, and what it has to save before it is worth the processes.
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
    vectorization_mode: Any = None,
    cwd: str | os.PathLike[str] | None = None,
) -> VecEnv:
    """Create a monitored vectorized environment, in one process or in several as the environment needs it.

    In place of Stable Baselines3's, with its arguments and these:

    :param env_id: an id, the name of a game of stable-retro, a class or a function; or an instance, of which the
        environments are copies, or an :class:`EnvFactory`; or an environment that is vectorized already, of gymnasium
        or in Isaac Lab's style: then ``vec_env_kwargs`` are those of :class:`~sb3_ext.GymVecEnv`; or a parallel
        environment of PettingZoo, all of whose agents one policy plays, see :class:`~sb3_ext.MultiAgentVecEnv`
    :param n_envs: number of environments; None: as many as this process has cores
    :param isolation: ``"process"``: one process each; ``"in-process"``: all in this one; ``"auto"`` finds out what the
        environment allows and what is faster: see :class:`AutoVecEnv`
    :param probe_timeout: seconds that an environment may take for anything while it is tried, see
        :func:`~rl_ext_core.isolation.probe`
    :param devices: per environment, see :meth:`EnvFactory.for_workers`
    :param vectorization_mode: of ``gymnasium.make_vec``, which makes it of an id: ``"sync"``, ``"async"``,
        ``"vector_entry_point"``
    :param cwd: ``"own"`` starts a process per environment, each in an empty working directory; a folder does so with a
        copy of it each. ``isolation_report`` names where they are. By default workers share that of this process
    :return: the vectorized environment; ``isolation_report`` says why it is the one it is
    :raises WorkerError: If an environment cannot be built
    :raises NotCopyableError: If an instance cannot be copied
    :raises InvalidArgumentError: If options exclude each other, such as ``env_kwargs`` and an instance, ``isolation``
        and ``vec_env_cls``, or an option for single environments and one that is vectorized already

    Source: https://github.com/openai/retro/issues/2
    """
    count = resources.usable_cores() if n_envs is None else check_count("n_envs", n_envs)
    seed = None if seed is None else operator.index(seed)  # gymnasium takes Python's integers alone
    wrappers: list[Any] = [functools.partial(wrapper_class, **(wrapper_kwargs or {}))] if wrapper_class else []
    parallel = hasattr(env_id, "possible_agents") and is_parallel_env(env_id)
    if parallel or vectorization_mode is not None or _is_vectorized(env_id):
        single_env_options = {"monitor_dir": monitor_dir, "vec_env_cls": vec_env_cls, "monitor_kwargs": monitor_kwargs}
        single_env_options |= {"devices": devices, "probe_timeout": probe_timeout, "start_index": start_index or None}
        isolation_fits = isolation == "auto" or (parallel and isolation == "in-process")
        single_env_options |= {"cwd": cwd, "isolation": None if isolation_fits else isolation}
        if parallel or vectorization_mode is None:
            single_env_options |= {
                "env_kwargs": env_kwargs,
                "wrapper_class": wrapper_class,
                "wrapper_kwargs": wrapper_kwargs,
            }
        if parallel:
            single_env_options["vectorization_mode"] = vectorization_mode
        for name, value in single_env_options.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name}={value!r} is for single environments, and this one holds several: leave it out. Wrap each "
                    "before they are put together, or the result: VecMonitor(make_vec_env(env), filename=...)"
                )
        if parallel:
            vec_env: VecEnv = MultiAgentVecEnv([as_factory(env_id)] * count)
            report = "Its agents are in this process: one policy plays them all."
        else:
            env = _get_vectorized(env_id, n_envs, count, vectorization_mode, wrappers, env_kwargs or {})
            vec_env, report = GymVecEnv(env, **(vec_env_kwargs or {})), "It is vectorized already."
        vec_env.seed(seed)
        vec_env.action_space.seed(seed)
        return _with_report(vec_env, report)
    if isinstance(env_id, str) and env_id not in gymnasium.registry:
        env_id = game_of_id(env_id) or env_id  # what builds a game of stable-retro, which gymnasium does not know
    source = functools.cache(lambda: _factory_source(env_id, env_kwargs or {}))
    limit = (vec_env_kwargs or {}).get("start_timeout")
    base_factory = functools.cache(
        lambda: convert(source(), verify=True, timeout=limit).then(environments.check_environment)
    )

    def probe_factories() -> list[EnvFactory[Any]]:
        # All that will run, but for files: those of the monitors are not for trials.
        return [functools.reduce(EnvFactory.then, [environments.wrap_in_monitor, *wrappers], base_factory())] * count

    def wrappers_of_rank(rank: int) -> list[Callable[[Any], Any]]:
        seed_action_space = (
            [] if seed is None else [functools.partial(environments.seed_action_space, seed=seed + rank)]
        )
        return [*seed_action_space, _monitor_wrapper(rank, monitor_dir, monitor_kwargs or {}), *wrappers]

    def factories() -> list[EnvFactory[Any]]:
        made = enumerate(base_factory().for_workers(count, seed=seed, devices=devices), start_index)
        return [functools.reduce(EnvFactory.then, wrappers_of_rank(rank), factory) for rank, factory in made]

    def build_env(rank: int) -> Any:
        return functools.reduce(
            lambda env, wrap: wrap(env), wrappers_of_rank(rank), environments.check_environment(source()())
        )

    def build_in_process() -> VecEnv:
        if devices is not None or isinstance(source(), EnvFactory) or not callable(source()):
            return DummyVecEnv(list(factories()))
        # The caller's own function, which may share objects with the training: a factory would unpickle copies.
        return DummyVecEnv([functools.partial(build_env, rank) for rank in range(start_index, start_index + count)])

    options = dict(vec_env_kwargs or {})
    if vec_env_cls is None:
        options |= {} if cwd is None else {"cwd": cwd}
        vec_env: VecEnv = _build_vec_env(
            factories, build_in_process, probe_factories, count, isolation, options, probe_timeout
        )
    elif cwd is not None:
        raise InvalidArgumentError(
            f"cwd={cwd!r} is for the workers of this package. Use vec_env_cls=None, or "
            'vec_env_kwargs={"cwd": "own"} with vec_env_cls=SharedMemoryVecEnv'
        )
    elif isolation != "auto":
        name = getattr(vec_env_cls, "__name__", vec_env_cls)
        raise InvalidArgumentError(
            f"isolation={isolation!r} and vec_env_cls={name} both say where environments live; leave one out"
        )
    else:
        vec_env = vec_env_cls(factories(), **options)
    vec_env.seed(seed)
    return vec_env


def _is_vectorized(env: Any) -> bool:
    return not isinstance(env, type) and hasattr(env, "step") and isinstance(getattr(env, "num_envs", None), int)


def _get_vectorized(env_id: Any, n_envs: int | None, count: int, mode: Any, wrappers: Any, env_kwargs: Any) -> Any:
    """Return a vectorized environment as it is, or let gymnasium make one of an id."""
    if mode is None:
        if n_envs not in (None, 1, env_id.num_envs):
            raise InvalidArgumentError(
                f"n_envs={n_envs} for an environment that is vectorized already and has {env_id.num_envs}; leave it out"
            )
        return env_id
    if not isinstance(env_id, (str, EnvSpec)):
        raise InvalidTypeError(
            f"vectorization_mode={mode!r} is for ids, and env_id is {env_id!r}; vectorize it: "
            "make_vec_env(gymnasium.vector.SyncVectorEnv([make_env] * 4))"
        )
    return gymnasium.make_vec(env_id, count, mode, None, wrappers or None, **env_kwargs)


def _factory_source(env_id: Any, env_kwargs: dict[str, Any]) -> Any:
    """Return what :func:`as_factory` takes."""
    if isinstance(env_id, str):
        return functools.partial(environments.make, spec_of_id(env_id), env_kwargs)
    if not env_kwargs:
        return env_id
    if isinstance(env_id, EnvFactory) or not callable(env_id):
        raise InvalidArgumentError(
            f"env_kwargs={env_kwargs!r} are for what constructs an environment, and env_id is an instance or a "
            "factory; hand over the id, the class or a function"
        )
    return functools.partial(env_id, **env_kwargs)


def _monitor_wrapper(rank: int, monitor_dir: str | None, monitor_kwargs: dict[str, Any]) -> Any:
    if monitor_dir is None and not monitor_kwargs:
        return environments.wrap_in_monitor
    if monitor_dir is None:
        return functools.partial(Monitor, **monitor_kwargs)
    folder = os.path.abspath(monitor_dir)  # workers may have a working directory of their own
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, str(rank))
    return functools.partial(_monitor_to_file, path=path, since=time.time(), monitor_kwargs=monitor_kwargs)


def _monitor_to_file(env: Any, *, path: str, since: float, monitor_kwargs: dict[str, Any]) -> Any:
    """Put a ``Monitor`` around an environment; it appends to a file of a worker that this one replaces.

    :param since: time of the start; an older file is another run's
    """
    started_at = None
    with contextlib.suppress(OSError, ValueError, KeyError), open(f"{path}.{Monitor.EXT}", encoding="utf-8") as file:
        started_at = json.loads(file.readline().removeprefix("#"))["t_start"]
    if started_at is None or started_at < since:
        return Monitor(env, filename=path, **monitor_kwargs)
    monitor = Monitor(env, filename=path, **{**monitor_kwargs, "override_existing": False})
    monitor.t_start = started_at  # from which the seconds in the file are counted
    return monitor


class AutoVecEnv:
    """Build a ``DummyVecEnv`` or a :class:`SharedMemoryVecEnv`, after finding out which of them suits the environment.

    For ``make_vec_env(..., vec_env_cls=AutoVecEnv)`` of Stable Baselines3, and wherever a class of vectorized
    environments is expected. What the environment declares (``metadata["isolation"]``, FMI's
    ``canBeInstantiatedOnlyOncePerProcess``) is believed, else it is tried in temporary processes, see
    :func:`rl_ext_core.isolation.probe`; the outcome is kept for the next time.

    - Independent environments share this process while their steps are fast, and several processes otherwise.
    - If a second instance fails, or the instances change each other, each has its own process; none is built here.
    - One environment stays in this process. So do environments that cannot be tried, with a warning.
    - ``cwd`` starts a process for each, without a try.

    :param env_fns: functions that build the environments, or whatever :func:`as_factory` takes; each different one is
        tried
    :param isolation: ``"process"`` or ``"in-process"`` decides it without a try
    :param probe_timeout: seconds that an environment may take for anything while it is tried, see
        :func:`~rl_ext_core.isolation.probe`
    :param options: of :class:`SharedMemoryVecEnv`
    :return: the vectorized environment; its ``isolation_report`` is a paragraph on why it is what it is
    :raises IsolationError: If the environment fails by itself after it was built, or processes disturb each other.
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
        """Build it."""
        check_env_fns(env_fns)

        def build_in_process() -> VecEnv:
            # The caller's own functions, which may share objects with each other: a factory would unpickle copies.
            own = all(callable(env_fn) for env_fn in env_fns)
            return DummyVecEnv(list(env_fns) if own else list[Any](make_factories(env_fns)))

        def probe_factories() -> list[EnvFactory[Any]]:
            made = {id(env_fn): as_factory(env_fn, verify=False) for env_fn in env_fns}
            return [made[id(env_fn)] for env_fn in env_fns]

        how = isolation, options, probe_timeout
        return _build_vec_env(
            functools.partial(make_factories, env_fns), build_in_process, probe_factories, len(env_fns), *how
        )


def _build_vec_env(
    factories: Callable[[], Sequence[EnvFactory[Any]]],
    build_in_process: Callable[[], VecEnv],
    probe_factories: Callable[[], Sequence[EnvFactory[Any]]],
    n_envs: int,
    isolation: IsolationChoice,
    options: dict[str, Any],
    probe_timeout: float | None,
) -> VecEnv:
    """Build the right vectorized environment.

    :param factories: returns what workers build
    :param build_in_process: builds all in this process
    :param probe_factories: returns what is tried, with one object where environments are alike
    """
    if isolation not in ("auto", "process", "in-process"):
        raise InvalidArgumentError(
            f'isolation={isolation!r} is none of "auto", "process", "in-process". Write isolation="auto"'
        )
    check_seconds("probe_timeout", probe_timeout)
    workers = PoolOptions(**options)
    if isolation == "in-process":
        if options:
            raise InvalidArgumentError(
                f'isolation="in-process" does not use {sorted(options)}, which are for processes; leave them out'
            )
        return _with_report(build_in_process(), "They are in this process, as asked.")
    if isolation == "process" or workers.cwd is not None:
        vec_env = SharedMemoryVecEnv(factories(), **options)
        report = f"{_describe_sharing(min(workers.n_workers or n_envs, n_envs), n_envs)}, as asked."
        if vec_env.working_directory is not None:
            report += f" Each process has a working directory of its own in {vec_env.working_directory}."
        return _with_report(vec_env, report)
    if n_envs == 1:
        return _with_report(build_in_process(), "There is only one, so it is in this process, untried.")
    try:
        verdict = probe(probe_factories(), timeout=probe_timeout)
        unknown = verdict.explanation if verdict.isolation is Isolation.UNKNOWN else ""
    except NotCopyableError as error:
        unknown = f"No other process can be given them: {error}."
    except (WorkerError, OSError) as error:
        unknown = f'They could not be tried: {error}. For one process each, write isolation="process".'
    if unknown:  # as Stable Baselines3 does, with one warning
        report = f"{unknown} They are in this process, whether it allows several of them or not."
        untried = _with_report(build_in_process(), report)
        _log.warning("%s", report)
        return untried
    n_workers, reason = _choose_n_workers(verdict, n_envs, workers.n_workers)
    cache_note = " (An earlier probe found this; files that the environment reads are not watched.)"
    report = f"{verdict.explanation}{cache_note if verdict.declared_by == 'cache' else ''} {reason}"
    _log.info("%s", report)
    if n_workers == 0:
        return _with_report(build_in_process(), report)
    made = factories()
    if sentence := resources.memory_warning(verdict.private_bytes or 0, n_workers):
        _log.warning("%s", sentence)
    return _with_report(SharedMemoryVecEnv(made, **{**options, "n_workers": n_workers}), report)


def _describe_sharing(n_workers: int, n_envs: int) -> str:
    """Return a clause on how many processes there are."""
    if n_workers == n_envs:
        return "Each has its own process"
    return f"{n_workers} process{'es share' if n_workers > 1 else ' holds'} the {n_envs} environments"


def _with_report(vec_env: VecEnv, report: str) -> VecEnv:
    vec_env.isolation_report = report  # type: ignore[attr-defined]
    if isinstance(vec_env, SharedMemoryVecEnv):
        vec_env.reward_dtype = np.float32  # as of DummyVecEnv: what is chosen changes no numbers
    return vec_env


def _choose_n_workers(verdict: Verdict, n_envs: int, n_workers: int | None) -> tuple[int, str]:
    """Return the number of processes, 0 for none, and why.

    :raises IsolationError: If an environment fails by itself, or two processes disturb each other.
    """
    if verdict.isolation is Isolation.BROKEN:
        raise IsolationError(f"{verdict.explanation} Try one alone: env_fn().reset()")
    if verdict.isolation is Isolation.PROCESSES_COLLIDE:
        if verdict.in_process:
            return 0, "So they share this process."
        raise IsolationError(f"{verdict.explanation} Or use one environment, n_envs=1")
    if verdict.isolation is not Isolation.INDEPENDENT:
        return n_envs, f"So each of the {n_envs} has its own process."
    if n_workers is not None:
        n_workers = min(n_workers, n_envs)
        return n_workers, f"{_describe_sharing(n_workers, n_envs)}, as asked."
    n_workers, seconds = min(n_envs, resources.usable_cores()), verdict.step_seconds
    if seconds is None or n_workers < 2:
        return 0, "So they share this process."
    build_in_process, worker_seconds = n_envs * seconds, -(-n_envs // n_workers) * seconds + _STEP_OVERHEAD_SECONDS
    figures = f"a step of {n_envs} takes {build_in_process * 1e3:.2f} ms here, and about {worker_seconds * 1e3:.2f} ms in {n_workers} processes"
    if worker_seconds >= _MAX_TIME_RATIO * build_in_process:
        return 0, f"So they share this process: {figures}."
    how = "each has its own process" if n_workers == n_envs else f"{n_workers} processes share them"
    return n_workers, f"So {how}: {figures}."

"""``make_vec_env``: Stable Baselines3's, which finds out whether environments may share a process."""

from __future__ import annotations

import functools
import os
from typing import Any

import gymnasium
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rl_ext_core import resources
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory, as_factory
from rl_ext_core.factory._sources import game_of_id, spec_of_id
from rl_ext_core.vector import environments
from sb3_ext._arguments import at_least_one
from sb3_ext.auto_vec_env import IsolationChoice, choose

__all__ = ["make_vec_env"]

# As it is now: people put ours into its place.
_theirs = env_util.make_vec_env


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
) -> VecEnv:
    """Create a monitored vectorised environment, in one process or in several as the environment needs it.

    In place of Stable Baselines3's, with its arguments and these:

    :param env_id: an id, the name of a game of stable-retro, a class or a function; or an instance, of which the
        environments are copies, or an :class:`EnvFactory`
    :param n_envs: how many; None: as many as this process has cores
    :param isolation: ``"process"``: one process each; ``"in-process"``: all in this one; ``"auto"`` finds out what the
        environment allows and what is faster: see :class:`AutoVecEnv`
    :param probe_timeout: seconds that an environment may take for anything while it is tried, see
        :func:`~rl_ext_core.isolation.probe`
    :param devices: per environment, see :meth:`EnvFactory.for_workers`
    :return: the vectorised environment; ``isolation_report`` says why it is the one it is
    :raises WorkerError: an environment cannot be built
    :raises NotCopyableError: an instance cannot be copied
    :raises InvalidArgumentError: ``env_kwargs`` for an instance, ``isolation`` together with ``vec_env_cls``

    Source: https://github.com/openai/retro/issues/2
    """
    n_envs = resources.usable_cores() if n_envs is None else at_least_one("n_envs", n_envs)
    env_id = _or_game(env_id)
    base = functools.cache(lambda: _base(env_id, env_kwargs or {}).then(environments.checked))
    wrapper = None if wrapper_class is None else functools.partial(wrapper_class, **(wrapper_kwargs or {}))
    seeded = False

    def asked() -> list[EnvFactory[Any]]:
        # All that will run, but for files: those of the monitors are not for trials.
        factory = base().then(environments.monitored)
        return [factory if wrapper is None else factory.then(wrapper)] * n_envs

    def factories() -> list[EnvFactory[Any]]:
        return factories_for(
            base(),
            n_envs,
            seed=seed,
            start_index=start_index,
            monitor_dir=monitor_dir,
            wrapper=wrapper,
            monitor_kwargs=monitor_kwargs or {},
            devices=devices,
        )

    def here() -> VecEnv:
        nonlocal seeded
        if devices is not None or not _is_theirs(env_id):
            return DummyVecEnv(list(factories()))
        # The caller's own function, which may share objects with the training: a factory would unpickle copies.
        if isinstance(env_id, str):
            base()  # objects to ids that are not known
        vec_env = _theirs(
            env_id if isinstance(env_id, str) else lambda **arguments: environments.checked(env_id(**arguments)),
            n_envs,
            seed,
            start_index,
            monitor_dir,
            wrapper_class,
            env_kwargs,
            monitor_kwargs=monitor_kwargs,
            wrapper_kwargs=wrapper_kwargs,
        )
        seeded = True
        return vec_env

    options = vec_env_kwargs or {}
    if vec_env_cls is None:
        vec_env: VecEnv = choose(factories, here, asked, n_envs, isolation, options, probe_timeout)
    elif isolation != "auto":
        raise InvalidArgumentError(
            f"isolation={isolation!r} and vec_env_cls={vec_env_cls.__name__} both say where environments live; leave "
            "one out"
        )
    else:
        vec_env = vec_env_cls(factories(), **options)
    if not seeded:  # without a seed, each time draws one from NumPy's generator
        vec_env.seed(seed)
    return vec_env


def _is_theirs(env_id: Any) -> bool:
    """Whether Stable Baselines3's function takes it."""
    return isinstance(env_id, str) or (callable(env_id) and not isinstance(env_id, EnvFactory))


def factories_for(
    base: EnvFactory[Any],
    n_envs: int,
    *,
    seed: int | None,
    start_index: int,
    monitor_dir: str | None,
    wrapper: Any,
    monitor_kwargs: dict[str, Any],
    devices: Any,
) -> list[EnvFactory[Any]]:
    """Give a factory for each environment, with its monitor and its wrapper around it."""
    factories = []
    for index, factory in enumerate(base.for_workers(n_envs, seed=seed, devices=devices)):
        rank = start_index + index
        if seed is not None:
            factory = factory.then(functools.partial(environments.seeded, seed=seed + rank))
        factory = factory.then(_monitor(rank, monitor_dir, monitor_kwargs))
        factories.append(factory if wrapper is None else factory.then(wrapper))
    return factories


def _or_game(env_id: Any) -> Any:
    """Give what builds a game of stable-retro where the id is one, which gymnasium does not know."""
    named = isinstance(env_id, str) and env_id not in gymnasium.registry
    return (game_of_id(env_id) if named else None) or env_id


def _base(env_id: Any, env_kwargs: dict[str, Any]) -> EnvFactory[Any]:
    if isinstance(env_id, str):
        return as_factory(functools.partial(environments.make, spec_of_id(env_id), env_kwargs))
    if not env_kwargs:
        return as_factory(env_id)
    if isinstance(env_id, EnvFactory) or not callable(env_id):
        raise InvalidArgumentError(
            f"env_kwargs={env_kwargs!r} are for what constructs an environment, and env_id is an instance or a "
            "factory; hand over the id, the class or a function"
        )
    return as_factory(functools.partial(env_id, **env_kwargs))


def _monitor(rank: int, monitor_dir: str | None, monitor_kwargs: dict[str, Any]) -> Any:
    if monitor_dir is None and not monitor_kwargs:
        return environments.monitored
    # Files and their options are Stable Baselines3's own affair: its class does that, and is loaded in the workers.
    from stable_baselines3.common.monitor import Monitor

    if monitor_dir is not None:
        os.makedirs(monitor_dir, exist_ok=True)
    path = None if monitor_dir is None else os.path.join(monitor_dir, str(rank))
    return functools.partial(Monitor, filename=path, **monitor_kwargs)

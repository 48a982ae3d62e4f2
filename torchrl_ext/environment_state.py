"""``EnvironmentState``: state of environments and collectors that TorchRL does not save.

The gymnasium environment inside a ``GymWrapper`` is recorded in this process. In workers, the pool records what they
step. What lasts over episodes is saved next to the log: attributes of wrappers, and the state of transforms.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrl.envs import Compose, EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.generators import global_states, restore_global_states
from rl_ext_core.recording.layers import describe_layers, layer_states, restore_layers, unsaved_attributes
from torchrl_ext.parallel import ParallelEnv
from torchrl_ext.parallel.worker_env import TensorDictEnv, find_gymnasium_env, split_transforms

__all__ = ["EnvironmentState"]

_FORMAT = "torchrl_ext environments 6"
_NAMES = ("log", "layers", "transforms", "generators")  # of the state of each environment


class EnvironmentState:
    """State of environments in the middle of their episodes, which TorchRL does not save.

    It has ``state_dict`` and ``load_state_dict``, like the other parts of a run. So register it with TorchRL's
    ``Checkpoint`` or ``Trainer.checkpoint``, or save it with ``torch.save``. For each environment it contains the calls
    of its current episode, which ``load_state_dict`` repeats, see :mod:`rl_ext_core.recording`. It also contains the
    state of transforms. With a collector, it contains the collector's ``state_dict`` and the TensorDict with which the
    collector continues.

    States contain pickles, which can execute code: load only your own.

    :param source: a ``Collector`` (also called ``SyncDataCollector``), or an environment. Its innermost environments
        must be recorded: a :class:`ParallelEnv` of gymnasium environments, or
        ``GymWrapper(EpisodeRecorder(gymnasium.make(id)))``. All may have transforms
    :raises InvalidTypeError: If it is something else, or is not recorded.

    Source: https://github.com/pytorch/rl/pull/4230

    >>> import gymnasium
    >>> from rl_ext_core.recording import EpisodeRecorder
    >>> from torchrl_ext import EnvironmentState, GymWrapper
    >>> env, resumed = (GymWrapper(EpisodeRecorder(gymnasium.make("Pendulum-v1"))) for _ in range(2))
    >>> tensordict = env.rollout(3)[-1]
    >>> EnvironmentState(resumed).load_state_dict(EnvironmentState(env).state_dict())
    >>> bool((resumed.step(tensordict.clone()) == env.step(tensordict.clone())).all())
    True
    """

    def __init__(self, source: Any) -> None:
        # Importing torchrl.collectors here would take long, and warn.
        self._collector: Any = None if isinstance(source, EnvBase) else source
        env = source if self._collector is None else getattr(source, "env", None)
        if not isinstance(env, EnvBase) or not (self._collector is None or hasattr(source, "_carrier")):
            raise InvalidTypeError(
                f"source is of type {type(source).__name__}: expected a Collector of one process, or an environment. "
                "Use EnvironmentState(Collector(env, policy, ...))"
            )
        self._transforms, base = split_transforms(env)
        self._env, self._base = env, base
        self._pool = base._pool if isinstance(base, ParallelEnv) else None
        # Workers that step gymnasium environments call only functions of the core: they have not imported TorchRL.
        self._needs_torchrl = self._pool is None or not base._plan.is_gymnasium
        is_recorded = not isinstance(base, BatchedEnvBase) if self._pool is None else base._plan.records_episodes
        if not is_recorded:
            raise InvalidTypeError(
                f"the episodes of {type(base).__name__} are not recorded: expected torchrl_ext.ParallelEnv with "
                "recorder=True. Use torchrl_ext.ParallelEnv(num_workers, env)"
            )
        if self._pool is None:
            self._describe()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as one tensor of bytes, in a dict.

        :raises InvalidTypeError: If an environment is not recorded.
        :raises InvalidArgumentError: If the environments of a ParallelEnv have not been reset, or are closed.
        """
        if self._pool is not None and self._pool.closed:
            raise InvalidArgumentError(
                "the environments of ParallelEnv are closed, or were not reset: expected environments in an episode. "
                "Call env.reset() first"
            )
        layout, collector, count = self._layout(), self._collector, len(self._describe())
        generators: list[Any] = [None] * count
        if self._pool is None:
            recorder = find_gymnasium_env(self._base)
            logs, layers = [recorder.episode_log()], [layer_states(recorder)]
        else:
            logs, layers = self._run("episode_logs"), self._run("layer_states")
            generators = self._apply(global_states)
        transforms = self._apply(_transform_states) if self._needs_torchrl else [[]] * count
        if unsaved := [name for states in layers for name in unsaved_attributes(states)]:
            warnings.warn(f"Environment: {', '.join(dict.fromkeys(unsaved))} cannot be saved.", stacklevel=2)
        rows = zip(logs, layers, transforms, generators, strict=True)
        state = {
            "format": _FORMAT,
            "layout": layout,
            "episodes": [dict(zip(_NAMES, row, strict=True)) for row in rows],
            "transforms": _transform_states(self._env),
            "collector": None if collector is None else (collector.state_dict(), collector._carrier),
        }
        file = io.BytesIO()
        torch.save(state, file)
        return {"state": torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, in environments that were built in the same way.

        Restore the generators of Python, NumPy and torch after it, because environments in this process draw from them.

        :param state_dict: result of :meth:`state_dict`
        :raises InvalidArgumentError: If the environments are not built like the saved ones. If their classes differ,
            nothing changes. Also if an episode cannot be repeated: its environment is not deterministic, or had no
            record.
        :raises CorruptFileError: If ``state_dict`` is something else.
        """
        try:
            state = torch.load(io.BytesIO(state_dict["state"].cpu().numpy().tobytes()), weights_only=False)
            if state["format"] != _FORMAT:
                raise ValueError(f"format {state['format']!r}; expected {_FORMAT!r}")
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, EOFError, pickle.PickleError) as error:
            raise CorruptFileError(f"state_dict is not that of an EnvironmentState ({error}). Save it again") from error
        if self._pool is not None and self._pool.closed:
            self._base.start()
        for (part, expected), (_, found) in zip(state["layout"].items(), self._layout().items(), strict=False):
            if found != expected:
                raise InvalidArgumentError(
                    f"{part} is {found}: expected {expected}, as in the saved run. Build all environments and the "
                    "collector like those of the saved run, and then call load_state_dict(...)"
                )
        if self._collector is None:
            self._env.reset()  # starts workers, and sets up transforms
        else:  # TorchRL begins new trajectories, whose numbers differ
            collector, (saved, carrier) = self._collector, state["collector"]
            collector.load_state_dict(saved, strict="policy_state_dict" in saved)
            if "traj_pool" in saved:
                collector._traj_pool.load_state_dict(saved["traj_pool"])
            collector._carrier = carrier
        for number, episode in enumerate(state["episodes"]):
            self._restore_episode(number, episode)
        problems = [_load_transforms(self._env, state["transforms"])]
        if self._needs_torchrl:
            problems += self._apply(_load_transforms, [episode["transforms"] for episode in state["episodes"]])
        for problem in filter(None, problems):
            raise InvalidArgumentError(problem)

    # -- environments, in this process or in workers

    def _apply(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call a function with each environment, where it is, and with an entry of each list of arguments."""
        if self._pool is None:
            return list(map(function, [self._base], *arguments))
        rows = zip(*arguments, strict=True) if arguments else [()] * self._base.num_workers
        return self._pool.call_each("apply", [(function, *row) for row in rows])

    def _run(self, name: str, *arguments: Any) -> Any:
        """Call a method of the pool."""
        pool: Any = self._pool
        return pool.run("call", lambda: getattr(pool._pool, name)(*arguments))

    def _describe(self) -> list[str]:
        """Return the classes of each environment, of its transforms and of its wrappers.

        :raises InvalidTypeError: If an environment is not recorded.
        """
        if not self._needs_torchrl:
            return [f"GymWrapper of {text}" for text in self._apply(describe_layers)]
        found = self._apply(_describe_environment)
        for text, is_recorded in found:
            if not is_recorded:
                raise InvalidTypeError(
                    f"the episodes of {text} are not recorded: expected a single gymnasium environment in a "
                    "GymWrapper, and an EpisodeRecorder around it. Use "
                    "GymWrapper(EpisodeRecorder(gymnasium.make(id))), with EpisodeRecorder of rl_ext_core.recording, "
                    "or torchrl_ext.ParallelEnv of such environments"
                )
        return [text for text, _ in found]

    def _layout(self) -> dict[str, str]:
        """Return descriptions of the parts that must be the same when the state is loaded."""
        kind = "a single environment" if self._pool is None else f"ParallelEnv({self._base.num_workers}, ...)"
        return {
            "the source": "an environment" if self._collector is None else type(self._collector).__name__,
            "the environment without transforms": kind,
            "the list of transforms": " of ".join(map(_describe_transform, self._transforms)) or "empty",
            **{f"environment {index}": text for index, text in enumerate(self._describe())},
        }

    def _restore_episode(self, number: int, state: dict[str, Any]) -> None:
        """Repeat the episode of an environment, and restore the attributes of its wrappers."""
        problem, log = "has no complete record of its episode", state["log"]
        if log is not None and not log.is_interrupted:
            if self._pool is None:
                recorder = find_gymnasium_env(self._base)
                repetition, sentences = recorder.repeat(log), restore_layers(recorder, state["layers"])
            else:
                repetition = self._run("repeat_episode", number, log)
                sentences = self._run("restore_layers", number, state["layers"])
                self._pool.call_each("apply", [(restore_global_states, state["generators"])], [number])
            for sentence in sentences:
                warnings.warn(f"Environment: {sentence}.", stacklevel=3)
            if repetition.first_difference is None:
                return
            step = repetition.first_difference
            problem = f"is not deterministic: its observations differ from step {step:,} of the episode"
        raise InvalidArgumentError(
            f"environment {number} {problem}; expected the same episode as in the saved run. To continue with "
            "new episodes, load the collector's own state: collector.load_state_dict(...)"
        )


def _describe_transform(transform: Any) -> str:
    """Return the class of a transform, and of the transforms in it."""
    inner = ", ".join(map(_describe_transform, transform)) if isinstance(transform, Compose) else ""
    return f"{type(transform).__name__}({inner})" if inner else type(transform).__name__


def _describe_environment(environment: Any) -> tuple[str, bool]:
    """Return the classes in an environment, and whether it is recorded."""
    transforms, base = split_transforms(environment)
    if isinstance(environment, TensorDictEnv):
        layers: Any = environment if environment.records_episodes else None
    else:
        recorder = find_gymnasium_env(base)
        layers = recorder if isinstance(recorder, EpisodeRecorder) else None
    names = [*map(_describe_transform, transforms), type(base).__name__]
    return " of ".join(names if layers is None else [*names, describe_layers(layers)]), layers is not None


def _transform_states(environment: Any) -> list[Any]:
    return [transform.state_dict() for transform in split_transforms(environment)[0]]


def _load_transforms(environment: Any, saved: list[dict[str, Any]]) -> str | None:
    """Load the states of an environment's transforms; return a text if that is not possible."""
    for transform, state in zip(split_transforms(environment)[0], saved, strict=True):
        try:
            transform.load_state_dict(state)
        except RuntimeError as error:  # shapes that differ, for example
            return (
                f"the state of transform {_describe_transform(transform)} cannot be loaded "
                f"({' '.join(str(error).split())}): expected the transforms of the saved run. Build all environments "
                "like those of the saved run, and then call load_state_dict(...)"
            )
    return None

"""``EnvironmentState``: state of environments and collectors that TorchRL does not save.

The pool of a ``ParallelEnv`` records what its workers step. What lasts over episodes is saved next to the log:
attributes of wrappers, and the state of transforms.
"""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import torch
from torchrl.envs import Compose, EnvBase

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording.generators import global_states, restore_global_states
from rl_ext_core.recording.layers import describe_layers, layer_states, restore_layers, unsaved_attributes
from torchrl_ext.parallel import ParallelEnv
from torchrl_ext.parallel.worker_env import split_transforms

__all__ = ["EnvironmentState"]

_FORMAT = "torchrl_ext environments 8"


class EnvironmentState:
    """State of environments in the middle of their episodes, which TorchRL does not save.

    It has ``state_dict`` and ``load_state_dict``, like the other parts of a run. So register it with TorchRL's
    ``Checkpoint`` or ``Trainer.checkpoint``, or save it with ``torch.save``. For each environment it contains the calls
    of its current episode, which ``load_state_dict`` repeats, see :mod:`rl_ext_core.recording`. It also contains the
    state of transforms. With a collector, it contains the collector's ``state_dict`` and the TensorDict with which the
    collector continues.

    States contain pickles, which can execute code: load only your own.

    :param source: a :class:`ParallelEnv` of gymnasium environments, which may have transforms, or a ``Collector`` of
        one
    :raises InvalidTypeError: If it is something else, or is not recorded.

    Source: https://github.com/pytorch/rl/pull/4230

    >>> from torchrl_ext import EnvironmentState, GymEnv, ParallelEnv
    >>> env, resumed = (ParallelEnv(1, lambda: GymEnv("Pendulum-v1")) for _ in range(2))
    >>> tensordict = env.rollout(3)[:, -1]
    >>> EnvironmentState(resumed).load_state_dict(EnvironmentState(env).state_dict())
    >>> bool((resumed.step(tensordict.clone()) == env.step(tensordict.clone())).all())
    True
    >>> env.close(), resumed.close()
    (None, None)
    """

    def __init__(self, source: Any) -> None:
        # Importing torchrl.collectors here would take long, and warn.
        self._collector: Any = None if isinstance(source, EnvBase) else source
        self._env: Any = source if self._collector is None else getattr(source, "env", None)
        self._transforms, base = split_transforms(self._env)
        is_supported = isinstance(base, ParallelEnv) and (self._collector is None or hasattr(source, "_carrier"))
        if not is_supported or base._plan.options.recorder is False:
            raise InvalidTypeError(
                f"the episodes of a {type(source).__name__} of {type(base).__name__} are not recorded: expected a "
                "torchrl_ext.ParallelEnv with recorder=True, or a Collector of one process of it. Use "
                "EnvironmentState(torchrl_ext.ParallelEnv(num_workers, env))"
            )
        self._base: Any = base

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as one tensor of bytes, in a dict.

        :raises InvalidTypeError: If an environment is not recorded.
        :raises InvalidArgumentError: If the environments of a ParallelEnv have not been reset, or are closed.
        """
        if self._base.is_closed:
            raise InvalidArgumentError(
                "the environments of ParallelEnv are closed, or were not reset: expected environments in an episode. "
                "Call env.reset() first"
            )
        layout, collector = self._layout(), self._collector
        logs = self._pool.episode_logs()
        layers = self._apply([(layer_states,)] * len(logs))
        # Workers that step gymnasium environments have no transforms, and have not imported TorchRL.
        has_none = self._base._plan.is_gymnasium
        transforms = [[] for _ in logs] if has_none else self._apply([(_transform_states,)] * len(logs))
        if unsaved := [name for states in layers for name in unsaved_attributes(states)]:
            warnings.warn(f"Environment: {', '.join(dict.fromkeys(unsaved))} cannot be saved.", stacklevel=2)
        generators = self._apply([(global_states,)] * len(logs))
        state = {
            "format": _FORMAT,
            "layout": layout,
            "episodes": list(zip(logs, layers, transforms, generators, strict=True)),
            "transforms": _transform_states(self._env),
            "collector": None if collector is None else (collector.state_dict(), collector._carrier),
        }
        file = io.BytesIO()
        torch.save(state, file)
        return {"state": torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, in environments that were built in the same way.

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
        for (part, expected), (_, found) in zip(state["layout"].items(), self._layout().items(), strict=False):
            if found != expected:
                raise InvalidArgumentError(
                    f"{part} is {found}: expected {expected}, as in the saved run. Build all environments and the "
                    "collector like those of the saved run, and then call load_state_dict(...)"
                )
        if self._collector is None:
            self._env.reset()  # sets up transforms
        else:  # TorchRL begins new trajectories, whose numbers differ
            collector, (saved, carrier) = self._collector, state["collector"]
            collector.load_state_dict(saved, strict="policy_state_dict" in saved)
            if "traj_pool" in saved:
                collector._traj_pool.load_state_dict(saved["traj_pool"])
            collector._carrier = carrier
        for number, (log, layers, _, generators) in enumerate(state["episodes"]):
            self._restore_episode(number, log, layers, generators)
        problems = [_load_transforms(self._env, state["transforms"])]
        if not self._base._plan.is_gymnasium:
            problems += self._apply([(_load_transforms, saved) for _, _, saved, _ in state["episodes"]])
        for problem in filter(None, problems):
            raise InvalidArgumentError(problem)

    @property
    def _pool(self) -> Any:
        """Pool of workers, which are started if there are none."""
        return self._base._pool.running_pool()

    def _apply(self, calls: list[tuple[Any, ...]], environments: tuple[int, ...] = ()) -> list[Any]:
        """Call a function with each environment in its worker, and with further arguments."""
        found: list[Any] = self._base._pool.call_each("apply", calls, environments)
        return found

    def _layout(self) -> dict[str, str]:
        """Return descriptions of the parts that must be the same when the state is loaded."""
        count, is_gymnasium = self._base.num_workers, self._base._plan.is_gymnasium
        layout = {
            "the source": "an environment" if self._collector is None else type(self._collector).__name__,
            "the environment without transforms": f"ParallelEnv({count}, ...)",
            "the list of transforms": " of ".join(map(_describe_transform, self._transforms)) or "empty",
        }
        found = self._apply([(describe_layers if is_gymnasium else _describe_environment,)] * count)
        for index, layers in enumerate(found):
            if not layers:
                raise InvalidTypeError(
                    f"the episodes of {self._base._plan.source.env_str.partition('(')[0]} are not recorded: expected "
                    "a single gymnasium environment. Use ParallelEnv(num_workers, GymWrapper(env))"
                )
            layout[f"environment {index}"] = f"GymWrapper of {layers}" if is_gymnasium else layers
        return layout

    def _restore_episode(self, number: int, log: Any, layers: Any, generators: Any) -> None:
        """Repeat the episode of an environment, and restore the attributes of its wrappers."""
        problem = "has no complete record of its episode"
        if log is not None and not log.is_interrupted:
            step = self._pool.repeat_episode(number, log).first_difference
            (sentences,) = self._apply([(restore_layers, layers)], (number,))
            for sentence in sentences:
                warnings.warn(f"Environment: {sentence}.", stacklevel=3)
            self._apply([(restore_global_states, generators)], (number,))
            if step is None:
                return
            problem = f"is not deterministic: its observations differ from step {step:,} of the episode"
        raise InvalidArgumentError(
            f"environment {number} {problem}; expected the same episode as in the saved run. To continue with "
            "new episodes, load the collector's own state: collector.load_state_dict(...)"
        )


def _describe_transform(transform: Any) -> str:
    """Return the class of a transform, and of the transforms in it."""
    inner = ", ".join(map(_describe_transform, transform)) if isinstance(transform, Compose) else ""
    return f"{type(transform).__name__}({inner})" if inner else type(transform).__name__


def _describe_environment(environment: Any) -> str:
    """Return the classes in an environment of TorchRL; empty if it is not recorded."""
    transforms, base = split_transforms(environment)
    names = [*map(_describe_transform, transforms), type(base).__name__]
    return " of ".join([*names, describe_layers(environment)]) if environment.records_episodes else ""


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

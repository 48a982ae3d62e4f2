"""``EnvironmentState``: state of environments and collectors that TorchRL does not save."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import torch
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording.layers import unsaved_attributes
from torchrl_ext.parallel import ParallelEnv
from torchrl_ext.parallel.episodes import (
    Episodes,
    describe_transform,
    load_transforms,
    raise_first,
    transform_shapes,
)
from torchrl_ext.parallel.worker_env import split_transforms

__all__ = ["EnvironmentState"]

_FORMAT = "torchrl_ext environments 4"


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
        ``GymWrapper(EpisodeRecorder(gymnasium.make(id)))``, also in a ``SerialEnv``. All may have transforms
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
        self._transforms, self._base = split_transforms(env)
        self._env = env
        base = self._base
        self._episodes = Episodes(base)
        if not isinstance(base, BatchedEnvBase):
            self._episodes.describe()
        elif not isinstance(base, SerialEnv) and not (isinstance(base, ParallelEnv) and base._plan.records_episodes):
            raise InvalidTypeError(
                f"the episodes of {type(base).__name__} are not recorded: expected torchrl_ext.ParallelEnv with "
                "recorder=True, or SerialEnv. Use torchrl_ext.ParallelEnv(num_workers, env)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as one tensor of bytes, in a dict.

        :raises InvalidTypeError: If an environment is not recorded.
        :raises InvalidArgumentError: If the environments of a batch have not been reset, or are closed.
        """
        if isinstance(self._base, BatchedEnvBase) and self._base.is_closed:
            raise InvalidArgumentError(
                f"the environments of {type(self._base).__name__} are closed, or were not reset: expected environments "
                "in an episode. Call env.reset() first"
            )
        collector, episodes = self._collector, self._episodes.save()
        if unsaved := [name for one in episodes for name in unsaved_attributes(one["layers"])]:
            warnings.warn(f"Environment: {', '.join(dict.fromkeys(unsaved))} cannot be saved.", stacklevel=2)
        state = {
            "format": _FORMAT,
            "layout": self._layout(),
            "episodes": episodes,
            "buffers": self._base.shared_tensordict_parent.clone() if self._has_buffers else None,
            "transforms": [transform.state_dict() for transform in self._transforms],
            "collector": None if collector is None else (collector.state_dict(), collector._carrier),
        }
        file = io.BytesIO()
        torch.save(state, file)
        return {"state": torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, in environments that were built in the same way.

        Restore the generators of Python, NumPy and torch after it, because environments in this process draw from them.

        :param state_dict: result of :meth:`state_dict`
        :raises InvalidArgumentError: If the environments are not built like the saved ones, which changes nothing. Or
            if an episode cannot be repeated: its environment is not deterministic, or had no record.
        :raises CorruptFileError: If ``state_dict`` is something else.
        """
        try:
            state = torch.load(io.BytesIO(state_dict["state"].cpu().numpy().tobytes()), weights_only=False)
            if state["format"] != _FORMAT:
                raise ValueError(f"format {state['format']!r}; expected {_FORMAT!r}")
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, EOFError, pickle.PickleError) as error:
            raise CorruptFileError(f"state_dict is not that of an EnvironmentState ({error}). Save it again") from error
        self._check_layout(state["layout"])
        if self._collector is None:
            self._env.reset()  # starts workers, and sets up transforms
        else:  # TorchRL begins new trajectories, whose numbers differ
            collector, (saved, carrier) = self._collector, state["collector"]
            collector.load_state_dict(saved, strict="policy_state_dict" in saved)
            if "traj_pool" in saved:
                collector._traj_pool.load_state_dict(saved["traj_pool"])
            collector._carrier = carrier
        self._restore_episodes(state["episodes"])
        if self._has_buffers:  # transforms in the workers read entries of the last step
            self._base.shared_tensordict_parent.update_(state["buffers"])
        raise_first([load_transforms(self._env, state["transforms"])])

    def _layout(self) -> dict[str, str]:
        """Return descriptions of the parts that must be the same when the state is loaded."""
        base, kind = self._base, "a single environment"
        if isinstance(base, BatchedEnvBase):
            name = "ParallelEnv" if isinstance(base, ParallelEnv) else "SerialEnv"
            kind = f"{name}({base.num_workers}, ...)"
        layout = {
            "the source": "an environment" if self._collector is None else type(self._collector).__name__,
            "the environment without transforms": kind,
            "the list of transforms": " of ".join(map(describe_transform, self._transforms)) or "empty",
            **transform_shapes(self._env),
        }
        for index, (text, shapes) in enumerate(self._episodes.describe()):
            layout[f"environment {index}"] = text
            layout |= {f"in environment {index}, {place}": shape for place, shape in shapes.items()}
        return layout

    def _check_layout(self, saved: dict[str, str]) -> None:
        """Start the environments, and raise an error if they are not built like the saved ones."""
        if isinstance(self._base, BatchedEnvBase) and self._base.is_closed:
            self._base.start()
        found = self._layout()
        for part, expected in saved.items():
            if found.get(part, expected) != expected:  # the first reset creates some tensors
                raise InvalidArgumentError(
                    f"{part} is {found[part]}: expected {expected}, as in the saved run. Build all environments and "
                    "the collector like those of the saved run, and then call load_state_dict(...)"
                )

    @property
    def _has_buffers(self) -> bool:
        """Whether the environments write to TensorDicts that their batch shares."""
        return isinstance(self._base, SerialEnv) and bool(self._base._use_buffers)

    def _restore_episodes(self, states: list[dict[str, Any]]) -> None:
        """Repeat the episode of each environment."""
        for index, state in enumerate(states):
            problem = "has no complete record of its episode"
            if state["log"] is not None and not state["log"].is_interrupted:
                difference, sentences = self._episodes.repeat(index, state)
                for sentence in sentences:
                    warnings.warn(f"Environment: {sentence}.", stacklevel=3)
                if difference is None:
                    continue
                problem = f"is not deterministic: its observations differ from step {difference:,} of the episode"
            raise InvalidArgumentError(
                f"environment {index} {problem}; expected the same episode as in the saved run. To continue with "
                "new episodes, load the collector's own state: collector.load_state_dict(...)"
            )
        self._episodes.load_transforms(states)

"""Save and repeat the episodes of environments, in workers or in this process.

The gymnasium environment inside a ``GymWrapper`` is recorded in this process. In workers, the pool records what they
step. What lasts over episodes is saved next to the log: attributes of wrappers, and the state of transforms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parameter import is_lazy
from torchrl.envs import Compose, SerialEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.generators import global_states, restore_global_states
from rl_ext_core.recording.layers import describe_layers, layer_states, restore_layers
from torchrl_ext.parallel.env import ParallelEnv
from torchrl_ext.parallel.worker_env import TensorDictEnv, find_gymnasium_env, split_transforms

__all__ = ["Episodes", "describe_transform", "load_transforms", "raise_first", "transform_shapes"]

State = dict[str, Any]


class Episodes:
    """Episodes of a single environment, or of those in a ``SerialEnv`` or ``ParallelEnv``, without transforms.

    Workers that step gymnasium environments call only functions of the core, because they have not imported TorchRL.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._pool = env._pool if isinstance(env, ParallelEnv) else None
        self._needs_torchrl = self._pool is None or not env._plan.is_gymnasium

    def _apply(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call a function with each environment, where it is, and with an entry of each list of arguments."""
        if self._pool is None:
            members = self._env._envs if isinstance(self._env, SerialEnv) else [self._env]
            return list(map(function, members, *arguments))
        rows = zip(*arguments, strict=True) if arguments else [()] * self._env.num_workers
        return self._pool.call_each("apply", [(function, *row) for row in rows])

    def _run(self, name: str, *arguments: Any) -> Any:
        """Call a method of the pool."""
        pool: Any = self._pool
        return pool.run("call", lambda: getattr(pool._pool, name)(*arguments))

    def describe(self) -> list[tuple[str, dict[str, str]]]:
        """Return the classes of each environment's transforms and wrappers, and the shapes of its transforms.

        :raises InvalidTypeError: If an environment is not recorded.
        """
        if not self._needs_torchrl:
            return [(f"GymWrapper of {text}", {}) for text in self._apply(describe_layers)]
        found = self._apply(_describe_episode)
        for text, shapes in found:
            if shapes is None:
                raise InvalidTypeError(
                    f"the episodes of {text} are not recorded: expected a single gymnasium environment in a "
                    "GymWrapper, and an EpisodeRecorder around it. Use "
                    "GymWrapper(EpisodeRecorder(gymnasium.make(id))), with EpisodeRecorder of rl_ext_core.recording, "
                    "or torchrl_ext.ParallelEnv of such environments"
                )
        return found

    def save(self) -> list[State]:
        """Return the state of each episode.

        :raises InvalidTypeError: If an environment is not recorded.
        """
        count = len(self.describe())
        if self._pool is None:
            recorders = self._apply(find_gymnasium_env)
            logs, layers = [one.episode_log() for one in recorders], list(map(layer_states, recorders))
            generators: list[Any] = [None] * count
        else:
            logs, layers = self._run("episode_logs"), self._run("layer_states")
            generators = self._apply(global_states)
        transforms = self._apply(_transform_states) if self._needs_torchrl else [[]] * count
        names = ("log", "layers", "transforms", "generators")
        return [dict(zip(names, row, strict=True)) for row in zip(logs, layers, transforms, generators, strict=True)]

    def repeat(self, number: int, state: State) -> tuple[int | None, list[str]]:
        """Repeat an episode, and restore what is around it.

        :return: the first step whose result differs from the recorded one, or None; and sentences on what is not
            restored
        """
        if self._pool is None:
            recorder = self._apply(find_gymnasium_env)[number]
            repetition, sentences = recorder.repeat(state["log"]), restore_layers(recorder, state["layers"])
        else:
            repetition = self._run("repeat_episode", number, state["log"])
            sentences = self._run("restore_layers", number, state["layers"])
            self._pool.call_each("apply", [(restore_global_states, state["generators"])], [number])
        return repetition.first_difference, sentences

    def load_transforms(self, states: Sequence[State]) -> None:
        """Load the states of all environments' transforms."""
        if self._needs_torchrl:
            raise_first(self._apply(load_transforms, [state["transforms"] for state in states]))


def raise_first(problems: Sequence[str | None]) -> None:
    """Raise an error with the first text."""
    for problem in filter(None, problems):
        raise InvalidArgumentError(problem)


def describe_transform(transform: Any) -> str:
    """Return the class of a transform, and of the transforms in it."""
    inner = ", ".join(map(describe_transform, transform)) if isinstance(transform, Compose) else ""
    return f"{type(transform).__name__}({inner})" if inner else type(transform).__name__


def transform_shapes(environment: Any) -> dict[str, str]:
    """Return the shapes of the tensors of an environment's transforms. Those that the first reset creates may miss."""
    found = {}
    for number, transform in enumerate(split_transforms(environment)[0]):
        # state_dict() would raise for buffers that the first reset creates.
        for name, value in itertools.chain(transform.named_parameters(), transform.named_buffers()):
            if not is_lazy(value):
                place = f"the shape of {name} in transform {number}, {describe_transform(transform)}"
                found[place] = str(tuple(value.shape))
    return found


def _describe_episode(environment: Any) -> tuple[str, dict[str, str] | None]:
    """Return the classes in an environment and the shapes of its transforms; None if it is not recorded."""
    transforms, base = split_transforms(environment)
    if isinstance(environment, TensorDictEnv):
        layers: Any = environment if environment.records_episodes else None
    else:
        recorder = find_gymnasium_env(base)
        layers = recorder if isinstance(recorder, EpisodeRecorder) else None
    if layers is None:
        return type(base).__name__, None
    names = [*map(describe_transform, transforms), type(base).__name__, describe_layers(layers)]
    return " of ".join(names), transform_shapes(environment)


def _transform_states(environment: Any) -> list[Any]:
    return [transform.state_dict() for transform in split_transforms(environment)[0]]


def load_transforms(environment: Any, saved: list[dict[str, Any]]) -> str | None:
    """Load the states of an environment's transforms; return a text if that is not possible."""
    for transform, state in zip(split_transforms(environment)[0], saved, strict=True):
        try:
            transform.load_state_dict(state)
        except RuntimeError as error:  # shapes that differ after a reset, for example
            return (
                f"the state of transform {describe_transform(transform)} cannot be loaded "
                f"({' '.join(str(error).split())}): expected the transforms of the saved run. Build all environments "
                "like those of the saved run, and then call load_state_dict(...)"
            )
    return None

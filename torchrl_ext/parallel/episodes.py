"""Save and repeat the episodes of environments, in workers or in this process.

The gymnasium environment inside a ``GymWrapper`` is recorded in this process. In workers, the pool records what they
step. What lasts over episodes is saved next to the log: attributes of wrappers, and the state of transforms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.parameter import is_lazy
from torchrl.envs import Compose, EnvBase, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.generators import global_states, restore_global_states
from rl_ext_core.recording.layers import describe_layers, layer_states, restore_layers
from torchrl_ext.parallel.env import ParallelEnv
from torchrl_ext.parallel.worker_env import find_gymnasium_env

__all__ = [
    "LocalEpisodes",
    "WorkerEpisodes",
    "describe_transform",
    "load_transforms",
    "require_shapes",
    "split_transforms",
]

State = dict[str, Any]


class LocalEpisodes:
    """Episodes of environments in this process.

    :param members: function that returns the environments
    """

    def __init__(self, members: Callable[[], Sequence[EnvBase]]) -> None:
        self._members = members

    def describe(self) -> list[str]:
        """Return the classes of each environment's transforms and wrappers, outermost first.

        :raises InvalidTypeError: If an environment is not recorded.
        """
        return [_describe_recorded(member, find_recorder(member)) for member in self._members()]

    def save(self) -> list[State]:
        """Return the state of each episode.

        :raises InvalidTypeError: If an environment is not recorded.
        """
        states = []
        for member in self._members():
            recorder = find_recorder(member)
            state = {"log": recorder.episode_log(), "layers": layer_states(recorder), "generators": None}
            states.append({**state, "transforms": _transform_states(member)})
        return states

    def check(self, states: Sequence[State]) -> None:
        """Raise an error if transforms have other shapes than saved ones."""
        for member, state in zip(self._members(), states, strict=True):
            require_shapes(split_transforms(member)[0], state["transforms"])

    def repeat(self, number: int, state: State) -> tuple[int | None, list[str]]:
        """Repeat an episode, and restore what is around it.

        :return: the first step whose result differs from the recorded one, or None; and sentences on what is not
            restored
        """
        member = self._members()[number]
        recorder = find_recorder(member)
        repetition = recorder.repeat(state["log"])
        sentences = restore_layers(recorder, state["layers"])
        load_transforms(split_transforms(member)[0], state["transforms"])
        return repetition.first_difference, sentences


class WorkerEpisodes:
    """Episodes of the environments of a ``ParallelEnv``, as :class:`LocalEpisodes`."""

    def __init__(self, env: ParallelEnv) -> None:
        self._env = env

    def _apply(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call a function with each environment, in its worker, and with an entry of each list of arguments."""
        workers = range(self._env.num_workers)
        calls = [(function, *(entries[number] for entries in arguments)) for number in workers]
        return self._env._pool.call_each(workers, "apply", calls)

    def _run(self, name: str, *arguments: Any) -> Any:
        """Call a method of the pool."""
        pool = self._env._pool
        return pool.run("call", lambda: getattr(pool._pool, name)(*arguments))

    def describe(self) -> list[str]:
        """Return the classes of each environment's transforms and wrappers, outermost first."""
        if self._env._plan.is_gymnasium:
            return [f"GymWrapper of {text}" for text in self._apply(describe_layers)]
        return _require_recorded(self._apply(_describe_adapter))

    def save(self) -> list[State]:
        """Return the state of each episode."""
        self.describe()
        logs, layers = self._run("episode_logs"), self._run("layer_states")
        is_gymnasium = self._env._plan.is_gymnasium
        transforms = [[] for _ in logs] if is_gymnasium else self._apply(_adapter_transforms)
        names = ("log", "layers", "transforms", "generators")
        rows = zip(logs, layers, transforms, self._apply(global_states), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def check(self, states: Sequence[State]) -> None:
        """Raise an error if transforms have other shapes than saved ones."""
        if not self._env._plan.is_gymnasium:
            problems = self._apply(_adapter_problem, [state["transforms"] for state in states])
            _raise_first(problems)

    def repeat(self, number: int, state: State) -> tuple[int | None, list[str]]:
        """Repeat an episode, and restore what is around it."""
        repetition = self._run("repeat_episode", number, state["log"])
        sentences = self._run("restore_layers", number, state["layers"])
        pool = self._env._pool
        if not self._env._plan.is_gymnasium:
            _raise_first(pool.call_each([number], "apply", [(_load_adapter_transforms, state["transforms"])]))
        pool.call_each([number], "apply", [(restore_global_states, state["generators"])])
        return repetition.first_difference, sentences


def split_transforms(environment: Any) -> tuple[list[Any], Any]:
    """Return the transforms of an environment, outermost first, and the environment without them."""
    transforms = []
    while isinstance(environment, TransformedEnv):
        transforms.append(environment.transform)
        environment = environment.base_env
    return transforms, environment


def find_recorder(environment: EnvBase) -> EpisodeRecorder:
    """Return the recorder of an environment.

    :raises InvalidTypeError: If it has none.
    """
    found = find_gymnasium_env(environment)
    if not isinstance(found, EpisodeRecorder):
        _require_recorded([split_transforms(environment)[1] if found is None else found])
    return found


def _require_recorded(descriptions: list[Any]) -> list[str]:
    """Raise an error if a description is not a string, but an environment or its class name in a tuple."""
    for found in descriptions:
        if not isinstance(found, str):
            name = type(found).__name__ if isinstance(found, EnvBase) else found[0] if type(found) is tuple else found
            raise InvalidTypeError(
                f"the episodes of {name} are not recorded: expected a single gymnasium environment in a GymWrapper, "
                "and an EpisodeRecorder around it. Use GymWrapper(EpisodeRecorder(gymnasium.make(id))), with "
                "EpisodeRecorder of rl_ext_core.recording, or torchrl_ext.ParallelEnv of such environments"
            )
    return descriptions


def describe_transform(transform: Any) -> str:
    """Return the class of a transform, and of the transforms in it."""
    inner = ", ".join(map(describe_transform, transform)) if isinstance(transform, Compose) else ""
    return f"{type(transform).__name__}({inner})" if inner else type(transform).__name__


def _describe_recorded(environment: EnvBase, layers: Any) -> str:
    """Return the classes of an environment's transforms and wrappers, and of the gymnasium environment in it."""
    transforms, base = split_transforms(environment)
    return " of ".join([*map(describe_transform, transforms), type(base).__name__, describe_layers(layers)])


def _transform_states(environment: EnvBase) -> list[Any]:
    return [transform.state_dict() for transform in split_transforms(environment)[0]]


# -- functions of workers, whose environment is a TensorDictEnv


def _describe_adapter(adapter: Any) -> str | tuple[str]:
    """Return the description of an environment; the name of its class, in a tuple, if it is not recorded."""
    environment = adapter.environment
    if not adapter.records_episodes:
        return (type(split_transforms(environment)[1]).__name__,)
    return _describe_recorded(environment, adapter)


def _adapter_transforms(adapter: Any) -> list[Any]:
    return _transform_states(adapter.environment)


def _adapter_problem(adapter: Any, saved: list[Any]) -> str | None:
    return _shape_problem(split_transforms(adapter.environment)[0], saved)


def _load_adapter_transforms(adapter: Any, saved: list[Any]) -> str | None:
    try:
        load_transforms(split_transforms(adapter.environment)[0], saved)
    except InvalidArgumentError as error:
        return str(error)
    return None


# -- states of transforms


def _raise_first(problems: Sequence[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise InvalidArgumentError(problem)


def require_shapes(transforms: list[Any], saved: list[dict[str, Any]]) -> None:
    """Raise an error if tensors of transforms have other shapes than saved ones. Lazy tensors are ignored."""
    _raise_first([_shape_problem(transforms, saved)])


def _shape_problem(transforms: list[Any], saved: list[dict[str, Any]]) -> str | None:
    for transform, state in zip(transforms, saved, strict=True):
        # state_dict() would raise for buffers that the first reset creates.
        for name, value in itertools.chain(transform.named_parameters(), transform.named_buffers()):
            if name not in state or is_lazy(value) or is_lazy(state[name]):
                continue
            found, expected = tuple(value.shape), tuple(state[name].shape)
            if found != expected:
                return _transform_problem(transform, f"{name} has the shape {found}: expected {expected}")
    return None


def load_transforms(transforms: list[Any], saved: list[dict[str, Any]]) -> None:
    """Load the states of transforms."""
    require_shapes(transforms, saved)  # again, because a reset may have created more tensors
    for transform, state in zip(transforms, saved, strict=True):
        try:
            transform.load_state_dict(state)
        except RuntimeError as error:  # keys that are missing, for example
            problem = f"its state cannot be loaded ({error}): expected a state"
            raise InvalidArgumentError(_transform_problem(transform, problem)) from error


def _transform_problem(transform: Any, problem: str) -> str:
    return (
        f"transform {describe_transform(transform)}: {problem}, as in the saved run. Build all environments like those "
        "of the saved run, and then call load_state_dict(...)"
    )

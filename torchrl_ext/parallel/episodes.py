"""Save and restore the episode of a TorchRL environment, in a worker or in this process.

The gymnasium environment inside a ``GymWrapper`` is recorded, because it gets the converted actions, and only it can
crash or lose its state. Everything around it is TorchRL's: tensors, and modules with a ``state_dict``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.layers import describe_layers, layer_states, restore_layers, unsaved_attributes
from rl_ext_core.recording.shared_log import SharedEpisodeRecorder

__all__ = [
    "EPISODE_METHOD",
    "check_shapes",
    "check_transforms",
    "describe_environment",
    "describe_transform",
    "episode_state",
    "find_gymnasium_env",
    "find_recorder",
    "load_transforms",
    "restore_episode",
    "split_transforms",
    "start_recorder",
]

# Name of a worker's method that calls a function of this module with its environment.
EPISODE_METHOD = "rl_ext_episode"


def split_transforms(environment: Any) -> tuple[list[Any], Any]:
    """Return the transforms of an environment, outermost first, and the environment without them."""
    transforms = []
    while isinstance(environment, TransformedEnv):
        transforms.append(environment.transform)
        environment = environment.base_env
    return transforms, environment


def find_gymnasium_env(environment: EnvBase) -> Any:
    """Return the single gymnasium environment in a ``GymWrapper``, which may be transformed.

    :raises InvalidTypeError: If there is none.
    """
    _, base = split_transforms(environment)
    found = base._env if isinstance(base, GymWrapper) else None
    if not isinstance(found, gymnasium.Env):
        raise InvalidTypeError(
            f"the episodes of {type(base).__name__} are not recorded: expected a single gymnasium environment in a "
            "GymWrapper. Use GymWrapper(EpisodeRecorder(gymnasium.make(id))), or torchrl_ext.ParallelEnv of such "
            "environments"
        )
    return found


def start_recorder(environment: EnvBase, worker: int, memory: Any) -> None:
    """Record the episodes of a worker's environment in shared memory, if that is possible.

    The environment gets a method with which the parent saves or repeats its episode.
    """
    _, base = split_transforms(environment)
    with contextlib.suppress(InvalidTypeError):
        base._env = SharedEpisodeRecorder(find_gymnasium_env(environment), memory)
    vars(environment)[EPISODE_METHOD] = functools.partial(_call_with_environment, environment, worker)


def _call_with_environment(environment: EnvBase, worker: int, function: Any, arguments: list[tuple[Any, ...]]) -> Any:
    """Call a function with a worker's environment, and with its arguments among those of all workers.

    An environment that is not recorded, or is built otherwise, returns an exception, because raising it would end the
    worker.
    """
    try:
        return function(environment, *arguments[worker])
    except (InvalidTypeError, InvalidArgumentError) as error:
        return error


def describe_transform(transform: Any) -> str:
    """Return the class of a transform, and of the transforms in it."""
    inner = ", ".join(map(describe_transform, transform)) if isinstance(transform, Compose) else ""
    return f"{type(transform).__name__}({inner})" if inner else type(transform).__name__


def check_transforms(environment: EnvBase, packed: bytes) -> None:
    """Raise an error if the transforms of an environment have other shapes than those of a saved one.

    :param packed: result of :func:`episode_state`
    """
    check_shapes(split_transforms(environment)[0], torch.load(io.BytesIO(packed), weights_only=False)["transforms"])


def check_shapes(transforms: list[Any], saved: list[dict[str, Any]]) -> None:
    """Raise an error if tensors of transforms have other shapes than saved ones. Lazy tensors are ignored."""
    for transform, state in zip(transforms, saved, strict=True):
        # state_dict() would raise for buffers that the first reset creates.
        for name, value in itertools.chain(transform.named_parameters(), transform.named_buffers()):
            if name not in state or is_lazy(value) or is_lazy(state[name]):
                continue
            found, expected = tuple(value.shape), tuple(state[name].shape)
            if found != expected:
                raise _transform_error(transform, f"{name} has the shape {found}: expected {expected}")


def load_transforms(transforms: list[Any], saved: list[dict[str, Any]]) -> None:
    """Load the states of transforms."""
    check_shapes(transforms, saved)  # again, because a reset may have created more tensors
    for transform, state in zip(transforms, saved, strict=True):
        try:
            transform.load_state_dict(state)
        except RuntimeError as error:  # keys that are missing, for example
            raise _transform_error(transform, f"its state cannot be loaded ({error}): expected a state") from error


def _transform_error(transform: Any, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"transform {describe_transform(transform)}: {problem}, as in the saved run. Build all environments like those "
        "of the saved run, and then call load_state_dict(...)"
    )


def describe_environment(environment: EnvBase) -> str:
    """Return the classes of an environment's transforms and wrappers, outermost first, and of the environment itself.

    :raises InvalidTypeError: If the environment is not recorded.
    """
    transforms, base = split_transforms(environment)
    names = [*map(describe_transform, transforms), type(base).__name__, describe_layers(find_recorder(environment))]
    return " of ".join(names)


def episode_state(environment: EnvBase, with_generators: bool) -> bytes:
    """Return what restores the episode of an environment: its log, wrappers and transforms.

    :param with_generators: whether to include the global generators of this process
    :raises InvalidTypeError: If the environment is not recorded.
    """
    recorder = find_recorder(environment)
    layers = layer_states(recorder)
    if unsaved := unsaved_attributes(layers):
        warnings.warn(f"Environment: {', '.join(unsaved)} cannot be saved.", stacklevel=2)
    state = {
        "log": recorder.episode_log(),
        "layers": layers,
        "transforms": [transform.state_dict() for transform in split_transforms(environment)[0]],
        "generators": _global_generators() if with_generators else None,
    }
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def restore_episode(environment: EnvBase, packed: bytes) -> str | None:
    """Repeat the episode of an environment that was built in the same way, and restore what is around it.

    :param packed: result of :func:`episode_state`
    :return: why that is not possible; None if it is done
    """
    state, recorder = torch.load(io.BytesIO(packed), weights_only=False), find_recorder(environment)
    log = state["log"]
    if log is None or log.is_interrupted:
        return "has no complete record of its episode"
    repetition = recorder.repeat(log)
    for sentence in restore_layers(recorder, state["layers"]):
        warnings.warn(f"Environment: {sentence}.", stacklevel=2)
    load_transforms(split_transforms(environment)[0], state["transforms"])
    if state["generators"] is not None:
        _restore_global_generators(state["generators"])
    if repetition.first_difference is None:
        return None
    return f"is not deterministic: its observations differ from step {repetition.first_difference:,} of the episode"


def find_recorder(environment: EnvBase) -> EpisodeRecorder:
    """Return the recorder of an environment.

    :raises InvalidTypeError: If it has none.
    """
    found = find_gymnasium_env(environment)
    if not isinstance(found, EpisodeRecorder):
        raise InvalidTypeError(
            f"the episodes of {found} are not recorded: expected an EpisodeRecorder around it. Use "
            "GymWrapper(EpisodeRecorder(gymnasium.make(id))), with EpisodeRecorder of rl_ext_core.recording"
        )
    return found


def _global_generators() -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore_global_generators(states: tuple[Any, ...]) -> None:
    """Set the generators of Python, NumPy and torch."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

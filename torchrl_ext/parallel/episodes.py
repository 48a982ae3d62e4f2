"""Recording and repeating the episode of an environment, in a worker or in this process.

The gymnasium environment inside a ``GymWrapper`` is recorded, because it gets the converted actions, and only it can
crash or lose its state. Everything around it is TorchRL's: tensors, and modules with a ``state_dict``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.libs.gym import GymWrapper

from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.layers import layer_states, restore_layers
from rl_ext_core.recording.shared_log import SharedEpisodeRecorder

__all__ = [
    "EPISODE_METHOD",
    "episode_state",
    "find_gymnasium_env",
    "find_recorder",
    "restore_episode",
    "split_transforms",
    "start_recorder",
]

# Name of the method of a worker's environment that saves or repeats its episode.
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
    vars(environment)[EPISODE_METHOD] = functools.partial(_save_or_restore, environment, worker)


def _save_or_restore(environment: EnvBase, worker: int, states: list[bytes] | None) -> Any:
    """Return the state of a worker's episode, or restore it from the states of all workers.

    An environment that is not recorded returns an exception, because raising it would end the worker.
    """
    try:
        if states is None:
            return episode_state(environment, with_generators=True)
        return restore_episode(environment, states[worker])
    except InvalidTypeError as error:
        return error


def episode_state(environment: EnvBase, *, with_generators: bool) -> bytes:
    """Return what restores the episode of an environment: its log, wrappers and transforms.

    :param with_generators: whether to include the global generators of this process
    :raises InvalidTypeError: If the environment is not recorded.
    """
    recorder = find_recorder(environment)
    state = {
        "log": recorder.episode_log(),
        "layers": layer_states(recorder),
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
    restore_layers(recorder, state["layers"])
    for transform, saved in zip(split_transforms(environment)[0], state["transforms"], strict=True):
        transform.load_state_dict(saved)
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

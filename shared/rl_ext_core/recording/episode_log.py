"""Log of an episode: the generators at its reset, and the calls since.

An environment is a function of the code that builds it, of its random generators at the last reset, and of the calls
since. So its state can be restored by repeating these calls, without copying the memory of a simulator.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "MAX_STEPS",
    "RECORDED_CALLS",
    "EpisodeLog",
    "Repetition",
    "observation_checksum",
    "record_setting",
    "step_checksum",
]

# Longer episodes are not recorded, because their logs would take much memory.
MAX_STEPS = 100_000
# Arrays up to this size are checked completely. Of larger ones, these bytes are, because each word that is read takes
# about as long as a cache miss.
_MAX_CHECKED_BYTES, _SAMPLED_BYTES = 8192, 2048
# Rewards that shared memory contains as float64, as in rl_ext_core.vector.worker.
_FLOATS, _INTEGERS, _MAX_EXACT = {float, np.float64, np.float32, bool, np.bool_}, {int, np.int64}, 2**53
_RESULT = struct.Struct("<d??")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True)
class EpisodeLog:
    """Everything that is needed to repeat an episode from its reset.

    :ivar generators: states of the environment's generators before the reset, see
        :class:`~rl_ext_core.recording.generators.Generators`
    :ivar settings: calls that set attributes before the reset, as (name, data)
    :ivar calls: calls since, in order: ``("reset", {"seed": ..., "options": ...})``, ``("step", action)``, or the name
        and data of another call. The first one is a reset
    :ivar checksums: checksum of what each finished call returned: of the observation of a reset, see
        :func:`step_checksum` for a step, None if it is not known
    """

    generators: dict[tuple[int, str], Any]
    settings: list[tuple[str, Any]]
    calls: list[tuple[str, Any]]
    checksums: list[int | None]

    @property
    def steps(self) -> int:
        """Number of steps, including one that did not return."""
        return sum(name == "step" for name, _ in self.calls)

    @property
    def is_interrupted(self) -> bool:
        """Whether the last call did not return."""
        return len(self.checksums) < len(self.calls)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Result of repeating an episode.

    :ivar observation: observation that the last call returned
    :ivar first_difference: number of the first step whose observation, reward or end differs from the recorded one, 0
        for the reset; None if all are equal
    """

    observation: Any
    first_difference: int | None


def observation_checksum(observation: Any) -> int:
    """Return a checksum of an observation: an array, a tensor, an object, or nested dicts and tuples of them.

    Of a large array, evenly spaced words are read, because the checksum of all takes as long as a step of Atari.
    """
    if type(observation) is np.ndarray and not observation.dtype.hasobject:
        if not observation.flags.c_contiguous:
            observation = np.ascontiguousarray(observation)
        if (size := observation.nbytes) > _MAX_CHECKED_BYTES:
            words = observation.reshape(-1).view(np.uint8)[: size & ~7].view(np.uint64)
            observation = np.ascontiguousarray(words[:: size // _SAMPLED_BYTES + 1])
        return zlib.crc32(observation)
    if isinstance(observation, dict):
        return zlib.crc32(
            repr(sorted((str(key), observation_checksum(part)) for key, part in observation.items())).encode()
        )
    if isinstance(observation, (tuple, list)):
        return zlib.crc32(repr([observation_checksum(part) for part in observation]).encode())
    try:
        if callable(detach := getattr(observation, "detach", None)):  # a tensor of torch
            observation = detach().cpu()
        array = np.asarray(observation)
    except Exception:  # tensors that NumPy cannot represent, such as bfloat16, and the code of the user's classes
        return _text_checksum(observation)
    if array.dtype.hasobject:
        return observation_checksum(array.tolist()) if array.ndim else _text_checksum(observation)
    return observation_checksum(array)


def _text_checksum(value: Any) -> int:
    """Return a checksum of an object's text, without memory addresses, which differ in each process."""
    try:
        text = repr(value)
    except Exception:  # code of the user
        text = type(value).__qualname__
    return zlib.crc32(_ADDRESS.sub("", text).encode(errors="backslashreplace"))


def step_checksum(observation: int, reward: Any, terminated: Any, truncated: Any) -> int:
    """Return a checksum of what a step returned.

    Rewards that a float does not represent exactly are left out, because shared memory does not contain them.

    :param observation: checksum of the observation
    """
    kind = type(reward)
    is_exact = kind in _FLOATS or (kind in _INTEGERS and -_MAX_EXACT <= reward <= _MAX_EXACT)
    return zlib.crc32(_RESULT.pack(reward if is_exact else 0.0, bool(terminated), bool(truncated)), observation)


def _call_or_get(env: Any, data: Any) -> Any:
    """Call a method of an environment, or return an attribute.

    :param data: name, which may have dots, arguments and keyword arguments
    """
    name, args, kwargs = data
    first, *rest = name.split(".")
    found = functools.reduce(getattr, rest, env.get_wrapper_attr(first))
    return found(*args, **kwargs) if callable(found) else found


# Calls of a vectorized environment that change an environment. Each function calls one environment with its data.
RECORDED_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "env_method": lambda env, data: env.get_wrapper_attr(data[0])(*data[1], **data[2]),
    "call": _call_or_get,
    "set_attr": lambda env, data: setattr(env, *data),
    "set_wrapper_attr": lambda env, data: env.set_wrapper_attr(*data),
}
_SETTERS = ("set_attr", "set_wrapper_attr")


def record_setting(settings: dict[tuple[str, str], tuple[str, Any]], name: str, data: Any) -> None:
    """Record a call if it sets an attribute, in place of an earlier one for this attribute.

    :param settings: calls by their name and the attribute, in the order of the last values
    """
    if name in _SETTERS:
        settings.pop((name, data[0]), None)
        settings[name, data[0]] = name, data

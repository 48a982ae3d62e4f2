"""The frame stores of an observation space, and the options that each of them gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_obs_shape

from rl_ext_core.errors import InvalidArgumentError, RlExtError
from rl_ext_core.frames import AdaptiveStore
from sb3_ext._arguments import at_least_one
from sb3_ext._store_group import StoreGroup

ALONE = None  # the key of an observation that is no Dict
_DEFAULTS: dict[str, Any] = {
    "codec": "auto",
    "n_stack": None,
    "block_length": None,
    "max_error": 0,
    "quality": 95,
}
_COUNTS = ("n_stack", "block_length")
OPTIONS = (*_DEFAULTS, "num_threads", "max_bytes", "storage_dir")


class Part(NamedTuple):
    """What gets a store of its own: an observation, or one key of a ``Dict``."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    scalar: bool  # its environments may come as (n_envs,) for (n_envs, 1)


def parts_of(space: spaces.Space[Any]) -> dict[Any, Part]:
    """The parts of an observation space by key."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {ALONE: space}
    return {
        key: Part(get_obs_shape(part), np.dtype(part.dtype), isinstance(part, spaces.Discrete))  # type: ignore[arg-type]
        for key, part in parts.items()
    }


def make_stores(
    space: spaces.Space[Any],
    places: tuple[int, int],
    *,
    max_bytes: int | None = None,
    storage_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> StoreGroup:
    """
    One store for each part of the space.

    :param space: Observation space
    :param places: Transitions an environment, and number of environments
    :param max_bytes: Bytes for all of them together, or None for as many as it takes
    :param storage_dir: Folder that they are kept in, those of a ``Dict`` in one of its own for each key
    :param options: Of :class:`AdaptiveStore`. For a ``Dict``, a dictionary gives an option by key; any other value
        holds for the images, which are the keys of two or more dimensions
    :raises InvalidArgumentError: if an option is given for a key that is not there
    """
    parts = parts_of(space)
    for name, value in options.items():
        if isinstance(value, Mapping) and (unknown := [key for key in value if key not in parts]):
            raise InvalidArgumentError(f"{name} is given for {unknown}, which are not among the keys {list(parts)}")
    limits = {} if max_bytes is None else {"max_bytes": at_least_one("max_bytes", max_bytes)}
    folders = _folders(storage_dir, parts)
    stores: dict[Any, AdaptiveStore] = {}
    try:
        for key, part in parts.items():
            with naming(key):
                given = {**_options_of(key, part, options), **limits, **folders.get(key, {})}
                stores[key] = AdaptiveStore(*places, part.shape, part.dtype, **given)
        return StoreGroup(stores, places, max_bytes=max_bytes, storage_dir=storage_dir)
    except BaseException:
        for store in stores.values():
            store.close()
        raise


def _folders(storage_dir: str | os.PathLike[str] | None, parts: Mapping[Any, Part]) -> dict[Any, dict[str, Any]]:
    """The folder of each part."""
    if storage_dir is None or ALONE in parts:
        return {} if storage_dir is None else {ALONE: {"storage_dir": storage_dir}}
    names = {key: quote(str(key), safe="").replace(".", "%2E") for key in parts}
    there = {entry.name for entry in Path(storage_dir).glob("*")}
    if unknown := sorted(there - set(names.values())):
        raise InvalidArgumentError(
            f"storage_dir={str(storage_dir)!r} holds {unknown}, which does not belong to the keys {list(parts)}; pass "
            "the observation space that it was made with, or another storage_dir"
        )
    return {key: {"storage_dir": Path(storage_dir) / name} for key, name in names.items()}


@contextlib.contextmanager
def naming(key: Any) -> Iterator[None]:
    """Has errors say which key of a ``Dict`` they are about."""
    try:
        yield
    except RlExtError as error:
        if key is ALONE:
            raise
        raise type(error)(f"key {key!r}: {error}") from error


def _options_of(key: Any, part: Part, options: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen for one part. What was not is left to the store."""
    chosen = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            value = value.get(key, _DEFAULTS[name])
        elif key is not ALONE and len(part.shape) < 2:
            value = _DEFAULTS[name]
        if value is not None and name in _COUNTS:
            value = at_least_one(name, value)
        if value != _DEFAULTS[name]:
            chosen[name] = value
    return chosen

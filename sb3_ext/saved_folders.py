"""Saved replay buffers that are in a folder: the file contains only the folder and the position in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, StorageError
from rl_ext_core.frames.log_folder import copy_folder
from sb3_ext.observations import Observations, in_folders

_logger = logging.getLogger("sb3_ext")


def describe_folder(observations: Observations) -> dict[str, Any]:
    """Return the folder of observations and the position in it as plain values, for :func:`open_folder`."""
    store, given = observations.store, os.fspath(observations.storage_dir)  # type: ignore[arg-type]
    where = {"folder": os.path.abspath(given), "given": given, "identity": store.identity}
    return {**where, "n_records": store.n_records, "position": store.position, "size": store.size}


def open_folder(saved: dict[str, Any], arguments: dict[str, Any], replaced: Observations | None) -> Observations:
    """
    Open the folder of a saved buffer, at its position when it was saved.

    If the folder has newer transitions, or another buffer of this process uses it, it is copied.

    :param saved: Result of :func:`describe_folder`
    :param arguments: Arguments of the saved observations
    :param replaced: Observations of the buffer that the saved one replaces; they are closed if they are in the folder
    :raises StorageError: If the folder does not exist, belongs to another buffer, or another process uses it.
    :raises InvalidArgumentError: If all saved transitions were overwritten.
    """
    # If the folder was moved, the model may have opened it by its new name.
    living = [found for found in in_folders if found.store.identity == saved["identity"] and not found.store.closed]
    opened = next((found for found in living if found is replaced), living[0] if living else None)
    if opened is None:
        opened = replaced = _open_unused(saved, arguments)
    store, folder = opened.store, os.path.abspath(os.fspath(opened.storage_dir))  # type: ignore[arg-type]
    with opened.lock:
        n_records = (store.n_records - saved["n_records"] + 2**31) % 2**32 - 2**31
        newer = (store.position - saved["position"]) % store.capacity
        if opened is replaced and n_records <= 0:
            store.close()
            _logger.info("the loaded replay buffer continues in %s", folder)
            if n_records < 0:
                _logger.warning("%s lacks the newest %d transitions of the saved replay buffer", folder, -n_records)
            return Observations.create(**arguments, storage_dir=opened.storage_dir, resume=True)
        # Other records than transitions are rare, such as those of reset().
        if n_records > 0 and max(n_records, newer) >= store.size:
            raise InvalidArgumentError(
                f"storage_dir={folder!r} has overwritten the {saved['size']} transitions of the saved replay buffer "
                "with newer ones. To continue with those, leave out load_replay_buffer"
            )
        copy = _free_name(folder)
        copy_folder(Path(folder), Path(copy))
    if opened is replaced:
        store.close()
    _logger.warning(
        "%s %s, so the loaded replay buffer continues in a copy: %s. To continue in the folder instead, leave out "
        "load_replay_buffer",
        folder,
        f"has {newer} transitions that are newer than the saved replay buffer" if newer > 0 else "is in use",
        copy,
    )
    found = Observations.create(**arguments, storage_dir=copy, resume=True)
    found.store.drop_newest(newer)
    return found


def _open_unused(saved: dict[str, Any], arguments: dict[str, Any]) -> Observations:
    """Open the folder of a saved buffer that no buffer of this process uses."""
    path = next(filter(os.path.isdir, [saved["folder"], os.path.abspath(saved["given"])]), None)
    if path is None:
        raise StorageError(
            f"the saved replay buffer is in storage_dir={saved['folder']!r}, which does not exist. Restore that "
            "folder, or continue without its transitions: leave out load_replay_buffer"
        )
    opened = Observations.create(**arguments, storage_dir=path, resume=True)
    if opened.store.identity != saved["identity"]:
        opened.store.close()
        raise StorageError(
            f"storage_dir={path!r} does not contain the saved replay buffer, but another one. Restore the folder of "
            "the saved one, or leave out load_replay_buffer"
        )
    return opened


def _free_name(folder: str) -> str:
    """Return a name for a copy of a folder that does not exist yet."""
    number = 1
    while os.path.exists(name := f"{folder}-copy{number}"):
        number += 1
    return name

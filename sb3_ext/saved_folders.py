"""Saved replay buffers that are in a folder: the file contains only the folder and the position in it."""

from __future__ import annotations

import logging
import os
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, StorageError
from sb3_ext.observations import Observations

_logger = logging.getLogger("sb3_ext")


def describe_folder(observations: Observations) -> dict[str, Any]:
    """Return the folder of observations and the position in it as plain values, for :func:`open_folder`."""
    store, given = observations.store, os.fspath(observations.storage_dir)  # type: ignore[arg-type]
    where = {"folder": os.path.abspath(given), "given": given}
    return {**where, "identity": store.identity, "n_records": store.n_records}


def open_folder(saved: dict[str, Any], arguments: dict[str, Any], replaced: Observations | None) -> Observations:
    """
    Open the folder of a saved buffer, which nothing was added to since then.

    :param saved: Result of :func:`describe_folder`
    :param arguments: Arguments of the saved observations
    :param replaced: Observations of the buffer that the saved one replaces; they are closed if they are in the folder
    :raises StorageError: If the folder does not exist, belongs to another buffer, or is in use.
    :raises InvalidArgumentError: If the folder has newer transitions.
    """
    # If the folder was moved, the model may have opened it by its new name.
    is_open = replaced is not None and replaced.store.identity == saved["identity"] and not replaced.store.closed
    opened = replaced if replaced is not None and is_open else _open_unused(saved, arguments)
    store, folder = opened.store, os.path.abspath(os.fspath(opened.storage_dir))  # type: ignore[arg-type]
    n_records = (store.n_records - saved["n_records"] + 2**31) % 2**32 - 2**31
    if n_records > 0:
        if not is_open:
            store.close()
        raise InvalidArgumentError(
            f"storage_dir={folder!r} has {n_records} transitions or other changes that are newer than the saved replay "
            "buffer. To continue with all transitions, leave out load_replay_buffer"
        )
    if n_records < 0:
        _logger.warning("%s lacks the newest %d transitions of the saved replay buffer", folder, -n_records)
    if is_open:  # the arguments of the saved buffer may differ
        store.close()
        opened = Observations.create(**arguments, storage_dir=opened.storage_dir, resume=True)
    return opened


def _open_unused(saved: dict[str, Any], arguments: dict[str, Any]) -> Observations:
    """Open the folder of a saved buffer that the replaced buffer does not use."""
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

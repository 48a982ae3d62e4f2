"""Folder of a log: its lock, its settings, and its segments.

- ``lock``: id of the writing process; locked while that process is alive
- ``store.json``: options and settings of the store; written last, so that it marks a complete store
- ``log-<generation>``: folder of segments; a new one each time that the settings change
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

from rl_ext_core import _system
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, StorageError
from rl_ext_core.frames.folder import MANIFEST, _open_lock_file, as_corrupt_file, read_json, validate_path, write_json
from rl_ext_core.frames.region import storage_error

FORMAT_VERSION = 7
_GENERATION = re.compile(r"log-(\d{4})")

_open_folders: weakref.WeakSet[LogFolder] = weakref.WeakSet()


class LogFolder:
    """Folder of a store, locked for this process.

    :param path: Path of the folder, which is created if it does not exist.
    :param options: Options of the store as plain values; an existing folder requires the same ones. None accepts any.
    :ivar options: Options of the store.
    :ivar settings: Settings of the stored frames, as plain values; None if the folder is new.
    :raises InvalidArgumentError: If the path is empty, the folder contains other files, or the options differ.
    :raises StorageError: If another process uses the folder, or it cannot be created.
    :raises CorruptFileError: If ``store.json`` is damaged or missing.
    """

    settings: dict[str, Any] | None
    close: weakref.finalize[Any, LogFolder]

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any] | None) -> None:
        self.path = validate_path(path).absolute()
        self.options: dict[str, Any] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_known(entry.name))
        except OSError as error:
            raise storage_error(self.path, error, doing="use the folder") from error
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} contains {foreign[0]!r}, which is not part of a store. Pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        if any(folder.path == self.path and folder.close.alive for folder in _open_folders):
            raise StorageError(
                f"{self.path} is in use by this process. Close that buffer first, or pass another storage_dir"
            )
        descriptor = _open_lock_file(self.path / "lock")
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False
        self._pid = os.getpid()
        _open_folders.add(self)
        try:
            self.settings, self._generation = self._read(options)
        except BaseException:
            self.close()
            raise

    def _read(self, options: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int]:
        """Read the settings, and delete what an unfinished change of them has left.

        :param options: Requested options, or None for any.
        """
        self.options = {} if options is None else json.loads(json.dumps(options))
        manifest = self.path / MANIFEST
        generations = {path: int(path.name[4:]) for path in self.path.iterdir() if _GENERATION.fullmatch(path.name)}
        settings, current = None, -1
        if manifest.exists():
            found = read_json(manifest, FORMAT_VERSION)
            if options is None:
                self.options = found["options"]
            self._check_options(found["options"])
            with as_corrupt_file(f"{manifest} is"):
                settings, current = found["settings"], found["generation"]
            if current not in generations.values():
                raise CorruptFileError(f"{self.path / f'log-{current:04d}'} is missing. Restore it from a copy")
        elif any(entry for path in generations for entry in path.iterdir()) and max(generations.values()) > 0:
            raise CorruptFileError(f"{manifest} is missing. Restore it from a copy, or pass another storage_dir")
        for path, number in generations.items():
            if number != current:
                shutil.rmtree(path, ignore_errors=True)
        return settings, current

    def _check_options(self, stored: dict[str, Any]) -> None:
        """Raise if the folder's store was created with other options."""
        differing = [name for name in {**stored, **self.options} if stored.get(name) != self.options.get(name)]
        if differing:
            was, given = (
                " and ".join(f"{name}={options.get(name)!r}" for name in differing)
                for options in (stored, self.options)
            )
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} was created with {was}, not with {given}. Pass the same options, or "
                "another storage_dir"
            )

    def segments(self, *, new: bool = False) -> Path:
        """Return the folder of segments.

        :param new: Whether to create a new, empty one, which :meth:`use` makes current.
        """
        path = self.path / f"log-{self._generation + new:04d}"
        if new:
            try:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
            except OSError as error:
                raise storage_error(path, error, doing="create") from error
        return path

    def use(self, settings: dict[str, Any]) -> None:
        """Make the new folder of segments the current one, with these settings."""
        fields = {"format": FORMAT_VERSION, "options": self.options, "settings": settings}
        try:
            write_json(self.path / MANIFEST, {**fields, "generation": self._generation + 1})
        except OSError as error:
            raise storage_error(self.path / MANIFEST, error, doing="write") from error
        old, self._generation = self.segments(), self._generation + 1
        shutil.rmtree(old, ignore_errors=True)

    def check_open(self) -> None:
        """Raise if the folder is closed, or if this process is a fork of its owner.

        :raises StorageError: If it is.
        """
        if self._pid != os.getpid():
            raise StorageError(
                f"{self.path} belongs to process {self._pid}. This is a fork of it, process {os.getpid()}, and the two "
                "would overwrite each other's frames. Open another storage_dir here"
            )
        if not self.close.alive:
            raise StorageError(f"{self.path} was closed. Open it again with a new buffer of the same storage_dir")


def _is_known(name: str) -> bool:
    """Return whether a file or folder of that name belongs to a store."""
    return name in ("lock", MANIFEST, f"{MANIFEST}.new") or _GENERATION.fullmatch(name) is not None


def _close_folders_in_child() -> None:
    """Close all folders in a forked child, so that it does not keep them locked."""
    for folder in list(_open_folders):
        with contextlib.suppress(OSError):
            folder.close()


_system.after_fork(_close_folders_in_child)

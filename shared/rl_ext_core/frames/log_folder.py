"""Folder of a log: its lock, its settings, and its segments.

- ``lock``: id of the writing process; locked while that process is alive
- ``store.json``: options and settings of the store; written last, so that it marks a complete store
- ``log-<generation>``: folder of segments; a new one each time that the settings change
- ``array-<name>``: array of the caller with one row per transition, of which any row may change at any time
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rl_ext_core import _system
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, RlExtError, StorageError
from rl_ext_core.frames.checkpoint import FORMAT, checksum, format_error
from rl_ext_core.frames.memory import as_storage_error, damaged_folder_error, map_file, storage_error
from rl_ext_core.resources import check_folder, check_path

MANIFEST = "store.json"
_GENERATION = re.compile(r"log-(\d{4})")
_ARRAY = re.compile(r"array-([a-z_]+)")

_open_folders: weakref.WeakSet[LogFolder] = weakref.WeakSet()


@contextlib.contextmanager
def as_corrupt_file(what: str) -> Iterator[None]:
    """Within the context, raise ``CorruptFileError`` instead of other exceptions.

    Parsing damaged data can fail in arbitrary ways.

    :param what: Subject and verb of the error text, such as ``"store.json is"``.
    """
    try:
        yield
    except (RlExtError, MemoryError):
        raise
    except Exception as error:
        raise CorruptFileError(f"{what} damaged ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces another one when it is complete and on the disk."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Replace a file by these values and their checksum, as JSON."""
    fields = json.loads(json.dumps(fields))
    with replacing(path) as file:
        file.write(json.dumps({**fields, "checksum": checksum(fields)}).encode())


def read_json(path: Path, version: int) -> dict[str, Any]:
    """Read a file that :func:`write_json` wrote.

    :param version: Expected value of ``format``.
    :raises CorruptFileError: If the file is damaged, or has another format.
    """
    with as_corrupt_file(f"{path} is"):
        found: dict[str, Any] = json.loads(path.read_text())
        if found["format"] != version:
            raise format_error(path.parent, found["format"], version)
    if found.pop("checksum", None) != checksum(found):
        raise CorruptFileError(f"{path} is damaged: its checksum does not match its contents; restore it from a copy")
    return found


class LogFolder:
    """Folder of a store, locked for this process.

    :param path: Path of the folder, which is created if it does not exist.
    :param options: Options of the store as plain values; an existing folder requires the same ones.
    :ivar options: Options of the store.
    :ivar settings: Settings of the stored frames, as plain values; None if the folder is new.
    :ivar identity: Random name of the store. Copies of the folder have the same.
    :raises InvalidArgumentError: If the path is empty, the folder contains other files, or the options differ.
    :raises StorageError: If another process uses the folder, or it cannot be created.
    :raises CorruptFileError: If ``store.json`` is damaged or missing.
    """

    settings: dict[str, Any] | None
    close: weakref.finalize[Any, LogFolder]

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        check_path("storage_dir", path)
        self.path = Path(path).absolute()
        self.options: dict[str, Any] = json.loads(json.dumps(options))
        self.identity = secrets.token_hex(8)
        self._is_new = not self.path.exists()
        if self._is_new:
            check_folder("storage_dir", path)
        with as_storage_error(self.path, doing="use the folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in self.path.iterdir() if not _is_known(entry.name))
        if foreign:
            raise InvalidArgumentError(
                f"storage_dir={str(self.path)!r} contains {foreign[0]!r}, which is not part of a store; pass an empty "
                f"folder, for example storage_dir={str(self.path / 'buffer')!r}"
            )
        self._descriptor = _open_lock_file(self.path / "lock")
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.close.atexit = False
        self._pid = os.getpid()
        _open_folders.add(self)
        try:
            self.settings, self._generation = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> tuple[dict[str, Any] | None, int]:
        """Read the settings, and delete what an unfinished change of them has left."""
        manifest = self.path / MANIFEST
        generations = _generations(self.path)
        settings, current = None, -1
        if manifest.exists():
            found = read_json(manifest, FORMAT)
            with as_corrupt_file(f"{manifest} is"):
                options, settings = found["options"], found["settings"]
                self.identity, current = found["identity"], index(found["generation"])
            self._check_options(options)
            if settings is not None and current not in generations:
                raise damaged_folder_error(f"{_generation_path(self.path, current)} is missing")
        elif any(any(path.iterdir()) for path in generations.values()):
            raise damaged_folder_error(f"{manifest} is missing")
        for number, path in generations.items():
            if number != current:
                shutil.rmtree(path, ignore_errors=True)
        if settings is None:
            for name in self.array_names:
                (self.path / f"array-{name}").unlink()
        return settings, current

    def reset(self) -> None:
        """Delete the store in the folder, which stays open."""
        if self._generation >= 0:
            fields = {"format": FORMAT, "identity": self.identity, "options": self.options, "settings": None}
            write_json(self.path / MANIFEST, {**fields, "generation": -1})
        self.settings, self._generation = self._read()

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
        path = _generation_path(self.path, self._generation + new)
        if new:
            shutil.rmtree(path, ignore_errors=True)
            with as_storage_error(path, doing="create"):
                path.mkdir()
        return path

    def use(self, settings: dict[str, Any]) -> None:
        """Make the new folder of segments the current one, with these settings."""
        fields = {"format": FORMAT, "identity": self.identity, "options": self.options, "settings": settings}
        with as_storage_error(self.path / MANIFEST, doing="write"):
            write_json(self.path / MANIFEST, {**fields, "generation": self._generation + 1})
        old, self._generation, self.settings = self.segments(), self._generation + 1, settings
        shutil.rmtree(old, ignore_errors=True)

    @property
    def array_names(self) -> set[str]:
        """Names of the arrays in the folder."""
        return {found[1] for path in self.path.iterdir() if (found := _ARRAY.fullmatch(path.name))}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Map an array to memory, and create its file if there is none. Changes are in the file at once.

        :raises CorruptFileError: If the file has another size.
        :raises StorageError: If the disk is full.
        """
        path, n_bytes = self.path / f"array-{name}", int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = path.stat().st_size if path.exists() else 0
        if size not in (0, n_bytes):
            raise damaged_folder_error(f"{path} has {size:,} bytes, expected {n_bytes:,}")
        return np.frombuffer(map_file(path, n_bytes), dtype).reshape(shape)

    def is_in_place(self) -> bool:
        """Return whether the folder was neither moved nor replaced since it was opened."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path / "lock"))
        except OSError:
            return False

    def check_open(self) -> None:
        """Raise if the folder is closed, or if this process is a fork of its owner.

        :raises StorageError: If it is.
        """
        if self._pid != os.getpid():
            raise StorageError(
                f"{self.path} belongs to process {self._pid}; this is a fork of it, process {os.getpid()}, and the two "
                "would overwrite each other's frames. Open another storage_dir here"
            )
        if not self.close.alive:
            raise StorageError(
                f"{self.path} was closed; open it again with a new buffer of the same storage_dir, and resume=True"
            )

    def abandon(self) -> None:
        """Close the folder, and delete it if this process created it."""
        must_delete = self._is_new and self.is_in_place()
        self.close()
        if must_delete:
            shutil.rmtree(self.path, ignore_errors=True)


def _generation_path(folder: Path, generation: int) -> Path:
    return folder / f"log-{generation:04d}"


def _generations(folder: Path) -> dict[int, Path]:
    return {int(found[1]): path for path in folder.iterdir() if (found := _GENERATION.fullmatch(path.name))}


def _is_known(name: str) -> bool:
    """Return whether a file or folder of that name belongs to a store."""
    known = name in ("lock", MANIFEST, f"{MANIFEST}.new") or _GENERATION.fullmatch(name) or _ARRAY.fullmatch(name)
    return bool(known)


def copy_folder(source: Path, target: Path) -> None:
    """Copy the folder of a store, without its lock. The caller writes nothing meanwhile.

    Segments do not change once another one follows. They are hard links, if the file system supports these.

    :param target: Folder to create.
    :raises StorageError: If a file cannot be copied.
    """
    try:
        generation = read_json(source / MANIFEST, FORMAT)["generation"]
        target.mkdir(parents=True)
        _copy_segments(_generation_path(source, generation), _generation_path(target, generation))
        for path in source.iterdir():
            if path.name == MANIFEST or _ARRAY.fullmatch(path.name):
                shutil.copyfile(path, target / path.name)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{source} cannot be copied to {target}: {error}. Free space on that disk") from error


def restore_folder(source: Path, target: Path) -> None:
    """Replace the store in a folder by a copy that :func:`copy_folder` made.

    If the process is killed meanwhile, the folder still contains the store that it had.

    :raises StorageError: If a process uses the folder, or it cannot be written.
    """
    check_folder("storage_dir", target)
    target.mkdir(parents=True, exist_ok=True)
    descriptor = _open_lock_file(target / "lock")
    try:
        with as_storage_error(target, doing="write"):
            found = read_json(source / MANIFEST, FORMAT)
            new = max([-1, *_generations(target)]) + 1
            _copy_segments(_generation_path(source, found["generation"]), _generation_path(target, new))
            write_json(target / MANIFEST, {**found, "generation": new})
            for path in source.iterdir():
                if _ARRAY.fullmatch(path.name):
                    shutil.copyfile(path, target / path.name)
            for number, path in _generations(target).items():
                if number != new:
                    shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _copy_segments(source: Path, target: Path) -> None:
    """Copy all segments: hard links of those that do not change any more, and a copy of the newest one."""
    target.mkdir()
    paths = sorted(source.iterdir())
    for path in paths:
        try:
            if path == paths[-1]:
                raise OSError
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)


def _in_use_error(path: Path) -> StorageError:
    process = ""
    with contextlib.suppress(OSError):
        process = (path / "lock").read_text(errors="replace")[:32]
    owner = f"another process, {process or 'of unknown id'}"
    if process == str(os.getpid()):
        owner = f"this process, {process}"
    return StorageError(f"{path} is in use by {owner}; close that buffer first, or pass another storage_dir")


def _open_lock_file(path: Path) -> int:
    """Open and lock a file, write this process's id to it, and return its descriptor."""
    try:
        try:
            lock = _system.open_exclusive(path)
        except BlockingIOError:
            # A model is a reference cycle, so its buffer exists after `del model` until garbage is collected.
            gc.collect()
            lock = _system.open_exclusive(path)
    except BlockingIOError:
        raise _in_use_error(path.parent) from None
    except OSError as error:
        if error.filename is not None:
            raise storage_error(path, error, doing="open") from error
        raise StorageError(
            f"cannot lock {path}: {error.strerror or error}. Pass a storage_dir on a file system that supports locks, "
            "such as a local disk; some network drives do not"
        ) from error
    os.ftruncate(lock, 0)
    _system.write_at(lock, str(os.getpid()).encode(), 0)
    return lock


def _close_folders_in_child() -> None:
    """Close all folders in a forked child, so that it does not keep them locked."""
    for folder in list(_open_folders):
        with contextlib.suppress(OSError):
            folder.close()


_system.after_fork(_close_folders_in_child)

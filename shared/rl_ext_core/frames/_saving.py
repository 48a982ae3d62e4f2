"""Stores in files of their own: checkpoints."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rl_ext_core.errors import CorruptFileError, RlExtError, StorageError

_S = TypeVar("_S")

# What a file of a store refers to. Anything else would be somebody else's program.
_KNOWN = {
    ("builtins", "list"),
    ("rl_ext_core.frames.adaptive", "AdaptiveStore"),
    ("rl_ext_core.frames.store", "FrameStore"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("numeric", "_frombuffer"),
            ("multiarray", "_reconstruct"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of a store")
        return super().find_class(module, name)


def save(store: Any, file: str | os.PathLike[str] | BinaryIO) -> None:
    """Writes a store to a file; see :meth:`FrameStore.save`."""
    if not isinstance(file, (str, os.PathLike)):
        # Pickle writes views of arrays as they are from protocol 5 on.
        pickle.dump(store, file, protocol=5)
        return
    path = Path(file)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as opened:
            pickle.dump(store, opened, protocol=5)
        part.replace(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. What was there before is intact; make room, or pass a "
            "path elsewhere"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def load(cls: type[_S], file: str | os.PathLike[str] | BinaryIO) -> _S:
    """Reads a store; see :meth:`FrameStore.load`."""
    with _opened(file) as opened:
        try:
            store = _Unpickler(opened).load()
        except (RlExtError, OSError):
            raise
        except Exception as error:  # damaged bytes can make pickle do anything
            raise CorruptFileError(
                f"{file} is cut short, damaged, or no store ({type(error).__name__}: {error}); write it with "
                f"{cls.__name__}.save(path)"
            ) from error
    if not isinstance(store, cls):
        raise CorruptFileError(f"{file} holds a {type(store).__name__}, expected a {cls.__name__}")
    return store


@contextlib.contextmanager
def _opened(file: str | os.PathLike[str] | BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(file, (str, os.PathLike)):
        with Path(file).open("rb") as opened:
            yield opened
    else:
        yield file

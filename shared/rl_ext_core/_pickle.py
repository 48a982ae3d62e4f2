"""Pickling by cloudpickle, for processes that cannot import the user's modules."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from rl_ext_core._import_path import is_importable_elsewhere

__all__ = ["dumps", "loads"]

# Name of the script in a process that multiprocessing has spawned. Other processes cannot import it.
_SPAWNED = "__mp_main__"

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # number of running dumps that pickle a module by value
# Classes and functions that are complete in this process, because they were defined or loaded here. cloudpickle would
# set all attributes again when a class comes back from another process, and so undo changes that were made here.
_complete: weakref.WeakSet[type | types.FunctionType] = weakref.WeakSet()
# Module-level functions by the name in their pickles, because cloudpickle preserves the identity of classes only.
# Nested functions are excluded: their closures may contain objects that a copy must not share.
_functions: weakref.WeakValueDictionary[str, types.FunctionType] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()


def dumps(
    value: Any, place_of: Callable[[Any], Any] | None = None, reduce: Callable[[Any], Any] | None = None
) -> bytes:
    """Pickle a value. Without ``place_of``, ``pickle.loads`` can load it.

    :param value: Any picklable value. Functions and classes are pickled by value if they are from the script, a
        notebook, or a module that a new process cannot import.
    :param place_of: Function that returns a persistent id for an object that the receiver has too, or None to pickle it
    :param reduce: Function that returns how to build an object again, as ``__reduce__`` does, or None to pickle it
    :raises Exception: If the value cannot be pickled
    """
    file = io.BytesIO()
    pickler = _Pickler(file, reduce)
    if place_of is not None:  # pickle calls it for every object, which is slow
        pickler.persistent_id = place_of
    with pickler.modules_by_value():
        pickler.dump(value)
    return file.getvalue()


def loads(packed: bytes, find: Callable[[Any], Any]) -> Any:
    """Unpickle a value that :func:`dumps` has pickled.

    :param find: Function that returns this process's object for a persistent id of ``place_of``
    """
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    unpickler.persistent_load = find  # type: ignore[method-assign]
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that also pickles modules by value if the receiver cannot import them."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any] | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._reduce = reduce
        self._looked_up: set[str] = set()
        self._by_value: list[types.ModuleType] = []

    @contextlib.contextmanager
    def modules_by_value(self) -> Iterator[None]:
        """Within the context, pickle modules by value that the other process cannot import."""
        script = sys.modules.get(_SPAWNED)
        if script is not None and script.__name__ == _SPAWNED:
            self._register(script)
        try:
            yield
        finally:
            with _lock:
                for module in self._by_value:
                    _counts[module.__name__] -= 1
                    if not _counts[module.__name__]:
                        with contextlib.suppress(ValueError):  # the user has already unregistered it
                            cloudpickle.unregister_pickle_by_value(module)

    def _register(self, module: types.ModuleType) -> None:
        """Let cloudpickle pickle a module by value during :meth:`modules_by_value`."""
        name = module.__name__
        with _lock:
            if _counts[name] or name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                _counts[name] += 1
                self._by_value.append(module)

    def _register_unfindable(self, value: Any) -> None:
        """Register the module of a value if a new process cannot import it."""
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        top = name.partition(".")[0] if isinstance(name, str) else ""
        module = sys.modules.get(top)
        if top not in self._looked_up and isinstance(module, types.ModuleType) and module.__name__ == top:
            self._looked_up.add(top)
            if not is_importable_elsewhere(top):
                self._register(module)

    def reducer_override(self, value: Any) -> Any:
        """Reduce as cloudpickle does, but let the receiver keep classes that it already has.

        The same holds for module-level functions.
        """
        if self._reduce is not None and (reduced := self._reduce(value)) is not None:
            return reduced
        if isinstance(value, (type, types.FunctionType, types.ModuleType)):
            self._register_unfindable(value)
        given = super().reducer_override(value)
        if (
            _keeps_identity(value) and type(given) is tuple and len(given) == 6
        ):  # cloudpickle's form for pickling by value
            _complete.add(value)
            maker, args, state, _, _, complete = given
            if isinstance(value, type):
                state[0].setdefault("__qualname__", value.__qualname__)  # cloudpickle omits it
            else:
                maker, args = _function_of, (_function_name(value), maker, args)
            return maker, args, (complete, state), None, None, _complete_once
        return given


def _keeps_identity(value: Any) -> bool:
    """Return whether a value is a class or module-level function, which loads as one object."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and "<locals>" not in value.__qualname__
    return isinstance(value, type)


def _function_name(function: types.FunctionType) -> str:
    """Return the random name that identifies a function in pickles."""
    name = _names.setdefault(function, uuid.uuid4().hex)
    _functions[name] = function
    return name


def _function_of(name: str, make: Callable[..., types.FunctionType], args: tuple[Any, ...]) -> types.FunctionType:
    """Return the function of a name in pickles; create it only if this process has none."""
    function = _functions.get(name)
    if function is None:
        function = _functions[name] = make(*args)
        _names[function] = name
    return function


def _complete_once(value: Any, state: tuple[Callable[[Any, Any], object], Any]) -> None:
    """Set the attributes of an unpickled class or function, unless it already has them."""
    if value not in _complete:
        _complete.add(value)
        complete, attributes = state
        complete(value, attributes)

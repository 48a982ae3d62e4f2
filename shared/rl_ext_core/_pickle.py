"""Pickles by cloudpickle, for processes that lack the user's script and modules without a file."""

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

# What multiprocessing calls the script in a process that it has spawned: this is no module to import elsewhere.
_SPAWNED = "__mp_main__"

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # dumps under way that pickle a module by value
# Classes that are complete in this process, defined or loaded here. cloudpickle sets all attributes of a class anew
# whenever it comes back from another process, and so what was changed here since.
_complete: weakref.WeakSet[type | types.FunctionType] = weakref.WeakSet()
# Functions of modules by the names that they travel under; cloudpickle keeps the identity of classes alone. Functions
# made by functions are not here: they may hold what a copy must not share.
_functions: weakref.WeakValueDictionary[str, types.FunctionType] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()


def dumps(value: Any, place_of: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle a value; ``pickle.loads`` loads it if there are no places.

    :param value: anything; functions and classes of the script, of a notebook, and of modules that a new process does
        not find travel by value
    :param place_of: takes an object and says where whoever loads this finds its own; None: the object travels
    :raises Exception: it cannot be pickled
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    if place_of is not None:  # pickle asks this for every object
        pickler.persistent_id = place_of
    with pickler.modules_by_value():
        pickler.dump(value)
    return file.getvalue()


def loads(packed: bytes, find: Callable[[Any], Any]) -> Any:
    """Load what :func:`dumps` has packed.

    :param find: takes what ``place_of`` returned, and returns this process's object
    """
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    unpickler.persistent_load = find  # type: ignore[method-assign]
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._looked_up: set[str] = set()
        self._by_value: list[types.ModuleType] = []

    @contextlib.contextmanager
    def modules_by_value(self) -> Iterator[None]:
        """Have cloudpickle pickle by value, in here, what the other process does not find."""
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
                        with contextlib.suppress(ValueError):  # the user has done it
                            cloudpickle.unregister_pickle_by_value(module)

    def _register(self, module: types.ModuleType) -> None:
        name = module.__name__
        with _lock:
            if _counts[name] or name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                _counts[name] += 1
                self._by_value.append(module)

    def _register_unfindable(self, value: Any) -> None:
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        top = name.partition(".")[0] if isinstance(name, str) else ""
        module = sys.modules.get(top)
        if top not in self._looked_up and isinstance(module, types.ModuleType) and module.__name__ == top:
            self._looked_up.add(top)
            if not is_importable_elsewhere(top):
                self._register(module)

    def reducer_override(self, value: Any) -> Any:
        """Do as cloudpickle does, but for classes and functions that the other process has already."""
        if isinstance(value, (type, types.FunctionType, types.ModuleType)):
            self._register_unfindable(value)
        given = super().reducer_override(value)
        if _keeps_identity(value) and type(given) is tuple and len(given) == 6:  # by value
            _complete.add(value)
            maker, args, state, _, _, complete = given
            if isinstance(value, type):
                state[0].setdefault("__qualname__", value.__qualname__)  # which cloudpickle leaves out
            else:
                maker, args = _function_of, (_name(value), maker, args)
            return maker, args, (complete, state), None, None, _complete_once
        return given


def _keeps_identity(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and "<locals>" not in value.__qualname__
    return isinstance(value, type)


def _name(function: types.FunctionType) -> str:
    name = _names.setdefault(function, uuid.uuid4().hex)
    _functions[name] = function
    return name


def _function_of(name: str, make: Callable[..., types.FunctionType], args: tuple[Any, ...]) -> types.FunctionType:
    function = _functions.get(name)
    if function is None:
        function = _functions[name] = make(*args)
        _names[function] = name
    return function


def _complete_once(value: Any, state: tuple[Callable[[Any, Any], object], Any]) -> None:
    if value not in _complete:
        _complete.add(value)
        complete, attributes = state
        complete(value, attributes)

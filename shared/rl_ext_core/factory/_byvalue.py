"""Classes and functions that travel by value: a script's, a notebook's, those made inside of functions.

cloudpickle brings them into another process, and there they stand for a module. Unlike a module's, they are made anew
by every pickle: methods and functions get globals of their own, and a class that is there already, in the process that
has defined it above all, is given other methods and attributes under the instances that it has. Here a class is filled
once by one packing, and never where it was packed; functions of one packing share their globals, and have those that
are there where they were packed; and functions that share a variable go on sharing it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections import Counter, deque
from typing import Any

import cloudpickle

from rl_ext_core._import_path import is_found_elsewhere
from rl_ext_core._system import after_fork

# In the globals of functions that were loaded: keeps the namespace for as long as one of them lives.
_NAME = "__rl_ext_namespace__"
# What multiprocessing calls the script in a process that it has spawned.
_SPAWNED = "__mp_main__"
# In place of a packing's name.
_MESSAGE = b"message"


class _Namespace:
    """The globals of functions.

    :ivar origin: of those where the functions were defined
    :ivar here: of those in this process
    """

    def __init__(self, names: dict[str, Any], origin: bytes | None = None) -> None:
        self.names, self.here = names, uuid.uuid4().bytes
        self.origin = origin or self.here
        _namespaces[self.here] = self


_namespaces: weakref.WeakValueDictionary[bytes, _Namespace] = weakref.WeakValueDictionary()
# Those of modules, by the id of their names; and those that were loaded, by the packing and where they are from.
_of_modules: dict[int, _Namespace] = {}
_loaded: weakref.WeakValueDictionary[tuple[bytes, bytes], _Namespace] = weakref.WeakValueDictionary()

_function_keys: weakref.WeakKeyDictionary[types.FunctionType, bytes] = weakref.WeakKeyDictionary()
_functions: weakref.WeakValueDictionary[tuple[bytes, bytes], types.FunctionType] = weakref.WeakValueDictionary()
_unfilled: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()

_class_keys: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[bytes, type] = weakref.WeakValueDictionary()
# Of classes that were loaded, the packing by which they were filled; empty: by none as yet.
_filled_by: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()

# A module's classes and globals live as long as the process. Of these the newest do: who loads a pickle twice finds
# what was counted in its class, whatever was collected in between.
_newest: deque[Any] = deque(maxlen=64)

# Of this process, and of those that it was forked from: the beginnings of their packings.
_processes = [uuid.uuid4().bytes]
after_fork(lambda: _processes.append(uuid.uuid4().bytes))


# Whether a new process finds a module, by its name and id, for messages: they may be many.
_found: dict[tuple[str, int], bool] = {}
# How many picklers have registered a module with cloudpickle.
_counts: Counter[str] = Counter()
_lock = threading.Lock()


class InPython(pickle._Pickler):
    """cloudpickle's in Python, which is slow and goes as deep as there is memory: Python limits how deep C goes."""

    dispatch_table = cloudpickle.Pickler.dispatch_table
    reducer_override = cloudpickle.Pickler.reducer_override
    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.globals_ref: dict[int, dict[str, Any]] = {}
        # A function in place of the method: pickle calls it with *args, which for a method is a call in C.
        save_reduce = pickle._Pickler.save_reduce  # type: ignore[attr-defined]

        def reduced(func, args, state=None, listitems=None, dictitems=None, state_setter=None, *, obj=None):  # type: ignore[no-untyped-def]
            return save_reduce(self, func, args, state, listitems, dictitems, state_setter, obj=obj)

        self.save_reduce = reduced


class ByValue:
    """What a pickler of cloudpickle's does with what travels by value.

    :param packing: of the pickles that belong together
    """

    def __init__(self, file: io.BytesIO, packing: bytes) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[call-arg]
        self._packing = packing
        self._seen: set[str] = set()  # top-level names of modules
        self._registered: list[types.ModuleType] = []

    def dump(self, value: Any) -> None:
        """Pickle a value. In a process that was spawned, the script is a module, which its workers would not have."""
        script = sys.modules.get(_SPAWNED)
        try:
            if script is not None and script.__name__ == _SPAWNED and self._packing != _MESSAGE:
                self._register(script)
            super().dump(value)  # type: ignore[misc]
        finally:
            self._unregister()

    def _look_for_module(self, value: Any) -> None:
        """Have the parts of a module travel by value if a new process does not find it."""
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        top = name.partition(".")[0] if isinstance(name, str) else ""
        if top in self._seen:
            return
        self._seen.add(top)
        module = sys.modules.get(top)
        if isinstance(module, types.ModuleType) and module.__name__ == top:
            key = top, id(module)
            if self._packing != _MESSAGE or key not in _found:
                _found[key] = is_found_elsewhere(top)
            if not _found[key]:
                self._register(module)

    def _register(self, module: types.ModuleType) -> None:
        """Have cloudpickle pickle a module's classes and functions by value until this has pickled its own."""
        name = module.__name__
        with _lock:
            if _counts[name] or name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                _counts[name] += 1
                self._registered.append(module)

    def _unregister(self) -> None:
        with _lock:
            while self._registered:
                module = self._registered.pop()
                _counts[module.__name__] -= 1
                if not _counts[module.__name__]:
                    with contextlib.suppress(ValueError):  # the user has done it
                        cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, value: Any) -> Any:
        """Reduce what travels by value."""
        if type(value) is types.CellType:
            return _reduce_cell(value)
        if isinstance(value, (type, types.FunctionType, types.ModuleType)):
            self._look_for_module(value)
        given = super().reducer_override(value)  # type: ignore[misc]
        # Six parts: it goes by value. Others are pickled by their name.
        if type(given) is not tuple or len(given) != 6:
            return given
        return (_reduce_class if isinstance(value, type) else _reduce_function)(value, given, self._packing)


class _Pickler(ByValue, cloudpickle.Pickler):  # type: ignore[misc]
    pass


def new_packing() -> bytes:
    """Return a name for what is packed together."""
    return _processes[-1] + uuid.uuid4().bytes


def dumps(value: Any, *, message: bool = False) -> bytes:
    """Pickle a value; ``pickle.loads`` loads it.

    :param message: between processes that go on: what is there already stays as it is, whatever brought it
    """
    file = io.BytesIO()
    _Pickler(file, _MESSAGE if message else new_packing()).dump(value)
    return file.getvalue()


def _reduce_class(kind: type, given: Any, packing: bytes) -> tuple[Any, ...]:
    maker, args, state, _, _, fill = given
    # cloudpickle leaves out where it was written.
    state[0].setdefault("__qualname__", kind.__qualname__)
    key = _class_keys.get(kind)
    if key is None:
        key = _class_keys[kind] = uuid.uuid4().bytes
        _classes[key] = kind
    return _class, (key, maker, args), (packing, fill, state), None, None, _fill_class


def _class(key: bytes, maker: Any, args: tuple[Any, ...]) -> Any:
    kind = _classes.get(key)
    if kind is None:
        kind = _classes[key] = maker(*args)
        _class_keys[kind] = key
        _filled_by[kind] = b""
        _newest.append(kind)
    return kind


def _fill_class(kind: type, state: tuple[bytes, Any, Any]) -> None:
    packing, fill, held = state
    known = _filled_by.get(kind)
    # Not where it was defined; nor where it was packed, if that is a process that had loaded it.
    if known is None or known == packing or (known and (packing == _MESSAGE or packing[:16] in _processes)):
        return
    _filled_by[kind] = packing
    fill(kind, held)


def _reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    # Filled later: what is in it may refer to the function whose variable it is.
    try:
        # In a tuple: None would be no state.
        return types.CellType, (), (cell.cell_contents,), None, None, _fill_cell
    except ValueError:  # nothing is in it yet
        return types.CellType, ()


def _fill_cell(cell: types.CellType, state: tuple[Any]) -> None:
    (cell.cell_contents,) = state


def _reduce_function(function: types.FunctionType, given: Any, packing: bytes) -> tuple[Any, ...]:
    _, (code, names, *_), (attributes, slots), _, _, _ = given
    del slots["__closure__"]
    space = _namespace_of(function.__globals__)
    key = _function_keys.get(function)
    if key is None:
        key = _function_keys[function] = uuid.uuid4().bytes
        _functions[space.here, key] = function
    args = (packing, (space.here, space.origin), key, code, names, function.__closure__)
    return _function, args, (attributes, slots), None, None, _fill_function


def _namespace_of(names: dict[str, Any]) -> _Namespace:
    found = names.get(_NAME) or _of_modules.get(id(names))
    if found is None:
        found = _of_modules[id(names)] = _Namespace(names)
    return found


def _function(packing: bytes, spaces: tuple[bytes, bytes], key: bytes, code: Any, names: Any, closure: Any) -> Any:
    found = (_namespaces.get(space) for space in spaces)
    space = next(filter(None, found), None) or _loaded.get((packing, spaces[1]))
    if space is None and packing == _MESSAGE:
        space = next((one for (_, origin), one in list(_loaded.items()) if origin == spaces[1]), None)
    if space is None:
        space = _loaded[packing, spaces[1]] = _Namespace(names, spaces[1])
        _newest.append(space)
        names.update({_NAME: space, "__builtins__": __builtins__})
    # One that has variables of its own is copied with them.
    function = None if closure else _functions.get((space.here, key))
    if function is None:
        function = types.FunctionType(code, space.names, None, None, closure)
        _unfilled.add(function)
        _function_keys[function] = key
        if not closure:
            _functions[space.here, key] = function
    return function


def _fill_function(function: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    if function not in _unfilled:
        return
    _unfilled.discard(function)
    attributes, slots = state
    names = slots.pop("__globals__")
    slots.pop("_cloudpickle_submodules", None)  # they are imported by now
    if _NAME in function.__globals__:
        for name, value in names.items():
            # What is there already may have been changed since.
            function.__globals__.setdefault(name, value)
    vars(function).update(attributes)
    for name, value in slots.items():
        setattr(function, name, value)

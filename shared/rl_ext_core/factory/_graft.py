"""Copies a whole environment through a pickle: all Python state as it is, simulators by their rules."""

from __future__ import annotations

import concurrent.futures
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from rl_ext_core.factory import _byvalue, _culprits, _memory, _rebuilders, _state
from rl_ext_core.factory._refused import Refused

__all__ = ["Refused", "after_loading", "dumps", "loads"]

_TOO_DEEP = (
    "objects in it refer to one another in a chain that is longer than pickle can follow; keep them in a list, or "
    "leave them out"
)

# Of address space: what is not used takes no memory. Trees of XML need 100,000 calls. In C pickle cannot go so deep:
# from Python 3.12 on no setting lets it. Before that, Python's own calls need the stack too.
_STACK, _CALLS = 512 << 20, 400_000

# The pickle, all arrays and tensors in it, and all objects that show their memory by their attributes.
Dumped = tuple[bytes, list[Any], list[Any]]

# Called when the copy is complete, e.g. to start the threads that the original had.
_after: list[Callable[[], object]] = []


class _Grafting(_byvalue.ByValue):
    """Asks our rules before cloudpickle.

    :param packing: of the pickles that belong together
    :param replaced: reductions that are decided on already, by the object's id
    :ivar arrays: all arrays and tensors that it has met
    :ivar owners: all objects that show their memory by their attributes
    """

    def __init__(self, file: io.BytesIO, packing: bytes, replaced: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__(file, packing)
        self._replaced = replaced
        self.arrays: list[Any] = []
        self.owners: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self._replaced:
            return self._replaced[id(value)]
        kind = type(value)
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor) and _is_shared(value, torch):
            raise pickle.PicklingError("it lies in memory that processes share, and a copy would not; clone() it")
        if kind is np.ndarray or (torch is not None and kind is torch.Tensor):
            self.arrays.append(value)
        elif (rebuilder := _rebuilders.find(value)) is not None and rebuilder.settings is not None:
            self.owners.append(value)
        given = _state.reduce(value)
        return super().reducer_override(value) if given is None else given


class _Pickler(_Grafting, cloudpickle.Pickler):  # type: ignore[misc]
    pass


class _PicklerInPython(_Grafting, _byvalue.InPython):
    pass


def _is_shared(tensor: Any, torch: Any) -> bool:
    return bool(tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_shared())


def dumps(environment: Any) -> bytes:
    """Pickle an environment with all its Python state.

    :param environment: only read
    :raises Refused: what cannot be copied, and where it is
    """
    replaced: dict[int, tuple[Any, ...]] = {}
    packing = _byvalue.new_packing()
    dump = shallow = functools.partial(_dump, packing)
    while True:
        try:
            packed, arrays, owners = dump(environment, replaced)
            shared = _shared(arrays, owners)
            if shared:
                packed, _, _ = dump(environment, {**shared, **replaced})
            return packed + _dump_rules(shallow)
        except Refused:
            raise
        except Exception as error:
            failure = error
        if not _is_recursion(failure):
            replaced.update(_culprits.mend(environment, failure, replaced, dump))
        elif dump is shallow:
            dump = functools.partial(_dump_deep, packing)
        else:
            raise Refused("", environment, _TOO_DEEP) from failure


def loads(packed: bytes) -> Any:
    """Unpickle an environment; what waits for the copy to be complete runs last.

    :param packed: by :func:`dumps`, here or in another process
    """
    before = len(_after)
    file = io.BytesIO(packed)
    try:
        environment = pickle.load(file)
        _rebuilders.adopt(pickle.load(file))
        for action in _after[before:]:
            action()
    finally:
        del _after[before:]
    return environment


def after_loading(action: Callable[[], object]) -> None:
    """Call this once the copy that is being unpickled is complete."""
    _after.append(action)


def _dump(
    packing: bytes, value: Any, replaced: Mapping[int, tuple[Any, ...]], pickler_class: type[_Grafting] = _Pickler
) -> Dumped:
    file = io.BytesIO()
    pickler: Any = pickler_class(file, packing, replaced)
    pickler.dump(value)
    return file.getvalue(), pickler.arrays, pickler.owners


def _dump_rules(dump: Callable[[Any, Mapping[int, tuple[Any, ...]]], Dumped]) -> bytes:
    rules = _rebuilders.registered()
    try:
        return dump(rules, {})[0]
    except Exception as error:
        raise Refused("register_rebuilder", rules, f"a rule cannot be pickled: {error}") from error


def _dump_deep(packing: bytes, value: Any, replaced: Mapping[int, tuple[Any, ...]]) -> Dumped:
    """Do the same on a stack of its own: pickle goes some calls deeper for every object on the way to another."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sys.setrecursionlimit(_CALLS)
            return pool.submit(_dump, packing, value, replaced, _PicklerInPython).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)


def _shared(arrays: list[Any], owners: list[Any]) -> dict[int, tuple[Any, ...]]:
    fields = []
    for owner in {id(owner): owner for owner in owners}.values() if arrays else ():
        rebuilder = _rebuilders.find(owner)
        if rebuilder is not None and rebuilder.settings is not None:
            settings = rebuilder.settings(owner)
            if isinstance(settings, _rebuilders.Fields):
                fields.append((owner, settings))
    return _memory.reductions(arrays, fields)


def _is_recursion(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, RecursionError) or _is_recursion(error.__cause__))

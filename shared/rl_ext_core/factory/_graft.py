"""Copies a whole environment through a pickle: all Python state as it is, simulators by their rules."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import importlib
import io
import operator
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import cloudpickle
import numpy as np

from rl_ext_core.factory import _byvalue, _objects, _parts, _rules, _sources

_TOO_DEEP = (
    "objects in it refer to one another in a chain that is longer than pickle can follow; keep them in a list, or "
    "leave them out"
)

# Of address space: what is not used takes no memory. Trees of XML need 100,000 calls. In C pickle cannot go so deep:
# from Python 3.12 on no setting lets it. Before that, Python's own calls need the stack too.
_STACK, _CALLS = 512 << 20, 400_000

# By the object's id: it, and what reads its settings.
Owners = dict[int, tuple[Any, Callable[[Any], Any]]]
# The pickle, all arrays and tensors in it, and all objects that may show their memory by their settings.
Dumped = tuple[bytes, list[Any], Owners]

Reduced = tuple[Any, ...]
# By the object's id: a module, a qualified name in it, and steps from there, such as ("getitem", "speed").
References = Mapping[int, tuple[Any, ...]]
Dump = Callable[[Any, Mapping[int, Reduced]], object]
_STUB: Reduced = (str, ())

# Called when the copy is complete, e.g. to draw a renderer's scene for it.
_after: list[Callable[[], object]] = []


class NoCopy(pickle.PicklingError):
    """A rule's word that what holds this cannot be copied by making it anew either: its state is somewhere else."""


class Refused(Exception):  # noqa: N818
    """Something that an environment holds has neither a way to be pickled nor a rule.

    :ivar path: where it is, from the environment on, e.g. ``".unwrapped._sim"``
    :ivar value: what it is
    :ivar reason: why it cannot be copied
    """

    def __init__(self, path: str, value: object, reason: str) -> None:
        super().__init__(f"{path} ({_objects.full_name(type(value))}): {reason}")
        self.path, self.value, self.reason = path, value, reason


class _Grafting(_byvalue.ByValue):
    """Asks our rules before cloudpickle.

    :param packing: of the pickles that belong together
    :param replaced: reductions that are decided on already, by the object's id
    :param references: see :func:`dumps`
    :ivar arrays: all arrays and tensors that it has met
    :ivar owners: all objects that may show their memory by their settings
    """

    def __init__(
        self, file: io.BytesIO, packing: bytes, references: References, replaced: Mapping[int, Reduced]
    ) -> None:
        if references:  # pickle asks this for every object
            self.persistent_id = lambda value: references.get(id(value))
        super().__init__(file, packing)
        self._replaced = replaced
        self.arrays: list[Any] = []
        self.owners: Owners = {}

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self._replaced:
            return self._replaced[id(value)]
        kind = type(value)
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor) and _is_shared(value, torch):
            raise pickle.PicklingError("it lies in memory that processes share, and a copy would not; clone() it")
        if kind is np.ndarray or (torch is not None and kind is torch.Tensor):
            self.arrays.append(value)
        elif (rebuilder := _rules.find(value)) is not None and rebuilder.settings is not None:
            self.owners[id(value)] = value, rebuilder.settings
        given = _rules.reduce(value)
        return super().reducer_override(value) if given is None else given


class _Pickler(_Grafting, cloudpickle.Pickler):  # type: ignore[misc]
    pass


class _PicklerInPython(_Grafting, _byvalue.InPython):
    pass


def _is_shared(tensor: Any, torch: Any) -> bool:
    on_host = tensor.layout is torch.strided and tensor.device.type == "cpu" and not torch.nn.parameter.is_lazy(tensor)
    return bool(on_host and tensor.is_shared())


def dumps(environment: Any, references: References = MappingProxyType({})) -> bytes:
    """Pickle an environment with all its Python state; it is only read.

    :param references: globals of modules and attributes of classes that the environment holds: a copy holds those of
        its process
    :raises Refused: what cannot be copied, and where it is
    """
    replaced: dict[int, Reduced] = {}
    packing = _byvalue.new_packing()
    dump = shallow = functools.partial(_dump, packing, references)
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
            replaced.update(_with_layer_made_anew(environment, failure, replaced, dump))
        elif dump is shallow:
            dump = functools.partial(_dump_deep, packing, references)
        else:
            raise Refused("", environment, _TOO_DEEP) from failure


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, place: tuple[Any, ...]) -> Any:
        module, name, *steps = place
        found = operator.attrgetter(name)(importlib.import_module(module))
        for step, key in steps:
            found = found[key] if step == "getitem" else getattr(found, key)
        return found


def loads(packed: bytes) -> Any:
    """Unpickle an environment; what waits for the copy to be complete runs last."""
    before = len(_after)
    file = io.BytesIO(packed)
    try:
        environment = _Unpickler(file).load()
        _rules.adopt(pickle.load(file))
        for action in _after[before:]:
            action()
    finally:
        del _after[before:]
    return environment


def after_loading(action: Callable[[], object]) -> None:
    """Call this once the copy that is being unpickled is complete."""
    _after.append(action)


def _dump(
    packing: bytes,
    references: References,
    value: Any,
    replaced: Mapping[int, Reduced],
    pickler_class: type[_Grafting] = _Pickler,
) -> Dumped:
    file = io.BytesIO()
    pickler: Any = pickler_class(file, packing, references, replaced)
    pickler.dump(value)
    return file.getvalue(), pickler.arrays, pickler.owners


def _dump_rules(dump: Callable[[Any, Mapping[int, Reduced]], Dumped]) -> bytes:
    rules = _rules.registered()
    try:
        return dump(rules, {})[0]
    except Exception as error:
        raise Refused("register_rebuilder", rules, f"a rule cannot be pickled: {error}") from error


def _dump_deep(packing: bytes, references: References, value: Any, replaced: Mapping[int, Reduced]) -> Dumped:
    """Do the same on a stack of its own: pickle goes some calls deeper for every object on the way to another."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sys.setrecursionlimit(_CALLS)
            return pool.submit(_dump, packing, references, value, replaced, _PicklerInPython).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)


def _shared(arrays: list[Any], owners: Owners) -> dict[int, Reduced]:
    read = [(owner, settings(owner)) for owner, settings in owners.values()] if arrays else []
    return _objects.reductions(arrays, [pair for pair in read if isinstance(pair[1], _rules.Fields)])


def _is_recursion(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, RecursionError) or _is_recursion(error.__cause__))


def _with_layer_made_anew(
    environment: Any, failure: Exception, replaced: Mapping[int, Reduced], dump: Dump
) -> dict[int, Reduced]:
    """Find what fails, and reduce the layer that holds it to one that is built anew.

    :raises Refused: none of those that hold it can be built anew
    """
    trail = _path_to_failure(environment, replaced, dump)
    cause = _failure_of(trail[-1][1], replaced, dump) or failure
    path, value = "".join(step for step, _ in trail), trail[-1][1]
    for index in () if isinstance(cause, NoCopy) else reversed(range(len(trail) - 1)):
        item = trail[index][1]
        make = None if id(item) in replaced else _constructor_of(item)
        if make is None:
            continue
        kept, lost = _attributes_to_keep(item, replaced, dump)
        final = next((name for name, error in lost.items() if isinstance(error, NoCopy)), None)
        if final is not None:
            above = "".join(step for step, _ in trail[: index + 1])
            raise Refused(f"{above}.{final}", vars(item)[final], str(lost[final])) from lost[final]
        return {id(item): (*make, kept, None, None, _objects.set_state)}
    raise Refused(path, value, str(cause) or type(cause).__name__) from cause


def _failure_of(value: Any, replaced: Mapping[int, Reduced], dump: Dump) -> Exception | None:
    try:
        dump(value, replaced)
    except Exception as error:
        return error
    return None


def _path_to_failure(environment: Any, replaced: Mapping[int, Reduced], dump: Dump) -> list[tuple[str, Any]]:
    """Find the innermost part that fails by itself, with all that lead to it."""
    trail: list[tuple[str, Any]] = [("", environment)]
    passed = {id(environment)}
    while True:
        # What leads here is left out: by way of a cycle, everything holds what fails.
        stubs = {**replaced, **{id(item): _STUB for _, item in trail}}
        for step, part in _parts_of(trail[-1][1]):
            if id(part) not in passed and _failure_of(part, stubs, dump) is not None:
                passed.add(id(part))
                trail.append((step, part))
                break
        else:
            return trail


def _parts_of(item: Any) -> list[tuple[str, Any]]:
    try:
        if _rules.reduce(item) is None:
            _rules.by_pickle(item)
    except Exception:
        return []  # its rule, or its own way of pickling, refuses
    if issubclass(type(item), (set, frozenset)):
        return [("{}", part) for part in item]
    try:
        return list(_parts.parts(item))
    except Exception:
        return list(_parts.named(_objects.attributes(item)))


def _constructor_of(item: Any) -> Reduced | None:
    """Return how a layer like this is made anew; None: not known, or it is a wrapper, which is given a layer."""
    held = _objects.dictionary(item) or {}
    if not _rules.is_layer(item):
        return None
    call = _sources.recorded(item)
    if call is not None:
        return _construct, call
    if "env" in held or "venv" in held:
        return None
    if "_ezpickle_args" in held:
        return _construct, (type(item), held["_ezpickle_args"], held["_ezpickle_kwargs"])
    spec = held.get("spec")
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(spec, gymnasium.envs.registration.EnvSpec):
        return None
    return (_make_env if isinstance(item, gymnasium.Env) else _make_vec), (spec,)


def _attributes_to_keep(
    item: Any, replaced: Mapping[int, Reduced], dump: Dump
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the attributes of a layer that can be pickled, to be put back into one that is made anew, and why not."""
    stubs = {**replaced, id(item): _STUB}
    held = _objects.dictionary(item) or {}
    failures = {name: _failure_of(value, stubs, dump) for name, value in held.items()}
    kept = {name: held[name] for name, error in failures.items() if error is None}
    return kept, {name: error for name, error in failures.items() if error is not None}


def _construct(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cls(*args, **kwargs)


def _make_env(spec: Any) -> Any:
    import gymnasium

    bare = copy.deepcopy(spec)
    bare.additional_wrappers, bare.order_enforce, bare.disable_env_checker = (), False, True
    return gymnasium.make(bare).unwrapped


def _make_vec(spec: Any) -> Any:
    import gymnasium

    return gymnasium.make_vec(copy.deepcopy(spec)).unwrapped

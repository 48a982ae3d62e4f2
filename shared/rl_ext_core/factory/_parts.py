"""What an object is and what it holds: its token, and the parts to which the steps of a path lead.

The pickler's search for what it cannot copy, and the comparison of a copy with the original, walk by these. A token is
equal for equal values, in every process: there is no address and no hash() in it.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_ext_core.factory import _objects, _rules, streams

Parts = Iterator[tuple[str, Any]]
_BEYOND = 1 << 32
_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_LONG = 200
# Texts up to this are kept as they are: whoever compares recipes looks at the files that they name.
_LONGEST_PATH = 4096
_NAMED_IN_C = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
# Operations on globals, and in how many low bits of their argument there is something else than the name.
_OF_GLOBALS = {
    number: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name, number in dis.opmap.items()
    if "GLOBAL" in name or name == "LOAD_NAME"
}
# Their text has neither an address nor an order in it.
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(typing.List[int]))  # noqa: UP006
_OF_TORCH = ("dtype", "device", "layout", "memory_format", "Size")


def digest(data: Any) -> str:
    """Shorten bytes, or what shows its memory."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def scalar(item: Any) -> Any:
    """Return the token of an immutable value whose identity does not matter; None: it is none."""
    kind = type(item)
    if kind in _SCALARS:
        return kind.__name__, _text(item)
    if issubclass(kind, enum.Enum):
        return "enum", _objects.full_name(kind), str(item._name_), scalar(item._value_)
    if issubclass(kind, np.generic):
        return kind.__name__, item.tobytes() if kind is np.void else repr(item)
    if issubclass(kind, np.dtype):
        return "dtype", repr(item), item.isalignedstruct
    torch = sys.modules.get("torch")
    if torch is not None and any(kind is getattr(torch, name) for name in _OF_TORCH):
        return kind.__name__, repr(item)
    if kind in (slice, range):
        return kind.__name__, tuple(scalar(part) for part in (item.start, item.stop, item.step))
    if issubclass(kind, _TYPING):
        return "typing", repr(item)
    return None


def _text(item: Any) -> Any:
    if isinstance(item, (str, bytes)):
        data = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
        return item if len(item) <= _LONGEST_PATH else f"{item[:20]!r}... {len(item)} {digest(data)}"
    # NaN is equal to itself in this form, and 1, 1.0 and True are not one another.
    return hex(item) if type(item) is int and item.bit_length() > _LONG else repr(item)


def label(key: Any) -> str | None:
    """Return a text for a dictionary's key or a set's part; None: it is an object, and others may be like it."""
    if type(key) in (str, int, float, bool, type(None), bytes):
        text = repr(key)
        return text if len(text) <= _LONG else f"{text[:20]}...{digest(text.encode('utf-8', 'surrogatepass'))}"
    if type(key) is tuple:
        parts = [label(part) for part in key]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if issubclass(type(key), type):
        return f"<{_objects.full_name(key)}>"
    token = scalar(key)
    return None if token is None else f"<{token}>"


def plain(item: Any, depth: int = 4) -> Any:
    """Return the token of scalars, arrays and plain containers of them; None: there is something else in it."""
    token = scalar(item)
    if token is None and type(item) is np.ndarray and not item.dtype.hasobject:
        token = whole(item)
    if token is not None or depth == 0:
        return token
    if type(item) in (list, tuple, set, frozenset):
        parts = [plain(part, depth - 1) for part in item]
        ordered = sorted(parts, key=repr) if isinstance(item, (set, frozenset)) else parts
        return None if None in parts else (type(item).__name__, tuple(ordered))
    if type(item) is dict:
        pairs = [(plain(key, depth - 1), plain(part, depth - 1)) for key, part in item.items()]
        return None if any(None in pair for pair in pairs) else ("dict", tuple(pairs))
    return None


def is_global(function: Any) -> bool:
    """Whether a function or class is pickled by its name, as one that another process imports."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return False
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def by_version(function: Any) -> Any:
    """Return the token of a function of TorchRL's that it replaces by another at its first call; None: it is none.

    Which of its forms a process has depends on what was called there, not on what an environment is.
    """
    # What stands there before the first call is an object of the package that makes the choice.
    if type(function) is not types.FunctionType and not type(function).__module__.startswith("pyvers"):
        return None
    choices = getattr(getattr(sys.modules.get("torchrl._utils"), "implement_for", None), "_lazy_impl", None)
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    return ("by version", name) if choices and name in choices else None


def code_of(code: types.CodeType) -> str:
    """Shorten what a function does, whatever the file and the lines are."""
    parts = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags]
    parts += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount]
    parts += [code_of(part) if isinstance(part, types.CodeType) else plain(part, 50) for part in code.co_consts]
    return digest(repr(parts).encode("utf-8", "surrogatepass"))


def whole(item: Any) -> Any:
    """Return the token of a value that is not looked into further, but for attributes of its own; None: it is none."""
    kind = type(item)
    if issubclass(kind, (type, types.ModuleType)):
        return "name", *(_objects.name_of(item) if issubclass(kind, type) else (item.__name__,))
    if issubclass(kind, types.FunctionType):
        return "function", item.__module__, item.__qualname__, code_of(item.__code__)
    if kind is types.CodeType:
        return "code", code_of(item)
    if issubclass(kind, _NAMED_IN_C):
        owner = getattr(item, "__self__", None)
        return "builtin", getattr(item, "__module__", None), item.__qualname__, _objects.full_name(type(owner))
    if issubclass(kind, np.ndarray):
        data = "objects" if item.dtype.hasobject else digest(np.ascontiguousarray(item))
        return _objects.full_name(kind), item.shape, repr(item.dtype), item.flags.writeable, data
    if issubclass(kind, (bytearray, memoryview)):
        return kind.__name__, digest(bytes(item))
    if streams.is_generator(item):
        source = getattr(item, "bit_generator", None)
        return "generator", _objects.full_name(kind), type(source).__name__
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor) and item.layout is torch.strided:
        return _tensor(item, torch)
    return None


def _tensor(item: Any, torch: Any) -> Any:
    state = (item.requires_grad, item.grad_fn is None, item.is_shared())
    name = (_objects.full_name(type(item)), tuple(item.shape), str(item.dtype), str(item.device), state)
    if item.device.type == "meta":
        return name
    flat = item.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    # A copy, because of one part only may have any stride.
    flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return (*name, digest(flat.view(torch.uint8).numpy()))


def parts(item: Any) -> Parts:
    """Return what an object holds, but for the parts of a set: those have no order.

    Nothing of the object's own code runs but, if it is of a class in C, its way of being pickled: its state can be read
    in no other way.

    :raises Exception: it cannot be looked into
    """
    kind = type(item)
    rebuilder = _rules.find(item)
    if rebuilder is not None:
        yield from _of_rule(item, rebuilder)
    elif kind is _rules.Fields:
        yield from named(item)
    elif kind is types.FunctionType:
        yield from _of_function(item)
    elif kind is types.MethodType:
        yield from ((".__func__", item.__func__), (".__self__", item.__self__))
    elif kind is types.BuiltinFunctionType:
        if not isinstance(item.__self__, (type, types.ModuleType, type(None))):
            yield ".__self__", item.__self__
    elif kind is functools.partial:
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
        yield from named(vars(item))
    elif kind is types.CellType:
        yield from (("", part) for part in _contents(item))
    elif issubclass(kind, np.ndarray):
        yield from _of_array(item)
    elif streams.is_generator(item):
        if issubclass(kind, np.random.Generator):
            yield ".bit_generator", item.bit_generator
        yield from named({name: part for name, part in _objects.attributes(item).items() if name != "gauss_next"})
    elif whole(item) is not None:
        yield from named(_objects.attributes(item))
        if getattr(item, "is_leaf", False) and item.grad is not None:
            yield ".grad", item.grad
    else:
        yield from _of_object(item, kind)


def named(found: Mapping[str, Any]) -> Parts:
    """Return attributes in an order that does not vary."""
    yield from ((f".{name}", found[name]) for name in sorted(found, key=str))


def _of_object(item: Any, kind: type) -> Parts:
    yield from named(_objects.attributes(item))
    if issubclass(kind, BaseException):
        yield ".__traceback__", item.__traceback__ is not None
        yield from ((f".{name}", getattr(item, name)) for name in ("__cause__", "__context__"))
    if _objects.foreign_base(kind) is not None:
        yield from _of_reduced(item, _rules.by_pickle(item), _objects.attributes(item))
    elif issubclass(kind, dict):
        yield from _of_pairs(dict.items(item))
    elif issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        yield from ((f"[{index}]", part) for index, part in enumerate(base.__iter__(item)))


def _of_pairs(pairs: Any) -> Parts:
    for index, (key, part) in enumerate(pairs):
        text = label(key)
        step = f"[{text}]" if text is not None else f"[#{index}]"
        yield step, part
        # A number so large may be somebody's id().
        if text is None or (type(key) is int and key > _BEYOND):
            yield f"{step}.<key>", key


def _of_array(array: Any) -> Parts:
    yield from named(_objects.dictionary(array) or {})
    if array.dtype.names and array.dtype.hasobject:
        yield from ((f"[{name!r}]", array[name]) for name in array.dtype.names)
    elif array.dtype.hasobject:
        yield from ((f"[{index}]", part) for index, part in enumerate(array.ravel().tolist()))


def _of_function(function: types.FunctionType) -> Parts:
    if is_global(function):
        return
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from named(vars(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f".<{name}>", cell
    for name in sorted(globals_in(function.__code__)):
        part = function.__globals__.get(name)
        if part is not None and not isinstance(part, types.ModuleType):
            yield f".<global {name}>", part


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that code reads beside its variables, with those of attributes, and of functions within it."""
    return set(code.co_names).union(*map(names_in, _codes_within(code)))


def globals_in(code: types.CodeType) -> set[str]:
    """Return the names of globals that code reads or sets, that of functions within it too."""
    found, high = set(), 0
    # dis.get_instructions(), which describes each operation, takes 20 times as long.
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _OF_GLOBALS:
            found.add(code.co_names[argument >> _OF_GLOBALS[operation]])
    return found.union(*map(globals_in, _codes_within(code)))


def _codes_within(code: types.CodeType) -> list[types.CodeType]:
    return [part for part in code.co_consts if isinstance(part, types.CodeType)]


def variables(function: types.FunctionType) -> list[Any]:
    """Return what is in the variables of a function's own, as far as anything is."""
    return [part for cell in function.__closure__ or () for part in _contents(cell)]


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


def _of_rule(item: Any, rebuilder: _rules.Rebuilder) -> Parts:
    if rebuilder.settings is None:
        yield from _of_reduced(item, rebuilder.rule(item), {})
        return
    settings = rebuilder.settings(item)
    if isinstance(settings, Mapping):
        yield from named(settings)
    else:
        yield ".<settings>", settings


def _of_reduced(item: Any, reduced: Any, known: Mapping[str, Any]) -> Parts:
    """Return what a reduction holds, but for the attributes that are known already."""
    if isinstance(reduced, str):  # the name of something global
        yield ".<name>", reduced
        return
    function, args, state, contents, pairs = (*reduced, None, None, None)[:5]
    yield ".<maker>", function
    yield from ((f"({index})", part) for index, part in enumerate(args) if part is not type(item))
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict):
            yield from named({name: value for name, value in part.items() if name not in known})
        elif part is not None:
            yield ".<state>", part
    yield from ((f"[{index}]", part) for index, part in enumerate(contents or ()))
    yield from _of_pairs(pairs or ())

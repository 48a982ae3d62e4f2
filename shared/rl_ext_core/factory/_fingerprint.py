"""What an environment consists of, path by path: two of them are compared without asking either what matters."""

from __future__ import annotations

import dataclasses
import os
import types
from collections import deque
from typing import Any

import numpy as np

from rl_ext_core.factory import _code, _kinds, _memory, _parts, _rules

__all__ = ["Fingerprint", "fingerprint"]

# Lists of numbers and texts that are longer get one token: a recording of them would take minutes.
_LONG = 256
# A path that is longer is shortened: in a chain of objects, all together would fill the memory.
_LONGEST = 1_000
_SKETCHED = 1_000
_BEYOND = 1 << 32
_FLAT = {int, float, bool, str, type(None)}
# gymnasium makes these when they are first asked for.
_MADE_LATE = ("._np_random", "._np_random_seed")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything that can be reached from an environment.

    :ivar tokens: per path, such as ``".env._max_episode_steps"``, something that is equal for equal values
    :ivar opaque: paths of what could not be looked into, with the class's name
    :ivar notes: paths of what no copy has, whatever is compared, with what that is
    """

    tokens: dict[str, Any]
    opaque: dict[str, str]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def differences(self, other: Fingerprint) -> list[str]:
        """List the paths at which two differ, those of generators' states left out; the shortest first."""
        paths = [
            path for path in {**self.tokens, **other.tokens} if not _alike(path, *map(_token_at(path), (self, other)))
        ]
        return sorted(paths, key=lambda path: (self.is_of_class(path), path.count(".") + path.count("["), path))

    @staticmethod
    def is_of_class(path: str) -> bool:
        """Whether a path leads to what classes and modules hold: other processes import them as they were written."""
        return path.startswith("<")


def _token_at(path: str) -> Any:
    return lambda fingerprint: fingerprint.tokens.get(path)


def _alike(path: str, one: Any, other: Any) -> bool:
    if one == other:
        return True
    late = path.removesuffix(".bit_generator").endswith(_MADE_LATE)
    return late and any(token in (None, ("NoneType", "None")) for token in (one, other))


def fingerprint(value: Any, *, code: bool = False) -> Fingerprint:
    """Walk through everything that a value reaches.

    :param value: an environment, or anything else; only read
    :param code: whether what methods and functions read beside it belongs to it
    """
    walk = _Walk()
    walk.through(value)
    walk.name_shared_memory()
    walk.name_addresses()
    walk.add_classes()
    if code:
        walk.add_code()
    return Fingerprint(walk.tokens, walk.opaque, walk.notes)


class _Walk:
    """One walk, breadth first: paths are as short as can be, and what is reached twice is named by the first path."""

    def __init__(self, *, nested: int = 0, careful: bool = False) -> None:
        self.tokens: dict[str, Any] = {}
        self.opaque: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._own: set[str] = set()
        self._nested, self._careful = nested, careful
        self._seen: dict[int, str] = {}
        # No id may be used again while the walk lasts.
        self._alive: list[Any] = []
        self._waiting: deque[tuple[str, Any]] = deque()
        self._sets: deque[tuple[str, Any]] = deque()
        self._arrays: list[tuple[str, _memory.Extent]] = []
        self._numbers: list[tuple[str, int]] = []
        self._classes: set[type] = set()
        self._functions: list[types.FunctionType] = []

    def through(self, value: Any) -> None:
        self._waiting.append(("", value))
        while self._waiting or self._sets:
            if self._waiting:
                self._visit(*self._waiting.popleft())
            else:
                self._enter_set(*self._sets.popleft())
            if self._nested and len(self.tokens) > _SKETCHED:
                return

    def _visit(self, path: str, item: Any) -> None:
        token = _parts.scalar(item) or _parts.by_version(item)
        if token is not None:
            self.tokens[path] = token
            if issubclass(type(item), (int, np.integer)) and item > _BEYOND:
                self._numbers.append((path, int(item)))
            return
        if type(item) is types.CellType:
            # Two functions may share it, whatever is in it.
            where = self._seen.setdefault(id(item), path)
            if where != path:
                self.tokens[f"{path}.<variable>"] = ("same as", where)
            self._alive.append(item)
            self._waiting.extendleft((path + step, part) for step, part in _parts.parts(item))
            return
        if len(path) > _LONGEST:
            path = f"{path[:60]}...{_parts.digest(path.encode('utf-8', 'surrogatepass'))}"
        if self._is_named(path, item):
            return
        self._classes.add(type(item))
        place = _memory.extent(item)
        if place is not None:
            self._arrays.append((path, place))
        flat = _flat(item)
        if flat is not None:
            self.tokens[path] = flat
        else:
            self._open(path, item)

    def _is_named(self, path: str, item: Any) -> bool:
        """Name what was met before by where that was; what is the same in all processes by its name."""
        kind = type(item)
        if issubclass(kind, (type, types.ModuleType)) or (kind is types.FunctionType and _parts.is_global(item)):
            self.tokens[path] = _parts.whole(item)
            if issubclass(kind, type):
                self._classes.add(item)
            elif kind is types.FunctionType:
                self._functions.append(item)
            return True
        if kind is frozenset and not item:
            self.tokens[path] = ("frozenset", None)
            return True
        if kind is tuple and None not in (token := tuple(map(_parts.scalar, item))):
            self.tokens[path] = ("tuple", token)  # which one it is does not matter
            self._numbers += [
                (f"{path}[{i}]", part) for i, part in enumerate(item) if type(part) is int and part > _BEYOND
            ]
            return True
        # Of arrays, only where their values lie matters: a library in C may show its memory by a new one every time.
        if id(item) in self._seen and not (kind is np.ndarray and not item.dtype.hasobject):
            self.tokens[path] = ("same as", self._seen[id(item)])
            return True
        self._seen[id(item)] = path
        self._alive.append(item)
        held = _kinds.dictionary(item)
        if held is not None:
            where = self._seen.setdefault(id(held), f"{path}.__dict__")
            if where != f"{path}.__dict__":
                self.tokens[f"{path}.__dict__"] = ("same as", where)
        return False

    def _open(self, path: str, item: Any) -> None:
        kind = type(item)
        rebuilder = _rules.find(item)
        token = _parts.whole(item) if rebuilder is None else None
        if kind is types.FunctionType:
            self._functions.append(item)
        if self._careful and rebuilder is None and _is_foreign(kind):
            self.tokens[path] = token or _kinds.full_name(kind)
            return
        try:
            found = list(_parts.parts(item))
        except Exception:
            found, self.opaque[path] = list(_parts.named(_kinds.attributes(item))), _kinds.full_name(kind)
        if rebuilder is not None and rebuilder.settings is None and _rules.is_registered(kind):
            self.opaque[path] = _kinds.full_name(kind)
        if not _code.is_installed(_kinds.name_of(kind)[0].partition(".")[0]):
            self._own.add(path)
        if issubclass(kind, (set, frozenset)):
            self._sets.append((path, item))
            if path.rpartition(".")[0] in self._own and _varies(item):
                self.notes[path] = "a set has another order in every process: where it matters, use sorted() or a list"
        order = (
            [step for step, _ in found] if issubclass(kind, dict) else len(found) if issubclass(kind, list) else None
        )
        self.tokens[path] = token or (_kinds.full_name(kind), order and _parts.digest(repr(order).encode()))
        self._waiting.extend((path + step, part) for step, part in found)

    def _enter_set(self, path: str, item: Any) -> None:
        """Visit a set's parts, which have an order that varies: by what they are, and where else they were met."""
        kind = set if issubclass(type(item), set) else frozenset
        objects = []
        for part in kind.__iter__(item):
            text = _parts.label(part)
            if text is not None:
                self.tokens[f"{path}{{{text}}}"] = _parts.scalar(part)
            else:
                objects.append((self._seen.get(id(part), ""), self._sketch(part), part))
        objects.sort(key=lambda entry: entry[:2])
        self._waiting.extend((f"{path}{{#{index}}}", part) for index, (_, _, part) in enumerate(objects))

    def _sketch(self, item: Any) -> str:
        if self._nested > 1:  # by way of a cycle, it would go on for ever
            return _kinds.full_name(type(item))
        walk = _Walk(nested=self._nested + 1)
        walk.through(item)
        return repr(walk.tokens)

    def name_shared_memory(self) -> None:
        """Note which arrays lie in one piece of memory, and how."""
        for group in _memory.overlapping([place for _, place in self._arrays]):
            first, where = self._arrays[group[0]]
            for path, place in (self._arrays[index] for index in group[1:]):
                self.tokens[f"{path}.<memory>"] = ("shared with", first, place[1] - where[1])

    def name_addresses(self) -> None:
        """Note numbers that are the id of something, or point to memory: in a copy they lead elsewhere."""
        mapped = _memory.mapped() if self._numbers else []
        for path, number in self._numbers:
            if number in self._seen:
                self.tokens[path] = ("id of", self._seen[number])
            elif any(low <= number < high for low, high in mapped):
                # Equal to no other: another process may have something else there.
                self.tokens[path] = ("address", os.urandom(8).hex())

    def add_classes(self) -> None:
        """Add what classes have as attributes, as far as it is plain data."""
        waiting = {base for kind in self._classes for base in kind.__mro__}
        done: set[type] = set()
        while waiting:
            kind = waiting.pop()
            done.add(kind)
            if _code.is_fixed(_kinds.name_of(kind)[0]) or not _kinds.made_in_python(kind):
                continue
            for name, part in _kinds.namespace(kind).items():
                if (name.startswith("__") and name.endswith("__")) or _kinds.is_inherited(kind, name, part):
                    continue
                if isinstance(part, type):
                    waiting |= {part} - done if part.__qualname__.startswith(f"{kind.__qualname__}.") else set()
                elif (token := _parts.plain(part)) is not None:
                    self.tokens[f"<class {_kinds.full_name(kind)}>.{name}"] = token

    def add_code(self) -> None:
        """Add what the code of classes and functions reads."""
        classes = {base for kind in self._classes for base in kind.__mro__}
        self.tokens |= _code.read_by(classes, self._functions, _described)


def _is_foreign(kind: type) -> bool:
    """Whether it takes code of a library in C to look into instances."""
    base = _kinds.foreign_base(kind)
    return base is not None and not _code.is_fixed(_kinds.name_of(base)[0])


def _described(item: Any) -> Any:
    """Give one token for all that an object of a class or a module consists of."""
    walk = _Walk(nested=1, careful=True)
    walk.through(item)
    # A space that was drawn from has a generator; each process is to draw from its own in any case.
    lasting = sorted(pair for pair in walk.tokens.items() if not any(late in pair[0] for late in _MADE_LATE))
    return _kinds.full_name(type(item)), _parts.digest(repr(lasting).encode("utf-8", "replace"))


def _varies(parts: Any) -> bool:
    """Whether the order of a set is another one in another process."""
    fixed = (int, float, complex, bool, np.number)
    return len(parts) > 1 and not all(isinstance(part, fixed) for part in parts)


def _flat(item: Any) -> Any:
    """Give the token of a long list of numbers and texts."""
    kind = type(item)
    if kind is list and len(item) > _LONG and {type(part) for part in item} <= _FLAT:
        return _kinds.full_name(kind), len(item), _parts.digest(repr(item).encode("utf-8", "surrogatepass"))
    if kind is dict and len(item) > _LONG and {type(part) for pair in item.items() for part in pair} <= _FLAT:
        return _kinds.full_name(kind), len(item), _parts.digest(repr(item).encode("utf-8", "surrogatepass"))
    return None

"""How objects are taken apart for a copy: by a rule for their class, or attribute by attribute.

The pickler asks :func:`reduce`, and the comparison of a copy with the original asks :func:`find`: both go by the same
rules. Those of a simulator are read when the first object of its packages is met.
"""

from __future__ import annotations

import copyreg
import dataclasses
import importlib
import pickle
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import _objects, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Rule = Callable[[Any], Any]
    Settings = Callable[[Any], Any]
    # Class, rule, and what a copy has in common with the original; None: what the rule keeps.
    Rules = list[tuple[str, Rule, Settings | None]]


# Where the rules are for what a package, or a module, defines.
_MODULES = {
    "Box2D": "_rules_box2d",
    "ale_py": "_rules_games",
    "dm_control": "_rules_mujoco",
    "dmlab2d": "_rules_lab2d",
    "gymnasium.envs.mujoco.mujoco_rendering": "_rules_mujoco",
    "meltingpot": "_rules_lab2d",
    "mujoco": "_rules_mujoco",
    "pygame": "_rules_games",
    "pymunk": "_rules_games",
    "robosuite": "_rules_mujoco",
    "stable_baselines3": "_rules_frameworks",
    "torch.nn.parameter": "_rules_frameworks",
    "torchrl": "_rules_frameworks",
    "vmas": "_rules_frameworks",
}


class Fields(dict[str, Any]):
    """Settings that are attributes of the instance, by name: the arrays among them are views of its own memory."""


@dataclasses.dataclass(frozen=True)
class Rebuilder:
    """How one class is copied.

    :ivar rule: gives what ``__reduce__`` gives: a callable, its arguments, and if wanted the state
    :ivar settings: gives what a copy must have in common with the original, as plain data; None: what the rule gives
    """

    rule: Rule
    settings: Settings | None = None


# By module and qualified name: most of these classes belong to packages that are not imported yet, or not installed.
_known: dict[tuple[str, str], Rebuilder] = {}
# Those that a user has registered, in this process alone perhaps; they go before the others.
_registered: dict[tuple[str, str], Rebuilder] = {}
# Modules for whose classes rules were looked for.
_asked: set[str] = set()


def register_rebuilder(cls: type | str, rule: Rule, *, settings: Settings | None = None) -> None:
    """Say how instances of a class, and of its subclasses, are copied into another process.

    Needed for classes that hold what pickle cannot copy: a handle of a simulator, a window, a connection. The rule is
    asked for every instance that an environment reaches. A later registration replaces an earlier one.

    .. code-block:: python

        register_rebuilder(
            "my_sim:Simulator",
            lambda sim: (Simulator, (sim.path, sim.options)),
            settings=lambda sim: (sim.path, sim.options),
        )

    :param cls: the class, or ``"module:qualified.name"`` where importing it here is not wanted
    :param rule: takes the instance and returns what :meth:`object.__reduce__` returns: ``(callable, args)`` or
        ``(callable, args, state)``. Both travel by cloudpickle, ``args`` and ``state`` by these rules again
    :param settings: takes an instance and returns what a copy must have in common with it, as plain Python and NumPy
        data. Without it, what the rule returns is compared, and nothing else can be said of the copy
    :raises InvalidTypeError: ``cls`` is neither a class nor text, or ``rule`` is not callable
    :raises InvalidArgumentError: the text has no colon
    """
    if not callable(rule):
        raise InvalidTypeError(
            f"rule={rule!r} is not callable; expected a function of the instance that returns (callable, args). Write "
            "register_rebuilder(cls, lambda instance: (cls, (instance.option,)))"
        )
    _registered[_name_of(cls)] = Rebuilder(rule, settings)


def registered() -> dict[tuple[str, str], Rebuilder]:
    """Return what users have registered: a worker needs it too, to look into the copy."""
    return dict(_registered)


def is_registered(kind: type) -> bool:
    """Whether a user has registered the rule for a class or one of its bases."""
    return any(_objects.name_of(base) in _registered for base in kind.__mro__)


def adopt(rebuilders: Mapping[tuple[str, str], Rebuilder]) -> None:
    """Take over what was registered in another process."""
    _registered.update({name: found for name, found in rebuilders.items() if name not in _registered})


def find(instance: object) -> Rebuilder | None:
    """Find the rule of the nearest class among an instance's own and its bases."""
    for base in type(instance).__mro__:
        name = _objects.name_of(base)
        if name[0] not in _asked:
            _read_rules_for(name[0])
        found = _registered.get(name) or _known.get(name)
        if found is not None:
            return found
    return None


def add(rules: Rules) -> None:
    """Register rules that every process has."""
    _known.update((_name_of(cls), Rebuilder(rule, settings)) for cls, rule, settings in rules)


def _read_rules_for(module: str) -> None:
    where = _MODULES.get(module) or _MODULES.get(module.partition(".")[0])
    if where is not None:
        add(importlib.import_module(f"rl_ext_core.factory.{where}").RULES)
    _asked.add(module)


def _name_of(cls: type | str) -> tuple[str, str]:
    if isinstance(cls, type):
        return _objects.name_of(cls)
    if not isinstance(cls, str):
        raise InvalidTypeError(
            f'cls={cls!r} is neither a class nor text; write register_rebuilder("module:Class", rule)'
        )
    module, colon, name = cls.partition(":")
    if not (module and colon and name):
        raise InvalidArgumentError(
            f"cls={cls!r} names no class; expected the module, a colon and the class. Write "
            'register_rebuilder("my_sim.core:Simulator", rule)'
        )
    return module, name


_PLAIN = (int, float, complex, str, bytes, bytearray, bool, type(None), list, tuple, dict, set, frozenset)
_HOOKS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
# Unpickling calls these on an object that is still empty.
_ACCESSORS = ("__getattr__", "__getattribute__", "__setattr__")
_FILLERS = ("__setitem__", "append", "extend", "add", "update")
# Their ways of pickling call the constructor again, or leave out what they can do without.
_LOSING = {
    *("gym", "gymnasium", "pettingzoo", "sb3_contrib", "shimmy", "stable_baselines3", "supersuit"),
    *("tensordict", "torchrl", "torchrl_ext"),
}
_LOSING_BASES = {
    ("torch.nn.modules.module", "Module"),
    ("torch.nn.modules.module", "_WrappedHook"),
    ("numpy.polynomial._polybase", "ABCPolyBase"),
}


def reduce(value: Any) -> Any:
    """Reduce an object by a rule of ours, as ``__reduce__`` does.

    :param value: anything
    :return: callable, arguments and state; None: pickle's own way is right for it
    """
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, (type, types.FunctionType, types.ModuleType)):
        return None
    generator = streams.reduce_generator(value)
    if generator is not None:
        return generator
    rebuilder = find(value)
    if rebuilder is not None:
        return rebuilder.rule(value)
    if issubclass(kind, np.ndarray):
        return _subclassed(value) if kind is not np.ndarray and _objects.dictionary(value) else None
    if _taken_raw(kind) or (issubclass(kind, dict) and _objects.dictionary(value) is value):
        return raw(value)
    return None


def by_pickle(value: Any) -> Any:
    """Reduce an object as pickle does: also the rule of what is compared in a way of ours alone."""
    import cloudpickle

    reducer = cloudpickle.Pickler.dispatch_table.get(type(value))
    return value.__reduce_ex__(4) if reducer is None else reducer(value)


def by_parts(value: Any) -> tuple[Any, ...]:
    """Reduce what is made of the numbers that it lists."""
    return type(value), tuple(value)


def raw(value: Any) -> tuple[Any, ...]:
    """Reduce to a new object of the class with these attributes and contents, past all methods of the class."""
    held, base = _objects.dictionary(value), _objects.container(type(value))
    # The dictionary of some is what they hold as a dictionary: it stays one.
    own = held if held is None or held is not value else True
    state = (dict(own) if isinstance(own, dict) else own, _objects.slots(value), None if base is None else base(value))
    return _blank, (type(value),), state, None, None, _fill


def _subclassed(array: Any) -> tuple[Any, ...] | None:
    """Reduce an array that has attributes, which NumPy forgets."""
    owner = _defining(type(array), "__reduce__")
    if owner is not None and owner.__module__.partition(".")[0] != "numpy":
        return None
    return np.ndarray.view, (array.view(np.ndarray), type(array)), dict(vars(array)), None, None, _objects.set_state


def _blank(kind: type) -> Any:
    base: Any = _objects.container(kind) or object
    return base.__new__(kind)


def _fill(copy: Any, state: tuple[Any, dict[str, Any], Any]) -> None:
    held, slots, content = state
    if content is not None:
        base = type(content)
        base.extend(copy, content) if base is list else base.update(copy, content)
    if held is True:
        object.__setattr__(copy, "__dict__", copy)
    elif held:
        _objects.set_state(copy, held)
    for name, part in slots.items():
        object.__setattr__(copy, name, part)


def new(kind: type, state: Any, fill: Callable[[Any, Any], None] | None = None) -> tuple[Any, ...]:
    """Reduce to a new object of a class that is filled with a state, past the class's own way of pickling.

    That of gymnasium's EzPickle calls the constructor again: whatever was changed since then is lost.

    :param state: attributes, or what ``fill`` takes
    :param fill: takes the new object and the state; None: puts attributes past ``__setattr__``
    """
    return copyreg.__newobj__, (kind,), state, None, None, fill or _objects.set_state  # type: ignore[attr-defined]


def refusal(reason: str, error: type[pickle.PicklingError] = pickle.PicklingError) -> Rule:
    """Return the rule of what cannot be copied.

    :param reason: what it says of an instance, and what to write instead
    """

    def rule(_: Any) -> Any:
        raise error(reason)

    return rule


def is_layer(value: Any) -> bool:
    """Whether this is an environment or a wrapper of one: it resets and steps, or pickles as if it did."""
    held = _objects.dictionary(value)
    return held is not None and (_steps(type(value)) or "_ezpickle_args" in held)


@_objects.per_class
def _steps(kind: type) -> bool:
    names = {name for base in kind.__mro__ for name in vars(base)}
    return "reset" in names and "step" in names


@_objects.per_class
def _taken_raw(kind: type) -> bool:
    """Whether instances are copied attribute by attribute: what they are made of allows it, and what pickle does not.

    A way of pickling that somebody wrote for a class of his own is respected: it may drop handles on purpose.
    """
    if _objects.foreign_base(kind) is not None or issubclass(kind, (tuple, frozenset)):
        return False
    hooks: set[Any] = {owner for name in _HOOKS if (owner := _defining(kind, name)) is not None}
    hooks |= {copyreg.dispatch_table[kind]} if kind in copyreg.dispatch_table else set()
    if any(not _loses(owner) for owner in hooks):
        return False
    called = _ACCESSORS if _objects.container(kind) is None else (*_ACCESSORS, *_FILLERS)
    return bool(hooks) or _steps(kind) or any(_defining(kind, name) is not None for name in called)


def _loses(owner: Any) -> bool:
    named = _objects.name_of(owner)
    return named[0].partition(".")[0] in _LOSING or named in _LOSING_BASES


def _defining(kind: type, name: str) -> type | None:
    """Return the class, other than those built in, that defines a name."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner if owner is not None and _objects.made_in_python(owner) else None


def layers(environment: Any) -> Iterator[Any]:
    """Return an environment and those that it wraps, the outermost first."""
    waiting, seen = [environment], {id(environment)}
    while waiting:
        layer = waiting.pop(0)
        yield layer
        held = _objects.attributes(layer)
        for value in [*held.values(), *(held.get("_modules") or {}).values()]:  # torch keeps modules in a dict
            if id(value) not in seen and is_layer(value):
                seen.add(id(value))
                waiting.append(value)

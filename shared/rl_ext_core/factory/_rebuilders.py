"""Rules for what cannot be pickled: how a copy of it is made in another process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from rl_ext_core.factory import _kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Rule = Callable[[Any], tuple[Any, ...]]
    Settings = Callable[[Any], Any]

__all__ = ["Fields", "Rebuilder", "add", "adopt", "find", "is_registered", "register_rebuilder", "registered"]


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
_rebuilders: dict[tuple[str, str], Rebuilder] = {}
# Those that a user has registered, in this process alone perhaps.
_registered: set[tuple[str, str]] = set()


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
    name = _name_of(cls)
    _rebuilders[name] = Rebuilder(rule, settings)
    _registered.add(name)


def add(rules: Iterable[tuple[str, Rule, Settings | None]]) -> None:
    """Register rules that every process has, unless there are others for these classes."""
    for cls, rule, settings in rules:
        _rebuilders.setdefault(_name_of(cls), Rebuilder(rule, settings))


def registered() -> dict[tuple[str, str], Rebuilder]:
    """Give what users have registered: a worker needs it too, to look into the copy."""
    return {name: _rebuilders[name] for name in _registered}


def is_registered(kind: type) -> bool:
    """Whether a user has registered the rule for a class or one of its bases."""
    return any(_kinds.name_of(base) in _registered for base in kind.__mro__)


def adopt(rebuilders: Mapping[tuple[str, str], Rebuilder]) -> None:
    """Take over what was registered in another process."""
    _rebuilders.update({name: found for name, found in rebuilders.items() if name not in _registered})
    _registered.update(rebuilders)


def find(instance: object) -> Rebuilder | None:
    """Find the rule of the nearest class among an instance's own and its bases."""
    for base in type(instance).__mro__:
        found = _rebuilders.get(_kinds.name_of(base))
        if found is not None:
            return found
    return None


def _name_of(cls: type | str) -> tuple[str, str]:
    if isinstance(cls, type):
        return _kinds.name_of(cls)
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

"""How an environment is built in another process: by calling something, or by unpickling a graft."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rl_ext_core import processes
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import _graft, _kinds, _rules, _sources


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Builds an environment, here or in another process.

    :ivar origin: by which route: ``"callable"``, ``"class"``, ``"id"``, ``"spec"``, ``"constructor"`` or ``"graft"``
    :ivar packed: what is unpickled, no sooner than when it is needed: that imports the environment's modules
    :ivar line: the source line that a person would write
    :ivar takes_arguments: whether overrides are the callable's arguments; else they are set on the copy
    :ivar parameters: of the callable, as far as they can be named
    :ivar is_anew: whether the callable is unpickled each time, because it holds an environment: two calls give two
    :ivar called: the callable, with specifications of ids that it names: in the process that has packed it the
        caller's own, in others as it was unpickled there
    """

    origin: str
    packed: bytes = dataclasses.field(repr=False)
    line: str
    takes_arguments: bool = False
    parameters: tuple[str, ...] = ()
    is_anew: bool = False
    called: tuple[Any, Iterable[Any]] | None = dataclasses.field(default=None, repr=False, compare=False)

    def build(self, overrides: Mapping[str, Any] | None = None) -> Any:
        """Build it.

        :param overrides: what is different about this one
        :raises InvalidArgumentError: an override names neither an argument nor an attribute
        """
        overrides = overrides or {}
        self.check(overrides, None)
        if self.takes_arguments:
            return _called(*self.unpacked(), overrides)
        environment = _graft.loads(self.packed) if self.origin == "graft" else _called(*self.unpacked(), {})
        _apply(environment, overrides)
        return environment

    def unpacked(self) -> tuple[Any, Iterable[Any]]:
        """Return the callable, with specifications of ids that it names."""
        if self.called is not None:
            return self.called
        called: tuple[Any, Iterable[Any]] = _graft.loads(self.packed)
        if not self.is_anew:
            object.__setattr__(self, "called", called)
        return called

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "called": None}

    def check(self, overrides: Mapping[str, Any], live: Any) -> None:
        """Find out whether overrides name something, as far as that can be told without building it.

        :param live: the instance that it is made from; None: there is none
        :raises InvalidArgumentError: one does not
        """
        for name, value in overrides.items():
            if not self.takes_arguments and live is not None:
                _owner(live, name, value)
            if self.takes_arguments and name not in self.parameters and not self._takes_any:
                raise InvalidArgumentError(
                    f"{self.line} takes no argument {name}={value!r}; it takes {', '.join(self.parameters) or 'none'}. "
                    f"Hand over a function that does, e.g. lambda {name}: MyEnv({name}={name})"
                )

    @property
    def takes_device(self) -> bool:
        """Whether the callable has a parameter of the name ``device``."""
        return "device" in self.parameters

    @property
    def _takes_any(self) -> bool:
        return any(name.startswith("**") for name in self.parameters)


def _called(build: Any, specs: Iterable[Any], arguments: Mapping[str, Any]) -> Any:
    _sources.register_specs(specs)
    try:
        return build(**arguments)
    except Exception as error:
        gymnasium = sys.modules.get("gymnasium")
        unknown = gymnasium is not None and isinstance(error, gymnasium.error.UnregisteredEnv)
        # The user's script may register the id where it says nothing of that to this process.
        if not unknown or not processes.import_main():
            raise
    return build(**arguments)


def by_calling(build: Any, origin: str, line: str, *, takes_arguments: bool) -> Recipe:
    """Pack a callable.

    :raises Refused: it holds what cannot be copied
    """
    called = (build, _sources.specs_named_by(build))
    packed = _graft.dumps(called)
    if not takes_arguments or _holds_environment(build):
        # What an instance was made by is unpickled each time too: copies do not share what they are made of.
        parameters = _parameters(build) if takes_arguments else ()
        return Recipe(origin, packed, line, takes_arguments, parameters, is_anew=True)
    return Recipe(origin, packed, line, takes_arguments, _parameters(build), called=called)


def _holds_environment(build: Any) -> bool:
    return any(not issubclass(type(part), type) and _rules.is_layer(part) for part in _sources.referred(build))


def _parameters(build: Any) -> tuple[str, ...]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # built in
        return ("**unknown",)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in found if one.kind not in positional
    )


def by_grafting(environment: Any, line: str) -> Recipe:
    """Pack an instance with all its Python state.

    :raises Refused: it holds what cannot be copied
    """
    return Recipe("graft", _graft.dumps(environment), line)


def make(spec: Any, **kwargs: Any) -> Any:
    """Let gymnasium build by a specification: in a process that has not registered the id too."""
    import gymnasium

    return gymnasium.make(spec, **kwargs)


def _owner(environment: Any, name: str, value: Any) -> Any:
    """Find the outermost layer that has an attribute.

    :param value: for the message
    :raises InvalidArgumentError: there is none
    """
    found = next((layer for layer in _rules.layers(environment) if _has(layer, name)), None)
    if found is None:
        raise InvalidArgumentError(_unknown(environment, name, value))
    return found


def _apply(environment: Any, overrides: Mapping[str, Any]) -> None:
    """Set attributes, each on the outermost layer that has it.

    :param environment: an environment
    :param overrides: names of attributes and their values
    :raises InvalidArgumentError: no layer has such an attribute, or it does not keep the value
    """
    for name, value in overrides.items():
        layer = _owner(environment, name, value)
        try:
            setattr(layer, name, value)
        except AttributeError as error:
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} cannot be set on {type(layer).__name__}: {error}. {_CONSTRUCT}"
            ) from error
        kept = getattr(layer, name)
        if kept is not value and not _equal(kept, value):
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which keeps {kept!r}. {_CONSTRUCT}"
            )


_CONSTRUCT = (
    "What only the constructor takes needs the constructor: hand over the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


def _has(layer: Any, name: str) -> bool:
    return name in _kinds.attributes(layer) or any(name in vars(base) for base in type(layer).__mro__)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool((one == other) if not hasattr(one, "shape") else (one == other).all())
    except (TypeError, ValueError):
        return False


def _unknown(environment: Any, name: str, value: Any) -> str:
    names = sorted({known for layer in _rules.layers(environment) for known in _kinds.attributes(layer)})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    return (
        f"overrides: no layer of {type(environment).__name__} has the attribute {name}={value!r}; there are "
        f"{', '.join(near)}. {_CONSTRUCT}"
    )

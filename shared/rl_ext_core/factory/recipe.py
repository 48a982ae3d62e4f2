"""``Recipe``: instructions for building an environment in another process."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rl_ext_core import _pickle, processes
from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.factory import record, walk
from rl_ext_core.factory.changes import Change, apply_changes, unpack, unpicklable

__all__ = ["Recipe", "recipe_of_callable"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Instructions for building an environment in this or another process.

    :ivar origin: Form of the source, the value of :attr:`EnvFactory.origin`.
    :ivar packed: Pickle of the callable, or of the environment itself. It is loaded on demand, because that imports the
        environment's modules.
    :ivar source: Source code of a function that builds the same environment.
    :ivar takes_arguments: Whether overrides are arguments of the callable. Otherwise they are set on the copy.
    :ivar parameters: Names of the callable's parameters.
    :ivar reload_each_time: Whether each call unpickles the callable again. A callable that contains an environment
        would otherwise return the same one twice.
    :ivar loaded: Callable and the specifications of ids that it names. In the process that packed it, they are the
        caller's own objects.
    :ivar changes: Changes to set on a copy of an instance.
    """

    origin: str
    packed: bytes = dataclasses.field(repr=False)
    source: str
    takes_arguments: bool = False
    parameters: tuple[str, ...] = ()
    reload_each_time: bool = False
    loaded: tuple[Any, Iterable[Any]] | None = dataclasses.field(default=None, repr=False, compare=False)
    changes: tuple[Change, ...] = dataclasses.field(default=(), repr=False)

    def build(self, overrides: Mapping[str, Any] | None = None) -> Any:
        """Build an environment.

        :param overrides: Arguments or attributes that differ in this one.
        :raises InvalidArgumentError: If an override names neither an argument nor an attribute.
        """
        overrides = overrides or {}
        self.check(overrides, None)
        if self.takes_arguments:
            return _call_with_specs(*self.load(), overrides)
        environment = unpack(self.packed) if self.origin == "pickle" else _call_with_specs(*self.load(), {})
        apply_changes(environment, self.changes)
        _set_overrides(environment, overrides)
        return environment

    def load(self) -> tuple[Any, Iterable[Any]]:
        """Unpickle the callable, and the gymnasium specifications of ids that it names."""
        if self.loaded is not None:
            return self.loaded
        loaded: tuple[Any, Iterable[Any]] = pickle.loads(self.packed)
        if not self.reload_each_time:
            object.__setattr__(self, "loaded", loaded)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        # Pickle again, because the user may have changed the script's globals.
        packed = self.packed if self.loaded is None else _pickle.dumps(self.loaded)
        return {**self.__dict__, "packed": packed, "loaded": None}

    def check(self, overrides: Mapping[str, Any], instance: Any) -> None:
        """Check the names of overrides without building an environment.

        :param instance: Instance that the recipe copies, or None.
        :raises InvalidArgumentError: If an override names neither an argument nor an attribute.
        """
        takes_any = any(name.startswith("**") for name in self.parameters)
        for name, value in overrides.items():
            if not self.takes_arguments and instance is not None:
                _layer_with_attribute(instance, name, value)
            if self.takes_arguments and name not in self.parameters and not takes_any:
                raise InvalidArgumentError(
                    f"{self.source} takes no argument {name}={value!r}: expected "
                    f"{', '.join(self.parameters) or 'none'}. "
                    f"Pass a function that takes it, e.g. lambda {name}: MyEnv({name}={name})"
                )


def _call_with_specs(build: Any, specs: Iterable[Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function after registering the gymnasium ids that it uses."""
    for spec in specs:  # A worker has not registered the ids of the user's script.
        importlib.import_module("gymnasium").registry.setdefault(spec.id, spec)
    try:
        return build(**arguments)
    except Exception as error:
        gymnasium = sys.modules.get("gymnasium")
        unknown = gymnasium is not None and isinstance(error, gymnasium.error.UnregisteredEnv)
        # The main module of the user's script may register the id when it is imported.
        if not unknown or not processes.import_main():
            raise
    return build(**arguments)


def recipe_of_callable(build: Any, origin: str, source: str, *, takes_arguments: bool) -> Recipe:
    """Return the recipe that calls a function.

    :raises NotCopyableError: If the function refers to objects that cannot be pickled.
    """
    loaded = (build, record.named_specs(build))
    # Copies of an instance must not share the arguments of its constructor, so each one unpickles its own.
    reload_each_time = not takes_arguments or any(map(walk.is_layer, record.referenced_values(build)))
    parameters = _parameters(build) if takes_arguments else ()
    try:
        packed = _pickle.dumps(loaded)
    except Exception as error:
        found = walk.fingerprint(build, code=False)
        path = unpicklable(found)
        name = f"{path} ({walk.full_name(type(found.objects[path]))}): " if path else ""
        raise NotCopyableError(
            f"{source} cannot be pickled for a worker: {name}{str(error) or type(error).__name__}. Create that object "
            "inside of the function that builds the environment"
        ) from error
    return Recipe(
        origin, packed, source, takes_arguments, parameters, reload_each_time, None if reload_each_time else loaded
    )


def _parameters(build: Any) -> tuple[str, ...]:
    """Return the names of a function's keyword parameters, with ``**`` before a catch-all's."""
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # Some builtins have no signature.
        return ("**unknown",)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return tuple(
        f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in found if one.kind not in positional
    )


def _layer_with_attribute(environment: Any, name: str, value: Any) -> Any:
    """Find the outermost layer that has an attribute.

    :raises InvalidArgumentError: If no layer has it.
    """
    for layer in walk.layers(environment):
        if name in walk.attributes(layer) or any(name in vars(base) for base in type(layer).__mro__):
            return layer
    names = sorted({known for layer in walk.layers(environment) for known in walk.attributes(layer)})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    raise InvalidArgumentError(
        f"overrides: no layer of {type(environment).__name__} has the attribute {name}={value!r}: expected one such as "
        f"{', '.join(near)}. {_CONSTRUCTOR_ADVICE}"
    )


def _set_overrides(environment: Any, overrides: Mapping[str, Any]) -> None:
    """Set attributes, each on the outermost layer that has it.

    :raises InvalidArgumentError: If no layer has the attribute, or the layer changes the value that is set.
    """
    for name, value in overrides.items():
        layer = _layer_with_attribute(environment, name, value)
        try:
            setattr(layer, name, value)
        except AttributeError as error:
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} cannot be set on {type(layer).__name__}: {error}. {_CONSTRUCTOR_ADVICE}"
            ) from error
        kept = getattr(layer, name)
        if kept is not value and not _equal(kept, value):
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which stores {kept!r} instead. "
                f"{_CONSTRUCTOR_ADVICE}"
            )


_CONSTRUCTOR_ADVICE = (
    "To override arguments of the constructor, pass the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values or arrays are equal; False if they cannot be compared."""
    try:
        return bool((one == other) if not hasattr(one, "shape") else (one == other).all())
    except (TypeError, ValueError):
        return False

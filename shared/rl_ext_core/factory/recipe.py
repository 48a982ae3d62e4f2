"""``Recipe``: instructions for building an environment in another process, with changes to set on it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import difflib
import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_ext_core import _pickle, processes
from rl_ext_core.errors import InvalidArgumentError, NotCopyableError
from rl_ext_core.factory import record, simulators, walk
from rl_ext_core.factory.walk import Fingerprint

__all__ = ["Change", "Examination", "Recipe", "pack_values", "recipe_of_callable", "recipe_of_instance"]

Step = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """A value to set on a copy.

    :ivar path: Path of the value, as in a fingerprint.
    :ivar steps: The way from the environment to the value. Each step is an operation and a name, a key or an index.
    :ivar packed: Pickle of the value.
    """

    path: str
    steps: tuple[Step, ...]
    packed: bytes


@dataclasses.dataclass(frozen=True)
class Examination:
    """Results of building and comparing a copy.

    :ivar problems: Descriptions of differences between a copy and the original, or of errors. Empty if they are equal.
    :ivar changes: Changes to set on each copy.
    :ivar warnings: Paths of values that copies may lack, by the end of a sentence about them.
    :ivar private_bytes: Memory in bytes that the process did not share. None if the system does not report it.
    :ivar read: Result of the caller's reader.
    """

    problems: Sequence[str] = ()
    changes: tuple[Change, ...] = ()
    warnings: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    private_bytes: int | None = None
    read: Any = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Instructions for building an environment in this or another process.

    :ivar origin: Form of the source, the value of :attr:`EnvFactory.origin`.
    :ivar packed: Pickle of ``loaded``. It is loaded on demand, because that imports the environment's modules.
    :ivar source: Source code of a function that builds the same environment.
    :ivar takes_arguments: Whether overrides are arguments of the callable. Otherwise they are set on the copy.
    :ivar parameters: Names of the callable's parameters.
    :ivar loaded: Callable and the specifications of ids that it names, the caller's own objects. None in other
        processes, and for a callable that contains an environment, which would return the same one twice.
    :ivar changes: Changes to set on a copy of an instance.
    """

    origin: str
    packed: bytes = dataclasses.field(repr=False)
    source: str
    takes_arguments: bool = False
    parameters: tuple[str, ...] = ()
    loaded: tuple[Any, Iterable[Any]] | None = dataclasses.field(default=None, repr=False, compare=False)
    changes: tuple[Change, ...] = dataclasses.field(default=(), repr=False)

    def build(self, overrides: Mapping[str, Any], loaded: tuple[Any, Iterable[Any]]) -> Any:
        """Build an environment from the result of :meth:`load`, with other arguments or attributes."""
        self.check(overrides, None)
        environment = _call_with_specs(*loaded, overrides if self.takes_arguments else {})
        if self.takes_arguments:
            return environment
        apply_changes(environment, self.changes)
        _set_overrides(environment, overrides)
        return environment

    def load(self) -> tuple[Any, Iterable[Any]]:
        """Return the callable, and the gymnasium specifications of ids that it names; unpickle them if needed."""
        return pickle.loads(self.packed) if self.loaded is None else self.loaded

    def __getstate__(self) -> dict[str, Any]:
        # Pickle again, because the user may have changed the script's globals.
        packed = self.packed if self.loaded is None else _pickle.dumps(self.loaded)
        return {**self.__dict__, "packed": packed, "loaded": None}

    def check(self, overrides: Mapping[str, Any], instance: Any) -> None:
        """Raise if an override names neither an argument nor an attribute of ``instance``, which may be None."""
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


def recipe_of_callable(build: Any, origin: str, source: str) -> Recipe:
    """Return the recipe that calls a function, unless it refers to objects that cannot be pickled."""
    loaded = (build, record.named_specs(build))
    has_environment = any(map(walk.is_layer, record.referenced_values(build)))
    try:
        packed = _pickle.dumps(loaded)
    except Exception as error:
        raise NotCopyableError(
            f"{source} cannot be pickled for a worker: {_describe_unpicklable(walk.fingerprint(build, code=False))}"
            f"{str(error) or type(error).__name__}. Create that object inside of the function that builds the "
            "environment"
        ) from error
    return Recipe(origin, packed, source, True, _parameters(build), None if has_environment else loaded)


def recipe_of_instance(original: Fingerprint, source: str, *, constructs: bool) -> Recipe:
    """Return the recipe that copies an instance.

    :param source: Source code that constructs it.
    :param constructs: Whether to repeat the recorded calls of its constructors. Otherwise it is pickled.
    :raises NotCopyableError: If that is impossible. The message is a clause about the instance.
    """
    environment, calls = original.objects[""], list[record.Call]()

    def reduce(value: Any) -> Any:
        """Return the call that constructs an environment, for a pickle; None for other values."""
        if not walk.is_layer(value):
            return None
        call = record.call_of(value)
        if call is None:
            raise NotCopyableError(
                "its constructor call was not recorded, because it happened before this package was imported, or in a "
                "function that was not passed to capture_constructors"
            )
        calls.append(call)
        return call, ()

    for path, reason in original.hidden.items():
        file = simulators.name_of_output_file(original.objects.get(path))
        if constructs and file is not None:
            raise NotCopyableError(f"it writes to the file {file} ({path}), which a second instance may overwrite")
        if not constructs:
            raise NotCopyableError(f"after pickling, it lacks {path} ({reason})")
    try:
        packed = _pickle.dumps(environment, reduce=reduce if constructs else None)
    except NotCopyableError:
        raise
    except Exception as error:
        what = "its constructor call cannot be sent to a worker" if constructs else "it cannot be pickled"
        name = "" if constructs else _describe_unpicklable(original)
        raise NotCopyableError(f"{what}: {name}{str(error) or type(error).__name__}") from error
    specs = record.named_specs(calls)
    origin = ("spec" if calls[0].func is record.make_from_spec else "constructor") if constructs else "pickle"
    loaded = (functools.partial(pickle.loads, packed), specs)
    return Recipe(origin, _pickle.dumps(loaded), source, loaded=loaded)


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
    """Find the outermost layer that has an attribute, or raise."""
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
    """Set attributes, each on the outermost layer that has it. Raise if it stores another value."""
    for name, value in overrides.items():
        layer = _layer_with_attribute(environment, name, value)
        try:
            setattr(layer, name, value)
        except AttributeError as error:
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} cannot be set on {type(layer).__name__}: {error}. {_CONSTRUCTOR_ADVICE}"
            ) from error
        kept = getattr(layer, name)
        if kept is not value and not np.array_equal(kept, value):
            raise InvalidArgumentError(
                f"overrides: {name}={value!r} was set on {type(layer).__name__}, which stores {kept!r} instead. "
                f"{_CONSTRUCTOR_ADVICE}"
            )


_CONSTRUCTOR_ADVICE = (
    "To override arguments of the constructor, pass the class, the id or a function, e.g. "
    "as_factory(lambda **kwargs: MyEnv(**kwargs)).for_workers(2, overrides=[...])"
)


# ---- In the process of the original: pack the values that a copy needs.


def pack_values(original: Fingerprint, paths: Sequence[str]) -> list[Change | str]:
    """Pickle the values of an instance at some paths.

    :return: For each path a change, or the reason why its value cannot be set on a copy.
    """
    found = ((path, part) for path, part in original.objects.items() if path not in original.aliases)
    homes = {id(part): path for path, part in found if walk.is_layer(part)}
    return [_pack_value(original, path, homes) for path in paths]


def _pack_value(original: Fingerprint, path: str, homes: Mapping[int, str]) -> Change | str:
    """Pickle the value at a path as a change; return the reason if that is impossible."""
    while path in original.steps and original.steps[path][1] is None:  # It cannot be set itself, but its holder can.
        path = original.steps[path][0]
    steps = _steps_to(original, path)
    if not steps or path not in original.objects:
        return "it cannot be set on a copy"
    for where, reason in original.hidden.items():
        if walk.is_part(where, path):
            return reason
    packed = original.objects[path]

    def location_of(value: Any) -> Any:
        """Return the steps to an environment outside of the value, or None to pickle the object."""
        home = homes.get(id(value), path)
        return None if walk.is_part(home, path) else _steps_to(original, home)

    try:
        return Change(path, steps, _pickle.dumps(packed, location_of))
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__


def _steps_to(original: Fingerprint, path: str) -> tuple[Step, ...] | None:
    """Return the steps from an environment to a path; None if a copy has no such path."""
    found: list[Step] = []
    while path:
        path, operation, key = original.steps.get(path, ("", None, None))
        if operation is None:
            return None
        found.insert(0, (operation, key))
    return tuple(found)


def _describe_unpicklable(original: Fingerprint) -> str:
    """Return path and class of the innermost part of a value that cannot be pickled, as the start of a clause."""
    found, parts = "", dict[str, list[str]]()
    for path, (holder, _, _) in original.steps.items():
        parts.setdefault(holder, []).append(path)
    while True:
        for deeper in parts.get(found, ()):
            try:
                _pickle.dumps(original.objects[deeper])
            except Exception:
                found = deeper
                break
        else:
            return f"{found} ({walk.full_name(type(original.objects[found]))}): " if found else ""


# ---- In any process: set values on a copy.


def _follow_step(holder: Any, step: Step) -> Any:
    operation, key = step
    if operation == "attribute":
        return walk.attributes(holder)[key]
    return getattr(holder, key) if operation == "field" else holder[key]


def apply_changes(environment: Any, changes: Sequence[Change]) -> None:
    """Set the changes of the original on a copy, in place if type and shape of a value allow that.

    :raises LookupError: If a value cannot be set. The message names the path.
    """
    for change in changes:
        try:
            value = _pickle.loads(change.packed, lambda steps: functools.reduce(_follow_step, steps, environment))
            holder = functools.reduce(_follow_step, change.steps[:-1], environment)
            _set_value(holder, *change.steps[-1], value)
        except Exception as error:
            raise LookupError(f"{change.path} cannot be set on a copy: {error!r}") from error


def _set_value(holder: Any, operation: str, key: Any, value: Any) -> None:
    held: Any = None
    with contextlib.suppress(LookupError, AttributeError):
        held = _follow_step(holder, (operation, key))
    if _fits_in_place(held, value):
        with contextlib.suppress(TypeError):  # JAX's arrays are immutable.
            held[...] = value  # Other objects may refer to this array, or a C library to its memory.
            return
    if type(held) is type(value) and isinstance(held, (ctypes.Structure, ctypes.Union, ctypes.Array)):
        ctypes.memmove(ctypes.byref(held), ctypes.byref(value), ctypes.sizeof(value))
    elif operation == "attribute":
        names = walk.instance_dict(holder)
        if names is not None and (key in names or key not in walk.attributes(holder)):
            names[key] = value
        else:  # It is the attribute of a slot.
            object.__setattr__(holder, key, value)
    elif operation == "field":
        setattr(holder, key, value)
    else:
        holder[key] = value


def _fits_in_place(held: Any, value: Any) -> bool:
    """Whether a value can be written into the present array or tensor."""
    is_array = hasattr(held, "dtype") and hasattr(type(held), "__setitem__")
    if type(held) is not type(value) or not is_array or not getattr(held, "shape", ()):
        return False
    is_fixed = getattr(held, "requires_grad", False) or (isinstance(held, np.ndarray) and not held.flags.writeable)
    return bool(held.shape == value.shape and held.dtype == value.dtype and not is_fixed)

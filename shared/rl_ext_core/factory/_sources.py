"""Where environments come from, and what those bring along who build them elsewhere.

A specification, the arguments of a constructor, a game's name; ids that a script has registered, and modules that a
fork server may import; and the source line that a person would write.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, also
from rl_ext_core.factory import _objects, _parts, _rules

_Call = tuple[type, tuple[Any, ...], dict[str, Any]]

# Not an attribute of the instance: copies and comparisons are to see what the environment's author put there. By id:
# not every instance can be hashed, and two of them may be equal.
_calls: dict[int, tuple[weakref.ref[Any], _Call]] = {}


def capture_constructors(cls: type) -> None:
    """Remember the arguments of every instance of a class that is constructed from now on.

    For environments that hold what cannot be copied and for which there is no rule: they can be constructed again. Call
    it once, above the first instance. A copy is compared with the original all the same.

    :param cls: the class; with all that share its metaclass if that one makes instances, as that of TorchRL's
        ``EnvBase`` does
    :raises InvalidTypeError: no class
    """
    if not isinstance(cls, type):
        raise InvalidTypeError(f"cls={cls!r} is not a class; write capture_constructors(MyEnv)")
    meta = next(base for base in inspect.getmro(type(cls)) if "__call__" in vars(base))
    owner, name, capture = (cls, "__init__", _init) if meta is type else (meta, "__call__", _of_metaclass)
    original = getattr(owner, name)
    if owner not in getattr(original, "_captured_for", ()):
        captured: Any = functools.wraps(original)(capture(cls, original))
        captured._captured_for = (owner,)
        setattr(owner, name, captured)


def recorded(instance: Any) -> _Call | None:
    """Return the class, the arguments and the keyword arguments that made an instance, if they are known."""
    known = _calls.get(id(instance))
    return None if known is None else known[1]


def _init(cls: type, original: Callable[..., None]) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:  # of a subclass these are not the arguments
            remember(self, cls, args, kwargs)
        original(self, *args, **kwargs)

    return init


def _of_metaclass(cls: type, original: Callable[..., Any]) -> Any:
    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        instance = original(cls, *args, **kwargs)
        remember(instance, cls, args, kwargs)
        return instance

    return call


# What wraps a user's constructor travels with his class, and this name with it: by reference, without what it keeps.
def remember(instance: Any, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Keep the arguments of an instance for as long as it lives."""
    key = id(instance)
    try:
        reference = weakref.ref(instance, lambda _: _calls.pop(key, None))
    except TypeError:  # of a class with slots
        return
    _calls[key] = reference, (cls, args, dict(kwargs))


def is_spec(value: Any) -> bool:
    """Whether this is a specification."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(value), gymnasium.envs.registration.EnvSpec)


def spec_of(environment: Any) -> Any:
    """Copy the specification by which gymnasium makes all layers of an environment; None: there is none."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(environment, gymnasium.Env):
        return None
    with without_kept_specs(environment):
        try:
            spec = copy.deepcopy(environment.spec)
        except Exception:  # of wrappers that do not tell their arguments
            return None
    if spec is None or any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
        return None
    return spec


@contextlib.contextmanager
def without_kept_specs(environment: Any) -> Iterator[None]:
    """Have an environment as if its wrappers had never been asked for their specification; it is left as it was."""
    name = "_cached_spec"
    held = [held for layer in _rules.layers(environment) if name in (held := _objects.dictionary(layer) or {})]
    kept = [one[name] for one in held]
    for one in held:
        one[name] = None
    try:
        yield
    finally:
        for one, spec in zip(held, kept, strict=True):
            one[name] = spec


def spec_of_id(name: str) -> Any:
    """Find gymnasium's specification by an id, as its ``make`` does: ``"package:Env-v0"``, ``"Env"`` for the latest.

    :raises InvalidArgumentError: there is none; it can be caught as what gymnasium raises, too
    """
    import gymnasium

    module, _, env_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        versions = {
            spec.version: spec
            for spec in list(gymnasium.registry.values())
            if spec.version is not None and spec.id == f"{env_id}-v{spec.version}"
        }
        # The specification itself travels: a worker has not registered what a script or a notebook has.
        return versions[max(versions)] if versions else gymnasium.spec(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise also(InvalidArgumentError, error)(
            f"gymnasium does not know the id {name!r}: {str(error).rstrip('.')}. Import the package that registers it "
            f'above this line, or name it in the id: "package:{env_id}"'
        ) from error


def game_of_id(name: str) -> Callable[..., Any] | None:
    """Return what builds a game, if stable-retro is installed and has one of this name."""
    found = find_spec("stable_retro")
    places = (found.submodule_search_locations if found else None) or ()
    folders = [Path(place, "data", kind, name) for place in places for kind in ("stable", "contrib", "experimental")]
    if not name or name != Path(name).name or not any(folder.is_dir() for folder in folders):
        return None
    return functools.partial(_make_game, name)


def _make_game(game: str, **kwargs: Any) -> Any:
    import stable_retro

    # Its own default opens a window.
    return stable_retro.make(game, **{"render_mode": "rgb_array", **kwargs})


def specs_named_by(build: Any) -> list[Any]:
    """Return the specifications of ids that stand in a function's code, as far as gymnasium does not bring them.

    Where a script or a notebook has registered them, a worker has not.
    """
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return []
    names = (value for value in referred(build) if issubclass(type(value), str))
    found = {name: gymnasium.registry[name] for name in names if name in gymnasium.registry}
    return [copy.deepcopy(spec) for spec in found.values() if not str(spec.entry_point).startswith("gymnasium.")]


def register_specs(specs: Iterable[Any]) -> None:
    """Register specifications of ids that this process does not know."""
    for spec in specs:
        import gymnasium

        gymnasium.registry.setdefault(spec.id, spec)


def referred(build: Any) -> Iterator[Any]:
    """Return what a callable is and refers to: a partial's arguments; a function's constants, variables and globals."""
    waiting, seen = [build], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:  # a function may be among its own variables
            continue
        seen.add(id(value))
        if issubclass(type(value), functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
            continue
        yield value
        if type(value) is types.FunctionType:
            yield from _texts_in(value.__code__)
            read = _parts.globals_in(value.__code__)
            yield from (value.__globals__[name] for name in sorted(read) if name in value.__globals__)
            waiting += [*(value.__defaults__ or ()), *_parts.variables(value)]


def _texts_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts_in(constant)


# Packages that import without starting a thread, a display or CUDA, and without asking which device to use. The user's
# own modules are never among them: they change between two runs of a notebook cell.
# What one import brings along needs no other name: each list has a fork server of its own, which takes time to start
# and memory to keep. Hence the module that brings all of a package, where there is one.
_SAFE: dict[str, str | None] = {
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
    "torch": "torch",
    "torchrl": "torchrl.envs",
    "torchrl_ext": "torchrl_ext",
    **dict.fromkeys(("ale_py", "dm_control", "dm_env", "dmlab2d", "meltingpot", "mujoco", "pettingzoo", "vmas")),
    "rl_ext_core": None,
}
_BRINGS = {
    "torchrl_ext": {"gymnasium", "tensordict", "torch", "torchrl.envs"},
    "torchrl.envs": {"tensordict", "torch"},
}


def merged_modules(*lists: Iterable[str]) -> tuple[str, ...]:
    """Return one list for several, the same one whatever their order is."""
    names = {name for names in lists for name in names}
    brought = {other for name in names for other in _BRINGS.get(name, ())}
    return tuple(sorted(names - brought))


def safe_to_preload(names: Iterable[str]) -> tuple[str, ...]:
    """Keep those that a fork server may import once for all workers."""
    return merged_modules(_whole(name) for name in names if name.partition(".")[0] in _SAFE)


def _whole(name: str) -> str:
    if name.startswith("gymnasium.envs.mujoco"):
        return "gymnasium.envs.mujoco"
    return _SAFE[name.partition(".")[0]] or name


def modules_of_instance(environment: Any) -> tuple[str, ...]:
    """Name the modules of an environment's layers."""
    return safe_to_preload([base.__module__ for layer in _rules.layers(environment) for base in type(layer).__mro__])


def modules_of_callable(build: Any) -> tuple[str, ...]:
    """Name the modules of what a function refers to, as far as its code shows."""
    return safe_to_preload(module for value in referred(build) for module in _modules_of(value))


def _modules_of(value: Any) -> Iterator[str]:
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        yield value.__name__
    elif issubclass(kind, type):
        yield from (_objects.name_of(base)[0] for base in value.__mro__)
    elif kind is types.FunctionType:
        yield value.__module__ or ""
    elif is_spec(value):
        yield str(value.entry_point).partition(":")[0]
    else:
        yield _objects.name_of(kind)[0]


_LONGEST = 60
# What is wrapped is found under one of these names.
_INNER = ("base_env", "env", "_env")


def line_of_callable(build: Any) -> str:
    """Return the line of a function, a class or a partial."""
    if isinstance(build, functools.partial):
        return f"lambda: {_name(build.func)}({_arguments(build.args, build.keywords)})"
    if isinstance(build, type):
        return f"lambda: {_name(build)}()"
    if getattr(build, "__name__", "") == "<lambda>":
        return _of_lambda(build) or "lambda: ..."
    return _name(build) if inspect.isroutine(build) else f"{_name(type(build))}(...)"


def _of_lambda(build: Any) -> str | None:
    # Out of the whole file: the lines of a lambda alone are often no valid Python.
    try:
        source = "".join(inspect.findsource(build)[0])
        tree = ast.parse(source)
    except Exception:  # typed at a prompt, changed since, too deep for the parser: it is for messages alone
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _is_of(node, build.__code__)]
    if len(found) != 1:
        return None
    text = ast.get_source_segment(source, found[0]) or ""
    return text if "\n" not in text else ast.unparse(found[0])


def _is_of(node: ast.Lambda, code: Any) -> bool:
    if node.lineno != code.co_firstlineno:
        return False
    if not hasattr(code, "co_positions"):  # Python 3.10
        return True
    begin = node.body.lineno, node.body.col_offset
    places = [(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None]
    return begin in places


def line_of_spec(spec: Any) -> str:
    """Return the line of a gymnasium specification."""
    line = f"gymnasium.make({_arguments((spec.id,), dict(_told(spec)))})"
    for wrapper in spec.additional_wrappers:
        line = f"{wrapper.name}({', '.join(filter(None, [line, _arguments((), wrapper.kwargs or {})]))})"
    return f"lambda: {line}"


def _told(spec: Any) -> Iterator[tuple[str, Any]]:
    """Return the arguments that make this of what is registered under the id."""
    known = sys.modules["gymnasium"].registry.get(spec.id)
    usual = {} if known is None else known.kwargs
    yield from (pair for pair in spec.kwargs.items() if repr(pair[1]) != repr(usual.get(pair[0], pair)))
    if known is not None and spec.max_episode_steps != known.max_episode_steps:
        yield "max_episode_steps", -1 if spec.max_episode_steps is None else spec.max_episode_steps
    if known is not None and spec.disable_env_checker and not known.disable_env_checker:
        yield "disable_env_checker", True


def line_of_instance(environment: Any) -> str:
    """Return the line of an instance: by its specification or what is known of its constructor, else with dots."""
    return f"lambda: {_expression(environment)}"


def _expression(environment: Any) -> str:
    spec = spec_of(environment)
    if spec is not None:
        return line_of_spec(spec).removeprefix("lambda: ")
    call = recorded(environment)
    if call is not None:
        return f"{_name(call[0])}({_arguments(*call[1:])})"
    kind, held = type(environment), _objects.attributes(environment)
    held |= held.get("_modules") or {}  # where torch's modules have theirs
    if "_constructor_kwargs" in held:
        return f"{_name(kind)}({_of_torchrl(held)})"
    if "_ezpickle_args" in held:
        return f"{_name(kind)}({_arguments(held['_ezpickle_args'], held['_ezpickle_kwargs'])})"
    inner = next((held[name] for name in _INNER if hasattr(held.get(name), "step")), None)
    if inner is None:
        return f"{_name(kind)}({'...' if _takes(kind) else ''})"
    rest = f", {_name(type(held['_transform']))}(...)" if "_transform" in held else ", ..." if _takes(kind) > 1 else ""
    return f"{_name(kind)}({_expression(inner)}{rest})"


def _of_torchrl(held: Mapping[str, Any]) -> str:
    options = dict(held["_constructor_kwargs"])
    # What its constructors take out of the arguments before they are kept.
    options |= {"frame_skip": held["frame_skip"]} if held.get("frame_skip", 1) != 1 else {}
    options |= {"device": str(held["_device"])} if held.get("_device") is not None else {}
    if options.get("disable_env_checker") is True:  # by default
        del options["disable_env_checker"]
    first = [_expression(options.pop("env"))] if "env" in options else []
    args = (options.pop("env_name"),) if "env_name" in options else ()
    return ", ".join(filter(None, [*first, _arguments(args, options)]))


def _takes(kind: type) -> int:
    """Count the parameters of a constructor; many: it does not say."""
    try:
        return len(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return sys.maxsize


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(_short, args), *(f"{name}={_short(value)}" for name, value in kwargs.items())])


def _short(value: Any) -> str:
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    text = _expression(value) if hasattr(value, "step") and hasattr(value, "reset") else repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text else "..."


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__name__
    return name.rpartition("<locals>.")[2]

"""Record constructor calls of environments, and format them as source code.

:func:`start_recording` patches the classes and functions in ``_RECORDED``. Each environment then stores the call that
constructed it, with its arguments. :func:`call_of` returns the call that constructs an equal environment.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_ext_core._environment_source import qualified_id
from rl_ext_core._import_path import call_when_imported, hide_from_warnings
from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, _combined_error_class
from rl_ext_core.factory.walk import RECORD, full_name, globals_in, instance_dict, is_layer

__all__ = ["call_of", "capture_constructors", "recorded_call", "start_recording"]

# Recorded classes, with all their subclasses, and functions that build environments, by module.
_RECORDED: dict[str, tuple[str, ...]] = {
    "dm_control.locomotion.soccer": ("load",),
    "dm_control.manipulation": ("load",),
    "dm_control.suite": ("load", "build_environment"),
    "dm_env._environment": ("Environment",),
    "gym.core": ("Env",),
    "gym.envs.registration": ("make",),
    "gymnasium.core": ("Env",),
    "gymnasium.envs.registration": ("make", "make_vec"),
    "gymnasium.vector.vector_env": ("VectorEnv",),
    "meltingpot.scenario": ("build", "build_from_config"),
    "meltingpot.substrate": ("build", "build_from_config"),
    "pettingzoo.utils.env": ("AECEnv", "ParallelEnv"),
    "robosuite.environments.base": ("MujocoEnv",),
    "robosuite.wrappers.wrapper": ("Wrapper",),
    "stable_baselines3.common.vec_env.base_vec_env": ("VecEnv",),
    "torchrl.envs.common": ("EnvBase",),
    "vmas.make_env": ("make_env",),
}

_Recorded = TypeVar("_Recorded", bound=Callable[..., Any])


# A call that creates an object.
Call = functools.partial[Any]


# ---- Recording


class _Record:
    """The call that created an instance, stored as its attribute.

    Copies and pickles of the instance contain None instead.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, instance: Any, call: Call) -> None:
        # copy.copy() copies the record, too. The id shows that it describes another instance.
        self.owner, self.call = id(instance), call

    def __reduce__(self) -> Any:
        return type(None), ()

    def __eq__(self, other: object) -> bool:  # Classes may compare instances by their attributes.
        return other is None or isinstance(other, _Record)


def start_recording() -> None:
    """Record calls of the classes and functions in ``_RECORDED`` from now on.

    Modules are patched once they are imported. References to patched functions in modules that were imported earlier
    are replaced, too.
    """
    call_when_imported(_RECORDED, _hook_module)


def _hook_module(module: Any) -> None:
    for name in _RECORDED[module.__name__]:
        found = vars(module).get(name)
        if isinstance(found, (type, types.FunctionType)):
            capture_constructors(found)


def capture_constructors(maker: _Recorded) -> _Recorded:
    """Record the arguments of a class or function from now on.

    :func:`as_factory` uses them to construct the instances again.

    Environments of the supported libraries are recorded already. Use this for your own classes and functions if their
    instances cannot be pickled. Call it before the first instance is created, or use it as a decorator.

    .. code-block:: python

        capture_constructors(MyEnv)

    :param maker: A class or a function. Subclasses are recorded, too. If the metaclass of the class defines
        ``__call__``, all classes of that metaclass are recorded. A function is replaced in all modules that contain it
        under its own name.
    :return: The class, or the recording function.
    :raises InvalidTypeError: If ``maker`` is neither a class nor a Python function.
    """
    if isinstance(maker, types.FunctionType):
        return maker if _is_hook(maker) else _hook_function(maker)  # type: ignore[return-value]
    if not isinstance(maker, type):
        raise InvalidTypeError(
            f"maker={maker!r} is not a class or function: expected one that builds environments. "
            "Use capture_constructors(MyEnv)"
        )
    meta = next(base for base in inspect.getmro(type(maker)) if "__call__" in vars(base))
    if meta is not type:
        _hook_metaclass(meta)
    elif not _is_hook(maker.__new__):
        _hook_new(maker)
    return maker


def _is_hook(function: Any) -> bool:
    return getattr(function, "_records_calls", False) is True


# These functions may be pickled by value, with a class of the user's. Therefore they must not refer to global tables.


def _hook_new(owner: Any) -> None:
    """Replace the ``__new__`` of a class by a function that records the call."""
    original = getattr(vars(owner).get("__new__"), "__func__", None)

    @hide_from_warnings
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        create: Any = original or super(owner, cls).__new__
        is_call = cls.__new__ is new and type(cls).__call__ is type.__call__
        # object.__new__ rejects arguments if a class overrides __new__, as this function does.
        left = create is object.__new__ and _is_hook(cls.__new__) and cls.__init__ is not object.__init__
        instance = create(cls) if left else create(cls, *args, **kwargs)
        # A subclass's __new__ or metaclass may pass other arguments than those of the call.
        if is_call and type(instance) is cls:
            _store_record(instance, _freeze_call(cls, args, kwargs))
        return instance

    new._records_calls = True
    # inspect.signature() reads __new__ for classes without their own __init__.
    new.__signature__ = inspect.Signature([inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)])
    owner.__new__ = staticmethod(new if original is None else functools.wraps(original)(new))


def _hook_metaclass(meta: Any) -> None:
    """Record calls of the classes of a metaclass and of metaclasses derived from it."""
    if not _is_hook(meta.__call__):
        # A derived metaclass may consume arguments, so its own __call__ is patched as well.
        @hide_from_warnings
        def hook_derived(derived: Any, /, **kwargs: Any) -> None:
            super(meta, derived).__init_subclass__(**kwargs)
            _hook_call(derived)

        meta.__init_subclass__ = classmethod(hook_derived)
    waiting = [meta]
    for each in waiting:
        _hook_call(each)
        waiting += type.__subclasses__(each)


def _hook_call(meta: Any) -> None:
    """Replace the ``__call__`` of a metaclass by a function that records the call."""
    original: Any = vars(meta).get("__call__")
    if original is None or _is_hook(original):
        return

    @functools.wraps(original)
    @hide_from_warnings
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        frozen = _freeze_call(cls, args, kwargs)
        instance = original(cls, *args, **kwargs)
        if type(cls).__call__ is call:
            _store_record(instance, frozen)
        return instance

    call._records_calls = True  # type: ignore[attr-defined]
    meta.__call__ = call


def _hook_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function, in all modules, by one that records the call; return that."""

    @functools.wraps(function)
    @hide_from_warnings
    def maker(*args: Any, **kwargs: Any) -> Any:
        frozen = _freeze_call(maker, args, kwargs)
        instance = function(*args, **kwargs)
        if not any(instance is part for part in (*args, *kwargs.values())):
            _store_record(instance, frozen)
        return instance

    maker._records_calls = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        with contextlib.suppress(AttributeError):  # sys.modules may contain objects without a __dict__.
            names = object.__getattribute__(module, "__dict__")  # getattr() would load a lazy module.
            if names.get(function.__name__) is function:
                names[function.__name__] = maker
    return maker


def _store_record(instance: Any, call: Call | None) -> None:
    """Store the call that created an instance in its ``__dict__``, if it has one."""
    held = instance_dict(instance)
    if call is not None and held is not None:
        held[RECORD] = _Record(instance, call)


def _freeze_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return a call with copies of its arguments, which environments may change later. None if that fails."""
    try:
        return functools.partial(function, *_freeze(args), **_freeze(kwargs))
    except Exception:  # The user's constructor must work, also with a list that contains itself.
        return None


_MAX_COPIED_ITEMS = 10_000  # Containers with more items, and arrays of more than 100 times as many bytes, are shared.


def _freeze(value: Any) -> Any:
    """Copy plain containers and arrays, except long ones, also in containers."""
    kind = type(value)
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= 100 * _MAX_COPIED_ITEMS else value
    if kind not in (dict, list, tuple, set, frozenset) or len(value) > _MAX_COPIED_ITEMS:
        return value
    return {key: _freeze(part) for key, part in value.items()} if kind is dict else kind(map(_freeze, value))


def recorded_call(instance: Any) -> Call | None:
    """Return the call that created an instance, or None if it was not recorded."""
    record = (instance_dict(instance) or {}).get(RECORD)
    if record is None or record.owner != id(instance):
        return None
    call: Call = record.call
    # Transforms may have been appended since, so the present ones replace the argument.
    if re.fullmatch(r"torchrl\..*\.TransformedEnv", full_name(call.func)):
        kwargs = {name: value for name, value in call.keywords.items() if name not in ("env", "base_env", "transform")}
        return functools.partial(call.func, instance.base_env, instance.transform.clone(), *call.args[2:], **kwargs)
    return call


def call_of(instance: Any) -> Call | None:
    """Return the call that constructs an equal instance, or None if it was not recorded."""
    raw = recorded_call(instance)
    made = raw is None or full_name(raw.func) == "gymnasium.envs.registration.make"
    if not made or (spec := spec_of(instance)) is None:
        return raw
    # The constructor receives the specification's own containers, and may have changed them.
    given = {} if raw is None else {key: raw.keywords[key] for key in raw.keywords.keys() & spec.kwargs.keys()}
    spec.kwargs.update({key: part for key, part in given.items() if type(part) in (dict, list, np.ndarray)})
    return functools.partial(make_from_spec, spec)


# ---- gymnasium specifications and stable-retro games


def make_from_spec(spec: Any, **kwargs: Any) -> Any:
    """Call ``gymnasium.make`` with a specification, which need not be registered in this process."""
    import gymnasium

    return gymnasium.make(spec, **kwargs)


def is_spec(value: Any) -> bool:
    """Whether a value is a gymnasium specification."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(value), gymnasium.envs.registration.EnvSpec)


def spec_of(environment: Any) -> Any:
    """Copy the specification of an environment with its wrappers. None if there is none."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(environment, gymnasium.Env):
        return None
    try:
        spec = copy.deepcopy(environment.spec)
    except Exception:  # `spec` raises for wrappers that do not record their arguments.
        return None
    if spec is None or any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
        return None
    return spec


def spec_of_id(name: str) -> Any:
    """Look up a gymnasium specification by its id, with the rules of ``gymnasium.make``.

    :param name: An id such as ``"CartPole-v1"``, ``"package:Env-v0"``, or ``"CartPole"`` for the latest version.
    :raises InvalidArgumentError: If the id is unknown. The error is also an instance of the one that gymnasium raises.
    """
    import gymnasium
    from gymnasium.envs import registration

    module, _, env_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        namespace, base, version = registration.parse_env_id(env_id)
        if version is None:
            version = registration.find_highest_version(namespace, base)
        # Workers get the specification, not the id, because only the user's script may have registered it.
        return gymnasium.spec(registration.get_env_id(namespace, base, version))
    except (gymnasium.error.Error, ImportError) as error:
        raise _combined_error_class(InvalidArgumentError, error)(
            f"gymnasium does not know the id {name!r}: {str(error).rstrip('.')}. Import the module that registers it, "
            f'or use "{qualified_id(env_id)}"'
        ) from error


def game_of_id(name: str) -> Callable[..., Any] | None:
    """Return a function that builds a stable-retro game, or None if there is no game of this name."""
    found = find_spec("stable_retro")
    places = (found.submodule_search_locations if found else None) or ()
    folders = [Path(place, "data", kind, name) for place in places for kind in ("stable", "contrib", "experimental")]
    if not name or name != Path(name).name or not any(folder.is_dir() for folder in folders):
        return None
    return functools.partial(_make_game, name)


def _make_game(game: str, **kwargs: Any) -> Any:
    """Make a stable-retro game, by default without a window."""
    import stable_retro

    # stable-retro's default render mode opens a window.
    return stable_retro.make(game, **{"render_mode": "rgb_array", **kwargs})


def named_specs(build: Any) -> list[Any]:
    """Return specifications of the ids in a function or call, except gymnasium's own.

    Workers need them, because only the user's script may have registered the ids.
    """
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return []
    names = (value for value in referenced_values(build) if issubclass(type(value), str))
    found = {name: gymnasium.registry[name] for name in names if name in gymnasium.registry}
    return [copy.deepcopy(spec) for spec in found.values() if not str(spec.entry_point).startswith("gymnasium.")]


def referenced_values(build: Any) -> Iterator[Any]:
    """Yield a callable and the values that it refers to.

    These are arguments, constants, closure variables, globals, and modules that it imports itself.
    """
    waiting, seen = [build], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:  # A function may refer to itself.
            continue
        seen.add(id(value))
        kind = type(value)
        if issubclass(kind, functools.partial):
            waiting += [value.func, value.args, value.keywords]
        elif kind in (list, tuple, dict):
            waiting += value.values() if kind is dict else value
        elif kind is types.CodeType:
            waiting += value.co_consts
            yield from (sys.modules[name] for name in value.co_names if name in sys.modules)  # imported by the code
        else:
            yield value
        if kind is types.FunctionType and not _is_hook(value):
            names = globals_in(value.__code__) & value.__globals__.keys()
            yield from (value.__globals__[name] for name in sorted(names))
            cells = (cell for cell in value.__closure__ or () if cell != types.CellType())  # Empty cells have no value.
            waiting += [value.__code__, *(value.__defaults__ or ()), *(cell.cell_contents for cell in cells)]


# ---- Modules that a fork server may import

# Packages whose import starts no thread, display or CUDA, and reads no device setting. The value is the module to
# import, if one module imports the whole package. Modules of the user are never preloaded, because they change between
# two runs of a notebook cell. Each list of modules gets its own fork server, so lists should be few.
_PRELOADABLE: dict[str, str | None] = {
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
    "torch": "torch",
    "torchrl": "torchrl.envs",
    "torchrl_ext": "torchrl_ext",
    **dict.fromkeys(("ale_py", "dm_control", "dm_env", "dmlab2d", "meltingpot", "mujoco", "pettingzoo", "vmas")),
    "rl_ext_core": None,
}
_IMPORTED_WITH = {
    "torchrl_ext": {"gymnasium", "rl_ext_core.factory.compare", "tensordict", "torch", "torchrl.envs"},
    "torchrl.envs": {"tensordict", "torch"},
}


def merge_modules(*lists: Iterable[str]) -> tuple[str, ...]:
    """Merge lists of modules into a sorted one, without modules that another one imports."""
    names = {name for names in lists for name in names}
    brought = {other for name in names for other in _IMPORTED_WITH.get(name, ())}
    return tuple(sorted(names - brought))


def preloadable_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that a fork server may import for all workers, of those that an environment needs."""
    whole, top_packages = "gymnasium.envs.mujoco", {name: name.partition(".")[0] for name in names}
    safe = {name: _PRELOADABLE[top] or name for name, top in top_packages.items() if top in _PRELOADABLE}
    return merge_modules(whole if name.startswith(whole) else module for name, module in safe.items())


def modules_of_callable(build: Any) -> tuple[str, ...]:
    """Return the preloadable modules of the values that a function refers to."""
    return preloadable_modules(module for value in referenced_values(build) for module in _modules_of(value))


def _modules_of(value: Any) -> list[str]:
    gymnasium = sys.modules.get("gymnasium")
    if type(value) is str and gymnasium is not None:  # The string may be an id.
        value = gymnasium.registry.get(value)
    if is_spec(value):
        return [str(value.entry_point).partition(":")[0]]
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return [value.__name__]
    parts = inspect.getmro(value) if issubclass(kind, type) else [value if kind is types.FunctionType else kind]
    return [str(getattr(part, "__module__", "")) for part in parts]


# ---- Source code for messages


def source_of_callable(build: Any) -> str:
    """Return the source code of a function, a class or a partial."""
    if isinstance(build, (functools.partial, type)):
        return f"lambda: {_source_of_call(functools.partial(build))}"
    name = _display_name(build) if inspect.isroutine(build) else f"{_display_name(type(build))}(...)"
    return "lambda: ..." if name == "<lambda>" else name


def _source_of_call(call: Call) -> str:
    if call.func is make_from_spec and call.args and is_spec(call.args[0]):
        return _source_of_spec(call.args[0])
    name, module = _display_name(call.func), str(getattr(call.func, "__module__", ""))
    if module in _RECORDED and not isinstance(call.func, type):
        name = f"{module.removesuffix('.envs.registration').removesuffix(f'.{name}')}.{name}"
    return f"{name}({_format_arguments(call.args, call.keywords)})"


def _source_of_spec(spec: Any) -> str:
    """Return the source code that calls ``gymnasium.make`` for a specification.

    Only arguments that differ from the registered ones are shown.
    """
    known = sys.modules["gymnasium"].registry.get(spec.id, spec)
    usual = {} if known is spec else known.kwargs
    kwargs = {name: value for name, value in spec.kwargs.items() if repr(value) != repr(usual.get(name, ...))}
    if spec.max_episode_steps != known.max_episode_steps:
        kwargs["max_episode_steps"] = -1 if spec.max_episode_steps is None else spec.max_episode_steps
    line = f"gymnasium.make({_format_arguments((spec.id,), kwargs)})"
    for wrapper in spec.additional_wrappers:
        line = f"{wrapper.name}({', '.join(filter(None, [line, _format_arguments((), wrapper.kwargs or {})]))})"
    return line


def source_of_environment(environment: Any) -> str:
    """Return the source code of the call that creates an environment, with dots if it was not recorded."""
    call = call_of(environment)
    return f"{_display_name(type(environment))}(...)" if call is None else _source_of_call(call)


def _format_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(_short_source, args), *(f"{name}={_short_source(value)}" for name, value in kwargs.items())])


def _short_source(value: Any) -> str:
    """Return the source of a value, or dots if it is long or not valid Python."""
    if is_layer(value):
        return source_of_environment(value)
    is_named = isinstance(value, type) or inspect.isroutine(value)
    text = _display_name(value).replace("<lambda>", "...") if is_named else repr(value)
    return text if len(text) <= 60 and "\n" not in text and " at 0x" not in text else "..."


def _display_name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", None) or type(value).__name__
    return name.rpartition("<locals>.")[2]

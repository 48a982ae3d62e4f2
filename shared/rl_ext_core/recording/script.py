"""Scripts that repeat a crash by calls of gymnasium, without this package."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.recording.capsule import Capsule, _split_actions
from rl_ext_core.recording.generators import restore_generator
from rl_ext_core.recording.replay import DEFAULT_TIMEOUT

__all__ = ["code_of_factory", "write_script"]

_MAX_INLINE = 2000


class _NoCodeError(Exception):
    """A value cannot be written as code."""


def code_of_factory(factory: Any) -> list[str]:
    """Return lines of code that define ``build_crashing_env``, without this package; empty if that is not possible.

    :param factory: :class:`~rl_ext_core.factory.EnvFactory` in the process that created it
    """
    try:
        return _code_of_factory(factory)
    except Exception:  # the user's objects may raise anything
        return []


def _code_of_factory(factory: Any) -> list[str]:
    """Return the lines of code that define ``build_crashing_env``; raise if that is not possible."""
    recipe = factory._recipe
    if recipe.changes or recipe.origin == "pickle":
        raise _NoCodeError
    build = recipe.load()[0]
    lines: list[str] = []
    arguments = _code_of_arguments((), factory.overrides, lines)
    if isinstance(build, functools.partial) and build.func.__name__ == "make_from_spec":
        made = _code_of_spec(build.args[0], {**build.keywords, **factory.overrides}, lines)
        body = [f"    env = {made}"]
    else:
        body = [f"    env = {_code_of_callable(build, lines)}({arguments})"]
    for adapt in factory._adapters:
        body.append(f"    env = {_code_of_callable(adapt, lines, 'env')}")
    return [*dict.fromkeys(lines), "", "", "def build_crashing_env():", *body, "    return env"]


def _code_of_callable(build: Any, lines: list[str], argument: str | None = None) -> str:
    """Return an expression for a callable, or for its call with an argument, and add the imports that it needs."""
    given = () if argument is None else (argument,)
    if isinstance(build, functools.partial):
        function = _code_of_callable(build.func, lines)
        rest = ", ".join(filter(None, [*(_code_of(value, lines) for value in build.args), *given]))
        names = _code_of_arguments((), build.keywords, lines)
        text = ", ".join(filter(None, [rest, names]))
        return f"{function}({text})" if given else f"(lambda: {function}({text}))"
    if isinstance(build, types.FunctionType) and build.__name__ == "<lambda>":
        name = f"({_code_of_lambda(build, lines)})"
    elif isinstance(build, (type, types.FunctionType)):
        name = _import_object(build, lines)
    else:
        raise _NoCodeError
    return f"{name}({argument})" if given else name


def _code_of_lambda(build: types.FunctionType, lines: list[str]) -> str:
    """Return the source of a lambda, and import the names that it uses."""
    from rl_ext_core.factory.record import source_of_callable

    source = source_of_callable(build)
    tree = ast.parse(source, mode="eval")
    if build.__closure__ or any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree)):
        raise _NoCodeError
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name in sorted(loaded - arguments - stored - set(dir(builtins))):
        value = build.__globals__[name]
        if isinstance(value, types.ModuleType):
            _add_folder(value.__name__, lines)
            lines.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif isinstance(value, (type, types.FunctionType)):
            code = _import_object(value, lines)
            lines.extend([] if code == name else [f"{name} = {code}"])
        else:
            lines.append(f"{name} = {_code_of(value, lines)}")
    return source


def _import_object(value: Any, lines: list[str]) -> str:
    """Return the name of a class or function, and add its import."""
    module, (top, *_) = value.__module__, value.__qualname__.split(".")
    if "<locals>" in value.__qualname__:
        raise _NoCodeError
    if module in ("__main__", "__mp_main__"):
        path = os.path.abspath(_file_of(value))
        if "__name__" not in Path(path).read_text(encoding="utf-8"):  # importing it would start the training
            raise _NoCodeError
        lines += ["import runpy", f"{top} = runpy.run_path({path!r})[{top!r}]"]
    else:
        if inspect.getattr_static(sys.modules[module], top, None) is None:
            raise _NoCodeError
        _add_folder(module, lines)
        lines.append(f"from {module} import {top}")
    return str(value.__qualname__)


def _file_of(value: Any) -> str:
    """Return the file that defines a class or a function of the main module."""
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    for function in functions:
        if isinstance(function, types.FunctionType) and os.path.isfile(function.__code__.co_filename):
            return function.__code__.co_filename
    raise _NoCodeError


def _add_folder(module: str, lines: list[str]) -> None:
    """Add a line for modules that are not installed, so that the script finds them."""
    path = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    if path is None or path.startswith(tuple(installed)):
        return
    folder = Path(path).resolve().parent
    if Path(path).name == "__init__.py":
        folder = folder.parent
    lines += ["import sys", f"sys.path.insert(0, {str(folder)!r})"]


def _code_of_spec(spec: Any, overrides: dict[str, Any], lines: list[str]) -> str:
    """Return the call of ``gymnasium.make`` for a specification, and add its registration if it is not gymnasium's."""
    lines.append("import gymnasium")
    if not str(spec.entry_point).startswith("gymnasium."):
        if isinstance(spec.entry_point, str):
            _add_folder(spec.entry_point.partition(":")[0], lines)
            entry = repr(spec.entry_point)
        else:
            entry = _code_of_callable(spec.entry_point, lines)
        lines.append(
            f"gymnasium.register({spec.id!r}, {entry}, max_episode_steps={spec.max_episode_steps!r}, "
            f"order_enforce={spec.order_enforce!r}, disable_env_checker={spec.disable_env_checker!r})"
        )
    steps = -1 if spec.max_episode_steps is None else spec.max_episode_steps
    kwargs = {**spec.kwargs, "max_episode_steps": steps, "disable_env_checker": spec.disable_env_checker, **overrides}
    code = f"gymnasium.make({spec.id!r}, {_code_of_arguments((), kwargs, lines)})"
    for wrapper in spec.additional_wrappers:
        module, _, name = wrapper.entry_point.partition(":")
        if module in ("__main__", "__mp_main__") or wrapper.kwargs is None:
            raise _NoCodeError
        _add_folder(module, lines)
        lines.append(f"from {module} import {name}")
        code = f"{name}({', '.join(filter(None, [code, _code_of_arguments((), wrapper.kwargs, lines)]))})"
    return code


def _code_of_arguments(args: Any, kwargs: Any, lines: list[str]) -> str:
    """Return the code of arguments, separated by commas."""
    return ", ".join(
        [*(_code_of(value, lines) for value in args), *(f"{name}={_code_of(kwargs[name], lines)}" for name in kwargs)]
    )


def _code_of(value: Any, lines: list[str] | None = None) -> str:
    """Return an expression for a value.

    :param lines: list to which imports of classes and functions are added; default: reject these
    """
    kind = type(value)
    if kind is float:
        return repr(value) if np.isfinite(value) else f"float({str(value)!r})"
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind in (list, tuple):
        inner = ", ".join(_code_of(part, lines) for part in value)
        return f"[{inner}]" if kind is list else f"({inner}{',' if len(value) == 1 else ''})"
    if kind is dict:
        return "{" + ", ".join(f"{_code_of(key, lines)}: {_code_of(part, lines)}" for key, part in value.items()) + "}"
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return f"np.{value.dtype.name}({_code_of(value.item())})" if value.dtype.kind != "b" else f"np.bool_({value})"
    if kind is np.ndarray and value.dtype.kind in "biuf":
        array = f"np.array({_code_of(value.tolist())}, {value.dtype.name!r})"
        return array if value.size else f"np.zeros({value.shape}, {value.dtype.name!r})"
    if lines is not None and isinstance(value, (type, types.FunctionType)):
        return _import_object(value, lines)
    raise _NoCodeError(f"a {kind.__name__} cannot be written as code")


def write_script(path: Path, capsule: Capsule, source: str | None = None, *, is_reproduced: bool = True) -> list[str]:
    """Write a script that repeats the crash of a capsule.

    :param path: file to write. Long lists of actions are written to a file of NumPy with the same name
    :param source: ``--env`` of the command line; default: the code in the capsule
    :param is_reproduced: whether the crash was reproduced
    :return: lines about what was written
    :raises InvalidArgumentError: If the log contains objects that cannot be written as code, or a file for the actions
        exists already.
    """
    if capsule.calls_pickle is not None:
        raise InvalidArgumentError(
            "--script: the calls of the episode contain objects that cannot be written as code; expected plain data. "
            "Use rl-ext replay without --script"
        )
    stacked, _ = _split_actions(capsule.log.calls)
    actions = [data for name, data in capsule.log.calls if name == "step"]
    array_path = path.with_suffix(".npy") if stacked is not None and len(actions) > _MAX_INLINE else None
    if array_path is not None and array_path.exists():
        raise InvalidArgumentError(
            f"--script {str(path)!r}: {str(array_path)!r}, for the actions, exists already; expected another name. "
            f"Write --script {path.with_stem(path.stem + '_2')}"
        )
    try:
        text = "\n".join(_script_lines(capsule, source, stacked, actions, array_path))
    except _NoCodeError as error:
        raise InvalidArgumentError(
            f"--script: {error}; expected numbers, text, arrays, and lists of these in actions and calls. Use rl-ext "
            "replay without --script"
        ) from None
    path.write_text(text + "\n", encoding="utf-8")
    if array_path is not None and stacked is not None:
        np.save(array_path, stacked[1], allow_pickle=False)
    what = "repeats the crash" if is_reproduced else "makes the same calls, which did not reproduce the crash,"
    notes = [f"{path}: {what} by itself" + (f", with {array_path}" if array_path else "")]
    if source is None and not capsule.code:
        notes = [f"{path}: set build_crashing_env in it, because the code that built the environment is not known"]
    return notes


def _script_lines(
    capsule: Capsule, source: str | None, stacked: Any, actions: list[Any], array_path: Path | None
) -> Iterator[str]:
    """Yield the lines of the script."""
    failure, log = capsule.failure, capsule.log
    versions = ", ".join(f"{name} {version}" for name, version in capsule.versions.items())
    yield f'"""Repeat a crash: {failure.kind} at step {capsule.step:,}.'
    yield ""
    yield _as_comment(failure.summary)
    yield f"Recorded with {versions}." if versions else ""
    yield '"""'
    yield ""
    yield from ("import contextlib", "import faulthandler", "import random")
    yield from ("from pathlib import Path", "from typing import Any", "")
    yield from ("import gymnasium", "import numpy as np", "")
    yield "faulthandler.enable()"
    yield from _make_env_lines(capsule, source)
    yield ""
    yield ""
    yield inspect.getsource(restore_generator)
    yield ""
    yield "env = build_crashing_env()"
    for name, data in log.settings:
        yield from _call_lines(name, data, "")
    yield "layers = [env]"
    yield "while isinstance(layers[-1], gymnasium.Wrapper):"
    yield "    layers.append(layers[-1].env)"
    yield "# The random generators before the reset."
    for (number, name), state in log.generators.items():
        if state is not None:
            yield from _generator_lines(f"layers[{number}]", name, state)
    yield ""
    if array_path is not None:
        yield f"actions = np.load(Path(__file__).with_name({array_path.name!r}))"
    elif stacked is not None:
        yield f"actions = {_code_of(stacked[1])}"
    else:
        yield f"actions = {_code_of(actions)}"
    yield from _episode_lines(capsule)


def _as_comment(text: str) -> str:
    """Return text that can be part of a docstring."""
    return text.replace("\\", "/").replace('"""', "'''").rstrip('"')


def _make_env_lines(capsule: Capsule, source: str | None) -> Iterator[str]:
    """Yield the lines that define ``build_crashing_env``."""
    if source is not None:
        module, colon, name = source.partition(":")
        if colon and all(part.isidentifier() for part in name.split(".")):
            yield from (f"import {module}", "", f"build_crashing_env = {module}.{name}")
        else:
            yield from ("", "", "def build_crashing_env():", f"    return gymnasium.make({source!r})")
    elif capsule.code:
        yield from capsule.code
    else:
        yield f"# Fill in: a function that builds the environment, which was {_as_comment(capsule.source)}"
        yield "build_crashing_env = None"
        yield "if build_crashing_env is None:"
        yield '    raise SystemExit("set build_crashing_env in this script to a function that builds the environment")'


def _generator_lines(layer: str, name: str, state: Any) -> Iterator[str]:
    """Yield the lines that set a generator of a layer to its state."""
    attribute, *path = name.split("/")
    if name == "ale":
        yield f"emulator_state = type({layer}.ale.cloneState())"
        yield "emulator_state = emulator_state.__new__(emulator_state)"
        yield f"emulator_state.__setstate__({_code_of(state)})"
        yield f"{layer}.ale.restoreState(emulator_state)"
        return
    target = f"{layer}.{attribute}"
    if attribute.endswith("space"):
        for part in path:
            target += f".spaces[{part if part.isdigit() else repr(part)}]"
        target += "._np_random"
        yield f"{target} = restore_generator({target}, {_code_of(state)})"
    else:
        yield f"{target} = restore_generator(getattr({layer}, {attribute!r}, None), {_code_of(state)})"


def _call_lines(name: str, data: Any, indent: str) -> Iterator[str]:
    """Yield the line of a call other than a step."""
    if name == "reset":
        yield f"{indent}env.reset({_code_of_arguments((), data, [])})"
    elif name == "set_attr":
        yield f"{indent}setattr(env, {_code_of(data[0])}, {_code_of(data[1])})"
    elif name == "set_wrapper_attr":
        yield f"{indent}env.set_wrapper_attr({', '.join(map(_code_of, data))})"
    else:
        method, args, kwargs = data
        code = f"env.get_wrapper_attr({method!r})"
        call = f"{indent}{code}({_code_of_arguments(args, kwargs, [])})"
        yield call if name != "call" or args or kwargs else f"{call} if callable({code}) else {code}"


def _episode_lines(capsule: Capsule) -> Iterator[str]:
    """Yield the lines of the resets, the steps and the other calls."""
    failure, calls = capsule.failure, capsule.log.calls
    (last_name, last_data), done, begun = calls[-1], 0, 0

    def flush() -> Iterator[str]:
        """Yield the loop over the steps since the last call of another kind."""
        nonlocal done
        if begun > done:
            yield f"for action in actions[{done}:{begun}]:"
            yield "    env.step(action)"
        done = begun

    for name, data in calls[:-1]:
        if name == "step":
            begun += 1
            continue
        yield from flush()
        if name != "reset":
            yield "with contextlib.suppress(Exception):"
        yield from _call_lines(name, data, "" if name == "reset" else "    ")
    yield from flush()
    if failure.kind == "timeout":
        seconds = capsule.step_timeout or DEFAULT_TIMEOUT
        yield f"faulthandler.dump_traceback_later({seconds}, exit=True)  # the next call hangs"
    if last_name not in ("step", "reset"):
        yield from _call_lines(last_name, last_data, "")
        return
    if last_name == "step":
        yield "observation, _, _, _, info = env.step(actions[-1])"
    else:
        yield f"observation, info = env.reset({_code_of_arguments((), last_data, [])})"
    if failure.kind == "observation":
        yield "if not isinstance(info, dict):"
        yield '    raise TypeError(f"the info is of type {type(info).__name__}, not a dict")'
        yield "if not env.observation_space.contains(observation):"
        yield '    raise ValueError(f"the observation {observation!r} does not fit {env.observation_space}")'

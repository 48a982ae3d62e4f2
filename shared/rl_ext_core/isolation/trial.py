"""A trial: a temporary process that builds, resets, steps and closes environments as its parent asks.

Its answers contain digests of all that callers see, so that the parent can compare trials.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_ext_core import _pickle, resources
from rl_ext_core._import_path import package_folders, standard_folders
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import EnvFactory, drivers, streams, walk
from rl_ext_core.isolation.verdict import declared_by_instance

# Digests of what an instance returned: at once, and when its next operation begins.
RETURNED, STILL_RETURNED = "returned", "still returned"
# The file in a trial's folder that gets what it prints.
OUTPUT_FILE = "printed"
_MAX_DEPTH = 50  # levels of nested data that are compared
# Steps are timed in a loop, for so many steps or seconds: between two operations of a trial caches get cold.
_TIMED_STEPS, _TIMED_S = 100, 5e-3
# Packages with hundreds of modules: the top-level one shows a new version.
_LARGE_PACKAGES = {
    "jax",
    "matplotlib",
    "numba",
    "numpy",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
    "tensordict",
    "torch",
    "torchrl",
}


class Operation(NamedTuple):
    """Something that a trial does with one of its instances."""

    source: int  # number of the factory that builds it, on which its seeds and actions depend
    order: int  # 1 for instances that are built when all others are closed, else 0
    kind: str  # "load" (the factories), "build", "reset", "step", "measure" or "close"
    seed: int | None = None  # of a reset
    counts: bool = True  # whether a failure counts


def pack_factories(factories: list[EnvFactory[Any]]) -> bytes:
    """Pickle factories together: what functions of the caller's script share, they share in a trial too.

    :raises Exception: If they cannot be pickled.
    """
    recipes = [factory._recipe for factory in factories]
    loaded = [recipe.load() if recipe.takes_arguments else None for recipe in recipes]
    return _pickle.dumps([factories, loaded, [factory._adapters for factory in factories]])


def serve(connection: Connection[Any, Any], packed: bytes, folder: str, cwd: str) -> None:
    """Do batches of operations, and answer each; the target of a trial's process. A failure ends a batch.

    :param packed: the factories, see :func:`pack_factories`
    :param folder: a folder of this trial
    :param cwd: the working directory
    """
    _set_up_process(folder, cwd)
    trial, batch = _Trial(packed), [Operation(0, 0, "load")]
    with contextlib.suppress(EOFError, OSError):  # The parent has closed its end.
        while batch is not None:
            for operation in batch:
                try:
                    answer = trial.perform(operation)
                except BaseException as error:
                    answer = {"raises": _format_error(error)}
                connection.send(answer)
                if "raises" in answer:
                    break
            batch = connection.recv()
    while trial.instances:  # A lock that stays would keep other trials from starting.
        with contextlib.suppress(BaseException):
            trial.instances.popitem()[1].close()
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        connection.recv()  # The parent kills this process while what it has started can be found.
    os._exit(0)


def _set_up_process(folder: str, cwd: str) -> None:
    """Print to a file, write no core files, and work in an empty directory."""
    descriptor = os.open(Path(folder, OUTPUT_FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.chdir(cwd)
    os.environ["PWD"] = cwd
    tempfile.tempdir = None  # The parent has set TMPDIR, but a preloaded module may have asked before.


class _Trial:
    def __init__(self, packed: bytes) -> None:
        self._packed, self._libraries = packed, {*_libraries()}
        self._factories: list[EnvFactory[Any]] = []
        self.instances: dict[tuple[int, int], _RecordingEnv] = {}

    def perform(self, operation: Operation) -> dict[str, Any]:
        """Perform an operation and return what is observed."""
        instance = self.instances.get((operation.source, operation.order))
        if instance is None:
            return self._load() if operation.kind == "load" else self._build(operation)
        if operation.kind == "measure":
            libraries, modules = sorted({*_libraries()} - self._libraries), sorted({*_module_files()})
            measured = {"private_bytes": resources.private_memory(), "libraries": libraries, "modules": modules}
            return {**measured, "times": [*instance.time_steps()]}
        if operation.kind == "close":
            return self.instances.pop((operation.source, operation.order)).close()
        return instance.reset_or_step(operation)

    def _load(self) -> dict[str, Any]:
        self._factories, *parts = pickle.loads(self._packed)
        for factory, loaded, adapters in zip(self._factories, *parts, strict=True):
            if loaded is not None:
                object.__setattr__(factory._recipe, "loaded", loaded)
            factory._adapters = adapters
        _disable_monitor_files()
        return {}

    def _build(self, operation: Operation) -> dict[str, Any]:
        # A constructor that draws from a global generator shares nothing that matters; a step that does so, does.
        seed = 71 + operation.source
        streams.seed_process(streams.seed_sequence(seed, 0))
        begin = time.perf_counter()
        environment = self._factories[operation.source]()
        seconds = time.perf_counter() - begin
        self.instances[operation.source, operation.order] = _RecordingEnv(environment, seed)
        return {"seconds": seconds, "declared": declared_by_instance(environment)}


class _RecordingEnv:
    """An environment and what steps it; stands for it there, to record what it returns and how long that takes."""

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment = environment
        self._driver: Any = drivers.driver_for(environment, seed=seed)
        if self._driver is None and hasattr(environment, "reset") and hasattr(environment, "action_space"):
            self._driver = drivers.GymnasiumDriver(environment, np.random.default_rng(seed))
        if self._driver is None:
            raise InvalidTypeError(
                f"{type(environment).__module__}.{type(environment).__qualname__} has no known way to be stepped; "
                "expected an environment of gymnasium, PettingZoo, dm_env, robosuite, TorchRL or Stable Baselines3"
            )
        if isinstance(self._driver, drivers.GymnasiumDriver):
            self._driver._env = self
        self._last: Any = None  # the objects that it returned, not copies
        self._infos: list[Any] = []
        self._seconds = 0.0  # of all resets and steps
        owners = (layer for layer in walk.layers(environment) if hasattr(type(layer), "action_masks"))
        self._masks = next((layer.action_masks for layer in owners), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **kwargs: Any) -> Any:
        """Do what the environment does."""
        return self._record(self._environment.reset, **kwargs)

    def step(self, action: Any) -> Any:
        """Do what the environment does."""
        return self._record(self._environment.step, action)

    def _record(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        self._seconds += time.perf_counter() - begin
        self._last = result[:-1]
        self._infos.append(result[-1])
        return result

    def reset_or_step(self, operation: Operation) -> dict[str, Any]:
        """Reset or step; return digests, and the seconds that it took."""
        observed = self._observe()
        returned, seconds = self._time_operation(operation.kind, operation.seed)
        return {**observed, RETURNED: _digest(returned), "seconds": seconds}

    def time_steps(self) -> Iterator[float]:
        """Take steps, and yield the seconds of each."""
        until = time.perf_counter() + _TIMED_S
        for _ in range(_TIMED_STEPS):
            yield self._time_operation("step", None)[1]
            if time.perf_counter() > until:
                break

    def close(self) -> dict[str, Any]:
        """Close the environment; return what that raised."""
        try:
            getattr(self._environment, "close", lambda: None)()
        except Exception as error:
            return {"complaint": _format_error(error)}
        return {}

    def _time_operation(self, kind: str, seed: int | None) -> tuple[Any, float]:
        """Return what a step or a reset returns, and its seconds: if recorded, without drawing and copying."""
        before, begin = self._seconds, time.perf_counter()
        returned = self._driver.step() if kind == "step" else self._driver.reset(seed)
        taken = time.perf_counter() - begin
        return returned, self._seconds - before or taken

    def _observe(self) -> dict[str, Any]:
        """Return digests of what callers find before the next operation, by their names."""
        # A step that ends an episode is followed by a reset.
        pairs = zip(("info", "info of the reset"), self._infos, strict=False)
        entries = ((name, pair) for name, info in pairs for pair in dict(info).items())
        observed = {f"{name}[{key!r}]": _digest(part) for name, (key, part) in entries}
        self._infos = []
        if self._last is not None:
            observed[STILL_RETURNED] = _digest(self._last)
            observed |= {} if self._masks is None else {"action_masks()": _digest(self._masks())}
        return observed


def _digest(value: Any) -> str:
    # Not the pickle: it depends on which equal strings are one object.
    token = walk.plain_token(value, _MAX_DEPTH)
    token = sorted(walk.fingerprint(value, code=False).tokens.items()) if token is None else token
    return hashlib.blake2b(repr(token).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _disable_monitor_files() -> None:
    """Prevent Stable Baselines3's monitors from writing files, which are the record of the user's run."""
    monitor: Any = sys.modules.get("stable_baselines3.common.monitor")
    if monitor is not None:
        original = monitor.Monitor.__init__

        def init(self: Any, env: Any, filename: str | None = None, *args: Any, **kwargs: Any) -> None:
            original(self, env, None, *args, **kwargs)

        monitor.Monitor.__init__ = init


def _libraries() -> Iterator[str]:
    """Yield the paths of shared objects in this process, without Python's own; none where there is no ``/proc``."""
    standard = tuple(f"{folder}lib-dynload" for folder in standard_folders())
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = ("/" + line.rstrip("\n").partition("/")[2] for line in file)
        yield from (path for path in paths if ".so" in os.path.basename(path) and not path.startswith(standard))


def _module_files() -> Iterator[str]:
    """Yield files whose change shows that the environment's code has changed."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        package: Any = sys.modules.get(top) if top in _LARGE_PACKAGES else module
        path = getattr(package, "__file__", None)
        if not isinstance(path, str) or top == "rl_ext_core":
            continue
        if path.startswith(package_folders()) or not path.startswith(standard_folders()):
            yield path


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000].rstrip('.')}"

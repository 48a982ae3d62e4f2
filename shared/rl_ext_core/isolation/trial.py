"""Trial process: builds, resets, steps and closes environments by order of its parent.

Its answers contain digests of all results that callers see, so that the parent can compare trials.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_ext_core import _file_guard, _pickle, resources
from rl_ext_core.errors import InvalidTypeError
from rl_ext_core.factory import EnvFactory, drivers, streams, walk
from rl_ext_core.isolation.verdict import declared_by_instance

# Keys of answers: the digest of a result, and the digest of the same object when the next operation begins.
RETURNED, STILL_RETURNED = "returned", "still returned"
OUTPUT_FILE = "printed"  # in a trial's folder
CREATED_FILE = "created"  # next to the folders of all trials; lists files that they created elsewhere
_MAX_DEPTH = 50  # Levels of nested data that are compared.
# Steps are timed in a loop of so many steps or seconds, because caches get cold between two operations of a trial.
_TIMED_STEPS, _TIMED_S = 100, 5e-3


class Operation(NamedTuple):
    """An operation on one instance of a trial.

    :ivar source: Index of the factory that builds the instance. It determines seeds and actions.
    :ivar order: 0 for the first instance of a source, 1 for one that is built after all others are closed.
    :ivar kind: ``"load"`` (the factories), ``"build"``, ``"reset"``, ``"step"``, ``"measure"`` or ``"close"``.
    :ivar seed: Seed of a reset.
    :ivar counts: Whether a failure counts.
    """

    source: int
    order: int
    kind: str
    seed: int | None = None
    counts: bool = True


def pack_factories(factories: list[EnvFactory[Any]]) -> bytes:
    """Pickle factories together, so that objects they share are shared in a trial, too.

    :raises Exception: If they cannot be pickled.
    """
    loaded = (one._recipe.load() if one._recipe.takes_arguments else None for one in factories)
    return _pickle.dumps(
        [({**vars(one), "instance": None}, parts) for one, parts in zip(factories, loaded, strict=True)]
    )


def serve(connection: Connection[Any, Any], packed: bytes, folder: str, cwd: str) -> None:
    """Perform operations of the parent and send answers. Target of a trial process.

    :param packed: Result of :func:`pack_factories`.
    :param folder: Folder for the trial's output.
    """
    _set_up_process(folder, cwd)
    trial, operation = _Trial(packed), Operation(0, 0, "load")
    with contextlib.suppress(EOFError, OSError):  # The parent may close its end at any time.
        while operation is not None:
            try:
                answer = trial.perform(operation)
            except BaseException as error:
                answer = {"raises": _format_error(error)}
            connection.send(answer)
            operation = connection.recv()
    while trial.instances:  # An environment that stays open may lock a file that other trials need.
        with contextlib.suppress(BaseException):
            trial.instances.popitem()[1].close()
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        connection.recv()  # Wait until the parent kills this process, so that it still finds its child processes.
    os._exit(0)


def _set_up_process(folder: str, cwd: str) -> None:
    """Redirect output to a file, disable core dumps, and change the working directory."""
    descriptor = os.open(Path(folder, OUTPUT_FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.chdir(cwd)
    os.environ["PWD"] = cwd
    _file_guard.protect_files(str(Path(folder).parent), created=str(Path(folder).parent / CREATED_FILE))


class _Trial:
    """Instances of a trial process, and the operations on them."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._factories: list[EnvFactory[Any]] = []
        self.instances: dict[tuple[int, int], _RecordingEnv] = {}

    def perform(self, operation: Operation) -> dict[str, Any]:
        instance = self.instances.get((operation.source, operation.order))
        if instance is None:
            return self._load() if operation.kind == "load" else self._build(operation)
        if operation.kind == "measure":
            return {"private_bytes": resources.private_memory(), "step_seconds": instance.time_steps()}
        if operation.kind == "close":
            return self.instances.pop((operation.source, operation.order)).close()
        return instance.reset_or_step(operation)

    def _load(self) -> dict[str, Any]:
        for attributes, loaded in pickle.loads(self._packed):
            self._factories.append(EnvFactory(**attributes))
            if loaded is not None:
                object.__setattr__(attributes["_recipe"], "loaded", loaded)
        return {}

    def _build(self, operation: Operation) -> dict[str, Any]:
        # Seed global generators, so that constructors may draw from them. If steps do so, instances share state.
        seed = 71 + operation.source
        streams.seed_process(np.random.SeedSequence(seed))
        begin = time.perf_counter()
        environment = self._factories[operation.source]()
        seconds = time.perf_counter() - begin
        self.instances[operation.source, operation.order] = _RecordingEnv(environment, seed)
        return {"seconds": seconds, "declared": declared_by_instance(environment)}


class _RecordingEnv:
    """Proxy of an environment that a driver steps. It records infos, results and times."""

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment = environment
        self._driver: Any = drivers.driver_for(environment, seed=seed)
        has_interface = hasattr(environment, "reset") and hasattr(environment, "action_space")
        if self._driver is None and has_interface and getattr(environment, "num_envs", 1) == 1:
            self._driver = drivers.GymnasiumDriver(environment, np.random.default_rng(seed))
        if self._driver is None:
            raise InvalidTypeError(
                f"{type(environment).__module__}.{type(environment).__qualname__} cannot be stepped: expected a single "
                "environment of gymnasium, PettingZoo, dm_env, robosuite or TorchRL"
            )
        if isinstance(self._driver, drivers.GymnasiumDriver):
            self._driver._env = self
        self._last: Any = None  # The last result. Not a copy, so that overwriting it is detected.
        self._infos: list[Any] = []
        self._seconds = 0.0  # Total time of resets and steps.
        owners = (layer for layer in walk.layers(environment) if hasattr(type(layer), "action_masks"))
        self._masks = next((layer.action_masks for layer in owners), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment for the driver."""
        return self._record(self._environment.reset, **kwargs)

    def step(self, action: Any) -> Any:
        """Step the environment for the driver."""
        return self._record(self._environment.step, action)

    def _record(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        self._seconds += time.perf_counter() - begin
        self._last = result[:-1]
        self._infos.append(result[-1])
        return result

    def reset_or_step(self, operation: Operation) -> dict[str, Any]:
        """Reset or step, and return digests of the results and the duration in seconds."""
        observed = self._observe()
        returned, seconds = self._time_operation(operation.kind, operation.seed)
        return {**observed, RETURNED: _digest(returned), "seconds": seconds}

    def time_steps(self) -> float:
        """Take steps, and return the median of their seconds, which other programs affect little."""
        until, times = time.perf_counter() + _TIMED_S, list[float]()
        while not times or (len(times) < _TIMED_STEPS and time.perf_counter() < until):
            times.append(self._time_operation("step", None)[1])
        return statistics.median(times)

    def close(self) -> dict[str, Any]:
        """Close the environment. If that raises, return the error as ``"complaint"``."""
        try:
            getattr(self._environment, "close", lambda: None)()
        except Exception as error:
            return {"complaint": _format_error(error)}
        return {}

    def _time_operation(self, kind: str, seed: int | None) -> tuple[Any, float]:
        """Return a result, and its seconds, in gymnasium without drawing the action and copying the result."""
        before, begin = self._seconds, time.perf_counter()
        returned = self._driver.step() if kind == "step" else self._driver.reset(seed)
        taken = time.perf_counter() - begin
        return returned, self._seconds - before or taken

    def _observe(self) -> dict[str, Any]:
        """Return digests of infos, masks and the last result, as callers see them now."""
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
    # A pickle would differ, because it depends on which equal strings are the same object.
    token = walk.plain_token(value, _MAX_DEPTH)
    token = sorted(walk.fingerprint(value, code=False).tokens.items()) if token is None else token
    return hashlib.blake2b(repr(token).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000].rstrip('.')}"

"""Random streams of workers: distinct, reproducible, in every generator that an environment may draw from."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rl_ext_core._import_path import found_behind
from rl_ext_core.factory import simulators, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SharedGenerators", "seed_copy", "seed_process", "seed_unseeded", "sequence", "stream_of"]

_LEAVES = {int, float, complex, bool, str, bytes, type(None), range, slice}
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType)


def sequence(seed: int | None, worker: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return a worker's source of seeds.

    :param seed: of the whole group; None takes entropy from the operating system
    :param worker: its index in the group
    :param attempt: how often this worker was started before
    """
    return np.random.SeedSequence(seed, spawn_key=(worker, attempt))


def seed_process(stream: np.random.SeedSequence) -> None:
    """Seed the generators of this process: Python's, NumPy's, torch's now or when it is imported, and the C library's.

    :param stream: of this worker
    """
    words = [int(word) for word in stream.generate_state(4)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])
    else:
        _SeedsTorch.word = words[2]
        if _SeedsTorch not in sys.meta_path:
            sys.meta_path.insert(0, _SeedsTorch)
    _seed_c(words[3])


class _SeedsTorch:
    """Finds torch as others do, and has it seeded when it is loaded: by itself, it takes entropy then."""

    word: ClassVar[int]

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Do what a finder does; many ask only whether torch is installed."""
        return found_behind(cls, name, path, target, cls._exec) if name == "torch" else None

    @classmethod
    def _exec(cls, exec_module: Callable[[Any], None], module: Any) -> None:
        exec_module(module)
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
            module.manual_seed(cls.word)


def _seed_c(word: int) -> None:
    # Libraries in C draw from these; the C library starts them with the same number in every process.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)  # there it is no part of the program
        library.srand(ctypes.c_uint(word))
        library.srandom(ctypes.c_uint(word))
        library.srand48(ctypes.c_long(word))


def stream_of(stream: np.random.SeedSequence, name: Any) -> np.random.SeedSequence:
    """Derive the seed of one generator from its worker's stream.

    :param name: differs from those of the worker's other generators; plain data
    """
    words = np.frombuffer(hashlib.blake2b(repr(name).encode(), digest_size=16).digest(), np.uint32)
    return np.random.SeedSequence([*map(int, stream.generate_state(4)), *map(int, words)])


def reseed(generator: Any, seed: np.random.SeedSequence) -> None:
    """Seed a generator in place. Those of the process and of the operating system are left alone."""
    torch = sys.modules.get("torch")
    if isinstance(generator, random.Random):
        if generator is not random._inst and not isinstance(generator, random.SystemRandom):
            random.Random.seed(generator, int.from_bytes(seed.generate_state(8).tobytes(), "little"))
    elif torch is not None and isinstance(generator, torch.Generator):
        if all(generator is not one for one in (torch.default_generator, *torch.cuda.default_generators)):
            generator.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    elif generator is not np.random.mtrand._rand:
        bits = generator
        if not isinstance(generator, np.random.BitGenerator):
            bits = getattr(generator, "_bit_generator", None) or generator.bit_generator
        bits.state = type(bits)(seed).state
        if isinstance(generator, np.random.RandomState):  # drops the second number of a pair of normal ones
            generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def seed_unseeded(root: Any, stream: np.random.SeedSequence) -> None:
    """Seed environments and spaces that gymnasium would seed by the operating system at the first draw.

    :param root: an environment or a space; searched with all that its attributes, lists, tuples and dicts hold
    :param stream: source of the seeds
    """
    if "gymnasium" not in sys.modules:
        return
    from gymnasium.utils import seeding

    unseeded = [item for item in _reachable(root) if _is_unseeded(item)]
    # The first words are the seeds of the process.
    for item, word in zip(unseeded, stream.generate_state(4 + len(unseeded))[4:], strict=True):
        item._np_random, seed = seeding.np_random(int(word))
        if hasattr(item, "_np_random_seed"):  # spaces have none
            item._np_random_seed = seed


def _is_unseeded(item: Any) -> bool:
    gymnasium = sys.modules["gymnasium"]
    of_gymnasium = (gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.Space)
    wrappers = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)
    return (
        issubclass(type(item), of_gymnasium)
        and not issubclass(type(item), wrappers)
        and getattr(item, "_np_random", item) is None
    )


def _reachable(root: Any) -> Iterator[Any]:
    """Return a value and all that its attributes, lists, tuples and dicts hold, the nearest first."""
    waiting, seen = deque([root]), {id(root)}
    while waiting:
        item = waiting.popleft()
        yield item
        if issubclass(type(item), dict):
            parts = list(dict.values(item))
        else:
            parts = list(item) if type(item) in (list, tuple) else []
        parts += walk.attributes(item).values()
        for part in parts:
            kind = type(part)
            if kind not in _LEAVES and not issubclass(kind, _NOT_ENTERED) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def seed_copy(environment: Any, stream: np.random.SeedSequence) -> None:
    """Seed the generators that a copy of an instance holds, but for those of the process.

    :param environment: searched as by :func:`seed_unseeded`
    :param stream: source of the seeds
    """
    held = (item for item in _reachable(environment) if walk.is_generator_class(type(item)))
    for number, generator in enumerate({id(one): one for one in held}.values()):
        reseed(generator, stream_of(stream, number))
    simulators.seed_simulators(walk.layers(environment), stream)


class SharedGenerators:
    """Seeds generators that are globals or class attributes of the user's modules and of an environment's.

    Workers import these modules, so that all would draw the same. A generator is seeded once.

    :param stream: of the worker
    """

    def __init__(self, stream: np.random.SeedSequence) -> None:
        self.stream = stream
        self._seeded: set[int] = set()

    def seed(self, environment: Any = None) -> None:
        """Seed those that were imported by now.

        :param environment: its layers' modules count as the user's; None: there is none yet
        """
        layers = [] if environment is None else list(walk.layers(environment))
        names = {base.__module__ for layer in layers for base in type(layer).__mro__}
        for name, module in sorted(sys.modules.items()):
            package = name.partition(".")[0]
            own = not walk.is_installed(package) or (name in names and package not in walk.FIXED)
            if own and isinstance(module, types.ModuleType):
                self._seed_module(name, module)

    def _seed_module(self, module: str, found: types.ModuleType) -> None:
        # By their types: weak proxies of what is gone raise when they are asked for their class.
        classes = [item for item in list(vars(found).values()) if issubclass(type(item), type)]
        classes = [item for item in classes if walk.name_of(item)[0] == module]
        for owner in (found, *classes):
            for name, item in list(vars(owner).items()):
                if id(item) in self._seeded or not (_is_space(item) or walk.is_generator_class(type(item))):
                    continue
                self._seeded.add(id(item))
                own = stream_of(self.stream, f"{module}.{getattr(owner, '__qualname__', '')}.{name}")
                seed_unseeded(item, own) if _is_space(item) else reseed(item, own)


def _is_space(item: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(item), gymnasium.Space)

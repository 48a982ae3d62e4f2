"""Random streams of workers: distinct, reproducible, in every generator that an environment may draw from."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core._import_path import call_when_imported
from rl_ext_core.factory import simulators, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["seed_copy", "seed_process", "seed_shared", "seed_unseeded", "seed_sequence", "derive_seed"]

_LEAVES = {int, float, complex, bool, str, bytes, type(None), range, slice}
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType)


def seed_sequence(seed: int | None, worker: int, attempt: int = 0) -> np.random.SeedSequence:
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
    _torch_seed[:] = [words[2]]
    call_when_imported(["torch"], _seed_torch)
    _seed_c_library(words[3])


_torch_seed: list[int] = []


def _seed_torch(torch: Any) -> None:
    """Seed torch's own generator, which takes entropy where torch is imported."""
    torch.manual_seed(_torch_seed[0])


def _seed_c_library(word: int) -> None:
    # Libraries in C draw from these; the C library starts them with the same number in every process.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)  # there it is no part of the program
        library.srand(ctypes.c_uint(word))
        library.srandom(ctypes.c_uint(word))
        library.srand48(ctypes.c_long(word))


def derive_seed(stream: np.random.SeedSequence, name: Any) -> np.random.SeedSequence:
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
    seeded = (gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.Space)
    wrappers = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)
    is_seeded = issubclass(type(item), seeded) and not issubclass(type(item), wrappers)
    return is_seeded and getattr(item, "_np_random", item) is None


def _reachable(root: Any) -> Iterator[Any]:
    return walk.reachable(root, lambda part: type(part) not in _LEAVES and not issubclass(type(part), _NOT_ENTERED))


def seed_copy(environment: Any, stream: np.random.SeedSequence) -> None:
    """Seed the generators that a copy of an instance holds, but for those of the process.

    :param environment: searched as by :func:`seed_unseeded`
    :param stream: source of the seeds
    """
    held = (item for item in _reachable(environment) if walk.is_generator_class(type(item)))
    for number, generator in enumerate({id(one): one for one in held}.values()):
        reseed(generator, derive_seed(stream, number))
    simulators.seed_simulators(walk.layers(environment), stream)


def seed_shared(stream: np.random.SeedSequence, seeded: set[int], environment: Any = None) -> None:
    """Seed generators that are globals or class attributes of the user's modules and of an environment's.

    Workers import these modules, so that all would draw the same.

    :param stream: of the worker
    :param seeded: ids of those that are seeded already, to which this adds
    :param environment: its layers' modules count as the user's; None: there is none yet
    """
    layers = [] if environment is None else list(walk.layers(environment))
    names = {base.__module__ for layer in layers for base in type(layer).__mro__}
    for module, found in sorted(sys.modules.items()):
        package = module.partition(".")[0]
        own = not walk.is_installed(package) or (module in names and package not in walk.STABLE_PACKAGES)
        if not own or not isinstance(found, types.ModuleType):
            continue
        # By their types: weak proxies of what is gone raise when they are asked for their class.
        classes = [item for item in list(vars(found).values()) if issubclass(type(item), type)]
        for owner in (found, *(kind for kind in classes if walk.name_of(kind)[0] == module)):
            for name, item in list(vars(owner).items()):
                if id(item) not in seeded and (_is_space(item) or walk.is_generator_class(type(item))):
                    seeded.add(id(item))
                    own_stream = derive_seed(stream, f"{module}.{getattr(owner, '__qualname__', '')}.{name}")
                    (seed_unseeded if _is_space(item) else reseed)(item, own_stream)


def _is_space(item: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(item), gymnasium.Space)

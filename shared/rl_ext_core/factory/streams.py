"""Seed all random generators that an environment may use, differently in each worker."""

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

__all__ = ["derive_seed", "seed_copy", "seed_process", "seed_sequence", "seed_shared", "seed_unseeded"]

_LEAVES = {int, float, complex, bool, str, bytes, type(None), range, slice}
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType)


def seed_sequence(seed: int | None, worker: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return the seed sequence of a worker.

    :param seed: Seed of the group. None draws entropy from the operating system.
    :param worker: Index of the worker in the group.
    :param attempt: How often the worker was started before.
    """
    return np.random.SeedSequence(seed, spawn_key=(worker, attempt))


def seed_process(stream: np.random.SeedSequence) -> None:
    """Seed the global generators of Python, NumPy, torch and the C library.

    torch is seeded once it is imported.

    :param stream: Seeds of the worker.
    """
    words = [int(word) for word in stream.generate_state(4)]
    random.seed(words[0])
    np.random.seed(words[1])
    _torch_seed[:] = [words[2]]
    call_when_imported(["torch"], _seed_torch)
    _seed_c_library(words[3])


_torch_seed: list[int] = []


def _seed_torch(torch: Any) -> None:
    """Seed torch's global generator, which importing torch seeds randomly."""
    torch.manual_seed(_torch_seed[0])


def _seed_c_library(word: int) -> None:
    # Simulators in C may use these generators, which the C library seeds equally in every process.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)  # On Windows, the C library is a separate file.
        library.srand(ctypes.c_uint(word))
        library.srandom(ctypes.c_uint(word))
        library.srand48(ctypes.c_long(word))


def derive_seed(stream: np.random.SeedSequence, name: Any) -> np.random.SeedSequence:
    """Derive the seed of one generator from the seeds of its worker.

    :param stream: Seeds of the worker.
    :param name: Plain data that is unique among the worker's generators.
    """
    words = np.frombuffer(hashlib.blake2b(repr(name).encode(), digest_size=16).digest(), np.uint32)
    return np.random.SeedSequence([*map(int, stream.generate_state(4)), *map(int, words)])


def reseed(generator: Any, seed: np.random.SeedSequence) -> None:
    """Seed a generator in place.

    Global generators, and those of the operating system, are not changed.
    """
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
        if isinstance(generator, np.random.RandomState):  # It caches the second of two normal numbers.
            generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def seed_unseeded(root: Any, stream: np.random.SeedSequence) -> None:
    """Seed gymnasium environments and spaces that have not drawn yet.

    Otherwise their first draw seeds them randomly.

    :param root: Environment or space. Its attributes, lists, tuples and dicts are searched, too.
    :param stream: Source of the seeds.
    """
    if "gymnasium" not in sys.modules:
        return
    from gymnasium.utils import seeding

    unseeded = [item for item in _reachable(root) if _is_unseeded(item)]
    # The first four words seed the global generators, see seed_process().
    for item, word in zip(unseeded, stream.generate_state(4 + len(unseeded))[4:], strict=True):
        item._np_random, seed = seeding.np_random(int(word))
        if hasattr(item, "_np_random_seed"):  # Spaces do not have this attribute.
            item._np_random_seed = seed


def _is_unseeded(item: Any) -> bool:
    gymnasium = sys.modules["gymnasium"]
    seeded = (gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.Space)
    wrappers = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)
    is_seeded = issubclass(type(item), seeded) and not issubclass(type(item), wrappers)
    return is_seeded and getattr(item, "_np_random", item) is None


def _reachable(root: Any) -> Iterator[Any]:
    """Yield a value and its parts, except plain data, classes, modules and functions."""
    return walk.reachable(root, lambda part: type(part) not in _LEAVES and not issubclass(type(part), _NOT_ENTERED))


def seed_copy(environment: Any, stream: np.random.SeedSequence) -> None:
    """Seed the generators inside a copy of an instance, except global ones.

    :param environment: The copy. Its attributes, lists, tuples and dicts are searched.
    :param stream: Source of the seeds.
    """
    held = (item for item in _reachable(environment) if walk.is_generator_class(type(item)))
    for number, generator in enumerate({id(one): one for one in held}.values()):
        reseed(generator, derive_seed(stream, number))
    simulators.seed_simulators(walk.layers(environment), stream)


def seed_shared(stream: np.random.SeedSequence, seeded: set[int], environment: Any = None) -> None:
    """Seed generators that are globals or class attributes of modules.

    The modules are the user's and the environment's.

    Workers import these modules, so their generators would all start in the same state.

    :param stream: Seeds of the worker.
    :param seeded: Ids of generators that are already seeded. Ids are added to it.
    :param environment: Environment whose modules are searched in addition to the user's. None if it is not built yet.
    """
    layers = [] if environment is None else list(walk.layers(environment))
    names = {base.__module__ for layer in layers for base in type(layer).__mro__}
    for module, found in sorted(sys.modules.items()):
        package = module.partition(".")[0]
        own = not walk.is_installed(package) or (module in names and package not in walk.STABLE_PACKAGES)
        if not own or not isinstance(found, types.ModuleType):
            continue
        # Use type(), because isinstance() raises for a weak proxy whose object is deleted.
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

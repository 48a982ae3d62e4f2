"""Seed all random generators that an environment may use, differently in each worker."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_ext_core._import_path import call_when_imported
from rl_ext_core.factory import record, walk

__all__ = ["derive_seed", "seed_parts", "seed_process", "seed_shared"]


def seed_process(stream: np.random.SeedSequence) -> None:
    """Seed the global generators of Python, NumPy and the C library, and that of torch once it is imported."""
    words = [int(word) for word in stream.generate_state(4)]
    random.seed(words[0])
    np.random.seed(words[1])
    _torch_seed[:] = [words[2]]
    call_when_imported(["torch"], _seed_torch)
    _seed_c_library(words[3])


_torch_seed: list[int] = []


def _seed_torch(torch: Any) -> None:
    torch.manual_seed(_torch_seed[0])


def _seed_c_library(word: int) -> None:
    # Simulators in C may use these generators, which the C library seeds equally in every process.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)  # On Windows, the C library is a separate file.
        library.srand(ctypes.c_uint(word))
        library.srandom(ctypes.c_uint(word))
        library.srand48(ctypes.c_long(word))


def derive_seed(stream: np.random.SeedSequence, name: Any) -> np.random.SeedSequence:
    """Derive the seed of one generator from those of its worker, in which ``name`` is unique."""
    words = np.frombuffer(hashlib.blake2b(repr(name).encode(), digest_size=16).digest(), np.uint32)
    return np.random.SeedSequence([*map(int, stream.generate_state(4)), *map(int, words)])


def reseed(item: Any, seed: np.random.SeedSequence) -> None:
    """Seed a generator in place, or a gymnasium environment or space that has not drawn yet.

    Global generators, and those of the operating system, are not changed.
    """
    torch = sys.modules.get("torch")
    if isinstance(item, random.Random):
        if item is not random._inst and not isinstance(item, random.SystemRandom):
            random.Random.seed(item, int.from_bytes(seed.generate_state(8).tobytes(), "little"))
    elif torch is not None and isinstance(item, torch.Generator):
        if all(item is not one for one in (torch.default_generator, *torch.cuda.default_generators)):
            item.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    elif _is_unseeded(item):
        make_generator = sys.modules["gymnasium"].utils.seeding.np_random
        item._np_random, used = make_generator(int(seed.generate_state(1)[0]))
        if hasattr(item, "_np_random_seed"):  # Spaces do not have this attribute.
            item._np_random_seed = used
    elif item is not np.random.mtrand._rand:
        bits = item
        if not isinstance(item, np.random.BitGenerator):
            bits = getattr(item, "_bit_generator", None) or item.bit_generator
        bits.state = type(bits)(seed).state
        if isinstance(item, np.random.RandomState):  # It caches the second of two normal numbers.
            item.set_state({**item.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def _is_unseeded(item: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None:
        return False
    seeded = (gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.Space)
    wrappers = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)
    is_seeded = issubclass(type(item), seeded) and not issubclass(type(item), wrappers)
    return is_seeded and getattr(item, "_np_random", item) is None


def seed_parts(root: Any, stream: np.random.SeedSequence, *, generators: bool, original: Any = None) -> None:
    """Seed gymnasium environments and spaces that have not drawn yet. Their first draw would seed them randomly.

    :param root: An object. Its parts are searched, too.
    :param stream: Source of the seeds.
    :param generators: Whether to seed all generators as well, except global ones.
    :param original: Environment of this process. Parts that it shares with the object are not seeded.
    """
    parts, shared = walk.reachable(root), set(map(id, walk.reachable(original)))
    found = [part for part in parts if _is_unseeded(part) or (generators and walk.is_generator_class(type(part)))]
    for number, part in enumerate(found):
        if id(part) not in shared:
            reseed(part, derive_seed(stream, number))


def seed_shared(stream: np.random.SeedSequence, seeded: set[int], build: Any, environment: Any = None) -> None:
    """Seed generators that are globals or class attributes of the user's and the environment's modules.

    Workers import these modules, so their generators would all start in the same state.

    :param seeded: Ids of generators that are already seeded. Ids are added to it.
    :param build: Callable that builds the environment.
    :param environment: Environment whose modules are searched in addition to the user's. None if it is not built yet.
    """
    layers = [] if environment is None else list(walk.layers(environment))
    names = {base.__module__ for layer in layers for base in type(layer).__mro__}
    spaces: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for name, module in sorted(sys.modules.items()):
        package = name.partition(".")[0]
        own = not walk.is_installed(package) or (name in names and package not in walk.STABLE_PACKAGES)
        if own and isinstance(module, types.ModuleType):
            spaces[id(vars(module))] = name, vars(module)
    # Classes and functions of a script were pickled by value, with their globals.
    found = [*record.referenced_values(build), *layers]
    types_found: list[Any] = [one if issubclass(type(one), type) else type(one) for one in found]
    kinds = dict.fromkeys(base for kind in types_found for base in kind.__mro__)
    for kind in kinds:
        if not walk.is_installed(walk.name_of(kind)[0]):
            spaces[id(kind)] = walk.name_of(kind)[0], {kind.__qualname__: kind}
    for part in [*found, *(part for kind in kinds for part in vars(kind).values())]:
        for function in walk.functions_in(part):
            name = str(function.__globals__.get("__name__"))
            if not walk.is_installed(name):
                spaces.setdefault(id(function.__globals__), (name, function.__globals__))
    for module_name, space in spaces.values():
        # Use type(), because isinstance() raises for a weak proxy whose object is deleted.
        classes = [item for item in list(space.values()) if issubclass(type(item), type)]
        owned = {kind.__qualname__: vars(kind) for kind in classes if walk.name_of(kind)[0] == module_name}
        for owner, parts in {"": space, **owned}.items():
            for name, item in list(parts.items()):
                if id(item) not in seeded and (_is_space(item) or walk.is_generator_class(type(item))):
                    seeded.add(id(item))
                    own_stream = derive_seed(stream, f"{module_name}.{owner}.{name}")
                    seed_parts(item, own_stream, generators=not _is_space(item))


def _is_space(item: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(item), gymnasium.Space)

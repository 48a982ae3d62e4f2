"""Seeds the generators around a worker's environment: of its modules and classes, and those not yet made by gymnasium.

Generators that a copy holds are seeded when it is unpickled, see ``streams``.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _fingerprint, _objects, _rules, streams

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SharedGenerators", "seed_unseeded"]

_LEAVES = {int, float, complex, bool, str, bytes, type(None), range, slice}
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType)


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
        parts += _objects.attributes(item).values()
        for part in parts:
            kind = type(part)
            if kind not in _LEAVES and not issubclass(kind, _NOT_ENTERED) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


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
        layers = [] if environment is None else list(_rules.layers(environment))
        names = {base.__module__ for layer in layers for base in type(layer).__mro__}
        for name, module in sorted(sys.modules.items()):
            package = name.partition(".")[0]
            own = not _fingerprint.is_installed(package) or (name in names and not _fingerprint.is_fixed(name))
            if own and isinstance(module, types.ModuleType):
                self._seed_module(name, module)

    def _seed_module(self, module: str, found: types.ModuleType) -> None:
        # By their types: weak proxies of what is gone raise when they are asked for their class.
        classes = [item for item in list(vars(found).values()) if issubclass(type(item), type)]
        classes = [item for item in classes if _objects.name_of(item)[0] == module]
        for owner in (found, *classes):
            for name, item in list(vars(owner).items()):
                if id(item) in self._seeded or not (_is_space(item) or streams.is_generator(item)):
                    continue
                self._seeded.add(id(item))
                own = streams.stream_of(self.stream, f"{module}.{getattr(owner, '__qualname__', '')}.{name}")
                seed_unseeded(item, own) if _is_space(item) else streams.reseed(item, own)


def _is_space(item: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and issubclass(type(item), gymnasium.Space)

"""What an environment says of itself."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.isolation.verdict import Isolation

__all__ = ["by_instance", "isolation_of", "unbuilt"]

# The name that the FMI standard gives its flag; FMPy's model descriptions carry it under this name.
_FMI = "canBeInstantiatedOnlyOncePerProcess"
_KEY = "isolation"
_LOOKED_AT = 20_000
_MAY_SAY = {
    **{isolation.value: isolation for isolation in (Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE)},
    Isolation.SHARED_STATE.value: Isolation.SHARED_STATE,
    # As the option of make_vec_env says it.
    "process": Isolation.SINGLE_INSTANCE,
    "in-process": Isolation.INDEPENDENT,
}

Saying = tuple[str, str]


def by_instance(environment: Any) -> Saying | None:
    """Read what an instance says.

    :return: what it says and where; None: nothing
    """
    said = _in_metadata(environment)
    if said is not None:
        return said
    return _fmi_flag(environment)


def unbuilt(factory: EnvFactory[Any]) -> Saying | None:
    """Read what is known without building: from the instance that a factory was made from, or from the class.

    :return: what it says and where; None: nothing, or it has to be built for that
    """
    if factory.live is not None:
        return by_instance(factory.live)
    if factory.origin == "graft" or factory.adapted:
        return None
    with contextlib.suppress(Exception):  # whatever is wrong with it will show when it is built
        build, _ = factory._recipe.unpacked()
        return _in_metadata(_class_of(build))
    return None


def isolation_of(saying: Saying) -> Isolation:
    """Understand what was said.

    :raises InvalidArgumentError: nothing that can be said
    """
    value, where = saying
    found = _MAY_SAY.get(value.lower().replace("_", "-"))
    if found is not None:
        return found
    raise InvalidArgumentError(
        f"{where} is {value!r}; expected one of {', '.join(map(repr, _MAY_SAY))}. Write "
        f'metadata = {{..., "{_KEY}": "{Isolation.SINGLE_INSTANCE.value}"}} in the environment\'s class'
    )


def _in_metadata(holder: Any) -> Saying | None:
    metadata = getattr(holder, "metadata", None)
    if not isinstance(metadata, Mapping) or _KEY not in metadata:
        return None
    kind = holder if isinstance(holder, type) else type(getattr(holder, "unwrapped", holder))
    value = metadata[_KEY]
    value = value.value if isinstance(value, Isolation) else value
    return value if isinstance(value, str) else repr(value), f'{kind.__qualname__}.metadata["{_KEY}"]'


def _class_of(build: Any) -> Any:
    """Find the class that a function builds, without importing anything."""
    if isinstance(build, functools.partial):
        if build.args and hasattr(build.args[0], "entry_point"):
            return _class_of(build.args[0].entry_point)
        return _class_of(build.func)
    if isinstance(build, str):
        module, _, name = build.partition(":")
        return getattr(sys.modules.get(module), name, None)
    return build if isinstance(build, type) else None


def _fmi_flag(environment: Any) -> Saying | None:
    for item in _reachable(environment):
        if _attributes(item).get(_FMI) is True:
            return Isolation.SINGLE_INSTANCE.value, f"the FMI model description, by its flag {_FMI},"
    return None


def _reachable(root: Any) -> Iterator[Any]:
    """Give an object and what it holds in attributes, mappings, lists and tuples, the nearest first."""
    waiting, seen = collections.deque([root]), {id(root)}
    for _ in range(_LOOKED_AT):
        if not waiting:
            return
        item = waiting.popleft()
        yield item
        if isinstance(item, Mapping):
            parts: Any = item.values()
        else:
            parts = item if isinstance(item, (list, tuple)) else _attributes(item).values()
        for part in itertools.islice(parts, _LOOKED_AT):
            if not isinstance(part, (str, bytes, int, float, type, types.ModuleType)) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _attributes(item: Any) -> Mapping[str, Any]:
    """Give what an object holds, past a ``__getattr__``, which may run anything."""
    held: dict[str, Any] = {}
    slots = (getattr(base, "__slots__", ()) for base in type(item).__mro__)
    for name in ("__dict__", *(name for names in slots for name in ([names] if isinstance(names, str) else names))):
        with contextlib.suppress(AttributeError):
            value = object.__getattribute__(item, name)
            held.update(value if name == "__dict__" else {name: value})
    return held

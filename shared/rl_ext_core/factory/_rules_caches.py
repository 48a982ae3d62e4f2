"""How ``functools.lru_cache`` is copied: with what it has kept, which need not be what would be computed now."""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

from rl_ext_core.factory import _graft, _tokens

__all__ = ["RULES", "kept"]

# Arguments, arguments by name, and what was returned.
_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
# The key, the result and the class of the link; the cache's own class is in front of them.
_OF_A_LINK = 3


def kept(cache: Any) -> list[_Call]:
    """Read what a cache keeps, the oldest use first.

    :raises PicklingError: this interpreter does not show it
    """
    size, parameters = cache.cache_info().currsize, cache.cache_parameters()
    if not size:
        return []
    found = gc.get_referents(cache)[1:]
    end = 0 if parameters["maxsize"] is None else _OF_A_LINK * size
    links, (store, _, mark) = found[:end], found[end : end + 3]
    if type(store) is not dict or len(store) != size or any(key not in store for key in links[::_OF_A_LINK]):
        raise pickle.PicklingError("what it keeps cannot be read; call its cache_clear() first")
    pairs = zip(links[::_OF_A_LINK], links[1::_OF_A_LINK], strict=True) if end else store.items()
    return [(*_arguments(key, mark, parameters["typed"]), result) for key, result in pairs]


def _arguments(key: Any, mark: Any, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(key) is not tuple:
        return (key,), {}
    at = next((index for index, part in enumerate(key) if part is mark), None)
    if at is None:
        return key[: len(key) // 2] if typed else key, {}
    named = key[at + 1 :]
    if typed:  # for each argument a class behind them
        named = named[: (len(named) - at) // 3 * 2]
    return key[:at], dict(zip(named[::2], named[1::2], strict=True))


class _Recalling:
    """Calls a function, or gives what it has returned in the original."""

    __slots__ = ("_function", "result")

    def __init__(self, function: Any) -> None:
        self._function = function
        self.result: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result.pop() if self.result else self._function(*args, **kwargs)


def _cache(cache: Any) -> tuple[Any, ...] | str:
    if _tokens.is_global(cache):
        return str(cache.__qualname__)
    state = (_attributes(cache), kept(cache))
    return _make, (cache.__wrapped__, cache.cache_parameters()), state, None, None, _fill


def _make(function: Any, parameters: dict[str, Any]) -> Any:
    cache: Any = functools.lru_cache(**parameters)(_Recalling(function))
    return functools.update_wrapper(cache, function)


def _fill(cache: Any, state: tuple[dict[str, Any], list[_Call]]) -> None:
    attributes, calls = state
    vars(cache).update(attributes)
    # Later: arguments have a hash when they are complete.
    _graft.after_loading(lambda: _recall(cache, calls))


def _recall(cache: Any, calls: list[_Call]) -> None:
    # It shows what it calls in no other way.
    recalling = next(part for part in gc.get_referents(cache) if type(part) is _Recalling)
    for args, kwargs, result in calls:
        recalling.result.append(result)
        cache(*args, **kwargs)


def _attributes(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if name not in ("__wrapped__", "cache_parameters")}


def _settings(cache: Any) -> dict[str, Any]:
    if _tokens.is_global(cache):
        return {"name": (cache.__module__, cache.__qualname__)}
    own = {"wrapped": cache.__wrapped__, "parameters": cache.cache_parameters(), "kept": kept(cache)}
    return {**own, **_attributes(cache)}


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any] | None]] = [
    ("functools:_lru_cache_wrapper", _cache, _settings),
]

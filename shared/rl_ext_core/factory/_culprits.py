"""Finds what in an environment cannot be pickled, and a way around it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rl_ext_core.factory import _captured, _kinds, _parts, _state
from rl_ext_core.factory._refused import NoCopy, Refused

__all__ = ["mend"]

Reduced = tuple[Any, ...]
Dump = Callable[[Any, Mapping[int, Reduced]], object]
_STUB: Reduced = (str, ())


def mend(environment: Any, failure: Exception, replaced: Mapping[int, Reduced], dump: Dump) -> dict[int, Reduced]:
    """Find what fails, and reduce the layer that holds it to one that is built anew.

    :param failure: of pickling the environment
    :param replaced: how objects are reduced already, by their id
    :param dump: pickles something
    :return: how that layer is reduced, by its id
    :raises Refused: none of those that hold it can be built anew
    """
    trail = _trail(environment, replaced, dump)
    cause = _failure(trail[-1][1], replaced, dump) or failure
    path, value = "".join(step for step, _ in trail), trail[-1][1]
    for index in () if isinstance(cause, NoCopy) else reversed(range(len(trail) - 1)):
        item = trail[index][1]
        make = None if id(item) in replaced else _maker(item)
        if make is None:
            continue
        kept, lost = _sorted_out(item, replaced, dump)
        final = next((name for name, error in lost.items() if isinstance(error, NoCopy)), None)
        if final is not None:
            above = "".join(step for step, _ in trail[: index + 1])
            raise Refused(f"{above}.{final}", vars(item)[final], str(lost[final])) from lost[final]
        return {id(item): (*make, kept, None, None, _state.set_state)}
    raise Refused(path, value, str(cause) or type(cause).__name__) from cause


def _failure(value: Any, replaced: Mapping[int, Reduced], dump: Dump) -> Exception | None:
    try:
        dump(value, replaced)
    except Exception as error:
        return error
    return None


def _trail(environment: Any, replaced: Mapping[int, Reduced], dump: Dump) -> list[tuple[str, Any]]:
    """Find the innermost part that fails by itself, with all that lead to it."""
    trail: list[tuple[str, Any]] = [("", environment)]
    passed = {id(environment)}
    while True:
        # What leads here is left out: by way of a cycle, everything holds what fails.
        stubs = {**replaced, **{id(item): _STUB for _, item in trail}}
        for step, part in _parts_of(trail[-1][1]):
            if id(part) not in passed and _failure(part, stubs, dump) is not None:
                passed.add(id(part))
                trail.append((step, part))
                break
        else:
            return trail


def _parts_of(item: Any) -> list[tuple[str, Any]]:
    try:
        if _state.reduce(item) is None:
            _state.by_pickle(item)
    except Exception:
        return []  # its rule, or its own way of pickling, refuses
    if issubclass(type(item), (set, frozenset)):
        return [("{}", part) for part in item]
    try:
        return list(_parts.parts(item))
    except Exception:
        return list(_parts.named(_kinds.attributes(item)))


def _maker(item: Any) -> Reduced | None:
    """Give how a layer like this is made anew; None: that is not known, or it is a wrapper, which is given a layer."""
    held = _kinds.dictionary(item) or {}
    if not _state.is_layer(item):
        return None
    call = _captured.recorded(item)
    if call is not None:
        return _call, call
    if "env" in held or "venv" in held:
        return None
    if "_ezpickle_args" in held:
        return _call, (type(item), held["_ezpickle_args"], held["_ezpickle_kwargs"])
    spec = held.get("spec")
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is None or not isinstance(spec, gymnasium.envs.registration.EnvSpec):
        return None
    return (_make if isinstance(item, gymnasium.Env) else _make_vec), (spec,)


def _sorted_out(item: Any, replaced: Mapping[int, Reduced], dump: Dump) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Give the attributes of a layer that can be pickled, to be put back into one that is made anew, and why not."""
    stubs = {**replaced, id(item): _STUB}
    held = _kinds.dictionary(item) or {}
    failures = {name: _failure(value, stubs, dump) for name, value in held.items()}
    kept = {name: held[name] for name, error in failures.items() if error is None}
    return kept, {name: error for name, error in failures.items() if error is not None}


def _call(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cls(*args, **kwargs)


def _make(spec: Any) -> Any:
    import gymnasium

    bare = copy.deepcopy(spec)
    bare.additional_wrappers, bare.order_enforce, bare.disable_env_checker = (), False, True
    return gymnasium.make(bare).unwrapped


def _make_vec(spec: Any) -> Any:
    import gymnasium

    return gymnasium.make_vec(copy.deepcopy(spec)).unwrapped

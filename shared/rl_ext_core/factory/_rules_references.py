"""How proxies and views of dictionaries are copied: they refer to the copy of what they refer to."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES"]


class _Gone:
    """What is referred to for a moment."""


class _GoneFunction(_Gone):
    """The same of what could be called: proxies of that are of another class."""

    def __call__(self) -> None:
        """Do nothing."""


def _proxy(proxy: Any) -> tuple[Any, ...]:
    try:
        # Everything that is asked of a proxy is answered by its target; so is what a method is bound to.
        return weakref.proxy, (proxy.__reduce_ex__.__self__,)
    except ReferenceError:
        return _dead_proxy, (type(proxy) is weakref.CallableProxyType,)


def _dead_proxy(callable: bool) -> Any:
    return weakref.proxy(_GoneFunction() if callable else _Gone())


def _view(view: Any) -> tuple[Any, ...]:
    (viewed,) = gc.get_referents(view)
    return _view_of, (viewed, type(view).__name__.rpartition("_")[2])


def _view_of(viewed: Any, name: str) -> Any:
    return getattr(viewed, name)()


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("weakref:ProxyType", _proxy, None),
    ("weakref:CallableProxyType", _proxy, None),
    *((f"builtins:{kind}dict_{name}", _view, None) for kind in ("", "o") for name in ("keys", "values", "items")),
]

"""How tables of pandas and pictures of Pillow are compared: by what is in them, not by what they keep to be fast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["RULES"]


def _own_way(item: Any) -> Any:
    return item.__reduce_ex__(4)


def _table(table: Any) -> Any:
    # From pandas 3 on, tables share memory until one is written to; copies would not know of one another.
    return _own_way(table.copy() if int(sys.modules["pandas"].__version__.partition(".")[0]) >= 3 else table)


def _values(column: Any) -> tuple[str, Any]:
    return str(column.dtype), np.array(column)  # not a view, for the same reason


def _index(index: Any) -> dict[str, Any]:
    return {"values": _values(index), "names": list(index.names)}


def _more(table: Any) -> dict[str, Any]:
    return {"attrs": table.attrs, "flags": table.flags.allows_duplicate_labels}


def _series(series: Any) -> dict[str, Any]:
    return {"index": _index(series.index), "name": series.name, "values": _values(series), **_more(series)}


def _frame(frame: Any) -> dict[str, Any]:
    columns = [_values(frame.iloc[:, number]) for number in range(frame.shape[1])]
    return {"index": _index(frame.index), "names": _index(frame.columns), "columns": columns, **_more(frame)}


def _picture(picture: Any) -> dict[str, Any]:
    what = {"mode": picture.mode, "size": picture.size, "palette": picture.getpalette() if picture.palette else None}
    return {**what, "info": picture.info, "pixels": picture.tobytes()}


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any] | None]] = [
    ("pandas:DataFrame", _table, _frame),
    ("pandas.core.frame:DataFrame", _table, _frame),
    ("pandas:Series", _table, _series),
    ("pandas.core.series:Series", _table, _series),
    ("pandas:Index", _own_way, _index),
    ("pandas.core.indexes.base:Index", _own_way, _index),
    ("PIL.Image:Image", _own_way, _picture),
]

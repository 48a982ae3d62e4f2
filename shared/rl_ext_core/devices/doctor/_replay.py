"""Reads a report that a doctor wrote, on this machine or on another one, and trusts nothing in it."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rl_ext_core.devices._renderers import NAMES
from rl_ext_core.devices.doctor._report import FORMAT, Compute, Question
from rl_ext_core.devices.doctor._verified import Verified
from rl_ext_core.devices.inventory import Inventory
from rl_ext_core.errors import CorruptFileError

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Record:
    """The part of a report from which the rest follows."""

    inventory: Inventory
    environ: Mapping[str, str]
    compute: Compute
    question: Question | None
    verified: tuple[Verified, ...]


def read(text: str) -> Record:
    """Read a report's JSON.

    :raises CorruptFileError: it is none, or of a format that this version does not read
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise CorruptFileError(f"this report is not of format {FORMAT}, the one that this version reads")
        record = Record(
            inventory=_inventory(data["inventory"]),
            environ=data["environ"],
            compute=_made(Compute, data["compute"]),
            question=None if data["question"] is None else _made(Question, data["question"]),
            verified=tuple(_made(Verified, entry) for entry in data["verified"]),
        )
    except CorruptFileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"not a report: {_said(error)}. Expected what rl-ext doctor --json wrote") from error
    _check(record, "the report")
    for entry in record.verified:
        if entry.name not in NAMES:  # it becomes part of lines to copy
            raise CorruptFileError(f"not a report: {entry.name[:60]!r} is no renderer")
    return record


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _inventory(data: Any) -> Inventory:
    inventory = Inventory.from_json(json.dumps(data))
    if any(device.index != place for place, device in enumerate(inventory.egl or ())):
        raise ValueError("EGL's devices are not in order")
    uuids = {gpu.uuid for gpu in inventory.gpus}
    named = {device.uuid for device in inventory.egl or ()} | set(inventory.fastest_first or ())
    if not named <= uuids | {None}:
        raise ValueError("a UUID belongs to no GPU")
    return inventory


def _made(record: type[_Record], data: Any) -> _Record:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return record(**fields)


def _check(record: object, where: str) -> None:
    """See that every field holds what it is declared to hold: JSON may hold anything."""
    hints = get_type_hints(type(record), localns={"Mapping": Mapping})
    for field in dataclasses.fields(record):  # type: ignore[arg-type]  # callers hand over instances of dataclasses
        value = getattr(record, field.name)
        if not _fits(value, hints[field.name]):
            raise CorruptFileError(f"not a report: {field.name} of {where} holds {str(value)[:60]!r}")
        for entry in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(entry):
                _check(entry, field.name)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(entry, arguments[1]) for entry in value.values())
    return type(value) is hint  # True is no number here

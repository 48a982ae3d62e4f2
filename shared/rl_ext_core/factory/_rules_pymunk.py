"""How PettingZoo's environments are copied where they simulate bodies with pymunk: by its own way of pickling.

Contacts that last from one step to the next go along, but not the order in which the solver takes them. Until the next
reset, where an environment makes its space anew, a copy may hence move a little differently. What pymunk leaves out,
such as the mass of a shape, is compared, so that a copy without it is not taken for faithful.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _rules

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


_PLAIN = (bool, int, float, str, type(None))
# Written before the solver reads it, but for the two shapes.
_OF_THE_STEP = ("a", "b", "swapped")
# An address; and what is made when it is read first.
_ADDRESS, _MADE_LATE = "id", "static_body"


def _settings(value: Any) -> dict[str, Any]:
    state = {kind: dict(pairs) for kind, pairs in value.__getstate__().items()}
    # Those of its own, too, which somebody may have added to; handles of C are named only.
    private = {name: part for name, part in vars(value).items() if name.startswith("_") and isinstance(part, _PLAIN)}
    return {"state": state, "properties": _properties(value), "private": private, "names": sorted(vars(value))}


def _space_settings(space: Any) -> dict[str, Any]:
    settings = _settings(space)
    special = settings["state"]["special"]
    index = {shape: number for number, shape in enumerate(space.shapes)}
    special["arbiters"] = {
        (index[contact["a"]], index[contact["b"]]): {
            name: contact[name] for name in contact if name not in _OF_THE_STEP
        }
        for contact in sorted(special["arbiters"], key=lambda contact: (index[contact["a"]], index[contact["b"]]))
    }
    return settings


def _properties(value: Any) -> dict[str, Any]:
    found = {}
    for base in type(value).__mro__:
        for name, part in vars(base).items():
            if not isinstance(part, property) or name == _ADDRESS:
                continue
            if name == _MADE_LATE and vars(value).get(f"_{name}") is None:
                continue
            try:
                read = getattr(value, name)
            except Exception:  # of what it is not, e.g. not in a space
                continue
            found[name] = list(read) if isinstance(read, KeysView) else read
    return found


# Class, rule, and what a copy has in common with the original.
RULES: Rules = [
    ("pymunk.space:Space", _rules.own_way, _space_settings),
    ("pymunk.body:Body", _rules.own_way, _settings),
    ("pymunk.shapes:Shape", _rules.own_way, _settings),
    ("pymunk.constraints:Constraint", _rules.own_way, _settings),
]

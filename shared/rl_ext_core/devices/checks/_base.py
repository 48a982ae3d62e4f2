"""What all checks share: the finding, the situation that is looked at, and the line that mends it."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _compute, _requests
from rl_ext_core.devices._machine import Machine
from rl_ext_core.devices._picks import Picker
from rl_ext_core.errors import RlExtError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    from rl_ext_core.devices._compute import Computing
    from rl_ext_core.devices._mask import Visible
    from rl_ext_core.devices.inventory import Gpu, Inventory

    Severity: TypeAlias = Literal["error", "warning"]
    Changes: TypeAlias = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Finding:
    """One mistake.

    :param variable: its name as it stands in the environment; ``"torch"`` and ``"EGL"`` where no variable is to blame
    :param value: what it holds; None where it is not set
    :param effect: what that does, one sentence
    :param fix: the line to type instead, for the shell or for Python; two where Python has to import first
    :param severity: ``"error"``: something fails or lands on another device; ``"warning"``: it may surprise
    """

    variable: str
    value: str | None
    effect: str
    fix: str
    severity: Literal["error", "warning"] = "error"


@dataclass(frozen=True)
class Mistake:
    """A finding, and what typing its line changes; nothing where the line changes no variable."""

    finding: Finding
    changes: Changes = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Situation:
    """Variables on a machine.

    :param environ: the variables as they are once the lines of all errors that were found before are typed: what
        follows from one mistake is not told as another one
    :param inventory: the machine
    :param original: the variables as they are
    :param settled: whether a decision that was applied in this process sees to the renderers
    """

    environ: Mapping[str, str]
    inventory: Inventory
    original: Mapping[str, str]
    settled: bool = False

    def after(self, mistakes: Iterable[Mistake]) -> Situation:
        """Give the situation in which the errors among these are mended."""
        environ = dict(self.environ)
        for mistake in mistakes:
            if mistake.finding.severity == "error":
                environ = changed(environ, mistake.changes)
        return dataclasses.replace(self, environ=environ)

    @property
    def once_mended(self) -> str:
        """How a sentence begins that holds only after other lines have been typed."""
        return "" if self.environ == self.original else "once the other lines are typed, "

    @cached_property
    def machine(self) -> Machine:
        """The same as a decision is made for."""
        return Machine(self.inventory, self.environ)

    @cached_property
    def visible(self) -> Visible | None:
        """What CUDA shows; None where its order is unknown."""
        try:
            return self.machine.visible
        except RlExtError:
            return None

    @cached_property
    def computing(self) -> Computing | None:
        """What ``resolve("auto")`` would compute on; None where it would refuse."""
        try:
            return _compute.decide(_requests.parse("auto", "device"), self.machine, Picker())
        except RlExtError:
            return None


def changed(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Give the variables as these changes leave them: text is set, None unset."""
    kept = {name: value for name, value in environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


def shell(changes: Mapping[str, str | None]) -> str:
    """Write changes as a line for the shell."""
    sets = [f"{name}={shlex.quote(value)}" for name, value in changes.items() if value is not None]
    unsets = [name for name, value in changes.items() if value is None]
    parts = (["export " + " ".join(sets)] if sets else []) + (["unset " + " ".join(unsets)] if unsets else [])
    return "; ".join(parts)


def mistake(
    situation: Situation,
    variable: str,
    effect: str,
    fix: Changes | str,
    severity: Severity = "error",
    *,
    then: Changes | None = None,
) -> Mistake:
    """Make a mistake of a variable.

    :param fix: what to change; or the line itself, where somebody else changes variables or nobody does
    :param then: what such a line leads to
    """
    value = situation.original.get(variable)
    if isinstance(fix, str):
        return Mistake(Finding(variable, value, effect, fix, severity), then or {})
    return Mistake(Finding(variable, value, effect, shell(fix), severity), fix)


def named(gpu: Gpu) -> str:
    """Name a GPU as a sentence does."""
    return f"{gpu.name} {gpu.uuid} (nvidia-smi {gpu.index})"


def unquoted(value: str) -> str:
    """Take blanks and quotes off both ends."""
    return value.strip(" \t\r\n'\"`")

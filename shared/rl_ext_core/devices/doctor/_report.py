"""The report, and how one is made."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rl_ext_core
from rl_ext_core.devices._machine import Machine
from rl_ext_core.devices._resolve import resolve
from rl_ext_core.devices.checks import Finding, check_environment
from rl_ext_core.devices.decision import Decision
from rl_ext_core.devices.doctor import _advice, _fixes, _predict, _variables, _verified
from rl_ext_core.devices.doctor._predict import Prediction
from rl_ext_core.devices.inventory import Inventory
from rl_ext_core.errors import RlExtError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_ext_core.devices.doctor._advice import Advice
    from rl_ext_core.devices.doctor._fixes import Fix
    from rl_ext_core.devices.doctor._verified import Verified

__all__ = ["Compute", "GpuNames", "Question", "Report", "examine", "replay"]

FORMAT = 1


@dataclass(frozen=True)
class Question:
    """A decision that somebody wants explained: arguments of :func:`rl_ext_core.devices.resolve`.

    :param device: what computes
    :param render: what renders
    :param renderer: through which library
    """

    device: str = "auto"
    render: str = "same"
    renderer: str = "mujoco"


@dataclass(frozen=True)
class Compute:
    """What ``resolve("auto")`` computes on with the present variables.

    :param device: as torch writes it; None where the decision is refused
    :param reason: one sentence, or the refusal
    :param uuid: the GPU's, where NVML knows it
    :param mig: the MIG slice of it, where the mask names one
    :param warnings: one sentence each
    """

    device: str | None
    reason: str
    uuid: str | None = None
    mig: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def identity(self) -> str | None:
        """``"cpu"``, the GPU's UUID, or None if that is unknown."""
        return "cpu" if self.device == "cpu" else self.uuid


@dataclass(frozen=True)
class GpuNames:
    """What the numberings that depend on variables call a GPU.

    :param uuid: the GPU's
    :param torch: ``"cuda:<index>"``; ``"hidden"`` by the mask; ``"none"`` under a torch that is built without CUDA;
        ``"unknown"`` where CUDA's order could not be found out
    :param egl: its index in EGL's order; None if EGL does not list it
    """

    uuid: str
    torch: str
    egl: int | None


@dataclass(frozen=True)
class Report:
    """What the doctor sees.

    :param inventory: the machine
    :param environ: the variables that decide on devices, and no others
    :param compute: what computes
    :param gpus: in nvidia-smi's order
    :param renderers: those that are installed
    :param findings: mistakes, errors first
    :param advice: what else to know or to install
    :param fixes: what to type so that every renderer renders where it is computed
    :param question: the decision that was asked for, if any
    :param decision: the answer to that
    :param refusal: why there is no such decision
    :param verified: what ``--verify`` saw
    """

    inventory: Inventory
    environ: Mapping[str, str]
    compute: Compute
    gpus: tuple[GpuNames, ...]
    renderers: tuple[Prediction, ...]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    fixes: tuple[Fix, ...]
    question: Question | None = None
    decision: Decision | None = None
    refusal: str | None = None
    verified: tuple[Verified, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong that has to be mended, and all renderers that are installed render."""
        renders = all(renderer.where != "fails" for renderer in self.renderers)
        return renders and self.refusal is None and all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Give what :meth:`to_json` writes, as plain dicts, lists, numbers and text.

        :return: a new dict
        """
        whole = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        head = {"format": FORMAT, "rl_ext": rl_ext_core.__version__}
        plain: dict[str, Any] = _plain({**head, **whole})
        return plain

    def to_json(self) -> str:
        """Write it down for a bug report; :func:`replay` reads it.

        :return: JSON with sorted keys
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _plain(value: Any) -> Any:
    """Turn records into dicts and tuples into lists, as JSON has them."""
    if isinstance(value, (Decision, Inventory)):
        value = value.to_dict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def examine(
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    question: Question | None = None,
    verified: Sequence[Verified] = (),
    compute: Compute | None = None,
) -> Report:
    """Examine a machine. Nothing is set, and where NVML answers, CUDA is not initialised.

    :param inventory: the machine; default: this one
    :param environ: its variables; default: this process's. Those that do not decide on devices are left out
    :param question: a decision to explain
    :param verified: what was seen when renderers were tried
    :param compute: what computes, where that is known already; default: ``resolve("auto")`` decides
    :return: the report
    """
    machine = Inventory.current() if inventory is None else inventory
    variables = _variables.that_matter(os.environ if environ is None else environ)
    computes = compute or _compute(inventory, variables)
    visible = _visible(machine, variables)
    renderers = tuple(
        _predict.predict(name, machine, variables, visible or (), computes.identity)
        for name in _predict.installed(machine.versions)
    )
    findings = _findings(machine, variables, verified)
    decision, refusal = (None, None) if question is None else _answer(question, inventory, variables)
    return Report(
        inventory=machine,
        environ=variables,
        compute=computes,
        gpus=_names(machine, visible),
        renderers=renderers,
        findings=findings,
        advice=_advice.advice(machine, computes.device, renderers),
        fixes=_fixes.fixes(machine, variables, findings, question),
        question=question,
        decision=decision,
        refusal=refusal,
        verified=tuple(verified),
    )


def _compute(given: Inventory | None, environ: Mapping[str, str]) -> Compute:
    try:
        decision = resolve("auto", inventory=given, environ=environ)
    except RlExtError as error:
        return Compute(None, str(error))
    uuid = decision.gpu.uuid if decision.gpu else None
    return Compute(decision.device, decision.reason, uuid, decision.mig, decision.warnings)


def _answer(
    question: Question, given: Inventory | None, environ: Mapping[str, str]
) -> tuple[Decision | None, str | None]:
    arguments = dataclasses.asdict(question)
    try:
        return resolve(arguments.pop("device"), **arguments, inventory=given, environ=environ), None
    except RlExtError as error:
        return None, str(error)


def _visible(inventory: Inventory, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Give the UUIDs by CUDA ordinal; None where the order is unknown."""
    try:
        return Machine(inventory, environ).visible.uuids
    except RlExtError:
        return None


def _names(inventory: Inventory, visible: tuple[str, ...] | None) -> tuple[GpuNames, ...]:
    versions = inventory.versions
    found = []
    for gpu in inventory.gpus:
        torch = "unknown"
        if "torch" in versions and not versions.get("torch.cuda"):
            torch = "none"
        elif visible is not None:
            torch = f"cuda:{visible.index(gpu.uuid)}" if gpu.uuid in visible else "hidden"
        device = inventory.egl_of(gpu.uuid)
        found.append(GpuNames(gpu.uuid, torch, device.index if device else None))
    return tuple(found)


def _findings(inventory: Inventory, environ: Mapping[str, str], verified: Sequence[Verified]) -> tuple[Finding, ...]:
    found = check_environment(environ, inventory=inventory)
    return tuple(sorted((*found, *_verified.findings(verified)), key=lambda finding: finding.severity))


def replay(text: str, *, question: Question | None = None) -> Report:
    """Examine the machine that a report was written on.

    :param text: what :meth:`Report.to_json` wrote
    :param question: a decision to explain; default: the one that was asked for there
    :return: the report, as this version sees it
    :raises CorruptFileError: not a report, or of a format that this version does not read
    """
    from rl_ext_core.devices.doctor import _replay

    record = _replay.read(text)
    # What torch found where NVML lists nothing cannot be found out from here.
    compute = None if record.inventory.gpus else record.compute
    return examine(
        record.inventory,
        record.environ,
        question=question or record.question,
        verified=record.verified,
        compute=compute,
    )

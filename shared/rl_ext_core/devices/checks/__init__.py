"""Mistakes in the variables that steer devices, each with the line to type instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rl_ext_core.devices.checks import _backend, _late, _launch, _machine, _mask, _names, _renderers
from rl_ext_core.devices.checks._base import Finding, Situation
from rl_ext_core.devices.inventory import Inventory

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "check_environment"]

# Each one looks at what those before it have mended.
_STAGES = (
    _names.find,
    _launch.find_order,
    _mask.find,
    _launch.find_rank,
    _backend.find,
    _renderers.find,
    _machine.find,
)


def check_environment(
    environ: Mapping[str, str] | None = None, *, inventory: Inventory | None = None
) -> tuple[Finding, ...]:
    """Find mistakes in the variables that steer compute and rendering devices.

    It sets nothing, logs nothing and starts neither CUDA nor a renderer. Without arguments it looks at this process
    too: at variables that were set after a library had read them.

    :param environ: the variables; default: this process's
    :param inventory: the machine; default: this one
    :return: the findings, errors first
    """
    variables = dict(os.environ if environ is None else environ)
    machine = Inventory.current() if inventory is None else inventory
    situation = Situation(variables, machine, variables)
    ours = environ is None and inventory is None
    if ours:
        situation = _late.without_applied(situation)
    findings: list[Finding] = []
    for stage in _STAGES:
        mistakes = tuple(stage(situation))
        findings += [mistake.finding for mistake in mistakes]
        situation = situation.after(mistakes)
    if ours:
        findings += [mistake.finding for mistake in _late.find(Situation(variables, machine, variables))]
    return tuple(sorted(findings, key=lambda finding: finding.severity))

"""What to type so that every renderer renders where it is computed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.devices import _renderers
from rl_ext_core.devices._renderers import BACKEND, INDEX, PLATFORM
from rl_ext_core.devices._resolve import resolve
from rl_ext_core.devices.checks._base import Situation, changed
from rl_ext_core.devices.checks._fixes import Remedy, import_refused, remedy
from rl_ext_core.devices.doctor import _predict
from rl_ext_core.errors import RlExtError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rl_ext_core.devices.checks import Finding
    from rl_ext_core.devices.checks._base import Changes
    from rl_ext_core.devices.doctor._report import Question
    from rl_ext_core.devices.inventory import Inventory

_RENDERING = (BACKEND, PLATFORM, INDEX)
_IMPORT = "from rl_ext_core.devices import resolve"


@dataclass(frozen=True)
class Fix:
    """Lines to copy.

    :param language: ``"shell"`` or ``"python"``
    :param purpose: what they are for, as a heading
    :param lines: the lines
    """

    language: Literal["shell", "python"]
    purpose: str
    lines: tuple[str, ...]


def fixes(
    inventory: Inventory,
    environ: Mapping[str, str],
    findings: Sequence[Finding],
    question: Question | None = None,
) -> tuple[Fix, ...]:
    """Put together what to type, so that nothing of it contradicts the rest.

    The renderers' variables depend on the mask; hence they are decided as they have to be once the mask is mended.

    :param inventory: the machine
    :param environ: its variables
    :param findings: mistakes in them
    :param question: the decision to put into force; default: ``resolve("auto", render="same")`` with every renderer
        that needs it
    :return: at most one block of each kind, unless renderers differ in what they need
    """
    mended = {name: value for name, value in _typed(findings).items() if name not in _RENDERING}
    situation = Situation(changed(environ, mended), inventory, environ)
    remedies = _remedies(situation) if question is None else _remedy(question, situation)
    shell = _in_shell(mended, remedies, situation, question is not None)
    return (*shell, *_in_python(remedies, "auto" if question is None else question.device))


def _typed(findings: Sequence[Finding]) -> dict[str, str | None]:
    """Read what typing the lines of all errors changes."""
    changes: dict[str, str | None] = {}
    for finding in findings:
        if finding.severity == "error":
            changes |= _changes_of(finding.fix)
    return changes


def _changes_of(line: str) -> dict[str, str | None]:
    """Read a line for the shell: text is exported, None unset. Nothing where it does neither."""
    changes: dict[str, str | None] = {}
    verb = ""
    for word in _words(line):
        if word in ("export", "unset") or set(word) == {";"}:
            verb = word
        elif verb == "export" and "=" in word:
            name, _, value = word.partition("=")
            changes[name] = value
        elif verb == "unset":
            changes[word] = None
        else:
            return {}
    return changes


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a lone apostrophe: a sentence, or Python
        return []


def _astray(situation: Situation) -> list[str]:
    """Name the renderers that fail or render elsewhere than where it is computed."""
    computing = situation.computing
    if computing is None:  # where that is, is unknown then
        return []
    computes = "cpu" if computing.device == "cpu" else computing.gpu.uuid if computing.gpu else None
    visible = situation.visible.uuids if situation.visible else ()
    inventory, environ = situation.inventory, situation.environ
    names = _predict.installed(inventory.versions)
    predictions = [_predict.predict(name, inventory, environ, visible, computes) for name in names]
    return [found.name for found in predictions if found.where == "fails" or found.with_compute is False]


def _remedies(situation: Situation) -> dict[str, Remedy]:
    versions = situation.inventory.versions
    return {name: remedy(_renderers.find(name, versions), situation) for name in _astray(situation)}


def _remedy(question: Question, situation: Situation) -> dict[str, Remedy]:
    """Find what puts a decision into force; nothing where it is refused or renders nothing."""
    device, render, renderer = question.device, question.render, question.renderer
    try:
        decision = resolve(
            device, render=render, renderer=renderer, inventory=situation.inventory, environ=situation.environ
        )
    except RlExtError:
        return {}
    changes = {name: value for name, value in decision.variables.items() if situation.environ.get(name) != value}
    if not changes:
        return {}
    if renderer == "robosuite" and import_refused(changed(situation.environ, changes)):
        changes = {}
    return {renderer: Remedy(render, in_shell=tuple(changes.items()))}


def _in_shell(mended: Changes, remedies: Mapping[str, Remedy], situation: Situation, settled: bool) -> Iterator[Fix]:
    """Write blocks for the shell: one, where one suits all renderers or the renderer is ``settled``."""
    install = {str(found.fix(name)): None for name, found in remedies.items() if found.render == "none"}
    groups: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for name, found in remedies.items():
        if found.in_shell:
            groups.setdefault(found.in_shell, []).append(name)
    first = (*_shell(mended), *install)
    if len(groups) == 1:
        (changes,) = groups
        if settled or not _astray(dataclasses.replace(situation, environ=changed(situation.environ, dict(changes)))):
            first, groups = (*first, *_shell(dict(changes))), {}
    if first:
        yield Fix("shell", "in the shell", first)
    for changes, names in groups.items():
        yield Fix("shell", f"in the shell, to render with {' or '.join(names)}", _shell(dict(changes)))


def _in_python(remedies: Mapping[str, Remedy], device: str) -> Iterator[Fix]:
    lines = [
        f"resolve({json.dumps(device)}, render={json.dumps(found.render)}, renderer={json.dumps(name)}).apply()"
        for name, found in remedies.items()
        if found.render != "none"
    ]
    if lines:
        which = "; one of these, for the renderer that you use" if len(lines) > 1 else ""
        yield Fix("python", f"in Python, above the first import of the renderer{which}", (_IMPORT, *lines))


def _shell(changes: Changes) -> tuple[str, ...]:
    return tuple(
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in changes.items()
    )

"""Show which GPU computes and which GPU each renderer uses, why, and how to fix mistakes.

Without options, it reports on this machine and its environment variables. The exit status is 0 without errors, 1 if
there are errors or an installed renderer fails, and 2 if the command line is invalid.

examples:
  rl-ext doctor
  rl-ext doctor --renderer robosuite --device cuda:1
  rl-ext doctor --verify --json > machine.json
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_ext_core.cli.console import new_console
from rl_ext_core.devices import _renderers, _resolve
from rl_ext_core.devices._verify import TIMEOUT_S, verify
from rl_ext_core.devices.doctor import DoctorReport, Question, examine, print_report, replay
from rl_ext_core.devices.inventory import installed_versions
from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rl-ext doctor`` to a parser."""
    asked = parser.add_argument_group("the decision to explain, as arguments of rl_ext_core.devices.resolve()")
    asked.add_argument("--device", help='the device that computes: "auto", "cpu", "cuda:1", "nvidia-smi:3", "GPU-3f2a"')
    asked.add_argument("--render", help='the device that renders: "same", "cpu", "egl:2", or as for --device')
    asked.add_argument("--renderer", help=f"the library that renders: {', '.join(_renderers.NAMES)}")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="report on the machine that wrote this JSON file")
    parser.add_argument("--verify", action="store_true", help="test every renderer, each in its own process")


def run(arguments: argparse.Namespace) -> int:
    """Run ``rl-ext doctor``.

    :return: the exit status
    :raises RlExtError: If the options contradict each other, or a file is not a report.
    """
    # The report contains everything that is logged.
    logging.getLogger("rl_ext_core").addHandler(logging.NullHandler())
    if arguments.replay is not None and arguments.verify:
        raise InvalidArgumentError("--replay and --verify cannot be combined. Use one of them")
    if arguments.verify and arguments.render == "none":
        raise InvalidArgumentError('--verify with --render "none" has nothing to test. Use --render "same"')
    console = new_console()
    report = _create_report(arguments, console)
    if arguments.json:
        sys.stdout.write(f"{report.to_json()}\n")
    else:
        print_report(report, console)
    return 0 if report.healthy else 1


def _create_report(arguments: argparse.Namespace, console: Console) -> DoctorReport:
    """Create the report from the file in ``--replay``, or for this machine."""
    question = _parse_question(arguments)
    if arguments.replay is not None:
        try:
            text = Path(arguments.replay).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidArgumentError(
                f"--replay {arguments.replay!r} cannot be read: {why}. Expected the output of `rl-ext doctor --json`"
            ) from error
        return replay(text, question=question)
    seen = []
    for renderer in _renderers.installed_renderers(installed_versions()) if arguments.verify else ():
        if renderer.select_egl_device is not None and arguments.renderer in (None, renderer.name):
            silent = arguments.json or not console.is_terminal
            text = f"testing {renderer.name}, {TIMEOUT_S:.0f} s at most"
            with contextlib.nullcontext() if silent else console.status(text):
                seen.append(verify(renderer.name, arguments.device or "auto", arguments.render or "same"))
    return examine(question=question, verified=seen)


def _parse_question(arguments: argparse.Namespace) -> Question | None:
    """Return the decision to explain that the options specify, or None.

    :raises InvalidArgumentError: If a device has an unknown form, or a renderer is unknown.
    """
    given = {name: getattr(arguments, name) for name in ("device", "render", "renderer")}
    if not any(value is not None for value in given.values()):
        return None
    renders = arguments.renderer is not None or arguments.verify
    default = {"device": "auto", "render": "same" if renders else "none", "renderer": "mujoco"}
    question = Question(**default | {name: value for name, value in given.items() if value is not None})
    _resolve.parse_device(question.device, "device")
    _resolve.parse_device(question.render, "render")
    # A renderer that is not installed becomes part of the report.
    with contextlib.suppress(MissingDependencyError):
        _renderers.find_renderer(question.renderer, {})
    return question

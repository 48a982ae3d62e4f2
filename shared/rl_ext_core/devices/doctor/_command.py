"""Say which GPU computes, which one every renderer uses, why, and what to type to fix it.

Without options it reports on this machine under the present variables. The exit status is 0 if nothing is wrong,
1 if something is or a renderer that is installed fails, and 2 if the command itself was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_ext_core.errors import InvalidArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console

    from rl_ext_core.devices.doctor._report import Question, Report
    from rl_ext_core.devices.doctor._verified import Verified

# What a log or a pipe gets; a terminal has a width of its own.
_WIDTH_ELSEWHERE = 120
_DAY_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    asked = parser.add_argument_group("a decision to explain, in the words of rl_ext_core.devices.resolve()")
    asked.add_argument("--device", help='what computes: "auto", "cpu", "cuda:1", "nvidia-smi:3", "GPU-3f2a"')
    asked.add_argument("--render", help='what renders: "same", "cpu", "egl:2", or as for --device')
    asked.add_argument("--renderer", help="through which library: mujoco, gymnasium, dm_control or robosuite")
    parser.add_argument("--json", action="store_true", help="write the report as JSON, fit for a bug report")
    parser.add_argument("--replay", metavar="FILE", help="report on the machine that such a JSON came from")
    parser.add_argument(
        "--verify", action="store_true", help="try every renderer for real, each in a process of its own"
    )
    parser.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const=1.0, type=_seconds, help="show who uses which GPU until Ctrl-C"
    )
    parser.add_argument("--count", metavar="N", type=_count, help="end --watch after N looks")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < _DAY_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and below {_DAY_S}")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:10])):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text[:10])


def run(arguments: argparse.Namespace) -> int:
    """Report, try or watch.

    :return: the exit status
    :raises RlExtError: the arguments contradict each other, a file is no report, there is nothing to watch
    """
    # What is logged stands in the report as well.
    logging.getLogger("rl_ext_core").addHandler(logging.NullHandler())
    _refuse_contradictions(arguments)
    console = _console()
    if arguments.watch is not None:
        from rl_ext_core.devices.doctor._watch import watch

        watch(console, arguments.watch, arguments.count)
        return 0
    report = _report(arguments, console)
    if arguments.json:
        sys.stdout.write(f"{report.to_json()}\n")
    else:
        from rl_ext_core.devices.doctor import _text

        _text.show(report, console)
    return 0 if report.healthy else 1


def _console() -> Console:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        console.width = _WIDTH_ELSEWHERE
    return console


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if value is not None and value is not False}
    pairs = [("replay", "verify")]
    pairs += [("watch", name) for name in ("replay", "verify", "json", "device", "render", "renderer")]
    for one, other in pairs:
        if one in given and other in given:
            raise InvalidArgumentError(f"--{one} and --{other} exclude each other")
    if "count" in given and "watch" not in given:
        raise InvalidArgumentError("--count is for --watch")
    if "verify" in given and arguments.render == "none":
        raise InvalidArgumentError('--verify renders, so --render "none" leaves nothing to do')


def _report(arguments: argparse.Namespace, console: Console) -> Report:
    from rl_ext_core.devices import doctor

    question = _question(arguments)
    if arguments.replay is not None:
        return doctor.replay(_read(arguments.replay), question=question)
    verified = _verified(arguments, console) if arguments.verify else ()
    return doctor.examine(question=question, verified=verified)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"--replay {path!r} cannot be read: {why}. Expected what rl-ext doctor --json wrote"
        ) from error


def _question(arguments: argparse.Namespace) -> Question | None:
    """Read the decision to explain; None if none was asked for.

    :raises InvalidArgumentError: a device or a renderer is written in no known form
    """
    from rl_ext_core.devices import _renderers, _requests
    from rl_ext_core.devices.doctor._report import Question

    if arguments.device is arguments.render is arguments.renderer is None:
        return None
    renders = arguments.renderer is not None or arguments.verify
    default = {"device": "auto", "render": "same" if renders else "none", "renderer": "mujoco"}
    question = Question(
        **{name: default[name] if (said := getattr(arguments, name)) is None else said for name in default}
    )
    _requests.parse(question.device, "device")
    _requests.parse(question.render, "render")
    # Whether one that is known is also installed is for the decision to say.
    with contextlib.suppress(MissingDependencyError):
        _renderers.find(question.renderer, {})
    return question


def _verified(arguments: argparse.Namespace, console: Console) -> list[Verified]:
    from rl_ext_core.devices import _versions
    from rl_ext_core.devices.doctor import _predict, _verify

    device = "auto" if arguments.device is None else arguments.device
    render = "same" if arguments.render is None else arguments.render
    seen = []
    for name in _predict.installed(_versions.installed()):
        if arguments.renderer in (None, name):
            with _working(f"trying {name}, {_verify.LIMIT_S:.0f} s at most", arguments, console):
                seen.append(_verify.verify(name, device, render))
    return seen


def _working(text: str, arguments: argparse.Namespace, console: Console) -> contextlib.AbstractContextManager[object]:
    return console.status(text) if console.is_terminal and not arguments.json else contextlib.nullcontext()

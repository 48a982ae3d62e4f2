"""Run a program with the variables that make it compute and render on the same GPU.

The variables are set before the program imports anything, so the program needs no change. Without a launcher, --gpu
restricts it to one GPU, which it sees as cuda:0. Under torchrun, srun or mpirun, the mask is kept, and each rank
renders on the GPU of its rank. Signals and the exit status are the program's.

examples:
  rl-ext run --gpu auto -- python train.py
  rl-ext run --gpu 2 --verify -- lerobot-train
  torchrun --no-python --nproc-per-node=4 rl-ext run --per-rank -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import sys
from typing import NoReturn

from rl_ext_core.devices import Inventory, renderers
from rl_ext_core.devices._probe import query_versions
from rl_ext_core.devices.program import ProgramPlan, plan_program
from rl_ext_core.devices.verify import verify_decision
from rl_ext_core.errors import InvalidArgumentError, RlExtError

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_SHEBANG_BYTES = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rl-ext run`` to a parser."""
    parser.add_argument(
        "--gpu", metavar="N", help='the GPU: an index as in cuda:N, "nvidia-smi:3", "GPU-3f2a" or "auto"'
    )
    parser.add_argument("--render", metavar="N", help='"same" (default), "cpu", "none", an index, or as for --gpu')
    parser.add_argument("--renderer", help=f"the library that renders: {', '.join(renderers.NAMES[:-1])}")
    parser.add_argument("--per-rank", action="store_true", help="fail if no launcher has set a rank")
    parser.add_argument("--dry-run", action="store_true", help="print lines for a shell, and run nothing")
    parser.add_argument("--verify", action="store_true", help="render a frame first, and check which GPU rendered")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="the program to run")


def run(arguments: argparse.Namespace) -> int:
    """Run ``rl-ext run``. If the program starts, this function does not return.

    :return: the exit status of ``--dry-run``, or of a failed ``--verify``
    :raises RlExtError: If an option is wrong, a device is not available, or the program is not found.
    """
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command and not arguments.dry_run:
        raise InvalidArgumentError("rl-ext run needs a program. Write `rl-ext run --gpu auto -- python train.py`")
    python = find_interpreter(command) if command else sys.executable
    inventory = Inventory.current(egl=arguments.render != "none")
    versions = None if python in (None, sys.executable) else query_versions(python)
    if versions is not None:
        inventory = dataclasses.replace(inventory, versions=versions)
    try:
        plan = plan_program(
            command,
            inventory,
            os.environ,
            gpu=arguments.gpu,
            render=arguments.render,
            renderer=arguments.renderer,
            per_rank=arguments.per_rank,
        )
    except RlExtError as error:
        raise type(error)(_as_options(str(error))) from error
    _print_note(plan.summary)
    if versions is None and python != sys.executable:
        _print_note(f"the versions are those of {sys.executable}, because the interpreter of {command[0]!r} is unknown")
    for step in plan.decision.steps:
        if step.rule.startswith("import check"):  # the reason why the mask looks strange
            _print_note(str(step))
    for warning in plan.decision.warnings:
        _print_note(f"warning: {warning}")
    if arguments.verify and not _verify(plan, python or sys.executable):
        return 1
    if arguments.dry_run:
        sys.stdout.write(plan.to_shell())
        return 0
    _execute(command, plan.environment(os.environ))


def find_interpreter(command: list[str]) -> str | None:
    """Find the Python that will run a program: the program itself, or the interpreter in a script's first lines.

    :param command: the program and its arguments
    :return: path of the interpreter, or None if the program is not run by Python, such as a shell script
    :raises InvalidArgumentError: If the program is not found.
    """
    path = shutil.which(command[0])
    if path is None:
        fix = f"Write `python {command[0]}`" if os.path.exists(command[0]) else "Write its path"
        raise InvalidArgumentError(f"the program {command[0]!r} is not found, or is not executable. {fix}")
    if _PYTHON.fullmatch(os.path.basename(path)):
        return path
    with contextlib.suppress(OSError), open(path, "rb") as file:
        lines = file.read(_SHEBANG_BYTES).decode(errors="replace").splitlines()
        if lines and lines[0].startswith("#!"):
            words = lines[0][2:].split()
            if words and os.path.basename(words[0]) == "env":
                words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
            if words and os.path.basename(words[0]) == "sh" and len(lines) > 1:  # pip's form for long paths
                words = [word for word in shlex.split(lines[1].replace("'''exec'", "")) if word.startswith("/")]
            if words and _PYTHON.fullmatch(os.path.basename(words[0])):
                return words[0]
    return None


def _as_options(text: str) -> str:
    """Return an error text with arguments of Python written as options of the command."""
    text = text.replace('device="cpu", or ', "")  # the program, not this command, decides to compute on the CPU
    text = re.sub(r"""\bdevice=(['"])(?:cuda:)?(.+?)\1""", r"--gpu \2", text)
    return re.sub(r"""\b(render|renderer)=(['"])(?:cuda:)?(.+?)\2""", r"--\1 \3", text)


def _verify(plan: ProgramPlan, python: str) -> bool:
    """Render a frame with the program's interpreter and the plan's variables; return whether it is as decided."""
    if plan.decision.render == "none":
        raise InvalidArgumentError("--verify has nothing to test, because nothing renders. Leave --verify out")
    seen = verify_decision(plan.decision, plan.environment(os.environ), python=python)
    _print_note(f"verify: {seen.gl_renderer or seen.name}: {seen.result}")
    return seen.problem is None


def _print_note(line: str) -> None:
    """Print a line to standard error, because standard output belongs to the program."""
    sys.stderr.write(f"rl-ext run: {line}\n")


def _execute(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace this process by the program."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program inherits that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise InvalidArgumentError(
            f"the program {command[0]!r} cannot be started: {error.strerror}. Write its interpreter before it"
        ) from error

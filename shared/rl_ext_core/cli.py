"""The command line, ``rl-ext``.

Each command is a module in ``COMMANDS``. Its ``add_arguments(parser)`` declares the options. Its ``run(arguments)``
returns the exit status, and raises this project's exceptions. Only ``completion`` is here, because it needs the parser.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import rl_ext_core
from rl_ext_core.errors import (
    CorruptFileError,
    InvalidArgumentError,
    InvalidTypeError,
    RlExtError,
    _missing_dependency_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

__all__ = ["main"]

COMMANDS = {
    "doctor": (
        "rl_ext_core.devices.doctor",
        "show which GPU computes, which GPU renders, why, and how to change it",
    ),
    "plan": (
        "rl_ext_core._plan_command",
        "estimate or measure the memory of a replay buffer of images",
    ),
    "probe": (
        "rl_ext_core._probe_command",
        "test whether instances of an environment can share a process",
    ),
    "import": (
        "rl_ext_core._import_command",
        "store a dataset in the storage_dir of a replay buffer",
    ),
    "export": (
        "rl_ext_core._export_command",
        "write a replay buffer as a Minari dataset",
    ),
    "replay": (
        "rl_ext_core._replay_command",
        "repeat a recorded crash of an environment",
    ),
    "profile": (
        "rl_ext_core._profile_command",
        "run a script, and report where the time of its training goes",
    ),
}

# Columns of output to a log or a pipe; a terminal reports its own width.
_DEFAULT_WIDTH, _MIN_WIDTH = 120, 20
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_USAGE_ERRORS = (InvalidArgumentError, InvalidTypeError, CorruptFileError)


class _Parser(argparse.ArgumentParser):
    """Parser that prints wrong usage as one line, instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message}. See {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``rl-ext`` with these arguments, and return its exit status.

    :param argv: Arguments, default those of the program
    :return: Exit status: 0; 1 for a problem with the machine or environment; 2 for wrong arguments; 130 for Ctrl-C
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed before Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # do not fail on characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    arguments = _make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except RlExtError as error:
        print(f"rl-ext {arguments.command}: {error}", file=sys.stderr)
        return _USAGE if isinstance(error, _USAGE_ERRORS) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:  # EPIPE is silent: the reader, such as head, has closed the pipe
            print(f"rl-ext {arguments.command}: the output cannot be written: {error.strerror}", file=sys.stderr)
        # Otherwise Python reports the same error again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return status


def new_console() -> Console:
    """Create a console for tables and plain text, 120 columns wide if there is no terminal."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if console.width < _MIN_WIDTH or (not console.is_terminal and "COLUMNS" not in console._environ):
        console.width = _DEFAULT_WIDTH
    return console


@contextlib.contextmanager
def show_progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr within the context, if that is a terminal.

    :param task: Name of the work
    :param total: Number of steps
    :return: Function that adds a number of finished steps
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        number = bar.add_task(task, total=total)
        yield lambda n_steps: bar.advance(number, n_steps)


def _make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``rl-ext`` with all commands."""
    parser = _Parser(prog="rl-ext", description="Tools for training with Stable Baselines3 and TorchRL.")
    parser.add_argument("--version", action="version", version=f"rl-ext {rl_ext_core.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        child = commands.add_parser(name, help=summary, description=command.__doc__)
        child.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    summary = "print a script that makes a shell complete commands and options of rl-ext"
    child = commands.add_parser("completion", help=summary, description='eval "$(rl-ext completion bash)"')
    child.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    child.set_defaults(run=_print_completion)
    return parser


def _print_completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise _missing_dependency_error("shtab", "completion", "rl-ext completion") from None
    print(shtab.complete(_make_parser(), arguments.shell))
    return 0

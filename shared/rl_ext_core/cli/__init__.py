"""The command line, ``rl-ext``.

Each command is a module of this package. Its ``add_arguments(parser)`` declares the options. Its ``run(arguments)``
returns the exit status, and raises this project's exceptions.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import rl_ext_core
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, RlExtError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

COMMANDS = {
    "doctor": "show which GPU computes, which GPU renders, why, and how to change it",
    "run": "run a program that computes and renders on the same GPU",
    "plan": "estimate or measure the memory of a replay buffer of images",
    "probe": "test whether instances of an environment can share a process",
    "replay": "repeat a recorded crash of an environment",
}

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_USAGE_ERRORS = (InvalidArgumentError, InvalidTypeError, CorruptFileError)


class _Parser(argparse.ArgumentParser):
    """Parser that prints wrong usage as one line, instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {_one_line(message)}. See {self.prog} --help\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())  # exceptions of the user's modules may have several


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
        text = str(error) if isinstance(error, WorkerError) else _one_line(str(error))  # it contains a traceback
        print(f"rl-ext {arguments.command}: {text}", file=sys.stderr)
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


def _make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``rl-ext`` with all commands."""
    parser = _Parser(prog="rl-ext", description="Tools for training with Stable Baselines3 and TorchRL.")
    parser.add_argument("--version", action="version", version=f"rl-ext {rl_ext_core.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = importlib.import_module(f"rl_ext_core.cli.{name}")
        child = commands.add_parser(
            name, help=summary, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser

"""Repeat a recorded crash of an environment, in a process of its own.

A capsule contains the factory of the environment as a pickle, which is executable code. Repeat only capsules whose
origin you trust, or pass --env. Files that Python code of the environment writes go to a temporary folder. The exit
status is 0 if the crash is reproduced, 1 if not, and 2 for wrong arguments.

examples:
  rl-ext replay crash-20261127T110500-0.rlx
  rl-ext replay crash-20261127T110500-0.rlx --env my_module:make_env
  rl-ext replay crash-20261127T110500-0.rlx --yes --actions episode.npz
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_ext_core.cli.console import new_console
from rl_ext_core.errors import InvalidArgumentError, _missing_dependency_error

if TYPE_CHECKING:
    from rich.console import Console

    from rl_ext_core.recording.capsule import Capsule
    from rl_ext_core.vector.replay import ReplayResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext replay``."""
    parser.add_argument("capsule", metavar="CAPSULE", help="file that a recorder wrote, crash-<time>-<number>.rlx")
    parser.add_argument("--yes", action="store_true", help="execute the capsule's code without asking")
    parser.add_argument("--env", metavar="SOURCE", help="build the environment by my_module:make_env or a gymnasium id")
    parser.add_argument("--actions", metavar="FILE", help="write seeds and actions as arrays: episode.npz")


def run(arguments: argparse.Namespace) -> int:
    """Repeat the crash of a capsule, and print whether it is reproduced."""
    if importlib.util.find_spec("gymnasium") is None:  # the base installation does not have it
        raise _missing_dependency_error("gymnasium", "sb3", "a recorded crash")
    from rl_ext_core.recording.capsule import read_capsule, write_actions
    from rl_ext_core.vector import replay

    console, path = new_console(), Path(arguments.capsule)
    if arguments.actions is not None and Path(arguments.actions).suffix != ".npz":
        raise InvalidArgumentError(
            f"--actions {arguments.actions!r}: expected a name with .npz. Use --actions episode.npz"
        )
    capsule = read_capsule(path)
    _print_capsule(capsule, path, console)
    if arguments.actions is not None and capsule.encoded_actions:
        raise InvalidArgumentError(
            f"--actions {arguments.actions!r}: the actions are bytes of TensorDicts, because TorchRL has stepped the "
            "environment in the worker. Leave out --actions, and use rl-ext replay"
        )
    if arguments.actions is not None:
        others = write_actions(Path(arguments.actions), capsule.log)
        _print(console, f"{arguments.actions}: seeds and actions of {capsule.step:,} steps")
        if others:
            _print(console, f"  it does not contain {', '.join(others)}")
    _require_consent(capsule, arguments, console)
    sys.stdout.flush()
    cause = "the environment is not deterministic"
    if arguments.env is not None:
        cause = f"--env {arguments.env} is another environment, or is not deterministic"
    return _print_result(capsule, replay.play(capsule, arguments.env), cause, console)


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


def _print_capsule(capsule: Capsule, path: Path, console: Console) -> None:
    """Print what a capsule contains, and what is different now."""
    from rl_ext_core.recording.capsule import current_versions

    failure = capsule.failure
    where = f"step {capsule.step:,}" if failure.phase == "step" or capsule.step else "the reset"
    _print(
        console, f"{path.name}: {failure.kind} at {where} of environment {capsule.environment}, {capsule.created} UTC"
    )
    _print(console, f"  {failure.summary}")
    now = current_versions(capsule.versions)
    for name, version in capsule.versions.items():
        if name in now and now[name] != version:
            _print(console, f"  {name} {version}; now {now[name]}")
    for name, value in capsule.variables.items():
        if os.environ.get(name) != value:
            _print(console, f"  {name}={value}; now {os.environ.get(name, 'not set')}")


def _require_consent(capsule: Capsule, arguments: argparse.Namespace, console: Console) -> None:
    """Print what will be executed, and ask for consent."""
    if arguments.env is None and capsule.factory_pickle is None:
        raise InvalidArgumentError(
            f"{arguments.capsule!r} has no factory, because {capsule.source or 'it'} could not be pickled; expected "
            "--env. Use --env module:function"
        )
    if arguments.env is not None:
        _print(console, f"executes --env {arguments.env} in a process of its own")
        return
    _print(console, f"executes the pickled code of the factory {capsule.source} in a process of its own")
    if arguments.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise InvalidArgumentError(
            "the capsule's code is executed only with consent; expected --yes, or --env for your own code. Use --yes "
            "if you trust the origin of the file"
        )
    try:
        answer = input("Continue? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise InvalidArgumentError("nothing was executed, because the answer was not y. Use --env for your own code")


def _print_result(capsule: Capsule, result: ReplayResult, cause: str, console: Console) -> int:
    """Print whether the crash is reproduced, and return the exit status.

    :param cause: what to print about observations that differ
    """
    differs = result.first_difference is not None
    difference = f"first difference at step {result.first_difference:,}" if differs else ""
    if result.failure is None:
        if differs:
            _print(console, f"does not crash: {difference}: {cause}")
        else:
            _print(console, "does not crash, and all observations are equal")
            _print(console, "Maybe it depends on earlier episodes, on files, or on variables such as those above.")
        return 1
    where = f"step {result.step:,}" if result.failure.phase == "step" else f"the {result.failure.phase}"
    if result.failure.phase != "step" and result.step:
        where += f" after step {result.step:,}"
    if result.is_like(capsule.failure) and result.step == capsule.step:
        _print(console, f"reproduced at {where}: {result.describe()}")
        if differs:
            _print(console, f"but {difference}: {cause}")
        return 0
    expected = f"{capsule.failure.kind} at step {capsule.step:,}"
    _print(console, f"crashed elsewhere: {where}, {result.describe()}; expected {expected}")
    if differs:
        _print(console, f"{difference}: {cause}")
    return 1

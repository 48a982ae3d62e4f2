"""Run a script that trains with Stable Baselines3, and report where the time of each learn() goes.

The table is printed at the end of each learn(): environments, transfer, policy, buffer, update and callbacks.

examples:
  rl-ext profile train.py
  rl-ext profile train.py --env CartPole-v1 --steps 20000
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path

from rl_ext_core.errors import InvalidArgumentError, _missing_dependency_error

_CALLBACK = "sb3_ext.timing_callback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext profile``."""
    parser.add_argument("script", metavar="SCRIPT", help="train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    """Run the script as ``python SCRIPT`` does.

    :return: Exit status
    :raises InvalidArgumentError: If there is no such script
    :raises MissingDependencyError: If Stable Baselines3 is not installed
    """
    script = Path(arguments.script)
    if not script.is_file():
        raise InvalidArgumentError(f"{arguments.script!r} is not a file; expected a Python script, such as train.py")
    try:
        callback = importlib.import_module(_CALLBACK)
    except ImportError as error:
        raise _missing_dependency_error(error.name or "stable_baselines3", "sb3", "rl-ext profile") from error
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with callback.report_all_training():
        runpy.run_path(arguments.script, run_name="__main__")
    return 0

"""Test in temporary processes whether instances of an environment can share a process.

SOURCE builds the environment: module:function, module:Class.method, or a gymnasium id. Instances are built, stepped and
compared. The exit status is 0 for a verdict, 1 if the environment fails or cannot be tested, and 2 for wrong arguments.

examples:
  rl-ext probe CartPole-v1
  rl-ext probe my_module:Plant --steps 500
  rl-ext probe ale_py:ALE/Pong-v5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rl_ext_core._environment_source import load_source
from rl_ext_core.cli.console import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from rl_ext_core.isolation.verdict import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext probe``."""
    parser.add_argument("source", metavar="SOURCE", help="my_module:make_env, or CartPole-v1, or ale_py:ALE/Pong-v5")
    parser.add_argument("--json", action="store_true", help="write the verdict as JSON")
    parser.add_argument("--steps", metavar="N", type=int, default=100, help="number of compared steps (100)")
    limit = "limit in seconds for a build, reset or step (300 for one instance)"
    parser.add_argument("--timeout", metavar="S", type=float, help=limit)


def run(arguments: argparse.Namespace) -> int:
    """Test whether instances of the environment can share a process, and print the verdict."""
    from rl_ext_core.isolation import Isolation, probe

    console = new_console()
    source = load_source(arguments.source)
    silent = arguments.json or not console.is_terminal
    text = f"building and stepping {arguments.source} in temporary processes"
    with contextlib.nullcontext() if silent else console.status(text):
        verdict = probe(source, steps=arguments.steps, timeout=arguments.timeout)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(dataclasses.asdict(verdict), indent=1)}\n")
    else:
        _print_verdict(verdict, console)
    return 1 if verdict.isolation in (Isolation.BROKEN, Isolation.UNKNOWN) else 0


def _print_verdict(verdict: Verdict, console: Console) -> None:
    """Print a verdict with its reason, and the measured times and memory."""
    console.print(f"{verdict.isolation.value}   (by {verdict.declared_by}, in {verdict.seconds:.2f} s)\n")
    console.print(verdict.explanation)
    if verdict.step_seconds is not None:
        console.print(f"\nstep    {verdict.step_seconds * 1e3:.3f} ms")
    if verdict.private_bytes is not None:
        console.print(f"memory  {verdict.private_bytes / 2**20:.0f} MiB for each process")

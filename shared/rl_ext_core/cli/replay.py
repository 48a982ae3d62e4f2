"""Repeat a recorded crash of an environment, in a process of its own.

A capsule contains the factory of the environment as a pickle, which is executable code. Repeat only capsules whose
origin you trust, or pass --env. The exit status is 0 if the crash is reproduced, 1 if not, and 2 for wrong arguments.

examples:
  rl-ext replay crash-20261127T110500-0.rlx
  rl-ext replay crash-20261127T110500-0.rlx --env my_module:make_env --minimize
  rl-ext replay crash-20261127T110500-0.rlx --yes --script repro.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_ext_core.cli.console import new_console, show_progress
from rl_ext_core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from rl_ext_core.recording.capsule import Capsule
    from rl_ext_core.recording.replay import ReplayResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext replay``."""
    parser.add_argument("capsule", metavar="CAPSULE", help="file that a recorder wrote, crash-<time>-<number>.rlx")
    parser.add_argument("--yes", action="store_true", help="execute the capsule's code without asking")
    parser.add_argument("--env", metavar="SOURCE", help="build the environment by my_module:make_env or a gymnasium id")
    parser.add_argument("--minimize", action="store_true", help="find a shorter episode that crashes in the same way")
    parser.add_argument("--script", metavar="FILE", help="write a script that repeats the crash without rl-ext")
    parser.add_argument(
        "--render", metavar="FILE", help="write images of the 10 s before the crash: out.mp4, or out.png"
    )
    parser.add_argument("--pdb", action="store_true", help="stop in the debugger before the step that crashes")


def run(arguments: argparse.Namespace) -> int:
    """Repeat the crash of a capsule, and print whether it is reproduced.

    :return: Exit status
    :raises RlExtError: If the capsule cannot be read, the environment cannot be built, or a file cannot be written
    """
    for option in ("script", "render"):
        name = getattr(arguments, option)
        if name is not None and not Path(name).absolute().parent.is_dir():
            raise InvalidArgumentError(
                f"--{option} {name!r}: there is no folder {str(Path(name).parent)!r}; expected a file in an existing "
                f"folder. Write --{option} {Path(name).name}"
            )
    from rl_ext_core.recording import replay
    from rl_ext_core.recording.capsule import read_capsule, save_capsule
    from rl_ext_core.recording.images import check_image_path, write_images

    console, path = new_console(), Path(arguments.capsule)
    capsule = read_capsule(path)
    _print_capsule(capsule, path, console)
    if arguments.render is not None:
        check_image_path(Path(arguments.render))
    _require_consent(capsule, arguments, console)
    sys.stdout.flush()
    if arguments.pdb:
        _debug(capsule, arguments.env, console)
        return 0
    frames: list[Any] | None = None if arguments.render is None else []
    result = replay.play(capsule, arguments.env, frames=frames)
    status = _print_result(capsule, result, console)
    if frames is not None:
        fps, *images = frames
        if images:
            write_images(Path(arguments.render), images, fps)
            _print(console, f"{arguments.render}: the last {len(images) / fps:.1f} s before the crash")
        else:
            _print(console, "there are no images, because the environment has not been reset")
    if status == 0 and arguments.minimize:
        with show_progress("trying shorter episodes", replay.MAX_TRIES) as advance:
            short, tries = replay.minimize(capsule, arguments.env, advance)
        if short is capsule:
            _print(console, f"no step of the episode can be left out ({tries} tries)")
        else:
            shorter_path = path.with_name(f"{path.stem}-minimized.rlx")
            save_capsule(shorter_path, short)
            _print(console, f"{shorter_path}: {short.step:,} instead of {capsule.step:,} steps ({tries} tries)")
            capsule = short
    if arguments.script is not None:
        from rl_ext_core.recording.script import write_script

        for line in write_script(Path(arguments.script), capsule, arguments.env, is_reproduced=status == 0):
            _print(console, line)
    return status


def _print(console: Console, text: str) -> None:
    """Print a line without wrapping it."""
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
    """Print what will be executed, and ask for consent.

    :raises InvalidArgumentError: If there is no consent, or the capsule has no factory.
    """
    if arguments.env is None and capsule.factory_pickle is None:
        raise InvalidArgumentError(
            f"{arguments.capsule!r} has no factory, because {capsule.source or 'it'} could not be pickled; expected "
            "--env. Write --env module:function"
        )
    code = []
    if arguments.env is None:
        code.append(f"the pickled code of the factory {capsule.source}")
    if capsule.calls_pickle is not None:
        code.append("pickled arguments of calls")
    process = "this process" if arguments.pdb else "a process of its own"
    if not code:
        _print(console, f"executes --env {arguments.env} in {process}")
        return
    _print(console, f"executes {' and '.join(code)} in {process}")
    if arguments.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise InvalidArgumentError(
            "the capsule's code is executed only with consent; expected --yes, or --env for your own code. Write --yes "
            "if you trust the origin of the file"
        )
    try:
        answer = input("Continue? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise InvalidArgumentError("nothing was executed, because the answer was not y. Use --env for your own code")


def _print_result(capsule: Capsule, result: ReplayResult, console: Console) -> int:
    """Print whether the crash is reproduced, and return the exit status."""
    differs = result.first_difference is not None
    difference = f"first difference at step {result.first_difference:,}" if differs else ""
    if result.failure is None:
        if differs:
            _print(console, f"does not crash: {difference}: the environment is not deterministic")
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
            _print(console, f"but {difference}: the environment is not deterministic")
        return 0
    expected = f"{capsule.failure.kind} at step {capsule.step:,}"
    _print(console, f"crashed elsewhere: {where}, {result.describe()}; expected {expected}")
    if differs:
        _print(console, f"{difference}: the environment is not deterministic")
    return 1


def _debug(capsule: Capsule, source: str | None, console: Console) -> None:
    """Repeat the episode in this process, and stop in the debugger before the last call."""
    import bdb
    import pdb

    from rl_ext_core.recording.recorder import repeat_calls
    from rl_ext_core.recording.replay import OutputCheck, build_env, prepare_env

    log = capsule.load_log()
    last = len(log.calls) - 1

    def stop_before_last(call: int, step: int, name: str, first_difference: int | None) -> None:
        """Stop in the debugger before the last call."""
        if call == last:
            _print(console, f"next is {name} {step:,}; 'up' shows its frame, and 'n' continues to the call")
            pdb.set_trace()

    env = prepare_env(build_env(capsule, source), log)
    with contextlib.suppress(bdb.BdbQuit):  # 'q' in the debugger
        repeat_calls(env, log, read=OutputCheck(env, in_space=False).check, before_call=stop_before_last)

"""Verdicts of ``probe`` and their times, against the right verdicts.

    python -m benchmarks.isolation [--repeats 2] [--no-hang]

The environments are real ones, and variants of a toy simulator in C that differ in how they handle a second instance or
process. Each environment is probed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium

from benchmarks.measure import machine
from rl_ext_core.isolation import Isolation, Verdict, probe
from tests.core.isolation import simulator
from tests.core.isolation.conftest import SHARED_MEMORY, compile_variant
from tests.core.isolation.test_probe import OWN_CWD, VARIANTS

INDEPENDENT, SINGLE = Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE


def pong() -> Any:
    """Make Pong without wrappers."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5")


def airstriker() -> Any:
    """Make the game that stable-retro includes."""
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")


def real_envs() -> Iterator[tuple[str, Any, Isolation, bool]]:
    """Yield name, source, right verdict, and if ``cwd="own"`` helps, of real environments."""
    yield "CartPole-v1", "CartPole-v1", INDEPENDENT, False
    for package, name, source, expected in (
        ("mujoco", "HalfCheetah-v5", "HalfCheetah-v5", INDEPENDENT),
        ("ale_py", "ALE/Pong-v5", pong, INDEPENDENT),
        ("stable_retro", "stable-retro, Airstriker", airstriker, SINGLE),
    ):
        if importlib.util.find_spec(package) is not None:
            yield name, source, expected, False
        else:
            print(f"{name:34} left out: {package} is not installed")
    if importlib.util.find_spec("fmpy") is not None:
        yield "FMU with the flag", functools.partial(simulator.HoldsFmu, "true"), SINGLE, False


def toy_envs(folder: Path, *, hanging: bool) -> Iterator[tuple[str, Any, Isolation, bool]]:
    """Yield name, source, right verdict, and if ``cwd="own"`` helps, of toy variants."""
    for name, (expected, text) in VARIANTS.items():
        if hanging or name != "HANG_OF_SECOND":
            yield name.lower(), compile_variant(folder, name), expected, text == OWN_CWD


def probe_repeatedly(run_probe: Callable[[], Verdict], repeats: int) -> tuple[list[Verdict], float]:
    """Probe several times, and return the verdicts and their median seconds."""
    found = [run_probe() for _ in range(repeats)]
    return found, statistics.median(verdict.seconds for verdict in found)


def main() -> None:
    """Probe all environments, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=main.__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="probes of each environment")
    parser.add_argument("--no-hang", action="store_true", help="leave out the variant that hangs, which takes a minute")
    arguments = parser.parse_args()
    if shutil.which("cc") is None:
        raise SystemExit("no C compiler (cc) for the toy simulator: apt-get install gcc libc6-dev")
    print(machine())
    print(f"\n{'environment':34} {'verdict':18} {'cwd':5} {'probe s':>8}")
    wrong = total = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [*real_envs(), *toy_envs(folder, hanging=not arguments.no_hang)]
        for label, source, expected, helps in sources:
            found, seconds = probe_repeatedly(functools.partial(probe, source), arguments.repeats)
            bad = [one for one in found if one.isolation is not expected or (OWN_CWD in one.explanation) is not helps]
            wrong, total = wrong + len(bad), total + len(found)
            mark = "".join(f"  WRONG: {verdict.isolation.value}, expected {expected.value}" for verdict in bad[:1])
            cwd = "own" if OWN_CWD in found[0].explanation else ""
            row = f"{label:34} {found[0].isolation.value:18} {cwd:5} {seconds:8.2f}{mark}"
            print(row, flush=True)
    SHARED_MEMORY.unlink(missing_ok=True)
    print(f"\n{wrong} wrong of {total} verdicts")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

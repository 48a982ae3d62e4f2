"""What ``probe`` finds out, and how long that takes: ``python -m benchmarks.isolation``.

A toy simulator in C that bears a second instance, or a second process, in all the ways that were met, and real
environments. Every verdict stands beside what it has to be. Each is found out once by a probe and once more from the
cache, whose folder is empty at first.
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
from tests.core.isolation import variants
from tests.core.isolation.fmu import Decay, make_fmu
from tests.core.isolation.swmm import Tank

INDEPENDENT, SINGLE = Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE


def pong() -> Any:
    """The raw game."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5")


def airstriker() -> Any:
    """The game that comes with stable-retro."""
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")


def real(folder: Path, compiler: str) -> Iterator[tuple[str, Any, Isolation, str | None]]:
    """Name, source, verdict and cure; those whose package is not installed are left out."""
    yield "CartPole-v1", "CartPole-v1", INDEPENDENT, None
    for package, name, source, expected in (
        ("mujoco", "HalfCheetah-v5", "HalfCheetah-v5", INDEPENDENT),
        ("ale_py", "ALE/Pong-v5", pong, INDEPENDENT),
        ("stable_retro", "stable-retro, Airstriker", airstriker, SINGLE),
        ("pyswmm", "pyswmm", Tank, SINGLE),
    ):
        if importlib.util.find_spec(package) is not None:
            yield name, source, expected, None
        else:
            print(f"{name:34} left out: {package} is not installed")
    if importlib.util.find_spec("fmpy") is not None:
        fmu = make_fmu(folder / "decay.fmu", compiler)
        yield "FMU with the flag", functools.partial(Decay, str(fmu)), SINGLE, None


def toys(folder: Path, compiler: str, *, hanging: bool) -> Iterator[tuple[str, Any, Isolation, str | None]]:
    """The same of the toy simulator's variants."""
    for name, (expected, _) in variants.VARIANTS.items():
        yield name.lower(), variants.compiled(name, folder, compiler), expected, None
    for name, (cure, _) in variants.COLLIDING.items():
        expected_cure = None if cure == "cwd" else cure
        yield name.lower(), variants.compiled(name, folder, compiler), Isolation.PROCESSES_COLLIDE, expected_cure
    if hanging:
        yield variants.HANGING.lower(), variants.compiled(variants.HANGING, folder, compiler), SINGLE, None


def times(find_out: Callable[[], Verdict], repeats: int) -> tuple[list[Verdict], float]:
    """The verdicts, and the median of the seconds that they took."""
    found = [find_out() for _ in range(repeats)]
    return found, statistics.median(verdict.seconds for verdict in found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=main.__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="probes of each environment")
    parser.add_argument("--no-hang", action="store_true", help="leave out the variant that hangs, and takes 30 s")
    arguments = parser.parse_args()
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("no C compiler (cc) for the toy simulator: apt-get install gcc libc6-dev")
    print(machine())
    print(f"\n{'environment':34} {'verdict':18} {'cure':18} {'probe s':>8} {'cached s':>9}")
    wrong = total = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [*real(folder, compiler), *toys(folder, compiler, hanging=not arguments.no_hang)]
        for label, source, expected, cure in sources:
            found, seconds = times(functools.partial(probe, source, cache=False), arguments.repeats)
            probe(source, cache=folder / "cache")
            again = probe(source, cache=folder / "cache")
            cached = f"{again.seconds:9.3f}" if again.declared_by == "cache" else f"{'-':>9}"
            bad = [verdict for verdict in (*found, again) if (verdict.isolation, verdict.cure) != (expected, cure)]
            wrong, total = wrong + len(bad), total + len(found) + 1
            mark = "".join(f"  WRONG: {verdict.isolation.value}, expected {expected.value}" for verdict in bad[:1])
            verdict = found[0]
            row = f"{label:34} {verdict.isolation.value:18} {verdict.cure or '':18} {seconds:8.2f} {cached}{mark}"
            print(row, flush=True)
    variants.SHARED_MEMORY.unlink(missing_ok=True)
    print(f"\n{wrong} wrong of {total} verdicts; '-': not kept, because it is no knowledge or its library is gone")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

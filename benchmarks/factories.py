"""How faithful copies of environments are, over all environments of the families that are installed.

Every environment is copied in the middle of an episode, as ``as_factory`` does it. The copy is *exact* if all that can
be reached from it is equal, and it does the same as the original, bit for bit, for 15 steps from then on and for 15
after a reset; if only the latter, it is exact *after a reset*. Then up to 400 settings of the original are changed and
it is copied again: each change is in the copy, or the copy is refused, or it was lost: a *silent drift*.

VMAS and Melting Pot are checked if scripts/check_vmas.sh and scripts/make_meltingpot_venv.sh have installed them; of
Melting Pot, whose simulator is not deterministic, no steps are compared.

    python -m benchmarks.factories [gymnasium atari "dm_control suite" robosuite ...] [--list]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._factories_once import FAMILIES, NOT_STEPPED
from benchmarks.measure import machine

ELSEWHERE = {"vmas": Path(".venv-vmas/bin/python"), "meltingpot": Path(".venv-meltingpot/bin/python")}
WIDTH = 21


def results(family: str) -> Iterator[dict[str, Any]]:
    """Go through a family in a process of its own."""
    python = ELSEWHERE.get(family, Path(sys.executable))
    command = [str(python), "-m", "benchmarks._factories_once", family]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        yield {"name": "the process", "verdict": "drift", "why": f"it ended with {process.returncode}"}


def count(found: list[dict[str, Any]], verdict: str) -> int:
    """Count the environments with a verdict."""
    return sum(result["verdict"] == verdict for result in found)


def show(family: str, found: list[dict[str, Any]], taken: float) -> int:
    """Print the line of a family, and those that are not exact; give the number of silent drifts."""
    made = [result for result in found if result["verdict"] != "not made"]
    copied = [result for result in made if "bytes" in result]
    silent = count(made, "drift") + sum(len(result["silent"]) for result in copied)
    title = f"{family}*" if family in NOT_STEPPED else family
    dump, load = ([result["seconds"][index] for result in copied] for index in (0, 1))
    print(
        f"{title:{WIDTH}}{len(made):>5}{count(made, 'exact'):>7}{count(made, 'exact after reset'):>9}"
        f"{count(made, 'refused'):>9}{silent:>8}"
        f"{sum(result['carried'] for result in copied):>10}{sum(len(result['refused']) for result in copied):>9}"
        + (
            f"{median(r['bytes'] for r in copied) / 1e6:>9.2f}{median(dump):>8.2f}{median(load):>7.2f}"
            if copied
            else ""
        )
        + f"{taken:>9.0f}",
        flush=True,
    )
    return silent


def details(found: list[dict[str, Any]]) -> None:
    """Print why environments are not exact, and which changes were not carried."""
    for result in found:
        if result["verdict"] != "exact":
            print(f"    {result['name']}: {result['verdict']} {result['why'][:200]}")
        for kind in ("refused", "silent"):
            for text in result.get(kind, ()):
                print(f"    {result['name']}: change {kind}: {text[:200]}")


def main() -> None:
    """Go through the families."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.factories", description=main.__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--list", action="store_true", help="name what is not exact, and changes that were not carried")
    chosen = parser.parse_args()
    print(machine())
    print(f"{'':{WIDTH + 5}}{'exact,':>7}{'exact':>9}{'silent':>17}{'changed settings':>19}{'median of a copy':>24}")
    print(
        f"{'family':{WIDTH}}{'ids':>5}{'now':>7}{'at reset':>9}{'refused':>9}{'drifts':>8}{'carried':>10}{'refused':>9}"
        f"{'MB':>9}{'dump s':>8}{'load s':>7}{'taken s':>9}"
    )
    drifts = 0
    for family in chosen.families or FAMILIES:
        if not ELSEWHERE.get(family, Path(sys.executable)).exists():
            print(f"{family:{WIDTH}}   not installed")
            continue
        begin = time.perf_counter()
        found = list(results(family))
        drifts += show(family, found, time.perf_counter() - begin)
        if chosen.list:
            details(found)
    print(f"* compared without steps: no two of its simulators do the same\n{drifts} silent drifts")
    sys.exit(bool(drifts))


if __name__ == "__main__":
    main()

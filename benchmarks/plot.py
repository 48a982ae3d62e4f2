"""Draw the documentation's plots from the figures in ``benchmarks/results``.

python -m benchmarks.replay_buffer pong breakout mspacman seaquest montezuma
python -m benchmarks.plot
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from benchmarks.measure import RESULTS

PLOTS = Path(__file__).resolve().parent.parent / "docs" / "_static" / "plots"
OURS, THEIRS = "#4c6fae", "#b9bfca"
GAMES = {
    "pong": "Pong",
    "breakout": "Breakout",
    "mspacman": "MsPacman",
    "seaquest": "Seaquest",
    "montezuma": "Montezuma",
}

# Rows of a benchmark, and their labels in the plot.
VEC_ENVS = {
    "steps: one each": "CartPole, one process each",
    "steps: 2 workers": "CartPole, two processes",
    "frames: one each": "100 KB frames, one process each",
    "frames: 2 workers": "100 KB frames, two processes",
}
WRAPPED = {
    'CartPole, device="cpu"': "CartPole",
    'HalfCheetah, device="cpu"': "HalfCheetah",
    'image, device="cpu"': "84 × 84 × 4 images",
    "16 CartPoles, SAME_STEP": "16 CartPoles, SAME_STEP",
}


def load_results(benchmark: str) -> dict[str, Any]:
    """Return the figures that a benchmark has recorded.

    :raises SystemExit: If the benchmark has not been run.
    """
    path = RESULTS / f"{benchmark}.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist. Run python -m benchmarks.{benchmark} first.")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def draw_buffers() -> None:
    """Plot the memory of a million transitions and the sampling speed against SB3's buffer."""
    found = load_results("replay_buffer")
    rows = {title: found["rows"][name] for name, title in GAMES.items() if name in found["rows"]}
    plain = max(row["plain_bytes"] for row in rows.values())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    left.bar(["SB3"], [plain / 1e3], color=THEIRS)
    left.bar(list(rows), [row["bytes"] / 1e3 for row in rows.values()], color=OURS)
    left.bar_label(left.containers[0], [f"{plain / 1e3:.0f} GB"])
    left.bar_label(left.containers[1], [f"{row['bytes']:.0f} MB" for row in rows.values()])
    left.set_yscale("log")
    left.set_ylim(0.03, 400)
    left.set_ylabel("gigabytes")
    left.set_title("A million transitions of 4 × 84 × 84 pixels")
    places = range(len(rows))
    for offset, size in ((-0.2, 32), (0.2, 256)):
        speeds = [row[f"sample_{size}"] for row in rows.values()]
        bars = right.bar([place + offset for place in places], speeds, 0.38, color=OURS, alpha=0.6 if size == 32 else 1)
        right.bar_label(bars, [f"{speed:.1f}×" for speed in speeds], fontsize=8)
        bars.set_label(f"sample({size})")
    right.axhline(1, color=THEIRS, linewidth=2, label="SB3")
    right.set_xticks(list(places), list(rows))
    right.set_ylabel("times as fast as SB3")
    right.set_title("Batches, one thread")
    right.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    right.set_ylim(0, 1.25 * max(max(row["sample_32"], row["sample_256"]) for row in rows.values()))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    figure.text(0.995, 0.005, found["machine"], ha="right", fontsize=6, color="#777777")
    save_plot(figure, "buffers")


def draw_ratios(benchmark: str, name: str, figure_of: str, rows: dict[str, str], title: str, unit: str) -> None:
    """Plot ratios of some rows of a benchmark, with a line at 1 for the baseline."""
    found = load_results(benchmark)
    ratios = {label: found["rows"][row][figure_of] for row, label in rows.items() if row in found["rows"]}
    figure, axes = plt.subplots(figsize=(7, 0.55 + 0.42 * len(ratios)))
    drawn = axes.barh(list(ratios), list(ratios.values()), color=OURS)
    axes.bar_label(drawn, fmt=" {:.1f}×")
    axes.invert_yaxis()
    axes.axvline(1, color=THEIRS, linewidth=2)
    axes.set_xlim(0, 1.15 * max(ratios.values()))
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.995, 0.01, found["machine"], ha="right", fontsize=5, color="#777777")
    save_plot(figure, name)


def save_plot(figure: Any, name: str) -> None:
    """Write a plot reproducibly, with a white background for dark pages."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    print(PLOTS / f"{name}.svg")


def main() -> None:
    """Draw all plots."""
    argparse.ArgumentParser(prog="python -m benchmarks.plot", description=main.__doc__).parse_args()
    mpl.rcParams["svg.hashsalt"] = "rl-ext"
    draw_buffers()
    draw_ratios(
        "vec_env",
        "vec_env",
        "ratio",
        VEC_ENVS,
        "Eight environments in processes",
        "steps per second relative to SubprocVecEnv",
    )
    draw_ratios(
        "gym_wrapper",
        "gym_wrapper",
        "overhead_ratio",
        WRAPPED,
        "Overhead of a wrapper per step",
        "TorchRL's overhead over ours",
    )


if __name__ == "__main__":
    main()

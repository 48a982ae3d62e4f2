"""The plan: what each way of storing costs, against what the machine has."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from rl_ext_core.errors import InvalidArgumentError, missing_dependency
from rl_ext_core.frames.planning import _text
from rl_ext_core.frames.planning._rows import Row, Suggestion


@dataclass(frozen=True)
class Plan:
    """What a buffer will cost, before it is allocated. ``print(plan)`` shows a table, :meth:`plot` draws it.

    :param shape: of an observation.
    :param dtype: of an observation.
    :param size: transitions, over all environments.
    :param n_envs: number of environments.
    :param n_stack: frames in an observation.
    :param measured: whether the figures are measured on frames that were given; otherwise they are estimates.
    :param source: where the figures are from, in words.
    :param free_bytes: what the machine has now; None where it does not say.
    :param max_bytes: the budget that was given, or None.
    :param rows: one for each way of storing, Stable Baselines3's own first.
    :param suggestions: what smaller observations would save; empty where nothing was measured.
    """

    shape: tuple[int, ...]
    dtype: str
    size: int
    n_envs: int
    n_stack: int
    measured: bool
    source: str
    free_bytes: int | None
    max_bytes: int | None
    rows: tuple[Row, ...]
    suggestions: tuple[Suggestion, ...]

    @property
    def budget(self) -> int | None:
        """What the buffer may take: ``max_bytes``, or what is free; None where neither is known."""
        return self.free_bytes if self.max_bytes is None else self.max_bytes

    @property
    def fits(self) -> bool:
        """Whether there is a way of storing that fits; True where the budget is not known."""
        return any(row.fits is not False for row in self.rows)

    def row(self, name: str) -> Row:
        """The row of that name.

        :raises InvalidArgumentError: if there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise InvalidArgumentError(f"no row is named {name!r}; there are {[row.name for row in self.rows]}")

    def __str__(self) -> str:
        return _text.table(self)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        values = asdict(self)
        for row in values["rows"]:
            row["options"] = dict(row["options"])
            # JSON knows no infinity.
            row["psnr"] = None if row["psnr"] is not None and math.isinf(row["psnr"]) else row["psnr"]
        return values

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory of each way of storing against what is free, and writes it to a file.

        :param path: its ending says which kind of file: ``.png``, ``.svg``, ``.pdf``.
        :raises MissingDependencyError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise missing_dependency("matplotlib", "demo", "Plan.plot()") from None
        # A Figure without pyplot: nothing is shown, and no state is left behind.
        figure = Figure(figsize=(8, 0.45 * len(self.rows) + 1.6), layout="constrained")
        axes = figure.subplots()
        names, totals = [row.name for row in self.rows], [row.total_bytes for row in self.rows]
        colours = ["tab:red" if row.fits is False else "tab:blue" for row in self.rows]
        axes.barh(names, totals, color=colours)
        for at, row in enumerate(self.rows):
            axes.annotate(f" {_text.in_bytes(row.total_bytes)}", (row.total_bytes, at), va="center")
            if row.range is not None:
                low, high = (bound * self.size for bound in row.range)
                axes.plot([low, high], [at, at], color="black", linewidth=1, marker="|")
        if self.budget is not None:
            label = "free memory" if self.max_bytes is None else "max_bytes"
            axes.axvline(self.budget, color="black", linestyle="--", label=f"{label}: {_text.in_bytes(self.budget)}")
            axes.legend(loc="lower right")
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel("bytes" if self.measured else "bytes (estimates; bars show the range of the recordings)")
        axes.set_title(f"{self.size:,} transitions of {self.shape} {self.dtype}")
        figure.savefig(path)

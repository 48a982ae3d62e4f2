"""What a replay buffer of images will cost, before it is allocated, and whether those that are there will fit.

Where no frames are given, what storing is likely to cost is the range of this project's recordings. Grey frames: five
Atari games, 84×84, four a stack. Others: HalfCheetah and Walker2d filmed from where they start and from a camera that
follows them, and two levels of ViZDoom, all 100×100 RGB, three a stack. ``python -m benchmarks.lossy --estimates``
measures them anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, missing_dependency
from rl_ext_core.frames.codecs import DEFAULT_QUALITY, Loss
from rl_ext_core.frames.layout import StackLayout, candidate_layouts
from rl_ext_core.frames.measuring import (
    ROW_BYTES,
    Case,
    Measured,
    Sample,
    Suggestion,
    channel_first,
    from_frames,
    layout_of,
    measure_all,
    plain_us,
    playing,
    suggestions,
)
from rl_ext_core.frames.store import FrameStore
from rl_ext_core.resources import available_memory

if TYPE_CHECKING:
    import gymnasium


class Estimate(NamedTuple):
    """Bytes a frame takes as a fraction of its raw size: of the smallest recording, in the geometric middle, of the
    largest.
    """

    low: float
    middle: float
    high: float


_GREY = {
    ("raw", 0): Estimate(1.0, 1.0, 1.03),
    ("patch", 0): Estimate(0.014, 0.024, 0.044),
    ("patch+lz4", 0): Estimate(0.008, 0.014, 0.024),
    ("patch", 4): Estimate(0.014, 0.023, 0.043),
    ("patch+lz4", 4): Estimate(0.008, 0.014, 0.023),
    ("jpeg", 0): Estimate(0.15, 0.32, 0.67),
}
_COLOUR = {
    ("raw", 0): Estimate(1.0, 1.02, 1.05),
    ("patch", 0): Estimate(0.049, 0.25, 0.90),
    ("patch+lz4", 0): Estimate(0.038, 0.17, 0.77),
    ("patch", 4): Estimate(0.040, 0.15, 0.38),
    ("patch+lz4", 4): Estimate(0.032, 0.12, 0.32),
    ("jpeg", 0): Estimate(0.17, 0.21, 0.31),
}


def likely_layout(shape: tuple[int, ...], dtype: Any, *, n_stack: int | None) -> StackLayout:
    """How observations of a shape are likely to be stacked: images of RGB where that is possible, else of grey."""
    layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
    if n_stack is not None or len(shape) != 3:
        return layouts[0] if n_stack is not None else layouts[-1]
    by_channels = {layout.frame_channels: layout for layout in layouts[:-1]}
    if min(shape[0], shape[2]) <= 3:
        return layouts[-1]
    return by_channels.get(3) or by_channels.get(1) or layouts[-1]


def estimate(layout: StackLayout, options: Mapping[str, Any]) -> Estimate | None:
    """What a frame of such a layout is likely to take; None where the recordings say nothing about the options."""
    channels = layout.frame_channels if layout.n_stack > 1 else min(layout.shape[0], layout.shape[-1])
    codec = "patch" if options["codec"] == "auto" else options["codec"]
    table = _GREY if channels == 1 else _COLOUR
    return table.get((codec, options.get("max_error", 0)))


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")},
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate("kmgt")},
}


def in_bytes(n_bytes: float) -> str:
    """A size with three digits and a decimal unit."""
    unit = 0
    while n_bytes >= 999.5 and unit < len(_UNITS) - 1:
        n_bytes, unit = n_bytes / 1000, unit + 1
    return f"{n_bytes:.3g} {_UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """A size as people write it: "4GB", "512 MiB", "1e9".

    :raises InvalidArgumentError: if it is none.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(found[1]) * _FACTORS[found[2]]) if found else 0
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InvalidArgumentError(f"{text!r} is no size; for example 4GB, 512MiB or 1000000000")
    return size


@dataclass(frozen=True)
class Row:
    """What one way of storing costs.

    :param name: the codec with its options, as people read it.
    :param options: of ``FrameStore.adaptive`` and of the buffers; empty for Stable Baselines3's own.
    :param bytes_a_transition: with action, reward and flags; of an estimate the geometric middle.
    :param range: of an estimate, from the smallest to the largest of the recordings; where it was measured, what more
        of the same may come to, as far as the parts of what was seen differ. None where there was too little to tell.
    :param total_bytes: of all transitions.
    :param times_less: how many times less memory than Stable Baselines3's ``ReplayBuffer``.
    :param times_less_optimized: likewise, with ``optimize_memory_usage=True``.
    :param sample_us: CPU time to read a transition, both observations; None where it was not measured.
    :param psnr: of what comes out, in dB; None where it is bit-exact, or was not measured.
    :param lossy: whether it is not bit-exact.
    :param capacity: how many transitions fit into the budget; None where there is none.
    :param fits: whether all transitions do.
    """

    name: str
    options: Mapping[str, Any]
    bytes_a_transition: float
    range: tuple[float, float] | None
    total_bytes: int
    times_less: float
    times_less_optimized: float
    sample_us: float | None
    psnr: float | None
    lossy: bool
    capacity: int | None
    fits: bool | None


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
        return table(self)

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
            axes.annotate(f" {in_bytes(row.total_bytes)}", (row.total_bytes, at), va="center")
            if row.range is not None:
                low, high = (bound * self.size for bound in row.range)
                axes.plot([low, high], [at, at], color="black", linewidth=1, marker="|")
        if self.budget is not None:
            label = "free memory" if self.max_bytes is None else "max_bytes"
            axes.axvline(self.budget, color="black", linestyle="--", label=f"{label}: {in_bytes(self.budget)}")
            axes.legend(loc="lower right")
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel("bytes" if self.measured else "bytes (estimates; bars show the range of the recordings)")
        axes.set_title(f"{self.size:,} transitions of {self.shape} {self.dtype}")
        figure.savefig(path)


PLAIN = "SB3 ReplayBuffer"
OPTIMIZED = "SB3 optimize_memory_usage"


def table(plan: Plan) -> str:
    """The plan as text of at most 120 columns."""
    of = "x".join(map(str, plan.shape))
    free = "unknown" if plan.free_bytes is None else in_bytes(plan.free_bytes)
    budget = "" if plan.max_bytes is None else f"; max_bytes: {in_bytes(plan.max_bytes)}"
    lines = [
        f"{plan.size:,} transitions of {of} {plan.dtype}; n_stack {plan.n_stack}, n_envs {plan.n_envs}",
        f"measured: {plan.source}" if plan.measured else f"ESTIMATES, not measured: {plan.source}",
        f"free memory: {free}{budget}",
        "",
    ]
    cells = [["", "transition", "all", "fits", "that fit", "less than SB3", "optimized", "read", "PSNR"]]
    cells += [_cells(row, plan.budget, plan.size) for row in plan.rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for name, *numbers in cells:
        right = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
    lines += ["", *_legend(plan)]
    if plan.suggestions:
        lines += ["", "with smaller observations, lossless (gymnasium.wrappers, around a single environment):"]
        for advice in plan.suggestions:
            size = f"{in_bytes(advice.bytes_a_transition)} a transition, {in_bytes(advice.total_bytes)}"
            lines.append(f"  {advice.line}\n    {advice.shape}: {size}, {advice.times_less:,.0f}x less than SB3 now")
    return "\n".join(lines)


def _cells(row: Row, budget: int | None, n_planned: int) -> list[str]:
    size = in_bytes(row.bytes_a_transition)
    fits = {None: "?", True: "yes", False: "NO"}[row.fits]
    if row.range is not None:
        estimated = "~" if row.sample_us is None else ""
        size = f"{estimated}{size} ({in_bytes(row.range[0])} to {in_bytes(row.range[1])})"
        if budget is not None and row.range[0] * n_planned <= budget < row.range[1] * n_planned:
            fits = "maybe"
    return [
        row.name,
        size,
        in_bytes(row.total_bytes),
        fits,
        "?" if row.capacity is None else f"{row.capacity:,}",
        f"{row.times_less:,.1f}x",
        f"{row.times_less_optimized:,.1f}x",
        "" if row.sample_us is None else f"{row.sample_us:.0f} us",
        "exact" if not row.lossy else "lossy" if row.psnr is None else _decibels(row.psnr),
    ]


def _decibels(psnr: float) -> str:
    return "no error" if math.isinf(psnr) else f"{psnr:.1f} dB"


def _legend(plan: Plan) -> list[str]:
    legend = [
        "transition: bytes with action, reward and flags; that fit: how many transitions fit into the budget;",
        "images are measured channel-first, as VecTransposeImage and ToTensorImage hand them over;",
        "optimized: less than SB3's with optimize_memory_usage=True; read: CPU time a transition, images only",
    ]
    if plan.measured:
        legend.append("in brackets: what more of the same policy may come to; another one sees other frames")
    else:
        legend.append("for figures of your own environment: rl-ext plan ... --env ID, or plan(..., env=make_env)")
    return legend


def priced(
    case: Case,
    ways: Sequence[Mapping[str, Any]],
    sample: Sample | None,
    measured: Sequence[Measured],
    budget: int | None,
) -> tuple[Row, ...]:
    """One row for each way of storing, Stable Baselines3's own first.

    :param ways: options of ``FrameStore.adaptive``.
    :param sample: what was measured on, or None to estimate.
    :param measured: what was, for each of the ways.
    :param budget: bytes that there are, or None where nobody knows.
    :raises InvalidArgumentError: if there is nothing to estimate from.
    """
    row_bytes = ROW_BYTES if sample is None else sample.row_bytes
    plain = 2 * case.layout.stack_bytes + row_bytes
    optimized = case.layout.stack_bytes + row_bytes

    def row(name: str, per_transition: float, options: Mapping[str, Any], fixed: int = 0, **more: Any) -> Row:
        total = int(per_transition * case.size) + fixed
        return Row(
            name=name,
            options=dict(options),
            bytes_a_transition=per_transition,
            total_bytes=total,
            times_less=plain / per_transition,
            times_less_optimized=optimized / per_transition,
            capacity=None if budget is None else max(int((budget - fixed) / per_transition), 0),
            fits=None if budget is None else total <= budget,
            **{"range": None, "sample_us": None, "psnr": None, "lossy": False, **more},
        )

    read: dict[str, Any] = {} if sample is None else {"sample_us": plain_us(sample)}
    rows = [row(PLAIN, plain, {}, **read), row(OPTIMIZED, optimized, {}, **read)]
    for place, options in enumerate(ways):
        name = ", ".join([options["codec"], *(f"{key}={value}" for key, value in options.items() if key != "codec")])
        lossy = bool(options.get("max_error")) or options["codec"] == "jpeg"
        index_bytes = 8
        if sample is not None:
            found = measured[place]
            per_transition = found.frame_bytes + row_bytes
            span = found.range and tuple(end + row_bytes for end in found.range)
            more = {"range": span, "sample_us": found.sample_us, "psnr": found.psnr, "lossy": lossy}
        else:
            likely = estimate(case.layout, options)
            if likely is None:
                raise InvalidArgumentError(
                    f"there is no estimate for {dict(options)}; pass frames= or env= to measure it"
                )
            low, per_transition, high = (part * case.layout.frame_bytes + row_bytes + index_bytes for part in likely)
            more = {"range": (low, high), "lossy": lossy}
        rows.append(row(name, per_transition, options, case.fixed_bytes, **more))
    return tuple(rows)


__all__ = ["MemoryWatch", "Plan", "Row", "Suggestion", "plan"]

_USUAL = ("raw", "patch", "patch+lz4")
_LOSSY: tuple[dict[str, Any], ...] = (
    {"codec": "patch", "max_error": 4},
    {"codec": "patch+lz4", "max_error": 4},
    {"codec": "jpeg", "quality": DEFAULT_QUALITY},
)


def plan(
    shape: Sequence[int] | None,
    size: int,
    *,
    dtype: npt.DTypeLike = np.uint8,
    n_stack: int | None = None,
    n_envs: int = 1,
    frames: Any = None,
    env: gymnasium.Env[Any, Any] | Callable[[], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    codecs: Sequence[str | Mapping[str, Any]] | None = None,
) -> Plan:
    """What each way of storing ``size`` transitions of images costs.

    Measured on the frames given, or on those of a random policy in the environment given, with the range that more of
    the same may come to; without either the figures are estimates, marked as such, with the range of this project's
    recordings.

    :param shape: of an observation, stacked as the buffer gets it; None to take that of the frames or the environment.
    :param size: transitions, over all environments.
    :param dtype: of an observation, where neither frames nor environment say.
    :param n_stack: frames in an observation, or None to find out.
    :param n_envs: number of environments that the buffer is for.
    :param frames: consecutive observations of one environment, or its single frames, at least 129.
    :param env: a gymnasium environment, or what makes one; one that is made here is closed again.
    :param steps: of the random policy; None for as many as it takes until the figures are known to a tenth, from 600
        to 3000.
    :param seed: of the random policy and the environment.
    :param max_bytes: the budget; without it, what the machine has free counts.
    :param codecs: names of codecs, or mappings of options such as ``{"codec": "patch", "max_error": 4}``; by default
        all that suit the observations.
    :return: the plan.
    :raises InvalidArgumentError: if something is out of range, or does not fit the observations.
    :raises InvalidTypeError: if something is of another type.
    :raises MissingDependencyError: if a codec that is named needs a package that is not installed.
    """
    for name, value in (("size", size), ("n_envs", n_envs), ("max_bytes", 1 if max_bytes is None else max_bytes)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InvalidTypeError(f"{name}={value!r} must be a whole number, for example {name}=1_000_000")
        if value < 1:
            raise InvalidArgumentError(f"{name}={value} must be at least 1")
    if frames is not None and env is not None:
        raise InvalidArgumentError("frames and env exclude each other; pass the one that the figures are to be for")
    given = None if shape is None else tuple(map(int, shape))
    with contextlib.ExitStack() as stack:
        sample: Sample | None = None
        if frames is not None:
            sample = from_frames(frames, shape=given, n_stack=n_stack)
        elif env is not None:
            sample = stack.enter_context(playing(env, steps=steps, shape=given, n_stack=n_stack, seed=seed))
        elif given is None:
            raise InvalidArgumentError(
                "shape=None needs frames or env to take it from; for example shape=(100, 100, 9)"
            )
        if sample is not None:
            given, sample = sample.before.shape[1:], channel_first(sample)
            layout = layout_of(sample, n_stack=n_stack)
        else:
            layout = likely_layout(given or (), dtype, n_stack=n_stack)
        case = Case(layout, int(size), int(n_envs))
        ways = [_options(way) for way in (_suiting(case) if codecs is None else codecs)]
        # The last one is what suggestions are compared with.
        measured = [] if sample is None else measure_all(sample, layout, [*ways, {"codec": "auto"}])
    free = available_memory()
    budget = free if max_bytes is None else int(max_bytes)
    return Plan(
        shape=tuple(map(int, given or layout.shape)),
        dtype=str(layout.dtype),
        size=case.size,
        n_envs=case.n_envs,
        n_stack=int(layout.n_stack),
        measured=sample is not None,
        source=(
            "the range of recordings of games and robots"
            if sample is None
            else sample.described(measured[-1].n_transitions)
        ),
        free_bytes=free,
        max_bytes=None if max_bytes is None else int(max_bytes),
        rows=priced(case, ways, sample, measured, budget),
        suggestions=() if sample is None else suggestions(sample, case, measured[-1]),
    )


def _options(way: str | Mapping[str, Any]) -> dict[str, Any]:
    """The options of one way of storing.

    :raises InvalidArgumentError: if one is unknown.
    """
    options = {"codec": way} if isinstance(way, str) else dict(way)
    if unknown := sorted(set(options) - {"codec", "max_error", "quality", "block_length"}):
        raise InvalidArgumentError(
            f"codecs has {way!r} with {unknown}; known are codec, max_error, quality and block_length, for example "
            '{"codec": "patch", "max_error": 4}'
        )
    return {"codec": "auto", **options}


def _suiting(case: Case) -> list[dict[str, Any]]:
    """The usual ways that the observations and the packages installed allow."""
    found = []
    layouts = list(candidate_layouts(case.layout.shape, case.layout.dtype, n_stack=case.layout.n_stack))
    for options in (*({"codec": name} for name in _USUAL), *_LOSSY):
        loss = {"max_error": 0, "quality": DEFAULT_QUALITY, **options}
        try:
            Loss.asked_for(loss.pop("codec"), layouts, block_length=None, **loss)
        except (InvalidArgumentError, InvalidTypeError, ImportError):
            continue
        found.append(options)
    return found


class Forecast(NamedTuple):
    """Bytes that stores will take when they are full: at least, probably, at most. All the same once that is known."""

    low: int
    middle: int
    high: int


def forecast(stores: Sequence[FrameStore]) -> Forecast:
    """What stores will take: by what they hold where that says enough, else by this project's recordings."""
    parts = [_forecast(store) for store in stores]
    return Forecast(*(sum(part[at] for part in parts) for at in range(3)))


def _forecast(store: FrameStore) -> Forecast:
    n_transitions = store.capacity * store.n_envs
    if store.size >= MemoryWatch.KNOWN_AT:
        return Forecast(*[store.nbytes * store.capacity // store.size] * 3)
    layout = store.layout
    if layout.n_stack == 1:
        layout = likely_layout(layout.shape, layout.dtype, n_stack=store.options["n_stack"])
    likely = estimate(layout, store.options) if len(layout.shape) > 1 else None
    parts = likely or (1.0, 1.0, 1.0)
    return Forecast(*(int(n_transitions * part * layout.frame_bytes) for part in parts))


class MemoryWatch:
    """Warns once, as soon as it is clear that stores will not fit: when they are made, or when their sizes are known.

    :param stores: of one buffer.
    :param other_bytes: what the buffer takes beside them.
    """

    KNOWN_AT = 4096  # transitions an environment, after which the stores are found out

    def __init__(self, stores: Sequence[FrameStore], *, other_bytes: int = 0) -> None:
        self._stores, self._other_bytes, self._warned = list(stores), other_bytes, False

    def look(self) -> None:
        """Warns where the stores will probably not fit, unless it was said before."""
        free, expected = available_memory(), forecast(self._stores)
        held = sum(store.nbytes for store in self._stores)
        if self._warned or free is None or expected.middle + self._other_bytes <= free + held:
            return
        self._warned = True
        warnings.warn(self._text(free + held, expected), stacklevel=3)

    def _text(self, free: int, expected: Forecast) -> str:
        largest = max(self._stores, key=lambda store: store.layout.stack_bytes)
        layout, n_transitions = largest.layout, largest.capacity * largest.n_envs
        size = in_bytes(expected.middle + self._other_bytes)
        known = expected.low == expected.high
        spread = f"{in_bytes(expected.low)} to {in_bytes(expected.high)} by estimate"
        how = "by what it holds so far" if known else spread
        plain = in_bytes(2 * n_transitions * layout.stack_bytes)
        stack = f" --stack {layout.n_stack}" if layout.n_stack > 1 else ""
        envs = f" --envs {largest.n_envs}" if largest.n_envs > 1 else ""
        return (
            f"{n_transitions:,} transitions of {layout.shape} {layout.dtype} will take {size} ({how}), and "
            f"{in_bytes(free)} are free; uncompressed they would take {plain}. Pass a smaller buffer_size, max_bytes=, "
            "storage_dir= or max_error=; what each of them costs in your environment says\n"
            f"    rl-ext plan --shape {','.join(map(str, layout.shape))} --size {n_transitions}{stack}{envs} --env ID"
        )

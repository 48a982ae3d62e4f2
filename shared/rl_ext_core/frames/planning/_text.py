"""A plan as text, and sizes as people write them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from rl_ext_core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rl_ext_core.frames.planning._plan import Plan
    from rl_ext_core.frames.planning._rows import Row

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
        size = f"~{size} ({in_bytes(row.range[0])} to {in_bytes(row.range[1])})"
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
    if not plan.measured:
        legend.append("for figures of your own environment: rl-ext plan ... --env ID, or plan(..., env=make_env)")
    return legend

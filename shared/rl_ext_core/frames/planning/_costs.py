"""The rows of a plan: bytes and times of each way of storing, measured or estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.frames.planning._estimates import estimate
from rl_ext_core.frames.planning._measured import measure, plain_us
from rl_ext_core.frames.planning._rows import ROW_BYTES, Case, Row, Sample

PLAIN = "SB3 ReplayBuffer"
OPTIMIZED = "SB3 optimize_memory_usage"


def priced(case: Case, ways: Sequence[Mapping[str, Any]], sample: Sample | None, budget: int | None) -> tuple[Row, ...]:
    """One row for each way of storing, Stable Baselines3's own first.

    :param ways: options of ``AdaptiveStore``.
    :param sample: what to measure on, or None to estimate.
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
    for options in ways:
        name = ", ".join([options["codec"], *(f"{key}={value}" for key, value in options.items() if key != "codec")])
        lossy = bool(options.get("max_error")) or options["codec"] == "jpeg"
        index_bytes = 8
        if sample is not None:
            found = measure(sample, case.layout, options)
            per_transition = found.frame_bytes + row_bytes
            more = {"sample_us": found.sample_us, "psnr": found.psnr, "lossy": lossy}
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

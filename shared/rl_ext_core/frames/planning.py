"""Memory plans for replay buffers, and warnings for buffers that will not fit.

Without frames to measure, estimates are the range of this project's recordings. Gray frames are from five Atari games,
84×84, four per stack. RGB frames are 100×100, three per stack: HalfCheetah and Walker2d with a fixed and a tracking
camera, and two ViZDoom levels. ``python -m benchmarks.lossy --estimates`` measures them again.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, stacking_axes
from rl_ext_core.frames.store import FrameStore, Observation, StoredPart
from rl_ext_core.resources import available_memory

if TYPE_CHECKING:
    import gymnasium

__all__ = ["Plan", "PlanRow", "format_bytes", "parse_bytes", "plan", "warn_if_too_large"]

_Array = npt.NDArray[Any]
_Transitions = Iterator[tuple[_Array, _Array]]  # observations and next observations
_Range = tuple[float, float, float]  # lowest, probable and highest bytes

# Compressed size of a frame as a fraction of its raw size, by codec and max_error, for gray and for RGB frames. The
# three numbers are the smallest recording, the geometric middle, and the largest recording.
_RECORDED_FRACTIONS = {
    ("raw", 0): ((1.0, 1.0, 1.03), (1.0, 1.02, 1.05)),
    ("patch", 0): ((0.014, 0.024, 0.044), (0.049, 0.25, 0.90)),
    ("patch", 4): ((0.014, 0.023, 0.043), (0.040, 0.15, 0.38)),
    ("jpeg", 0): ((0.15, 0.32, 0.67), (0.17, 0.21, 0.31)),
}
_INDEX_BYTES = 8  # per transition
_ROW_BYTES = 20  # per transition, without frames: an action of 8 bytes, reward, done and timeout
_DEFAULT_OPTIONS: tuple[dict[str, Any], ...] = (
    {"codec": "raw"},
    {"codec": "patch"},
    {"codec": "patch", "max_error": 4},
    {"codec": "jpeg"},
)

_STEPS = 600  # that are measured, fewer if frames are large
_LEAST_STEPS = 128  # with fewer, sizes cannot be measured
_MOST_BYTES = 1 << 26  # of these frames, uncompressed
_PARTS = 10  # parts of the steps, whose sizes are compared
_ERROR_FACTOR = 2.5  # standard errors of the parts' mean that cover 95 % for so few parts


def format_bytes(n_bytes: float) -> str:
    """Format a size with three digits and a decimal unit, such as "12.3 kB"."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while n_bytes >= 999.5 and len(units) > 1:
        n_bytes /= 1000
        del units[0]
    return f"{n_bytes:.3g} {units[0]}"


def parse_bytes(text: str) -> int:
    """Parse a size such as "4GB", "512 MiB" or "1e9".

    :return: Size in bytes
    :raises InvalidArgumentError: If the text is not a size
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", text.lower())
    try:
        number, prefix, unit = found.groups() if found else ("0", None, None)
        size = int(float(number) * (1024 if unit == "ib" else 1000) ** " kmgt".index(prefix or " "))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InvalidArgumentError(f"{text!r} is not a size; for example 4GB, 512MiB or 1000000000")
    return size


@dataclass(frozen=True)
class PlanRow:
    """Memory of one way to store transitions.

    :param name: Codec and its options, for people to read
    :param options: Options for ``Observation`` and the buffers; empty for Stable Baselines3's own buffers
    :param bytes_a_transition: Bytes per transition, with action, reward and flags; the geometric middle of an estimate
    :param range: Lowest and highest bytes per transition: those of the recordings of an estimate, or a 95 % interval of
        a measurement. None for Stable Baselines3's own buffers.
    :param total_bytes: Bytes of all transitions
    :param times_less: Factor by which it takes less memory than Stable Baselines3's ``ReplayBuffer``
    :param lossy: Whether observations may change
    :param capacity: Number of transitions that fit into the budget; None without a budget
    :param fits: Whether all transitions fit into the budget; None without a budget
    """

    name: str
    options: Mapping[str, Any]
    bytes_a_transition: float
    range: tuple[float, float] | None
    total_bytes: int
    times_less: float
    lossy: bool
    capacity: int | None
    fits: bool | None


_TABLE_LEGEND = """
transition: bytes with action, reward and flags; capacity: number of transitions that fit into the budget;
smaller or gray images take less memory in every row: gymnasium's ResizeObservation, GrayscaleObservation
"""
_MEASURED = "in brackets: the expected range for more steps of the same policy; another policy sees other frames"
_ESTIMATED = "to measure your own environment: rl-ext plan ... --env ID, or plan(..., env=make_env)"


@dataclass(frozen=True)
class Plan:
    """Memory that a buffer will take with each codec.

    ``print(plan)`` shows a table.

    :param shape: Shape of an observation
    :param dtype: Dtype of an observation
    :param size: Number of transitions over all environments
    :param n_envs: Number of environments
    :param n_stack: Frames per observation
    :param measured: Whether sizes were measured on given frames; otherwise they are estimates
    :param source: Source of the sizes, for people to read
    :param free_bytes: Free memory of this machine in bytes; None if unknown
    :param max_bytes: Budget that was passed, in bytes; None if none was passed
    :param rows: One row for each way to store transitions, Stable Baselines3's own first

    >>> from rl_ext_core.frames import plan
    >>> found = plan((4, 84, 84), 100_000, n_stack=4, max_bytes=8_000_000_000)
    >>> found.measured, found.size
    (False, 100000)
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
    rows: tuple[PlanRow, ...]

    @property
    def budget(self) -> int | None:
        """Bytes that the buffer may take: ``max_bytes``, else free memory; None if unknown."""
        return self.free_bytes if self.max_bytes is None else self.max_bytes

    @property
    def fits(self) -> bool:
        """Whether at least one row fits into the budget; True if the budget is unknown."""
        return any(row.fits is not False for row in self.rows)

    def row(self, name: str) -> PlanRow:
        """Return the row of that name.

        :raises InvalidArgumentError: If there is no such row
        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise InvalidArgumentError(f"name={name!r} is not a row; expected one of {[*rows]}")
        return rows[name]

    def _cells(self, row: PlanRow) -> tuple[str, ...]:
        size, fits = format_bytes(row.bytes_a_transition), {None: "?", True: "yes", False: "NO"}[row.fits]
        if row.range is not None:
            low, high = row.range
            size = f"{'' if self.measured else '~'}{size} ({format_bytes(low)} to {format_bytes(high)})"
            if self.budget is not None and low * self.size <= self.budget < high * self.size:
                fits = "maybe"
        capacity = "?" if row.capacity is None else f"{row.capacity:,}"
        exact = "no" if row.lossy else "yes"
        return row.name, size, format_bytes(row.total_bytes), fits, capacity, f"{row.times_less:,.1f}x", exact

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else format_bytes(self.free_bytes)
        lines = [
            f"{self.size:,} transitions of {'x'.join(map(str, self.shape))} {self.dtype}; n_stack {self.n_stack}, "
            f"n_envs {self.n_envs}",
            f"{'measured' if self.measured else 'ESTIMATES, not measured'}: {self.source}",
            f"free memory: {free}{'' if self.max_bytes is None else f'; max_bytes: {format_bytes(self.max_bytes)}'}",
            "",
        ]
        headings = ("", "transition", "total", "fits", "capacity", "less than SB3", "exact")
        table = [headings, *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for name, *numbers in table:
            right = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
        return "\n".join(lines) + "\n" + _TABLE_LEGEND + (_MEASURED if self.measured else _ESTIMATED)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return asdict(self)


def plan(
    shape: Sequence[int] | None,
    size: int,
    *,
    dtype: npt.DTypeLike = np.uint8,
    n_stack: int | None = None,
    n_envs: int = 1,
    env: gymnasium.Env[Any, Any] | Callable[[], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
) -> Plan:
    """Compute the memory that each way to store ``size`` transitions of images takes.

    Sizes are measured on the frames of a random policy in ``env``. Without it they are estimates, marked as such, with
    the range of this project's recordings.

    :param shape: Shape of an observation, stacked as the buffer gets it; None to use that of ``env``
    :param size: Number of transitions over all environments
    :param dtype: Dtype of an observation, if ``env`` is not given
    :param n_stack: Frames per observation; None to detect them
    :param n_envs: Number of environments of the buffer
    :param env: A gymnasium environment, or a function that creates one; the plan closes an environment it created
    :param steps: Steps of the random policy, at least 128; None for 600, or fewer if frames are large
    :param seed: Seed of the random policy and the environment
    :param max_bytes: Budget in bytes; None for the free memory of this machine
    :return: The plan, with one row for each way to store transitions
    :raises InvalidArgumentError: If an argument is out of range, or does not fit the observations
    :raises InvalidTypeError: If an argument has the wrong type

    >>> from rl_ext_core.frames import plan
    >>> found = plan((4, 84, 84), 100_000, n_stack=4)
    >>> found.row("SB3 ReplayBuffer").total_bytes > 5 * found.row("patch").total_bytes
    True
    """
    for name, value in {"size": size, "n_envs": n_envs, "steps": steps, "max_bytes": max_bytes}.items():
        least = _LEAST_STEPS if name == "steps" else 1
        if value is None and name in ("steps", "max_bytes"):
            continue
        if not isinstance(value, (int, np.integer)):
            raise InvalidTypeError(f"{name}={value!r} must be an integer; for example {name}=1_000_000")
        if value < least:
            raise InvalidArgumentError(f"{name}={value} must be at least {least}")
    if shape is not None and not isinstance(shape, tuple | list | np.ndarray):
        raise InvalidTypeError(f"shape={shape!r} must be a tuple of integers; for example shape=(100, 100, 9)")
    given, row_bytes = None if shape is None else tuple(map(int, shape)), _ROW_BYTES
    if env is not None:
        layout, given, source, row_bytes, sizes = _measure_env(env, given, n_stack, steps, seed)
    elif given is None:
        raise InvalidArgumentError("shape=None needs env; pass it, or for example shape=(100, 100, 9)")
    else:
        layout, source = _guess_layout(given, dtype, n_stack), "the range of recordings of games and robots"
        sizes = [(options, _estimate_bytes(layout, options)) for options in _suitable_options(layout)]
    free, measured = available_memory(), env is not None
    budget, plain_bytes, rows = free if max_bytes is None else max_bytes, 2 * layout.stack_bytes, []
    # For each environment, a store also has the newest stacks and an open segment.
    fixed = n_envs * (3 * layout.stack_bytes + 20 * layout.frame_bytes)
    plain = {"SB3 ReplayBuffer": plain_bytes, "SB3 optimize_memory_usage": plain_bytes // 2}
    for name, options, found in (
        *((name, {}, (n_bytes,) * 3) for name, n_bytes in plain.items()),
        *((_format_options(options), options, found) for options, found in sizes),
    ):
        low, middle, high = (n_bytes + row_bytes for n_bytes in found)
        extra = fixed if options else 0
        total = int(middle * size + extra)
        rows.append(
            PlanRow(
                name=name,
                options=dict(options),
                bytes_a_transition=middle,
                range=(low, high) if options else None,
                total_bytes=total,
                times_less=(plain_bytes + row_bytes) / middle,
                lossy=bool(options.get("max_error")) or options.get("codec") == "jpeg",
                capacity=None if budget is None else max(int((budget - extra) / middle), 0),
                fits=None if budget is None else total <= budget,
            )
        )
    return Plan(
        shape=given,
        dtype=str(layout.dtype),
        size=int(size),
        n_envs=int(n_envs),
        n_stack=int(layout.n_stack),
        measured=measured,
        source=source,
        free_bytes=free,
        max_bytes=None if max_bytes is None else int(max_bytes),
        rows=tuple(rows),
    )


def _format_options(options: Mapping[str, Any]) -> str:
    return ", ".join([options["codec"], *(f"{key}={value}" for key, value in options.items() if key != "codec")])


def _suitable_options(layout: StackLayout, n_stack: int | None = None) -> list[dict[str, Any]]:
    """Return the options that the observations and the installed packages allow."""
    found = []
    for options in _DEFAULT_OPTIONS:
        with suppress(InvalidArgumentError, InvalidTypeError, ImportError):
            StoredPart(None, Observation(layout.shape, layout.dtype, n_stack=n_stack, **options), 1)
            found.append(options)
    return found


def _guess_layout(shape: tuple[int, ...], dtype: npt.DTypeLike, n_stack: int | None) -> StackLayout:
    """Guess the layout of observations of a shape: RGB frames if possible, else gray frames."""
    layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
    if len(shape) != 3 or min(shape[0], shape[2]) <= 3:
        return layouts[-1]
    by_channels = {layout.frame_channels: layout for layout in layouts}
    return by_channels.get(3) or by_channels.get(1) or layouts[-1]


def _estimate_bytes(layout: StackLayout, options: Mapping[str, Any]) -> _Range:
    """Return lowest, middle and highest bytes per transition in the recordings, or those of whole frames."""
    channels = layout.frame_channels if layout.n_stack > 1 else min(layout.shape[0], layout.shape[-1])
    found = _RECORDED_FRACTIONS.get((options["codec"], options.get("max_error", 0)), _RECORDED_FRACTIONS["raw", 0])
    low, middle, high = (part * layout.frame_bytes + _INDEX_BYTES for part in found[channels != 1])
    return low, middle, high


def _measure_env(
    env: Any, shape: tuple[int, ...] | None, n_stack: int | None, steps: int | None, seed: int
) -> tuple[StackLayout, tuple[int, ...], str, int, list[tuple[dict[str, Any], _Range]]]:
    """Measure sizes on the frames of a random policy.

    :return: Layout of stored observations, shape of given ones, source of frames, bytes of a row without frames, and
        sizes of each way to store.
    """
    with ExitStack() as opened:
        if isinstance(env, type) or not hasattr(env, "observation_space"):  # classes may define their spaces
            if not callable(env):
                raise InvalidTypeError(f"env={env!r} is not a gymnasium.Env; pass one, or a function that creates one")
            env = env()
            if isinstance(env, type) or not hasattr(env, "observation_space"):
                raise InvalidTypeError(f"env() returned {env!r}, expected a gymnasium.Env")
            opened.callback(env.close)
        space = env.observation_space
        if not hasattr(space, "dtype") or not getattr(space, "shape", None):
            raise InvalidTypeError(
                f"env.observation_space is {space}, expected a Box; wrap the environment so that it returns only the "
                "image"
            )
        source = getattr(getattr(env, "spec", None), "id", None) or type(env.unwrapped).__name__
        frame, axis = tuple(space.shape), stacking_axes(tuple(space.shape))[0]
        times = 1 if frame == shape else n_stack or 1
        if shape is not None and n_stack is None and len(shape) == len(frame):
            times = max(shape[axis] // frame[axis], 1)
        stacked = (*frame[:axis], frame[axis] * times, *frame[axis + 1 :])
        if shape not in (None, stacked):
            raise InvalidArgumentError(
                f"{source} has arrays of shape {frame}, which are neither observations of shape {shape} nor frames "
                f"that stack to them; pass shape={frame}, or wrap the environment so that it returns the stored "
                "observations"
            )
        action = np.asarray(env.action_space.sample())
        row_bytes = _ROW_BYTES - 8 + action.size * (4 if action.dtype.kind == "f" else 8)
        n_bytes = int(np.prod(frame)) * space.dtype.itemsize
        steps = steps or max(min(_STEPS, _MOST_BYTES // n_bytes), _LEAST_STEPS)
        played = itertools.islice(_play_transitions(env, seed), steps)
        layout, sizes = measure_transitions(played, steps, n_stack=n_stack if times == 1 else 1)
        if times > 1:  # a stack takes no more than its newest frame, because the others are stored already
            layout = StackLayout(stacked, layout.dtype, times, axis)
    return layout, stacked, f"{source}, {steps} steps of a random policy", row_bytes, sizes


def measure_transitions(
    transitions: _Transitions, steps: int, *, n_stack: int | None = None
) -> tuple[StackLayout, list[tuple[dict[str, Any], _Range]]]:
    """Measure the size of the observations of successive transitions of one environment, stored in each way.

    :param transitions: Observations and next observations.
    :param steps: Number of transitions.
    :param n_stack: Frames per observation; None to detect them.
    :return: Layout of stored observations, and options and sizes of each way. Sizes are the lowest, probable and
        highest bytes per transition, a 95 % interval.
    """
    first, *_ = head = list(itertools.islice(transitions, 1))
    image = _channel_first(first[0])
    layout, stores, sizes = StackLayout(image.shape, image.dtype, 1, 0), [], []
    option_sets = _suitable_options(layout, n_stack)
    for options in option_sets:
        stores.append(FrameStore(steps, 1, Observation(image.shape, image.dtype, n_stack=n_stack, **options)))
    # The first frames and the buffers are a constant cost. So sizes are measured after the first quarter.
    edges = np.linspace(steps // 4, steps, _PARTS + 1).astype(np.int64)
    for count, pair in enumerate(itertools.chain(head, transitions), start=1):
        for store in stores:
            store.append(*(_channel_first(stack)[None] for stack in pair))
        if count in edges:
            sizes.append([store.nbytes for store in stores])
    parts = np.diff(np.array(sizes, dtype=np.float64), axis=0) / np.diff(edges)[:, None]
    errors, ranges = _ERROR_FACTOR * parts.std(axis=0, ddof=1) / np.sqrt(_PARTS), []
    means = (np.array(sizes[-1]) - sizes[0]) / (steps - edges[0])
    for mean, error in zip(means.tolist(), errors.tolist(), strict=True):
        ranges.append((mean / (1 + error / mean), mean, mean + error))
    return stores[0].layout, list(zip(option_sets, ranges, strict=True))


def _channel_first(image: _Array) -> _Array:
    """Move an image's channels to the front, as SB3 and TorchRL do before storage."""
    is_last = image.dtype == np.uint8 and image.ndim == 3 and image.shape[0] > image.shape[2]
    return np.ascontiguousarray(np.moveaxis(image, -1, 0) if is_last else image)


def _play_transitions(env: Any, seed: int) -> _Transitions:
    """Generate pairs of successive observations of a random policy."""
    space = env.observation_space

    def check(observation: Any) -> _Array:
        """Return a copy of an observation, because environments may overwrite theirs; raise if its shape is wrong."""
        found = np.array(observation)
        if found.shape != space.shape:
            raise EnvironmentOutputError(
                f"env returned an observation of shape {found.shape}, but its observation_space has shape "
                f"{space.shape}; fix the environment"
            )
        return found.astype(space.dtype, copy=False)

    env.action_space.seed(seed)
    after = check(env.reset(seed=seed)[0])
    while True:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        before, after = after, check(observation)
        yield before, after
        if terminated or truncated:
            after = check(env.reset()[0])


MEASURED_AFTER = 4096  # transitions per environment


def warn_if_too_large(store: FrameStore) -> None:
    """Warn if a store with ``MEASURED_AFTER`` transitions will probably not fit into memory when it is full."""
    free = available_memory()
    expected = store.nbytes * store.capacity // store.size
    if free is None or expected <= free + store.nbytes:
        return
    layout = max((part.layout for part in store.parts.values()), key=lambda layout: layout.stack_bytes)
    n_transitions = store.capacity * store.n_envs
    warnings.warn(
        f"{n_transitions:,} transitions of {layout.shape} {layout.dtype} will take {format_bytes(expected)} (measured "
        f"so far), but only {format_bytes(free + store.nbytes)} are free; uncompressed they would take "
        f"{format_bytes(2 * n_transitions * layout.stack_bytes)}. Pass a smaller buffer_size, max_bytes=, storage_dir= "
        "or max_error=",
        stacklevel=3,
    )

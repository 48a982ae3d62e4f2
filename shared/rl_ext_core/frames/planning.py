"""Memory plans for replay buffers, and warnings for buffers that will not fit.

Without frames to measure, estimates are the range of this project's recordings. Gray frames are from five Atari games,
84×84, four per stack. RGB frames are 100×100, three per stack: HalfCheetah and Walker2d with a fixed and a tracking
camera, and two ViZDoom levels. ``python -m benchmarks.lossy --estimates`` measures them again.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.jpeg import DEFAULT_QUALITY
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout, stacking_axes
from rl_ext_core.frames.store import FrameStore, Observation, StoredPart
from rl_ext_core.resources import available_memory

if TYPE_CHECKING:
    import gymnasium

__all__ = ["MemoryWatch", "Plan", "PlanRow", "format_bytes", "parse_bytes", "plan"]

_Array = npt.NDArray[Any]
_Transitions = Iterator[tuple[_Array, _Array]]  # observations and next observations

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
    {"codec": "jpeg", "quality": DEFAULT_QUALITY},
)

_MIN_TRANSITIONS = 128  # with fewer, sizes cannot be measured
_KEPT_STEPS = 300  # steps that are kept uncompressed, to compare and time reads
_MIN_PLAYED_STEPS = 600
_MAX_PLAYED_STEPS = 3000  # playing stops here, even if the sizes are still uncertain
_MAX_STORED_BYTES = 1 << 28  # of all stores together; playing stops here too
_MEASURE_INTERVAL = 16  # transitions between two measurements of the size
_MAX_PARTS = 10  # the steps are divided into at most this many parts, whose sizes are compared
_ERROR_FACTOR = 2.5  # standard errors of the parts' mean that cover 95 % for so few parts
_RELATIVE_TOLERANCE = 0.1  # playing stops once the error of each size is below this part of it
_BATCH, _TIMED_BATCHES = 32, 32  # transitions per batch, and number of batches, whose reads are timed


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
    """Memory and speed of one way to store transitions.

    :param name: Codec and its options, for people to read
    :param options: Options for ``FrameStore.adaptive`` and the buffers; empty for Stable Baselines3's own buffers
    :param bytes_a_transition: Bytes per transition, with action, reward and flags; the geometric middle of an estimate
    :param range: Lowest and highest bytes per transition. For an estimate, they are the smallest and the largest
        recording. For a measurement, they are a 95 % interval. None for Stable Baselines3's own buffers.
    :param total_bytes: Bytes of all transitions
    :param times_less: Factor by which it takes less memory than Stable Baselines3's ``ReplayBuffer``
    :param sample_us: CPU time to read both observations of a transition, in microseconds; None if not measured
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
    sample_us: float | None
    lossy: bool
    capacity: int | None
    fits: bool | None

    def _cells(self, plan: Plan) -> dict[str, str]:
        """Return the cells of this row in the table of a plan, by column."""
        size, fits = format_bytes(self.bytes_a_transition), {None: "?", True: "yes", False: "NO"}[self.fits]
        if self.range is not None:
            low, high = self.range
            size = f"{'' if plan.measured else '~'}{size} ({format_bytes(low)} to {format_bytes(high)})"
            if plan.budget is not None and low * plan.size <= plan.budget < high * plan.size:
                fits = "maybe"
        return {
            "": self.name,
            "transition": size,
            "total": format_bytes(self.total_bytes),
            "fits": fits,
            "capacity": "?" if self.capacity is None else f"{self.capacity:,}",
            "less than SB3": f"{self.times_less:,.1f}x",
            "read": "" if self.sample_us is None else f"{self.sample_us:.0f} us",
            "exact": "no" if self.lossy else "yes",
        }


_TABLE_LEGEND = """
transition: bytes with action, reward and flags; capacity: number of transitions that fit into the budget;
read: CPU time per transition, images only, channel-first as VecTransposeImage and ToTensorImage make them;
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
        for row in self.rows:
            if row.name == name:
                return row
        raise InvalidArgumentError(f"name={name!r} is not a row; expected one of {[row.name for row in self.rows]}")

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else format_bytes(self.free_bytes)
        lines = [
            f"{self.size:,} transitions of {'x'.join(map(str, self.shape))} {self.dtype}; n_stack {self.n_stack}, "
            f"n_envs {self.n_envs}",
            f"{'measured' if self.measured else 'ESTIMATES, not measured'}: {self.source}",
            f"free memory: {free}{'' if self.max_bytes is None else f'; max_bytes: {format_bytes(self.max_bytes)}'}",
            "",
        ]
        cells = [row._cells(self) for row in self.rows]
        columns = [[heading, *(line[heading] for line in cells)] for heading in cells[0]]
        widths = [max(map(len, column)) for column in columns]
        for name, *numbers in zip(*columns, strict=True):
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
    frames: Any = None,
    env: gymnasium.Env[Any, Any] | Callable[[], Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_bytes: int | None = None,
    codecs: Sequence[str | Mapping[str, Any]] | None = None,
) -> Plan:
    """Compute the memory that each way to store ``size`` transitions of images takes.

    Sizes are measured on ``frames``, or on the frames of a random policy in ``env``. Without either they are estimates,
    marked as such, with the range of this project's recordings.

    :param shape: Shape of an observation, stacked as the buffer gets it; None to use that of ``frames`` or ``env``
    :param size: Number of transitions over all environments
    :param dtype: Dtype of an observation, if neither ``frames`` nor ``env`` is given
    :param n_stack: Frames per observation; None to detect them
    :param n_envs: Number of environments of the buffer
    :param frames: Consecutive observations of one environment, or its single frames, at least 129
    :param env: A gymnasium environment, or a function that creates one; the plan closes an environment it created
    :param steps: Steps of the random policy; None for 600 to 3000 steps, until each size is known within 10 %
    :param seed: Seed of the random policy and the environment
    :param max_bytes: Budget in bytes; None for the free memory of this machine
    :param codecs: Names of codecs, or mappings of options such as ``{"codec": "patch", "max_error": 4}``; None for all
        that suit the observations
    :return: The plan, with one row for each way to store transitions
    :raises InvalidArgumentError: If an argument is out of range, or does not fit the observations
    :raises InvalidTypeError: If an argument has the wrong type
    :raises MissingDependencyError: If a codec in ``codecs`` needs a package that is not installed

    >>> from rl_ext_core.frames import plan
    >>> found = plan((4, 84, 84), 100_000, n_stack=4, codecs=["patch"])
    >>> found.row("SB3 ReplayBuffer").total_bytes > 5 * found.row("patch").total_bytes
    True
    """
    for name, value in {"size": size, "n_envs": n_envs, "steps": steps, "max_bytes": max_bytes}.items():
        if value is None and name in ("steps", "max_bytes"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InvalidTypeError(f"{name}={value!r} must be an integer; for example {name}=1_000_000")
        if value < 1:
            raise InvalidArgumentError(f"{name}={value} must be at least 1")
    if frames is not None and env is not None:
        raise InvalidArgumentError("frames and env exclude each other; pass the one to measure")
    if frames is None and env is None and shape is None:
        raise InvalidArgumentError(
            "shape=None needs frames or env; pass one of them, or for example shape=(100, 100, 9)"
        )
    given = None if shape is None else tuple(map(int, shape))
    with ExitStack() as opened:
        sample: _Sample | None = None
        if frames is not None:
            sample = _sample_frames(frames, given, n_stack)
        elif env is not None:
            sample = _sample_random_policy(env, opened, steps, given, n_stack, seed)
        layout = _guess_layout(given or (), dtype, n_stack) if sample is None else sample.layout
        option_sets = (
            _suitable_options(layout) if codecs is None else [_normalize_options(option_set) for option_set in codecs]
        )
        if sample is None:
            costs, plain_us = [_estimate_cost(layout, option_set) for option_set in option_sets], None
            source = "the range of recordings of games and robots"
        else:
            costs, count = _measure_costs(sample, option_sets)
            plain_us = _time_read_us(lambda rows: (sample.before[rows], sample.after[rows]), len(sample.before))
            source = sample.source if env is None else f"{sample.source}, {count} steps of a random policy"
    head = Plan(
        shape=layout.shape if sample is None else sample.shape,
        dtype=str(layout.dtype),
        size=int(size),
        n_envs=int(n_envs),
        n_stack=int(layout.n_stack),
        measured=sample is not None,
        source=source,
        free_bytes=available_memory(),
        max_bytes=None if max_bytes is None else int(max_bytes),
        rows=(),
    )
    row = functools.partial(_make_row, head, layout, _ROW_BYTES if sample is None else sample.row_bytes)
    rows = [
        row("SB3 ReplayBuffer", {}, _Cost(2 * layout.stack_bytes, sample_us=plain_us)),
        row("SB3 optimize_memory_usage", {}, _Cost(layout.stack_bytes, sample_us=plain_us)),
    ]
    for options, cost in zip(option_sets, costs, strict=True):
        name = ", ".join([options["codec"], *(f"{key}={value}" for key, value in options.items() if key != "codec")])
        rows.append(row(name, options, cost))
    return replace(head, rows=tuple(rows))


def _normalize_options(option_set: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return codec options as a dict with ``codec``; raise if there are unknown ones."""
    options = {"codec": option_set} if isinstance(option_set, str) else dict(option_set)
    if unknown := sorted(set(options) - {"codec", "max_error", "quality"}):
        raise InvalidArgumentError(
            f"codecs has {option_set!r} with {unknown}; expected codec, max_error or quality, for "
            'example {"codec": "patch", "max_error": 4}'
        )
    return {"codec": "patch", **options}


def _suitable_options(layout: StackLayout) -> list[dict[str, Any]]:
    """Return the default options that the observations and the installed packages allow."""
    found = []
    for option_set in _DEFAULT_OPTIONS:
        with suppress(InvalidArgumentError, InvalidTypeError, ImportError):
            StoredPart(None, Observation(layout.shape, layout.dtype, n_stack=layout.n_stack, **option_set), 1)
            found.append(option_set)
    return found


def _guess_layout(shape: tuple[int, ...], dtype: npt.DTypeLike, n_stack: int | None) -> StackLayout:
    """Guess the layout of observations of a shape: RGB frames if possible, else gray frames."""
    layouts = list(candidate_layouts(shape, dtype, n_stack=n_stack))
    if len(shape) != 3 or min(shape[0], shape[2]) <= 3:
        return layouts[-1]
    by_channels = {layout.frame_channels: layout for layout in layouts}
    return by_channels.get(3) or by_channels.get(1) or layouts[-1]


def _estimate_bytes(layout: StackLayout, options: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return lowest, middle and highest bytes per transition in the recordings.

    The result is None if there is no recording with these options.
    """
    channels = layout.frame_channels if layout.n_stack > 1 else min(layout.shape[0], layout.shape[-1])
    found = _RECORDED_FRACTIONS.get((options["codec"], options.get("max_error", 0)))
    return found and tuple(part * layout.frame_bytes + _INDEX_BYTES for part in found[channels != 1])


def _estimate_cost(layout: StackLayout, options: Mapping[str, Any]) -> _Cost:
    """Estimate the bytes per transition without data; raise if there is no estimate."""
    if (likely := _estimate_bytes(layout, options)) is None:
        raise InvalidArgumentError(
            f"codecs has {dict(options)}, which has no estimate; pass frames= or env= to measure it"
        )
    low, middle, high = likely
    return _Cost(middle, (low, high))


class _Cost(NamedTuple):
    """Bytes and reading time of a transition."""

    frame_bytes: float  # of both observations
    range: tuple[float, float] | None = None  # lowest and highest frame_bytes to expect
    sample_us: float | None = None


def _make_row(
    plan: Plan, layout: StackLayout, row_bytes: int, name: str, options: Mapping[str, Any], cost: _Cost
) -> PlanRow:
    """Build a row of a plan; empty options are Stable Baselines3's own buffers."""
    per_transition = cost.frame_bytes + row_bytes
    # For each environment, a store also has the newest stacks and an open segment.
    fixed = plan.n_envs * (3 * layout.stack_bytes + 20 * layout.frame_bytes) if options else 0
    total = int(per_transition * plan.size + fixed)
    return PlanRow(
        name=name,
        options=dict(options),
        bytes_a_transition=per_transition,
        range=cost.range and (cost.range[0] + row_bytes, cost.range[1] + row_bytes),
        total_bytes=total,
        times_less=(2 * layout.stack_bytes + row_bytes) / per_transition,
        sample_us=cost.sample_us,
        lossy=bool(options.get("max_error")) or options.get("codec") == "jpeg",
        capacity=None if plan.budget is None else max(int((plan.budget - fixed) / per_transition), 0),
        fits=None if plan.budget is None else total <= plan.budget,
    )


class _Sample(NamedTuple):
    """Consecutive transitions of one environment, with channel-first images."""

    before: _Array
    after: _Array  # the terminal observation if an episode ends
    layout: StackLayout
    shape: tuple[int, ...]  # of an observation before it was made channel-first
    source: str
    row_bytes: int
    rest: _Transitions  # the following transitions, produced on demand


def _make_sample(
    steps: _Transitions, source: str, n_stack: int | None, kept: int | None = None, row_bytes: int = _ROW_BYTES
) -> _Sample:
    """Build a sample of transitions.

    :param kept: Number of transitions to keep in memory; None for all
    """
    first = list(itertools.islice(steps, kept))
    if len(first) < _MIN_TRANSITIONS:
        raise InvalidArgumentError(
            f"{source} has {len(first)} transitions, expected at least {_MIN_TRANSITIONS}; pass more frames or steps"
        )
    before, after = (np.stack([_channel_first(stack) for stack in part]) for part in zip(*first, strict=True))
    candidates = list(candidate_layouts(before.shape[1:], before.dtype, n_stack=n_stack))
    found = find_layout(before.shape[1:], before.dtype, before, after) if n_stack is None else None
    rest = ((_channel_first(one), _channel_first(other)) for one, other in steps)
    return _Sample(before, after, found or candidates[-1], first[0][0].shape, source, row_bytes, rest)


def _channel_first(image: _Array) -> _Array:
    """Move an image's channels to the front, as SB3 and TorchRL do before storage."""
    is_last = image.dtype == np.uint8 and image.ndim == 3 and image.shape[0] > image.shape[2]
    return np.ascontiguousarray(np.moveaxis(image, -1, 0) if is_last else image)


def _sample_frames(frames: Any, shape: tuple[int, ...] | None, n_stack: int | None) -> _Sample:
    """Build a sample from consecutive observations, or single frames, of one environment."""
    given = np.asarray(frames)
    if given.ndim < 2:
        raise InvalidArgumentError(
            f"frames has shape {given.shape}, expected (n, *shape); pass consecutive observations of one environment"
        )
    stacks = itertools.accumulate([None, *given], _make_stacker(given.shape[1:], shape, n_stack, "frames"))
    next(stacks)  # skips the initial None
    return _make_sample(itertools.pairwise(stacks), f"frames ({len(given)} of them)", n_stack)


def _sample_random_policy(
    env: Any, opened: ExitStack, steps: int | None, shape: tuple[int, ...] | None, n_stack: int | None, seed: int
) -> _Sample:
    """Build a sample from a random policy in an environment.

    :param env: A gymnasium environment, or a function that creates one
    :param opened: Stack that closes an environment created here
    """
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
            f"env.observation_space is {space}, expected a Box; for a Dict, pass the image's frames as frames=, "
            "or wrap the environment so that it returns only the image"
        )
    source = getattr(getattr(env, "spec", None), "id", None) or type(env.unwrapped).__name__
    push_frame = _make_stacker(tuple(space.shape), shape, n_stack, source)
    action = np.asarray(env.action_space.sample())
    row_bytes = _ROW_BYTES - 8 + action.size * (4 if action.dtype.kind == "f" else 8)
    played = itertools.islice(_play_transitions(env, push_frame, seed), steps or _MAX_PLAYED_STEPS)
    return _make_sample(played, source, n_stack, steps or _KEPT_STEPS, row_bytes)


def _play_transitions(env: Any, push_frame: Callable[[Any, _Array], _Array], seed: int) -> _Transitions:
    """Generate pairs of successive observations of a random policy, stacked."""
    space = env.observation_space

    def to_stack(observation: Any, older: _Array | None = None) -> _Array:
        """Check an observation's shape, and return the stack that ends with it."""
        frame = np.array(observation)  # a copy, because environments may overwrite theirs
        if frame.shape != space.shape:
            raise EnvironmentOutputError(
                f"env returned an observation of shape {frame.shape}, but its observation_space has shape "
                f"{space.shape}; fix the environment"
            )
        return push_frame(older, frame.astype(space.dtype, copy=False))

    env.action_space.seed(seed)
    after = to_stack(env.reset(seed=seed)[0])
    while True:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        before, after = after, to_stack(observation, after)
        yield before, after
        if terminated or truncated:
            after = to_stack(env.reset()[0])


def _make_stacker(
    frame: tuple[int, ...], shape: tuple[int, ...] | None, n_stack: int | None, source: str
) -> Callable[[Any, _Array], _Array]:
    """Build a function that stacks a source's arrays to observations of ``shape``."""
    if shape is None:
        return functools.partial(_push_frame, n_stack=n_stack or 1, axis=stacking_axes(frame)[0])
    if frame == shape:
        return functools.partial(_push_frame, n_stack=1, axis=0)
    for axis in (len(shape) - 1, 0) if len(frame) == len(shape) else ():
        times = shape[axis] // frame[axis]
        whole = (*frame[:axis], frame[axis] * times, *frame[axis + 1 :])
        if whole == shape and n_stack in (None, times):
            return functools.partial(_push_frame, n_stack=times, axis=axis)
    raise InvalidArgumentError(
        f"{source} has arrays of shape {frame}, which are neither observations of shape {shape} nor frames that stack "
        f"to them; pass shape={frame}, or wrap the environment so that it returns the stored observations"
    )


def _push_frame(older: _Array | None, frame: _Array, *, n_stack: int, axis: int) -> _Array:
    """Append a frame to a stack, as ``VecFrameStack`` does.

    A new episode begins with a stack of zeros.
    """
    if n_stack == 1:
        return frame
    if older is None:
        older = np.concatenate([np.zeros_like(frame)] * n_stack, axis)
    return np.split(np.concatenate([older, frame], axis), [frame.shape[axis]], axis)[1]


def _measure_costs(sample: _Sample, option_sets: Sequence[Mapping[str, Any]]) -> tuple[list[_Cost], int]:
    """Measure the cost of each way to store a sample.

    Sizes vary over time, for example with resets and camera motion. So the size is measured part by part, and more
    transitions are stored until the parts agree.
    """
    stores, kept = [_make_store(sample, options) for options in option_sets], len(sample.before)
    first, sizes, count = kept // 4, [], 0
    transitions = itertools.chain(zip(sample.before, sample.after, strict=True), sample.rest)
    for count, (before, after) in enumerate(transitions, start=1):
        for store in stores:
            store.append(before[None], after[None])
        # Only growth is measured, because the first frames and the buffers are a constant cost.
        if count < first or (count - first) % _MEASURE_INTERVAL:
            continue
        sizes.append([store.nbytes for store in stores])
        if count > kept:
            means, errors = _bytes_per_transition(sizes)
            known = count >= _MIN_PLAYED_STEPS and (errors <= _RELATIVE_TOLERANCE * (means + sample.row_bytes)).all()
            if known or sum(sizes[-1]) > _MAX_STORED_BYTES:
                break
    costs = zip(stores, *_bytes_per_transition(sizes), strict=True)
    return [_measure_cost(store, float(mean), float(error)) for store, mean, error in costs], count


def _make_store(sample: _Sample, options: Mapping[str, Any]) -> FrameStore:
    """Create an empty store for a sample."""
    layout, capacity = sample.layout, max(len(sample.before), _MAX_PLAYED_STEPS)
    return FrameStore.adaptive(capacity, 1, layout.shape, layout.dtype, n_stack=layout.n_stack, **options)


def _bytes_per_transition(sizes: Sequence[Sequence[int]]) -> tuple[_Array, _Array]:
    """Return the bytes per transition of each store, and their estimated errors."""
    measured_sizes, n_windows = np.array(sizes, dtype=np.float64), len(sizes) - 1
    edges = np.linspace(0, n_windows, min(n_windows, _MAX_PARTS) + 1).astype(np.int64)
    parts = np.diff(measured_sizes[edges], axis=0) / (_MEASURE_INTERVAL * np.diff(edges)[:, None])
    errors = _ERROR_FACTOR * parts.std(axis=0, ddof=1) / np.sqrt(len(parts))
    return (measured_sizes[-1] - measured_sizes[0]) / (_MEASURE_INTERVAL * n_windows), errors


def _measure_cost(store: FrameStore, mean: float, error: float) -> _Cost:
    """Measure the reading time of a store."""
    batch = np.empty((2, _BATCH, *store.layout.shape), store.layout.dtype)
    microseconds = _time_read_us(lambda rows: store.get(rows, np.zeros_like(rows), batch[0], batch[1]), store.size)
    return _Cost(mean, (mean / (1 + error / mean), mean + error), microseconds)


def _time_read_us(read: Callable[[npt.NDArray[np.int64]], Any], n_rows: int) -> float:
    """Measure the CPU time to read a transition, in microseconds."""
    rng = np.random.default_rng(0)
    timer = timeit.Timer(lambda: read(rng.integers(n_rows, size=_BATCH)), timer=time.thread_time)
    timer.timeit(1)  # the first read also compiles and allocates
    return timer.timeit(_TIMED_BATCHES) / (_TIMED_BATCHES * _BATCH) * 1e6


class MemoryWatch:
    """Check of a buffer's memory, which warns once if the full store will not fit.

    :param store: Store of the buffer
    :param other_bytes: Bytes that the buffer takes in addition to the frames
    """

    MEASURED_AFTER = 4096  # transitions per environment, after which the size is measured instead of estimated

    def __init__(self, store: FrameStore, *, other_bytes: int = 0) -> None:
        self._store, self._other_bytes, self._warned = store, other_bytes, False

    def warn_if_too_large(self) -> None:
        """Warn if the store will probably not fit, unless this was done before."""
        store, free = self._store, available_memory()
        if self._warned or free is None:
            return
        if store.size >= self.MEASURED_AFTER:
            middle, how = store.nbytes * store.capacity // store.size, "measured so far"
        else:
            low, middle, high = map(sum, zip(*map(self._size_when_full, store.parts.values()), strict=True))
            how = f"estimated range {format_bytes(low)} to {format_bytes(high)}"
            middle += self._other_bytes
        if middle > free + store.nbytes:
            self._warned = True
            warnings.warn(self._warning_text(free + store.nbytes, middle, how), stacklevel=3)

    def _size_when_full(self, part: StoredPart) -> tuple[int, ...]:
        """Return the lowest, probable and highest bytes of the observations of one key in the full store."""
        layout, options = part.layout, part.options._asdict()
        if layout.n_stack == 1:
            layout = _guess_layout(layout.shape, layout.dtype, options["n_stack"])
        likely = _estimate_bytes(layout, options) if len(layout.shape) > 1 else None
        return tuple(int(self._store.capacity * part.n_envs * size) for size in likely or (layout.frame_bytes,) * 3)

    def _warning_text(self, free: int, expected: float, how: str) -> str:
        """Return the warning, with sizes and the command that measures them."""
        layout = max((part.layout for part in self._store.parts.values()), key=lambda layout: layout.stack_bytes)
        n_envs, n_transitions = self._store.n_envs, self._store.capacity * self._store.n_envs
        plain = format_bytes(2 * n_transitions * layout.stack_bytes)
        stack = f" --stack {layout.n_stack}" if layout.n_stack > 1 else ""
        envs = f" --envs {n_envs}" if n_envs > 1 else ""
        return (
            f"{n_transitions:,} transitions of {layout.shape} {layout.dtype} will take {format_bytes(expected)} "
            f"({how}), but only {format_bytes(free)} are free; uncompressed they would take {plain}. Pass a smaller "
            "buffer_size, max_bytes=, storage_dir= or max_error=. To measure what each takes in your environment:\n"
            f"    rl-ext plan --shape {','.join(map(str, layout.shape))} --size {n_transitions}{stack}{envs} --env ID"
        )

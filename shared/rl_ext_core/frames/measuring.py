"""What storing costs, measured on transitions: of frames that are given, or played by a random policy."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.frames.layout import StackLayout, candidate_layouts, find_layout, stacking_axes
from rl_ext_core.frames.store import FrameStore

if TYPE_CHECKING:
    import gymnasium

ROW_BYTES = 20  # beside the frames: one action of 8 bytes, reward, done and timeout


@dataclass(frozen=True)
class Case:
    """The buffer that is planned.

    :param layout: how an observation is stacked.
    :param size: transitions, over all environments.
    :param n_envs: number of environments.
    """

    layout: StackLayout
    size: int
    n_envs: int

    @property
    def plain_bytes(self) -> int:
        """Bytes a transition in Stable Baselines3's ``ReplayBuffer``, which stores both observations whole."""
        return 2 * self.layout.stack_bytes + ROW_BYTES

    @property
    def fixed_bytes(self) -> int:
        """What a store takes beside its transitions: a newest stack and an open block for each environment."""
        return self.n_envs * (3 * self.layout.stack_bytes + 20 * self.layout.frame_bytes)


@dataclass(frozen=True)
class Suggestion:
    """A smaller observation.

    :param line: what wraps a single environment, in place of what stacks its frames where that is part of it.
    :param shape: of the observation then.
    :param bytes_a_transition: with the lossless codec, measured.
    :param times_less: than Stable Baselines3's ``ReplayBuffer`` of the observations as they are.
    :param total_bytes: of all transitions.
    """

    line: str
    shape: tuple[int, ...]
    bytes_a_transition: float
    times_less: float
    total_bytes: int


@dataclass(frozen=True)
class Sample:
    """Transitions of one environment, in order.

    :param before: shape ``(n, *shape)``, the observations.
    :param after: likewise, the next observations; terminal ones where an episode ends.
    :param source: where they are from, in words.
    :param row_bytes: what action, reward and flags take.
    :param rest: transitions that follow them, made as they are asked for; they are not kept.
    :param most: how many there are in all, at most.
    """

    before: npt.NDArray[np.generic]
    after: npt.NDArray[np.generic]
    source: str
    row_bytes: int = ROW_BYTES
    rest: Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]] | None = None
    most: int = 0

    def __len__(self) -> int:
        return len(self.before)

    def described(self, n_transitions: int) -> str:
        """Where so many of them are from."""
        return self.source if self.rest is None else f"{self.source}, {n_transitions} steps of a random policy"


_ACTION_BYTES = 8  # that ``ROW_BYTES`` counts for an action
_KEPT = 300  # steps that are kept as they are, for what is compared and timed
_MOST = 3000  # steps, after which figures that are still uncertain are given as such


class _Stacker:
    """Stacks single frames along an axis as Stable Baselines3's ``VecFrameStack`` does: zeros before an episode.

    :param frame: shape of a frame.
    :param n_stack: how many there are in a stack; 1 leaves frames as they are.
    :param axis: of a frame.
    """

    def __init__(self, frame: tuple[int, ...], n_stack: int, axis: int) -> None:
        self.shape = tuple(size * (n_stack if at == axis else 1) for at, size in enumerate(frame))
        self._length, self._axis = frame[axis], axis
        self._stack: npt.NDArray[Any] | None = None

    def first(self, frame: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The stack at the beginning of an episode."""
        self._stack = None
        return self.next(frame)

    def next(self, frame: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The stack with one more frame."""
        if self._stack is None:
            self._stack = np.zeros(self.shape, dtype=frame.dtype)
        older = np.moveaxis(self._stack, self._axis, 0)[self._length :]
        newest = np.moveaxis(frame, self._axis, 0)
        self._stack = np.moveaxis(np.concatenate([older, newest]), 0, self._axis)
        return self._stack


def _stacker(frame: tuple[int, ...], shape: tuple[int, ...] | None, n_stack: int | None, source: str) -> _Stacker:
    """What makes observations of ``shape`` of the arrays that a source gives.

    :raises InvalidArgumentError: if there is no way.
    """
    if shape is None:
        return _Stacker(frame, n_stack or 1, stacking_axes(frame)[0])
    if frame == shape:
        return _Stacker(frame, 1, 0)
    for axis in (len(shape) - 1, 0):
        if len(frame) == len(shape) and shape[axis] % frame[axis] == 0:
            stacker = _Stacker(frame, shape[axis] // frame[axis], axis)
            if stacker.shape == shape and n_stack in (None, shape[axis] // frame[axis]):
                return stacker
    raise InvalidArgumentError(
        f"{source} gives arrays of shape {frame}, which are neither observations of shape {shape} nor frames that make "
        f"them when they are stacked; pass shape={frame}, or wrap the environment so that it gives what is stored"
    )


def from_frames(frames: Any, *, shape: tuple[int, ...] | None, n_stack: int | None) -> Sample:
    """The transitions that consecutive observations, or single frames, of one environment make.

    :param frames: shape ``(n, *shape)``.
    :param shape: of the observations that are stored, or None for that of the frames.
    :raises InvalidArgumentError: if the frames cannot make such observations.
    """
    given: npt.NDArray[Any] = np.asarray(frames)
    if given.ndim < 2:
        raise InvalidArgumentError(
            f"frames has shape {given.shape}, expected (n, *shape of an observation): consecutive ones of one "
            "environment"
        )
    stacker = _stacker(given.shape[1:], shape, n_stack, "frames")
    stacks = np.stack([stacker.next(frame) for frame in given])
    return Sample(stacks[:-1], stacks[1:], f"frames ({len(given)} of them)")


@contextlib.contextmanager
def playing(
    env: gymnasium.Env[Any, Any] | Callable[[], Any],
    *,
    steps: int | None,
    shape: tuple[int, ...] | None,
    n_stack: int | None,
    seed: int,
) -> Iterator[Sample]:
    """The transitions of a random policy.

    :param env: an environment, or what makes one. One that was made here is closed again, whatever happens.
    :param steps: how many there are; None for as many as turn out to be needed.
    :param shape: of the observations that are stored, or None for that of the environment's.
    :raises InvalidArgumentError: if its observations cannot make such ones.
    :raises InvalidTypeError: if it is no environment, or its observations are no arrays.
    """
    made = isinstance(env, type) or not hasattr(env, "observation_space")  # a class may have its spaces already
    if made and not callable(env):
        raise InvalidTypeError(f"env={env!r} is neither a gymnasium environment nor what makes one")
    played: Any = env() if made else env  # type: ignore[operator]
    try:
        yield _played(played, steps, shape, n_stack, seed)
    finally:
        if made:
            played.close()


def _played(env: Any, steps: int | None, shape: tuple[int, ...] | None, n_stack: int | None, seed: int) -> Sample:
    space = env.observation_space
    if not hasattr(space, "dtype") or getattr(space, "shape", None) is None or len(space.shape) == 0:
        raise InvalidTypeError(
            f"the environment's observation_space is {space}, expected a Box; plan the image of a Dict by itself, with "
            "frames=, or wrap the environment so that it gives the image alone"
        )
    source = f"{getattr(getattr(env, 'spec', None), 'id', None) or type(env.unwrapped).__name__}"
    stacker = _stacker(tuple(space.shape), shape, n_stack, source)
    env.action_space.seed(seed)
    most = _MOST if steps is None else steps
    transitions = itertools.islice(_transitions(env, stacker, seed), most)
    kept = list(itertools.islice(transitions, _KEPT if steps is None else steps))
    action = np.asarray(env.action_space.sample())
    row_bytes = ROW_BYTES - _ACTION_BYTES + (action.size * 4 if action.dtype.kind == "f" else action.size * 8)
    before, after = (np.stack(part) for part in zip(*kept, strict=True))
    return Sample(before, after, source, row_bytes, transitions, most)


def _transitions(env: Any, stacker: _Stacker, seed: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    space = env.observation_space
    newest = stacker.first(_frame(env.reset(seed=seed)[0], space))
    while True:
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        before, newest = newest, stacker.next(_frame(frame, space))
        yield before, newest
        if terminated or truncated:
            newest = stacker.first(_frame(env.reset()[0], space))


def _frame(observation: Any, space: Any) -> npt.NDArray[Any]:
    frame = np.array(observation)  # a copy: environments write into theirs
    if frame.shape != space.shape:
        raise EnvironmentOutputError(
            f"the environment gave an observation of shape {frame.shape}, its observation_space says {space.shape}"
        )
    return frame.astype(space.dtype, copy=False)


LEAST = 128  # transitions, below which nothing can be said
_BATCH = 32
_WINDOW = 16  # transitions between two looks at what they take
_PARTS = (4, 10)  # at least and at most so many parts of a sample are compared
_SURE = 2.5  # standard errors of their mean: nineteen in twenty, for so few of them
_CLOSE = 0.1  # of a figure: how far off it may be where more is played
_LEAST_PLAYED = 600  # steps
_MOST_BYTES = 1 << 28
_TIMED_S = 0.05
_COMPARED = 256  # transitions


class Measured(NamedTuple):
    """Of one way of storing, a transition.

    :param frame_bytes: bytes.
    :param range: what ``frame_bytes`` may be of more of the same; None where there was too little to tell.
    :param kept_bytes: likewise, of the transitions that are kept alone.
    :param sample_us: CPU microseconds.
    :param psnr: None where it is exact.
    :param n_transitions: that were seen.
    """

    frame_bytes: float
    range: tuple[float, float] | None
    kept_bytes: float
    sample_us: float
    psnr: float | None
    n_transitions: int


def channel_first(sample: Sample) -> Sample:
    """The sample as buffers get images: ``VecTransposeImage`` and ``ToTensorImage`` bring the channels to the front."""
    shape = sample.before.shape[1:]
    if sample.before.dtype != np.uint8 or len(shape) != 3 or shape[0] <= shape[2]:
        return sample
    before, after = (np.ascontiguousarray(np.moveaxis(part, -1, 1)) for part in (sample.before, sample.after))
    rest = None if sample.rest is None else ((np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0)) for a, b in sample.rest)
    return replace(sample, before=before, after=after, rest=rest)


def layout_of(sample: Sample, *, n_stack: int | None) -> StackLayout:
    """How the observations of a sample are stacked.

    :raises InvalidArgumentError: if there are too few to say.
    """
    if len(sample) < LEAST:
        raise InvalidArgumentError(
            f"{sample.source} gives {len(sample)} transitions, and a plan needs at least {LEAST}; pass more frames, or "
            "more steps"
        )
    described = sample.before.shape[1:], sample.before.dtype
    if n_stack is not None:
        return next(candidate_layouts(*described, n_stack=n_stack))
    return find_layout(*described, sample.before, sample.after) or list(candidate_layouts(*described))[-1]


def measure(sample: Sample, layout: StackLayout, options: Mapping[str, Any]) -> Measured:
    """Stores a sample as a buffer with these options would; see :func:`measure_all`."""
    return measure_all(sample, layout, [options])[0]


def measure_all(sample: Sample, layout: StackLayout, ways: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Stores a sample in several ways, and of what follows it as much as it takes to be sure of the figures.

    Environments change as they go on: they are reset, a view moves or rests. So what a transition takes is looked at
    part by part, and more is played until the parts agree.

    :param ways: options of ``FrameStore.adaptive``, which chooses what they leave open.
    """
    grown = [_Growth(_store(sample, layout, options)) for options in ways]
    first = len(sample) // 4
    for growth in grown:
        # The difference: what the first frames and the buffers take does not grow with the transitions.
        _fill(growth.store, sample, stop=first)
        growth.begin()
        for start in range(first, len(sample), _WINDOW):
            _fill(growth.store, sample, start=start, stop=start + _WINDOW)
            growth.look()
    kept = [growth.mean for growth in grown]
    for count, (before, after) in enumerate(sample.rest or (), start=len(sample) + 1):
        for growth in grown:
            growth.store.append(before[None], after[None])
        if (count - first) % _WINDOW == 0:
            for growth in grown:
                growth.look()
            if _enough(grown, count, sample.row_bytes):
                break
    return [
        Measured(growth.mean, growth.range, mean, _sample_us(growth.store), _psnr(growth.store, sample), growth.count)
        for growth, mean in zip(grown, kept, strict=True)
    ]


def _store(sample: Sample, layout: StackLayout, options: Mapping[str, Any]) -> FrameStore:
    chooser = FrameStore.adaptive(len(sample), 1, layout.shape, layout.dtype, n_stack=layout.n_stack, **options)
    _fill(chooser, sample)
    loss = {name: options[name] for name in ("max_error", "quality") if name in options}
    capacity = max(len(sample), sample.most)
    return FrameStore(capacity, 1, layout, codec=chooser.codec, block_length=chooser.block_length, **loss)


def _enough(grown: Sequence[_Growth], count: int, row_bytes: int) -> bool:
    if sum(growth.store.nbytes for growth in grown) > _MOST_BYTES:
        return True
    return count >= _LEAST_PLAYED and all(growth.error <= _CLOSE * (growth.mean + row_bytes) for growth in grown)


class _Growth:
    """What a store holds as transitions are added to it.

    :param store: with what is not to be counted.
    """

    def __init__(self, store: FrameStore) -> None:
        self.store = store

    def begin(self) -> None:
        """Counts from here on."""
        self._counts, self._sizes = [self.store.size], [self.store.nbytes]

    def look(self) -> None:
        """Notes what is held."""
        self._counts.append(self.store.size)
        self._sizes.append(self.store.nbytes)

    @property
    def count(self) -> int:
        """Transitions, those included that do not count."""
        return self._counts[-1]

    @property
    def mean(self) -> float:
        """Bytes a transition."""
        return (self._sizes[-1] - self._sizes[0]) / (self._counts[-1] - self._counts[0])

    @property
    def error(self) -> float:
        """How far off that may be, as far as the parts of what was seen differ; infinite where it cannot be told."""
        least, most = _PARTS
        n_parts = min((len(self._sizes) - 1), most)
        if n_parts < least:
            return float("inf")
        edges = np.linspace(0, len(self._sizes) - 1, n_parts + 1).astype(np.int64)
        parts = np.diff(np.array(self._sizes)[edges]) / np.diff(np.array(self._counts)[edges])
        return _SURE * float(parts.std(ddof=1)) / float(np.sqrt(n_parts))

    @property
    def range(self) -> tuple[float, float] | None:
        """From and up to what the mean may be; None where it cannot be told."""
        if not np.isfinite(self.error):
            return None
        return max(self.mean - self.error, self.mean / (1 + self.error / max(self.mean, 1e-9))), self.mean + self.error


def _fill(store: FrameStore, sample: Sample, *, start: int = 0, stop: int | None = None) -> None:
    for before, after in zip(sample.before[start:stop], sample.after[start:stop], strict=True):
        store.append(before[None], after[None])


def _read(store: FrameStore, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    out = np.empty((2, len(rows), *store.layout.shape), dtype=store.layout.dtype)
    store.get(rows, np.zeros_like(rows), out[0], out[1])
    return out


def _sample_us(store: FrameStore) -> float:
    rng, seconds, count = np.random.default_rng(0), 0.0, 0
    out = np.empty((2, _BATCH, *store.layout.shape), dtype=store.layout.dtype)
    envs = np.zeros(_BATCH, dtype=np.int64)
    store.get(envs, envs, out[0], out[1])
    while seconds < _TIMED_S:
        rows = rng.integers(store.size, size=_BATCH)
        start = time.thread_time()
        store.get(rows, envs, out[0], out[1])
        seconds += time.thread_time() - start
        count += _BATCH
    return seconds / count * 1e6


def plain_us(sample: Sample) -> float:
    """What reading a transition takes where observations are plain arrays."""
    rng, seconds, count = np.random.default_rng(0), 0.0, 0
    while seconds < _TIMED_S:
        rows = rng.integers(len(sample), size=_BATCH)
        start = time.thread_time()
        _ = sample.before[rows], sample.after[rows]
        seconds += time.thread_time() - start
        count += _BATCH
    return seconds / count * 1e6


def _psnr(store: FrameStore, sample: Sample) -> float | None:
    if not store.lossy:
        return None
    rows = np.linspace(0, len(sample) - 1, min(len(sample), _COMPARED)).astype(np.int64)
    true = np.stack([sample.before[rows], sample.after[rows]]).astype(np.float64)
    error = float(np.mean((_read(store, rows).astype(np.float64) - true) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else float("inf")


_LEAST_SIZE = 64  # pixels, below which halving is no advice


def suggestions(sample: Sample, case: Case, measured: Measured) -> tuple[Suggestion, ...]:
    """Grey and smaller frames, where they are images; measured with the lossless codec.

    :param measured: what the frames as they are take with that codec.
    """
    # Only the first transitions are there to be tried: what follows them counts for as much as it did for all of them.
    scale = measured.frame_bytes / measured.kept_bytes if measured.kept_bytes else 1.0
    frames = _single_frames(sample, case.layout)
    if frames is None or any(importlib.util.find_spec(name) is None for name in ("gymnasium", "cv2")):
        return ()
    height, width, channels = frames.shape[1:]
    sizes = (None, (height // 2, width // 2)) if min(height, width) >= _LEAST_SIZE else (None,)
    ways = [(size, grey) for size in sizes for grey in ((False, True) if channels == 3 else (False,))]
    return tuple(_suggestion(frames, size, grey, sample.row_bytes, case, scale) for size, grey in ways[1:])


def _single_frames(sample: Sample, layout: StackLayout) -> npt.NDArray[Any] | None:
    """The newest frame of each observation, channel-last; None where they are no images."""
    frames = sample.after
    if layout.n_stack > 1:
        frames = np.moveaxis(frames, layout.axis + 1, -1)[..., -layout.frame_channels :]
    elif frames.ndim == 4 and frames.shape[1] in (1, 3):
        frames = np.moveaxis(frames, 1, -1)
    if frames.ndim != 4 or frames.shape[3] not in (1, 3) or frames.dtype != np.uint8:
        return None
    return np.ascontiguousarray(frames)


def _suggestion(
    frames: npt.NDArray[Any], size: tuple[int, int] | None, grey: bool, row_bytes: int, case: Case, scale: float
) -> Suggestion:
    from gymnasium import wrappers

    env, line, n_stack = _replayed(frames), "env", case.layout.n_stack
    shape: tuple[int, ...] | None = None
    if size is not None:
        env, line = wrappers.ResizeObservation(env, size), f"ResizeObservation({line}, {size})"
    if grey:
        env, line = wrappers.GrayscaleObservation(env), f"GrayscaleObservation({line})"
        if n_stack > 1:
            env, line = wrappers.FrameStackObservation(env, n_stack), f"FrameStackObservation({line}, {n_stack})"
    else:
        height, width, channels = env.observation_space.shape or ()
        shape = (height, width, channels * n_stack)
    with playing(env, steps=len(frames) - 1, shape=shape, n_stack=None, seed=0) as tried:
        layout = layout_of(tried, n_stack=n_stack)
        per_transition = measure(tried, layout, {"codec": "auto"}).frame_bytes * scale + row_bytes
    return Suggestion(
        line=f"env = {line}",
        shape=layout.shape,
        bytes_a_transition=per_transition,
        times_less=case.plain_bytes / per_transition,
        total_bytes=int(per_transition * case.size) + Case(layout, case.size, case.n_envs).fixed_bytes,
    )


def _replayed(frames: npt.NDArray[Any]) -> gymnasium.Env[Any, Any]:
    """An environment that shows the frames again, for gymnasium's wrappers."""
    import gymnasium

    class Replayed(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, frames.shape[1:], np.uint8)
        action_space = gymnasium.spaces.Discrete(1)
        at = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return frames[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.at += 1
            return frames[self.at], 0.0, False, False, {}

    return Replayed()

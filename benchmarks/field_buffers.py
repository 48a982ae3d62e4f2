"""Track ``buffers`` of ``benchmarks.field``: a full ring of 84×84×4, in the buffers of several libraries.

A fresh process for each competitor fills it, and measures by how much resident memory grows. The process then fills
ours, and both take turns. Times are CPU times of all threads. All get the same random play of Pong, from a file.
Options of each competitor are those of its documentation that save the most memory. Where these cost time, the
competitor is measured without them, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks import _field_environments as worlds
from benchmarks.measure import OURS, is_installed, make_sampler, record, resident_bytes, show_ratios, time_in_turns
from benchmarks.processes import run_module
from sb3_ext import CompressedReplayBuffer

SHAPE = (84, 84, 4)
BATCH_SIZES = (32, 256)
PART = 1_000  # Additions per turn.
WARM_UP = 600  # Size of small buffers, which load or compile kernels before memory is measured.
COMPRESSED = f"{OURS}, CompressedReplayBuffer"

# Observation, next observation, and whether the episode ends.
Transition = tuple[np.ndarray, np.ndarray, bool]


class Buffer(NamedTuple):
    """A competitor's functions: one adds transitions one by one, the other samples a batch."""

    add: Callable[[list[Transition]], None]
    sample: Callable[[int], Any]


def make_sb3(size: int, *, cls: Any = ReplayBuffer) -> Buffer:
    """Make a buffer with SB3's interface."""
    buffer = cls(size, spaces.Box(0, 255, SHAPE, np.uint8), spaces.Discrete(6), device="cpu")
    action, reward = np.zeros((1, 1), np.int64), np.zeros(1, np.float32)

    def add(transitions: list[Transition]) -> None:
        for observation, following, done in transitions:
            buffer.add(observation[None], following[None], action, reward, np.array([done]), [{}])

    return Buffer(add, buffer.sample)


def make_cpprb(size: int, *, compress: bool = False) -> Buffer:
    """Make cpprb's buffer, which stores every observation twice, or with ``compress`` every frame once."""
    import cpprb

    observations = {"shape": SHAPE, "dtype": np.uint8}
    fields: dict[str, Any] = {"obs": observations, "act": {}, "rew": {}, "done": {}}
    if compress:
        buffer = cpprb.ReplayBuffer(size, fields, next_of="obs", stack_compress="obs")
    else:
        buffer = cpprb.ReplayBuffer(size, fields | {"next_obs": observations})

    def add(transitions: list[Transition]) -> None:
        for observation, following, done in transitions:
            buffer.add(obs=observation, next_obs=following, act=0, rew=0.0, done=done)
            if done:
                buffer.on_episode_end()

    return Buffer(add, buffer.sample)


def make_flashbax(size: int, *, flat: bool = False) -> Buffer:
    """Make flashbax' buffer on the CPU, compiled: of pairs, or with ``flat`` of observations, each stored once."""
    import flashbax
    import jax

    if flat:
        kinds = {n: flashbax.make_flat_buffer(size, 1, n) for n in BATCH_SIZES}
    else:
        kinds = {n: flashbax.make_item_buffer(size, 1, n, add_sequences=False, add_batches=False) for n in BATCH_SIZES}

    def make_item(observation: np.ndarray, following: np.ndarray, done: bool) -> dict[str, Any]:
        item = {"obs": observation, "action": np.int32(0), "reward": np.float32(0), "done": done}
        return item if flat else item | {"next_obs": following}

    def make_draw(kind: Any) -> Callable[..., Any]:
        def draw(state: Any, key: Any) -> Any:
            key, drawn = jax.random.split(key)
            return key, kind.sample(state, drawn)

        return jax.jit(draw)  # type: ignore[no-any-return]

    empty = np.zeros(SHAPE, np.uint8)
    state = kinds[BATCH_SIZES[0]].init(jax.tree.map(np.asarray, make_item(empty, empty, False)))
    key = jax.random.PRNGKey(0)
    add_one = jax.jit(kinds[BATCH_SIZES[0]].add, donate_argnums=0)  # without a donation, each addition copies the ring
    draws = {n: make_draw(kind) for n, kind in kinds.items()}

    def add(transitions: list[Transition]) -> None:
        nonlocal state
        for transition in transitions:
            state = add_one(state, make_item(*transition))
        jax.block_until_ready(state)

    def sample(batch_size: int) -> Any:
        nonlocal key
        key, batch = jax.block_until_ready(draws[batch_size](state, key))
        return batch

    return Buffer(add, sample)


def make_reverb(size: int) -> Buffer:
    """Make a table of Reverb, with a server in this process, that stores every frame once.

    A sample is five frames, from which the reader would take both stacks. Threads read samples ahead.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import reverb
    import tensorflow as tf

    n_frames = SHAPE[-1] + 1
    shapes = {"frame": (n_frames, *SHAPE[:2]), "action": (1,), "reward": (1,), "done": (1,)}
    dtypes = {"frame": tf.uint8, "action": tf.int32, "reward": tf.float32, "done": tf.bool}
    signature = {name: tf.TensorSpec(shape, dtypes[name]) for name, shape in shapes.items()}
    select, remove, limit = reverb.selectors.Uniform(), reverb.selectors.Fifo(), reverb.rate_limiters.MinSize(1)
    server = reverb.Server([reverb.Table("play", select, remove, size, limit, signature=signature)])
    writer = reverb.Client(f"localhost:{server.port}").trajectory_writer(num_keep_alive_refs=n_frames)

    def append(frame: np.ndarray, done: bool) -> None:
        writer.append({"frame": frame, "action": np.int32(0), "reward": np.float32(0), "done": done})

    def add(transitions: list[Transition]) -> None:
        for observation, following, done in transitions:
            if not writer.episode_steps:
                for frame in np.moveaxis(observation, -1, 0):
                    append(frame, False)
            append(following[..., -1], done)
            lengths = {name: shape[0] for name, shape in shapes.items()}
            writer.create_item("play", 1.0, {name: writer.history[name][-n:] for name, n in lengths.items()})
            if done:
                writer.end_episode()
            writer.flush(block_until_num_items=100)  # Reverb warns above 200
        writer.flush()

    batches: dict[int, Iterator[Any]] = {}

    def sample(batch_size: int) -> Any:
        if batch_size not in batches:
            address = f"localhost:{server.port}"  # this reference also keeps the server running
            options = {"server_address": address, "table": "play", "max_in_flight_samples_per_worker": 2 * batch_size}
            dataset = reverb.TrajectoryDataset.from_table_signature(**options)
            batches[batch_size] = dataset.batch(batch_size).as_numpy_iterator()
        return next(batches[batch_size])

    return Buffer(add, sample)


# For each competitor: its module, its name on PyPI, and its maker.
COMPETITORS: dict[str, tuple[str, str, Callable[[int], Buffer]]] = {
    COMPRESSED: ("sb3_ext", "rl-ext", partial(make_sb3, cls=CompressedReplayBuffer)),
    "SB3 ReplayBuffer": ("stable_baselines3", "stable-baselines3", make_sb3),
    "cpprb": ("cpprb", "cpprb", make_cpprb),
    "cpprb, stack_compress": ("cpprb", "cpprb", partial(make_cpprb, compress=True)),
    "flashbax, item buffer": ("flashbax", "flashbax", make_flashbax),
    "flashbax, flat buffer": ("flashbax", "flashbax", partial(make_flashbax, flat=True)),
    "Reverb": ("reverb", "dm-reverb", make_reverb),
}


def save_play(folder: Path, size: int) -> None:
    """Save the newest frame of each observation of random play, and at which frame its episode starts."""
    frames: list[np.ndarray] = []
    starts: list[int] = []
    is_first = True
    for observation, following, done in worlds.play_pong(size):
        if is_first:
            start = len(frames)
        for stack in (observation, following) if is_first else (following,):
            frames.append(stack[..., -1].copy())
            starts.append(start)
        is_first = done
    np.save(folder / "frames.npy", np.stack(frames))
    np.save(folder / "starts.npy", np.array([*starts, len(frames)]))


def load_play(folder: Path) -> Iterator[Transition]:
    """Yield the transitions again and again, from mapped memory."""
    frames, starts = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("frames", "starts"))
    # A pixel of a stack is one little-endian word, with the oldest frame in the lowest byte.
    for n_read in count():
        number = n_read % len(frames)
        newest = frames[number].astype("<u4")
        if starts[number] == number:
            words = newest * 0x01010101  # a reset repeats its frame
        else:
            observation, words = words, words >> 8 | newest << 24
            stacks = [each.view(np.uint8).reshape(SHAPE) for each in (observation, words)]
            yield stacks[0], stacks[1], bool(starts[number + 1] > number)


def fill(buffer: Buffer, transitions: Iterator[Transition], size: int) -> None:
    """Add a number of transitions, in parts that do not stay in memory."""
    for start in range(0, size, PART):
        buffer.add(list(islice(transitions, min(PART, size - start))))


def measure(name: str, folder: Path, *, size: int, rounds: int) -> dict[str, Any]:
    """Fill one competitor and then ours.

    :return: Bytes by which resident memory grows, and seconds of both by what was measured.
    """
    stream = load_play(folder)
    makers = {each: COMPETITORS[each][-1] for each in dict.fromkeys((name, COMPRESSED))}
    small = {each: make(WARM_UP) for each, make in makers.items()}  # in memory until the end, like its pages
    for warm in small.values():
        fill(warm, stream, 2 * WARM_UP)
        for batch_size in BATCH_SIZES:
            warm.sample(batch_size)
    before = resident_bytes()
    filled = {name: makers[name](size)}
    fill(filled[name], load_play(folder), size)
    found: dict[str, Any] = {"bytes": resident_bytes() - before, "seconds": {}}
    if name == COMPRESSED:
        return found
    filled[COMPRESSED] = makers[COMPRESSED](size)
    fill(filled[COMPRESSED], load_play(folder), size)
    part: list[Transition] = []

    def prepare() -> None:
        part[:] = islice(stream, PART)

    adders = {each: partial(buffer.add, part) for each, buffer in filled.items()}
    runs = time_in_turns(adders, rounds=max(5, rounds // 3), prepare=prepare, clock=time.process_time)
    found["seconds"][f"{PART:,} additions"] = {each: list(seconds) for each, seconds in runs.items()}
    for batch_size in BATCH_SIZES:
        samplers = {each: make_sampler(buffer, batch_size, 10) for each, buffer in filled.items()}
        time_in_turns(samplers, rounds=2)
        runs = time_in_turns(samplers, rounds=rounds, clock=time.process_time)
        found["seconds"][f"10 samples of {batch_size}"] = {each: list(seconds) for each, seconds in runs.items()}
    return found


def buffers(rounds: int, large: bool) -> None:
    """Measure additions, samples and resident memory of a full ring of 20,000 or 100,000 transitions."""
    size = 100_000 if large else 20_000
    with tempfile.TemporaryDirectory() as folder:
        save_play(Path(folder), size)
        for name, (module, package, _) in COMPETITORS.items():
            if not is_installed(module, package=package):
                continue
            found = json.loads(run_module("benchmarks.field_buffers", name, folder, size, rounds))
            track = f"buffers: ring of {size:,}"
            for measured, seconds in found["seconds"].items():
                arrays = {each: np.array(values) for each, values in seconds.items()}
                show_ratios("field", f"{track}, {measured}", arrays)
            print(f"\n{name:34}{found['bytes'] / 1e6:12,.1f} MB of resident memory", flush=True)
            record("field", f"{track}, memory: {name}", bytes=found["bytes"])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), size=int(sys.argv[3]), rounds=int(sys.argv[4]))))

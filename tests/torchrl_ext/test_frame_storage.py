from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.offline_to_online import prefill_replay_buffer
from torchrl.data.replay_buffers.samplers import PromptGroupSampler, StalenessAwareSampler, prioritized
from torchrl.envs import CatFrames, Compose, SerialEnv, ToTensorImage, TransformedEnv

from rl_ext_core.errors import InvalidArgumentError
from tests.torchrl_ext.frame_data import HEIGHT, STACK, WIDTH, Twins, Videos, assert_same
from torchrl_ext import FrameStorage, GymWrapper


def make_staleness_sampler() -> StalenessAwareSampler:
    """Make a sampler that treats the action as a policy's version, and prefers new ones."""
    sampler = StalenessAwareSampler(max_staleness=3, version_key="action")
    sampler.consumer_version = 5
    return sampler


SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": partial(PrioritizedSampler, 200, alpha=0.7, beta=0.9),
    "slices by trajectory": partial(SliceSampler, slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False),
    "slices by end": partial(SliceSampler, num_slices=8, end_key=("next", "done"), strict_length=False),
    "slices, cached": partial(SliceSampler, slice_len=4, strict_length=False, cache_values=True),
    "slices without replacement": partial(
        SliceSamplerWithoutReplacement, slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False
    ),
    "consuming": partial(ConsumingSampler, max_sample_count=2),
    "fresh": make_staleness_sampler,
    "streaming": partial(StreamingSliceSampler, slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False),
    "groups": partial(PromptGroupSampler, samples_per_group=8, group_key="action"),
    "prioritized slices": partial(
        PrioritizedSliceSampler,
        200,
        alpha=0.7,
        beta=0.9,
        slice_len=4,
        traj_key=("collector", "traj_ids"),
        strict_length=False,
    ),
}


class Tree:
    """Segment tree in NumPy, because TorchRL's do not load with every version of torch."""

    def __init__(self, capacity: int, *, reduce: Any) -> None:
        self.values, self.reduce = np.zeros(capacity), reduce

    def __getitem__(self, index: Any) -> Any:
        return self.values[np.asarray(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[np.asarray(index)] = np.asarray(value)

    def query(self, start: int, stop: int) -> float:
        """Reduce the values of a range to their sum or minimum."""
        return float(self.reduce(self.values[start:stop]))

    def scan_lower_bound(self, mass: Any) -> Any:
        """Return the first index at which the cumulative sum reaches a mass."""
        return np.minimum(np.searchsorted(np.cumsum(self.values), mass), len(self.values) - 1)


# Later versions of SliceSampler warn if strict_length=False returns fewer transitions than requested.
SHORT_SLICES = pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch")


@pytest.fixture
def segment_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace TorchRL's segment trees by NumPy ones if they do not load."""
    if prioritized.SumSegmentTreeFp32 is not None:
        return
    for name, reduce in (("Sum", np.sum), ("Min", np.min)):
        monkeypatch.setattr(prioritized, f"{name}SegmentTreeFp32", partial(Tree, reduce=reduce))
        monkeypatch.setattr(prioritized, f"{name}SegmentTreeFp64", partial(Tree, reduce=reduce))


@SHORT_SLICES
@pytest.mark.sample(quick=4)
@pytest.mark.parametrize(
    ("sampler", "ndim"),
    [*((sampler, 1) for sampler in SAMPLERS), ("random", 2), ("slices by trajectory", 2), ("without replacement", 2)],
)
@pytest.mark.usefixtures("segment_trees")
def test_samplers_return_the_bits_of_lazy_tensor_storage(sampler: str, ndim: int) -> None:
    twins, videos = Twins(200, ndim=ndim, sampler=SAMPLERS[sampler], batch_size=lambda: 32), Videos(2)
    for _ in range(9):
        data = videos.collect(30)
        twins.extend(data if ndim == 2 else data.reshape(-1))
        twins.check()
    assert_same(twins.ours.storage.flatten()[:], twins.theirs.storage.flatten()[:])


def test_frames_of_interleaved_and_flat_environments_are_stored_once() -> None:
    for time_first in (False, True):
        storage = FrameStorage(4000)
        buffer = ReplayBuffer(storage=storage)
        videos = Videos(8)
        for _ in range(20):
            data = videos.collect(25)
            buffer.extend((data.transpose(0, 1) if time_first else data).reshape(-1))
        raw = 2 * 4000 * STACK * HEIGHT * WIDTH
        assert storage._columns[0].table.part.layout.n_stack == STACK
        assert 4 * storage._columns[0].table.log.n_words < raw / 30


def test_update_if_present_writes_images() -> None:
    twins = Twins(50, writer=partial(TensorDictRoundRobinWriter, track_generations=True))
    data = Videos(1).collect(60).reshape(-1)
    twins.extend(data)

    def update(buffer: Any) -> Any:
        """Update three elements, of which one has another generation."""
        index = torch.tensor([1, 12, 3])
        patch = {"pixels": data["pixels"][40:43], ("next", "reward"): torch.zeros(3, 1)}
        generation = torch.tensor([0, 0, 1])
        return buffer.update_if_present(index=index, generation=generation, patch=patch).updated

    ours, theirs = twins.call_both(update)
    assert ours.tolist() == theirs.tolist() == [False, True, False] or torch.equal(ours, theirs)
    assert_same(twins.ours[:], twins.theirs[:])


def test_slices_decode_lazily_and_show_later_writes() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(50))
    data = Videos(1).collect(60).reshape(-1)
    buffer.extend(data[:50])
    view = buffer[:]["pixels"]
    part = view[10:20]
    buffer[10:20] = data[50:60]
    assert torch.equal(part, data["pixels"][50:60])
    assert torch.equal(part.float().mean((1, 2, 3)), data["pixels"][50:60].float().mean((1, 2, 3)))
    assert (part.numpy() == data["pixels"][50:60].numpy()).all()


def test_repr_decodes_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(50))
    buffer.extend(Videos(1).collect(30).reshape(-1))
    view = buffer[:]
    images = view["pixels"]

    def _read_images(*_: Any) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(FrameStorage, "_read_images", _read_images)
    assert repr(images) == str(images) == f"FrameView(shape=(30, {STACK}, {HEIGHT}, {WIDTH}), dtype=torch.uint8)"
    assert f"FrameView(shape=({STACK}, {HEIGHT}, {WIDTH})" in repr([images[3]])
    for shown in (repr(buffer.storage), repr(buffer), repr(view), repr(view[3:5]), repr(view["next"])):
        assert "pixels" in shown  # TensorDict chooses the format
    buffer.empty()
    assert "FrameView(shape=(30, " in repr(images)


_PICTURE = torch.full((STACK, HEIGHT, WIDTH), 9, dtype=torch.uint8)
IN_PLACE: dict[str, Any] = {
    "slice": lambda buffer: buffer[:]["pixels"].fill_(9),
    "slice of a slice": lambda buffer: buffer[:]["pixels"][2:4].fill_(9),
    "image of a slice": lambda buffer: buffer[:]["pixels"][3].fill_(9),
    "image of a slice, assigned": lambda buffer: buffer[:]["pixels"].__setitem__(3, _PICTURE),
    "pixel of an image, assigned": lambda buffer: buffer[:]["pixels"][3].__setitem__((0, 0, 0), 9),
    "output of a function": lambda buffer: torch.add(_PICTURE, 1, out=buffer[:]["pixels"][3]),
    "list": lambda buffer: torch._foreach_mul_([buffer[0:2]["pixels"], buffer[2:4]["pixels"]], 3),
    "update_": lambda buffer: buffer[:][3:4].update_(TensorDict({"pixels": _PICTURE[None]}, [1])),
}
COPIES: dict[str, Any] = {
    "element": lambda buffer: buffer[3]["pixels"].fill_(9),
    "elements of a list": lambda buffer: buffer[[1, 2]]["pixels"].fill_(9),
    "elements of a tensor": lambda buffer: buffer[torch.tensor([1, 2])]["pixels"].fill_(9),
    "array": lambda buffer: buffer[:]["pixels"].numpy().fill(9),
    "clone": lambda buffer: buffer[:].clone()["pixels"].fill_(9),
    "part of each image": lambda buffer: buffer[:]["pixels"][:, 0].fill_(9),
    "part of an image": lambda buffer: buffer[:]["pixels"][3][0].fill_(9),
    "sample": lambda buffer: buffer.sample(4)["pixels"].fill_(9),
    "key of a slice": lambda buffer: buffer[:].set("pixels", _PICTURE.expand(16, *_PICTURE.shape)),
}


@pytest.mark.parametrize("use", [*IN_PLACE, *COPIES])
def test_images_of_slices_cannot_be_changed_in_place(use: str) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(16))
    data = TensorDict({"pixels": torch.zeros(16, STACK, HEIGHT, WIDTH, dtype=torch.uint8)}, [16])
    buffer.extend(data)
    if use in IN_PLACE:
        with pytest.raises(InvalidArgumentError, match=r"then buffer\[i\] = data"):
            IN_PLACE[use](buffer)
    else:
        COPIES[use](buffer)
    assert int(buffer[:]["pixels"].max()) == 0
    changed = buffer[3].clone()
    changed["pixels"][0] = 9
    buffer[3] = changed
    assert torch.equal(buffer[:]["pixels"][3], changed["pixels"])


def test_data_without_images_is_stored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(100)
    for part in Videos(1).collect(150).reshape(-1).exclude("pixels", ("next", "pixels")).split(50):
        twins.extend(part)
        twins.check()
    assert [record.name for record in caplog.records] == ["torchrl_ext"]
    assert "nothing is compressed" in caplog.text


@pytest.mark.parametrize("n", [20, 100])
def test_get_by_key_returns_the_leaf(n: int) -> None:
    ours, theirs = FrameStorage(60), LazyTensorStorage(60)
    for storage in (ours, theirs):
        for part in Videos(1).collect(n).reshape(-1).split(20):
            storage.set(range(len(storage) % 60, len(storage) % 60 + 20), part)
    for key in ("pixels", ("next", "pixels"), ("next", "done"), "action", ("inner", "vector")):
        assert torch.equal(ours.get(key), theirs.get(key))
    buffer = ReplayBuffer(storage=ours)
    for key in ("pixels", ("next", "done"), "new"):  # LazyTensorStorage loses them, too, until it is full
        with pytest.raises(InvalidArgumentError, match=r"Use buffer\[torch.arange"):
            buffer[key] = torch.zeros(len(ours))
    for key in ("pixels", ("next", "done")):
        buffer[torch.arange(len(ours))] = TensorDict({key: torch.ones_like(theirs.get(key))}, [len(ours)])
        assert bool((buffer[torch.arange(len(ours))][key] == 1).all())


@pytest.mark.parametrize("keys", [["pixels"], ["pixels", ("next", "pixels")]])
def test_unrelated_images_that_were_overwritten_take_no_memory(keys: list[Any]) -> None:
    noise = torch.Generator().manual_seed(0)
    images = {key: torch.randint(256, (600, 40, 40, 3), generator=noise, dtype=torch.uint8) for key in keys}
    storage = FrameStorage(100)
    for start in range(0, 600, 20):
        rows = TensorDict({key: leaf[start : start + 20] for key, leaf in images.items()}, [20])
        storage.set([i % 100 for i in range(start, start + 20)], rows)
    for key, leaf in images.items():
        assert torch.equal(storage[:][key][:], leaf[-100:])
    # The newest stacks of up to 256 streams are kept, so that the next ones can continue them.
    assert storage.nbytes < 1.3 * 100 * len(keys) * images["pixels"][0].nbytes + 3_000_000


LIMIT = 120_000


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("batch", [10, 1, 50])
def test_max_bytes_keeps_the_newest_elements_in_order(batch: int) -> None:
    storage = FrameStorage(100_000, max_bytes=LIMIT)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    data = Videos(1, end=0.01).collect(1200).reshape(-1)
    for rows in data.split(batch):
        buffer.extend(rows.clone())
        assert storage.nbytes <= LIMIT
    assert storage._columns[0].table.nbytes < 1.1 * LIMIT
    assert 400 < len(buffer) < 1200
    assert storage.max_size == 100_000
    first = int(buffer.writer._cursor) % len(buffer)
    held = torch.cat([buffer[first:].clone(), buffer[:first].clone()])
    assert held["index"].tolist() == [*range(first, len(buffer)), *range(first)]
    assert_same(held.exclude("index"), data[-len(buffer) :].to("cpu").exclude("index"))


def test_views_are_refused_after_empty() -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(50), batch_size=8)
    data = Videos(1).collect(50).reshape(-1)
    buffer.extend(data)
    before, kept = buffer[:], buffer[:].clone()
    buffer.empty()
    for use in (lambda: before["pixels"] + 0, lambda: before["pixels"][3:5].numpy(), lambda: before.clone()):
        with pytest.raises(InvalidArgumentError, match=r"buffer\[:\]\.clone\(\)"):
            use()
    assert_same(kept.exclude("index"), data.to("cpu").exclude("index"))
    buffer.extend(data[:10])
    assert torch.equal(buffer[:]["pixels"] + 0, data["pixels"][:10])


@pytest.mark.parametrize(
    ("storage", "writer", "text"),
    [
        ({"max_bytes": 0}, None, "max_bytes=0 must be at least 1"),
        ({"max_bytes": 9, "ndim": 2}, None, "is for storages of one dimension"),
        ({"max_bytes": 9}, TensorDictMaxValueWriter, "overwrites the oldest, got TensorDictMaxValueWriter"),
        ({"max_bytes": 9}, ImmutableDatasetWriter, "overwrites the oldest, got ImmutableDatasetWriter"),
    ],
)
def test_max_bytes_refuses_other_writers_and_dimensions(storage: Any, writer: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        TensorDictReplayBuffer(storage=FrameStorage(100, **storage), writer=writer)


def test_max_bytes_refuses_prioritized_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tree:
        """Replacement for TorchRL's compiled trees."""

        def __init__(self, *_: Any) -> None: ...

    for name in ("SumSegmentTreeFp32", "MinSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp64"):
        monkeypatch.setattr(f"torchrl.data.replay_buffers.samplers.prioritized.{name}", Tree)
    with pytest.raises(InvalidArgumentError, match=r"records priorities by place: .* Leave max_bytes out"):
        TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=FrameStorage(100, max_bytes=LIMIT))
    sampler = PrioritizedSampler(100, alpha=0.6, beta=0.4)
    buffer = TensorDictReplayBuffer(storage=FrameStorage(100, max_bytes=LIMIT))
    buffer._sampler = sampler
    with pytest.raises(InvalidArgumentError, match="PrioritizedSampler records priorities by place"):
        buffer.extend(Videos(1).collect(5).reshape(-1))
    TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=FrameStorage(100))


@pytest.mark.parametrize(
    "sampler", [ConsumingSampler, partial(StreamingSliceSampler, slice_len=4)], ids=["consuming", "streaming"]
)
def test_max_bytes_refuses_samplers_that_record_indices(sampler: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Sampler records .* by place: .* Leave max_bytes out"):
        TensorDictReplayBuffer(storage=FrameStorage(100, max_bytes=LIMIT), sampler=sampler(), batch_size=4)


def test_prefill_replay_buffer_fills_a_storage() -> None:
    data = Videos(1).collect(60).reshape(-1)
    dataset = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=SamplerWithoutReplacement(shuffle=False))
    dataset.extend(data.clone())
    buffer = prefill_replay_buffer(TensorDictReplayBuffer(storage=FrameStorage(100)), dataset, chunk_size=25)
    assert_same(buffer[:].exclude("index"), data.to("cpu"))


def _images(*shape: int) -> torch.Tensor:
    """Return random images."""
    return torch.randint(256, (*shape, 3, 40, 40), dtype=torch.uint8)


def _slice_of_partly_filled(storage: Any, path: Path) -> Any:
    """Read a slice of a buffer that is not full (pytorch/rl#1729)."""
    buffer = ReplayBuffer(storage=storage(1000))
    for _ in range(50):
        buffer.add(TensorDict({"pixels": _images()}))
    return buffer[10:].clone()


def _add_trajectories(storage: Any, path: Path) -> Any:
    """Add trajectories as single elements, and several at once (pytorch/rl#2948)."""
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=5)
    for _ in range(4):
        buffer.add(TensorDict({"pixels": _images(7), "next": {"pixels": _images(7)}}, [7]))
    buffer.extend(TensorDict({"pixels": _images(8, 7), "next": {"pixels": _images(8, 7)}}, [8, 7]))
    return torch.cat([buffer.sample(), buffer[:]])


def _buffer_over_loaded_storage(storage: Any, path: Path) -> Any:
    """Sample from another buffer over a loaded storage (pytorch/rl#3120)."""
    buffer, loaded = (TensorDictReplayBuffer(storage=storage(10), batch_size=4) for _ in range(2))
    buffer.extend(TensorDict({"pixels": _images(6)}, [6]))
    buffer.dumps(path)
    loaded.loads(path)
    return TensorDictReplayBuffer(storage=loaded.storage, batch_size=4).sample()


def _single_agent(storage: Any, path: Path) -> Any:
    """Store the images of one agent, in a dimension of size 1 (pytorch/rl#3515)."""
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    agents = [TensorDict({"pixels": _images(6, 1)}, [6, 1]) for _ in range(2)]
    buffer.extend(TensorDict({"agents": agents[0], "next": {"agents": agents[1]}}, [6]))
    return buffer.sample()


def _through_torch_save(storage: Any, path: Path) -> Any:
    """Save and load a buffer with torch (pytorch/rl#1588)."""
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    buffer.extend(TensorDict({"pixels": _images(6)}, [6]))
    torch.save(buffer, path)
    return torch.load(path, weights_only=False).sample()


@pytest.mark.parametrize(
    "use",
    [_slice_of_partly_filled, _add_trajectories, _buffer_over_loaded_storage, _single_agent, _through_torch_save],
)
def test_calls_of_public_reports_return_the_same_as_with_lazy_tensor_storage(use: Any, tmp_path: Path) -> None:
    found = []
    for storage in (FrameStorage, LazyTensorStorage):
        torch.manual_seed(0)
        found.append(use(storage, tmp_path / storage.__name__))
    assert_same(*found)


def test_rows_that_are_shuffled_within_a_batch_take_as_much_as_rows_in_order() -> None:
    data = torch.cat([Videos(1, seed=seed).collect(120).reshape(-1) for seed in range(20)])
    order = torch.cat([torch.randperm(240) + start for start in range(0, 2400, 240)])
    sizes = []
    for rows in (data, data[order]):
        storage = FrameStorage(2400)
        for start in range(0, 2400, 240):
            storage.set(range(start, start + 240), rows[start : start + 240])
        assert torch.equal(storage[:]["next", "pixels"][:], rows["next", "pixels"])
        sizes.append(storage.nbytes)
    assert sizes[1] < 1.3 * sizes[0]


pytest.importorskip("ale_py")


def _make_stacked_atari() -> Any:
    """Make an Atari game with DQN's observations: four grey frames of 84×84."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    game = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    return GymWrapper(FrameStackObservation(AtariPreprocessing(game), 4))


def _make_float_atari() -> Any:
    """Make an Atari game whose frames TorchRL scales and stacks: floats between 0 and 1."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    game = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    env = GymWrapper(AtariPreprocessing(game, grayscale_newaxis=True))
    scaled = ToTensorImage(in_keys=["observation"], out_keys=["pixels"])
    return TransformedEnv(env, Compose(scaled, CatFrames(N=4, dim=-3, in_keys=["pixels"])))


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize(
    ("make", "pixels", "ndim"),
    [
        (_make_stacked_atari, None, 1),
        (_make_stacked_atari, None, 2),
        (_make_float_atari, ["observation", "pixels", ("next", "observation"), ("next", "pixels")], 1),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_frames_of_collectors_are_exact_and_stored_once(make: Any, pixels: Any, ndim: int) -> None:
    n_frames = 600
    storages = FrameStorage(n_frames, pixels=pixels, ndim=ndim), LazyTensorStorage(n_frames, ndim=ndim)
    buffers = [
        TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False),
            batch_size=32,
        )
        for storage in storages
    ]
    collector = Collector(SerialEnv(2, make), None, frames_per_batch=100, total_frames=800)
    collector.set_seed(0)
    raw = 0
    for batch in collector:
        for buffer in buffers:
            buffer.extend((batch if ndim == 2 else batch.reshape(-1)).clone())
        drawn = []
        for buffer in buffers:
            torch.manual_seed(1)
            drawn.append(buffer.sample())
        assert_same(*drawn)
    collector.shutdown()
    assert_same(buffers[0][:], buffers[1][:])
    for column in storages[0]._columns:
        raw = sum(storages[1]._storage.get(key).nbytes for key in column.keys)
        n_stack = 1 if "observation" in column.keys and make is _make_float_atari else 4
        assert column.table.part.layout.n_stack == n_stack
        assert column.table.nbytes < raw / 20


@pytest.mark.parametrize("ndim", [1, 2])
def test_second_buffer_that_writes_does_not_make_unwritten_places_count(ndim: int) -> None:
    """Its writer begins at the first place, as in TorchRL, which then samples memory that was never written."""
    storage, data = FrameStorage(40, ndim=ndim), Videos(2).collect(16).to("cpu")
    data = data.transpose(0, 1).contiguous() if ndim == 2 else data.reshape(-1)
    first, second = (TensorDictReplayBuffer(storage=storage, batch_size=4, dim_extend=0) for _ in range(2))
    begin, middle, end = data.split([10, 4, 2] if ndim == 2 else [20, 8, 4])
    first.extend(begin.clone())
    second.extend(middle.clone())
    assert len(first) == len(second) == begin.numel()
    first.extend(end.clone())
    assert len(second) == begin.numel() + end.numel()
    assert_same(storage[:].exclude("index"), torch.cat([middle, begin[len(middle) :], end]))

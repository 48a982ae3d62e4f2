from __future__ import annotations

import copy
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchrl.data
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict, lazy_stack
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
)

from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import Twins, Videos
from torchrl_ext import FrameStorage, SliceSampler
from torchrl_ext.frame_storage.columns import FrameColumn

pytestmark = pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch")

TRAJECTORY = ("collector", "traj_ids")
# Arguments that select where the boundaries of trajectories are read from.
SOURCES: dict[str, dict[str, Any]] = {
    "ids": {"traj_key": "episode"},
    "detected": {},
    "end": {"end_key": ("next", "done")},
    "ends": {"end_keys": [("next", "done"), ("next", "truncated"), ("next", "missing")]},
}


class Steps:
    """Steps of trajectories without images, of which a seed determines the lengths."""

    def __init__(self, seed: int, mean_length: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.mean_length, self.n_trajectories = mean_length, 0

    def collect(self, n: int) -> TensorDict:
        draws = torch.rand(n, 2, generator=self.generator)
        done, truncated = draws[:, 0] * self.mean_length < 1, draws[:, 1] < 0.05
        ids = self.n_trajectories + done.cumsum(0) - done.long()
        self.n_trajectories = int(ids[-1]) + int(done[-1])
        flags = {"done": done[:, None], "truncated": truncated[:, None]}
        return TensorDict({"episode": ids % 7, "value": draws[:, 1].clone(), "next": flags}, [n])


def sample_with_info(buffer: Any, seed: int) -> Any:
    """Sample with a seed; return the elements and what the sampler adds, or the error."""
    torch.manual_seed(seed)
    try:
        data, info = buffer.sample(return_info=True)
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)
    return data, {key: torch.stack(part) if isinstance(part, tuple) else part for key, part in info.items()}


def assert_same_samples(ours: Any, theirs: Any, seed: int) -> None:
    """Assert that two buffers return the same sample, or raise the same error."""
    (data, info), (expected, expected_info) = sample_with_info(ours, seed), sample_with_info(theirs, seed)
    if isinstance(expected, type):
        assert (data, info) == (expected, expected_info)
        return
    assert_same(data, expected)
    assert_same(TensorDict(info), TensorDict(expected_info))


def make_pair(storage: Callable[[], Any], batch_size: int, **options: Any) -> list[Any]:
    return [
        ReplayBuffer(storage=storage(), sampler=sampler(**options), batch_size=batch_size)
        for sampler in (SliceSampler, torchrl.data.SliceSampler)
    ]


class SameAsTorchRL(RuleBasedStateMachine):
    """Machine that makes the same calls of buffers with torchrl_ext's sampler and with TorchRL's."""

    @initialize(
        storage=st.sampled_from([LazyTensorStorage, FrameStorage]),
        size=st.integers(2, 40),
        source=st.sampled_from(sorted(SOURCES)),
        slice_len=st.sampled_from([1, 2, 4]),
        strict_length=st.booleans(),
        span=st.booleans(),
        truncated_key=st.sampled_from([None, ("next", "truncated")]),
        cache_values=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 1000),
    )
    def make_buffers(self, storage: Any, size: int, source: str, seed: int, **options: Any) -> None:
        self.steps, self.size, self.n_samples = Steps(seed), size, 0
        options.update(SOURCES[source])
        self.buffers = make_pair(partial(storage, size), 8, **options)
        self.extend(2, lazy=False)

    def call_both(self, use: Callable[[Any], Any]) -> None:
        for buffer in self.buffers:
            use(buffer)

    @rule(n=st.integers(1, 45), lazy=st.booleans())
    def extend(self, n: int, lazy: bool) -> None:
        data = self.steps.collect(min(n, self.size))
        self.call_both(lambda buffer: buffer.extend(lazy_stack(list(data.clone().unbind(0))) if lazy else data.clone()))

    @rule()
    def add(self) -> None:
        data = self.steps.collect(1)[0]
        self.call_both(lambda buffer: buffer.add(data.clone()))

    @rule()
    def sample(self) -> None:
        self.n_samples += 1
        assert_same_samples(*self.buffers, seed=self.n_samples)

    @precondition(lambda self: len(self.buffers[0]) > 0)
    @rule(place=st.integers(0, 100), way=st.sampled_from(["index", "set_at_", "storage", "view"]))
    def overwrite(self, place: int, way: str) -> None:
        data, at = self.steps.collect(1), torch.tensor([place % len(self.buffers[0])])
        if way == "storage" and len(self.buffers[0]) < self.size:
            way = "index"  # TorchRL counts the element as added, and samples uninitialized memory
        for buffer in self.buffers:
            if way == "index":
                buffer[at] = data.clone()
            elif way == "set_at_":
                buffer.set_at_("episode", data["episode"], at)
                buffer.set_at_(("next", "done"), data["next", "done"], at)
            elif way == "storage":
                buffer.storage.set(at, data.clone())
            else:
                buffer[:]["episode"][at] = data["episode"]
                buffer[:]["next", "done"][at] = data["next", "done"]

    @rule()
    def empty(self) -> None:
        self.call_both(lambda buffer: buffer.empty())
        self.extend(2, lazy=False)

    @rule(how=st.sampled_from(["state", "files"]))
    def load(self, how: str) -> None:
        for buffer in self.buffers:
            if how == "state":
                buffer.load_state_dict(copy.deepcopy(buffer.state_dict()))
                continue
            with tempfile.TemporaryDirectory() as folder:
                buffer.dumps(folder)
                buffer.loads(folder)

    @rule()
    def replace_by_copy(self) -> None:
        self.call_both(lambda buffer: buffer.set_sampler(pickle.loads(pickle.dumps(buffer.sampler))))


TestSameAsTorchRL = pytest.mark.usefixtures("torchrl_keeps_silent")(SameAsTorchRL.TestCase)
TestSameAsTorchRL.settings = settings(max_examples=20, stateful_step_count=30)  # type: ignore[attr-defined]


def record_calls(cls: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace a method by a mock that calls it, and return the mock."""
    method = getattr(cls, name)
    recorded = mock.create_autospec(method, side_effect=method)
    monkeypatch.setattr(cls, name, recorded)
    return recorded


STORAGES: dict[str, Any] = {
    "LazyMemmapStorage": lambda path: LazyMemmapStorage(60, scratch_dir=path),
    "FrameStorage": lambda path: FrameStorage(60),
    "FrameStorage in a folder": lambda path: FrameStorage(60, pixels=["value"], storage_dir=path / "frames"),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("source", SOURCES)
def test_additions_do_not_read_all_elements_again(source: str, storage: str, tmp_path: Path, monkeypatch: Any) -> None:
    scans = record_calls(torchrl.data.SliceSampler, "_find_start_stop_traj", monkeypatch)
    sampler = SliceSampler(slice_len=2, cache_values=True, strict_length=False, **SOURCES[source])
    buffer = ReplayBuffer(storage=STORAGES[storage](tmp_path), sampler=sampler, batch_size=8)
    steps = Steps(0)

    def collect(n: int) -> TensorDict:
        """Return steps whose values are images of one pixel row, which a folder requires."""
        data = steps.collect(n)
        data["value"] = data["value"].reshape(n, 1, 1).expand(n, 2, 3).clone()
        return data

    buffer.extend(collect(4))
    buffer.sample()
    n_before = scans.call_count
    for _ in range(7):
        buffer.sample()
        buffer.extend(collect(3))
        buffer.extend(collect(4))
        buffer.sample()
        buffer.add(collect(1)[0])
    assert scans.call_count == n_before
    assert len(buffer) == 60
    for _ in range(5):  # in the full ring: once per lap, where the elements continue at the beginning
        buffer.extend(collect(12))
        buffer.sample()
    assert scans.call_count <= n_before + 1


CACHED = {"traj_key": "episode", "cache_values": True}


def test_writes_of_another_buffer_are_seen() -> None:
    storage, steps = LazyTensorStorage(50), Steps(1)
    ours, theirs = make_pair(lambda: storage, 9, slice_len=3, strict_length=False, **CACHED)
    other = ReplayBuffer(storage=storage)
    # TorchRL counts what both buffers write twice, and therefore samples places that contain no elements yet.
    ours.extend(steps.collect(50))
    ours.empty()
    for seed in range(30):
        (ours, other)[seed % 3 == 1].extend(steps.collect(1 + seed % 5))
        assert_same_samples(ours, theirs, seed)


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("storage", [FrameStorage, LazyTensorStorage])
def test_writes_of_another_process_are_seen(storage: Any) -> None:
    options = {"slice_len": 3, "strict_length": False, **CACHED}
    steps = Steps(1)
    buffer = ReplayBuffer(storage=storage(50), sampler=SliceSampler(**options), batch_size=9, shared=True)
    buffer.extend(steps.collect(10))
    buffer.sample()
    process = multiprocessing.get_context("spawn").Process(target=buffer.extend, args=(steps.collect(15),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    expected = ReplayBuffer(storage=buffer.storage, sampler=torchrl.data.SliceSampler(**options), batch_size=9)
    for seed in range(3):
        assert_same_samples(buffer, expected, seed=seed)
        buffer.extend(steps.collect(2))


def test_sampler_arguments_dispatch_as_in_torchrl() -> None:
    assert type(SliceSampler(slice_len=2, replacement=False)) is SliceSamplerWithoutReplacement
    static = {"ends": torch.tensor([False, True, False, True]), "trajectories": torch.tensor([0, 0, 1, 1])}
    for name, values in static.items():
        buffers = make_pair(lambda: LazyTensorStorage(4), 8, slice_len=2, cache_values=True, **{name: values})
        for buffer in buffers:
            buffer.storage.set(range(4), Steps(0).collect(4))
        assert_same_samples(*buffers, seed=0)


SAMPLERS: dict[str, Any] = {
    "TorchRL's": torchrl.data.SliceSampler,
    "ours": SliceSampler,
    "ours, cached": partial(SliceSampler, cache_values=True),
    "without replacement": SliceSamplerWithoutReplacement,
    "streaming": StreamingSliceSampler,
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_sampled_images_are_decoded_and_once(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sampler = partial(SAMPLERS[sampler], slice_len=4, traj_key=TRAJECTORY)
    twins = Twins(400, sampler=make_sampler, batch_size=lambda: 32)
    twins.extend(Videos(2, end=0.02).collect(150).reshape(-1))
    decode = record_calls(FrameColumn, "decode", monkeypatch)
    for _ in range(3):
        decode.reset_mock()
        ours, theirs = twins.call_both(lambda buffer: buffer.sample())
        n_decoded = sum(numbers.numel() * len(keys) for (_, numbers, keys), _ in decode.call_args_list)
        assert n_decoded == 2 * len(ours)
        assert_same(ours, theirs)

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torchrl.collectors import Collector
from torchrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.offline_to_online import prefill_replay_buffer
from torchrl.data.replay_buffers.samplers import PromptGroupSampler, StalenessAwareSampler
from torchrl.envs import CatFrames, Compose, SerialEnv, ToTensorImage, TransformedEnv

from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.frames.log import FrameLog
from tests.forks import result_in_fork
from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import HEIGHT, STACK, WIDTH, Twins, Videos, make_transitions
from torchrl_ext import FrameStorage, GymWrapper

TRAJECTORY = ("collector", "traj_ids")
SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices by trajectory": partial(SliceSampler, slice_len=4, traj_key=TRAJECTORY, strict_length=False),
    "slices by end": partial(SliceSampler, num_slices=8, end_key=("next", "done"), strict_length=False),
    "slices, cached": partial(SliceSampler, slice_len=4, strict_length=False, cache_values=True),
    "slices without replacement": partial(
        SliceSamplerWithoutReplacement, slice_len=4, traj_key=TRAJECTORY, strict_length=False
    ),
    "consuming": partial(ConsumingSampler, max_sample_count=2),
    "fresh": partial(StalenessAwareSampler, max_staleness=3, version_key="action"),
    "streaming": partial(StreamingSliceSampler, slice_len=4, traj_key=TRAJECTORY, strict_length=False),
    "groups": partial(PromptGroupSampler, samples_per_group=8, group_key="action"),
}


# Later versions of SliceSampler warn if strict_length=False returns fewer transitions than requested.
@pytest.mark.filterwarnings("ignore:SliceSampler returned a short flat batch")
@pytest.mark.sample(quick=4)
@pytest.mark.parametrize(
    ("sampler", "ndim"),
    [*((sampler, 1) for sampler in SAMPLERS), ("random", 2), ("slices by trajectory", 2), ("without replacement", 2)],
)
def test_samplers_return_the_bits_of_lazy_tensor_storage(sampler: str, ndim: int) -> None:
    twins, videos = Twins(200, ndim=ndim, sampler=SAMPLERS[sampler], batch_size=lambda: 32), Videos(2)
    if sampler == "fresh":
        for buffer in (twins.ours, twins.theirs):
            buffer.sampler.consumer_version = 5
    for _ in range(9):
        data = videos.collect(30)
        twins.extend(data if ndim == 2 else data.reshape(-1))
        twins.check()
    assert_same(twins.ours.storage.flatten()[:], twins.theirs.storage.flatten()[:])


def test_update_if_present_writes_images() -> None:
    twins = Twins(50, writer=partial(TensorDictRoundRobinWriter, track_generations=True))
    data = Videos(1).collect(60).reshape(-1)
    twins.extend(data)

    def update(buffer: Any) -> Any:
        index = torch.tensor([1, 12, 3])
        patch = {"pixels": data["pixels"][40:43], ("next", "reward"): torch.zeros(3, 1)}
        generation = torch.tensor([0, 0, 1])
        return buffer.update_if_present(index=index, generation=generation, patch=patch).updated

    ours, theirs = twins.call_both(update)
    assert ours.tolist() == theirs.tolist() == [False, True, False] or torch.equal(ours, theirs)
    assert_same(twins.ours[:], twins.theirs[:])


_PICTURE = torch.full((STACK, HEIGHT, WIDTH), 9, dtype=torch.uint8)
IN_PLACE: dict[str, Any] = {
    "element": lambda buffer: buffer[3]["pixels"].fill_(9),
    "element of a tensor": lambda buffer: buffer[torch.tensor(3)]["pixels"].fill_(9),
    "all elements": lambda buffer: buffer[...]["pixels"].fill_(9),
    "slice of a slice": lambda buffer: buffer[:]["pixels"][2:4].fill_(9),
    "image of a slice, assigned": lambda buffer: buffer[:]["pixels"].__setitem__(3, _PICTURE),
    "pixel of an image, assigned": lambda buffer: buffer[:]["pixels"][3].__setitem__((0, 0, 0), 9),
    "output of a function": lambda buffer: torch.add(_PICTURE, 1, out=buffer[:]["pixels"][3]),
    "list": lambda buffer: torch._foreach_mul_([buffer[0:2]["pixels"], buffer[2:4]["pixels"]], 3),
    "update_": lambda buffer: buffer[:][3:4].update_(TensorDict({"pixels": _PICTURE[None]}, [1])),
}
COPIES: dict[str, Any] = {
    "elements of a tensor": lambda buffer: buffer[torch.tensor([1, 2])]["pixels"].fill_(9),
    "array": lambda buffer: buffer[:]["pixels"].numpy().fill(9),
    "clone": lambda buffer: buffer[:].clone()["pixels"].fill_(9),
    "part of each image": lambda buffer: buffer[:]["pixels"][:, 0].fill_(9),
    "part of an image": lambda buffer: buffer[:]["pixels"][3][0].fill_(9),
    "sample": lambda buffer: buffer.sample(4)["pixels"].fill_(9),
    "key of a slice": lambda buffer: buffer[:].set("pixels", _PICTURE.expand(16, *_PICTURE.shape)),
    "text": lambda buffer: [repr(part) for part in (buffer, buffer[:], buffer[:]["pixels"], buffer[:]["pixels"][3])],
}


@pytest.mark.parametrize("use", [*IN_PLACE, *COPIES])
def test_images_of_views_cannot_be_changed_in_place(use: str) -> None:
    buffer = TensorDictReplayBuffer(storage=FrameStorage(16))
    data = TensorDict({"pixels": torch.zeros(16, STACK, HEIGHT, WIDTH, dtype=torch.uint8)}, [16])
    buffer.extend(data)
    if use in IN_PLACE:
        with pytest.raises(InvalidArgumentError, match=r"then buffer\[i\] = data"):
            IN_PLACE[use](buffer)
    else:
        COPIES[use](buffer)
    assert int(buffer[:]["pixels"].max()) == 0
    view, changed = buffer[:]["pixels"][2:5], buffer[3].clone()
    changed["pixels"][0] = 9
    buffer[3] = changed
    assert torch.equal(view[1], changed["pixels"]), "slices show later writes"


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


@pytest.mark.parametrize("n", [20, 60])
@pytest.mark.parametrize(
    "index",
    [-1, slice(2, 5), ..., [1, -2], (3,), "new"]
    + [torch.tensor(part) for part in (2, [1, -2], [[1], [-2]], [], [59], [-61], [1.0], [True] * 20)],
    ids=str,
)
def test_elements_at_an_index_equal_those_of_lazy_tensor_storage(n: int, index: Any) -> None:
    data, found = Videos(1).collect(n).reshape(-1), []
    for storage in (FrameStorage(60), LazyTensorStorage(60)):
        storage.set(range(n), data)
        try:
            elements = storage.get(index)
        except (IndexError, KeyError) as error:
            found.append((type(error), TensorDict()))
            continue
        memory = [part.get("action").untyped_storage().data_ptr() for part in (elements, storage._storage)]
        found.append((memory[0] == memory[1], elements))
    assert found[0][0] is found[1][0]  # the same error, or both or neither share memory with the storage
    assert_same(found[0][1], found[1][1])


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


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided by images": lambda images: images.as_strided(
        (4, *images.shape[1:]), images.stride(), 3 * images[0].numel()
    ),
    "as_strided within images": lambda images: images.as_strided((4, *images.shape[1:]), images.stride(), 7),
    "reshape and transpose": lambda images: images[:12].view(3, 4, *images.shape[1:]).transpose(0, 1)[1:, ::2],
    "expand": lambda images: images[5:6].expand(3, *images.shape[1:])[1:],
    "unfold": lambda images: images.unfold(0, 3, 2),
    "image axes": lambda images: images[2:].transpose(-1, -2),
    "columns": lambda images: images[:, ..., 1:],
    "movedim": lambda images: images.unsqueeze(1)[4:].movedim(0, 1).squeeze(0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_images_equal_those_of_tensors(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    storage = FrameStorage(20)
    storage.set(range(20), make_transitions(20))
    images = storage[:]["pixels"]
    found = view(images)
    assert torch.equal(found.clone(), view(images.clone()))


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


WRONG = [
    ({"max_size": 0}, InvalidArgumentError, "max_size=0 must be at least 1"),
    ({"max_size": 2.5}, InvalidTypeError, "max_size=2.5 must be a whole number"),
    ({"ndim": 0}, InvalidArgumentError, "ndim=0 must be at least 1"),
    ({"codec": "gzip"}, InvalidArgumentError, "codec='gzip' is unknown"),
    ({"max_error": 4, "codec": "raw"}, InvalidArgumentError, "max_error=4 has no effect on codec='raw'"),
    ({"n_stack": 5}, InvalidArgumentError, "n_stack=5 does not divide"),
    ({"pixels": ["image"]}, InvalidArgumentError, "'image' is not a tensor of the data"),
    ({"pixels": ["action"]}, InvalidArgumentError, "'action' is not a tensor of the data"),
    ({"compilable": True}, InvalidArgumentError, "compilable=True is not possible"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_invalid_arguments_are_refused_with_a_fix(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FrameStorage(**{"max_size": 10, **options}).set(0, Videos(1).collect(1)[0, 0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
@pytest.mark.parametrize("device", ["cuda:3", torch.device("cuda"), 0])
def test_missing_gpu_is_refused_before_data_is_collected(device: Any) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"device=.* is not available.*device="):
        FrameStorage(10, device=device)


def test_exhausted_memory_refuses_elements_and_keeps_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*_: Any) -> Any:
        raise OutOfMemoryError("no memory")

    storage = FrameStorage(50)
    storage.set(range(20), make_transitions(20))
    before, noise = storage[:].clone(), Videos(30, seed=9).collect(1).reshape(-1)  # other environments share no frames
    with monkeypatch.context() as patch:
        patch.setattr(FrameLog, "_new_segment", raise_out_of_memory)
        with pytest.raises(OutOfMemoryError, match="no memory"):
            storage.set(range(15, 45), noise)
    assert_same(storage[:], before)
    storage.set(range(15, 45), noise)
    assert torch.equal(storage[15:45]["pixels"].clone(), noise["pixels"])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_cannot_use_the_storage() -> None:
    storage = FrameStorage(8)
    storage.set(range(5), make_transitions(5))
    found = result_in_fork(lambda: storage.set(0, make_transitions(1)[0]))
    assert found.startswith("NotCopyableError")
    assert "this process was forked" in found
    assert_same(storage[:], make_transitions(5).to("cpu"))


@tensorclass
class _Captioned:
    pixels: torch.Tensor
    text: str


def test_tensorclasses_with_text_can_be_stored_more_than_once() -> None:
    storage = FrameStorage(10)
    for number in range(2):
        images = torch.full((3, 40, 40), number, dtype=torch.uint8)
        storage.set(range(3 * number, 3 * number + 3), _Captioned(images, text="some text", batch_size=[3]))
    assert storage.get([1, 4]).pixels[:, 0, 0].tolist() == [0, 1]
    assert set(storage.get([1, 4]).text) == {"some text"}


def test_elements_of_collectors_may_lack_reset_masks() -> None:
    twins, data = Twins(20), make_transitions(20)
    twins.extend(data[:10].clone().set("_reset", torch.ones(10, 1, dtype=torch.bool)))
    twins.extend(data[10:])
    assert_same(twins.ours[:].exclude("_reset"), twins.theirs[:].exclude("_reset"))


def test_elements_that_are_not_tensordicts_of_one_form_and_sets_of_places_are_refused() -> None:
    first, short = make_transitions(1)[0], make_transitions(1)[0].set("action", torch.zeros(3))
    agents = [TensorDict({"pixels": torch.zeros(size, 40, 3, dtype=torch.uint8)}) for size in (36, 37)]
    nested = TensorDict({"agents": LazyStackedTensorDict(*agents).expand(4, 2)}, [4])
    for filled in (False, True):
        storage = FrameStorage(10)
        if filled:
            storage.set(range(4), make_transitions(4))
        for rows in ([first, short], LazyStackedTensorDict(first, short), nested):
            with pytest.raises(InvalidArgumentError, match="differ in shape"):
                storage.set(range(len(rows)), rows)
        for wrong in (first["pixels"], {"pixels": first["pixels"]}):
            with pytest.raises(InvalidTypeError, match=r"FrameStorage stores TensorDicts, got .* Use TensorDict\(\{"):
                storage.set(0, wrong)
        assert (len(storage), storage.initialized) == (4 * filled, filled)
    with pytest.raises(InvalidArgumentError, match=r"has no order.*Use storage\[sorted\(index\)\] = data"):
        storage[{2, 3}] = make_transitions(2, seed=5)
    assert_same(storage[:], make_transitions(4).to("cpu"))


def test_prefill_replay_buffer_fills_a_storage() -> None:
    data = Videos(1).collect(60).reshape(-1)
    dataset = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=SamplerWithoutReplacement(shuffle=False))
    dataset.extend(data.clone())
    buffer = prefill_replay_buffer(TensorDictReplayBuffer(storage=FrameStorage(100)), dataset, chunk_size=25)
    assert_same(buffer[:].exclude("index"), data.to("cpu"))


def _images(*shape: int) -> torch.Tensor:
    return torch.randint(256, (*shape, 3, 40, 40), dtype=torch.uint8)


def _add_trajectories(storage: Any, path: Path) -> Any:
    """Add trajectories as single elements, and several at once (pytorch/rl#2948)."""
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=5)
    for _ in range(4):
        buffer.add(TensorDict({"pixels": _images(7), "next": {"pixels": _images(7)}}, [7]))
    buffer.extend(TensorDict({"pixels": _images(8, 7), "next": {"pixels": _images(8, 7)}}, [8, 7]))
    return torch.cat([buffer.sample(), buffer[:]])


def _single_agent(storage: Any, path: Path) -> Any:
    """Store the images of one agent, in a dimension of size 1 (pytorch/rl#3515), and use torch.save (#1588)."""
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    agents = [TensorDict({"pixels": _images(6, 1)}, [6, 1]) for _ in range(2)]
    buffer.extend(TensorDict({"agents": agents[0], "next": {"agents": agents[1]}}, [6]))
    torch.save(buffer, path)
    return torch.cat([buffer.sample(), torch.load(path, weights_only=False).sample()])


@pytest.mark.parametrize("use", [_add_trajectories, _single_agent])
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


def _make_breakout(**options: Any) -> Any:
    return AtariPreprocessing(gymnasium.make("ALE/Breakout-v5", frameskip=1), **options)


def _make_stacked_atari() -> Any:
    return GymWrapper(FrameStackObservation(_make_breakout(), 4))


def _make_float_atari() -> Any:
    """Make an Atari game whose frames TorchRL scales and stacks: floats between 0 and 1."""
    env = GymWrapper(_make_breakout(grayscale_newaxis=True))
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
    twins = Twins(600, ndim=ndim, options={"pixels": pixels}, sampler=SAMPLERS["slices by trajectory"])
    collector = Collector(SerialEnv(2, make), None, frames_per_batch=100, total_frames=800)
    collector.set_seed(0)
    for batch in collector:
        twins.extend(batch if ndim == 2 else batch.reshape(-1))
        assert_same(*twins.call_both(lambda buffer: buffer.sample(32)))
    collector.shutdown()
    assert_same(twins.ours[:], twins.theirs[:])
    for column in twins.ours.storage._columns:
        raw = sum(twins.theirs.storage._storage.get(key).nbytes for key in column.keys)
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

from __future__ import annotations

import copy
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter, TensorDictReplayBuffer

from rl_ext_core.errors import RlExtError
from tests.interrupts import interrupt_at, interrupt_everywhere
from tests.torchrl_ext.comparison import assert_same
from tests.torchrl_ext.frame_data import PIXELS, Videos, make_transitions
from torchrl_ext import FrameStorage

CODE_PATHS = ("torchrl_ext/frame", "rl_ext_core/")


def _as_two_agents(data: TensorDict) -> TensorDict:
    for part in (data, data["next"]):
        pixels = part.pop("pixels")
        agents = torch.stack([pixels, pixels.flip(-1)], data.ndim)
        part["agents"] = TensorDict({"pixels": agents}, [*data.shape, 2])
    return data


def _add_second_camera(data: TensorDict) -> TensorDict:
    for part in (data, data["next"]):
        part["second"] = part["pixels"].flip(-1).movedim(-3, -1).contiguous()
    return data


def _as_floats(data: TensorDict, scale: int = 255) -> TensorDict:
    for key in PIXELS:
        data[key] = data[key] / scale
    return data


# Functions that change data of shape (steps,) or (steps, environments).
FORMS: dict[str, Any] = {
    "stacks": lambda data: data,
    "without next": lambda data: data.exclude(PIXELS[1]),
    "only next": lambda data: data.exclude(PIXELS[0]),
    "agents": _as_two_agents,
    "two cameras": _add_second_camera,
    "bytes as floats": _as_floats,
    "floats": lambda data: _as_floats(data, 254),
}
MISFITS: dict[str, Any] = {
    "image shape": lambda data, key: data.set(key, data[key][..., :-1].contiguous()),
    "image dtype": lambda data, key: data.set(key, data[key].to(torch.int16)),
    "shape": lambda data, _: data.set(("next", "reward"), data["next", "reward"].expand(*data.shape, 2)),
    "dtype": lambda data, _: data.set(("next", "reward"), data["next", "reward"].double()),
    "kind": lambda data, _: data.set("inner", torch.zeros(data.shape)),
    "missing": lambda data, _: data.exclude(("next", "reward")),
    "missing image": lambda data, key: data.exclude(key),
}


class SameAsUpstream(RuleBasedStateMachine):
    """Machine that makes the same calls of buffers over FrameStorage and LazyTensorStorage."""

    ours: Any = None

    @initialize(
        form=st.sampled_from(sorted(FORMS)),
        ndim=st.sampled_from([1, 1, 2]),
        in_folder=st.booleans(),
        keeps_best=st.booleans(),
        rows=st.integers(3, 30),
        codec=st.sampled_from(["raw", "patch"]),
    )
    def make_buffers(self, form: str, ndim: int, in_folder: bool, keeps_best: bool, rows: int, codec: str) -> None:
        n_envs = 2 if ndim == 2 else 1
        self.size, self.rows, self.ndim, self.form = rows * n_envs, rows, ndim, form
        # In two dimensions, TensorDictReplayBuffer 0.14.1 cannot number one step of several environments.
        self.cls: Any = ReplayBuffer if ndim == 2 else TensorDictReplayBuffer
        self.keeps_best = keeps_best and ndim == 1 and not in_folder
        self.options = {"ndim": ndim, "codec": codec, "pixels": ["pixels"] if "floats" in form else None}
        self.temporary = Path(tempfile.mkdtemp())
        self.folder = self.temporary / "a" if in_folder else None
        self.videos = Videos(n_envs)
        self.ours = self._open_buffer(self.folder)
        self.theirs: Any = self._make_buffer(LazyTensorStorage(self.size, ndim=ndim))
        self._extend_both(self._collect_data(2))

    def _make_buffer(self, storage: Any) -> Any:
        writer = {"writer": TensorDictMaxValueWriter(rank_key=("next", "reward"))} if self.keeps_best else {}
        return self.cls(storage=storage, batch_size=8, **writer)

    def _open_buffer(self, folder: Path | None, size: int = 0) -> Any:
        size = size or self.size
        return self._make_buffer(FrameStorage(size, storage_dir=folder, resume=folder is not None, **self.options))

    def _collect_data(self, n: int, form: str | None = None) -> Any:
        data = self.videos.collect(min(n, self.rows)).transpose(0, 1)
        return FORMS[form or self.form]((data if self.ndim == 2 else data[:, 0]).clone())

    def _extend(self, buffer: Any, data: Any) -> None:
        """Add data to one buffer, with its dimensions in the order that it expects."""
        # Buffers expect environments first, and transpose themselves.
        buffer.extend((data.transpose(0, 1) if self.ndim == 2 else data).clone())

    def _extend_both(self, data: Any) -> None:
        for buffer in (self.ours, self.theirs):
            self._extend(buffer, data)

    @property
    def n_rows(self) -> int:
        return len(self.theirs.storage.get(slice(None)))

    @rule(n=st.integers(1, 12), order=st.sampled_from(["as collected", "shuffled", "lazy"]))
    def extend(self, n: int, order: str) -> None:
        data = self._collect_data(n)
        if order == "shuffled":
            data = data[torch.as_tensor(np.random.default_rng(n).permutation(len(data)))]
        if order == "lazy" and self.ndim == 1:
            data = lazy_stack(list(data.unbind(0)))
        self._extend_both(data)

    @precondition(lambda self: self.form == "bytes as floats")
    @rule(n=st.integers(1, 3))
    def extend_by_other_floats(self, n: int) -> None:
        self._extend_both(self._collect_data(n, "floats"))

    @precondition(lambda self: not self.keeps_best)
    @rule(
        name=st.sampled_from(["extend", "extend", "one key", "empty", "sample", "state_dict", "dumps", "copy"]),
        n=st.integers(1, 4),
        at=st.integers(1, 1500),
    )
    def interrupt(self, name: str, n: int, at: int) -> None:
        """Interrupt a call of our buffer. Make the same call of upstream's if it was completed."""
        data, path = self._collect_data(n), self.temporary / "c"
        part = data.select(next(key for key in data.keys(True, True) if "pixels" in key))[:1]
        calls: dict[str, Any] = {
            "extend": lambda buffer: self._extend(buffer, data),
            "one key": lambda buffer: buffer.storage.set(torch.tensor([0]), part.clone(), set_cursor=False),
            "empty": lambda buffer: buffer.empty(),
            "sample": lambda buffer: buffer.sample(),
            "state_dict": lambda buffer: buffer.storage.state_dict(),
            "dumps": lambda buffer: buffer.storage.dumps(path),
            "copy": lambda buffer: copy.deepcopy(buffer.storage),
        }
        if self.folder is not None and name == "copy":
            return  # a storage in a folder refuses this call
        interrupt_at(lambda: calls[name](self.ours), at, code_paths=CODE_PATHS)
        try:
            self._compare(self.ours)
        except AssertionError:
            calls[name](self.theirs)  # the invariant compares again
        if len(self.theirs) == 0:
            self._extend_both(self._collect_data(1))

    @rule(wrong=st.sampled_from(sorted(MISFITS)))
    def extend_by_misfits(self, wrong: str) -> None:
        """Add data that do not fit to our buffer, which must refuse them without an effect."""
        if self.keeps_best and wrong in ("missing", "shape"):
            return  # TorchRL's writer reads this entry first
        data = self._collect_data(2)
        key = next(key for key in data.keys(True, True) if "pixels" in key)
        with pytest.raises(RlExtError, match=r"nothing was stored.* (Use|Add|Write) "):
            self._extend(self.ours, MISFITS[wrong](data, key))

    @rule(
        kind=st.sampled_from(["tensor", "list", "range", "slice", "mask", "...", "one", "pair"]),
        seed=st.integers(0, 999),
    )
    def write(self, kind: str, seed: int) -> None:
        """Replace elements at the same random places in both storages."""
        random, held = np.random.default_rng(seed), self.n_rows
        # Negative numbers count from the end of the whole storage. Of repeated places, the last one counts.
        places = torch.as_tensor(random.integers(0, held, 4) - self.rows * random.integers(0, 2, 4))
        start, stop = sorted(random.integers(0, held + 1, 2).tolist())
        mask = torch.as_tensor(random.random(self.rows) < 0.4) & (torch.arange(self.rows) < held)
        index = {
            **{"tensor": places, "list": places.tolist(), "range": range(start, stop), "slice": slice(start, stop)},
            **{"mask": mask, "...": ..., "one": int(places[0]), "pair": (places, places % 2)},
        }[kind]
        if (kind == "..." and held < self.rows) or (kind == "pair" and self.ndim == 1):
            return
        shape = torch.zeros(self.rows, *[2] * (self.ndim - 1))[index].shape
        if not shape.numel() and kind != "mask":
            return
        data = self._collect_data(self.rows)
        data = data[0] if kind == "one" else data[:4, 0] if kind == "pair" else data[: shape[0]]
        if tuple(data.shape) == tuple(shape):  # there may be fewer steps than places
            for buffer in (self.ours, self.theirs):
                buffer.storage.set(index, data.clone(), set_cursor=False)

    @rule(seed=st.integers(0, 999), wrong=st.sampled_from([99, -99, [99], None, True]))
    def write_one_key(self, seed: int, wrong: Any) -> None:
        """Replace one image of an element in each buffer, after a write to no place is refused."""
        data = self._collect_data(1)
        key = [key for key in data.keys(True, True) if "pixels" in key][-1]
        part = data.select(key)
        with pytest.raises(RlExtError, match="nothing was stored"):
            self.ours.storage.set(wrong, part[0] if isinstance(wrong, int) else part, set_cursor=False)
        for buffer in (self.ours, self.theirs):
            buffer.storage.set(torch.tensor([seed % self.n_rows]), part.clone(), set_cursor=False)

    @rule(start=st.integers(0, 20), stop=st.integers(0, 32))
    def write_back_slice(self, start: int, stop: int) -> None:
        """Change values of a slice in place, add a key, and assign the slice to itself."""
        stop = min(stop, self.n_rows)
        if start < stop and self.folder is None:
            for buffer in (self.ours, self.theirs):
                elements = buffer.storage[start:stop]
                elements["action"].add_(1)
                elements["late"] = elements["action"] + 1
                buffer.storage[start:stop] = elements
                buffer.storage._storage.del_("late")

    @rule(seed=st.integers(0, 99))
    def compare_samples(self, seed: int) -> None:
        samples = []
        for buffer in (self.ours, self.theirs):
            torch.manual_seed(seed)
            samples.append(buffer.sample())
        assert_same(*samples)

    @rule(start=st.integers(-32, 32), stop=st.integers(-32, 32), step=st.sampled_from([1, 2]))
    def compare_slices(self, start: int, stop: int, step: int) -> None:
        if len(range(self.n_rows)[slice(start, stop, step)]):
            ours, theirs = (buffer.storage.get(slice(start, stop, step)) for buffer in (self.ours, self.theirs))
            assert_same(ours[:], theirs[:])
            assert_same(ours[:1], theirs[:1])
            assert_same(ours[-1], theirs[-1])

    @rule()
    def empty(self) -> None:
        for buffer in (self.ours, self.theirs):
            buffer.empty()
        self._extend_both(self._collect_data(1))

    @precondition(lambda self: self.folder is None)
    @rule(how=st.sampled_from(["state_dict", "dumps", "pickle", "deepcopy"]))
    def replace_by_copy(self, how: str) -> None:
        """Replace our buffer by a copy: a loaded state, a checkpoint or a pickle."""
        if self.keeps_best and how in ("state_dict", "dumps"):
            return  # TorchRL's writer has no state
        if how == "state_dict":
            other = self._open_buffer(None)
            other.load_state_dict(copy.deepcopy(self.ours.state_dict()))
        elif how == "dumps":
            self.ours.dumps(self.temporary / "b")
            other = self._open_buffer(None)
            other.loads(self.temporary / "b")
            shutil.rmtree(self.temporary / "b")
        else:
            other = copy.deepcopy(self.ours) if how == "deepcopy" else pickle.loads(pickle.dumps(self.ours))
        self._extend(self.ours, self._collect_data(1))  # changing the original must not change the copy
        self.ours = other

    @precondition(lambda self: self.folder is not None)
    @rule()
    def open_again(self) -> None:
        self.ours.storage.close()
        self.ours = self._open_buffer(self.folder)

    @precondition(lambda self: self.folder is not None)
    @rule()
    def open_copy_of_unclosed_folder(self) -> None:
        """Open a copy of the folder that is in use, as after a kill, and compare it with upstream's buffer."""
        left = self._open_buffer(shutil.copytree(self.folder, self.temporary / "left"))
        try:
            self._compare(left)
        finally:
            left.storage.close()
            shutil.rmtree(self.temporary / "left")

    def _compare(self, ours: Any) -> None:
        assert len(ours) == len(self.theirs)
        assert int(ours.writer._cursor) == int(self.theirs.writer._cursor)
        held = torch.arange(self.n_rows)
        assert_same(ours.storage.get(held), self.theirs.storage.get(held))

    @invariant()
    def buffers_are_equal(self) -> None:
        """Assert after each call that both buffers are equal, and that no image is stored twice."""
        if self.ours is not None:
            self._compare(self.ours)
            for column in self.ours.storage._columns:
                assert column.table.n_stored == self.n_rows * column.per_row

    def teardown(self) -> None:
        if self.ours is not None:
            self.ours.storage.close()
            shutil.rmtree(self.temporary)


TestSameAsUpstream = SameAsUpstream.TestCase
TestSameAsUpstream.settings = settings(
    max_examples=80 if "CI" in os.environ else 12,
    stateful_step_count=20,
    phases=(Phase.generate,),  # shrinking takes minutes
)


@pytest.mark.sample
@pytest.mark.parametrize("in_folder", [False, True])
def test_interrupted_first_elements_are_stored_or_not(in_folder: bool, tmp_path: Path) -> None:
    made: list[FrameStorage] = []
    data = make_transitions(20)

    def prepare() -> Callable[[], Any]:
        folder = tmp_path / f"storage{len(made)}" if in_folder else None
        made.append(FrameStorage(24, storage_dir=folder))
        return lambda: made[-1].set(range(20), data.clone())

    for where in interrupt_everywhere(prepare, code_paths=CODE_PATHS, every=37):
        assert len(made[-1]) in (0, 20), where
        made[-1].set(range(20, 24), data[:4].clone())
        made[-1].set(range(20), data.clone())
        assert_same(made[-1][:].clone()[:20], data.to("cpu"))
        made[-1].close()

"""Random sequences of calls of a FrameStorage, compared with LazyTensorStorage."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.interrupts import interrupt_at
from tests.torchrl_ext.frame_data import Videos, assert_same
from torchrl_ext import FrameStorage

CODE_PATHS = ("torchrl_ext/frame", "rl_ext_core/")


class SameAsUpstream(RuleBasedStateMachine):
    """Machine that makes the same calls of buffers over FrameStorage and LazyTensorStorage."""

    ours: Any = None

    @initialize(
        ndim=st.sampled_from([1, 1, 2]),
        in_folder=st.booleans(),
        rows=st.integers(3, 30),
        codec=st.sampled_from(["raw", "patch"]),
    )
    def make_buffers(self, ndim: int, in_folder: bool, rows: int, codec: str) -> None:
        """Make both buffers with these options, and add a first element."""
        n_envs = 2 if ndim == 2 else 1
        self.size, self.rows, self.ndim = rows * n_envs, rows, ndim
        # In two dimensions, TensorDictReplayBuffer 0.14.1 cannot number one step of several environments.
        self.cls = ReplayBuffer if ndim == 2 else TensorDictReplayBuffer
        self.options = {"ndim": ndim, "codec": codec}
        self.temporary = Path(tempfile.mkdtemp())
        self.folder = self.temporary / "a" if in_folder else None
        self.videos = Videos(n_envs)
        self.ours = self._open_buffer(self.folder)
        self.theirs: Any = self.cls(storage=LazyTensorStorage(self.size, ndim=ndim), batch_size=8)
        self.extend(2)

    def _open_buffer(self, folder: Path | None) -> Any:
        """Make our buffer over a FrameStorage, in a folder or in memory."""
        storage = FrameStorage(self.size, storage_dir=folder, resume=folder is not None, **self.options)
        return self.cls(storage=storage, batch_size=8)

    def _collect_data(self, n: int) -> Any:
        """Collect data of batch size (n,), or (n, n_envs)."""
        data = self.videos.collect(n).transpose(0, 1)
        return data if self.ndim == 2 else data[:, 0]

    def _extend(self, buffer: Any, data: Any) -> None:
        """Add data to one buffer, with its dimensions in the order that it expects."""
        # Buffers expect environments first, and transpose themselves.
        buffer.extend((data.transpose(0, 1) if self.ndim == 2 else data).clone())

    @rule(n=st.integers(1, 12))
    def extend(self, n: int) -> None:
        """Add the same new data to both buffers."""
        data = self._collect_data(min(n, self.rows))
        for buffer in (self.ours, self.theirs):
            self._extend(buffer, data)

    @rule(n=st.integers(1, 4), at=st.integers(1, 1500))
    def interrupt_extend(self, n: int, at: int) -> None:
        """Interrupt an addition to our buffer; repeat it on upstream's if it was completed."""
        data = self._collect_data(min(n, self.rows))
        first = torch.tensor([int(self.theirs.writer._cursor)])
        interrupt_at(lambda: self._extend(self.ours, data), at, code_paths=CODE_PATHS)
        stored = len(self.ours.storage.get(slice(None))) > int(first) and torch.equal(
            self.ours.storage.get(first)["inner", "vector"], data[:1]["inner", "vector"]
        )
        if stored:
            self._extend(self.theirs, data)

    @rule(n=st.integers(1, 5), seed=st.integers(0, 999))
    def set_random_places(self, n: int, seed: int) -> None:
        """Replace elements at the same random places in both storages."""
        held = len(self.theirs.storage.get(slice(None)))
        index = torch.as_tensor(np.random.default_rng(seed).permutation(held)[:n])
        data = self._collect_data(len(index))
        for buffer in (self.ours, self.theirs):
            buffer.storage.set(index, data.clone(), set_cursor=False)

    @rule(seed=st.integers(0, 999))
    def set_one_key(self, seed: int) -> None:
        """Replace one of the two images of an element in each buffer."""
        at = seed % len(self.theirs[:])
        data = self._collect_data(1)
        part = TensorDict({"pixels": data["next", "pixels"]}, data.batch_size)
        for buffer in (self.ours, self.theirs):
            buffer.storage.set(torch.tensor([at]), part.clone(), set_cursor=False)

    @rule(seed=st.integers(0, 99))
    def compare_samples(self, seed: int) -> None:
        """Assert that both buffers return equal samples after equal seeds."""
        samples = []
        for buffer in (self.ours, self.theirs):
            torch.manual_seed(seed)
            samples.append(buffer.sample())
        assert_same(*samples)

    @rule(start=st.integers(-32, 32), stop=st.integers(-32, 32), step=st.sampled_from([1, 2]))
    def compare_slices(self, start: int, stop: int, step: int) -> None:
        """Assert that both storages return equal slices."""
        if len(range(self.rows)[slice(start, stop, step)]):
            ours, theirs = (buffer.storage.get(slice(start, stop, step)) for buffer in (self.ours, self.theirs))
            assert torch.equal(ours["pixels"][:], theirs["pixels"])
            assert torch.equal(ours["next", "reward"], theirs["next", "reward"])

    @rule()
    def empty(self) -> None:
        """Empty both buffers, and add an element."""
        for buffer in (self.ours, self.theirs):
            buffer.empty()
        self.extend(1)

    @rule(how=st.sampled_from(["state_dict", "dumps", "deepcopy"]))
    def replace_by_copy(self, how: str) -> None:
        """Replace our buffer by a copy: a loaded state, a checkpoint or a pickle."""
        if self.folder is not None:
            return
        if how == "state_dict":
            other = self._open_buffer(None)
            other.load_state_dict(copy.deepcopy(self.ours.state_dict()))
        elif how == "dumps":
            self.ours.dumps(self.temporary / "b")
            other = self._open_buffer(None)
            other.loads(self.temporary / "b")
            shutil.rmtree(self.temporary / "b")
        else:
            other = copy.deepcopy(self.ours)
        self._extend(self.ours, self._collect_data(1))  # changing the original must not change the copy
        self.ours = other

    @rule()
    def open_again(self) -> None:
        """Close our storage, and open its folder again."""
        if self.folder is not None:
            self.ours.storage.close()
            self.ours = self._open_buffer(self.folder)

    @rule()
    def open_copy_of_unclosed_folder(self) -> None:
        """Open a copy of the folder that is in use, and compare it with upstream's buffer."""
        if self.folder is not None:
            left = self._open_buffer(shutil.copytree(self.folder, self.temporary / "left"))
            try:
                self._compare(left)
            finally:
                left.storage.close()
                shutil.rmtree(self.temporary / "left")

    def _compare(self, ours: Any) -> None:
        """Assert that one of our buffers has upstream's length, cursor and elements."""
        assert len(ours) == len(self.theirs)
        assert int(ours.writer._cursor) == int(self.theirs.writer._cursor)
        held = torch.arange(len(self.theirs.storage.get(slice(None))))
        assert_same(ours.storage.get(held), self.theirs.storage.get(held))

    @invariant()
    def buffers_are_equal(self) -> None:
        """Assert after each call that both buffers are equal."""
        if self.ours is not None:
            self._compare(self.ours)

    def teardown(self) -> None:
        """Close our storage, and delete the temporary folder."""
        if self.ours is not None:
            self.ours.storage.close()
            shutil.rmtree(self.temporary)


TestSameAsUpstream = SameAsUpstream.TestCase
TestSameAsUpstream.settings = settings(max_examples=40 if "CI" in os.environ else 12, stateful_step_count=20)

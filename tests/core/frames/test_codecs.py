"""Registered codecs, the checks of ``rl_ext_core.testing``, and missing packages."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import MissingDependencyError
from rl_ext_core.frames import Codec, FrameStore, StackLayout, codec_names, codecs, register_codec
from rl_ext_core.frames.arrays import FRAMES
from rl_ext_core.testing import LAYOUTS, ConformanceError, check_codec, check_frame_store, make_transitions
from tests.core.frames.disk_helpers import append_all


class ZlibCodec(Codec):
    """Codec of a third party: raw frames, and full blocks compressed by the standard library."""

    name = "test-zlib"
    patches = False
    seals = True

    def check_available(self) -> None:
        pass

    def seal(self, block: memoryview) -> bytes:
        return zlib.compress(block, 1)

    def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
        return zlib.decompress(sealed, bufsize=n_bytes)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the registry of codecs by a copy during each test."""
    monkeypatch.setattr(codecs, "_REGISTRY", dict(codecs._REGISTRY))


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", ["patch+lz4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("patch", "raw"))]
)
def test_codec_conforms(codec: str) -> None:
    assert codec in codec_names()
    check_codec(codec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["third party's codec", "adaptive"])
def test_store_conforms(kind: str) -> None:
    register_codec(ZlibCodec)

    def make_store(capacity: int, n_envs: int, layout: StackLayout) -> FrameStore:
        """Create the store under test."""
        if kind == "adaptive":
            return FrameStore.adaptive(capacity, n_envs, layout.shape, layout.dtype)
        return FrameStore(capacity, n_envs, layout, codec=ZlibCodec(), block_length=4)

    check_frame_store(make_store, contents=("mixed",))


def faulty_codec(fault: str) -> type[Codec]:
    """Return a codec with a fault: "flips" decodes a wrong bit, "scribbles" changes its input."""

    class FaultyCodec(ZlibCodec):
        name = f"test-{fault}"

        def seal(self, block: memoryview) -> bytes:
            sealed = super().seal(block)
            block[0] ^= fault == "scribbles"
            return sealed

        def unseal(self, sealed: memoryview, n_bytes: int) -> bytes:
            block = super().unseal(sealed, n_bytes)
            if fault == "flips" and n_bytes > 4000:
                block = block[:-1] + bytes([block[-1] ^ 1])
            return block

    return FaultyCodec


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("flips", r"unseal\(\) of that returned"),
        ("scribbles", r"seal\(\) changed its argument"),
    ],
)
def test_check_codec_finds_faults(fault: str, text: str) -> None:
    register_codec(faulty_codec(fault))
    with pytest.raises(ConformanceError, match=f"(?s)test-{fault}.*{text}|{text}.*test-{fault}"):
        check_codec(f"test-{fault}")


class FaultyStore(FrameStore):
    """Store with the fault that ``fault`` names."""

    def __init__(self, *args: Any, fault: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.fault = fault

    def get(self, rows: Any, envs: Any, observations: Any, next_observations: Any = None, **options: Any) -> None:
        """Read transitions, with wrong results if the fault is "next" or "threads"."""
        super().get(rows, envs, observations, next_observations, **options)
        if self.fault == "next" and next_observations is not None:
            next_observations[-1, ..., -1] = 3
        if self.fault == "threads" and options.get("num_threads", 1) > 1:
            observations[:] = observations[::-1].copy()

    @property
    def size(self) -> int:
        """Number of transitions, one too many if the fault is "size"."""
        return super().size + (self.fault == "size")

    @property
    def nbytes(self) -> int:
        """Memory in use, which grows with each added frame if the fault is "leak"."""
        return super().nbytes + (int(self._pool._arrays["head"][FRAMES]) * 5000 if self.fault == "leak" else 0)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("next", "next observation of row"),
        ("threads", "num_threads=2"),
        ("size", "size is"),
        ("leak", "nbytes grew to"),
    ],
)
def test_check_frame_store_finds_faults(fault: str, text: str) -> None:
    factory = functools.partial(FaultyStore, codec="raw", fault=fault)
    with pytest.raises(ConformanceError, match=text):
        check_frame_store(factory, contents=("sparse",), label="faulty")


def test_codec_without_its_package_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lz4" else find(name, *rest))
    with pytest.raises(MissingDependencyError) as caught:
        FrameStore.adaptive(4, 1, (4, 9, 9), np.uint8, codec="patch+lz4")
    assert "codec 'patch+lz4' needs the package 'lz4'" in str(caught.value)
    assert str(caught.value).endswith('rl-ext[frames]"')


def test_missing_numba_raises_with_install_command() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from rl_ext_core.frames import FrameStore, StackLayout\n"
        "from rl_ext_core.errors import MissingDependencyError\n"
        "try: FrameStore.adaptive(4, 1, (4, 9, 9), 'u1', codec='raw')\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("A store of frames needs the package 'numba', which is not installed. Install it")
    assert done.stdout.endswith('rl-ext[frames]"\n')


def test_auto_codec_depends_on_contents() -> None:
    def chosen_codec(contents: str) -> str:
        """Return the codec that an adaptive store chooses for these contents."""
        store = FrameStore.adaptive(200, 2, LAYOUTS[9].shape, np.uint8)
        append_all((store,), make_transitions(LAYOUTS[9], n_steps=140, contents=contents))
        assert store.layout == LAYOUTS[9]
        return store.codec

    assert chosen_codec("sparse") == "patch"
    assert chosen_codec("noise") == "raw"

"""Memory that runs out in the middle of ``append`` leaves the store as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames import AdaptiveStore, FrameStore, arena, codecs, reading, writer
from rl_ext_core.testing import LAYOUTS, PlainStore, check_contents, transitions

LAYOUT = LAYOUTS[0]


class Failure:
    """Lets a function fail at its n-th call from when it is armed."""

    def __init__(self, function: Callable[..., Any], error: BaseException) -> None:
        self._function, self._error = function, error
        self.left = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            if not self.left:
                raise self._error
        return self._function(*args, **options)


def append_in_the_end(
    target: Any, plain: PlainStore, failure: Failure, transition: tuple[Any, Any], error: type[BaseException]
) -> int:
    """Fails at the first call, the second, ... until there are no more; returns how often that was."""
    for failures in range(100):
        failure.left = failures + 1
        try:
            target.append(*transition)
        except error:
            failure.left = 0
            check_contents(target, plain, f"after a failure at call {failures + 1}")
        else:
            failure.left = 0
            plain.append(*transition)
            return failures
    raise AssertionError("never succeeded")


def without_memory(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Failure:
    failure = Failure(arena.allocate, error)
    for module in (arena, reading, writer):
        monkeypatch.setattr(module, "allocate", failure)
    # Small pieces, so that new ones are needed often.
    monkeypatch.setattr(arena, "_SLAB_BYTES", 700)
    return failure


@pytest.mark.parametrize("codec", ["raw", "patch", "patch+lz4"])
@pytest.mark.parametrize("error", [OutOfMemoryError("no more"), MemoryError()], ids=["ours", "builtin"])
def test_a_frame_store(monkeypatch: pytest.MonkeyPatch, codec: str, error: MemoryError) -> None:
    failure = without_memory(monkeypatch, error)
    target, plain = FrameStore(25, 2, LAYOUT, codec=codec, block_length=4), PlainStore(25, 2, LAYOUT)
    steps = transitions(LAYOUT, n_steps=70, contents="mixed", odd=0.1)
    failures = sum(append_in_the_end(target, plain, failure, step, type(error)) for step in steps)
    assert failures > 50
    check_contents(target, plain)


@pytest.mark.parametrize("n_stack", [None, 4])
def test_an_adaptive_store(monkeypatch: pytest.MonkeyPatch, n_stack: int | None) -> None:
    error = OutOfMemoryError("no more")
    failure = without_memory(monkeypatch, error)
    target = AdaptiveStore(80, 2, LAYOUT.shape, np.uint8, codec="patch", n_stack=n_stack)
    plain = PlainStore(80, 2, LAYOUT)
    steps = transitions(LAYOUT, n_steps=150, contents="sparse")
    failures = sum(append_in_the_end(target, plain, failure, step, type(error)) for step in steps)
    assert failures > 10
    check_contents(target, plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_codec_that_fails(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    codec = codecs.get_codec("lz4")
    failure = Failure(codec.seal, error())
    monkeypatch.setattr(codec, "seal", failure)
    target, plain = FrameStore(25, 3, LAYOUT, codec=codec, block_length=2), PlainStore(25, 3, LAYOUT)
    steps = transitions(LAYOUT, n_envs=3, n_steps=70, contents="mixed", odd=0.1)
    failures = sum(append_in_the_end(target, plain, failure, step, error) for step in steps)
    assert failures > 50


def test_the_systems_refusal_says_what_to_do() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"no memory for another 4,611,686,018,427,387,904 bytes of frames.*size"
    ):
        arena.allocate(1 << 62, "frames")

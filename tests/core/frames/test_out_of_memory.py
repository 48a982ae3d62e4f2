"""Memory that runs out in the middle of ``append`` leaves the store as it was."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames import FrameStore, codecs
from rl_ext_core.frames.region import allocate
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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_codec_that_fails(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    codec = codecs.get_codec("patch+lz4")
    failure = Failure(codec.seal, error())
    monkeypatch.setattr(codec, "seal", failure)
    target, plain = FrameStore(25, 3, LAYOUT, codec=codec, block_length=2), PlainStore(25, 3, LAYOUT)
    steps = transitions(LAYOUT, n_envs=3, n_steps=70, contents="mixed", odd=0.1)
    failures = sum(append_in_the_end(target, plain, failure, step, error) for step in steps)
    assert failures > 50


NO_ADDRESSES = """
import resource
import numpy as np
from rl_ext_core.errors import OutOfMemoryError
from rl_ext_core.frames import FrameStore, StackLayout

layout = StackLayout((4, 84, 84), np.dtype(np.uint8), 4, 0)
FrameStore(100, 1, layout)
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
FrameStore(10_000, 1, layout)
try:
    FrameStore(1_000_000, 1, layout)
except OutOfMemoryError as error:
    print(error)
"""


def test_the_systems_refusal_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-c", NO_ADDRESSES], capture_output=True, text=True, check=True)
    assert re.search(r"refuses [\d,]+ bytes of address space .*smaller max_size, or raise the limit", done.stdout)
    with pytest.raises(OutOfMemoryError, match=r"no memory for another 4,611,686,018,427,387,904 bytes.*size"):
        allocate(1 << 62)

"""A lossy table of stacks, written in any order. The state machine of FrameStorage tests lossless ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_ext_core.frames.log_table import FrameTable
from rl_ext_core.frames.store import Observation
from tests.forks import result_in_fork

SHAPE = (3, 24, 24)
N_ROWS = 400


def make_video(n: int, seed: int) -> tuple[Any, Any]:
    """Return stacks of a moving block, and the next stacks, shape ``(n, *SHAPE)``."""
    random = np.random.default_rng(seed)
    frames = np.tile(np.add.outer(np.arange(24), np.arange(24) * 3).astype(np.uint8), (n + 3, 1, 1))
    for number, (y, x) in enumerate(random.integers(0, 20, (n + 3, 2))):
        frames[number, y : y + 4, x : x + 4] = random.integers(0, 256, (4, 4))
    stacks = np.stack([frames[i : i + n + 1] for i in range(3)], 1)
    return stacks[:-1].copy(), stacks[1:].copy()


def read(table: FrameTable, rows: Any) -> Any:
    outs = np.empty((2, len(rows), *SHAPE), np.uint8)
    table.get(rows, *outs)
    return outs


@pytest.mark.parametrize("options", [{"max_error": 3}, {"codec": "jpeg"}], ids=str)
@pytest.mark.parametrize("in_folder", [False, True])
def test_rows_in_any_order_stay_as_they_were_first_read(options: Any, in_folder: bool, tmp_path: Any) -> None:
    if options.get("codec") == "jpeg":
        pytest.importorskip("simplejpeg")
    table = FrameTable(
        N_ROWS, Observation(SHAPE, np.uint8, n_stack=3, **options), folder=tmp_path if in_folder else None
    )
    random, expected = np.random.default_rng(0), np.zeros((2, N_ROWS, *SHAPE), np.uint8)
    for seed in range(40):
        stacks, nexts = make_video(60, seed)
        if seed % 9 == 5:  # a failed write leaves everything as it was
            table.put(random.permutation(N_ROWS)[:60], stacks, nexts)
            table.roll_back()
            continue
        rows = random.permutation(N_ROWS)[:60] if seed > 8 else np.arange(seed * 60, seed * 60 + 60) % N_ROWS
        table.put(rows, stacks, nexts)
        table.commit()
        expected[:, rows] = read(table, rows)
        # Copies of rows to other segments do not add errors.
        np.testing.assert_array_equal(read(table, np.arange(N_ROWS)), expected)
    table.copy(np.array([7, 9]), np.array([8, 7]))
    expected[:, [8, 7]] = expected[:, [7, 9]]
    np.testing.assert_array_equal(read(table, np.arange(N_ROWS)), expected)
    if not in_folder:
        again = FrameTable(N_ROWS, Observation(SHAPE, np.uint8, n_stack=3, **options))
        again.restore(table.contents())
        np.testing.assert_array_equal(read(again, np.arange(N_ROWS)), expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_writes_of_a_fork_do_not_change_the_table() -> None:
    table, rows, stacks = FrameTable(N_ROWS, Observation(SHAPE, np.uint8, n_stack=3)), np.arange(9), make_video(9, 0)
    table.put(rows, *stacks)
    # The fork writes other stacks to the same place.
    assert result_in_fork(lambda: table.roll_back() or table.put(rows, *make_video(9, 1))) == "None"
    np.testing.assert_array_equal(read(table, rows), stacks)

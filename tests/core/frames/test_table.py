"""A lossy table of stacks, written in any order. The state machine of FrameStorage tests lossless ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_ext_core.frames import StackLayout
from rl_ext_core.frames.log_table import FrameTable
from rl_ext_core.frames.store import Observation
from tests.core.frames.transitions import drifting_transitions

LAYOUT = StackLayout((3, 24, 24), np.dtype(np.uint8), 3, 0)
N_ROWS = 400


def read(table: FrameTable, rows: Any) -> Any:
    outs = np.empty((2, len(rows), *LAYOUT.shape), np.uint8)
    table.get(rows, *outs)
    return outs


@pytest.mark.parametrize("options", [{"max_error": 3}, {"codec": "jpeg"}], ids=str)
@pytest.mark.parametrize("in_folder", [False, True])
def test_rows_in_any_order_stay_as_they_were_first_read(options: Any, in_folder: bool, tmp_path: Any) -> None:
    if options.get("codec") == "jpeg":
        pytest.importorskip("simplejpeg")
    table = FrameTable(
        N_ROWS, Observation(LAYOUT.shape, np.uint8, n_stack=3, **options), folder=tmp_path if in_folder else None
    )
    random, expected = np.random.default_rng(0), np.zeros((2, N_ROWS, *LAYOUT.shape), np.uint8)
    for seed in range(40):
        steps = drifting_transitions(LAYOUT, 60, n_envs=1, seed=seed)
        stacks, nexts = (np.concatenate(part) for part in zip(*steps, strict=True))
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
        again = FrameTable(N_ROWS, Observation(LAYOUT.shape, np.uint8, n_stack=3, **options))
        again.restore(table.contents())
        np.testing.assert_array_equal(read(again, np.arange(N_ROWS)), expected)

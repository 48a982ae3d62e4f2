"""A process that is killed while it adds to a folder loses at most one transition."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from rl_ext_core.frames.store import load_kernels
from tests.core.frames.disk_helpers import add, check_store, kill_while_adding, open_store, random_seconds

KINDS = ("patch", "raw", "adaptive")


# The tests fork, because imports would take longer than the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.sample(ci=8)
@pytest.mark.parametrize("seed", range(14))
def test_killed_process_loses_at_most_one_transition(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_kernels()
    folder = tmp_path / "buffer"
    kind, capacity = KINDS[seed % 3], (25, 400, 100_000)[seed // 3 % 3]
    for round_ in range(2):  # twice, because a recovered folder can be interrupted too
        added, sure = kill_while_adding(folder, kind, capacity, random_seconds(2 * seed + round_))
    caplog.clear()
    with caplog.at_level(logging.INFO, "rl_ext_core.frames"):
        store, numbers, rewards = open_store(folder, kind, capacity)
    end = check_store(store, numbers, rewards)
    found = store.recovered
    assert found is not None
    assert found.kept == store.size
    if store.size:
        assert sure <= end <= added
        assert found.lost <= 1
        # The first killed process may have left a gap too, which the second one has not filled.
        assert store.size >= min(end, capacity - 3)
    assert str(folder) in caplog.text
    assert (str(found.lost) in caplog.text) or not found.lost
    for number in range(end, end + 60):
        add(store, numbers, rewards, number)
    check_store(store, numbers, rewards, end=end + 60)
    size = store.size
    store.close()
    store, numbers, rewards = open_store(folder, kind, capacity)
    assert store.recovered == (size, 0, 0)
    check_store(store, numbers, rewards, end=end + 60)
    store.close()


def _kill_at_file_access(folder: Path, step: int, *, kind: str) -> bool:
    """Create a store's folder in a process that exits at its n-th file access.

    :return: Whether the process ended early.
    """
    child = os.fork()
    if child == 0:
        left = step

        def exit_at_access(event: str, args: tuple[object, ...]) -> None:
            """Exit the process if this audit event is the n-th file access in the folder."""
            nonlocal left
            left -= str(folder) in str(args)
            if left < 0:
                os._exit(1)

        sys.addaudithook(exit_at_access)
        open_store(folder, kind, 25)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adaptive", pytest.param("raw", marks=pytest.mark.exhaustive)])
def test_folder_can_be_created_after_a_killed_attempt(tmp_path: Path, kind: str) -> None:
    step = 0
    while _kill_at_file_access(folder := tmp_path / str(step), step, kind=kind):
        for number in range(0, step, 10):  # also while its remains are removed
            _kill_at_file_access(folder, number, kind=kind)
        store, numbers, rewards = open_store(folder, kind, 25)
        add(store, numbers, rewards, 0)
        store.close()
        store, numbers, rewards = open_store(folder, kind, 25)
        check_store(store, numbers, rewards, end=1)
        store.close()
        step += 1
    assert step > 20

"""TorchRL's collectors, with copies of an instance in workers of theirs and of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torchrl.collectors import Collector, MultiSyncCollector

from tests.torchrl_ext.parallel_checks import diary, no_workers_left, workers_left
from tests.torchrl_ext.parallel_environments import Well, told
from torchrl_ext import ParallelEnv, as_factory

__all__ = ["diary", "no_workers_left"]


class MakeParallel:
    """Builds a ParallelEnv where it is called; picklable as it is."""

    def __init__(self, factory: Any) -> None:
        self.factory = factory

    def __call__(self) -> ParallelEnv:
        return ParallelEnv(2, self.factory)


def collected(collector: Any) -> Any:
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def test_in_one_process(diary: Any) -> None:
    first, second = collected(Collector(ParallelEnv(2, Well(4.0), seed=0), frames_per_batch=20, total_frames=40))
    assert first.shape == second.shape == (2, 10)
    observations = first["observation"]
    assert observations[..., 0].unique().tolist() == [4.0]
    assert observations[0, :, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert (observations[0, :, 2] != observations[1, :, 2]).all()
    assert told("reset", here=True) == 0
    assert not workers_left()


@pytest.mark.slow
@pytest.mark.parametrize("make", [MakeParallel, lambda factory: MakeParallel(factory)()], ids=["made there", "pickled"])
def test_in_processes_of_the_collectors(make: Callable[[Any], Any], diary: Any) -> None:
    source = make(as_factory(Well(4.0)))
    before = told("built", here=True)
    collector = MultiSyncCollector([source] * 2, frames_per_batch=40, total_frames=80, cat_results="stack")
    first, _ = collected(collector)
    assert first["observation"][..., 0].unique().tolist() == [4.0]
    drawn = first["observation"][..., 0, 2].flatten().tolist()
    assert len(set(drawn)) == 4
    assert told("built", here=True) == before
    assert not workers_left()

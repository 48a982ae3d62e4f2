"""Parts of the pool that a VecEnv does not show."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, WorkerError
from rl_ext_core.factory import as_factory
from rl_ext_core.vector.channel import Raised, pack, unpack
from rl_ext_core.vector.environments import EpisodeMonitor
from rl_ext_core.vector.layout import Layout, Row, kept, leaves_of
from rl_ext_core.vector.pool import Pool
from tests.sb3_ext.vec_worlds import Counting, UnpicklableError


@pytest.mark.parametrize(
    ("n_envs", "n_workers", "expected"),
    [(3, 3, [1, 1, 1]), (5, 2, [2, 3]), (7, 3, [2, 3, 2]), (8, 1, [8]), (4, 3, [1, 2, 1])],
)
def test_environments_are_shared_out_in_order_and_evenly(n_envs: int, n_workers: int, expected: list[int]) -> None:
    pool = Pool(as_factory(Counting).for_workers(n_envs), num_workers=n_workers, start_method="fork")
    assert [worker.last - worker.first for worker in pool.workers] == expected
    assert [pool.workers[0].first, *(worker.last for worker in pool.workers)][-1] == n_envs
    pool.close()
    pool.close()


def test_arrays_lie_apart_in_the_memory() -> None:
    space = spaces.Dict(a=spaces.Box(0, 1, (3,), np.float32), b=spaces.Discrete(3), c=spaces.MultiBinary((2, 2)))
    layout = Layout.of(5, space, spaces.Box(-1, 1, (2,), np.float64), after=24)
    block = bytearray(layout.size)
    for number, array in enumerate(layout.arrays(block).values(), 1):
        assert array.flags.aligned
        assert not array.view(np.uint8).any() if array.size else True
        array.view(np.uint8)[...] = number
    assert not any(block[:24])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict(a=spaces.Dict(b=spaces.Text(2))),
        spaces.Tuple((spaces.Text(2), spaces.Discrete(2))),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
    ],
)
def test_spaces_without_fixed_arrays(space: Any) -> None:
    assert leaves_of(space) is None
    with pytest.raises(InvalidArgumentError, match="FlattenObservation"):
        Layout.of(2, space, spaces.Discrete(2), after=0)
    assert Layout.of(2, spaces.Discrete(2), space, after=0).fields[1][0] == "reward"


def test_errors_cross_processes_whatever_they_are() -> None:
    def crossed(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:
            message = pack(Raised.of(raised))
        found = unpack(message).exception()
        assert "in crossed" in str(found.__cause__)
        return found

    assert repr(crossed(ValueError("a", 1))) == "ValueError('a', 1)"
    assert repr(crossed(UnpicklableError("rope"))) == "RuntimeError('UnpicklableError: rope')"


def test_rows_take_what_their_space_holds() -> None:
    row = Row(("speed",), np.zeros((2,), np.int16))
    row.write(np.array([3, -4]))
    assert row.place.tolist() == [3, -4]
    with pytest.raises(EnvironmentOutputError, match=r"observation\['speed'\] has the shape \(3,\)"):
        row.write(np.array([1, 2, 3]))
    assert not row.changed
    row.write(np.array([1, 2**20]))
    assert row.changed


def test_kept_observations_are_copies() -> None:
    observation = {"a": np.zeros(2), "b": (np.ones(1), 3)}
    copy = kept(observation)
    observation["a"][:] = 7
    observation["b"][0][:] = 7  # type: ignore[index]
    assert str(copy) == str({"a": np.zeros(2), "b": (np.ones(1), 3)})


def test_workers_that_fail_apart_leave_the_others_alive() -> None:
    pool = Pool(as_factory(Counting).for_workers(2), num_workers=2, start_method="fork", max_restarts=0)
    pool.workers[1].process.kill()
    for worker in pool.workers:
        pool.reset(worker, [(3, {})])
    pool.wait(None)
    assert set(pool.workers[0].answer[0][1]) == {"world"}
    assert isinstance(pool.workers[1].answer, WorkerError)
    assert set(pool.restart(pool.workers[1], pool.workers[1].answer, unseen=False)[0][1]) == {"world"}
    pool.close()


def test_the_monitor_refuses_a_step_without_a_reset() -> None:
    with pytest.raises(EnvironmentOutputError, match="needs a reset"):
        EpisodeMonitor(Counting()).step(0)


def test_the_monitor_counts_as_stable_baselines3s() -> None:
    monitor = pytest.importorskip("stable_baselines3.common.monitor")
    ours, theirs = EpisodeMonitor(Counting()), monitor.Monitor(Counting())
    for env in (ours, theirs):
        for _ in range(2):
            env.reset(seed=1)
            for _ in range(10):
                *_, info = env.step(0)
        assert {name: value for name, value in info["episode"].items() if name != "t"} == {"r": 10.0, "l": 10}
    for name in ("get_total_steps", "get_episode_rewards", "get_episode_lengths"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert len(ours.get_episode_times()) == 2
    assert functools.reduce(max, ours.get_episode_times()) < 60

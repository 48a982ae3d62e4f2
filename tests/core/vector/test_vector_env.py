from __future__ import annotations

import functools
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError, StorageError, WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv
from rl_ext_core.vector.pool import Pool
from tests.environments import Counting, FailingOnce, Gated, RandomEnv, ReusedArrayEnv, change_results
from tests.sb3_ext.vec_checks import assert_equal, raise_interrupt_in

NESTED = spaces.Dict(
    image=spaces.Box(0, 255, (9, 8, 3), np.uint8),
    body=spaces.Dict(
        speed=spaces.Box(-1, 1, (2,), np.float32), at=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3)))
    ),
)
FAST = {"context": "fork"}


def compare_random_operations(shared_env: Any, gymnasium_env: Any, seed: int, operations: int = 60) -> None:
    rng = np.random.default_rng(seed)
    assert_equal(shared_env.reset(seed=seed), gymnasium_env.reset(seed=seed), "first reset")
    gymnasium_env.action_space.seed(seed)
    over = np.zeros(gymnasium_env.num_envs, bool)
    for number in range(operations):
        what = rng.choice(["step"] * 8 + ["reset", "mask", "call", "set_attr"])
        if gymnasium_env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            what = "mask"
        if what == "step":
            actions = gymnasium_env.action_space.sample()
            ended = shared_env.step(actions), gymnasium_env.step(actions)
            assert_equal(*ended, f"step {number}")
            over |= ended[1][2] | ended[1][3]
        elif what == "reset":
            how: dict[str, Any] = {"seed": int(rng.integers(99)), "options": {"level": number}}
            assert_equal(shared_env.reset(**how), gymnasium_env.reset(**how), f"reset {number}")
            over[:] = False
        elif what == "mask":
            mask = over if over.any() else rng.random(gymnasium_env.num_envs) < 0.5
            mask[rng.integers(gymnasium_env.num_envs)] = True
            results = [env.reset(options={"reset_mask": mask.copy()}) for env in (shared_env, gymnasium_env)]
            assert_equal(*results, f"partial reset {number}")
            over[mask] = False
        elif what == "call":
            assert_equal(shared_env.call("twice", number, plus=1), gymnasium_env.call("twice", number, plus=1))
            assert shared_env.get_attr("label") == gymnasium_env.get_attr("label")
        else:
            values: Any = [f"{number}-{index}" for index in range(gymnasium_env.num_envs)] if number % 2 else "all"
            for env in (shared_env, gymnasium_env):
                env.set_attr("label", values)


@pytest.mark.sample(quick=6, ci=10)
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("n_workers", [None, 2])
@pytest.mark.parametrize("observations", ["Box", "image", "Discrete", "Dict", "Tuple", NESTED], ids=str)
@pytest.mark.parametrize("rewards", ["float", "int"])
def test_results_equal_sync_vector_env(
    observations: Any, rewards: str, n_workers: int | None, mode: AutoresetMode
) -> None:
    build = functools.partial(RandomEnv, observations, rewards=rewards)
    shared_env = SharedMemoryVectorEnv([build] * 5, n_workers=n_workers, autoreset_mode=mode, **FAST)
    gymnasium_env = SyncVectorEnv([build] * 5, autoreset_mode=mode)
    try:
        assert shared_env.metadata == gymnasium_env.metadata
        assert shared_env.observation_space == gymnasium_env.observation_space
        assert shared_env.action_space == gymnasium_env.action_space
        assert shared_env.render_mode == gymnasium_env.render_mode
        compare_random_operations(shared_env, gymnasium_env, seed=len(str(observations)))
        assert_equal(shared_env.render(), gymnasium_env.render())
    finally:
        shared_env.close()
        gymnasium_env.close()


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("actions", ["Discrete from -3", "Box of 64-bit floats", "Dict", "Tuple", "MultiBinary"])
def test_environments_receive_the_same_actions_as_in_async_vector_env(actions: str) -> None:
    build = functools.partial(RandomEnv, actions=actions)
    shared_env, gymnasium_env = SharedMemoryVectorEnv([build] * 2, **FAST), AsyncVectorEnv([build] * 2, context="fork")
    compare_random_operations(shared_env, gymnasium_env, seed=4, operations=20)
    assert_equal(shared_env.call("all_given"), gymnasium_env.call("all_given"))
    shared_env.close()
    gymnasium_env.close()


def test_observations_are_copies_unless_copy_is_false() -> None:
    own = SharedMemoryVectorEnv([ReusedArrayEnv] * 2, **FAST)
    shared = SharedMemoryVectorEnv([ReusedArrayEnv] * 2, copy=False, **FAST)
    for env, kept in ((own, True), (shared, False)):
        first, _ = env.reset(seed=1)
        before = first.copy()
        env.step([0, 0])
        assert np.array_equal(first, before) is kept
        env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_restart_in_step_truncates_the_episodes_of_a_worker(mode: AutoresetMode, tmp_path: Any) -> None:
    failing = functools.partial(FailingOnce, str(tmp_path / "mark"), "step")
    envs = SharedMemoryVectorEnv([Counting, failing], restart="truncate", autoreset_mode=mode, **FAST)
    first, _ = envs.reset(seed=0)
    observation, rewards, terminated, truncated, infos = envs.step(np.zeros(2, int))
    assert (terminated.tolist(), truncated.tolist(), rewards.tolist()) == ([False, False], [False, True], [1.0, 0.0])
    for step_infos in [infos, infos["final_info"]] if mode is AutoresetMode.SAME_STEP else [infos]:
        assert "SIGSEGV" in step_infos["worker_error"][1]
    last = infos["final_obs"][1] if mode is AutoresetMode.SAME_STEP else observation[1]
    assert np.array_equal(last, first[1])
    observation, rewards, *_ = envs.step(np.zeros(2, int))
    # In NEXT_STEP mode, this step is the reset. Otherwise it is the first step after the reset.
    assert observation[1][0] == rewards[1] == (0.0 if mode is AutoresetMode.NEXT_STEP else 1.0)
    assert envs.timings.restarts == 1
    envs.close()


def test_environments_stay_usable_after_rejected_calls() -> None:
    envs = SharedMemoryVectorEnv([Counting] * 2, **FAST)
    with pytest.raises(AttributeError, match="no_such"):
        envs.get_attr("no_such")
    with pytest.raises(InvalidArgumentError, match=r"use envs.step\("):
        envs.call("step", 0)
    with pytest.raises(InvalidArgumentError, match="number of values: 3, expected 2"):
        envs.set_attr("label", ["a", "b", "c"])
    for wait in (envs.step_wait, envs.reset_wait, envs.call_wait):
        with pytest.raises(NoAsyncCallError, match="without any prior call"):
            wait()
    envs.reset(seed=0)
    envs.step_async(np.zeros(2, int))
    begin_step, set_attr = lambda: envs.step_async(np.zeros(2, int)), lambda: envs.set_attr("x", 1)
    for begin in (begin_step, envs.reset_async, set_attr, lambda: envs.call_some([0], "label")):
        with pytest.raises(AlreadyPendingCallError, match=r"Use step_wait\(\) first"):
            begin()
    assert envs.step_wait()[0][:, 0].tolist() == [1, 1]
    envs.close()
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="is closed"):
        envs.reset()


def test_step_succeeds_after_a_timeout_of_step_wait(tmp_path: Path) -> None:
    envs = SharedMemoryVectorEnv([functools.partial(Gated, tmp_path / "gate"), Counting], **FAST)
    envs.reset(seed=0)
    envs.step_async(np.zeros(2, int))
    with pytest.raises(multiprocessing.TimeoutError, match=r"step within 0\.05 s"):
        envs.step_wait(timeout=0.05)
    (tmp_path / "gate").touch()
    observation, *_ = envs.step(np.zeros(2, int))
    assert observation[:, 0].tolist() == [2, 2]
    envs.step_async(np.zeros(2, int))
    assert envs.step_wait(timeout=300)[0][:, 0].tolist() == [3, 3]
    envs.close()


def test_interrupted_step_is_received_later_or_ended_by_a_reset(tmp_path: Path) -> None:
    envs = SharedMemoryVectorEnv([functools.partial(Gated, tmp_path / "gate"), Counting], **FAST)
    envs.reset(seed=0)
    with raise_interrupt_in(Pool, "_receive"), pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(2, int))
    (tmp_path / "gate").touch()
    assert envs.step_wait()[0][:, 0].tolist() == [1, 1]
    assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [2, 2]
    with raise_interrupt_in(Pool, "_receive"), pytest.raises(KeyboardInterrupt):
        envs.step(np.zeros(2, int))
    for call in (lambda: envs.step(np.zeros(2, int)), lambda: envs.call("close_twice")):
        with pytest.raises(AlreadyPendingCallError, match=r"Use envs\.reset\(\), or model\.set_env"):
            call()
    assert envs.reset()[0][:, 0].tolist() == [0, 0]
    assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [1, 1]
    envs.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worker": print}, "worker=<built-in function print> is for gymnasium's"),
        ({"autoreset_mode": "Never"}, 'Use autoreset_mode="NextStep"'),
        ({"max_concurrency": 1, "n_workers": 2}, "mean the same"),
        ({"restart": "always"}, "restart='always'"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SharedMemoryVectorEnv([Counting] * 2, **options)
    assert text in str(caught.value)


def test_error_names_the_file_size_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    try:
        with pytest.raises((StorageError, WorkerError), match=r"count as a file.* ulimit -f unlimited"):
            SharedMemoryVectorEnv([functools.partial(RandomEnv, "image")] * 2, **FAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_different_spaces_are_rejected() -> None:
    with pytest.raises(EnvironmentOutputError, match="environment 1 has observation_space"):
        SharedMemoryVectorEnv([Counting, functools.partial(RandomEnv, "Box")], **FAST)


def test_reset_masks_and_seeds_are_checked() -> None:
    envs = SharedMemoryVectorEnv([Counting] * 2, **FAST)
    for mask, error, text in (
        ([True, False], InvalidTypeError, "list"),
        (np.ones(3, bool), InvalidArgumentError, r"`\(2,\)`, got \(3,\)"),
        (np.zeros(2, bool), InvalidArgumentError, "names no environment"),
    ):
        with pytest.raises(error, match=text):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(InvalidArgumentError, match="number of seeds: 3, expected 2"):
        envs.reset(seed=[1, 2, 3])
    assert envs.reset(seed=[1, None])[0].shape == (2, 3)
    np.testing.assert_array_equal(envs.reset(seed=np.array([1, 2]))[0], envs.reset(seed=[1, 2])[0])
    envs.close()


class Rewarding(Counting):
    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: int) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


def test_rewards_are_single_numbers() -> None:
    """An array of one number is accepted. NumPy would store None as NaN."""
    found = [functools.partial(Rewarding, reward) for reward in (np.array([1.5]), [[2]], np.float32(0.1), True)]
    envs = SharedMemoryVectorEnv(found, **FAST)
    envs.reset()
    assert envs.step(np.zeros(4, np.int64))[1].tolist() == [1.5, 2, np.float32(0.1), 1]
    envs.close()
    for reward, text in ((None, "type NoneType"), (np.ones(2), r"the shape \(2,\)"), (np.ones(0), r"the shape \(0,\)")):
        envs = SharedMemoryVectorEnv([functools.partial(Rewarding, reward)], **FAST)
        envs.reset()
        with pytest.raises(EnvironmentOutputError, match=f"environment 0 returned a reward of {text}"):
            envs.step(np.zeros(1, np.int64))
        envs.close()


def make_informing() -> Any:
    env: Any = Counting()
    env.info = {}
    return change_results(env, lambda observation, _: (observation, env.info), "reset")


@pytest.mark.sample
@pytest.mark.parametrize(("mode", "n_steps"), [(AutoresetMode.NEXT_STEP, 11), (AutoresetMode.SAME_STEP, 10)])
def test_error_names_reset_if_its_info_is_none(mode: AutoresetMode, n_steps: int) -> None:
    envs = SharedMemoryVectorEnv([make_informing] * 2, autoreset_mode=mode)
    envs.reset()
    envs.set_attr("info", None)
    for _ in range(n_steps - 1):  # the episode ends with the tenth
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(WorkerError, match=r"reset\(\) returned an info of type NoneType"):
        envs.step(np.zeros(2, np.int64))
    envs.close()

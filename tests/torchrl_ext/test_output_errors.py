from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from tests.environments import change_results
from tests.torchrl_ext.comparison import make_vector_env
from tests.torchrl_ext.environments import FaultyDictWalk, FaultyWalk, SameStep, SamplingEnv, Walk, box
from torchrl_ext import GymWrapper

OBSERVATIONS: dict[str, tuple[Any, str]] = {
    "shape": (np.zeros(5, np.float32), r"'observation' has the shape \(5,\); its space has \(4,\)"),
    "more axes": (np.zeros((4, 4), np.float32), r"\(4, 4\); its space has \(4,\)\. .* write env\.num_envs = 4"),
    "text": ("left", r"'observation' is of type str, which makes no tensor.*\(4,\) of torch.float32"),
    "complex": (np.full(4, 1j), r"'observation' has the dtype torch.complex128.*torch.float32"),
    "a dict": ({"observation": [0] * 4}, r"a dict with the keys \['observation'\].*write the space"),
    "Dict, no key": (lambda whole: {"inner": whole["inner"]}, r"observation 'image' is missing.*returned \['inner'\]"),
    "Dict, inner": (lambda whole: {**whole, "inner": {"kind": 1}}, r"observation 'inner.place' is missing.*\['kind'\]"),
    "Dict, an array": (lambda whole: whole["image"], r"observation is of type ndarray; its space is a Dict of"),
    "Dict, a number": (lambda whole: {**whole, "inner": 5}, r"observation 'inner' is of type int; its space is a Dict"),
    "Dict, an index": (lambda whole: {**whole, "inner": {**whole["inner"], "kind": 7}}, r"'inner.kind' is 7"),
}
RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"observation": fault}, message) for name, (fault, message) in OBSERVATIONS.items()},
    "reward None": ({"reward": None}, r"'reward' is of type NoneType.*its space has the shape \(1,\).*Return an array"),
    "two rewards": ({"reward": np.ones(2)}, r"'reward' has the shape \(2,\); its space has \(1,\)"),
    "flag None": ({"terminated": None}, r"'terminated' and 'truncated' are None and .*; expected one boolean each"),
    "flags of a batch": ({"truncated": np.zeros(3, bool)}, r"False and array\(\[False.*; expected one boolean each"),
    "reward None, frames skipped": ({"reward": None}, r"'reward' is of type NoneType"),
    "flag None, frames skipped": ({"truncated": None}, r"are False and None; expected one boolean each"),
    "old step": ({"step": lambda result: result[:4]}, r"step\(\) returned 4 values; expected the 5 of gymnasium"),
    "old reset": (
        {"reset": lambda pair: pair[0]},
        r"reset\(\) returned a value of type ndarray; expected the 2 of gymnasium",
    ),
    "three at a reset": ({"reset": lambda pair: (*pair, 1)}, r"reset\(\) returned 3 values; expected the 2"),
    "None at a reset": ({"reset": lambda pair: (None, {})}, r"observation.* is of type NoneType"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_errors_name_invalid_results_of_single_environments(name: str) -> None:
    faults, message = RESULTS[name]
    inner, place = (FaultyDictWalk(), ("inner", "place")) if "Dict" in name else (FaultyWalk(), "observation")
    env = GymWrapper(inner, frame_skip=3 if "frames skipped" in name else 1)

    def check_error(call: Any) -> None:
        inner.faults = faults
        with pytest.raises(EnvironmentOutputError, match=message):
            call()
        inner.faults = {}

    for _ in range(2 * (not faults.keys().isdisjoint(("observation", "reset")))):  # the first and a later reset
        check_error(env.reset)
        assert env.rollout(5).shape == (5,)
    data = env.reset()
    for take in () if "reset" in faults else (env.step, env.step_and_maybe_reset, env._step):
        before = data.clone()
        check_error(lambda take=take, data=data: take(env.rand_action(data)))
        assert set(data.keys()) == set(before.keys()) | {"action"}
        data = env.step_mdp(env.step(env.rand_action(data)))
        assert data[place][1] > 0
    assert env.rollout(5).shape == (5,)


def test_step_may_return_a_list_with_trailing_axes_of_length_one() -> None:
    faults = {"reward": np.ones((1, 1)), "terminated": np.zeros(1, bool), "truncated": torch.zeros(1, dtype=torch.bool)}
    rollout = GymWrapper(FaultyWalk(step=list, observation=lambda value: value[:, None], **faults)).rollout(4)
    assert rollout["observation"].shape == (4, 4)
    assert rollout["observation"][:, 1].tolist() == [0, 1, 2, 3]
    assert rollout["next", "reward"].tolist() == [[1.0]] * 4


INTEGERS: dict[str, tuple[Any, Any, str | None]] = {
    "whole numbers": (spaces.Box(0, 255, (2,), np.uint8), np.array([1.0, 2.0]), None),
    "fractions": (spaces.Box(0, 255, (2,), np.uint8), np.array([1.5, 2.0]), r"float64, which loses.*uint8"),
    "negative": (spaces.Box(0, 255, (2,), np.uint8), np.array([-1, 2]), r"int64, which loses.*uint8"),
    "too large, as wide": (spaces.Box(-9, 9, (2,), np.int8), np.array([200, 2], np.uint8), r"uint8, which loses.*int8"),
    "32 bits": (spaces.Box(-9, 9, (2,), np.int32), np.array([2**31, 2], np.uint32), r"uint32, which loses.*int32"),
    "as wide": (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 2], np.int8), None),
    "no booleans": (spaces.Box(0, 1, (2,), bool), np.array([2, 0]), r"int64, which loses.*bool"),
    "half an index": (spaces.Discrete(4), 1.5, r"float64, which loses"),
    "an index beyond": (spaces.Discrete(4), 4, r"'observation' is 4, which is not below.*4, or negative"),
    "two indices": (spaces.Discrete(4), [1, 2], r"shape \(2,\)"),
    "two beyond": (spaces.MultiDiscrete([3, 4]), np.array([2, 4]), r"'observation' is \[2, 4\], which is not below"),
    "bfloat16": (box(2), torch.ones(2, dtype=torch.bfloat16), None),
    "of another byte order": (spaces.Box(-9, 9, (2,), np.int64), np.array([3, 4], ">i2"), None),
    "a list of tensors": (box(2), [torch.ones(()), torch.ones(())], None),
    "ragged tensors": (box(2), [torch.ones(2), torch.ones(3)], r"makes no tensor"),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_observations_are_accepted_or_rejected_by_the_space(name: str) -> None:
    space, value, message = INTEGERS[name]
    inner = SamplingEnv(space, spaces.Discrete(2))
    env = GymWrapper(inner)
    inner.observation_space = SimpleNamespace(sample=lambda: value)
    if message is None:
        observation = env.reset()["observation"]
        assert env.observation_spec["observation"].is_in(observation)
    else:
        with pytest.raises(EnvironmentOutputError, match=message):
            env.reset()
    inner.observation_space = space
    assert env.rollout(3).shape == (3,)


BATCHES: dict[str, tuple[int, Any, str]] = {
    "batch axis": (0, lambda value: value[0], r"the shape \(3,\) \(the batch axis is lost\); .*\(4, 3\)"),
    "observation None": (0, lambda value: None, r"'observation' is of type NoneType.*its space has the shape \(4, 3\)"),
    "one reward": (1, lambda value: 1.0, r"'reward' has the shape \(\); its space has \(4, 1\)"),
    "objects": (1, lambda value: np.array([None] * 4), r"'reward' is of type ndarray, which makes no tensor"),
    "one flag": (2, lambda value: False, r"'terminated' has the shape \(\); its space has \(4, 1\)"),
    "fractions for flags": (2, lambda value: value + 0.5, r"'terminated' has the dtype .*float.*bool"),
}


@pytest.mark.parametrize("torch_tensors", [False, True], ids=["NumPy", "torch"])
@pytest.mark.parametrize("name", BATCHES)
def test_errors_name_invalid_step_results_of_batches(name: str, torch_tensors: bool) -> None:
    place, fault, message = BATCHES[name]
    inner = SameStep([3, 4, 5, 6], "batch", torch_tensors=torch_tensors)
    env = GymWrapper(inner)
    data = env.reset()
    change_results(inner, lambda *result: (*result[:place], fault(result[place]), *result[place + 1 :]))
    for take in (env.step, env.step_and_maybe_reset):
        with pytest.raises(EnvironmentOutputError, match=message):
            take(env.rand_action(data))
    del inner.step
    rollout = env.rollout(8, break_when_any_done=False)
    assert torch.equal(rollout["next", "observation"][..., 2], rollout["observation"][..., 2] + 1)


@pytest.mark.parametrize(
    "reward",
    [(1, 2, 3, 4), np.ones(4, np.int8), torch.ones(4, 1, dtype=torch.float64)],
    ids=["tuple", "bytes", "torch column"],
)
def test_batch_rewards_as_tuple_integers_or_column_become_float32(reward: Any) -> None:
    inner = change_results(SameStep([3, 4, 5, 6], "batch"), lambda place, _, *rest: (place, reward, *rest))
    found = GymWrapper(inner).rollout(2)["next", "reward"]
    assert found.dtype is torch.float32
    assert torch.equal(found[:, 0, 0], torch.as_tensor(np.asarray(reward), dtype=torch.float32).reshape(4))


make_walks = partial(make_vector_env, Walk, 2, "SameStep")


@pytest.mark.parametrize(
    ("make", "skip", "text"),
    [
        *((Walk, skip, rf"frame_skip={skip} takes no step.*Use frame_skip=1") for skip in (0, -2)),
        (make_walks, 4, r"frame_skip=4 on a vectorized environment.*ParallelEnv\(n, "),
    ],
)
def test_invalid_frame_skips_are_rejected(make: Any, skip: int, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        GymWrapper(make(), frame_skip=skip)
    env = GymWrapper(make(), frame_skip=1)
    env.rollout(3)
    env.wrapper_frame_skip = skip
    with pytest.raises(InvalidArgumentError, match=text):
        env.rollout(3)


@pytest.mark.parametrize("reward", [1.5, float("nan")])
def test_fractional_single_reward_is_rejected_by_an_integer_spec(reward: Any) -> None:
    inner = FaultyWalk(reward=reward)
    inner.reward_space = spaces.Box(-9, 9, (1,), np.int64)  # type: ignore[attr-defined]
    env = GymWrapper(inner)
    assert env.reward_spec.dtype == torch.int64
    with pytest.raises(EnvironmentOutputError, match=r"'reward' has the dtype torch\.float"):
        env.rand_step(env.reset())

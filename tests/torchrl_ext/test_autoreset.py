"""Whatever resets itself, and when: rollouts are those of single environments, stepped with the same seeds and actions.

Next observations are the true last ones, root observations after an episode's end those of the reset, flags are right,
and no transition is made up.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import RewardSum, StepCounter, TransformedEnv, check_env_specs

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from tests.torchrl_ext.comparing import assert_same, seeded_rollout, vector
from tests.torchrl_ext.environments import DictWalk, Isaac, IsaacByIds, SameStep, Walk
from torchrl_ext import GymWrapper

MODES = ["NextStep", "SameStep", "Disabled"]
modes = pytest.mark.parametrize("mode", MODES)
MAKERS: dict[str, list[Any]] = {
    "Walk": [Walk],
    "all at once": [partial(Walk, 4, 4)],
    "ends with every step": [partial(Walk, 1, 1), partial(Walk, 1, 2), Walk],
    "CartPole": [partial(gymnasium.make, "CartPole-v1")],
}


def check_against_single_environments(rollout: Any, makers: list[Any], seed: int, *, resets: int = 2) -> None:
    """Compare with environments that are stepped by hand; ``resets`` came before, the first of them with the seed."""
    key: Any = ("inner", "place") if ("inner", "place") in rollout.keys(True) else "observation"
    actions = rollout["action"].argmax(-1)
    for row, data in enumerate(rollout.unbind(0)):
        env = makers[row % len(makers)]()
        observation, _ = env.reset(seed=seed + row)
        for _ in range(resets - 1):
            observation, _ = env.reset()
        for step, now in enumerate(data.unbind(0)):
            assert np.array_equal(now[key].numpy(), place(observation)), (row, step)
            assert not now["done"]
            observation, reward, terminated, truncated, _ = env.step(int(actions[row, step]))
            after = now["next"]
            assert np.array_equal(after[key].numpy(), place(observation)), (row, step)
            assert after["reward"].item() == np.float32(reward)
            assert after["terminated"].item() == terminated
            assert after["truncated"].item() or not truncated
            assert after["done"].item() == (after["terminated"] | after["truncated"]).item()
            if after["done"]:
                observation, _ = env.reset()


def place(observation: Any) -> Any:
    return observation["inner"]["place"] if isinstance(observation, dict) else observation


@pytest.mark.sample
@modes
@pytest.mark.parametrize("asynchronous", [False, True], ids=["Sync", "Async"])
@pytest.mark.parametrize("name", MAKERS)
def test_gymnasiums_vectorised_environments(name: str, asynchronous: bool, mode: str) -> None:
    makers = MAKERS[name]
    env = GymWrapper(vector(makers, 3, mode, asynchronous=asynchronous))
    try:
        rollout = seeded_rollout(env, 60, seed=5)
        assert rollout["next", "done"].any()
        check_against_single_environments(rollout, makers, 5)
    finally:
        env.close()


@modes
@pytest.mark.parametrize("shared_memory", [True, False])
def test_worker_processes_with_and_without_shared_memory(shared_memory: bool, mode: str) -> None:
    env = GymWrapper(vector(DictWalk, 2, mode, asynchronous=True, shared_memory=shared_memory))
    try:
        if mode == "NextStep" and not shared_memory:
            # gymnasium's worker forgets that it was reset.
            with pytest.raises(InvalidArgumentError, match="shared_memory"):
                env.reset()
        else:
            check_against_single_environments(seeded_rollout(env, 30), [DictWalk], 3)
    finally:
        env.close()


@pytest.mark.sample
@modes
@pytest.mark.parametrize("transform", [lambda: StepCounter(4), lambda: StepCounter(1)], ids=["4 steps", "1 step"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["Sync", "Async"])
def test_truncation_from_outside(mode: str, transform: Any, asynchronous: bool) -> None:
    """Rows are reset that the environment has not ended, beside some that it has."""
    env = GymWrapper(vector(Walk, 4, mode, asynchronous=asynchronous)).append_transform(transform())
    try:
        rollout = seeded_rollout(env, 40)
        assert rollout["next", "truncated"].any()
        check_against_single_environments(rollout, [Walk], 3)
        assert rollout["next", "step_count"].max() == transform().max_steps
    finally:
        env.close()


@pytest.mark.sample
@modes
@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    cut=st.integers(1, 6),
    nested=st.booleans(),
)
def test_any_lengths(mode: str, lengths: list[tuple[int, int]], cut: int, nested: bool) -> None:
    makers: list[Any] = [partial(DictWalk if nested else Walk, low, low + more) for low, more in lengths]
    env = GymWrapper(vector(makers, len(makers), mode)).append_transform(StepCounter(cut)).append_transform(RewardSum())
    check_against_single_environments(seeded_rollout(env, 15), makers, 3)


@pytest.mark.sample
@modes
@settings(max_examples=40)
@given(data=st.data())
def test_any_masks_given_by_hand(mode: str, data: st.DataObject) -> None:
    """Resets of rows that are done, of some that are not, and of all, between steps."""
    count = 3
    env = GymWrapper(vector(Walk, count, mode))
    env.set_seed(7)
    singles = [Walk() for _ in range(count)]
    for row, single in enumerate(singles):
        single.reset(seed=7 + row)
    truth = np.stack([single.reset()[0] for single in singles])
    now = env.reset()
    for _ in range(12):
        assert np.array_equal(now["observation"].numpy(), truth)
        after = env.step(env.rand_action(now))
        done = []
        for row, single in enumerate(singles):
            truth[row], _, terminated, truncated, _ = single.step(int(after["action"][row].argmax()))
            done.append(terminated or truncated)
        assert np.array_equal(after["next", "observation"].numpy(), truth)
        assert after["next", "done"].flatten().tolist() == done
        more = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        mask = [one or other for one, other in zip(done, more, strict=True)]
        now = env.step_mdp(after)
        if data.draw(st.booleans()) and not any(mask):
            continue  # no reset at all
        now = env.reset(now.set("_reset", torch.tensor(mask).unsqueeze(-1)))
        for row in range(count):
            if mask[row]:
                truth[row] = singles[row].reset()[0]
        assert not now["done"].any()


@modes
def test_full_resets_in_the_middle(mode: str) -> None:
    env = GymWrapper(vector(Walk, 3, mode))
    env.set_seed(3)
    resets = 1
    for steps in (1, 4, 9):
        rollout = env.rollout(steps, break_when_any_done=True)
        resets += 1
        assert rollout["observation"][:, 0, 1].tolist() == [0, 0, 0]
    # A seed that is given to a reset of all counts, even of those that have just reset themselves.
    data = env.step(env.rand_action(env.reset(seed=11)))
    again = env.reset(data.select("next").set("_reset", torch.ones(3, 1, dtype=torch.bool)), seed=11)
    assert_same(again.select("observation"), env.reset(seed=11).select("observation"))


@modes
def test_a_reset_with_options_reaches_those_that_have_reset_themselves(mode: str) -> None:
    seen: list[Any] = []

    class Listens(Walk):
        def reset(self, **kwargs: Any) -> Any:
            seen.append(kwargs.get("options"))
            return super().reset(**kwargs)

    env = GymWrapper(vector([partial(Listens, 2, 2), partial(Listens, 9, 9)], 2, mode))
    data = env.rollout(2)[:, -1]
    seen.clear()
    mask = torch.tensor([[True], [False]])
    env.reset(env.step_mdp(data).set("_reset", mask), options={"low": 1})
    assert seen == [{"low": 1}]


@modes
@pytest.mark.parametrize("asynchronous", [False, True], ids=["Sync", "Async"])
def test_statistics_of_episodes_under_a_wrapper(mode: str, asynchronous: bool) -> None:
    inner = wrappers.RecordEpisodeStatistics(vector(Walk, 4, mode, asynchronous=asynchronous), buffer_length=1000)
    env = GymWrapper(inner)
    try:
        env.set_seed(3)
        rollout = seeded_rollout(env, 60)
        check_against_single_environments(rollout, [Walk], 3)
        done = rollout["next", "done"].squeeze(-1)
        expected: Counter[int] = Counter(rollout["next", "observation"][done][:, 1].int().tolist())
        assert Counter(map(int, inner.length_queue)) == expected
        returns = rollout["next", "reward"].squeeze(-1).double()
        total = sum(float(returns[row, : done[row].nonzero()[-1] + 1].sum()) for row in range(4))
        assert sum(map(float, inner.return_queue)) == pytest.approx(total)
    finally:
        env.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])  # gymnasium refuses the other one
def test_wrappers_that_change_observations(mode: str) -> None:
    def scaled(observation: Any) -> Any:
        return observation * np.float32(0.5)

    def single(make: Any = Walk) -> Any:
        return gymnasium.wrappers.TransformObservation(make(), scaled, None)

    # It hands out one array again and again.
    inner = wrappers.VectorizeTransformObservation(
        vector(Walk, 3, mode), gymnasium.wrappers.TransformObservation, func=scaled, observation_space=None
    )
    env = GymWrapper(wrappers.RecordEpisodeStatistics(inner))
    check_against_single_environments(seeded_rollout(env, 40), [single], 3)


def test_infos_as_a_list() -> None:
    env = GymWrapper(wrappers.DictInfoToList(vector(Walk, 3, "SameStep")))
    check_against_single_environments(seeded_rollout(env, 40), [Walk], 3)


def test_a_wrapper_that_refuses_partial_resets_says_so() -> None:
    env = GymWrapper(wrappers.NormalizeObservation(vector([partial(Walk, 3, 3), partial(Walk, 5, 5)], 2, "NextStep")))
    with pytest.raises(ValueError, match="does not support partial resets"):
        env.rollout(10, break_when_any_done=False)
    env = GymWrapper(wrappers.NormalizeObservation(vector(partial(Walk, 3, 3), 2, "NextStep")))
    rollout = env.rollout(10, break_when_any_done=False)
    assert rollout["next", "done"].squeeze(-1)[0].tolist() == [False, False, True] * 3 + [False]


@modes
def test_vector_rewards_under_a_wrapper(mode: str) -> None:
    env = GymWrapper(wrappers.ClipReward(vector(Walk, 3, mode), min_reward=0, max_reward=2))
    rollout = seeded_rollout(env, 30)
    check_env_specs(env)
    assert rollout["next", "reward"].max() == 2


def check_cartpole(env: Any, raw: CartPoleVectorEnv, steps: int = 120, cut: int | None = None) -> int:
    """Compare each step with one of a single environment in the same state; count the episodes that ended."""
    single = CartPoleVectorEnv(1)
    single.reset(seed=0)
    env.set_seed(1)
    data, ended, age = env.reset(), 0, np.zeros(env.batch_size[0], int)
    for _ in range(steps):
        assert raw.state is not None
        states = raw.state.copy()
        assert np.array_equal(raw.state.T.astype(np.float32), data["observation"].numpy())
        assert raw.steps.tolist() == age.tolist()
        before, data = env.step_and_maybe_reset(env.rand_action(data))
        age += 1
        for row in range(env.batch_size[0]):
            single.state, single.steps[:], single.prev_done[:] = states[:, row : row + 1], age[row] - 1, False
            action = before["action"][row].argmax(-1, keepdim=True).numpy()
            observation, reward, terminated, truncated, _ = single.step(action)
            after = before["next"][row]
            assert np.array_equal(after["observation"].numpy(), observation[0])
            assert after["reward"].item() == reward[0] == 1.0
            assert after["terminated"].item() == terminated[0]
            assert after["truncated"].item() == (truncated[0] or age[row] == cut)
            if after["done"]:
                ended += 1
                age[row] = 0
                assert data["observation"][row].abs().max() <= 0.05
    return ended


@pytest.mark.parametrize("wrap", [lambda env: env, wrappers.RecordEpisodeStatistics], ids=["plain", "wrapped"])
@pytest.mark.parametrize("cut", [None, 12])
def test_the_cartpole_that_vectorises_itself(wrap: Any, cut: int | None) -> None:
    raw = gymnasium.make_vec("CartPole-v1", num_envs=6)
    assert type(raw) is CartPoleVectorEnv
    env = GymWrapper(wrap(raw))
    assert check_cartpole(env if cut is None else env.append_transform(StepCounter(cut)), raw, cut=cut) > 10
    check_env_specs(env)


def test_the_cartpole_draws_the_numbers_that_it_would_have_drawn() -> None:
    """With one sub-environment, gymnasium's own order of steps and resets draws the same episodes."""
    raw, own = (gymnasium.make_vec("CartPole-v1", num_envs=1) for _ in range(2))
    rollout = seeded_rollout(GymWrapper(raw), 60)
    own.reset(seed=3)
    observation, _ = own.reset()
    for step in range(60):
        assert np.array_equal(rollout["observation"][:, step].numpy(), observation)
        observation, *_ = own.step(rollout["action"][:, step].argmax(-1).numpy())
        if rollout["next", "done"][:, step].any():
            observation, *_ = own.step(np.array([0]))  # which moves nothing


def test_environments_that_reset_all_or_nothing_are_found_out() -> None:
    for env in (Isaac(4), Isaac(4, foreign=True)):
        wrapped = GymWrapper(env).append_transform(StepCounter(4))  # when one row has ended by itself before
        with pytest.raises(EnvironmentOutputError, match=r"also changed sub-environments.*env_ids"):
            wrapped.rollout(9, break_when_any_done=False)
    rollout = GymWrapper(IsaacByIds(4)).append_transform(StepCounter(2)).rollout(9, break_when_any_done=False)
    assert rollout["policy"][..., 2].max() == 1
    assert (rollout["policy"][..., 2] == rollout["step_count"].squeeze(-1)).all()


@pytest.mark.parametrize("final_obs", [True, False])
def test_torch_environments_that_are_told_which_to_reset(final_obs: bool) -> None:
    env = GymWrapper(IsaacByIds(4, lengths=[2, 9, 9, 3], final_obs=final_obs))
    env.set_seed(0)
    data = env.reset()
    for _ in range(2):
        data = env.step_mdp(env.step(env.rand_action(data)))
    # Row 0 is done and has reset itself, row 2 is asked for, rows 1 and 3 go on.
    data = env.reset(data.set("_reset", torch.tensor([[True], [False], [True], [False]])))
    assert data["policy"][:, 2].tolist() == [0, 2, 0, 2]
    assert data["policy"][:, 1].tolist() == [3, 2, 3, 2]
    assert not data["done"].any()


def test_the_mode_that_was_asked_for() -> None:
    by_member = gymnasium.vector.AutoresetMode.DISABLED
    for mode in ("Disabled", "DISABLED", by_member):
        env = IsaacByIds(3, lengths=[2, 3, 4])
        env.cfg.auto_reset = False
        rollout = GymWrapper(env, autoreset_mode=mode).rollout(8, break_when_any_done=False)
        assert rollout["next", "policy"].isfinite().all()
        assert torch.equal(rollout["next", "policy"][..., 2], rollout["policy"][..., 2] + 1)
    with pytest.raises(InvalidArgumentError, match="autoreset_mode='never' is none of"):
        GymWrapper(IsaacByIds(3), autoreset_mode="never").reset()


def test_the_mode_that_an_environment_says_as_an_attribute() -> None:
    class Wrapper:
        """Hands on what it is asked for, but no attributes."""

        metadata: ClassVar[dict[str, Any]] = {}

        def __init__(self, env: Any) -> None:
            self.unwrapped, self.num_envs, self.reset, self.step = env, env.num_envs, env.reset, env.step
            self.observation_space, self.action_space = env.observation_space, env.action_space

    for wrap in (lambda env: env, Wrapper):
        inner: Any = SameStep([2, 3], "batch")
        inner.metadata, inner.autoreset_mode = {}, "SameStep"
        rollout = GymWrapper(wrap(inner)).rollout(9, break_when_any_done=False)
        assert torch.equal(rollout["next", "observation"][..., 2], rollout["observation"][..., 2] + 1)
        inner = SameStep([2, 3], "batch")
        inner.metadata = {}
        rollout = GymWrapper(wrap(inner)).rollout(9, break_when_any_done=False)  # taken not to reset itself
        assert not torch.equal(rollout["next", "observation"][..., 2], rollout["observation"][..., 2] + 1)


def test_an_environment_that_was_told_not_to_reset_itself() -> None:
    env = IsaacByIds(3, lengths=[2, 3, 4])
    env.cfg.auto_reset = False
    rollout = GymWrapper(env).rollout(8, break_when_any_done=False)
    assert torch.equal(rollout["next", "policy"][..., 2], rollout["policy"][..., 2] + 1)


class ManiSkill(Isaac):
    """Resets those that an option names, as ManiSkill's environments do."""

    __module__ = "mani_skill.envs.sapien_env"

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        rows = (options or {}).get("env_idx")
        if rows is None:
            return super().reset(seed)
        self._reset_rows(rows)
        return {"policy": self.state}, self.extras


def test_maniskills_option() -> None:
    env = GymWrapper(ManiSkill(4)).append_transform(StepCounter(4))
    rollout = env.rollout(15, break_when_any_done=False)
    assert torch.equal(rollout["policy"][..., 2], rollout["step_count"].squeeze(-1))
    assert rollout["policy"][..., 2].max() == 3


def test_a_reset_that_tells_no_signature() -> None:
    inner = SameStep([3, 5], "batch")

    class Compiled:
        __signature__ = "none"
        reset = staticmethod(inner.reset)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.reset(*args, **kwargs)

    inner.reset = Compiled()  # type: ignore[method-assign]
    rollout = GymWrapper(inner).append_transform(StepCounter(2)).rollout(9, break_when_any_done=False)
    assert torch.equal(rollout["observation"][..., 2], rollout["step_count"].squeeze(-1))


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_modes_without_a_reset_in_the_step_as_on_a_gpu(mode: str) -> None:
    env = GymWrapper(vector(Walk, 3, mode))
    env.reset()
    env.__dict__["_engine"]._looks = False
    check_against_single_environments(seeded_rollout(env, 40), [Walk], 3)


def test_all_done_at_once_need_no_partial_reset() -> None:
    env = TransformedEnv(GymWrapper(Isaac(3, lengths=[9] * 3)), StepCounter(4))
    rollout = env.rollout(12, break_when_any_done=False)
    assert rollout["policy"][..., 2].max() == 3

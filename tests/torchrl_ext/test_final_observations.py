from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torchrl import envs as upstream
from torchrl.data import Composite, Unbounded
from torchrl.envs import check_env_specs, default_info_dict_reader

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError
from tests.environments import add_info, change_results
from tests.sb3_ext.tensor_envs import Points
from tests.torchrl_ext.comparison import assert_same_rollouts, make_vector_env, seeded_rollout, tensors
from tests.torchrl_ext.environments import IsaacByIds, SameStep, Walk
from torchrl_ext import GymWrapper

libraries = pytest.mark.parametrize("torch_tensors", [False, True], ids=["NumPy", "torch"])
# On a GPU, a step does not read which rows are done. The same code also runs on the CPU.
ways = pytest.mark.parametrize("finds_done_rows", [True, False], ids=["as on a CPU", "as on a GPU"])


def wrap(env: Any, *, finds_done_rows: bool = True, **kwargs: Any) -> Any:
    """Wrap and reset an environment; choose the CPU's or the GPU's code path."""
    wrapper = GymWrapper(env, **{"categorical_action_encoding": True, **kwargs})
    wrapper.reset()
    wrapper.__dict__["_engine"]._finds_done_rows = finds_done_rows
    return wrapper


def place_key(nested: bool) -> Any:
    return ("inner", "place") if nested else "observation"


def check_chain(rollout: Any, place: Any = "observation") -> None:
    """Assert that steps are consecutive, in next and in the following root."""
    root, following = rollout[place], rollout["next"][place]
    done = rollout["next", "done"].squeeze(-1)
    assert done.any()
    assert torch.equal(following, root + torch.tensor([0.0, 0.0, 1.0]))
    after, before = root[:, 1:], following[:, :-1]
    assert torch.equal(after[~done[:, :-1]], before[~done[:, :-1]])
    begun = before[done[:, :-1]]
    assert torch.equal(after[done[:, :-1]], torch.stack([begun[:, 0], begun[:, 1] + 1, torch.zeros(len(begun))], -1))


@ways
@libraries
@pytest.mark.parametrize("info", [{}, ["nothing"] * 3], ids=str)
def test_missing_final_obs_is_nan_previous_or_an_error(info: Any, torch_tensors: bool, finds_done_rows: bool) -> None:
    for missing, nested in (("nan", True), ("previous", True), ("previous", False)):
        inner = SameStep([1, 2, 5], None, nested=nested, torch_tensors=torch_tensors)
        change_results(inner, lambda *result: (*result[:-1], info))
        env = wrap(inner, missing_final_obs=missing, finds_done_rows=finds_done_rows)
        rollout = env.rollout(9, break_when_any_done=False)
        place, done = place_key(nested), rollout["next", "done"].squeeze(-1)
        assert rollout[place].isfinite().all()
        assert torch.equal(rollout["next"][place][~done], rollout[place][~done] + torch.tensor([0.0, 0.0, 1.0]))
        for key in [place, ("inner", "_private"), "kind"] if nested else [place]:
            last = rollout["next"][key][done]
            if missing == "previous":
                assert torch.equal(last, rollout[key][done])
            else:
                assert (last == 0).all() if key == "kind" else last.isnan().all()  # integers have no NaN
    env = wrap(SameStep([3, 3], None), missing_final_obs="error", finds_done_rows=finds_done_rows)
    assert env.rollout(2).shape == (2, 2)
    with pytest.raises(EnvironmentOutputError, match=r"final_obs.*missing_final_obs="):
        env.rollout(4)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "none for one that is done": ("objects", lambda final: np.full(2, None, object), "has no entry for .*0"),
    "of another shape": ("list", lambda final: [np.zeros(4)] * 2, r"final_obs obs.*shape \(1, 4\).*\(1, 3\)"),
    "of one number, which would be spread": ("list", lambda final: [np.zeros(1)] * 2, r"shape \(1, 1\).*\(1, 3\)"),
    "too few": ("list", lambda final: [np.zeros(3)] * 3, "3 rows; expected 2"),
    "no nested dict": ("nested", lambda final: {"kind": final["kind"]}, r"final_obs 'inner' is missing: .*\['kind'\]"),
    "no nested entry": (
        "nested",
        lambda final: {**final, "inner": {"place": final["inner"]["place"]}},
        "final_obs 'inner._private' is missing",
    ),
    "an entry for a dict": ("nested", lambda final: {**final, "inner": final["kind"]}, "final_obs 'inner' is of type"),
    "fractions": ("nested", lambda final: {**final, "kind": final["kind"] + 0.5}, "final_obs kind.*float.*int64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_name_malformed_final_observations(name: str) -> None:
    form, fault, message = FAULTS[name]
    nested = form == "nested"
    inner = SameStep([2, 4], "batch" if nested else form, nested=nested)
    final = inner.final_observations
    inner.final_observations = lambda rows: fault(final(rows))  # type: ignore[method-assign]
    env = wrap(inner)
    with pytest.raises(EnvironmentOutputError, match=message):
        env.rollout(5, break_when_any_done=False)
    inner.final_observations = final  # type: ignore[method-assign]
    check_chain(env.rollout(9, break_when_any_done=False), place_key(nested))


@ways
@pytest.mark.parametrize("form", ["batch", "list"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_final_observations_are_detached_and_cast(dtype: torch.dtype, form: str, finds_done_rows: bool) -> None:
    inner = SameStep([2, 3], form, torch_tensors=True)
    final = inner.final_observations

    def add_graph(value: Any) -> Any:
        return value if value is None else value.to(dtype).requires_grad_() * 1

    inner.final_observations = lambda rows: tree_map(add_graph, final(rows))  # type: ignore[method-assign]
    rollout = wrap(inner, finds_done_rows=finds_done_rows).rollout(7, break_when_any_done=False)
    assert not rollout["next", "observation"].requires_grad
    assert rollout["next", "observation"].dtype is torch.float32
    check_chain(rollout)


# -- tests of infos in the data. tests/test_stepper.py compares them with those of single environments

LONG = {"age": Unbounded((), dtype=torch.int64), "length": Unbounded((), dtype=torch.int64)}


make_pair = partial(make_vector_env, [partial(Walk, 2, 2), partial(Walk, 3, 3)], 2, "SameStep")


def test_one_reader_serves_several_environments() -> None:
    one = default_info_dict_reader(list(LONG), spec=LONG)
    single, batch, other = (
        GymWrapper(env) for env in (Walk(), make_vector_env(Walk, 3, "SameStep"), make_vector_env(Walk, 5, "SameStep"))
    )
    for env in (batch, single, other):
        env.set_info_dict_reader(one)
        check_env_specs(env)
    assert one.info_spec == Composite(LONG)


def test_custom_info_reader_gets_no_final_entries_and_statistics_once() -> None:
    seen: list[Any] = []

    def read_half_age(info: Any, data: Any) -> Any:
        seen.append(info)
        return data.set("half", torch.as_tensor(info["age"]) / 2)

    ours, theirs = (cls(Walk()).set_info_dict_reader(read_half_age) for cls in (GymWrapper, upstream.GymWrapper))
    rollout = assert_same_rollouts(ours, theirs, 20)
    assert torch.equal(rollout["next", "half"] * 2, rollout["next", "observation"][:, 1])
    env = GymWrapper(gymnasium.wrappers.vector.RecordEpisodeStatistics(make_pair()))
    seen.clear()
    env.set_info_dict_reader(read_half_age).rollout(6, break_when_any_done=False)
    assert not any("final_obs" in info or "final_info" in info for info in seen)
    lengths = [info["episode"]["l"][info["_episode"]] for info in seen if "episode" in info]
    assert np.concatenate(lengths).tolist() == [2, 3, 2, 2, 3]


def test_readers_write_texts_by_row() -> None:
    def make_env(write: Any) -> Any:
        env = GymWrapper(make_pair())
        return env.set_info_dict_reader(lambda info, data: write(data, [f"age {age}" for age in info["age"]]))

    env = make_env(lambda data, texts: data.set("text", texts))
    after = env.rollout(7, break_when_any_done=False)["next"]
    assert list(after["text"]) == [[f"age {int(age)}" for age in row] for row in after["observation"][..., 1]]
    env = make_env(lambda data, texts: data.set_non_tensor("text", texts))
    with pytest.raises(InvalidArgumentError, match="wrote 'text' as one list for all sub-environments"):
        env.rollout(7, break_when_any_done=False)


def test_readers_may_edit_tensors_in_steps_that_reset_rows() -> None:
    def add_bonus(info: Any, data: Any) -> Any:
        if "reward" in data:
            data["reward"] += 1
        return data

    plain = seeded_rollout(GymWrapper(make_pair()), 9)["next"]
    edited = seeded_rollout(GymWrapper(make_pair()).set_info_dict_reader(add_bonus), 9)["next"]
    assert torch.equal(edited["reward"], plain["reward"] + 1)


def test_info_arrays_are_copied() -> None:
    count = np.zeros(2)
    inner = add_info(Walk(9, 9), "count", lambda: np.add(count, 1, out=count))
    spec = [Unbounded((2,), dtype=torch.float64)]
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(["count"], spec=spec))
    assert env.rollout(6)["next", "count"].tolist() == [[step, step] for step in range(1, 7)]


# -- values that are not arrays

# Values, and their dtype as tensors, if they are numbers.
VALUES: dict[str, Any] = {
    "a float": (1.5, torch.float64),
    "a boolean": (True, torch.bool),
    "an array of objects": (np.array([1, 2], object), torch.int64),
    "a tensor": (torch.ones(2), torch.float32),
    "text": ("left", None),
    "a complex number": (1j, None),
    "an object": (object(), None),
    "a ragged list": ([1, [2, 3]], None),
}


@pytest.mark.parametrize("mode", [None, "SameStep"])
@pytest.mark.parametrize("name", VALUES)
def test_numbers_in_infos_are_registered_and_others_skipped_or_rejected_if_named(name: str, mode: str | None) -> None:
    value, dtype = VALUES[name]

    def wrap_env() -> Any:
        def make_env() -> Any:
            return add_info(Walk(3, 5), "value", lambda: value)

        return GymWrapper(make_vector_env(make_env, 2, mode) if mode else make_env())

    env = wrap_env().auto_register_info_dict()
    check_env_specs(env)
    after = env.rollout(12, break_when_any_done=False)["next"]
    assert after["age"].any()
    if dtype is not None:
        assert after["value"].dtype is dtype
        expected = torch.as_tensor(np.asarray(value).astype(float)).to(dtype)
        assert torch.equal(after["value"], expected.expand(*after.batch_size, *expected.shape))
        return
    assert "value" not in after
    env = wrap_env().set_info_dict_reader(default_info_dict_reader(["value"]))
    with pytest.raises(EnvironmentOutputError, match=r"info 'value' .*expected numbers.*Use env.set_info_dict_reader"):
        env.rollout(2)


def test_scalar_info_of_a_batch_is_rejected() -> None:
    inner = add_info(IsaacByIds(3, final_obs=True), "mean", lambda: 2.5)
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(["mean"]))
    with pytest.raises(EnvironmentOutputError, match=r"info 'mean' has the shape \(\).*\(3,\)"):
        env.rollout(2)


def test_none_in_infos_counts_as_absent() -> None:
    inner = Walk(3, 3)
    add_info(inner, "goal", lambda: None if inner.step_count % 2 else 2.5)
    spec = {"goal": Unbounded((), dtype=torch.float64)}
    env = GymWrapper(inner).set_info_dict_reader(default_info_dict_reader(list(spec), spec=spec))
    assert env.rollout(6, break_when_any_done=False)["next", "goal"].tolist() == [0, 2.5, 0, 0, 2.5, 0]


# -- steps of a torch environment on a GPU


class WithoutData(GymWrapper):
    """Wrapper that is on the meta device once its specs are made, where each read of a value raises an error."""

    has_specs = False

    @property
    def device(self) -> Any:
        return torch.device("meta") if self.has_specs else None


def make_points(device: str, **options: Any) -> Any:
    points: Any = Points(6, device=device, **options)
    points.observation_space, points.action_space = points.single_observation_space, points.single_action_space
    return points


@pytest.mark.parametrize(("final_obs", "missing"), [(True, "nan"), (False, "nan"), (False, "previous")])
@pytest.mark.parametrize("as_dict", [False, True])
def test_gpu_step_does_not_synchronize(final_obs: bool, missing: str, as_dict: bool) -> None:
    env = WithoutData(make_points("cpu", final_obs=final_obs, as_dict=as_dict), missing_final_obs=missing)
    actions = env.action_spec.zero().to("meta")
    env.has_specs, env._env = True, make_points("meta", final_obs=final_obs, as_dict=as_dict)
    data = env._reset()
    for _ in range(3):
        step, data = env.step_and_maybe_reset(data.set("action", actions))
        assert {part.device.type for part in tensors([step, data])} == {"meta"}
    env.__dict__["_engine"]._finds_done_rows = True
    with pytest.raises(NotImplementedError, match="meta tensor; no data"):  # the check can fail
        env.step_and_maybe_reset(data.set("action", actions))

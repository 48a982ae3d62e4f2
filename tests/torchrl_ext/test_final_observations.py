"""Tests of final observations in batches: read in every form, or reported as missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import check_env_specs

from rl_ext_core.errors import EnvironmentOutputError
from tests.torchrl_ext.comparison import make_vector_env
from tests.torchrl_ext.environments import SameStep, Walk
from torchrl_ext import GymWrapper

LENGTHS = {"apart": [2, 3, 5], "all at once": [3, 3, 3], "every step": [1, 1, 4]}
libraries = pytest.mark.parametrize("torch_tensors", [False, True], ids=["NumPy", "torch"])
# On a GPU, a step does not read which rows are done. The same code also runs on the CPU.
ways = pytest.mark.parametrize("finds_done_rows", [True, False], ids=["as on a CPU", "as on a GPU"])

nesting = pytest.mark.parametrize("nested", [False, True])


def wrap(env: Any, *, finds_done_rows: bool = True, **kwargs: Any) -> Any:
    """Wrap and reset an environment; choose the CPU's or the GPU's code path."""
    wrapper = GymWrapper(env, **{"categorical_action_encoding": True, **kwargs})
    wrapper.reset()
    wrapper.__dict__["_engine"]._finds_done_rows = finds_done_rows
    return wrapper


def place_key(nested: bool) -> Any:
    """Return the key of the entry with row, episode and step."""
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


@pytest.mark.sample(quick=12, ci=40)
@pytest.mark.parametrize("form", SameStep.FORMS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@nesting
@libraries
@ways
def test_final_observations_are_read_in_every_form(
    form: str, lengths: list[int], nested: bool, torch_tensors: bool, finds_done_rows: bool
) -> None:
    for categorical, name in ((True, "final_obs"), (False, "final_observation")):  # the older name
        inner = SameStep(lengths, form, nested=nested, torch_tensors=torch_tensors, name=name)
        env = wrap(inner, finds_done_rows=finds_done_rows, categorical_action_encoding=categorical)
        rollout = env.rollout(13, break_when_any_done=False)
        check_chain(rollout, place_key(nested))
        for data in (rollout, rollout["next"]) if nested else ():
            place = data["inner", "place"]
            assert torch.equal(data["inner", "_private"], place[..., :1] * 2)
            kind = data["kind"] if categorical else data["kind"].argmax(-1)
            assert torch.equal(kind, (place[..., 0] + place[..., 2]).long())
            assert categorical or (data["kind"].sum(-1) == 1).all()
        check_env_specs(env)


@ways
@libraries
@pytest.mark.parametrize("info", [{}, ["nothing"] * 3], ids=str)
def test_missing_final_observations_are_nan_or_previous(info: Any, torch_tensors: bool, finds_done_rows: bool) -> None:
    for missing, nested in (("nan", True), ("previous", True), ("previous", False)):
        inner = SameStep([1, 2, 5], None, nested=nested, torch_tensors=torch_tensors)
        step = inner.step
        inner.step = lambda action, step=step: (*step(action)[:-1], info)  # type: ignore[method-assign]
        rollout = wrap(inner, missing_final_obs=missing, finds_done_rows=finds_done_rows).rollout(
            9, break_when_any_done=False
        )
        place, done = place_key(nested), rollout["next", "done"].squeeze(-1)
        assert rollout[place].isfinite().all()
        assert torch.equal(rollout["next"][place][~done], rollout[place][~done] + torch.tensor([0.0, 0.0, 1.0]))
        for key in [place, ("inner", "_private"), "kind"] if nested else [place]:
            last = rollout["next"][key][done]
            if missing == "previous":
                assert torch.equal(last, rollout[key][done])
            else:
                assert (last == 0).all() if key == "kind" else last.isnan().all()  # integers have no NaN


def test_previous_observation_survives_edits_of_the_data() -> None:
    def play(edits: bool) -> Any:
        """Roll out, optionally overwriting the returned data; return next observations."""
        env = wrap(SameStep([2, 3, 5], None, nested=True), missing_final_obs="previous")
        data, found = env.reset(), []
        for _ in range(9):
            before, data = env.step_and_maybe_reset(env.rand_action(data))
            found.append(before["next", "inner", "place"].clone())
            if edits:
                data["inner", "place"].div_(100)
                before["next"]["inner"]["place"] = torch.full((3, 3), -5.0)
        return torch.stack(found)

    assert torch.equal(play(True), play(False))


def always_rows(*rows: Any) -> Any:
    """Return a function that returns these rows as final observations."""
    return lambda final: list(rows)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "none for one that is done": ("objects", lambda final: np.full(2, None, object), "has no entry for .*0"),
    "of another shape": ("list", always_rows(np.zeros(4), np.zeros(4)), r"shape \(1, 4\).*\(1, 3\)"),
    "of one number, which would be spread": ("list", always_rows(*[np.zeros(1)] * 2), r"shape \(1, 1\).*\(1, 3\)"),
    "too few": ("list", always_rows(*[np.zeros(3)] * 3), "3 rows; expected 2"),
    "no nested dict": ("nested", lambda final: {"kind": final["kind"]}, "no 'inner'.*holds.*kind"),
    "no nested entry": (
        "nested",
        lambda final: {**final, "inner": {"place": final["inner"]["place"]}},
        "no 'inner._private'",
    ),
    "an entry for a dict": ("nested", lambda final: {**final, "inner": final["kind"]}, "final_obs inner is of type"),
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


def test_final_observations_with_gymnasium_masks_are_read() -> None:
    # gymnasium turns infos that are dicts into dicts of arrays, with a mask "_key" for each "key".
    env = SameStep([2, 3], "batch", nested=True)
    final = env.final_observations

    def final_with_masks(rows: list[int]) -> Any:
        """Return the final observations with gymnasium's masks of the rows that have them."""
        mask, batch = np.isin(np.arange(2), rows), final(rows)
        return {**batch, "inner": {**batch["inner"], "_place": mask}, "_inner": mask, "_kind": mask}

    env.final_observations = final_with_masks  # type: ignore[method-assign]
    check_chain(wrap(env).rollout(9, break_when_any_done=False), ("inner", "place"))


def test_final_observations_of_integers_stay_integers_and_fractions_are_rejected() -> None:
    inner: Any = SameStep([3, 3], "objects")
    inner.single_observation_space = spaces.Box(-9999, 9999, (3,), np.int64)
    observation, final = inner.observation, inner.final_observations
    inner.observation = lambda rows: observation(rows).astype(np.int64)
    assert wrap(inner).rollout(9, break_when_any_done=False)["next", "observation"].dtype is torch.int64
    inner.final_observations = lambda rows: [np.full(3, 0.5) for _ in final(rows)]
    with pytest.raises(EnvironmentOutputError, match=r"final_obs observation.*float64, which loses"):
        wrap(inner).rollout(9, break_when_any_done=False)


def test_missing_final_obs_raises_on_the_gpu_code_path() -> None:
    env = wrap(SameStep([3, 3], None), missing_final_obs="error", finds_done_rows=False)
    assert env.rollout(2).shape == (2, 2)
    with pytest.raises(EnvironmentOutputError, match=r"final_obs.*missing_final_obs="):
        env.rollout(4)


@ways
@pytest.mark.parametrize("form", ["batch", "list"])
def test_final_observations_are_detached_and_cast(form: str, finds_done_rows: bool) -> None:
    inner = SameStep([2, 3], form, torch_tensors=True)
    final = inner.final_observations

    def to_double_with_graph(value: Any) -> Any:
        if isinstance(value, list):
            return [to_double_with_graph(part) for part in value]
        return value if value is None else value.double().requires_grad_() * 1

    inner.final_observations = lambda rows: to_double_with_graph(final(rows))  # type: ignore[method-assign]
    rollout = wrap(inner, finds_done_rows=finds_done_rows).rollout(7, break_when_any_done=False)
    assert not rollout["next", "observation"].requires_grad
    assert rollout["next", "observation"].dtype is torch.float32
    check_chain(rollout)


def test_final_observation_of_a_key_that_torchrl_renames_is_found() -> None:
    space = spaces.Dict(state=spaces.Box(-np.inf, np.inf, (4,), np.float32))

    class StateWalk(Walk):
        """``Walk`` with a key that TorchRL renames from ``state`` to ``observation``."""

        observation_space = space  # type: ignore[assignment]

        def observation(self) -> Any:
            return {"state": super().observation()}

    env = GymWrapper(make_vector_env([partial(StateWalk, 2, 2), partial(StateWalk, 5, 5)], 2, "SameStep"))
    rollout = env.rollout(12, break_when_any_done=False)
    assert torch.equal(rollout["next", "observation"][..., 1], rollout["observation"][..., 1] + 1)


def test_observation_key_that_looks_like_a_gymnasium_mask_is_kept() -> None:
    class MaskNamedWalk(Walk):
        """``Walk`` with a key ``_goal``, which has the form of gymnasium's mask for ``goal``."""

        observation_space = spaces.Dict(goal=Walk.observation_space, _goal=spaces.Box(-9, 9, (2,), np.float32))  # type: ignore[assignment]

        def observation(self) -> Any:
            return {"goal": super().observation(), "_goal": np.full(2, self.step_count, np.float32)}

    env = GymWrapper(make_vector_env([partial(MaskNamedWalk, 2, 2), partial(MaskNamedWalk, 5, 5)], 2, "SameStep"))
    rollout = env.rollout(12, break_when_any_done=False)
    assert torch.equal(rollout["next", "_goal"][..., 0], rollout["next", "goal"][..., 1])
    assert torch.equal(rollout["next", "goal"][..., 1], rollout["goal"][..., 1] + 1)

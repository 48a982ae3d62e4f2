from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter, TransformedEnv

from rl_ext_core.errors import EnvironmentOutputError
from tests.interrupts import interrupt_everywhere
from tests.torchrl_ext.comparison import INNER, assert_same, seeded_rollout
from tests.torchrl_ext.environments import Isaac
from torchrl_ext import GymWrapper

MAKERS: dict[str, Callable[[], Any]] = {
    **{name: lambda make=make: GymWrapper(make()) for name, make in INNER.items()},
    "torch": lambda: GymWrapper(Isaac(2, lengths=[3, 5]), missing_final_obs="previous"),
    "under a transform": lambda: TransformedEnv(GymWrapper(INNER["single"]()), StepCounter()),
}


def prepare_env(name: str) -> tuple[Any, Any]:
    """Return an environment before its first episode's last step, and the data for it."""
    env = MAKERS[name]()
    env.set_seed(0)
    torch.manual_seed(0)
    data = env.reset()
    for _ in range(2):
        _, data = env.step_and_maybe_reset(env.rand_action(data))
    return env, env.rand_action(data)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda env, data: env.step(data),
    "step_and_maybe_reset": lambda env, data: env.step_and_maybe_reset(data),
    "reset": lambda env, data: env.reset(),
    "rollout": lambda env, data: env.rollout(4, break_when_any_done=False),
    "the first rollout": lambda env, data: env.rollout(2),
}


def interrupt_call(name: str, call: str, every: int) -> Iterator[tuple[Any, Any, Any]]:
    """Interrupt a call at each ``every``-th place; yield its environment, its data, and the data before it."""
    state: list[Any] = []

    def prepare() -> Callable[[], Any]:
        env, data = prepare_env(name)
        if call == "the first rollout":
            env = MAKERS[name]()
        state[:] = env, data, data.clone()
        return lambda: CALLS[call](env, data)

    for _ in interrupt_everywhere(prepare, code_paths=("torchrl_ext/",), every=every):
        yield state[0], state[1], state[2]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "every"),
    [("single", 9), ("SameStep", 19), *(pytest.param(name, 3, marks=pytest.mark.exhaustive) for name in MAKERS)],
)
@pytest.mark.parametrize("call", CALLS)
def test_rollout_after_an_interrupt_is_unchanged(name: str, every: int, call: str) -> None:
    expected, count = seeded_rollout(MAKERS[name](), 8), 0
    for env, data, before in interrupt_call(name, call, every * (4 if "rollout" in call else 1)):
        count += 1
        assert_same(seeded_rollout(env, 8), expected)
        assert_same(data.select(*before.keys(True, True)), before)
    assert count > 1


@pytest.mark.sample
@pytest.mark.parametrize("name", ["SameStep", "NextStep", "Disabled"])
@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_partial_reset_after_an_interrupt_returns_current_observations(name: str, call: str) -> None:
    for env, *_ in interrupt_call(name, call, 5):
        data = env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
        each = env._env.envs
        assert each[0].step_count == 0
        assert data["observation"][0, 1] == 0
        assert not data["done"][0].any()
        found = env.rand_step(data)["next", "observation"][:, 1]
        if not found.isnan().any() and name != "SameStep":
            assert found[0] == 1


def test_previous_observation_after_an_interrupt_is_right_or_an_error() -> None:
    """If the previous observation is unknown after an interrupt, an episode's end raises."""
    refusals: list[str] = []
    for env, *_ in interrupt_call("torch", "step", 3):
        steps = env._env.steps.clone()
        try:
            data = env.step(TensorDict({"action": torch.zeros(2, 2)}, [2], device=env.device))["next"]
        except EnvironmentOutputError as error:
            refusals.append(str(error))
            continue
        for row in data["done"].view(-1).nonzero().view(-1).tolist():
            place = data["policy"][row, 2]
            assert place == steps[row], (place, steps)
    assert all("interrupted" in text for text in refusals)

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    default_info_dict_reader,
)
from torchrl.envs import GymEnv as UpstreamGymEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper
from torchrl.envs import ParallelEnv as Upstream
from torchrl.envs.utils import check_env_specs

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError
from tests.environments import Counting
from tests.torchrl_ext.environments import SamplingEnv
from tests.torchrl_ext.parallel_environments import NativeEnv
from torchrl_ext import GymWrapper, ParallelEnv

pytestmark = pytest.mark.usefixtures("no_workers_left")


def make_cartpole() -> Any:
    return UpstreamGymEnv("CartPole-v1")


class Counter(Counting):
    """Environment that observes its steps, a random number and its resets. An action or six steps end an episode."""

    part = SimpleNamespace(value=42)

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.depth, self.options = self.depth + 1, options
        return super().reset(seed=seed)[0], {"number": np.float32(0)}

    def step(self, action: Any) -> Any:
        observation, info = super().step(action)[0], {"number": np.float32(self._count)}
        return observation, float(action) + 0.5, self._count >= 4 and action == 2, self._count >= 6, info


def make_counter(*transforms: Any, info_keys: Any = (), **options: Any) -> Any:
    env = UpstreamGymWrapper(Counter(), **options)
    if info_keys:
        env.set_info_dict_reader(default_info_dict_reader(info_keys))
    return TransformedEnv(env, Compose(*(make() for make in transforms))) if transforms else env


SCALAR, BITS = gymnasium.spaces.Box(-1, 1, ()), gymnasium.spaces.MultiBinary(3)
DICE, PAIR = gymnasium.spaces.MultiDiscrete([3, 2]), gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)] * 2)


def make_rolls() -> Any:
    """Make an environment whose spaces TorchRL describes differently in batches."""
    observations = gymnasium.spaces.Dict({"dice": DICE, "scalar": SCALAR, "bits": BITS, "pair": PAIR})
    return UpstreamGymWrapper(SamplingEnv(observations, DICE))


class Terse(NativeEnv):
    """Environment that reads its last observation, and leaves to ``EnvBase`` what that completes and reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)), seen=Unbounded((2,)))
        self.action_spec, self.reward_spec = Bounded(-1, 1, (2,)), Unbounded((1,))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict(observation=torch.rand(2), seen=torch.zeros(2))

    def _step(self, tensordict: Any) -> TensorDict:
        observation = tensordict["observation"] + tensordict["action"]
        tensordict["seen"] = tensordict["seen"] + 1  # written to the input
        total = observation.sum()
        return TensorDict(observation=observation, reward=total, terminated=total > 1, undeclared=total)


class Accumulating(NativeEnv):
    """Environment whose reward is also a state, from which the next step starts."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec, self.action_spec = Composite(observation=Unbounded((2,))), Bounded(-1, 1, (2,))
        self.reward_spec, self.state_spec = Unbounded((1,)), Composite(reward=Unbounded((1,)))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict(observation=torch.rand(2), reward=torch.zeros(1))

    def _step(self, tensordict: Any) -> TensorDict:
        reward = tensordict.get("reward", torch.zeros(1)) / 2 + tensordict["action"].sum().view(1)
        return TensorDict(observation=tensordict["observation"] + reward, reward=reward, done=reward > 1.2)


def seeded_result(do: Callable[[Any], Any], env: Any) -> Any:
    env.set_seed(3)
    torch.manual_seed(0)
    return do(env)


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


def roll(env: Any, steps: int = 12, **options: Any) -> Any:
    return env.rollout(steps, break_when_any_done=False, **options)


SOME = torch.tensor([[True], [False], [True]])


def reset_some(env: Any) -> Any:
    return env.reset(env.rollout(2)[:, -1].exclude("next").set("_reset", SOME.clone()))


def reset_some_after_a_step(env: Any) -> Any:
    return env.reset(env.rollout(2)[:, -1]["next"].exclude("reward").clone().set("_reset", SOME.clone()))


def reset_some_after_a_change(env: Any) -> Any:
    env.reset().get("note").update_at_(NonTensorData("another note"), 0)
    return env.reset(TensorDict({"_reset": ~SOME}, [3])).get("note").tolist()


def step_some(env: Any) -> Any:
    return env.step(env.rand_action(env.reset()).set("_step", SOME[:, 0].clone()))["next"]


def step_past_the_end(env: Any) -> Any:
    td, found = env.reset(), []
    for _ in range(8):
        td = env.step(env.rand_action(td))["next"]
        found.append(td["observation"].clone())
    return torch.stack(found)


def step_and_reset(env: Any) -> Any:
    td, found = env.reset(), []
    for _ in range(9):
        done, td = env.step_and_maybe_reset(env.rand_action(td))
        found.append(done.clone())
    return torch.stack(found)


def run_policy_with_state(env: Any) -> Any:
    """Roll out a policy with a hidden state, which is initialized in this process or in the workers."""

    def act(observation: Any, state: Any) -> Any:
        return torch.nn.functional.one_hot(state[..., 0].long() % 3, 3), state + 1

    policy = TensorDictModule(act, in_keys=["observation", "h"], out_keys=["action", ("next", "h")])
    if "h" not in env.observation_spec:
        primer = TensorDictPrimer(Composite(h=Unbounded((3, 1)), shape=(3,)))
        env = TransformedEnv(env, Compose(InitTracker(), primer))
    return roll(env, 14, policy=policy)


def live(env: Any) -> Any:
    """Close and start an environment repeatedly, and return what happens."""
    found: list[Any] = []
    env.close()
    for call in (env.close, env.start, env.start):
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(str(error))
        found.append(env.is_closed)
    env.reset()
    return found


FRAMES: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 90, "reset_at_each_iter": False}
COMMON: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda env: env.rollout(5),
    "rollout across episodes": roll,
    "rollout, cast": lambda env: roll(env, 5, auto_cast_to_device=True),
    "two rollouts": lambda env: (env.rollout(20)["observation"].sum(), env.rollout(20)["observation"].sum()),
    "rollout until all are done": lambda env: env.rollout(5, break_when_all_done=True),
    "reset of some": reset_some,
    "reset of some after a step": reset_some_after_a_step,
    "step of some": step_some,
    "steps and resets": step_and_reset,
    "specs": lambda env: [getattr(env, f"full_{name}_spec") for name in ("observation", "action", "reward", "done")],
    "states": lambda env: env.full_state_spec,
    "fake_tensordict": lambda env: str(env.fake_tensordict()),
    "keys": lambda env: (env.batch_size, env.device, env.reward_keys, env.action_keys, env.done_keys, env.reset_keys),
    "a transform": lambda env: roll(TransformedEnv(env, RewardSum())),
    "transforms": lambda env: roll(TransformedEnv(env, Compose(StepCounter(4), RewardSum())), 14),
    "a collector": lambda env: torch.cat([batch.clone() for batch in Collector(env, None, **FRAMES)], -1),
    "check_env_specs": check_env_specs,
}
OF_COUNTER: dict[str, Callable[[Any], Any]] = {
    "steps past the end": step_past_the_end,
    "rollout, not contiguous": lambda env: env.rollout(4, return_contiguous=False)[:, -1],
    "rollout from a TensorDict": lambda env: env.rollout(5, auto_reset=False, tensordict=env.reset()),
    "a reset with a seed": lambda env: env.reset(seed=5),
    "a reset with options": lambda env: (env.reset(options={"a": 1}), list(env.options)),
    "a reset with arguments of each": lambda env: env.reset(list_of_kwargs=[{"seed": seed} for seed in range(3)]),
    "seeds": lambda env: (env.set_seed(11), env.set_seed(11, static_seed=True)),
    "a method": lambda env: (env.reset(), env.twice(3, plus=2)),
    "an attribute": lambda env: (env.reset(), list(env.label)),
    "an attribute of an attribute": lambda env: (env.reset(), list(env.part.value())),
    "attributes of the wrapper": lambda env: (env.reset(), list(env.frame_skip), list(env.from_pixels)),
    "rendering": lambda env: (env.reset(), [image.tolist() for image in env.render()]),
    "number of resets": lambda env: (env.rollout(20), env.rollout(20), list(env.depth)),
    "state_dict": lambda env: (env.reset(), {name: len(state) for name, state in env.state_dict().items()}),
    "a move": lambda env: env.to("cpu").rollout(3),
    "a policy with a state": run_policy_with_state,
    "closing and starting": live,
}
OF_NATIVE: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda env: env.rollout(5),
    "reset of some": reset_some,
    "step of some": lambda env: step_some(env)["observation"][[0, 2]],
    "an attribute": lambda env: list(env.size),
    "a method": lambda env: env.add(1, b=2),
    "a reset with options": lambda env: env.reset(list_of_kwargs=[{}] * 3),
    "a transform": lambda env: TransformedEnv(env, RewardSum()).rollout(4),
}
OF_TERSE = ("rollout", "rollout across episodes", "reset of some", "steps and resets", "transforms", "a collector")
OF_NOTES: dict[str, Callable[[Any], Any]] = {
    "rollout": lambda env: env.rollout(3).get("note").tolist(),
    "reset of some": lambda env: reset_some_after_a_step(env).get("note").tolist(),
    "reset of some after a change": reset_some_after_a_change,
}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Callable[[Any], Any]]]] = {
    "gymnasium": (make_counter, COMMON | OF_COUNTER),
    "pixels": (functools.partial(make_counter, from_pixels=True, pixels_only=False), COMMON),
    "pixels only": (functools.partial(make_counter, from_pixels=True), {"rollout": roll, "spec": COMMON["specs"]}),
    "categorical actions": (functools.partial(make_counter, categorical_action_encoding=True), COMMON),
    "frame_skip": (functools.partial(make_counter, frame_skip=2), COMMON),
    "device": (functools.partial(make_counter, device="cpu"), COMMON),
    "Pendulum": (functools.partial(UpstreamGymEnv, "Pendulum-v1"), COMMON),
    "CartPole": (make_cartpole, COMMON),
    "spaces with other specs in batches, in TorchRL": (make_rolls, {"rollout": roll, "spec": COMMON["specs"]}),
    "hidden states, in TorchRL": (
        functools.partial(make_counter, InitTracker, lambda: TensorDictPrimer(Composite(h=Unbounded((1,))))),
        {"a policy with a state": run_policy_with_state},
    ),
    "infos, in TorchRL": (functools.partial(make_counter, info_keys=["number"]), COMMON),
    "transforms, in TorchRL": (functools.partial(make_counter, functools.partial(StepCounter, 5), RewardSum), COMMON),
    "TorchRL": (NativeEnv, OF_NATIVE),
    "a reward that is a state, in TorchRL": (Accumulating, {"rollout": roll}),
    "incomplete outputs, in TorchRL": (Terse, {name: COMMON[name] for name in OF_TERSE}),
    "entries that are not tensors, in TorchRL": (functools.partial(NativeEnv, note="a note"), OF_NOTES),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a seeded ParallelEnv:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_operations_equal_upstream(case: str) -> None:
    make, operations = CASES[case]
    theirs, ours = Upstream(3, make, mp_start_method="fork"), ParallelEnv(3, make())
    assert ours._plan.is_gymnasium == ("TorchRL" not in case)
    try:
        for name, operation in operations.items():
            assert are_equal(*(seeded_result(operation, env) for env in (theirs, ours))), name
    finally:
        theirs.close(raise_if_closed=False)
        ours.close(raise_if_closed=False)


def test_options_without_effect_are_accepted_and_others_refused() -> None:
    options = {"use_buffers": False, "share_individual_td": True, "metadata_from_workers": True, "non_blocking": True}
    env = ParallelEnv(2, NativeEnv, consolidate=False, shared_memory=True, num_sub_threads=1, **options)
    assert isinstance(env, Upstream)
    with pytest.raises(NotImplementedError, match=r"Use torchrl.envs.ParallelEnv\(2, create_env_fn\)\[slice\(0, 1"):
        env[0:1]
    with pytest.raises(InvalidArgumentError, match=r"Use ParallelEnv\(2, create_env_fn"):
        env.configure_parallel(num_threads=1)
    for name, value in {"memmap": True, "num_threads": 2, "serial_for_single": True}.items():
        with pytest.raises(InvalidArgumentError, match=rf"Use torchrl.envs.ParallelEnv\(2, create_env_fn, {name}="):
            ParallelEnv(2, NativeEnv, **{name: value})
    with pytest.raises(InvalidTypeError, match="no argument colour"):
        ParallelEnv(2, NativeEnv, colour=1)


class HalfPrecision(NativeEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_spec["observation"] = Unbounded((2,), dtype=torch.bfloat16)


def test_dtypes_that_numpy_lacks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'observation' of .* torch.bfloat16 .*Use torchrl.envs.Par"):
        ParallelEnv(2, HalfPrecision)


def test_inputs_of_another_shape_are_refused() -> None:
    env = ParallelEnv(3, NativeEnv)
    td = env.rand_action(env.reset())
    with pytest.raises(InvalidArgumentError, match=r"'action' has the shape \[3, 2\]: expected \[3, 1\]"):
        env.step(td.clone().set("action", torch.zeros(3, 2)))
    assert (env.step(td)["next", "reward"] == td["action"]).all()
    td["action"].requires_grad_()
    env.step(td)
    assert not any(place.requires_grad for place in env._leaves._places.values())  # else the graph grows with each step
    env.close()


class Nested(NativeEnv):
    """``NativeEnv`` whose observations are nested, with a batch size of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(agents=Composite(place=Unbounded((3, 2)), shape=(3,)))

    def _make_entries(self) -> dict[str, Any]:
        return {"agents": TensorDict({"place": torch.rand(3, 2)}, [3])}


def test_nested_outputs_have_the_device_of_the_environment() -> None:
    env = ParallelEnv(2, Nested)
    for device in (None, torch.device("cpu")):
        env = env if device is None else env.to(device)
        reset = env._reset()  # EnvBase.reset and step set the device
        for td in (reset, env._step(env.rand_action(reset))):
            assert td["agents"].batch_size == (2, 3)
            assert td.device == td["agents"].device == device
    env.close()


def test_states_of_modules_in_workers_are_restored() -> None:
    env = ParallelEnv(2, NativeEnv)
    env.rollout(4)
    state = env.state_dict()
    env.rollout(4)
    assert [int(one["total"]) for one in env.state_dict().values()] == [8, 8]
    env.load_state_dict(state)
    assert [int(one["total"]) for one in env.state_dict().values()] == [4, 4]
    env.close()


# -- seeds


def run_to_end(env: Any, seed: int | None = None) -> Any:
    if seed is not None:
        env.set_seed(seed)
    torch.manual_seed(0)
    rollout = env.rollout(30, break_when_any_done=False)
    env.close()
    return rollout


FORMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a function": (make_cartpole, lambda: make_cartpole),
    "an id": (make_cartpole, lambda: "CartPole-v1"),
    "an instance": (make_cartpole, lambda: gymnasium.make("CartPole-v1")),
    "an instance of TorchRL's": (make_cartpole, make_cartpole),
    "torch's generator": (NativeEnv, lambda: NativeEnv),
    "torch's generator, copied": (NativeEnv, NativeEnv),
}


@functools.cache
def upstream_rollout(reference: Callable[[], Any]) -> Any:
    return run_to_end(Upstream(3, reference, mp_start_method="fork"), 7)


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in FORMS),
        ("an instance", {"mp_start_method": "spawn"}),
        ("an instance", {"mp_start_method": "fork"}),
        pytest.param("torch's generator", {"mp_start_method": "spawn"}, marks=pytest.mark.exhaustive),
        ("torch's generator", {"mp_start_method": "fork"}),
    ],
)
def test_seed_argument_equals_upstream_set_seed(form: str, options: dict[str, Any]) -> None:
    reference, source = FORMS[form]
    found = run_to_end(ParallelEnv(3, source(), seed=7, **options))
    assert (upstream_rollout(reference) == found).all()
    assert len({tuple(row) for row in found["observation"][:, 0].tolist()}) == 3


def reset_with_seed(env: Counting) -> Counting:
    env.reset(seed=5)
    return env


class Unseeded(NativeEnv):
    def _set_seed(self, seed: int | None) -> None:
        raise NotImplementedError


SOURCES: dict[str, Callable[[], Any]] = {
    "an instance that was used": lambda: GymWrapper(reset_with_seed(Counting())),
    "a class": lambda: Counting,
    "a class that takes no seed": lambda: Unseeded,
    "an instance": Counting,
    "a list": lambda: [reset_with_seed(Counting()), Counting],
}


def random_draws(env: ParallelEnv) -> list[list[float]]:
    rollout = env.rollout(4)
    found = [part["observation"][:, 1].tolist() for part in rollout.unbind(0)]
    env.close()
    return found


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("form", SOURCES)
def test_workers_draw_differently_and_reproducibly_with_a_seed(form: str) -> None:
    source = SOURCES[form]()
    torch.manual_seed(1)
    first, again = (random_draws(ParallelEnv(2, source)) for _ in range(2))
    assert first[0] != first[1]
    assert again != first
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    seeded = ParallelEnv(2, source, seed=3)
    seeded.reset()
    assert torch.equal(torch.rand(3), expected)  # this process's generators are unchanged
    seeded.close()
    first, again = (random_draws(ParallelEnv(2, source, seed=3)) for _ in range(2))
    assert first[0] != first[1]
    assert again == first


def test_instance_and_copies_and_pickles_draw_different_numbers() -> None:
    """Pickles matter, since collectors send one to each of their processes."""
    source, expected = reset_with_seed(Counting()), float(reset_with_seed(Counting()).reset()[0][1])
    env = ParallelEnv(2, source)
    packed = pickle.dumps(env)
    found = [row for each in (env, pickle.loads(packed), pickle.loads(packed)) for row in random_draws(each)]
    assert len({tuple(row) for row in found}) == 6
    assert source.reset()[0][1] == expected
    assert all(expected not in row for row in found)

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sb3_contrib
import stable_baselines3 as sb3
import torch
import torch._dynamo
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback, StopTrainingOnMaxEpisodes
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnvWrapper, VecMonitor, VecNormalize

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rl_ext_core.vector.array_frameworks import map_arrays
from sb3_ext import GymVecEnv, tensor
from sb3_ext.tensor import TensorReplayBuffer, TensorVecEnv, TensorVecNormalize
from tests.sb3_ext.buffer_envs import Sprite, without_logger
from tests.sb3_ext.tensor_envs import AnySpaces, Points
from tests.sb3_ext.vec_checks import assert_equal

OPTIONS: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 16, "batch_size": 16, "n_epochs": 2},
    "A2C": {},
    "SAC": {"learning_starts": 40, "train_freq": 4, "batch_size": 16},
    "TD3": {"learning_starts": 40, "train_freq": 4, "batch_size": 16},
    "DQN": {"learning_starts": 40, "train_freq": 4, "batch_size": 16, "target_update_interval": 40},
}


def make_env(on_tensors: bool, *, normalized: bool | dict[str, Any] = False, **options: Any) -> Any:
    """Make Points in a GymVecEnv, normalized or not.

    :param normalized: whether to normalize, or options of VecNormalize
    """
    missing = "error" if options.get("final_obs", True) else "previous"
    env: Any = GymVecEnv(Points(**options), tensors=on_tensors, missing_final_obs=missing)
    if normalized is False:
        return env
    limits = {"clip_obs": 1.5, "clip_reward": 2.0} if normalized is True else normalized
    return (TensorVecNormalize if on_tensors else VecNormalize)(env, **limits)


def make_model(name: str, module: Any = tensor, env: Any = None, *, normalized: Any = False, **options: Any) -> Any:
    """Make a model of ``sb3_ext.tensor`` or ``stable_baselines3``.

    :param options: of Points, and of the algorithm
    """
    names = ("as_dict", "truncates", "num_envs", "length", "final_obs", "transposed")
    of_env = {key: options.pop(key) for key in names if key in options}
    if env is None:
        env = make_env(module is tensor, normalized=normalized, discrete=name == "DQN", **of_env)
    is_dict = isinstance(getattr(env, "observation_space", None), spaces.Dict)
    policy = "MultiInputPolicy" if is_dict else "CnnPolicy" if isinstance(env, Sprite) else "MlpPolicy"
    defaults = {"seed": 0, "device": "cpu", **OPTIONS[name], "policy_kwargs": {"net_arch": [8]}}
    return without_logger(getattr(module, name)(policy, env, **{**defaults, **options}))


def assert_equal_weights(model: Any, other: Any) -> None:
    expected = other.policy.state_dict()
    assert model.policy.state_dict().keys() == expected.keys()
    for name, weights in model.policy.state_dict().items():
        assert torch.equal(weights, expected[name]), name


def train_both(name: str, steps: int, make: Callable[[Any], Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Train with both modules, compare the weights and episode statistics, and return the models.

    :param make: function that makes an environment for a module
    """
    ours, theirs = (
        make_model(name, module, make(module) if make else None, **options).learn(steps) for module in (tensor, sb3)
    )
    assert_equal_weights(ours, theirs)
    assert ours.num_timesteps == theirs.num_timesteps
    assert ours._episode_num == theirs._episode_num
    assert list(ours.ep_success_buffer) == list(theirs.ep_success_buffer)
    of_episodes = [[(info["r"], info["l"]) for info in model.ep_info_buffer] for model in (ours, theirs)]
    assert of_episodes[0] == of_episodes[1]
    assert of_episodes[0]
    logs = [{k: v for k, v in model.logger.name_to_value.items() if k[:6] == "train/"} for model in (ours, theirs)]
    assert logs[0] == logs[1]
    return ours, theirs


# -- weights


BOX, ACTIONS = spaces.Box(-9, 9, (4,), np.float32), spaces.Box(-2, 3, (2,), np.float32)
IMAGES = spaces.Box(0, 255, (3, 36, 36), np.uint8)
SPACES = {
    "MultiDiscrete": (BOX, spaces.MultiDiscrete([3, 4])),
    "MultiBinary": (BOX, spaces.MultiBinary(3)),
    "Discrete": (spaces.Discrete(5), spaces.Discrete(3, start=1)),
    "float64": (spaces.Box(-9, 9, (3,), np.float64), spaces.Box(-1, 1, (2, 2), np.float64)),
    "integers": (spaces.Box(0, 9, (2, 3), np.int32), ACTIONS),
    "discrete observations": (spaces.MultiDiscrete([3, 4]), ACTIONS),
    "Dict": (spaces.Dict(a=spaces.Discrete(4), b=BOX, c=IMAGES, d=spaces.MultiBinary(2)), ACTIONS),
}


def make_any_spaces(module: Any, name: str, key: str) -> Any:
    observations, actions = SPACES[key]
    actions = ACTIONS if name == "SAC" and not isinstance(actions, spaces.Box) else actions
    return GymVecEnv(AnySpaces(observations, actions), tensors=module is tensor)


def make_of_arrays(module: Any, env_id: str, *, normalized: bool) -> Any:
    env: Any = make_vec_env(env_id, 3, seed=0)
    return (TensorVecNormalize if module is tensor else VecNormalize)(env) if normalized else env


class Flipped(VecEnvWrapper):
    """Wrapper whose observations have negative strides, and whose episodes end with or without last observations.

    Time limits without last observations are those of gym3's environments.
    """

    def __init__(self, venv: Any, *, has_last: bool) -> None:
        super().__init__(venv)
        self._has_last = has_last

    def reset(self) -> Any:
        return self.venv.reset()[:, ::-1]  # type: ignore[call-overload, index]

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            last = info.pop("terminal_observation", None)
            if last is not None and self._has_last:
                info["terminal_observation"] = last[::-1]
        return observations[:, ::-1], rewards, dones, infos  # type: ignore[call-overload, index]


def make_flipped(_: Any, *, has_last: bool) -> Any:
    return Flipped(make_vec_env("Pendulum-v1", 3, 0, env_kwargs={"max_episode_steps": 9}), has_last=has_last)


class Extractor(BaseFeaturesExtractor):
    """Features extractor whose results differ between training and rollouts."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=6)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2))

    def forward(self, observations: torch.Tensor) -> Any:
        return self.layers(observations)


class InPlace(BaseFeaturesExtractor):
    """Features extractor that changes its input."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, features_dim=4)

    def forward(self, observations: torch.Tensor) -> Any:
        return observations.mul_(0.5)


POLICY = {"net_arch": [8], "features_extractor_class": Extractor}
IN_PLACE = {"net_arch": [8], "features_extractor_class": InPlace}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("PPO", {"n_steps": 7, "batch_size": 13}),
    ("PPO", {"n_steps": 16, "batch_size": 63}),  # the last batch has one sample
    ("PPO", {"target_kl": 1e-4, "clip_range_vf": 0.1}),
    ("PPO", {"use_sde": True, "policy_kwargs": {"net_arch": [8], "squash_output": True, "full_std": False}}),
    ("PPO", {"policy_kwargs": POLICY}),
    ("PPO", {"num_envs": 1, "stats_window_size": 3, "gamma": 1.0, "gae_lambda": 1.0}),
    ("A2C", {"normalize_advantage": True, "use_rms_prop": False, "policy_kwargs": POLICY}),
    ("SAC", {"use_sde": True, "use_sde_at_warmup": True, "gradient_steps": -1}),
    ("SAC", {"buffer_size": 50}),  # not a multiple of the environments
    (
        "SAC",
        {"num_envs": 1, "train_freq": (1, "episode"), "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    ("TD3", {"num_envs": 1, "train_freq": (2, "episode"), "gradient_steps": -1, "policy_kwargs": POLICY}),
    ("DQN", {"n_steps": 3, "num_envs": 2}),
    ("A2C", {"final_obs": False}),
    ("SAC", {"final_obs": False}),
    ("TD3", {"n_steps": 2, "normalized": True}),
    ("SAC", {"use_sde": True, "sde_sample_freq": 3}),
    ("TD3", {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(2), np.full(2, 0.3))}),
    ("PPO", {"policy_kwargs": IN_PLACE}),
    ("DQN", {"policy_kwargs": IN_PLACE}),
    ("SAC", {"normalized": {"norm_obs": False}}),
    ("SAC", {"normalized": {"norm_reward": False}}),
    ("SAC", {"normalized": {"norm_obs_keys": ["velocity"]}, "as_dict": True}),
]


# Algorithm, number of steps, function that makes the environment for a module, and options of the model and of Points.
WEIGHTS: list[tuple[str, int, Callable[[Any], Any] | None, dict[str, Any]]] = [
    *(
        (name, 320, None, {"truncates": truncates, "as_dict": as_dict, "normalized": normalized})
        for name in ("PPO", "A2C", "SAC", "TD3")
        for truncates, as_dict, normalized in product([True, False], repeat=3)
    ),
    *((name, 80, partial(make_any_spaces, name=name, key=key), {}) for name in ("PPO", "SAC") for key in SPACES),
    *((name, 120, None, options) for name, options in VARIANTS),
    *(
        (name, 320, None, {"transposed": True, "as_dict": as_dict, "num_envs": 16})
        for name, as_dict in product(["PPO", "SAC"], [True, False])
    ),
    *(
        (name, 700, partial(make_of_arrays, env_id=env_id, normalized=normalized), {})
        for name, env_id in (("PPO", "Pendulum-v1"), ("SAC", "Pendulum-v1"), ("DQN", "CartPole-v1"))
        for normalized in (True, False)
    ),
    *(("SAC", 300, partial(make_flipped, has_last=has_last), {}) for has_last in (False, True)),
    ("PPO", 32, lambda _: Sprite(3), {"policy_kwargs": {}}),  # is wrapped, and its images are transposed
]


@pytest.mark.sample(quick=15)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize(("name", "steps", "make", "options"), WEIGHTS)
def test_weights_equal_those_of_sb3(name: str, steps: int, make: Any, options: dict[str, Any]) -> None:
    """Source: https://github.com/mani-skill/ManiSkill/issues/728 (sizes of buffers)."""
    train_both(name, steps, make, **copy.deepcopy(options))  # a noise has a state


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_training_continues_without_reset(name: str, tmp_path: Path) -> None:
    """Also after a file was loaded with ``force_reset=False``."""
    models = []
    for module in (tensor, sb3):
        model = make_model(name, module, normalized=True).learn(64)
        model.save(tmp_path / "model.zip")
        env, buffer = model.env, getattr(model, "replay_buffer", None)
        model = without_logger(getattr(module, name).load(tmp_path / "model.zip", env, device="cpu", force_reset=False))
        model.replay_buffer = buffer
        torch.manual_seed(0)
        np.random.seed(0)
        models.append(model.learn(64, reset_num_timesteps=False))
    assert_equal_weights(*models)
    assert models[0].num_timesteps == 128


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16])
@pytest.mark.parametrize("scale", [1, 100])
def test_statistics_of_other_dtypes_are_those_of_vec_normalize(dtype: Any, scale: int) -> None:
    """VecNormalize gets float16 as float32, because its variances overflow in float16."""

    class Cast(Points):
        def __init__(self, space_dtype: Any) -> None:
            super().__init__(length=5)
            self.single_observation_space = spaces.Box(0, 255, (4,), space_dtype)

        def _observe(self) -> Any:
            kind = torch.from_numpy(np.zeros(0, dtype)).dtype
            return (super()._observe() * scale).abs().clamp(0, 255 * scale).to(kind)

    other = np.float32 if dtype == np.float16 else dtype
    envs = TensorVecNormalize(GymVecEnv(Cast(dtype), tensors=True)), VecNormalize(GymVecEnv(Cast(other)))
    for env in envs:
        env.seed(0)
        env.reset()
    for _ in range(12):
        found, expected = envs[0].step(torch.ones(4, 2)), envs[1].step(np.ones((4, 2), np.float32))
        assert np.isfinite(expected[0]).all()
        np.testing.assert_array_equal(found[0].numpy(), expected[0], strict=True)
        np.testing.assert_array_equal(envs[0].obs_rms.var, envs[1].obs_rms.var, strict=True)
        np.testing.assert_array_equal(found[1].numpy(), expected[1], strict=True)


# -- no way through NumPy


@pytest.mark.sample(quick=5, ci=10)
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ["PPO", "A2C", "SAC", "TD3", "DQN"])
def test_collecting_reads_nothing_from_other_devices(
    name: str, normalized: bool, as_dict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the values of time-outs and the episodes of PPO and A2C are read, once per rollout."""
    env: Any = GymVecEnv(Points(as_dict=as_dict, discrete=name == "DQN", device="meta"), tensors=True)
    env = TensorVecNormalize(env) if normalized else env
    options = {} if name in ("TD3", "DQN") else {"use_sde": as_dict, "sde_sample_freq": 3}
    model = make_model(name, env=env, device="meta", **options)
    _, callback = model._setup_learn(1000)
    if name in ("PPO", "A2C"):
        reads: list[str] = []
        for method in ("_read_episodes", "_add_values_of_time_outs"):
            monkeypatch.setattr(model, method, lambda *_, method=method: reads.append(method))
        assert model.collect_rollouts(env, callback, model.rollout_buffer, model.n_steps)
        assert reads == ["_add_values_of_time_outs", "_read_episodes"]
    else:
        model.collect_rollouts(env, callback, model.train_freq, model.replay_buffer)
        assert model.replay_buffer.pos == 4


def test_loaded_statistics_move_to_the_device_of_the_environment(tmp_path: Path) -> None:
    """Also if they are not updated.

    Source: https://github.com/isaac-sim/IsaacLab/issues/2635
    """
    path = str(tmp_path / "normalize.pkl")
    for as_dict in (False, True):
        make_env(True, normalized=True, as_dict=as_dict).save(path)
        env = TensorVecNormalize.load(path, GymVecEnv(Points(as_dict=as_dict, device="meta"), tensors=True))
        env.training = False
        env.reset()
        observations, rewards, *_, infos = env.step(torch.zeros(4, 2, device="meta"))
        parts = observations.values() if as_dict else [observations]
        assert {part.device.type for part in (*parts, rewards)} == {"meta"}
        env.unnormalize_obs(infos.final_observation)
        env.unnormalize_reward(rewards)


@pytest.mark.parametrize("name", ["PPO", "SAC"])
@pytest.mark.parametrize("normalized", [False, True])
def test_training_after_an_evaluation_in_inference_mode(name: str, normalized: bool) -> None:
    """Tensors of inference mode cannot be written later.

    Source: https://github.com/isaac-sim/IsaacLab-Arena/pull/96
    """
    model = make_model(name, normalized=normalized).learn(64)
    with torch.inference_mode():
        evaluate_policy(model, model.env, 4, warn=False)
        model.env.reset()
        model.env.step(torch.zeros(4, 2))
    model.learn(64)


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_environments_in_inference_mode_and_with_gradients(name: str) -> None:
    """Nothing that is stored keeps the graph.

    Source: https://github.com/pytorch/rl/issues/2837
    """

    class Inference(Points):
        reset = torch.inference_mode()(Points.reset)
        step = torch.inference_mode()(Points.step)

    class Gradients(Points):
        weight = torch.nn.Parameter(torch.ones(()))

        def step(self, action: torch.Tensor) -> Any:
            observations, rewards, *flags, info = super().step(action)
            last = info["final_obs"] * self.weight
            return observations * self.weight, rewards * self.weight, *flags, {**info, "final_obs": last}

    expected = make_model(name, length=5).learn(64)
    for kind in (Inference, Gradients):
        env = GymVecEnv(kind(length=5), tensors=True)
        model = make_model(name, env=env).learn(64)
        assert_equal_weights(model, expected)
        buffer = model.rollout_buffer if name == "PPO" else model.replay_buffer
        stored = [model._last_obs, env._stepper._returns, *vars(buffer).values()]
        assert not any(part.requires_grad for part in stored if isinstance(part, torch.Tensor))


# -- GymVecEnv(tensors=True)


@pytest.mark.parametrize("part", ["observations", "rewards", "infos"])
def test_bfloat16_works_on_tensors_only(part: str) -> None:
    class Half(Points):
        def _observe(self) -> Any:
            found = super()._observe()
            return found.bfloat16() if part == "observations" else found

        def step(self, action: torch.Tensor) -> Any:
            observation, reward, *results, info = super().step(action)
            info["speed"] = observation[:, 0].bfloat16() if part == "infos" else observation[:, 0]
            return observation, reward.bfloat16() if part == "rewards" else reward, *results, info

    model = make_model("PPO", env=GymVecEnv(Half(length=3), tensors=True)).learn(64)
    assert model.num_timesteps == 64
    with pytest.raises(InvalidTypeError, match=r"torch.bfloat16(.|\n)*tensor.float\(\)(.|\n)*tensors=True"):
        make_model("PPO", sb3, GymVecEnv(Half(length=3))).learn(64)


class Reports(Points):
    """Points that report successes or episodes in another form, some in buffers that the next step overwrites."""

    def __init__(self, form: str, length: int = 5) -> None:
        super().__init__(length=length)
        self._form, self._episodes = form, 0
        self._success = torch.zeros(4)

    def step(self, action: torch.Tensor) -> Any:
        *results, info = super().step(action)
        success, done = info.pop("is_success"), results[2] | results[3]
        self._success.copy_(success)
        self._episodes += 1
        return *results, {
            **info,
            **{
                "mask": lambda: {"is_success": success, "_is_success": torch.arange(4) % 2 == 0},
                "buffer": lambda: {"is_success": self._success},
                "array": lambda: {"is_success": self._success.numpy() > 0},
                "list": lambda: {"is_success": success.tolist()},
                "final_info": lambda: {"final_info": [{"is_success": flag} if flag else {} for flag in done.tolist()]},
                "episode": lambda: {
                    "episode": {"r": torch.arange(4) + self._episodes, "l": torch.full((4,), self._episodes)},
                    "_episode": done & (torch.arange(4) > 0),
                },
                # ManiSkill's, with or without the return
                "r": lambda: {"episode": {"r": torch.arange(4), "l": torch.full((4,), 7)}},
                "success_once": lambda: {"episode": {"success_once": torch.arange(4)}},
            }[self._form](),
        }


@pytest.mark.parametrize("form", ["mask", "buffer", "array", "list", "final_info", "episode"])
def test_statistics_that_the_environment_reports_are_logged(form: str) -> None:
    """As with Stable Baselines3, also if RecordEpisodeStatistics is inside of a wrapper that scales rewards."""
    ours, _ = train_both("PPO", 64, lambda module: GymVecEnv(Reports(form), tensors=module is tensor))
    assert (len(ours.ep_success_buffer) > 0) == (form != "episode")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["r", "success_once"])
def test_episodes_of_the_environment_keep_their_keys(key: str) -> None:
    episodes = []
    for on in (True, False):
        env = GymVecEnv(Reports(key, length=2), tensors=on)
        env.seed(0)
        env.reset()
        infos = env.step(np.zeros((4, 2), np.float32))[3]
        episodes.append([info["episode"] for info in infos if "episode" in info])
        for episode in episodes[-1]:
            episode.pop("t", None)
    assert episodes[0] == episodes[1]
    assert [episode[key] for episode in episodes[0]] == [1, 3]
    assert episodes[0][0].keys() == {"r", "l", key}


def test_lost_last_observations_are_reported_at_the_log() -> None:
    env = GymVecEnv(Points(final_obs=False, length=3), tensors=True)
    with pytest.raises(EnvironmentOutputError, match="compute_final_obs"):
        make_model("PPO", env=env).learn(64)
    env.reset()
    steps = [env.step(torch.zeros(4, 2)) for _ in range(3)]
    with pytest.raises(EnvironmentOutputError, match="compute_final_obs"):
        steps[-1][3][0]


# -- refusals


def make_channels_last() -> Any:
    env = make_env(True)
    env.observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    return env


HER = {"replay_buffer_class": sb3.HerReplayBuffer}
# Environment, options of the model, and the error.
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (Points, {}, InvalidTypeError, r"GymVecEnv\(env, tensors=True\)"),
    (lambda: GymVecEnv(Points(), tensors="yes"), {}, InvalidArgumentError, "tensors='yes', expected True or False"),  # type: ignore[arg-type]
    (lambda: GymVecEnv(gym.make_vec("Pendulum-v1"), tensors=True), {}, InvalidArgumentError, "leave tensors out"),
    (make_channels_last, {}, InvalidArgumentError, r"permute\(0, 3, 1, 2\)"),
    (lambda: VecNormalize(make_env(True)), {}, InvalidTypeError, "TensorVecNormalize"),
    (lambda: TensorVecEnv(VecNormalize(make_env(False))), {}, InvalidTypeError, "TensorVecNormalize"),
    (lambda: VecMonitor(make_env(True)), {}, InvalidTypeError, "VecMonitor works on arrays"),
    (lambda: make_env(False), {}, InvalidArgumentError, r"GymVecEnv\(env, tensors=True\)"),
    (lambda: make_env(True, as_dict=True), {"n_steps": 3}, InvalidArgumentError, "n_steps=3 is not supported for Dict"),
    (lambda: make_env(True), {"optimize_memory_usage": True}, InvalidArgumentError, "optimize_memory_usage"),
    (lambda: make_env(True), HER, InvalidArgumentError, r"HerReplayBuffer stores arrays.* GymVecEnv\(env\)"),
]


@pytest.mark.filterwarnings("ignore:.*n_steps.*")
@pytest.mark.parametrize(("make", "options", "error", "said"), REFUSED)
def test_what_does_not_work_on_tensors_is_refused(
    make: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_model("SAC", env=make(), **options)


@pytest.mark.parametrize("kind", [sb3.PPO, sb3_contrib.RecurrentPPO, sb3_contrib.TQC])
def test_algorithms_on_arrays_are_refused_on_tensors(kind: Any) -> None:
    said = rf"{kind.__name__} works on arrays.* Leave out tensors=True.*from sb3_ext.tensor import A2C, DQN, PPO"
    for env in (make_env(True), make_env(True, normalized=True)):
        policy = "MlpLstmPolicy" if kind is sb3_contrib.RecurrentPPO else "MlpPolicy"
        model = without_logger(kind(policy, env, device="cpu"))
        with pytest.raises(InvalidTypeError, match=said):
            model.learn(64)


# -- files


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_a_loaded_model_that_a_callback_stops_at_its_first_step(name: str, tmp_path: Path) -> None:
    make_model(name).learn(64).save(tmp_path / "model.zip")
    model = getattr(tensor, name).load(tmp_path / "model.zip", make_env(True), force_reset=False)
    without_logger(model).learn(64, lambda *_: False, reset_num_timesteps=False)
    assert model.num_timesteps == 68


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("name", ["PPO", "A2C", "SAC", "TD3", "DQN"])
def test_files_are_read_by_both_modules(name: str, tmp_path: Path) -> None:
    """A model that is loaded and trained on has the same weights, whichever module wrote the file."""
    paths = {module: str(tmp_path / f"{module.__name__}.zip") for module in (tensor, sb3)}
    for module, path in paths.items():
        model = make_model(name, module).learn(80)
        model.save(path)
        if name in ("SAC", "TD3", "DQN"):
            model.save_replay_buffer(f"{path}.pkl")
    found = []
    for reader in (tensor, sb3):
        for path in paths.values():
            env = make_env(reader is tensor, discrete=name == "DQN")
            env.seed(3)
            model = without_logger(getattr(reader, name).load(path, env, device="cpu"))
            assert len(model.ep_info_buffer) > 0
            if name in ("SAC", "TD3", "DQN"):
                model.load_replay_buffer(f"{path}.pkl")
                assert isinstance(model.replay_buffer, TensorReplayBuffer) == (reader is tensor)
            torch.manual_seed(0)
            np.random.seed(0)
            model.action_space.seed(0)
            found.append(model.learn(80, reset_num_timesteps=False))
    for model in found[1:]:
        assert_equal_weights(found[0], model)
        assert model.num_timesteps == found[0].num_timesteps


def test_files_of_normalization_are_read_by_both_classes(tmp_path: Path) -> None:
    by_key = {"norm_obs_keys": ["velocity"]}
    for as_dict, options in ((False, True), (True, True), (False, {"norm_obs": False}), (True, by_key)):
        envs = [make_env(on, normalized=options, as_dict=as_dict) for on in (True, False)]
        for number, env in enumerate(envs):
            env.seed(0)
            env.reset()
            for _ in range(5):
                env.step(np.ones((4, 2), np.float32))
            env.save(str(tmp_path / f"{number}.pkl"))
        for number in range(2):
            for kind, on in ((TensorVecNormalize, True), (VecNormalize, False)):
                env = kind.load(str(tmp_path / f"{number}.pkl"), make_env(on, as_dict=as_dict))  # type: ignore[attr-defined]
                assert type(env) is kind
                env.training = False
                env.seed(1)
                found, original = env.reset(), env.old_obs if on else env.get_original_obs()
                expected = envs[1].normalize_obs(map_arrays(np.asarray, original))
                for key in found if as_dict else [...]:
                    np.testing.assert_array_equal(np.asarray(found[key]), expected[key])
                env.step(np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match="already initialized"):
        env.set_venv(envs[0].venv)


def test_normalized_rewards_and_observations_are_undone_as_by_vec_normalize() -> None:
    ours, theirs = (make_env(on, normalized=True) for on in (True, False))
    for env in (ours, theirs):
        env.seed(0)
        env.reset()
        env.step(np.ones((4, 2), np.float32))
    observations, rewards = theirs.get_original_obs(), theirs.get_original_reward()
    for name, values in (("unnormalize_obs", observations), ("unnormalize_reward", rewards)):
        expected = getattr(theirs, name)(values)
        for found in (getattr(ours, name)(values), getattr(ours, name)(torch.from_numpy(values)).numpy()):
            np.testing.assert_array_equal(found, expected, strict=True)


# -- callbacks, predictions


class Recorder(BaseCallback):
    """Callback that records infos of 30 steps, and the episode statistics that the algorithm has after rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[Any] = []
        self.found: list[Any] = []

    def _on_step(self) -> bool:
        assert {"infos", "dones", "rewards", "new_obs", "env"} <= self.locals.keys()
        self.infos += [info["episode"] for info in self.locals["infos"] if "episode" in info]
        return self.n_calls < 30

    def _on_rollout_end(self) -> None:
        episodes = [(info["r"], info["l"]) for info in self.model.ep_info_buffer]  # type: ignore[union-attr]
        self.found.append((episodes, list(self.model.ep_success_buffer), self.model._episode_num))  # type: ignore[arg-type]

    _on_training_end = _on_rollout_end


@pytest.mark.filterwarnings("ignore:rich is experimental", "ignore:Evaluation environment is not wrapped")
@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_callbacks_of_sb3_work(name: str, tmp_path: Path) -> None:
    model = make_model(name, normalized=True)
    options: Any = {"eval_freq": 15, "n_eval_episodes": 2, "best_model_save_path": str(tmp_path), "verbose": 0}
    evaluation = EvalCallback(VecNormalize(make_env(False), training=False), **options)
    saving = CheckpointCallback(20, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True)
    recorder = Recorder()
    model.learn(2000, [evaluation, saving, recorder, StopTrainingOnMaxEpisodes(1000)], progress_bar=True)
    assert model.num_timesteps == 120
    assert recorder.infos
    assert np.isfinite(evaluation.last_mean_reward)
    assert (tmp_path / "best_model.zip").exists()
    assert getattr(sb3, name).load(tmp_path / "rl_model_80_steps.zip", device="cpu").num_timesteps == 80
    VecNormalize.load(str(tmp_path / "rl_model_vecnormalize_80_steps.pkl"), make_env(False))


@pytest.mark.parametrize("on_arrays", [False, True])
def test_evaluation_environments_are_wrapped_like_training_environments(on_arrays: bool) -> None:
    rewards = []
    for module, kind in ((tensor, TensorVecNormalize), (sb3, VecNormalize)):

        def make(module: Any = module) -> Any:
            if on_arrays:
                return make_of_arrays(module, "Pendulum-v1", normalized=True)
            return make_env(module is tensor, normalized=True)

        inner = make().venv
        inner.seed(1)
        evaluation = EvalCallback(kind(inner, training=False), eval_freq=20, n_eval_episodes=2, verbose=0, warn=False)  # type: ignore[abstract]
        make_model("PPO", module, make()).learn(96, evaluation)
        rewards.append(evaluation.last_mean_reward)
    assert rewards[0] == rewards[1]
    assert np.isfinite(rewards[0])


@pytest.mark.parametrize("name", ["PPO", "SAC"])
@pytest.mark.parametrize("steps", [64, 2000])
def test_callbacks_see_the_episodes_of_a_rollout_at_its_end(name: str, steps: int) -> None:
    """Also at the end of training, after all steps or when a callback stops it."""
    found = []
    for module in (tensor, sb3):
        recorder = Recorder()
        make_model(name, module, length=5).learn(steps, recorder)
        found.append(recorder.found)
    assert found[0] == found[1]
    assert len(found[0][0][0]) > 0


@pytest.mark.parametrize("resets", [False, True])
def test_training_after_an_interrupt_counts_the_episodes_of_sb3(resets: bool) -> None:
    def interrupt(variables: Any, _: Any) -> bool:
        if variables["self"].num_timesteps == 120:
            raise KeyboardInterrupt
        return True

    found = []
    for module in (tensor, sb3):
        model = make_model("SAC", module, length=5, train_freq=16)
        with pytest.raises(KeyboardInterrupt):
            model.learn(2000, interrupt)
        model.learn(64, reset_num_timesteps=resets)
        found.append((model._episode_num, [info["r"] for info in model.ep_info_buffer]))
    assert found[0] == found[1]


def test_callbacks_see_normalized_last_observations_of_environments_on_arrays() -> None:
    found: list[Any] = []

    def record(variables: Any, _: Any) -> bool:
        infos = [info for info in variables["infos"] if "terminal_observation" in info]
        found[-1].extend(info["terminal_observation"].tolist() for info in infos)
        return True

    for module in (tensor, sb3):
        found.append([])
        make_model("SAC", module, make_of_arrays(module, "Pendulum-v1", normalized=True)).learn(630, record)
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_episodes_on_other_devices_are_read_at_the_log_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them after each step would wait for the device."""
    model = make_model("SAC", length=5, train_freq=1)
    reads: list[int] = []
    read = model._read_episodes
    monkeypatch.setattr(model, "_read_episodes", lambda: reads.append(model.num_timesteps) or read())
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    model.learn(80, log_interval=None)
    assert reads == [0, 80]  # before the first step, and at the end


@pytest.mark.parametrize("normalized", [False, True])
def test_evaluate_policy_works_on_both_kinds_of_environments(normalized: bool) -> None:
    model = make_model("PPO", normalized=normalized).learn(64)
    results = []
    for on_tensors in (True, False):
        env = make_env(on_tensors, normalized=normalized)
        if normalized:
            env.training, env.norm_reward = False, False
            env.obs_rms, env.ret_rms = model.env.obs_rms, model.env.ret_rms
        env.seed(5)
        results.append(evaluate_policy(model, env, 6, return_episode_rewards=True, warn=False))
    assert results[0] == results[1]


# -- buffers


def test_replay_buffer_takes_memory_when_it_is_written() -> None:
    """As that of Stable Baselines3, whose default size is one million."""
    box = spaces.Box(0, 255, (3, 84, 84), np.uint8)
    before = psutil.Process().memory_info().rss
    buffer = TensorReplayBuffer(20_000, box, spaces.Discrete(3), "cpu", n_envs=4)
    assert buffer.observations.nbytes > 400e6
    assert psutil.Process().memory_info().rss - before < 100e6
    with pytest.raises(OutOfMemoryError, match="Use buffer_size=10000000000"):
        TensorReplayBuffer(100_000_000_000, box, spaces.Discrete(3), "cpu", n_envs=4)


def test_a_step_with_arrays_returns_those_of_gym_vec_env() -> None:
    start, found = time.time(), []
    for on_tensors in (True, False):
        env = make_env(on_tensors, as_dict=True)
        env.seed(0)
        steps = [map_arrays(np.asarray, env.reset())]
        for _ in range(14):
            *arrays, infos = env.step(np.full((4, 2), 0.5, np.float32))
            infos = [dict(info) for info in infos]
            times = [info["episode"].pop("t") for info in infos if "episode" in info]
            assert all(0 < seconds < time.time() - start for seconds in times)
            steps.append([*arrays, infos])
        found.append(steps)
    assert any(
        info.keys() >= {"episode", "is_success", "terminal_observation"} for step in found[0][1:] for info in step[3]
    )
    assert_equal(*found)


def test_predict_accepts_arrays_and_tensors() -> None:
    model = make_model("SAC", as_dict=True)
    observation = {key: torch.ones(4, 4) for key in ("position", "velocity")}
    arrays = {key: part.numpy() for key, part in observation.items()}
    found, expected = (model.predict(each, deterministic=True)[0] for each in (observation, arrays))
    np.testing.assert_array_equal(found, expected)

"""Tests of BraxVectorEnv, against single environments stepped with the same keys."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError
from rl_ext_core.vector.brax import BraxVectorEnv

jax = pytest.importorskip("jax", reason="JAX is in .venv-jax alone; make it with scripts/make_jax_venv.sh")
jnp, struct = jax.numpy, pytest.importorskip("flax.struct")
jax.config.update("jax_disable_most_optimizations", True)  # compilation takes most of the time of these tests
NUM_ENVS, EPISODE_LENGTH = 4, 12


@struct.dataclass
class Data:
    """Simulator state of the walk."""

    position: Any


@struct.dataclass
class State:
    """State of the walk, with the fields of Brax's State."""

    data: Data
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any

    @property
    def pipeline_state(self) -> Any:
        """Raise AttributeError, as MuJoCo Playground's states do."""
        raise AttributeError  # as in MuJoCo Playground


class Walk:
    """Walk on a line that ends outside [-1, 1], or after ``episode_length`` steps."""

    action_size = 2
    dt = 0.02

    def __init__(self, *, observation: str = "dict", episode_length: int | None = EPISODE_LENGTH) -> None:
        self.observation, self.episode_length = observation, episode_length

    def observe(self, position: Any, steps: Any) -> Any:
        """Return the observation as an array, or as a dict with an image."""
        if self.observation == "array":
            return jnp.stack([position, steps.astype(jnp.float32)])
        image = jnp.full((3, 2, 1), jnp.clip(100 + 100 * position, 0, 255), jnp.uint8)
        return {"image": image, "body": {"position": position, "early": steps < 5}}

    def reset(self, key: Any) -> State:
        key, now = jax.random.split(key)
        position = jax.random.uniform(now, (), minval=-0.5, maxval=0.5)
        steps = jnp.zeros((), jnp.int32)
        info = {
            "rng": key,
            "typed_rng": jax.random.key(3),
            "data": Data(position),
            "steps": steps,
            "sums": {"distance": jnp.zeros(())},
        }
        if self.episode_length:
            info["truncation"] = jnp.zeros(())
        # Python floats make weak types.
        return State(Data(position), self.observe(position, steps), 0.0, 0.0, {"speed": jnp.zeros(())}, info)

    def step(self, state: State, action: Any) -> State:
        info = state.info
        key, now = jax.random.split(info["rng"])
        speed = action.sum() * 0.3 + 0.1 * jax.random.normal(now)
        position, steps = state.data.position + speed, info["steps"] + 1
        done = (jnp.abs(position) > 1).astype(jnp.float32)
        info.update(rng=key, data=Data(position), steps=steps)
        info["sums"]["distance"] += jnp.abs(speed)
        if self.episode_length:
            over = steps >= self.episode_length
            info["truncation"] = jnp.where(over, 1 - done, 0.0)
            done = jnp.where(over, 1.0, done)
        return State(Data(position), self.observe(position, steps), position * 1.0, done, {"speed": speed}, info)

    def render(self, states: list[State]) -> list[Any]:
        return [np.full((4, 4, 3), state.data.position) for state in states]


walk, dict_walk = Walk(observation="array"), Walk()
compiled = cache(BraxVectorEnv)


def vectorized(env: Any, num_envs: int = NUM_ENVS) -> BraxVectorEnv:
    """Return a BraxVectorEnv before its first reset.

    BraxVectorEnvs of the same environment share their compiled functions.
    """
    return copy.copy(compiled(env, num_envs))


class Wrapper:
    """Wrapper that forwards all attributes, as Brax's wrappers do."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class ByHand:
    """Single environments that are stepped and reset one by one, as an oracle."""

    def __init__(self, env: Any, num_envs: int, seed: int) -> None:
        self.reset_one, self.step_one, self.num_envs = jax.jit(env.reset), jax.jit(env.step), num_envs
        self.key = jax.random.PRNGKey(seed)
        self.states = self.reset()

    def reset(self) -> list[Any]:
        self.key, key = jax.random.split(self.key)
        return [self.reset_one(one) for one in jax.random.split(key, self.num_envs)]

    def step(self, actions: Any) -> tuple[list[Any], list[Any]]:
        """Return the states before and after resets."""
        last = [self.step_one(state, action) for state, action in zip(self.states, actions, strict=True)]
        fresh = self.reset()
        self.states = [new if old.done else old for new, old in zip(fresh, last, strict=True)]
        return last, self.states


def infos_of(state: Any) -> Any:
    """Return the metrics and infos of a state that BraxVectorEnv returns too."""
    known = ("steps", "sums", "truncation", "episode_done", "episode_metrics", "time_out")
    return {**state.metrics, **{key: state.info[key] for key in known if key in state.info}}


def assert_rows(batch: Any, rows: list[Any]) -> None:
    """Assert that a batch of JAX arrays equals these single results."""
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for found, right in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, jax.Array)
        assert found.dtype == right.dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), right.astype(np.float64), rtol=1e-4, atol=1e-5)


def compare(env: Any, *, steps: int) -> tuple[int, int]:
    """Compare all that resets and steps return, and count terminated and truncated episodes."""
    envs = BraxVectorEnv(env, NUM_ENVS)
    observation, info = envs.reset(seed=7)
    right = ByHand(env, NUM_ENVS, 7)
    assert_rows(observation, [state.obs for state in right.states])
    assert_rows(info, [infos_of(state) for state in right.states])
    envs.action_space.seed(1)
    counts = np.zeros(2, int)
    for _ in range(steps):
        actions = envs.action_space.sample()
        observation, reward, terminated, truncated, info = envs.step(actions)
        last, following = right.step(actions)
        done = np.array([bool(state.done) for state in last])
        time_outs = np.array([bool(state.info.get("truncation", 0)) for state in last])
        assert_rows(observation, [state.obs for state in following])
        assert_rows(reward, [state.reward for state in last])
        np.testing.assert_array_equal(terminated, done & ~time_outs)
        np.testing.assert_array_equal(truncated, done & time_outs)
        assert terminated.dtype == truncated.dtype == bool
        assert_rows(info.pop("final_obs"), [state.obs for state in last])
        assert_rows(info.pop("final_info"), [infos_of(state) for state in last])
        for mask in (info.pop("_final_obs"), info.pop("_final_info")):
            np.testing.assert_array_equal(mask, done)
        assert_rows(info, [infos_of(state) for state in following])
        counts += [terminated.sum(), truncated.sum()]
    assert envs._step._cache_size() == envs._reset._cache_size() == 1
    return tuple(counts)


@pytest.mark.parametrize(
    "env",
    [walk, dict_walk, Walk(observation="array", episode_length=None)],
    ids=["array", "dict", "no truncation"],
)
def test_steps_match_single_environments(env: Any) -> None:
    terminated, truncated = compare(env, steps=60)
    assert terminated > 5
    assert (truncated > 5) == (env.episode_length is not None)


@pytest.mark.parametrize(("mode", "action_repeat"), [("ndarray", 2), ("dict_pixels_state", 1)])
def test_brax_environment_matches_single_environments(mode: str, action_repeat: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Brax warns that it is not developed any more
        envs = pytest.importorskip("brax.envs", reason="Brax is in .venv-jax alone")
    env = envs.create("fast", episode_length=8, action_repeat=action_repeat, auto_reset=False, obs_mode=mode)
    assert compare(env, steps=20) == (0, NUM_ENVS * (20 * action_repeat // 8))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_brax_physics_matches_single_environments() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envs = pytest.importorskip("brax.envs", reason="Brax is in .venv-jax alone")
        # The other backends take JAX twice as long to compile.
        env = envs.create("inverted_pendulum", backend="spring", episode_length=20, auto_reset=False)
    terminated, truncated = compare(env, steps=60)
    assert terminated > 0
    assert truncated > 0


def test_randomized_domains_match_single_environments() -> None:
    training = pytest.importorskip("brax.envs.wrappers.training", reason="Brax is in .venv-jax alone")

    class Slope(Walk):
        """Walk whose steps depend on the randomized parameter ``sys``."""

        sys = jnp.zeros(())

        @property
        def unwrapped(self) -> Any:
            return self

        def step(self, state: State, action: Any) -> State:
            state = super().step(state, action)
            return state.replace(reward=state.reward + self.sys)

    slopes = Slope(observation="array")
    randomized = training.DomainRandomizationVmapWrapper(slopes, lambda _: (jnp.arange(4.0), 0))
    envs, plain = BraxVectorEnv(randomized, 4), vectorized(walk, 4)
    for each in (envs, plain):
        each.reset(seed=3)
    for _ in range(20):
        actions = plain.action_space.sample()
        found, right = envs.step(actions), plain.step(actions)
        np.testing.assert_allclose(found[1], right[1] + np.arange(4.0), rtol=1e-5)
        np.testing.assert_array_equal(found[2], right[2])


def test_spaces_and_metadata_match_the_environment() -> None:
    envs = BraxVectorEnv(Walk(), 3)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_action_space == spaces.Box(-1, 1, (2,), np.float32)
    assert envs.single_observation_space == spaces.Dict(
        image=spaces.Box(0, 255, (3, 2, 1), np.uint8),
        body=spaces.Dict(early=spaces.Box(0, 1, (), np.bool_), position=spaces.Box(-np.inf, np.inf, (), np.float32)),
    )
    assert envs.action_space.shape == (3, 2)
    observation, _ = envs.reset(seed=0)
    assert jax.tree.map(np.asarray, observation) in envs.observation_space


def test_resets_run_only_if_an_episode_ends() -> None:
    resets: list[int] = []

    class Counting(Walk):
        """Walk that records each reset."""

        def reset(self, key: Any) -> State:
            jax.debug.callback(lambda: resets.append(1))
            return super().reset(key)

    envs = BraxVectorEnv(Counting(episode_length=4), 3)
    envs.reset(seed=0)
    for _ in range(8):
        jax.effects_barrier()
        resets.clear()
        _, _, terminated, truncated, _ = envs.step(np.zeros((3, 2)))
        jax.effects_barrier()
        assert bool(resets) == bool((terminated | truncated).any())


def test_reset_seeds_determine_episodes() -> None:
    def first(envs: BraxVectorEnv, **kwargs: Any) -> list[float]:
        """Return the first observations after a reset with these arguments."""
        observation: Any = envs.reset(**kwargs)[0]
        return observation[:, 0].tolist()

    one, other = vectorized(walk), vectorized(walk)
    assert first(one, seed=1) == first(other, seed=1)
    assert first(one) == first(other) != first(one, seed=1)
    assert len(set(first(one))) == NUM_ENVS
    unseeded = [first(vectorized(walk)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_reset_mask_resets_some_environments() -> None:
    envs = vectorized(walk, 4)
    envs.reset(seed=0)
    before = envs.step(np.zeros((4, 2)))[0]
    mask = np.array([True, False, False, True])
    for given in (mask, jnp.array(mask)):
        after, info = envs.reset(options={"reset_mask": given})
        np.testing.assert_array_equal(after[:, 1], [0, 1, 1, 0])
        np.testing.assert_array_equal(info["steps"], [0, 1, 1, 0])
        np.testing.assert_array_equal(after[1:3], before[1:3])
        assert (after[mask, 0] != before[mask, 0]).all()
        before = after
    assert envs._reset_some._cache_size() == 1
    for wrong in (np.ones(3, bool), np.ones(4), [1, 0, 0, 1]):
        with pytest.raises(InvalidArgumentError, match="expected 4 booleans"):
            envs.reset(options={"reset_mask": wrong})
    with pytest.raises(InvalidArgumentError, match="were not reset"):
        vectorized(walk, 4).reset(options={"reset_mask": mask})


def test_actions_may_be_overwritten_after_a_step() -> None:
    envs_with_edits, right = vectorized(walk, 64), vectorized(walk, 64)
    for envs in (envs_with_edits, right):
        envs.reset(seed=0)
    for _ in range(20):
        actions = np.full((64, 2), 0.01, np.float32)
        found = envs_with_edits.step(actions)[0]
        actions[:] = np.nan
        np.testing.assert_array_equal(found, right.step(jnp.full((64, 2), 0.01))[0])


def test_invalid_calls_are_rejected() -> None:
    envs = vectorized(walk, 4)
    with pytest.raises(InvalidArgumentError, match=r"Use envs\.reset\(\)"):
        envs.step(np.zeros((4, 2)))
    envs.reset()
    for wrong in ((4,), (4, 1), (1, 2)):
        with pytest.raises(InvalidArgumentError, match=r"expected \(4, 2\)"):
            envs.step(np.zeros(wrong))
    assert envs.render() is None


def named(name: str) -> Callable[[Any], Any]:
    """Return a wrapper class with this name."""
    return type(name, (Wrapper,), {})


@pytest.mark.parametrize(
    ("wrapper", "match"),
    [
        ("AutoResetWrapper", "last observation.*auto_reset=False"),
        ("BraxAutoResetWrapper", r"last observation.*EpisodeWrapper\(registry"),
        ("VmapWrapper", "batch axis"),
    ],
)
def test_wrappers_that_reset_or_vectorize_are_rejected(wrapper: str, match: str) -> None:
    derived = type("Derived", (named(wrapper),), {})
    for env in (named(wrapper)(Walk()), Wrapper(named(wrapper)(Walk())), derived(Walk())):
        with pytest.raises(InvalidArgumentError, match=match):
            BraxVectorEnv(env, 2)
    assert BraxVectorEnv(named("EvalWrapper")(Walk()), 2).num_envs == 2


def test_invalid_arguments_are_rejected() -> None:
    for env in ("ant", object(), spaces.Discrete(2)):
        with pytest.raises(InvalidTypeError, match=r"brax\.envs\.create"):
            BraxVectorEnv(env, 2)
    for count in (0, -1, 2.0, True, "2"):
        with pytest.raises(InvalidArgumentError, match="positive int"):
            BraxVectorEnv(Walk(), count)
    with pytest.raises(InvalidArgumentError, match="rgb_array"):
        BraxVectorEnv(Walk(), 2, render_mode="human")


def test_render_returns_an_image_of_each_environment() -> None:
    envs = BraxVectorEnv(walk, 4, render_mode="rgb_array")
    assert envs.metadata["render_fps"] == 50
    observation, _ = envs.reset(seed=0)
    images = envs.render()
    assert images is not None
    np.testing.assert_allclose([image[0, 0, 0] for image in images], observation[:, 0])


def test_gymnasium_wrappers_work() -> None:
    import torch
    from gymnasium.wrappers.vector import JaxToNumpy, JaxToTorch

    plain, arrays, tensors = (vectorized(dict_walk, 4) for _ in range(3))
    numpy_env, torch_env = RecordEpisodeStatistics(JaxToNumpy(arrays)), JaxToTorch(tensors)
    each: list[Any] = [plain, numpy_env, torch_env]
    for envs in each:
        envs.reset(seed=0)
    returns, lengths = np.zeros(4), np.zeros(4, int)
    for _ in range(30):
        actions = plain.action_space.sample()
        right, found = plain.step(actions), numpy_env.step(actions)
        returns, lengths = returns + np.asarray(right[1]), lengths + 1
        done = np.asarray(right[2] | right[3])
        if done.any():
            episode = found[4].pop("episode")
            found[4].pop("_episode")
            np.testing.assert_allclose(episode["r"][done], returns[done], rtol=1e-5)
            np.testing.assert_array_equal(episode["l"][done], lengths[done])
            returns[done], lengths[done] = 0, 0
        for result, kind in ((found, np.ndarray), (torch_env.step(torch.from_numpy(actions)), torch.Tensor)):
            assert jax.tree.structure(result) == jax.tree.structure(right)
            for leaf, same in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
                assert isinstance(leaf, kind)
                np.testing.assert_array_equal(leaf, same)


def test_steps_read_no_values_on_the_host() -> None:
    envs = vectorized(walk, 4)
    envs.reset(seed=0)

    def two_steps(actions: Any) -> Any:
        """Take two steps, and return the results of the second one."""
        envs.step(actions)  # from here on, the state has no values either
        return envs.step(actions)

    # Reading a value raises, since JAX traces the function without any.
    result = jax.eval_shape(two_steps, jnp.zeros((4, 2)))
    assert result[4]["_final_obs"].shape == (4,)


def test_jax_is_imported_only_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, rl_ext_core.vector.brax; assert not {'jax', 'brax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependencyError, match="pip install jax"):
        BraxVectorEnv(Walk(), 2)

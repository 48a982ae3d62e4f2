"""Brax and MuJoCo Playground environments as vectorized environments of gymnasium.

Source: ``brax/envs/wrappers/training.py`` (Brax 0.14), where ``EpisodeWrapper`` sets ``info["truncation"]``, and
``mujoco_playground/_src/wrapper.py`` (0.2). Training code of both libraries sends actions in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, MissingDependencyError

__all__ = ["BraxVectorEnv"]


class BraxVectorEnv(VectorEnv[Any, Any, Any]):
    """Vectorized environment of a Brax or MuJoCo Playground environment, compiled by JAX.

    A step that ends episodes resets these environments to new random states, and returns the last observations in
    ``info["final_obs"]``. All values are JAX arrays and stay on JAX's device::

        envs = BraxVectorEnv(brax.envs.create("ant", episode_length=1000, auto_reset=False), 2048)

    ``EpisodeWrapper`` truncates episodes. ``brax.envs.create`` adds it, MuJoCo Playground does not::

        env = EpisodeWrapper(mujoco_playground.registry.load("CartpoleBalance"), episode_length=1000, action_repeat=1)
        envs = BraxVectorEnv(env, 2048)

    :param env: Single environment. Wrappers that randomize domains, and vectorize it by themselves, are allowed.
    :param num_envs: int, number of environments.
    :param render_mode: str, ``"rgb_array"`` makes :meth:`render` return images; default None.
    :raises InvalidTypeError: If ``env`` is not an environment of Brax or MuJoCo Playground.
    :raises InvalidArgumentError: If ``num_envs`` is not positive, ``render_mode`` is unknown, or ``env`` contains
        ``AutoResetWrapper`` or ``VmapWrapper``.
    :raises MissingDependencyError: If JAX is not installed.
    """

    def __init__(self, env: Any, num_envs: int, *, render_mode: str | None = None) -> None:
        try:
            import jax
        except ImportError:
            text = "BraxVectorEnv needs the package 'jax', which is not installed. Use:\n    pip install jax"
            raise MissingDependencyError(text, name="jax") from None
        _check_arguments(env, num_envs, render_mode)
        self._env, self.num_envs, self.render_mode = env, int(num_envs), render_mode
        self._key = key = jax.random.PRNGKey(0)  # until the first reset
        self._key_shape = key.shape
        self._state: Any = None
        self._reset, self._reset_some, self._step = self._compile()
        self.single_observation_space = _space(jax.eval_shape(self._reset, key).obs)
        self.single_action_space = spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
        if render_mode is not None:
            self.metadata["render_fps"] = round(1 / (float(env.dt) * getattr(env, "action_repeat", 1)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments.

        :param seed: int, seed of all environments. If None, the random numbers continue; the first reset draws a seed.
        :param options: dict, ``{"reset_mask": (num_envs,) bool}`` resets some environments; default: all.
        :return: Observations, ``(num_envs, ...)`` each, and the numeric entries of ``state.metrics`` and
            ``state.info`` that have one row per environment, except random keys.
        :raises InvalidArgumentError: If ``reset_mask`` has another dtype or shape, or is used in the first reset.
        """
        import jax

        mask = (options or {}).get("reset_mask")
        if mask is not None and (np.shape(mask) != (self.num_envs,) or np.asarray(mask).dtype != bool):
            raise InvalidArgumentError(
                f"`options['reset_mask']`={mask}: expected {self.num_envs} booleans. Use numpy.zeros({self.num_envs}, "
                "bool), with True where an environment is to be reset"
            )
        state = None if mask is None else self._require_state()
        super().reset(seed=seed)
        if seed is not None or self._state is None:
            self._key = jax.random.PRNGKey(int(self.np_random.integers(1 << 31)) if seed is None else seed)
        self._key, key = jax.random.split(self._key)
        self._state = self._reset(key) if mask is None else self._reset_some(state, key, jax.numpy.array(mask))
        return self._state.obs, self._infos(self._state)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments, and reset those whose episodes end.

        :param actions: ``(num_envs, action_size)`` numbers in [-1, 1], of JAX or NumPy.
        :return: Observations, ``(num_envs, ...)`` each; rewards, ``(num_envs,)`` float32; terminated and truncated,
            ``(num_envs,)`` bool; infos as in :meth:`reset`. ``final_obs`` and ``final_info`` are from before the
            resets; ``_final_obs`` and ``_final_info`` mark ended episodes. All four are present in every step, because
            omitting them would require waiting for the device.
        :raises InvalidArgumentError: If actions have another shape, or :meth:`reset` was not called.
        """
        import jax

        state = self._require_state()
        actions = jax.numpy.array(actions, np.float32)  # copied: JAX may read NumPy's memory after this method returns
        if actions.shape != self.action_space.shape:
            raise InvalidArgumentError(f"`actions` have shape {actions.shape}: expected {self.action_space.shape}")
        self._state, self._key, reward, terminated, truncated, final = self._step(state, self._key, actions)
        return self._state.obs, reward, terminated, truncated, {**self._infos(self._state), **final}

    def render(self) -> tuple[Any, ...] | None:
        """Render each environment.

        :return: an image, ``(240, 320, 3)`` uint8, of each environment; None if ``render_mode`` is None.
        """
        import jax

        if self.render_mode is None:
            return None
        state = self._require_state()
        state = jax.device_get(getattr(state, "pipeline_state", state))  # Playground's environments take all of it
        each = [jax.tree.map(lambda leaf, row=row: leaf[row], state) for row in range(self.num_envs)]
        return tuple(self._env.render(each))

    def _require_state(self) -> Any:
        """Return the state of the environments, or raise if they were not reset."""
        if self._state is None:
            raise InvalidArgumentError("the environments were not reset: expected a reset of all. Use envs.reset()")
        return self._state

    def _compile(self) -> tuple[Any, Any, Any]:
        """Return the compiled functions for reset, partial reset and step.

        JAX compiles each once, because no shape depends on how many episodes end.
        """
        import jax

        env, num_envs = self._env, self.num_envs
        # These wrappers vectorize by themselves, because models differ.
        is_batched = any(name.endswith("DomainRandomizationVmapWrapper") for name in _class_names(env))

        def run(function: Any, *args: Any) -> Any:
            """Call a function for all environments, and return the state."""
            state = (function if is_batched else jax.vmap(function))(*args)
            # A state with weak types would be compiled separately.
            return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x, state)

        def reset_some(state: Any, key: Any, rows: Any) -> Any:
            """Return the state after resetting the environments of a mask."""

            def choose(new: Any, old: Any) -> Any:
                """Return ``new`` in the rows to reset, and ``old`` in the other rows."""
                # MuJoCo Warp stores contacts of all environments in one array, which the next step computes again.
                is_batch = new.shape[:1] == (num_envs,)
                return jax.numpy.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old) if is_batch else old

            return jax.tree.map(choose, reset(key), state)

        def step(state: Any, key: Any, actions: Any) -> tuple[Any, ...]:
            """Step all environments, and reset those whose episodes end."""
            last = run(env.step, state, actions)
            done = last.done.astype(bool)
            truncated = done & last.info.get("truncation", jax.numpy.zeros_like(done)).astype(bool)
            key, reset_key = jax.random.split(key)
            state = jax.lax.cond(done.any(), reset_some, lambda state, *_: state, last, reset_key, done)
            final = {"final_obs": last.obs, "_final_obs": done, "final_info": self._infos(last), "_final_info": done}
            return state, key, last.reward, done & ~truncated, truncated, final

        reset = jax.jit(lambda key: run(env.reset, jax.random.split(key, num_envs)))
        return reset, jax.jit(reset_some), jax.jit(step)

    def _infos(self, state: Any) -> dict[str, Any]:
        """Return the state's metrics and infos that have a value for each environment."""

        def numbers(value: Any) -> Any:
            """Return arrays with a row per environment, except random keys; None for others."""
            if isinstance(value, Mapping):
                parts = {key: numbers(part) for key, part in value.items()}
                return {key: part for key, part in parts.items() if part is not None}
            if getattr(value, "shape", ())[:1] != (self.num_envs,) or not isinstance(value.dtype, np.dtype):
                return None
            return None if value.dtype == np.uint32 and value.shape[1:] == self._key_shape else value

        found: dict[str, Any] = numbers({**state.metrics, **state.info})
        return found


def _check_arguments(env: Any, num_envs: Any, render_mode: Any) -> None:
    """Raise if an argument of :class:`BraxVectorEnv` is invalid."""
    if not all(hasattr(env, name) for name in ("reset", "step", "action_size")):
        raise InvalidTypeError(
            f"`env` is a {type(env).__name__}: expected an environment of Brax or MuJoCo Playground. Use "
            'BraxVectorEnv(brax.envs.create("ant", auto_reset=False), 16)'
        )
    if not isinstance(num_envs, int | np.integer) or isinstance(num_envs, bool) or num_envs < 1:
        raise InvalidArgumentError(f"`num_envs={num_envs!r}`: expected a positive int. Use num_envs=16")
    if render_mode not in (None, "rgb_array"):
        raise InvalidArgumentError(f"`render_mode={render_mode!r}`: expected None or 'rgb_array'. Use 'rgb_array'")
    for name, effect in (("AutoResetWrapper", "discards last observations"), ("VmapWrapper", "adds a batch axis")):
        if {name, f"Brax{name}"} & _class_names(env):
            raise InvalidArgumentError(
                f"`env` contains {name}, which {effect}: expected a single environment that does not reset itself. Use "
                "brax.envs.create(..., auto_reset=False), or EpisodeWrapper(registry.load(...), 1000, 1) for MuJoCo "
                "Playground"
            )


def _class_names(env: Any) -> set[str]:
    """Return the names of the classes and base classes of an environment and its wrappers."""
    names: set[str] = set()
    while env is not None:
        names.update(kind.__name__ for kind in type(env).__mro__)
        env = getattr(env, "__dict__", {}).get("env")
    return names


def _space(observation: Any) -> spaces.Space[Any]:
    """Return the space of one environment's observations.

    :param observation: shapes and dtypes of the observations of all environments
    """
    if isinstance(observation, Mapping):
        return spaces.Dict({key: _space(part) for key, part in observation.items()})
    dtype, low, high = np.dtype(observation.dtype), -np.inf, np.inf
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, observation.shape[1:], dtype.type)

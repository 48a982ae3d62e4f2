"""Gymnasium environments that workers of a ``ParallelEnv`` step without TorchRL."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.envs import GymEnv as UpstreamGymEnv
from torchrl.envs import GymWrapper as UpstreamGymWrapper

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.environments import FrameSkip, is_plain
from torchrl_ext._compat import HAS_WRAPPER
from torchrl_ext.factories import adapt, read_metadata

if HAS_WRAPPER:
    from torchrl_ext.gym import GymEnv, GymWrapper
else:  # TorchRL steps all environments in the workers
    from torchrl.envs import GymEnv, GymWrapper  # type: ignore[no-redef]

__all__ = ["GymBase", "GymSource", "GymWrapper", "describe", "find_gym_source", "to_worker_env"]

_WRAPPERS = (GymWrapper, GymEnv, UpstreamGymWrapper, UpstreamGymEnv)  # subclasses may override methods
# Attributes of wrappers that are compared otherwise, carried by a source, or found again at the first use.
_IGNORED = {
    *("_input_spec", "_output_spec", "_options", "_env", "frame_skip", "wrapper_frame_skip", "from_pixels"),
    *("pixels_only", "_constructor_kwargs", "_cache", "_cache_in_keys", "_engine", "_last_engine", "_single"),
    *("is_closed", "_seed_calls_reset", "_detected_env_type", "_rl_ext_record", "_validated", "_inplace_update"),
}
# Options of a GymWrapper that is built without options.
_DEFAULTS = {
    **dict.fromkeys(("clip_actions", "autoreset_mode", "finite_horizon", "device")),
    **{"copy": True, "missing_final_obs": "nan", "categorical_action_encoding": False},
}


@dataclasses.dataclass(frozen=True)
class GymSource:
    """Gymnasium environment that workers step without TorchRL.

    :ivar spaces: its observation space and action space
    :ivar options: arguments of ``GymWrapper`` for the parent process
    :ivar from_pixels: whether observations without keys are pixels
    :ivar frame_skip: number of steps per action, which workers take
    """

    spaces: tuple[Any, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    from_pixels: bool = False
    frame_skip: int = 1


class GymBase(GymWrapper):
    """Wrapper around a pool of gymnasium environments, or around one of them."""

    def __init__(self, env: Any, source: GymSource, device: torch.device | None = None) -> None:
        self.__dict__["_source_from_pixels"] = source.from_pixels
        options = {"device": torch.device("cpu"), **source.options, "copy": True}  # the workers write to shared memory
        if device is not None:
            options["device"] = device
        super().__init__(env, env_type="numpy", **options)
        self.__dict__["frame_skip"] = source.frame_skip  # the workers skip frames

    def _build_env(self, env: Any, **_: Any) -> Any:
        self.batch_size, self.pixels_only = self._get_batch_size(env), True
        self.__dict__["from_pixels"] = self.__dict__["_source_from_pixels"]  # the workers render
        return env

    def _make_specs(self, env: Any, batch_size: Any = None) -> None:
        super()._make_specs(env, batch_size)
        if self.device is None:  # TorchRL's specs have a device even then
            for spec in (self.input_spec, self.output_spec):
                for key, part in list(spec.items()):
                    spec[key] = part.to("cpu")


def find_gym_source(environment: Any) -> GymSource | None:
    """Return what workers need to step an environment without TorchRL; None if that is not possible.

    A wrapper of TorchRL is possible if it is like a new one. What was set by hand would get lost.
    """
    if is_plain(environment):
        return GymSource((environment.observation_space, environment.action_space))
    if type(environment) not in _WRAPPERS or environment.batch_size or not HAS_WRAPPER:
        return None
    wrapped, own = environment._env, vars(environment)
    options = {name: value for name, value in own.get("_options", {}).items() if name != "trust_env_type"}
    frameworks = {options.pop("env_type", "auto"), own.get("_detected_env_type")}
    if frameworks & {"torch", "jax"} or environment.frame_skip != environment.wrapper_frame_skip:
        return None
    if not is_plain(wrapped):
        return None
    options |= {"device": environment.device, "categorical_action_encoding": environment._categorical_action_encoding}
    spaces = wrapped.observation_space, wrapped.action_space
    source = GymSource(spaces, options, environment.from_pixels, environment.wrapper_frame_skip)
    fresh = GymBase(wrapped, source)
    fresh.is_closed = True  # otherwise its end closes the user's environment
    return source if _is_like(environment, fresh) else None


def _is_like(environment: EnvBase, fresh: EnvBase) -> bool:
    """Return whether specs, attributes, hooks and parts of an environment are those of a new one."""
    for name in ("input_spec", "output_spec"):
        if getattr(environment, name).to("cpu") != getattr(fresh, name).to("cpu"):
            return False
    other = vars(fresh)
    for name, value in vars(environment).items():
        if isinstance(value, types.MethodType) and value.__self__ is environment:
            if value.__func__ is not getattr(type(environment), name, None):
                return False
        elif name not in _IGNORED:
            try:
                if name not in other or type(value) is not type(other[name]) or not bool(value == other[name]):
                    return False
            except Exception:  # values of the user may raise anything
                return False
    return True


def describe(environment: Any) -> Any:
    """Return the :class:`GymSource` of an environment, or the metadata of one that needs TorchRL in the worker."""
    return find_gym_source(environment) or read_metadata(adapt(environment))


def to_worker_env(environment: Any, source: GymSource) -> Any:
    """Return the gymnasium environment that a worker steps.

    :param source: what the parent process expects
    :raises InvalidArgumentError: If the environment has other options, or was changed so that TorchRL has to step it.
    """
    found = find_gym_source(environment)
    parts = [(entry.from_pixels, {**_DEFAULTS, **entry.options}) for entry in (source, found) if entry is not None]
    if found is None or parts[0] != parts[1]:
        raise InvalidArgumentError(
            f"this worker's environment is {environment} with {found and found.options}, and the first one has "
            f"{source.options}: expected the same options and specs in all workers. Pass a function for each worker: "
            "ParallelEnv(2, [make_first, make_second])"
        )
    return environment._env if found.frame_skip == 1 else FrameSkip(environment._env, found.frame_skip)

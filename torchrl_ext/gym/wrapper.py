"""``GymWrapper`` and ``GymEnv`` for NumPy, torch and JAX environments."""

from __future__ import annotations

import copy as copies
from functools import partial
from typing import Any, Literal

import gymnasium
import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, default_info_dict_reader
from torchrl.envs.libs.gym import GymEnv as UpstreamGymEnv
from torchrl.envs.libs.gym import GymWrapper as UpstreamGymWrapper

from rl_ext_core._values import copy_output
from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.array_frameworks import framework_of
from rl_ext_core.vector.autoreset import require_synchronous
from rl_ext_core.vector.spaces import device_of
from rl_ext_core.vector.stepper import RESET_RESULT, check_result_length, num_envs_of
from torchrl_ext._compat import HAS_FAST_PATH, new_tensordict
from torchrl_ext.gym.engine import Engine, refuse_frame_skip
from torchrl_ext.gym.infos import numbers_for_reader
from torchrl_ext.gym.specs import SingleSpaces, is_continuous, is_ragged, limit_actions, make_batched_specs

__all__ = ["GymEnv", "GymWrapper"]

_StepMixin: Any
if HAS_FAST_PATH:
    from torchrl_ext.gym.fast_path import FastStepMixin as _StepMixin
else:
    from torchrl_ext._compat import BaseStepMixin as _StepMixin

# Values of options that have a fixed set of them. The first is the default.
_CHOICES = {
    "env_type": ("auto", "numpy", "torch", "jax"),
    "copy": (True, False),
    "missing_final_obs": ("nan", "previous", "error"),
    "finite_horizon": (None, True, False),
}


class _GymWrapperMeta(type(UpstreamGymWrapper)):  # type: ignore[misc]
    """Metaclass that skips TorchRL's transform around vectorized environments.

    :ivar make_parallel: class for ``num_workers=``, which imports this module
    """

    make_parallel: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "missing_obs_value" in kwargs:
            raise InvalidArgumentError(
                "missing_obs_value is TorchRL's option. Use missing_final_obs instead: "
                'missing_final_obs="nan", "previous" or "error"'
            )
        kwargs.pop("native_autoreset", None)  # the environment's own resets are always used
        workers = kwargs.pop("num_workers", 1)
        if workers > 1:
            return cls.make_parallel(workers, partial(cls, *args, **kwargs))
        return type(EnvBase).__call__(cls, *args, **kwargs)

    # TorchRL replaces methods of the classes GymWrapper and GymEnv in its module by those for the installed gym. If a
    # script has replaced these classes by this package's, the methods of the latter must not change.

    def __delattr__(cls, name: str) -> None:
        """Do nothing for this module's classes, whose methods TorchRL would delete."""
        if cls.__module__ != __name__:
            super().__delattr__(name)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Ignore TorchRL's own methods, which it would set on this module's classes."""
        if cls.__module__ != __name__ or getattr(value, "__module__", None) != UpstreamGymWrapper.__module__:
            super().__setattr__(name, value)


class GymWrapper(_StepMixin, UpstreamGymWrapper, metaclass=_GymWrapperMeta):
    """Replacement for TorchRL's ``GymWrapper``, for NumPy, torch and JAX environments.

    It takes the arguments of ``torchrl.envs.GymWrapper``, and these:

    :param env: a gymnasium environment, or an object with the same ``reset``, ``step`` and spaces. If it has
        ``num_envs``, it is vectorized, and its observations are (num_envs, ...)
    :param env_type: arrays that the environment takes and returns: ``"numpy"``, ``"torch"``, ``"jax"``, or ``"auto"``
        (the default), which detects the type of the first observation
    :param copy: whether to copy what the environment returns, so that data never shares its memory; default: True. Use
        False only if the environment does not reuse the arrays that it returns
    :param missing_final_obs: last observation of an episode if a vectorized environment resets itself without
        returning it: ``"nan"`` (zero for integers), ``"previous"`` (the observation before) or ``"error"``. Default:
        ``"nan"``
    :param clip_actions: bound on the magnitude of continuous actions, in the spec and in the environment's actions;
        default: unbounded
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; default: the environment's mode, or
        ``"SameStep"`` for torch environments without one
    :param finite_horizon: whether the environment's time-outs are ``terminated`` instead of ``truncated``, so that no
        value is estimated beyond them; default: ``cfg.is_finite_horizon`` of Isaac Lab's environments, else False
    :raises InvalidArgumentError: If an option has an invalid value or a space cannot be converted. If an action has
        another shape than its spec. If ``frame_skip`` is used with a vectorized environment.
    :raises EnvironmentOutputError: If the result of a step or reset does not fit the environment's spaces.

    Source: https://github.com/pytorch/rl/issues/2369

    >>> import gymnasium
    >>> from torchrl_ext import GymWrapper
    >>> env = GymWrapper(gymnasium.make_vec("CartPole-v1", num_envs=16, vectorization_mode="sync"))
    >>> env.rollout(3, break_when_any_done=False).batch_size
    torch.Size([16, 3])
    """

    def __init__(
        self,
        env: Any = None,
        *args: Any,
        env_type: Literal["auto", "numpy", "torch", "jax"] = "auto",
        copy: bool = True,
        missing_final_obs: Literal["nan", "previous", "error"] = "nan",
        clip_actions: float | None = None,
        autoreset_mode: Any = None,
        finite_horizon: bool | None = None,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {
            "env_type": env_type,
            "copy": copy,
            "missing_final_obs": missing_final_obs,
            "clip_actions": clip_actions,
            "autoreset_mode": autoreset_mode,
            "finite_horizon": finite_horizon,
        }
        for name, values in _CHOICES.items():
            found = options[name]
            if not any(found is value or (isinstance(value, str) and found == value) for value in values):
                expected = ", ".join(map(repr, values))
                raise InvalidArgumentError(f"{name}={found!r} is not one of {expected}. Use {name}={values[0]!r}")
        clip = options["clip_actions"]
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise InvalidArgumentError(f"clip_actions={clip!r} is not a positive number. Use clip_actions=1.0")
        if env_type == "auto" and kwargs.get("convert_actions_to_numpy") is not None:  # TorchRL's option
            options["env_type"] = "numpy" if kwargs["convert_actions_to_numpy"] else "torch"
            options["trust_env_type"] = True  # the option describes actions, not observations
        # Setting attributes of an nn.Module takes ten times as long.
        self.__dict__.update(_options=options, _engine=None, _last_engine=None)
        # NumPy environments may have a device, too. The type of a single one is not known before its first reset.
        if options["env_type"] == "torch" or (options["env_type"] == "auto" and num_envs_of(env) is not None):
            kwargs.setdefault("device", device_of(env))
        super().__init__(env, *args, **kwargs)

    # -- methods that TorchRL's constructor calls

    @staticmethod
    def get_library_name(env: Any) -> str:
        """Return ``"gym"`` or ``"gymnasium"``; the latter for other libraries, too."""
        try:
            return str(UpstreamGymWrapper.get_library_name(env))
        except (ImportError, AttributeError):
            return "gymnasium"

    def _check_kwargs(self, kwargs: dict[str, Any]) -> None:
        require_synchronous(kwargs.get("env"))
        super()._check_kwargs(kwargs)

    def _validate_env(self, env: Any) -> None:
        """Accept every autoreset mode."""

    @property
    def _is_batched(self) -> bool:
        return bool(self.batch_size)

    def _get_batch_size(self, env: Any) -> torch.Size:
        count = num_envs_of(env)
        return self.batch_size if count is None else torch.Size([count, *self.batch_size])

    def _make_specs(self, env: Any, batch_size: torch.Size | None = None) -> None:
        """Make the specs from the spaces of one sub-environment."""
        own, batch, categorical = self.__dict__, self.batch_size, self._categorical_action_encoding
        refuse_frame_skip(self)
        single, clip = SingleSpaces(env, batch), own["_options"]["clip_actions"]
        try:
            if batch:
                key = "pixels" if self.from_pixels else "observation"
                specs = make_batched_specs(single, batch, key, self.device, categorical)
                self.observation_spec, self.action_spec, self.reward_spec = specs
                self.done_spec = self._make_done_spec()
            else:
                super()._make_specs(single, batch_size=batch_size)
            if is_ragged(self.observation_spec, batch) or is_ragged(self.full_action_spec, batch):
                raise ValueError("parts of different kinds, shapes or numbers of classes do not fit into one tensor")
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"the spaces {single.observation_space} and {single.action_space} make no spec "
                f"({type(error).__name__}: {error}). Use gymnasium.spaces.Dict, with a key for each part, in place "
                "of a Tuple or of a MultiDiscrete with several axes, and dtypes that torch has"
            ) from error
        if clip is not None and not any(map(is_continuous, self.full_action_spec.values(True, True))):
            raise InvalidArgumentError(
                f"clip_actions={clip} has no effect, because the action space {single.action_space} has nothing "
                "continuous to clip. Leave it out"
            )
        self.action_spec = limit_actions(self.action_spec, clip)
        shared = sorted(map(str, set(self.observation_spec.keys(True, True)) & set(self.action_keys)))
        if shared:
            raise InvalidArgumentError(
                f"{', '.join(shared)} names an observation and an action, but keys of a TensorDict are unique. "
                "Rename one of them in the spaces"
            )
        # Entries of infos are added to the specs later.
        own.update(_engine=None, _single=single, _observation_names=frozenset(self.observation_spec.keys()))

    def set_spec_lock_(self, mode: bool = True) -> Any:
        """Lock or unlock the specs, and return the environment. Setting a spec calls this, too."""
        self._drop_engine()
        return super().set_spec_lock_(mode)

    # -- steps and resets

    def _compile(self, sample: Any) -> Engine:
        """Compile the engine from the present specs and the first observation.

        :param sample: the first observation; None: unknown
        :raises InvalidArgumentError: If the specs lack an entry that the environment returns, or ``env_type`` differs
            from the observation's type.
        """
        own, spec = self.__dict__, self.observation_spec
        if [*self.reward_keys] != ["reward"] or {*self.done_keys} != {"done", "terminated", "truncated"}:
            raise InvalidArgumentError(
                f"the specs have the rewards {[*self.reward_keys]} and the flags {[*self.done_keys]}; expected "
                "'reward', 'done', 'terminated' and 'truncated'. Use torchrl.envs.RenameTransform for other names"
            )
        # Without infos. An observation that is not a dict goes to the first entry, as in TorchRL.
        names = [name for name in spec.keys() if name in own["_observation_names"]] or [*spec.keys()]  # noqa: SIM118
        observed = Composite({name: spec[name] for name in names}, shape=spec.shape, device=spec.device)
        env_type, found = own["_options"]["env_type"], None if sample is None else framework_of(sample)
        if env_type == "auto":
            own["_detected_env_type"] = found or own.get("_detected_env_type")
            env_type = own["_detected_env_type"] or ("numpy" if device_of(self._env) is None else "torch")
        elif found not in (None, "dlpack", env_type) and "trust_env_type" not in own["_options"]:
            raise InvalidArgumentError(
                f"env_type={env_type!r}, but the environment's observations are {found}. Use env_type={found!r}, or "
                "leave it out"
            )
        is_dict = isinstance(own["_single"].observation_space, gymnasium.spaces.Dict)
        return Engine(self, own["_single"], observed, None if is_dict else names[0], env_type)

    def _drop_engine(self) -> None:
        """Let the next call compile the engine again."""
        own = self.__dict__
        own["_last_engine"], own["_engine"] = own.get("_engine") or own.get("_last_engine"), None

    def _valid_engine(self) -> Any:
        """Return the engine; None if there is none, or if its environment, device or options have changed."""
        own = self.__dict__
        self._refuse_overrides()
        engine = own["_engine"]
        if engine is not None and not (
            engine.env is own["_env"]
            and engine.frame_skip == self.wrapper_frame_skip
            and engine.device == self.device
            and self.is_spec_locked
        ):
            self._drop_engine()
        return own["_engine"]

    def _ensure_engine(self) -> Any:
        """Return the engine; compile it if there is none, such as after a copy or a change of a spec."""
        own, engine = self.__dict__, self._valid_engine()
        if engine is None:
            engine = self._compile(None)
            engine.continue_episodes(own["_last_engine"])
            own["_engine"] = engine
        return engine

    def _action_of(self, tensordict: TensorDictBase) -> Any:
        """Return the action in a TensorDict; the whole TensorDict if it has several keys."""
        key = self.__dict__["_engine"].action_key
        return tensordict if key is None else tensordict[key]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        engine = self._ensure_engine()
        data, _, info = engine.step(self._action_of(tensordict))
        out = new_tensordict(data, self.batch_size, self.device)
        if not self.info_dict_reader:
            return out
        info, has_reset, last_info = engine.split_info(info)
        if has_reset is None:
            return self._with_info(out, info)
        read = self._with_info(out.clone(), info)  # readers may edit tensors
        return _join_rows(has_reset.view(self.batch_size), self._with_info(out, last_info), read)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        partial_mask = mask is not None and not mask.all()
        if tensordict is not None and partial_mask:
            if not self.batch_size:
                raise RuntimeError("Partial resets are not handled at this level.")
            if not mask.any():  # type: ignore[union-attr]
                return tensordict.exclude("_reset")
        if self._valid_engine() is None and not partial_mask:
            result = self._env.reset(**kwargs)
            engine = self._compile(check_result_length(result, RESET_RESULT)[0])
            parts = [engine.read_reset(result)]
            self.__dict__["_engine"] = engine
        else:
            engine = self._ensure_engine()
            parts = engine.reset(None if mask is None else mask.reshape(-1), **kwargs)
        out: Any = None
        for rows, data, info in parts:
            flags = dict(zip(("done", "terminated", "truncated"), engine.make_unset_flags(), strict=True))
            part = new_tensordict({**data, **flags}, self.batch_size, self.device)
            if self.info_dict_reader and info is not None:
                part = self._with_info(part, info)
            out = part if rows is None else _join_rows(rows.view(self.batch_size), part, out)
        return out

    def _with_info(self, out: TensorDictBase, info: Any) -> TensorDictBase:
        """Let the readers write an info into a TensorDict, and return the TensorDict."""
        info = {} if info is None else copy_output(info)
        for reader in self.info_dict_reader:
            # TorchRL's reader accepts arrays and tensors only; other readers get the info unchanged.
            is_default = isinstance(reader, default_info_dict_reader)
            read = reader(numbers_for_reader(info, reader, self.batch_size) if is_default else info, out)
            out = out if read is None else read
        return out

    def set_info_dict_reader(self, info_dict_reader: Any = None, ignore_private: bool = True) -> Any:
        """Register a reader of infos, and expand its specs over the batch.

        :param info_dict_reader: function that writes infos into the TensorDict; default: all numerical infos
        :param ignore_private: whether to skip keys that start with an underscore
        :return: the environment
        """
        spec = getattr(info_dict_reader, "_info_spec", None)
        if spec is not None and self.batch_size and not spec.shape:
            info_dict_reader = copies.copy(info_dict_reader)
            info_dict_reader._info_spec = spec.expand(self.batch_size)
        return super().set_info_dict_reader(info_dict_reader, ignore_private)

    def __getstate__(self) -> dict[str, Any]:
        # Closures cannot be copied. The copy compiles them again.
        return {**super().__getstate__(), "_engine": None, "_last_engine": None}

    def fast_encoding(self, mode: bool = True) -> None:
        """Do nothing. TorchRL's fast encoding has no effect here."""


def _join_rows(mask: torch.Tensor, new: TensorDictBase, old: TensorDictBase) -> TensorDictBase:
    """Return the rows of a mask from ``new``, and the other rows from ``old``. Missing entries are zero.

    :raises InvalidArgumentError: If a reader of infos wrote one object for all rows.
    """
    for key, value in (*new.items(True), *old.items(True)):
        if isinstance(value, NonTensorData):
            raise InvalidArgumentError(
                f"the reader of infos wrote {key!r} as one {type(value.data).__name__} for all sub-environments, of "
                'which some have just been reset; expected one value for each. Use tensordict["name"] = list(values)'
            )
    return new.where(mask, old, pad=0)


class GymEnv(GymWrapper, UpstreamGymEnv):
    """Replacement for TorchRL's ``GymEnv``, with the options of :class:`GymWrapper`.

    :param env_name: gymnasium id of the environment
    :param num_envs: number of sub-environments; default: a single environment
    :param kwargs: arguments of :class:`GymWrapper`, ``torchrl.envs.GymEnv`` and the environment

    >>> from torchrl_ext import GymEnv
    >>> GymEnv("Pendulum-v1").rollout(3).batch_size
    torch.Size([3])
    """

    def __init__(self, env_name: str, **kwargs: Any) -> None:
        super().__init__(env_name, **kwargs)  # GymWrapper passes it on to TorchRL's GymEnv

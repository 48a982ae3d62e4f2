"""``GymWrapper`` and ``GymEnv``: TorchRL's, for environments that speak NumPy or torch, exact and light."""

from __future__ import annotations

import copy as copies
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, default_info_dict_reader
from torchrl.envs.libs import gym as upstream
from torchrl.envs.libs.gym import GymEnv as UpstreamGymEnv
from torchrl.envs.libs.gym import GymWrapper as UpstreamGymWrapper

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.vector.autoreset import RESET, require_synchronous, unpacked
from torchrl_ext._compat import built, has_short_steps
from torchrl_ext.gym.engine import Engine, refuse_frame_skip
from torchrl_ext.gym.infos import numbers_for_reader, owned
from torchrl_ext.gym.io import is_torch
from torchrl_ext.gym.specs import (
    SingleSpaces,
    batched_specs,
    check_parts,
    count_of,
    device_of,
    finite,
    has_space,
    starts,
)
from torchrl_ext.parallel import ParallelEnv

__all__ = ["GymEnv", "GymWrapper"]

_Steps: Any
if has_short_steps():
    from torchrl_ext.gym.fast_path import FastSteps as _Steps
else:
    from torchrl_ext._compat import EverySteps as _Steps

# The options that TorchRL's wrappers have not, with their defaults, and the values that some of them can have.
_DEFAULTS = {
    "env_type": "auto",
    "copy": True,
    "missing_final_obs": "nan",
    "clip_actions": None,
    "autoreset_mode": None,
    "finite_horizon": None,
}
_VALUES = {
    "env_type": ("auto", "numpy", "torch"),
    "copy": (True, False),
    "missing_final_obs": ("nan", "previous", "error"),
    "finite_horizon": (None, True, False),
}


class _Meta(type(UpstreamGymWrapper)):  # type: ignore[misc]
    """Builds the wrapper as upstream does, without the transform that swaps observations of vectorised environments."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "missing_obs_value" in kwargs:
            raise InvalidArgumentError(
                "missing_obs_value is TorchRL's name for what is an option of three values here. Write "
                'missing_final_obs="nan", "previous" or "error"'
            )
        kwargs.pop("native_autoreset", None)  # what an environment resets itself is always kept
        workers = kwargs.pop("num_workers", 1)
        if workers > 1:
            return ParallelEnv(workers, partial(cls, *args, **kwargs), metadata_from_workers=True)
        return type(EnvBase).__call__(cls, *args, **kwargs)

    # TorchRL chooses methods for the installed gym when one is first called, and puts them into the class that stands
    # under the name of its own in its module then: one of these, where somebody has put it there.

    def __delattr__(cls, name: str) -> None:
        if cls.__module__ == __name__:
            raise AttributeError(f"{cls.__name__}.{name} stays")
        super().__delattr__(name)

    def __setattr__(cls, name: str, value: Any) -> None:
        theirs = UpstreamGymWrapper.__module__
        if cls.__module__ == __name__ and getattr(value, "__module__", None) == theirs:
            upstream = next(base for base in cls.__mro__ if base.__module__ == theirs)
            setattr(upstream, name, value)
        else:
            super().__setattr__(name, value)


class GymWrapper(_Steps, UpstreamGymWrapper, metaclass=_Meta):
    """TorchRL's ``GymWrapper`` for environments that speak NumPy or torch tensors, single or vectorised.

    In place of ``torchrl.envs.GymWrapper``, with its arguments and these:

    :param env: a gymnasium environment, or one with its methods: ``reset``, ``step`` and spaces. With ``num_envs`` it
        is vectorised; its observations are (num_envs, ...)
    :param env_type: ``"numpy"``, ``"torch"`` or ``"auto"``: which of them the environment takes and returns, by default
        as its first observation is
    :param copy: whether what the environment returns is copied, so that data never shares its memory. False: trust it
    :param missing_final_obs: what stands for the last observation of an episode where a vectorised environment resets
        itself and does not give it: ``"nan"`` (zero for integers), ``"previous"`` (the one before) or ``"error"``
    :param clip_actions: bound on the magnitude of continuous actions, in the spec and in what the environment gets
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; default: what the environment says, and for
        torch environments that say nothing ``"SameStep"``
    :param finite_horizon: whether the environment's time-outs are ``terminated`` and not ``truncated``, so that no
        value is estimated beyond them; default: ``cfg.is_finite_horizon`` of Isaac Lab's environments, for others False
    :raises InvalidArgumentError: If an option has another value, a space cannot be converted, an action has another
        shape than the spec, or a vectorized environment is to skip frames.
    :raises EnvironmentOutputError: at a step or reset: what the environment returns does not fit its spaces

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
        env_type: Literal["auto", "numpy", "torch"] = "auto",
        copy: bool = True,
        missing_final_obs: Literal["nan", "previous", "error"] = "nan",
        clip_actions: float | None = None,
        autoreset_mode: Any = None,
        finite_horizon: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._take_options(
            kwargs,
            env_type=env_type,
            copy=copy,
            missing_final_obs=missing_final_obs,
            clip_actions=clip_actions,
            autoreset_mode=autoreset_mode,
            finite_horizon=finite_horizon,
        )
        if env is not None and "device" not in kwargs:
            kwargs["device"] = self._own_device(env)
        super().__init__(env, *args, **kwargs)

    def _take_options(self, kwargs: dict[str, Any], **options: Any) -> None:
        """Check the options and keep them.

        :param kwargs: those of TorchRL's class
        :raises InvalidArgumentError: an option has a value that it cannot have
        """
        for name, values in _VALUES.items():
            found = options[name]
            if not any(found is value or (isinstance(value, str) and found == value) for value in values):
                expected = ", ".join(map(repr, values))
                raise InvalidArgumentError(f"{name}={found!r} is none of {expected}. Write {name}={values[0]!r}")
        clip, takes_numpy = options["clip_actions"], kwargs.get("convert_actions_to_numpy")
        if clip is not None and not (isinstance(clip, (int, float)) and clip > 0):
            raise InvalidArgumentError(f"clip_actions={clip!r} is not a positive number. Write clip_actions=1.0")
        # TorchRL's switch tells what the environment takes, and nothing about what it returns.
        options["returns_it"] = takes_numpy is None or options["env_type"] != "auto"
        if not options["returns_it"]:
            options["env_type"] = "numpy" if takes_numpy else "torch"
        # Past nn.Module, whose attributes take ten times as long.
        self.__dict__.update(_options=options, _engine=None, _resume=None)

    def _own_device(self, env: Any) -> torch.device | None:
        """Find out on which device to be where none was asked for: that of an environment that speaks torch.

        Single environments may have a device and speak NumPy; only their first observation would tell.
        """
        asked = self.__dict__["_options"]["env_type"]
        speaks = asked == "torch" or (asked == "auto" and count_of(env) is not None)
        return device_of(env) if speaks else None

    # -- what upstream asks of the environment's library

    @staticmethod
    def get_library_name(env: Any) -> str:
        """Name the library whose conventions an environment follows: gymnasium's, if its spaces are of nobody's known.

        :param env: the environment
        :return: ``"gym"`` or ``"gymnasium"``
        """
        try:
            return str(UpstreamGymWrapper.get_library_name(env))
        except (ImportError, AttributeError):
            return "gymnasium"

    def _check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Take environments that have their spaces under ``unwrapped`` alone."""
        env = kwargs.get("env")
        require_synchronous(env)
        if env is None or not all(has_space(env, name) for name in ("observation_space", "action_space")):
            super()._check_kwargs(kwargs)

    def _build_env(self, *args: Any, **kwargs: Any) -> Any:
        env = kwargs.get("env")
        if env is None or hasattr(env, "observation_space"):
            return super()._build_env(*args, **kwargs)
        # TorchRL looks at that space to find out whether the environment returns pixels.
        if kwargs.get("from_pixels"):
            raise InvalidArgumentError(
                f"from_pixels=True was given, and {type(env).__name__} has no observation_space of its own. Write "
                "observation_space = property(lambda self: self.env.observation_space) in its class"
            )
        self.batch_size = self._get_batch_size(env)
        self.from_pixels = self.pixels_only = False
        return env

    def _validate_env(self, env: Any) -> None:
        """Take every autoreset mode."""

    @property
    def _is_batched(self) -> bool:
        return bool(self.batch_size)

    def _get_batch_size(self, env: Any) -> torch.Size:
        count = count_of(env)
        return self.batch_size if count is None else torch.Size([count, *self.batch_size])

    def _make_specs(self, env: Any, batch_size: torch.Size | None = None) -> None:
        """Make the specs from the spaces of one sub-environment."""
        own = self.__dict__
        refuse_frame_skip(self)
        single = SingleSpaces(env, self.batch_size, own["_options"]["clip_actions"])
        try:
            if self.batch_size:
                key = "pixels" if self.from_pixels else "observation"
                specs = batched_specs(single, self.batch_size, key, self.device, self._categorical_action_encoding)
                self.observation_spec, self.action_spec, self.reward_spec = specs
                self.done_spec = self._make_done_spec()
            else:
                super()._make_specs(single, batch_size=batch_size)
        except InvalidArgumentError:
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            found = f"{single.observation_space} and {single.action_space}"
            advice = (
                "gymnasium.spaces.Dict in place of a Tuple" if "Tuple(" in found else "dtypes and shapes that it knows"
            )
            raise InvalidArgumentError(
                f"TorchRL makes no spec of the spaces {found} ({type(error).__name__}: {error}). Write them with "
                f"{advice}"
            ) from error
        is_dict, own["_takes_dict"] = (
            isinstance(space, upstream.gym_backend("spaces").Dict)
            for space in (single.observation_space, single.action_space)
        )
        observed, taken = self.observation_spec, self.full_action_spec
        for role, space, spec in (
            ("observation", single.observation_space, observed if is_dict else next(iter(observed.values()))),
            ("action", single.action_space, taken if own["_takes_dict"] else next(iter(taken.values()))),
        ):
            check_parts(role, space, spec, categorical=self._categorical_action_encoding)
        self.observation_spec = finite(self.observation_spec)
        self.action_spec = finite(self.action_spec)
        shared = sorted(map(str, set(self.observation_spec.keys(True, True)) & set(self.action_keys)))
        if shared:
            raise InvalidArgumentError(
                f"{', '.join(shared)} names an observation and an action, and a TensorDict holds one entry of a name. "
                "Rename one of them in the spaces"
            )
        own["_engine"] = own["_resume"] = None
        # Without the infos that are registered later.
        own["_observed"] = self.observation_spec.clone()
        of_batch = bool(self.batch_size) and not single.is_batched
        known = (single.observation_space, single.action_space)
        own["_starts"] = tuple(starts(space, of_batch=of_batch) for space in known)
        # A MultiDiscrete of the batch has a part for each sub-environment.
        own["_action_space"] = None if single.is_batched else single.action_space
        own["_single_key"] = None if is_dict else next(iter(self.observation_spec.keys()))

    def set_spec_lock_(self, mode: bool = True) -> Any:
        """Lock or unlock the specs, as :meth:`torchrl.envs.EnvBase.set_spec_lock_` does.

        Whoever sets a spec does so between the two.

        :return: the environment
        """
        self._drop_engine()
        return super().set_spec_lock_(mode)

    # -- steps and resets

    def _compile(self, sample: Any) -> Engine:
        """Compile the engine from the first observation, which tells whether the environment speaks torch."""
        env_type = self._env_type(self.__dict__["_options"]["env_type"], sample)
        return Engine(self, *self._read_specs(), env_type)

    def _read_specs(self) -> tuple[Composite, str | None]:
        """Return the specs of what the environment returns, as they are now, and the key where that is no dict.

        :raises InvalidArgumentError: specs that were set have no place for it
        """
        own, spec = self.__dict__, self.observation_spec
        observed, key = own["_observed"], own["_single_key"]
        if [*self.reward_keys] != ["reward"] or {*self.done_keys} != {"done", "terminated", "truncated"}:
            raise InvalidArgumentError(
                f"the specs have the rewards {[*self.reward_keys]} and the flags {[*self.done_keys]}; expected "
                "'reward', 'done', 'terminated' and 'truncated'. Write torchrl.envs.RenameTransform for other names"
            )
        if key is not None and key not in spec:
            # As upstream: what is no dict goes to the first entry.
            key = next((name for name, part in spec.items() if not isinstance(part, Composite)), None)
            if key is None:
                raise InvalidArgumentError(
                    "observation_spec has no entry for the environment's observation. Write env.observation_spec = "
                    "Composite(observation=...)"
                )
            observed = Composite({key: spec[key]})
        return _overlaid(observed, spec), key

    def _env_type(self, asked: str, sample: Any) -> str:
        """Find out whether the environment takes torch tensors: as asked for, as its first observation is."""
        own = self.__dict__
        if sample is not None:
            own["_speaks"] = "torch" if is_torch(sample) else "numpy"
        speaks = own.get("_speaks", "numpy" if device_of(self._env) is None else "torch")
        if asked == "auto":
            return str(speaks)
        if sample is not None and asked != speaks and own["_options"]["returns_it"]:
            kind = "torch tensors" if speaks == "torch" else "NumPy arrays"
            raise InvalidArgumentError(
                f"env_type={asked!r} was given, and the environment's observation is made of {kind}. "
                f'Write env_type={speaks!r}, or leave it at "auto"'
            )
        return asked

    def _drop_engine(self) -> None:
        """Have the engine compiled anew, by what follows, and keep what it remembers of the last step."""
        own = self.__dict__
        if own.get("_engine") is not None:
            own["_resume"], own["_engine"] = own["_engine"].memory, None

    def _current(self) -> Any:
        """Return the engine, None where there is none or what it was compiled from has been replaced.

        :raises InvalidTypeError: a method was overridden that is not called
        """
        own = self.__dict__
        self._refuse_overrides()
        engine = own["_engine"]
        if engine is not None and engine.env is not own["_env"]:
            own["_engine"] = own["_resume"] = None  # what another environment did in the last step
        elif engine is not None and (engine.frame_skip != self.wrapper_frame_skip or not self.is_spec_locked):
            self._drop_engine()
        return own["_engine"]

    def _ready(self) -> Any:
        """Return the engine; where no observation was seen (a copy, a move), it is compiled without one."""
        own, engine = self.__dict__, self._current()
        if engine is None:
            engine = self._compile(None)
            engine.take_up(own["_resume"])
            own["_engine"], own["_resume"] = engine, None
        return engine

    def _action_of(self, tensordict: TensorDictBase) -> Any:
        key = self.__dict__["_engine"].action_key
        return tensordict if key is None else tensordict[key]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        engine = self._ready()
        data, _, info = engine.step(self._action_of(tensordict))
        out = built(data, self.batch_size, self.device)
        return self._with_info(out, engine.closing(info)) if self.info_dict_reader else out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        partial_mask = mask is not None and not mask.all()
        if tensordict is not None and partial_mask:
            if not self.batch_size:
                raise RuntimeError("Partial resets are not handled at this level.")
            if not mask.any():  # type: ignore[union-attr]
                return tensordict.exclude("_reset")
        own = self.__dict__
        if self._current() is None and (mask is None or (not partial_mask and (kwargs or own["_resume"] is None))):
            result = self._env.reset(**kwargs)
            engine = self._compile(unpacked(result, RESET)[0])
            data, info = engine.begin(result)
            own["_engine"], own["_resume"] = engine, None
        else:
            engine = self._ready()
            data, info = engine.reset(None if mask is None else mask.reshape(-1), **kwargs)
            data = dict(data)
        data["done"], data["terminated"], data["truncated"] = engine.not_done()
        out = built(data, self.batch_size, self.device)
        return self._with_info(out, info) if self.info_dict_reader else out

    def _with_info(self, out: TensorDictBase, info: Any) -> TensorDictBase:
        if info is not None:
            info = owned(info)
            for reader in self.info_dict_reader:
                # TorchRL's reader takes arrays and tensors alone; others get the info as it is.
                is_default = isinstance(reader, default_info_dict_reader)
                read = reader(numbers_for_reader(info, reader, self.batch_size) if is_default else info, out)
                out = out if read is None else read
            return out
        for key, spec in self.observation_spec.items(True, True):
            if key not in out.keys(True, True):
                out.set(key, spec.zero())
        return out

    def set_info_dict_reader(self, info_dict_reader: Any = None, ignore_private: bool = True) -> Any:
        """Register a reader of infos, as :meth:`torchrl.envs.GymLikeEnv.set_info_dict_reader` does.

        Specs that it was given for one environment are repeated over the batch.

        :param info_dict_reader: writes infos into the TensorDict; default: all numerical ones
        :param ignore_private: leave out those that start with an underscore
        :return: the environment
        """
        spec = getattr(info_dict_reader, "_info_spec", None)
        if spec is not None and self.batch_size and not spec.shape:
            info_dict_reader = copies.copy(info_dict_reader)
            info_dict_reader._info_spec = spec.expand(self.batch_size)
        return super().set_info_dict_reader(info_dict_reader, ignore_private)

    # -- what survives moves and copies

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move to another device, as :meth:`torchrl.envs.EnvBase.to` does.

        :return: the environment
        """
        before = self.device
        moved = super().to(*args, **kwargs)
        if moved.device != before:
            moved._drop_engine()
            moved.__dict__["_observed"] = moved.__dict__["_observed"].to(moved.device)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__)
        # Closures; compiled again by what follows.
        engine = state.get("_engine")
        if engine is not None:
            state["_engine"], state["_resume"] = None, engine.memory
        return state

    def fast_encoding(self, mode: bool = True) -> None:
        """Change nothing: what it saves is not spent here.

        :param mode: for :meth:`torchrl.envs.GymLikeEnv.fast_encoding`
        """


def _overlaid(observed: Composite, spec: Composite) -> Composite:
    """Return the entries that an environment returns with the specs that they have now."""
    parts = {
        key: _overlaid(part, spec[key]) if isinstance(part, Composite) else spec[key]
        for key, part in observed.items()
        if key in spec
    }
    return Composite(parts, shape=spec.shape, device=spec.device)


class GymEnv(GymWrapper, UpstreamGymEnv):
    """TorchRL's ``GymEnv``, made by its id, with the options of :class:`GymWrapper`.

    :param env_name: an id of gymnasium's registry
    :param num_envs: sub-environments of a vectorised one; default: a single environment
    :param kwargs: those of :class:`GymWrapper`, of ``torchrl.envs.GymEnv``, and of the environment

    >>> from torchrl_ext import GymEnv
    >>> GymEnv("Pendulum-v1").rollout(3).batch_size
    torch.Size([3])
    """

    def __init__(self, env_name: str, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name, default) for name, default in _DEFAULTS.items()}
        self._take_options(kwargs, **options)
        UpstreamGymEnv.__init__(self, env_name, **kwargs)

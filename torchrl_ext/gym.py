"""``GymWrapper`` and ``GymEnv``: TorchRL's, for environments that speak NumPy or torch, exact and light."""

from __future__ import annotations

import copy as copies
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs import ParallelEnv
from torchrl.envs.libs import gym as upstream

from rl_ext_core.errors import InvalidArgumentError
from torchrl_ext._autoreset import find_mode
from torchrl_ext._batched import BatchedEngine
from torchrl_ext._engine import Layout, SingleEngine
from torchrl_ext._options import DEFAULTS, checked
from torchrl_ext._partial import pair
from torchrl_ext._plain import PlainSteps, built
from torchrl_ext._readers import is_torch, owned
from torchrl_ext._specs import SingleSpaces, batched_specs, device_of, finite

__all__ = ["GymEnv", "GymWrapper"]


class _Meta(upstream._GymAsyncMeta):
    """Builds the wrapper as upstream does, without the transform that swaps observations of vectorised environments."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (it is the class's)
        if "missing_obs_value" in kwargs:
            raise InvalidArgumentError(
                "missing_obs_value is TorchRL's name for what is an option of three values here. Write "
                'missing_final_obs="nan", "previous" or "error"'
            )
        kwargs.pop("native_autoreset", None)  # what an environment resets itself is always kept
        workers = kwargs.pop("num_workers", 1)
        if workers > 1:
            return ParallelEnv(workers, partial(cls, *args, **kwargs), metadata_from_workers=True)
        return super(upstream._GymAsyncMeta, cls).__call__(*args, **kwargs)


class GymWrapper(PlainSteps, upstream.GymWrapper, metaclass=_Meta):
    """TorchRL's ``GymWrapper`` for environments that speak NumPy or torch tensors, single or vectorised.

    In place of ``torchrl.envs.GymWrapper``, with its arguments and these:

    :param env: a gymnasium environment, or one with its methods: ``reset``, ``step`` and spaces. With ``num_envs`` it
        is vectorised; its observations are (num_envs, ...)
    :param env_type: ``"numpy"``, ``"torch"`` or ``"auto"``: which of them the environment takes and returns, by default
        as its first observation is
    :param copy: whether what the environment returns is copied. True: data never shares its memory. ``"auto"``: only if
        it is found to reuse memory. False: trust it
    :param missing_final_obs: what stands for the last observation of an episode where a vectorised environment resets
        itself and does not give it: ``"nan"`` (zero for integers), ``"previous"`` (the one before) or ``"error"``
    :param clip_actions: bound on the magnitude of continuous actions, in the spec and in what the environment gets
    :param autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; default: what the environment says, and for
        torch environments that say nothing ``"SameStep"``
    :raises InvalidArgumentError: an option with another value, a space that cannot be converted
    :raises EnvironmentOutputError: at a step or reset: what the environment returns does not fit its spaces

    Source: https://github.com/pytorch/rl/issues/2369
    """

    def __init__(
        self,
        env: Any = None,
        *args: Any,
        env_type: Literal["auto", "numpy", "torch"] = "auto",
        copy: bool | Literal["auto"] = True,
        missing_final_obs: Literal["nan", "previous", "error"] = "nan",
        clip_actions: float | None = None,
        autoreset_mode: Any = None,
        **kwargs: Any,
    ) -> None:
        self._take_options(
            kwargs,
            env_type=env_type,
            copy=copy,
            missing_final_obs=missing_final_obs,
            clip_actions=clip_actions,
            autoreset_mode=autoreset_mode,
        )
        if env is not None:
            kwargs = {"device": device_of(env), **kwargs}
        super().__init__(env, *args, **kwargs)

    def _take_options(self, kwargs: dict[str, Any], **options: Any) -> None:
        options = checked(options, kwargs.get("convert_actions_to_numpy"))
        # Past nn.Module, whose attributes take ten times as long.
        self.__dict__["_options"] = options
        self.__dict__["_engine"] = None

    # -- what upstream asks of the environment's library

    @staticmethod
    def get_library_name(env: Any) -> str:
        """Name the library whose conventions an environment follows: gymnasium's, if its spaces are of nobody's known.

        :param env: the environment
        :return: ``"gym"`` or ``"gymnasium"``
        """
        try:
            return str(upstream.GymWrapper.get_library_name(env))
        except ImportError:
            return "gymnasium"

    def _validate_env(self, env: Any) -> None:
        """Take every autoreset mode."""

    @property
    def _is_batched(self) -> bool:
        return bool(self.batch_size)

    def _get_batch_size(self, env: Any) -> torch.Size:
        count = getattr(env, "num_envs", None)
        count = getattr(env.unwrapped, "num_envs", None) if count is None and hasattr(env, "unwrapped") else count
        return self.batch_size if count is None else torch.Size([count, *self.batch_size])

    def _make_specs(self, env: Any, batch_size: torch.Size | None = None) -> None:
        """Make the specs from the spaces of one sub-environment."""
        own = self.__dict__
        single = SingleSpaces(env, own["_options"]["clip_actions"])
        try:
            if self.batch_size:
                key = "pixels" if self.from_pixels else "observation"
                specs = batched_specs(single, self.batch_size, key, self.device, self._categorical_action_encoding)
                self.observation_spec, self.action_spec, self.reward_spec = specs
                self.done_spec = self._make_done_spec()
            else:
                super()._make_specs(single, batch_size=batch_size)
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"TorchRL makes no spec of the spaces {single.observation_space} and {single.action_space} "
                f"({type(error).__name__}: {error}). Write them with dtypes and shapes that it knows"
            ) from error
        self.observation_spec = finite(self.observation_spec)
        self.action_spec = finite(self.action_spec)
        shared = sorted(map(str, set(self.observation_spec.keys(True, True)) & set(self.action_keys)))
        if shared:
            raise InvalidArgumentError(
                f"{', '.join(shared)} names an observation and an action, and a TensorDict holds one entry of a name. "
                "Rename one of them in the spaces"
            )
        own["_engine"] = None
        # Without the infos that are registered later.
        own["_observed"] = self.observation_spec.clone()
        is_dict = isinstance(single.observation_space, upstream.gym_backend("spaces").Dict)
        own["_single_key"] = None if is_dict else next(iter(self.observation_spec.keys()))
        own["_takes_dict"] = isinstance(single.action_space, upstream.gym_backend("spaces").Dict)

    # -- steps and resets

    def _compile(self, sample: Any) -> SingleEngine | BatchedEngine:
        """Compile the engine from the first observation, which tells whether the environment speaks torch."""
        own = self.__dict__
        options, keys = own["_options"], self.action_keys
        one_action = len(keys) == 1 and not own["_takes_dict"]
        env_type = self._env_type(options["env_type"], sample)
        layout = Layout(
            env=self._env,
            observation=own["_observed"],
            key=own["_single_key"],
            action=self.full_action_spec[keys[0]] if one_action else self.full_action_spec,
            reward=self.reward_spec,
            batch_size=self.batch_size,
            device=self.device,
            env_type=env_type,
            env_device=device_of(self._env),
            copy=options["copy"],
            clip_actions=options["clip_actions"],
            frame_skip=self.wrapper_frame_skip,
        )
        engine: SingleEngine | BatchedEngine
        if self.batch_size:
            mode = find_mode(self._env, options["autoreset_mode"], speaks_torch=env_type == "torch")
            engine = BatchedEngine(layout, sample, mode=mode, missing=options["missing_final_obs"])
        else:
            engine = SingleEngine(layout, sample)
        own["_action_key"] = keys[0] if one_action else None
        return engine

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

    def _ready(self) -> Any:
        """Give the engine; where no observation was seen (a copy, a move), it is compiled without one."""
        own = self.__dict__
        if own["_engine"] is None:
            own["_engine"] = self._compile(None)
        return own["_engine"]

    def _action_of(self, tensordict: TensorDictBase) -> Any:
        key = self.__dict__["_action_key"]
        return tensordict if key is None else tensordict[key]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        engine = self._ready()
        data, _, info = engine.step(self._action_of(tensordict))
        out = built(data, self.batch_size, self.device)
        return self._with_info(out, engine.closing(info)) if self.info_dict_reader else out

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        # Shapes and flags are complete.
        return super()._step_proc_data(next_tensordict_out) if self.run_type_checks else next_tensordict_out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        partial_mask = mask is not None and not mask.all()
        if tensordict is not None and partial_mask:
            if not self.batch_size:
                raise RuntimeError("Partial resets are not handled at this level.")
            if not mask.any():  # type: ignore[union-attr]
                return tensordict.exclude("_reset")
        if self.__dict__["_engine"] is None and not partial_mask:
            result = pair(self._env.reset(**kwargs))
            engine = self._compile(result[0])
            data, info = engine.begin(result)
            self.__dict__["_engine"] = engine
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
                read = reader(info, out)
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
            moved.__dict__["_engine"] = None
            moved.__dict__["_observed"] = moved.__dict__["_observed"].to(moved.device)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__)
        # Closures; compiled again at the first reset.
        state["_engine"] = None
        return state


class GymEnv(GymWrapper, upstream.GymEnv):
    """TorchRL's ``GymEnv``, made by its id, with the options of :class:`GymWrapper`.

    :param env_name: an id of gymnasium's registry
    :param num_envs: sub-environments of a vectorised one; default: a single environment
    :param kwargs: those of :class:`GymWrapper`, of ``torchrl.envs.GymEnv``, and of the environment
    """

    def __init__(self, env_name: str, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        self._take_options(kwargs, **options)
        upstream.GymEnv.__init__(self, env_name, **kwargs)

"""Fast path of a step for plain TensorDicts, such as those of rollouts and collectors.

``EnvBase.step_and_maybe_reset`` spends most of its time on checks that a plain TensorDict does not need. The fast path
returns the same results. It is not taken if a subclass, a mixin or the instance overrides a method that it skips.
Methods that are replaced on a class later are detected at every step.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from rl_ext_core.errors import InvalidTypeError
from torchrl_ext._compat import new_tensordict
from torchrl_ext.gym.engine import fill_rows

__all__ = ["FastStepMixin", "RandAction"]

_FLAGS = ("done", "terminated", "truncated")
# Methods that the fast path skips or replaces.
_STEPS = {"_step", "_reset", "_step_mdp", "_step_proc_data", "_reset_proc_data", "_step_and_maybe_reset", "step"}
_STEPS |= {"reset", "maybe_reset", "any_done", "step_mdp", "step_and_maybe_reset"}
# Methods that neither path calls. TorchRL itself replaces the transforms on every instance.
_READERS = {"read_action", "read_done", "read_obs", "read_reward"}
_REPLACEABLE = _STEPS | _READERS
_TRANSFORMS = {"_output_transform", "_reset_output_transform"}
_methods_of = attrgetter(*sorted(_REPLACEABLE))


def _find_override(cls: type, names: set[str]) -> str | None:
    """Return the first method that neither TorchRL nor this package defines, or None."""
    for name in sorted(names):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        module = getattr(getattr(cls, name), "__module__", owner.__module__)  # properties have none
        if not module.startswith(("torchrl.", "torchrl_ext.")):
            return name
    return None


def _refuse_override(cls: type, name: str | None) -> None:
    """Raise an error that names an overridden method that would not be called; None: there is none."""
    if name is not None:
        raise InvalidTypeError(
            f"{cls.__name__} overrides {name}, which torchrl_ext.GymWrapper does not call. Override _step and _reset, "
            "or subclass torchrl.envs.GymWrapper"
        )


class RandAction:
    """Descriptor of ``rand_action`` that is ``EnvBase.rand_action`` when read from the class.

    ``TransformedEnv`` refuses environments whose class overrides ``rand_action`` if a transform changes the action.
    """

    def __get__(self, env: Any, owner: type) -> Any:
        return EnvBase.rand_action if env is None else partial(_rand_action, env)


def _rand_action(env: Any, tensordict: Any = None) -> TensorDictBase:
    """Draw an action from the same random numbers as :meth:`torchrl.envs.EnvBase.rand_action`."""
    key = env.action_keys[0]
    is_plain = type(tensordict) is TensorDict and not tensordict.is_locked and tensordict.device == env.device
    is_plain = is_plain and tensordict.batch_size == env.batch_size and len(env.action_keys) == 1 and type(key) is str
    if not is_plain:
        return EnvBase.rand_action(env, tensordict)
    # Faster than Composite.rand, which searches the disk for a package every time.
    tensordict._tensordict[key] = env.input_spec["full_action_spec"][key].rand()
    return tensordict


class FastStepMixin(EnvBase):
    """Mixin with faster ``step`` and ``step_and_maybe_reset`` for plain TensorDicts."""

    _methods: ClassVar[tuple[Any, ...]] = ()  # of the class when it was defined
    _is_plain: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._methods, cls._is_plain = _methods_of(cls), _find_override(cls, _STEPS) is None
        _refuse_override(cls, _find_override(cls, _READERS | _TRANSFORMS))

    def _refuse_overrides(self) -> None:
        """Refuse overrides that would not be called, on the instance or set later on the class."""
        cls = type(self)
        _refuse_override(cls, min(_READERS & self.__dict__.keys(), default=None))
        if _methods_of(cls) != self._methods:
            _refuse_override(cls, _find_override(cls, _READERS))

    def _plain_entries(self, tensordict: TensorDictBase) -> dict[str, Any] | None:
        """Return the entries of a TensorDict if this step can take the fast path, else None."""
        own = self.__dict__
        engine = own["_engine"]
        if engine is None or engine.env is not own["_env"] or engine.frame_skip != self.wrapper_frame_skip:
            return None
        if type(tensordict) is not TensorDict or not self.is_spec_locked:
            return None
        entries: dict[str, Any] = tensordict._tensordict
        if "next" in entries or "_step" in entries or "_reset" in entries or tensordict.is_locked:
            return None
        if tensordict.batch_size != engine.batch_size or tensordict.device != engine.device:
            return None
        if self.info_dict_reader or self.run_type_checks or tensordict._td_dim_names is not None:
            return None
        is_original = self._is_plain and _methods_of(type(self)) == self._methods
        return entries if is_original and own.keys().isdisjoint(_REPLACEABLE) else None

    def _take_step(self, entries: dict[str, Any], tensordict: TensorDictBase) -> tuple[dict[str, Any], bool]:
        """Take a step and write the entry ``next``; return its entries, and whether one is done."""
        engine = self.__dict__["_engine"]
        action = entries.get(engine.action_key)
        data, done, _ = engine.step(self._action_of(tensordict) if action is None else action)
        entries["next"] = new_tensordict(data, engine.batch_size, engine.device)
        return data, done

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take a step, add the entry ``next``, and return the same TensorDict."""
        entries = self._plain_entries(tensordict)
        if entries is None:
            return super().step(tensordict)
        self._take_step(entries, tensordict)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step and reset what is done; return this TensorDict and the next one."""
        compiled = "_compiled_step_and_maybe_reset" in self.__dict__
        hooked = getattr(self, "_post_step_mdp_hooks", None) is not None
        entries = None if compiled or hooked else self._plain_entries(tensordict)
        root = None if entries is None else _copy_entries(entries)
        if entries is None or root is None:
            return super().step_and_maybe_reset(tensordict)
        engine = self.__dict__["_engine"]
        data, done = self._take_step(entries, tensordict)
        _write_entries(root, data, engine.nested_keys)
        del root["reward"]
        if done:
            fresh = engine.reset_done(data)
            if engine.batch_size:
                mask, rows = data["done"].view(-1), engine.rows
                if rows is None:  # reading the rows would wait for the GPU
                    _zero_other_entries(root, fresh, mask & ~mask.all(), None)
                elif len(rows) < len(mask):
                    _zero_other_entries(root, fresh, mask, rows)
            _write_entries(root, fresh, engine.nested_keys)
            root["done"], root["terminated"], root["truncated"] = engine.make_unset_flags()
        return tensordict, new_tensordict(root, engine.batch_size, engine.device)

    rand_action = RandAction()

    @classmethod
    def _complete_done(cls, done_spec: Any, data: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict unchanged if all flags are complete; else as upstream."""
        # Transforms call this at every step, although the engine's flags are complete.
        entries = data._tensordict if type(data) is TensorDict else {}
        wide = data.batch_dims + 1
        if all(name in entries and entries[name].ndim == wide for name in _FLAGS):
            return data
        return super()._complete_done(done_spec, data)

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict unchanged if no type checks run; else as upstream."""
        # Shapes and flags are complete.
        return super()._step_proc_data(next_tensordict_out) if self.run_type_checks else next_tensordict_out


def _copy_entries(entries: dict[str, Any]) -> dict[str, Any] | None:
    """Copy entries and nested TensorDicts, but not tensors; None for other classes."""
    root = {}
    for key, value in entries.items():
        if type(value) is torch.Tensor:
            root[key] = value
        elif type(value) is TensorDict and _copy_entries(value._tensordict) is not None:
            root[key] = value.copy()
        else:
            return None
    return root


def _write_entries(root: dict[str, Any], data: dict[str, Any], nested_keys: tuple[str, ...]) -> None:
    """Replace entries of ``root``.

    Nested TensorDicts are copied, and keep their other entries.

    :param nested_keys: keys of the nested TensorDicts
    """
    old: dict[str, Any] = {key: root.get(key) for key in nested_keys}
    root.update(data)
    for key in nested_keys:
        new, before = data[key].copy(), old[key]
        root[key] = before.update(new) if type(before) is TensorDict else new


def _zero_other_entries(
    entries: dict[str, Any], fresh: dict[str, Any], done: torch.Tensor, rows: torch.Tensor | None
) -> None:
    """Set other entries (actions, hidden states) of reset rows to zero, as ``EnvBase`` does.

    :param fresh: entries of the reset, which stay
    :param done: booleans of the rows
    :param rows: their indices; None: unknown
    """
    for key, value in entries.items():
        if type(value) is TensorDict:
            _zero_other_entries(value._tensordict, fresh[key]._tensordict if key in fresh else {}, done, rows)
        elif key not in fresh and key not in _FLAGS:
            entries[key] = fill_rows(value, done, rows, 0)

"""The fast path of a step, for TensorDicts that are as plain as those of rollouts and collectors.

``EnvBase.step_and_maybe_reset`` spends most of its time on what a plain TensorDict does not need. The fast path is
taken where nobody can tell the difference: all that it leaves out, in TorchRL's class, in this wrapper's and on the
instance, is still what it was when this package was imported. That is looked up at every step.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, GymWrapper

from rl_ext_core.errors import InvalidTypeError
from torchrl_ext._compat import built

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FastSteps"]

_FLAGS = ("done", "terminated", "truncated")

# What a step consists of, which may be replaced in a subclass, a mixin, and on the instance.
_STEPS = ["_step", "_reset", "_step_mdp", "_step_proc_data", "_reset_proc_data", "_step_and_maybe_reset", "step"]
_STEPS += ["reset", "maybe_reset", "any_done", "step_mdp", "step_and_maybe_reset"]
# What of it is overridden here, which hides replacements in TorchRL's class.
_of_base = attrgetter("step", "step_and_maybe_reset", "rand_action", "_step_proc_data")
_BASE = _of_base(EnvBase)
# What neither path calls: replacing it is refused. The last two TorchRL itself replaces on every instance.
_READERS = ("read_action", "read_done", "read_obs", "read_reward")
_readers_of = attrgetter(*_READERS)
_READ = _readers_of(GymWrapper)
_parts_of, _NAMES = attrgetter(*_STEPS, *_READERS), {*_STEPS, *_READERS}
_UNHEARD = (*_READERS, "_output_transform", "_reset_output_transform")


def _unheard(cls: type, name: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{cls.__name__} overrides {name}, which is not called here. Override _step and _reset, or subclass "
        "torchrl.envs.GymWrapper"
    )


class _RandAction:
    """A method that TorchRL takes for its own when it looks for it in the class.

    ``TransformedEnv`` refuses environments whose class overrides ``rand_action`` where a transform changes the action.
    """

    def __get__(self, env: Any, owner: type) -> Any:
        return EnvBase.rand_action if env is None else partial(_rand_action, env)


def _rand_action(env: Any, tensordict: Any = None) -> TensorDictBase:
    """Draw an action, as :meth:`torchrl.envs.EnvBase.rand_action` does, from the same random numbers."""
    key = getattr(env.__dict__["_engine"], "action_key", None)
    is_plain = type(tensordict) is TensorDict and not tensordict.is_locked
    if not is_plain or type(key) is not str or _of_base(EnvBase) != _BASE:
        return EnvBase.rand_action(env, tensordict)
    # Past Composite.rand, which looks for a package on the disk every time.
    tensordict._tensordict[key] = env.input_spec["full_action_spec"][key].rand()
    return tensordict


class FastSteps(EnvBase):
    """Overrides ``step`` and ``step_and_maybe_reset`` where nothing asks for more than the engine gives.

    Whatever is not plain (a lock, a ``next`` that is there already, partial steps, infos, hooks, a compiled step, an
    override of a part) goes the way of :class:`torchrl.envs.EnvBase`.
    """

    _parts: ClassVar[tuple[Any, ...]] = ()  # as they are in the wrapper's class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        FastSteps._parts = FastSteps._parts or _parts_of(cls)
        for name in _UNHEARD:
            if not next(base for base in cls.__mro__ if name in vars(base)).__module__.startswith("torchrl."):
                raise _unheard(cls, name)

    def _refuse_overrides(self) -> None:
        """Refuse what is not called, wherever it was overridden since the class was made.

        :raises InvalidTypeError: something was
        """
        own, cls = self.__dict__, type(self)
        if not own.keys().isdisjoint(_READERS) or _readers_of(cls) != _READ:
            for name, known in zip(_READERS, _READ, strict=True):
                if name in own or getattr(cls, name) is not known:
                    raise _unheard(cls, name)

    def _plain_entries(self, tensordict: TensorDictBase) -> dict[str, Any] | None:
        """Return the entries of a TensorDict if this step can take the fast path; None if not."""
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
        if not own.keys().isdisjoint(_NAMES) or _parts_of(type(self)) != self._parts or _of_base(EnvBase) != _BASE:
            return None
        return entries

    def _stepped(self, entries: dict[str, Any], tensordict: TensorDictBase) -> tuple[dict[str, Any], bool, Any]:
        engine = self.__dict__["_engine"]
        action = entries.get(engine.action_key)
        return engine.step(self._action_of(tensordict) if action is None else action)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take a step, as :meth:`torchrl.envs.EnvBase.step` does.

        :param tensordict: with the action; gets the entry ``next``
        :return: the same TensorDict
        """
        entries = self._plain_entries(tensordict)
        if entries is None:
            return super().step(tensordict)
        engine = self.__dict__["_engine"]
        data, _, _ = self._stepped(entries, tensordict)
        entries["next"] = built(data, engine.batch_size, engine.device)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Take a step and reset what is done, as :meth:`torchrl.envs.EnvBase.step_and_maybe_reset` does.

        :param tensordict: with the action; gets the entry ``next``
        :return: the same TensorDict, and the one that the next step starts from
        """
        compiled = "_compiled_step_and_maybe_reset" in self.__dict__
        hooked = getattr(self, "_post_step_mdp_hooks", None) is not None
        entries = None if compiled or hooked else self._plain_entries(tensordict)
        root = None if entries is None else _carried(entries)
        if entries is None or root is None:
            return super().step_and_maybe_reset(tensordict)
        engine = self.__dict__["_engine"]
        data, done, _ = self._stepped(entries, tensordict)
        batch_size, device = engine.batch_size, engine.device
        entries["next"] = built(data, batch_size, device)
        _place(root, data, engine.containers)
        del root["reward"]
        if done:
            fresh = engine.reset_done(data)
            if batch_size:
                mask, rows = data["done"].view(-1), engine.rows
                if rows is None:  # a GPU need not answer which, and whether all
                    _forget(root, fresh, mask & ~mask.all(), None)
                elif len(rows) < len(mask):
                    _forget(root, fresh, mask, rows)
            _place(root, fresh, engine.containers)
            root["done"], root["terminated"], root["truncated"] = engine.not_done()
        return tensordict, built(root, batch_size, device)

    rand_action = _RandAction()

    @classmethod
    def _complete_done(cls, done_spec: Any, data: TensorDictBase) -> TensorDictBase:
        # Transforms ask for this at every step, and the engine's flags are complete.
        entries = data._tensordict if type(data) is TensorDict else {}
        wide = data.batch_dims + 1
        if all(name in entries and entries[name].ndim == wide for name in _FLAGS):
            return data
        return super()._complete_done(done_spec, data)

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        # Shapes and flags are complete.
        if self.run_type_checks or _of_base(EnvBase) != _BASE:
            return super()._step_proc_data(next_tensordict_out)
        return next_tensordict_out


def _carried(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """Copy the entries for the next step, containers too; None where one is of a class that may need more than that."""
    root = {}
    for key, value in entries.items():
        if type(value) is torch.Tensor:
            root[key] = value
        elif _is_plain(value):
            root[key] = value.copy()
        else:
            return None
    return root


def _is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return True
    return type(value) is TensorDict and all(map(_is_plain, value._tensordict.values()))


def _place(root: dict[str, Any], data: dict[str, Any], containers: tuple[str, ...]) -> None:
    """Put new entries over the old ones; in containers, which stay apart, those that are not new stay."""
    if not containers:
        root.update(data)
        return
    old: dict[str, Any] = {key: root.get(key) for key in containers}
    root.update(data)
    for key in containers:
        new, before = data[key].copy(), old[key]
        root[key] = before.update(new) if type(before) is TensorDict else new


def _forget(entries: dict[str, Any], fresh: Mapping[str, Any], done: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set to zero what sub-environments that are reset leave behind: actions, hidden states.

    As :meth:`torchrl.envs.EnvBase.reset` does, which keeps all of it where all are reset.
    """
    for key, value in entries.items():
        if type(value) is TensorDict:
            _forget(value._tensordict, fresh[key]._tensordict if key in fresh else {}, done, rows)
        elif key in fresh or key in _FLAGS:
            continue
        elif rows is not None:
            entries[key] = value.index_fill(0, rows, 0)
        else:
            entries[key] = value.masked_fill(done.view(-1, *([1] * (value.ndim - 1))), 0)

"""Checks for private names of TorchRL and TensorDict, and fallbacks without them.

The names are looked up at import, in the text of the classes' modules. That text also contains the names of instance
attributes. If a name is missing, TorchRL's public, slower methods are used, and one warning names the versions.
"""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers import samplers
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import GymWrapper

__all__ = [
    "HAS_FAST_PATH",
    "HAS_SLICE_SAMPLER",
    "HAS_WRAPPER",
    "BaseStepMixin",
    "find_getter",
    "is_sampler",
    "new_tensordict",
    "register_without_replacement",
]

# The fast path of a step calls or skips these parts of EnvBase.
_FAST_PATH_NAMES = """
    _step _reset _step_mdp _step_proc_data _reset_proc_data _step_and_maybe_reset _complete_done
    step reset maybe_reset any_done step_mdp step_and_maybe_reset rand_action
    read_action read_done read_obs read_reward _post_step_mdp_hooks _output_transform _reset_output_transform
    _compiled_step_and_maybe_reset
"""
_TENSORDICT_NAMES = "_new_unsafe _tensordict _td_dim_names _device"
_SLOW_STEPS = "torchrl_ext.GymWrapper steps as EnvBase does, which takes longer"

# GymWrapper overrides or calls these methods of TorchRL's wrapper, and these functions that convert spaces.
_WRAPPER_NAMES = """
    _check_kwargs _validate_env _is_batched _get_batch_size _make_specs _make_done_spec
    _categorical_action_encoding _env _step _reset _conversion_registry _gym_to_torchrl_spec_transform
"""
_PLAIN_WRAPPER = "torchrl_ext.GymWrapper is TorchRL's own, and has none of this package's options"

# SliceSampler overrides or reads these attributes of TorchRL's sampler, and of its storages.
_SLICE_SAMPLER_NAMES = """
    _get_stop_and_length _cache _fetch_traj _used_traj_key end_key end_keys mark_update _REPLACEMENT_DISPATCH
"""
_TRACKED_STORAGE_NAMES = "_mutation_revision _last_cursor_index _is_full _compilable _storage"
_PLAIN_SAMPLER = "torchrl_ext.SliceSampler is TorchRL's own, which reads all elements again after each write"


@cache
def _words_in_source(cls: type) -> frozenset[str]:
    """Return the words in the modules that define the methods of a class and its bases."""
    methods = [value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, types.FunctionType)]
    modules = {part.__module__ for part in methods if part.__module__.startswith(("torchrl.", "tensordict."))}
    texts = (Path(str(sys.modules[name].__file__)).read_text("utf-8") for name in modules)
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def _has_all_names(cls: type, names: str, consequence: str) -> bool:
    """Return whether a class of TorchRL uses all these names; warn if not."""
    missing = [name for name in names.split() if name not in _words_in_source(cls)]
    if missing:
        versions = f"torchrl {torchrl.__version__}, tensordict {tensordict.__version__}"
        warnings.warn(
            f"{cls.__name__} of {versions} has no {', '.join(missing)}: {consequence}. Install a version of rl-ext "
            "that supports this version, or an earlier TorchRL; the documentation's page Compatibility lists the "
            "tested versions",
            stacklevel=3,
        )
    return not missing


_HAS_TENSORDICT_NAMES = _has_all_names(TensorDict, _TENSORDICT_NAMES, _SLOW_STEPS)
# Whether steps on plain TensorDicts can take the fast path. If not, EnvBase's steps are used.
HAS_FAST_PATH = _has_all_names(GymWrapper, _FAST_PATH_NAMES, _SLOW_STEPS) and _HAS_TENSORDICT_NAMES
# Whether TorchRL's wrapper and its slice sampler can be extended. If not, they are used unchanged.
HAS_WRAPPER = _has_all_names(GymWrapper, _WRAPPER_NAMES, _PLAIN_WRAPPER)
HAS_SLICE_SAMPLER = _has_all_names(samplers.SliceSampler, _SLICE_SAMPLER_NAMES, _PLAIN_SAMPLER) and _has_all_names(
    TensorStorage, _TRACKED_STORAGE_NAMES, _PLAIN_SAMPLER
)


class BaseStepMixin(EnvBase):
    """Mixin with the steps of ``EnvBase``, used if the fast path is not available."""

    def _refuse_overrides(self) -> None:
        """Do nothing, because ``EnvBase`` calls every method."""


def new_tensordict(entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    """Make a TensorDict from entries that have its batch size and device."""
    return TensorDict(entries, batch_size=batch_size, device=device)


def find_getter(tensordict: TensorDictBase) -> Callable[..., Any]:
    """Return the function that returns an entry, or a default."""
    return tensordict.get


if _HAS_TENSORDICT_NAMES:
    _new = TensorDict._new_unsafe

    def new_tensordict(entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
        """Make a TensorDict from entries that have its batch size and device, without checks."""
        made = _new(entries, batch_size=batch_size)
        made._device = device  # passing it as an argument takes longer than everything else
        return made

    def find_getter(tensordict: TensorDictBase) -> Callable[..., Any]:
        """Return the function that returns an entry whose key is a string, or a default."""
        return tensordict._tensordict.get if type(tensordict) is TensorDict else tensordict.get


def is_sampler(frame: types.FrameType) -> bool:
    """Return whether a frame runs code of TorchRL's samplers."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("torchrl.data.replay_buffers.samplers")


def register_without_replacement(sampler: type, alternative: type) -> None:
    """Let ``sampler(replacement=False)`` make an ``alternative``, as TorchRL does for its own samplers."""
    samplers._REPLACEMENT_DISPATCH[sampler] = alternative

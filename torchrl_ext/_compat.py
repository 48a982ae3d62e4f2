"""The private names of TorchRL and TensorDict that this package uses, and what takes their place where one is gone.

They are looked for when the package is imported: in the code of the classes' modules, so that attributes that only
instances have are found too. Where one is missing, what builds on it takes TorchRL's public, slower way, and one
warning names the versions. Each list names what one thing builds on.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import tensordict
import torch
import torchrl
from tensordict import TensorDict
from torchrl.envs import EnvBase, batched_envs
from torchrl.envs.libs.gym import GymWrapper

__all__ = ["EverySteps", "built", "has_short_steps", "has_supervision", "has_wrapper"]

# What waits for the workers of a ParallelEnv, and ends them.
_SUPERVISION = """
    _start_workers _shutdown_workers _create_td _get_metadata _set_metadata _reset _step _workers _events
    _shm_done_flags _worker_indices _owns_workers _parent_env _mp_start_method _use_buffers _single_task
    _metadata_from_workers _properties_set parent_channels shared_tensordicts shared_tensordict_parent
    _dispatch_caller_parallel
"""

# What a step of EnvBase's does, which the fast path leaves out.
_SHORT_STEPS = """
    _step _reset _step_mdp _step_proc_data _reset_proc_data _step_and_maybe_reset _complete_done
    step reset maybe_reset any_done step_mdp step_and_maybe_reset rand_action
    read_action read_done read_obs read_reward _post_step_mdp_hooks _output_transform _reset_output_transform
    _compiled_step_and_maybe_reset
"""
_TENSORDICT = "_new_unsafe _tensordict _td_dim_names _device"
_LONGER = "torchrl_ext.GymWrapper steps as EnvBase does, which takes longer"

# What upstream's wrapper calls for subclasses to override.
_WRAPPER = """
    _check_kwargs _build_env _validate_env _is_batched _get_batch_size _make_specs _make_done_spec
    _categorical_action_encoding _env _step _reset
"""


def _names_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, types.CodeType):
            yield from constant.co_names
            yield from _names_in(constant.co_consts)
        elif isinstance(constant, tuple):
            yield from _names_in(constant)
        elif isinstance(constant, str):  # getattr(self, "_name", None)
            yield constant


@cache
def _names_of(cls: type) -> frozenset[str]:
    """Collect the names that the modules of a class and its bases have, read or write."""
    modules = {base.__module__ for base in cls.__mro__ if base.__module__.startswith(("torchrl.", "tensordict."))}
    specs = [importlib.import_module(name).__spec__ for name in modules]
    return frozenset(_names_in(spec.loader.get_code(spec.name) for spec in specs))  # type: ignore[union-attr]


@cache
def _has(cls: type, names: str, without: str) -> bool:
    missing = [name for name in names.split() if name not in _names_of(cls)]
    if missing:
        versions = f"torchrl {torchrl.__version__}, tensordict {tensordict.__version__}"
        warnings.warn(
            f"{cls.__name__} of {versions} has no {', '.join(missing)}: {without}. Install a version of rl-ext that "
            "knows this one, or an earlier one of TorchRL; those that were tested are on the documentation's page "
            "Compatibility",
            stacklevel=3,
        )
    return not missing


def has_supervision() -> bool:
    """Return whether the workers of a ``ParallelEnv`` can be watched; else they are upstream's."""
    without = "torchrl_ext.ParallelEnv runs upstream's workers, which start slower and do not say what they died of"
    return _has(batched_envs.ParallelEnv, _SUPERVISION, without)


def has_short_steps() -> bool:
    """Return whether steps can leave out what plain TensorDicts do not need; else they are ``EnvBase``'s."""
    return _has(GymWrapper, _SHORT_STEPS, _LONGER) & _has(TensorDict, _TENSORDICT, _LONGER)


def has_wrapper() -> bool:
    """Return whether upstream's wrapper can be built on; else there is just upstream's."""
    without = "torchrl_ext.GymWrapper is TorchRL's own, and takes none of this package's options"
    return _has(GymWrapper, _WRAPPER, without)


class EverySteps(EnvBase):
    """Steps as ``EnvBase`` takes them, in place of the short ones."""

    def _refuse_overrides(self) -> None:
        """Refuse nothing: all is called."""


if _has(TensorDict, _TENSORDICT, _LONGER):
    _new = TensorDict._new_unsafe

    def built(entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
        """Make a TensorDict of entries that are on its device and have its batch size."""
        made = _new(entries, batch_size=batch_size)
        # As an argument it would be turned into a device once more, which takes longer than all the rest.
        made._device = device
        return made

else:

    def built(entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
        """Make a TensorDict of entries that are on its device and have its batch size."""
        return TensorDict(entries, batch_size=batch_size, device=device)

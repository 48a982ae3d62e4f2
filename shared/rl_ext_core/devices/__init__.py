"""Which device computes, decided in one place and with a reason.

Upstream libraries fall back to the CPU in silence: Stable Baselines3 turns ``"cuda"`` and even ``"cuda:99"``
into the CPU where there is no CUDA. Here only ``"auto"`` may choose; a device that was named is that device
or an error.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    InvalidTypeError,
    missing_dependency,
)

if TYPE_CHECKING:
    from types import ModuleType

    import torch

__all__ = ["Decision", "resolve"]

_log = logging.getLogger(__name__)
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")
_EXPECTED = '"auto", "cpu", "cuda", "cuda:<index>" or a torch.device of type cpu or cuda'

# The reason is worth one line per process, however many buffers and wrappers ask.
_logged_cpu = False


@dataclass(frozen=True)
class Decision:
    """The device that was decided on, and why.

    :param compute: where tensors live and networks run; a CUDA device always carries its index
    :param reason: one sentence, fit for a log
    """

    compute: torch.device
    reason: str


def resolve(device: str | torch.device = "auto") -> Decision:
    """Decide which device computes.

    :param device: ``"auto"`` (the current CUDA device if there is one, else the CPU, which is logged once per
        process), ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` with an index among the visible devices, or such a
        ``torch.device``
    :return: the device and the reason for it
    :raises DeviceUnavailableError: a CUDA device was named and this process cannot use it
    :raises InvalidArgumentError: the text names no device that is known here
    :raises InvalidTypeError: neither text nor a ``torch.device``
    :raises MissingDependencyError: torch is not installed
    """
    torch = _import_torch()
    name = _name(torch, device)
    if name == "auto":
        return _decide_automatically(torch)
    if name == "cpu":
        return Decision(compute=torch.device("cpu"), reason="the CPU was asked for")
    match = _CUDA.fullmatch(name)
    if match is None:
        raise InvalidArgumentError(
            f'device={name!r} names no device that is known here; expected {_EXPECTED}. Write device="auto"'
        )
    index = None if match[1] is None else int(match[1])
    return _decide_on_cuda(torch, name, index)


def _import_torch() -> ModuleType:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there and broken: its own error says more
            raise
        raise missing_dependency("torch", "sb3", "Choosing a device") from error
    return torch


def _name(torch: ModuleType, device: object) -> str:
    """Write the argument as text. ``torch.device("cpu", 0)`` is the CPU, of which there is one."""
    if isinstance(device, torch.device):
        return "cpu" if device.type == "cpu" else str(device)
    if isinstance(device, str):
        return device
    raise InvalidTypeError(
        f"device={device!r} is of type {type(device).__name__}; expected {_EXPECTED}. "
        f'Write device="{f"cuda:{device}" if type(device) is int and device >= 0 else "auto"}"'
    )


def _decide_automatically(torch: ModuleType) -> Decision:
    global _logged_cpu
    visible = _visible_count(torch)
    if visible:
        compute = torch.device("cuda", _current_index(torch))
        return Decision(compute=compute, reason=f"auto: {compute} of {_count_text(visible)}")
    reason = f"auto: the CPU, because {_why_no_cuda(torch)}"
    if not _logged_cpu:
        _logged_cpu = True
        _log.info(reason)
    return Decision(compute=torch.device("cpu"), reason=reason)


def _decide_on_cuda(torch: ModuleType, name: str, index: int | None) -> Decision:
    visible = _visible_count(torch)
    if not visible:
        raise DeviceUnavailableError(
            f"device={name!r} was asked for, but {_why_no_cuda(torch)}. "
            'Write device="cpu", or device="auto" to use a GPU wherever there is one'
        )
    index = _current_index(torch) if index is None else index
    if index >= visible:
        raise DeviceUnavailableError(
            f"device={name!r} was asked for, but this process sees {_count_text(visible)}, counted from 0. "
            f'Write device="cuda:{visible - 1}", or device="auto"'
        )
    return Decision(compute=torch.device("cuda", index), reason=f"{name} was asked for")


def _visible_count(torch: ModuleType) -> int:
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _current_index(torch: ModuleType) -> int:
    """Index of what plain ``"cuda"`` means: 0 until CUDA is initialised, which asking would do."""
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0


def _count_text(visible: int) -> str:
    return f"{visible} CUDA device{'' if visible == 1 else 's'}"


def _why_no_cuda(torch: ModuleType) -> str:
    if not torch.backends.cuda.is_built():
        return f"the installed torch {torch.__version__} is built without CUDA"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        return f"torch finds no CUDA device under CUDA_VISIBLE_DEVICES={mask!r}"
    return "torch finds no CUDA device on this machine"

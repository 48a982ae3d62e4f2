"""What callers may write to name a device, read into one form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from rl_ext_core.devices.inventory import Gpu, Inventory

Kind = Literal["auto", "cpu", "cuda", "uuid", "nvidia-smi", "pci", "egl", "same", "none"]

_NUMBER = "(0|[1-9][0-9]{0,8})"
_BEYOND = 10**9
_HEX = "[0-9a-fA-F]"
_FORMS: dict[Kind, str] = {
    "auto": "auto",
    "cpu": "cpu",
    "cuda": f"cuda(?::{_NUMBER})?",
    "uuid": "(GPU-[0-9a-fA-F-]+)",
    "nvidia-smi": f"nvidia-smi:{_NUMBER}",
    "pci": rf"pci:((?:{_HEX}{{1,8}}:)?{_HEX}{{2}}:{_HEX}{{2}}\.{_HEX})",
}
_FOR_RENDERING: dict[Kind, str] = {"egl": f"egl:{_NUMBER}", "same": "same", "none": "none"}
_EXPECTED = (
    '"auto", "cpu", "cuda", "cuda:<index>", an index, "GPU-<uuid>", "nvidia-smi:<index>", "pci:<address>" '
    "or a torch.device of type cpu or cuda"
)


@dataclass(frozen=True)
class Request:
    """A device as somebody asked for it.

    :param kind: the form that was used
    :param value: its index, UUID or address, as text; empty where the form has none
    :param argument: the argument's name, for errors
    :param asked: what was written
    """

    kind: Kind
    value: str
    argument: str
    asked: object

    def __str__(self) -> str:
        return f"{self.argument}={self.asked!r}"

    @property
    def index(self) -> int | None:
        """The index, where there is one."""
        return int(self.value) if self.value.isdigit() else None


def parse(asked: object, argument: str) -> Request:
    """Read what the argument ``argument`` (``"device"`` or ``"render"``) was given.

    :raises InvalidArgumentError: the text has none of the forms
    :raises InvalidTypeError: neither text, an index, nor a ``torch.device``
    """
    if type(asked) is int and abs(asked) >= _BEYOND:  # Python does not write the longest ones in decimal
        raise InvalidArgumentError(f'{argument}={asked:#x} is no index of a device. Write {argument}="auto"')
    for kind, form in (_FORMS | (_FOR_RENDERING if argument == "render" else {})).items():
        match = re.fullmatch(form, _text(asked, argument), re.ASCII)
        if match:
            return Request(kind, (match[1] or "") if match.lastindex else "", argument, asked)
    raise InvalidArgumentError(
        f"{argument}={str(asked)!r} names no device that is known here; expected {_expected(argument)}. "
        f'Write {argument}="{_likely(str(asked), argument)}"'
    )


def _text(asked: object, argument: str) -> str:
    if isinstance(asked, str):
        return asked
    if type(asked) is int and asked >= 0:
        return f"cuda:{asked}"
    # torch.device, without importing torch for those who do not use it.
    if type(asked).__module__ == "torch" and type(asked).__name__ == "device":
        return "cpu" if asked.type == "cpu" else str(asked)  # type: ignore[attr-defined]
    likely = "auto" if argument == "device" else "same" if asked else "none"
    what = "negative" if type(asked) is int else f"of type {type(asked).__name__}"
    raise InvalidTypeError(
        f'{argument}={asked!r} is {what}; expected {_expected(argument)}. Write {argument}="{likely}"'
    )


def _expected(argument: str) -> str:
    return f'{_EXPECTED}, or for rendering "same", "none" or "egl:<index>"' if argument == "render" else _EXPECTED


def _likely(asked: str, argument: str) -> str:
    """Guess which form was meant, so that the line to write is one that is understood."""
    text = asked.strip().strip("'\"[]").lower().replace(" ", "")
    for guess in (text, f"cuda:{text}", text.replace("gpu:", "cuda:").replace("gpu-", "GPU-")):
        if any(re.fullmatch(form, guess, re.ASCII) for form in _FORMS.values()):
            return guess
    return "same" if argument == "render" else "auto"


def find_gpu(request: Request, inventory: Inventory) -> Gpu:
    """Find the GPU that a UUID, a PCI address or an index of nvidia-smi names, visible to CUDA or not.

    :raises DeviceUnavailableError: the machine has none such
    :raises InvalidArgumentError: the beginning of a UUID fits several
    """
    if not inventory.gpus:
        raise DeviceUnavailableError(
            f"{request} was asked for, but this machine shows no GPU: {inventory.nvml_error or 'NVML lists none'}. "
            f'Write {request.argument}="cpu"'
        )
    if request.kind == "nvidia-smi":
        found = [gpu for gpu in inventory.gpus if gpu.index == request.index]
    elif request.kind == "pci":
        found = [gpu for gpu in inventory.gpus if gpu.pci == _whole_address(request.value)]
    else:
        found = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(request.value.lower())]
    if len(found) > 1:
        uuids = " and ".join(gpu.uuid for gpu in found)
        raise InvalidArgumentError(
            f'{request} fits {len(found)} GPUs: {uuids}. Write {request.argument}="{found[0].uuid}"'
        )
    if not found:
        raise DeviceUnavailableError(
            f"{request} was asked for, but the GPUs here are {_listed(inventory.gpus, request.kind)}. "
            f'Write {request.argument}="{_listed(inventory.gpus[:1], request.kind)}"'
        )
    return found[0]


def _whole_address(value: str) -> str:
    text = value.lower() if value.count(":") == 2 else f"0000:{value.lower()}"
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _listed(gpus: tuple[Gpu, ...], kind: Kind) -> str:
    names = {"nvidia-smi": "nvidia-smi:{0.index}", "pci": "pci:{0.pci}"}
    return ", ".join(names.get(kind, "{0.uuid}").format(gpu) for gpu in gpus)

"""What a mask was meant to say: read generously, written as CUDA and everybody else reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ext_core.devices import _mask
from rl_ext_core.devices._mask import MASK
from rl_ext_core.errors import RlExtError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices.checks._base import Situation
    from rl_ext_core.devices.inventory import Gpu

_WRAPPERS = " \t\r\n'\"`[](){}<>"
_WORDS = ("gpu", "gpus", "cuda", "device", "devices")
_RANGE = r"(\d{1,3})(?:-|\.\.)(\d{1,3})"
_PREFIXED = r"(?:cuda|gpu|gpus|device|dev|nvidia-smi|(?:/dev/)?nvidia)[:=_#-]?(\d{1,6})"
_NUMBER = r"\+?(\d{1,6})"


@dataclass(frozen=True)
class Wish:
    """What somebody meant by a mask.

    :param mask: one that says so and is valid on the machine; None where nobody can tell
    :param complete: whether it names all that was named
    """

    mask: str | None
    complete: bool


def read(mask: str, situation: Situation) -> Wish:
    """Read what was meant by ``mask``."""
    gpus: list[Gpu] = []
    slices: list[str] = []
    by_name = False
    complete = True
    order = _order(situation)
    for token in _tokens(mask):
        if re.fullmatch(r"-\d+", token):  # as CUDA documents it: what stands behind is hidden
            break
        numbers = _numbers(token)
        found = _identified(token, situation) if numbers is None else [order[n] for n in numbers if n < len(order)]
        by_name |= numbers is None and bool(found)
        complete &= len(found) == (1 if numbers is None else len(numbers))
        slices += _slices(token, situation)
        gpus += [gpu for gpu in (found[:1] if numbers is None else found) if gpu not in gpus]
    complete &= len(gpus) == 1 or not any(gpu.mig for gpu in gpus)  # CUDA shows nothing beside a slice
    text = _written(gpus, slices, by_name, order)
    return Wish(text if _is_valid(text, situation) else None, complete)


def fallback(mask: str, situation: Situation) -> str:
    """Give a mask that shows one GPU, or one slice where that was wanted, where nobody can tell which one was meant."""
    slices = [slice_ for gpu in situation.inventory.gpus for slice_ in gpu.mig]
    for candidate in (*slices, "0") if "mig" in mask.lower() else ("0", *slices):
        if _is_valid(candidate, situation):
            return candidate
    return situation.inventory.gpus[0].uuid


def _tokens(mask: str) -> Iterator[str]:
    for part in re.split(r"[,;|\s]+", mask.strip(_WRAPPERS)):
        token = part.strip(_WRAPPERS)
        if token and token.lower() not in _WORDS:
            yield token


def _numbers(token: str) -> list[int] | None:
    """Read a number or several; None if the token is neither."""
    ends = re.fullmatch(_RANGE, token, re.ASCII)
    if ends:
        return list(range(int(ends[1]), int(ends[2]) + 1))
    one = re.fullmatch(_NUMBER, token, re.ASCII) or re.fullmatch(_PREFIXED, token, re.ASCII | re.IGNORECASE)
    return [int(one[1])] if one else None


def _identified(token: str, situation: Situation) -> list[Gpu]:
    """Find the GPUs whose UUID, or that of a slice, begins like this, in whatever case, with or without a prefix."""
    begin = re.sub(r"^(mig-)?(gpu-)?", "", token.lower()).split("/")[0]
    # Without a prefix a few letters may be anything.
    if not re.fullmatch("[0-9a-f-]{4,}" if begin == token.lower() else "[0-9a-f-]+", begin):
        return []
    if token.lower().startswith("mig-") and "/" not in token and not token.lower().startswith("mig-gpu-"):
        return [gpu for gpu in situation.inventory.gpus if any(_begins(slice_, token) for slice_ in gpu.mig)]
    return [gpu for gpu in situation.inventory.gpus if _begins(gpu.uuid, f"gpu-{begin}")]


def _slices(token: str, situation: Situation) -> list[str]:
    return [slice_ for gpu in situation.inventory.gpus for slice_ in gpu.mig if _begins(slice_, token)]


def _begins(uuid: str, token: str) -> bool:
    return len(token) > len("MIG-") and uuid.lower().startswith(token.lower())


def _order(situation: Situation) -> tuple[Gpu, ...]:
    by_uuid = {gpu.uuid: gpu for gpu in situation.inventory.gpus}
    try:
        order = _mask.cuda_order(situation.inventory, situation.environ)
    except RlExtError:
        order = tuple(by_uuid)
    return tuple(by_uuid[uuid] for uuid in order if uuid in by_uuid)


def _written(gpus: list[Gpu], slices: list[str], by_name: bool, order: tuple[Gpu, ...]) -> str:
    """Write the mask: numbers if that is how it was written, else UUIDs; one slice where there are slices."""
    cut = slices + [gpu.mig[0] for gpu in gpus if gpu.mig]
    if cut:
        return cut[0]
    return ",".join(gpu.uuid if by_name else str(order.index(gpu)) for gpu in gpus)


def _is_valid(mask: str, situation: Situation) -> bool:
    try:
        shown = _mask.visible(situation.inventory, {**situation.environ, MASK: mask})
    except RlExtError:
        return False
    return bool(shown.uuids) and shown.ended is None

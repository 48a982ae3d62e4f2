"""CUDA_VISIBLE_DEVICES: what CUDA makes of it, and what was meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_ext_core.devices import _mask
from rl_ext_core.devices._mask import MASK
from rl_ext_core.devices._renderers import BACKEND, INDEX
from rl_ext_core.devices.checks import _wishes
from rl_ext_core.devices.checks._base import mistake, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ext_core.devices._mask import Visible
    from rl_ext_core.devices.checks._base import Changes, Mistake, Severity, Situation

_NO_CUDA = 'torch.device("cuda") ends in "RuntimeError: No CUDA GPUs are available"'
_RAY = "@ray.remote(num_gpus=1)"
_NONE_WORDS = ("none", "void", "no", "off", "null", "nil", "false", "cpu")


def find(situation: Situation) -> Iterator[Mistake]:
    """Find what is wrong with the mask. On a machine without GPUs it hides nothing, and may be wrong yet."""
    shown = situation.visible
    if shown is None:
        return
    if not situation.inventory.gpus:
        if shown.once is not None:
            yield mistake(situation, MASK, f"{shown.ended}, on any machine", {MASK: shown.once}, "warning")
        return
    mask = situation.environ.get(MASK)
    if mask is None:
        if shown.ended:
            yield mistake(situation, MASK, _sliced(shown), {MASK: shown.mig}, "warning")
        return
    for special in (_empty, _deliberate, _word):
        found = special(mask, situation)
        if found is not None:
            yield found
            return
    oddity = _oddity(mask, shown)
    if oddity is not None:
        yield _misread(mask, oddity, shown, situation)


def _sliced(shown: Visible) -> str:
    return f"it is not set, and {shown.ended}: {shown.mig}"


def _empty(mask: str, situation: Situation) -> Mistake | None:
    if mask.strip(" \t\r\n'\""):
        return None
    effect = (
        f"it is empty and hides all {len(situation.inventory.gpus)} GPUs: {_NO_CUDA}{_robosuite(mask, situation)}; a "
        f'blank in "export {MASK}= 1" leaves it like that, and "export {MASK} = 1" sets nothing at all'
    )
    if _under_ray(situation):
        effect = f"Ray hides all GPUs from an actor that asks for none: {_NO_CUDA}{_robosuite(mask, situation)}"
        return mistake(situation, MASK, effect, _RAY, then=_one(mask, situation))
    return mistake(situation, MASK, effect, _one(mask, situation))


def _deliberate(mask: str, situation: Situation) -> Mistake | None:
    """A negative number in front hides all GPUs, as CUDA documents; so do words that say as much."""
    first = mask.split(",")[0].strip()
    if re.fullmatch(r"-\d+", first):
        effect = f"{first} hides all {len(situation.inventory.gpus)} GPUs, so that the CPU computes and {_NO_CUDA}"
    elif first.lower() in _NONE_WORDS:
        effect = f"{first!r} is not a number and hides all GPUs, so that the CPU computes and {_NO_CUDA}"
    else:
        return None
    return mistake(situation, MASK, effect, {MASK: None}, "warning")


def _word(mask: str, situation: Situation) -> Mistake | None:
    word = mask.strip(" \t\r\n'\"").lower()
    if word == "nodevfiles":
        effect = f"a launcher (Ray, SLURM) sets it for a process that has asked for no GPU: {_NO_CUDA}"
        slurm = any(name.startswith("SLURM_") for name in situation.environ)
        fix = "srun --gpus-per-task=1 python train.py" if slurm else _RAY
        return mistake(situation, MASK, effect, fix, then=_one(mask, situation))
    if word in ("all", "*", "any", "auto"):
        effect = f"CUDA knows no such word and shows no GPU, though that is how Docker names all of them: {_NO_CUDA}"
        return mistake(situation, MASK, effect, {MASK: None})
    return None


def _one(mask: str, situation: Situation) -> Changes:
    return {MASK: _wishes.fallback(mask, situation)}


def _under_ray(situation: Situation) -> bool:
    return any(name.startswith("RAY_") for name in situation.environ)


def _oddity(mask: str, shown: Visible) -> str | None:
    """Say what CUDA reads otherwise than it looks, None if nothing."""
    if shown.ended is not None:
        return shown.ended + _about_wrappers(mask)
    for entry in mask.split(","):
        if entry.strip().startswith(("GPU-", "MIG-")):
            continue
        if not re.fullmatch(r"\d+", entry.strip(), re.ASCII):
            return f"CUDA reads {entry!r} as {_mask._leading_number(entry.strip())}"
        if entry != entry.strip():
            return f"CUDA skips the blank in {entry!r}, and not everybody does"
    return None


def _about_wrappers(mask: str) -> str:
    return " (quotes and brackets are part of the value)" if re.search(r"[][(){}'\"]", mask) else ""


def _misread(mask: str, oddity: str, shown: Visible, situation: Situation) -> Mistake:
    wish = _wishes.read(mask, situation)
    fix: Changes = {MASK: wish.mask} if wish.mask is not None else _one(mask, situation)
    severity: Severity = "error"
    renderer = _robosuite(mask, situation)
    if wish.mask is not None and wish.complete and not renderer and _shows(wish.mask, situation) == shown.uuids:
        severity = "warning"
    effect = f"{oddity}; torch sees {_seen(shown, situation)}{renderer}"
    return mistake(situation, MASK, effect, fix, severity)


def _shows(mask: str, situation: Situation) -> tuple[str, ...]:
    return _mask.visible(situation.inventory, {**situation.environ, MASK: mask}).uuids


def _seen(shown: Visible, situation: Situation) -> str:
    gpus = [situation.inventory.gpu(uuid) for uuid in shown.uuids]
    if not gpus:
        return f"no GPU and {_NO_CUDA}"
    if len(gpus) == 1:
        slice_ = f", its slice {shown.mig}" if shown.mig else ""
        return f"one GPU, {named(gpus[0])}{slice_}"
    return f"{len(gpus)} GPUs, nvidia-smi {', '.join(str(gpu.index) for gpu in gpus)}"


def _robosuite(mask: str, situation: Situation) -> str:
    """Say how robosuite fails on a mask that it reads as numbers, empty if it does not."""
    versions, environ = situation.inventory.versions, situation.environ
    if not {"robosuite", "mujoco"} <= versions.keys() or environ.get(INDEX) is not None:
        return ""
    if environ.get(BACKEND) in ("osmesa", "glx") or mask.startswith(("GPU-", "MIG-")):
        return ""
    for entry in [mask] if mask.isdigit() else mask.split(","):
        try:
            int(entry)
        except ValueError:
            text = f'"ValueError: invalid literal for int() with base 10: {entry!r}"'
            return f", and robosuite {versions['robosuite']} cannot render: {text}"
    return ""

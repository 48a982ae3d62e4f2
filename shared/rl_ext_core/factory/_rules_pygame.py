"""How pygame's objects are copied: pictures with what is on them, and the window as a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _rules

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


def _begin(was_begun: bool) -> Any:
    """Prepare pygame where the original's process had: environments do so with their first picture only."""
    import pygame

    if was_begun and not pygame.get_init():
        pygame.init()
    return pygame


def _begun() -> bool:
    import pygame

    return bool(pygame.get_init())


def _is_window(surface: Any) -> bool:
    import pygame

    return pygame.display.get_init() and pygame.display.get_surface() is surface


def _surface(surface: Any) -> tuple[Any, ...]:
    parent = surface.get_parent()
    if parent is not None:
        return _make_part, (parent, surface.get_offset(), surface.get_size())
    if _is_window(surface):
        return _make_window, (surface.get_size(), surface.get_flags()), _settings(surface), None, None, _fill
    made = (surface.get_size(), surface.get_flags(), surface.get_bitsize(), surface.get_masks())
    return _make_surface, (_begun(), *made), _settings(surface), None, None, _fill


def _settings(surface: Any) -> dict[str, Any]:
    return {
        "size": surface.get_size(),
        "masks": surface.get_masks(),
        "alpha": surface.get_alpha(),
        "colorkey": surface.get_colorkey(),
        "clip": tuple(surface.get_clip()),
        "palette": [tuple(color) for color in surface.get_palette()] if surface.get_bitsize() <= 8 else None,
        "window": _is_window(surface),
        "pixels": bytes(surface.get_buffer().raw),
    }


def _surface_settings(surface: Any) -> dict[str, Any]:
    parent = surface.get_parent()
    within = None if parent is None else (surface.get_offset(), surface.get_size())
    return {"parent": parent, "within": within} if parent is not None else _settings(surface)


def _make_part(parent: Any, offset: tuple[int, int], size: tuple[int, int]) -> Any:
    return parent.subsurface((*offset, *size))


def _make_window(size: tuple[int, int], flags: int) -> Any:
    pygame = _begin(True)
    wanted = flags & (pygame.FULLSCREEN | pygame.RESIZABLE | pygame.NOFRAME | pygame.SCALED | pygame.HIDDEN)
    return pygame.display.set_mode(size, wanted)


def _make_surface(was_begun: bool, size: tuple[int, int], flags: int, bits: int, masks: Any) -> Any:
    pygame = _begin(was_begun)
    return pygame.Surface(size, flags & pygame.SRCALPHA, bits, masks)


def _fill(surface: Any, state: dict[str, Any]) -> None:
    if state["palette"] is not None:
        surface.set_palette(state["palette"])
    surface.get_buffer().write(state["pixels"])
    surface.set_clip(state["clip"])
    if state["alpha"] is not None:
        surface.set_alpha(state["alpha"])
    if state["colorkey"] is not None:
        surface.set_colorkey(state["colorkey"])


def _clock(clock: Any) -> tuple[Any, ...]:
    return _make_clock, (_begun(),)


def _make_clock(was_begun: bool) -> Any:
    return _begin(was_begun).time.Clock()


_FONT = "from which file it comes cannot be read; make it where it is used"
_MASK = "it is made from a picture; keep the picture, and write pygame.mask.from_surface(picture) where it is used"
_SOUND = "a copy would be played in every worker; make it where it is used"


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("pygame.surface:Surface", _surface, _surface_settings),
    ("pygame:Surface", _surface, _surface_settings),
    ("pygame.time:Clock", _clock, lambda _: {}),
    ("pygame:Clock", _clock, lambda _: {}),
    ("pygame.font:Font", _rules.refusal(_FONT), None),
    ("pygame.mask:Mask", _rules.refusal(_MASK), None),
    ("pygame:Mask", _rules.refusal(_MASK), None),
    ("pygame.mixer:Sound", _rules.refusal(_SOUND), None),
    ("pygame.color:Color", _rules.by_parts, None),
    ("pygame:Color", _rules.by_parts, None),
]

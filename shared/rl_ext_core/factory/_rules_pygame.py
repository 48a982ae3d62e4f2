"""How pygame's objects are copied: pictures with what is on them, the window as a window, fonts if they are known."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["RULES"]

_STYLE = ("bold", "italic", "underline", "strikethrough", "align", "outline")
_SAMPLE = "Hxg 0.8?"


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


def _font(font: Any) -> tuple[Any, ...]:
    wanted = _font_settings(font)
    for file, size in _fonts(font):
        made = _make_font(_begun(), file, size, wanted)
        if _font_settings(made) == wanted and _look(made) == _look(font):
            return _make_font, (_begun(), file, size, wanted)
    raise pickle.PicklingError("from which file it comes cannot be read; make it where it is used")


def _look(font: Any) -> bytes:
    return bytes(font.render(_SAMPLE, False, "white", "black").get_buffer().raw)


def _fonts(font: Any) -> Iterator[tuple[str | None, int]]:
    import pygame

    size = getattr(font, "point_size", 0)
    # pygame makes its own font smaller than it is asked to.
    sizes = range(size, 2 * size + 1)
    yield from ((None, asked) for asked in sizes if pygame.font.Font(None, asked).point_size == size)
    file = pygame.font.match_font(getattr(font, "name", ""))
    if file is not None:
        yield file, size


def _make_font(was_begun: bool, file: str | None, size: int, wanted: dict[str, Any]) -> Any:
    pygame = _begin(was_begun)
    pygame.font.init()
    font = pygame.font.Font(file, size)
    for name in _STYLE:
        if wanted[name] is not None and getattr(font, name) != wanted[name]:
            setattr(font, name, wanted[name])
    return font


def _font_settings(font: Any) -> dict[str, Any]:
    names = ("name", "style_name", "point_size", *_STYLE)
    return {**{name: getattr(font, name, None) for name in names}, "height": font.get_height()}


def _mask(mask: Any) -> tuple[Any, ...]:
    return _make_mask, (mask.to_surface(),)


def _make_mask(surface: Any) -> Any:
    import pygame

    return pygame.mask.from_threshold(surface, "white", (1, 1, 1, 255))


def _sound(sound: Any) -> tuple[Any, ...]:
    import pygame

    return _make_sound, (pygame.mixer.get_init(), sound.get_raw(), sound.get_volume())


def _make_sound(mixer: Any, data: bytes, volume: float) -> Any:
    import pygame

    if mixer is not None and pygame.mixer.get_init() is None:
        pygame.mixer.init(*mixer)
    sound = pygame.mixer.Sound(buffer=data)
    sound.set_volume(volume)
    return sound


def _color(color: Any) -> tuple[Any, ...]:
    return type(color), tuple(color)


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: list[tuple[str, Callable[[Any], tuple[Any, ...]], Callable[[Any], Any] | None]] = [
    ("pygame.surface:Surface", _surface, _surface_settings),
    ("pygame:Surface", _surface, _surface_settings),
    ("pygame.time:Clock", _clock, lambda _: {}),
    ("pygame:Clock", _clock, lambda _: {}),
    ("pygame.font:Font", _font, _font_settings),
    ("pygame.mask:Mask", _mask, lambda mask: {"size": mask.get_size(), "bits": mask.to_surface()}),
    ("pygame:Mask", _mask, lambda mask: {"size": mask.get_size(), "bits": mask.to_surface()}),
    ("pygame.mixer:Sound", _sound, lambda sound: {"data": sound.get_raw(), "volume": sound.get_volume()}),
    ("pygame.color:Color", _color, lambda color: {"values": tuple(color)}),
    ("pygame:Color", _color, lambda color: {"values": tuple(color)}),
]

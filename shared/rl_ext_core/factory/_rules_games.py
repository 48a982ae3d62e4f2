"""How that is copied which games are made of: ALE's emulator, pygame's pictures, pymunk's bodies."""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _graft, _rules, streams

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


# The Arcade Learning Environment's emulator: settings, game, and the state it is in.
#
# Three things cannot be read. A setting takes effect when the game is loaded: one that was changed since then does so
# in the copy at once, in the original when reset(seed=...) loads it again. The screen of a copy is blank until it acts,
# and the action that may stick to its first step is none.
#
# https://github.com/Farama-Foundation/Arcade-Learning-Environment

# The settings of ale::stella::Settings. It does not list them; one that it does not know reads as its default.
_SETTINGS = {
    "Int": (
        *("system_random_seed", "max_num_frames", "max_num_frames_per_episode", "paddle_min", "paddle_max"),
        *("frame_skip", "reward_min", "reward_max", "max_turn_time", "fragsize", "freq", "tiafreq", "volume"),
    ),
    "Bool": (
        *("run_length_encoding", "restricted_action_set", "color_averaging", "send_rgb", "truncate_on_loss_of_life"),
        *("display_screen", "sound", "sound_obs", "clipvol"),
    ),
    "Float": ("repeat_action_probability",),
    "String": ("cpu", "palette", "record_screen_dir", "record_sound_filename"),
}
_SEED = "random_seed"


def _settings_of(emulator: Any) -> dict[str, Any]:
    found = {name: getattr(emulator, f"get{kind}")(name) for kind, names in _SETTINGS.items() for name in names}
    return {**found, "rom_file": emulator.getString("rom_file")}


def _emulator(emulator: Any) -> tuple[Any, ...]:
    settings = _settings_of(emulator)
    if not settings["rom_file"]:
        return _make_emulator, (type(emulator), settings, emulator.getInt(_SEED), None, None)
    state = emulator.cloneState(include_rng=True)
    return _make_emulator, (type(emulator), settings, emulator.getInt(_SEED), state, emulator.cloneState())


def _make_emulator(cls: Any, settings: dict[str, Any], seed: int, state: Any, state_without_random: Any) -> Any:
    emulator = cls()
    for kind, names in _SETTINGS.items():
        for name in names:
            # One that this version does not know cannot be set.
            if getattr(emulator, f"get{kind}")(name) != settings[name]:
                getattr(emulator, f"set{kind}")(name, settings[name])
    emulator.setInt(_SEED, streams.own_seed(seed))
    if state is not None:
        emulator.loadROM(settings["rom_file"])
        # Mode and difficulty are in it, also those that a game begins with and does not allow to set.
        emulator.restoreState(state if streams.is_keeping() else state_without_random)
    return emulator


def _common(emulator: Any) -> dict[str, Any]:
    settings = _settings_of(emulator)
    if not settings["rom_file"]:
        return settings
    state = emulator.cloneState()
    fixed = {"mode": state.getCurrentMode(), "difficulty": state.getDifficulty(), "state": state.serialize()}
    actions = [int(action.value) for action in emulator.getMinimalActionSet()]
    return {**settings, **fixed, "actions": actions, "modes": list(emulator.getAvailableModes())}


# pygame: pictures with what is on them.


def _begin(was_begun: bool) -> Any:
    """Prepare pygame where the original's process had: environments do so with their first picture only."""
    import pygame

    if was_begun and not pygame.get_init():
        pygame.init()
    return pygame


def _begun() -> bool:
    import pygame

    return bool(pygame.get_init())


def _surface(surface: Any) -> tuple[Any, ...]:
    import pygame

    parent = surface.get_parent()
    if parent is not None:
        return _make_part, (parent, surface.get_offset(), surface.get_size())
    if pygame.display.get_init() and pygame.display.get_surface() is surface:
        raise _graft.NoCopy(_WINDOW)
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
        "pixels": bytes(surface.get_buffer().raw),
    }


def _surface_settings(surface: Any) -> dict[str, Any]:
    parent = surface.get_parent()
    within = None if parent is None else (surface.get_offset(), surface.get_size())
    return {"parent": parent, "within": within} if parent is not None else _settings(surface)


def _make_part(parent: Any, offset: tuple[int, int], size: tuple[int, int]) -> Any:
    return parent.subsurface((*offset, *size))


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


_WINDOW = (
    "it is a window, and each copy would open one; hand the environment over before it is drawn, or make it with "
    'render_mode="rgb_array"'
)
_FONT = "from which file it comes cannot be read; make it where it is used"
_MASK = "it is made from a picture; keep the picture, and write pygame.mask.from_surface(picture) where it is used"
_SOUND = "a copy would be played in every worker; make it where it is used"


# PettingZoo's environments simulate bodies with pymunk: by its own way of pickling.
#
# Contacts that last from one step to the next go along, but not the order in which the solver takes them. Until the
# next reset, where an environment makes its space anew, a copy may hence move a little differently. What pymunk leaves
# out, such as the mass of a shape, is compared, so that a copy without it is not taken for faithful.

_PLAIN = (bool, int, float, str, type(None))
# Written before the solver reads it, but for the two shapes.
_OF_THE_STEP = ("a", "b", "swapped")
# An address; and what is made when it is read first.
_ADDRESS, _MADE_LATE = "id", "static_body"


def _part_settings(value: Any) -> dict[str, Any]:
    state = {kind: dict(pairs) for kind, pairs in value.__getstate__().items()}
    # Those of its own, too, which somebody may have added to; handles of C are named only.
    private = {name: part for name, part in vars(value).items() if name.startswith("_") and isinstance(part, _PLAIN)}
    return {"state": state, "properties": _properties(value), "private": private, "names": sorted(vars(value))}


def _space_settings(space: Any) -> dict[str, Any]:
    settings = _part_settings(space)
    special = settings["state"]["special"]
    index = {shape: number for number, shape in enumerate(space.shapes)}
    special["arbiters"] = {
        (index[contact["a"]], index[contact["b"]]): {
            name: contact[name] for name in contact if name not in _OF_THE_STEP
        }
        for contact in sorted(special["arbiters"], key=lambda contact: (index[contact["a"]], index[contact["b"]]))
    }
    return settings


def _properties(value: Any) -> dict[str, Any]:
    found = {}
    for base in type(value).__mro__:
        for name, part in vars(base).items():
            if not isinstance(part, property) or name == _ADDRESS:
                continue
            if name == _MADE_LATE and vars(value).get(f"_{name}") is None:
                continue
            try:
                read = getattr(value, name)
            except Exception:  # of what it is not, e.g. not in a space
                continue
            found[name] = list(read) if isinstance(read, KeysView) else read
    return found


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("ale_py._ale_py:ALEInterface", _emulator, _common),
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
    ("pymunk.space:Space", _rules.by_pickle, _space_settings),
    ("pymunk.body:Body", _rules.by_pickle, _part_settings),
    ("pymunk.shapes:Shape", _rules.by_pickle, _part_settings),
    ("pymunk.constraints:Constraint", _rules.by_pickle, _part_settings),
]

"""How the Arcade Learning Environment's emulator is copied: settings, game, and the state it is in.

Three things cannot be read. A setting takes effect when the game is loaded: one that was changed since then does so in
the copy at once, in the original when ``reset(seed=...)`` loads it again. The screen of a copy is blank until it acts,
and the action that may stick to its first step is none.

https://github.com/Farama-Foundation/Arcade-Learning-Environment
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _streams

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


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
        return _make, (type(emulator), settings, emulator.getInt(_SEED), None, None)
    state = emulator.cloneState(include_rng=True)
    return _make, (type(emulator), settings, emulator.getInt(_SEED), state, emulator.cloneState())


def _make(cls: Any, settings: dict[str, Any], seed: int, state: Any, state_without_random: Any) -> Any:
    emulator = cls()
    for kind, names in _SETTINGS.items():
        for name in names:
            # One that this version does not know cannot be set.
            if getattr(emulator, f"get{kind}")(name) != settings[name]:
                getattr(emulator, f"set{kind}")(name, settings[name])
    emulator.setInt(_SEED, _streams.own_seed(seed))
    if state is not None:
        emulator.loadROM(settings["rom_file"])
        # Mode and difficulty are in it, also those that a game begins with and does not allow to set.
        emulator.restoreState(state if _streams.is_keeping() else state_without_random)
    return emulator


def _common(emulator: Any) -> dict[str, Any]:
    settings = _settings_of(emulator)
    if not settings["rom_file"]:
        return settings
    state = emulator.cloneState()
    fixed = {"mode": state.getCurrentMode(), "difficulty": state.getDifficulty(), "state": state.serialize()}
    actions = [int(action.value) for action in emulator.getMinimalActionSet()]
    return {**settings, **fixed, "actions": actions, "modes": list(emulator.getAvailableModes())}


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("ale_py._ale_py:ALEInterface", _emulator, _common),
]

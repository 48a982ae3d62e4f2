"""
Registry of recordings, which are made on first use and stored in ``benchmarks/data/``.

``python -m benchmarks.recordings`` makes missing recordings. In a program::

    from benchmarks import recordings

    recording = recordings.load("pong")
    for obs, next_obs, actions, rewards, dones, infos in recording.transitions():
        buffer.add(obs, next_obs, actions, rewards, dones, infos)

The ``mujoco-*`` recordings need ``imageio``, and without a display ``MUJOCO_GL=egl`` or ``osmesa``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay import Recording

__all__ = ["RECORDINGS", "Recording", "Source", "load"]

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Source:
    """
    Recipe for making a recording: a recorder function, its arguments and the length.

    :param recorder: Name of a function of ``benchmarks.recorders``.
    :param env: Game or environment id, its first argument.
    :param steps: Default length; each step is one transition for each of 2 environments.
    :param options: Further arguments.
    """

    recorder: str
    env: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)

    def record(self, *, name: str, steps: int, progress: bool) -> Recording:
        """
        Make a new recording, without looking for a stored one.

        :param name: Name of the recording.
        :param steps: Number of steps.
        :param progress: Whether to show a progress bar.
        :return: The new recording.
        """
        # imported here, since it imports the environments' packages, which a replay does not need
        from benchmarks import recorders

        recorder: Callable[..., Recording] = getattr(recorders, self.recorder)
        return recorder(self.env, name=name, steps=steps, progress=progress, **self.options)


def _mujoco_source(env_id: str, camera: str | None = None) -> Source:
    """Return the recipe of 2000 steps in a MuJoCo environment."""
    return Source("record_mujoco", env_id, 2_000, {"camera": camera})


def _atari_source(game: str, policy: str = "sticky") -> Source:
    """Return the recipe of 10,000 steps in an Atari game."""
    return Source("record_atari", game, 10_000, {"policy": policy})


RECORDINGS = {
    "pong": _atari_source("Pong"),
    "breakout": _atari_source("Breakout"),
    "mspacman": _atari_source("MsPacman"),
    "seaquest": _atari_source("Seaquest"),
    "montezuma": _atari_source("MontezumaRevenge"),
    "spaceinvaders": _atari_source("SpaceInvaders"),
    "qbert": _atari_source("Qbert"),
    "enduro": _atari_source("Enduro"),
    "beamrider": _atari_source("BeamRider"),
    "freeway": _atari_source("Freeway"),
    "pong-random": _atari_source("Pong", "random"),
    "pong-scripted": _atari_source("Pong", "scripted"),
    "breakout-scripted": _atari_source("Breakout", "scripted"),
    "mujoco-cheetah": _mujoco_source("HalfCheetah-v5"),
    "mujoco-cheetah-track": _mujoco_source("HalfCheetah-v5", "track"),
    "mujoco-walker": _mujoco_source("Walker2d-v5"),
    "mujoco-walker-track": _mujoco_source("Walker2d-v5", "track"),
    "vizdoom": Source("record_vizdoom", "VizdoomMyWayHome-v1", 6_000),
    "vizdoom-corridor": Source("record_vizdoom", "VizdoomDeadlyCorridor-v1", 6_000),
}


def load(name: str, *, steps: int | None = None, progress: bool = False, folder: Path = DATA) -> Recording:
    """
    Read a recording, or make and store it if it is missing or too short.

    :param name: One of ``RECORDINGS``.
    :param steps: Number of steps from the start, by default that of the registry.
    :param progress: Whether to show a progress bar while recording.
    :param folder: Folder of the stored recordings.
    :return: The recording, exactly ``steps`` long. The same name and length give the same content.
    :raises ValueError: If ``name`` is not one of ``RECORDINGS``.
    """
    if name not in RECORDINGS:
        raise ValueError(_unknown_names_message(name))
    source = RECORDINGS[name]
    steps = source.steps if steps is None else steps
    path = folder / f"{name}.npz"
    if path.exists():
        recording = Recording.load(path)
        if len(recording) >= steps:
            return recording.head(steps)
    recording = source.record(name=name, steps=steps, progress=progress)
    recording.save(path)
    return recording


def _unknown_names_message(*names: str) -> str:
    """Return an error text about unknown recordings, which lists the known names."""
    return f"unknown recordings {', '.join(names)}: expected names from {', '.join(RECORDINGS)}"


def main() -> None:
    """Make missing recordings, and print one line about each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recordings", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(RECORDINGS)} (default: all)")
    parser.add_argument("--steps", type=int, help="steps of 2 transitions each (default: the registry's)")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(RECORDINGS)):
        parser.error(_unknown_names_message(*unknown))
    for name in arguments.names or RECORDINGS:
        recording = load(name, steps=arguments.steps, progress=True)
        shape = "×".join(map(str, recording.observation_space.shape))
        games = list(recording.scores.values())
        score = f"mean score of {len(games)} games {np.mean(games):.1f}" if games else "no game ended"
        print(f"{name:20} {recording.n_transitions:6} × {shape:10} {recording.policy}; {score}")


if __name__ == "__main__":
    main()

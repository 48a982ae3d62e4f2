"""Dict, n-step, HER and rollout buffers against Stable Baselines3's, on Atari frames.

    python -m benchmarks.buffer_family [dict nstep her ppo] [--recordings mspacman pong] [--codec raw]

Off policy: each buffer is filled with a recording in a fresh process, whose resident memory is measured. Then both
buffers are filled in one process, and take turns in ``sample()``. Dict observations contain the stack and a vector of
eight numbers. HER adds goals of two numbers, and a reward function that costs almost nothing.

On policy: the buffer contains a rollout of 8 environments × 128 steps. Its memory is measured when the rollout is
complete, and in brackets before that. The time is that of filling it once and reading it four times in minibatches of
256. Times are CPU seconds of the calling thread. ``benchmarks.field train`` compares whole trainings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, RolloutBuffer
from tqdm import tqdm

from benchmarks import memory, recordings
from benchmarks.measure import machine, resident_bytes, sampling_speedup, speedup, time_in_turns
from benchmarks.processes import run_module
from benchmarks.replay import Recording
from sb3_ext import (
    CompressedDictReplayBuffer,
    CompressedHerReplayBuffer,
    CompressedNStepReplayBuffer,
    CompressedRolloutBuffer,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "dict": (DictReplayBuffer, CompressedDictReplayBuffer),
    "nstep": (NStepReplayBuffer, CompressedNStepReplayBuffer),
    "her": (HerReplayBuffer, CompressedHerReplayBuffer),
    "ppo": (RolloutBuffer, CompressedRolloutBuffer),
}
GAMES = ("pong", "breakout", "mspacman", "seaquest")
WARM_UP = 600  # Steps after which kernels are loaded and allocators have their memory.
ROLLOUT, N_ENVS = 128, 8
DRAWS = 300  # Batches per competitor.
_IMAGES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
_VECTOR = spaces.Box(-1, 1, (8,), np.float32)
_GOAL = spaces.Box(-1, 1, (2,), np.float32)


def _observation_space(kind: str) -> spaces.Space[Any]:
    """Return the observation space for a kind of buffer: Dict for dict and HER, else images."""
    if kind == "dict":
        return spaces.Dict(image=_IMAGES, vector=_VECTOR)
    if kind == "her":
        return spaces.Dict(observation=_IMAGES, achieved_goal=_GOAL, desired_goal=_GOAL)
    return _IMAGES


def _make_her_env() -> Any:
    """Make a stand-in environment with the reward function that HER needs."""
    return SimpleNamespace(
        env_method=lambda name, achieved, desired, infos, indices: [-np.abs(achieved - desired).sum(1)]
    )


def make_buffer(kind: str, size: int, *, ours: bool, n_envs: int, action_space: Any, codec: str = "patch") -> Any:
    """Make an empty buffer for ``size`` transitions."""
    options: dict[str, Any] = {"codec": codec, "num_threads": 1} if ours else {}
    if kind == "her":
        options["env"] = _make_her_env()
    return CLASSES[kind][ours](size, _observation_space(kind), action_space, device="cpu", n_envs=n_envs, **options)


def transitions(kind: str, recording: Recording) -> Iterator[tuple[Any, ...]]:
    """Yield a recording's transitions, with the extra keys that this kind of buffer needs."""
    rng = np.random.default_rng(0)

    def draw_extra_entries(n_envs: int) -> dict[str, np.ndarray]:
        """Draw random entries that recordings lack: a vector, or HER's goals."""
        parts = {"vector": 8} if kind == "dict" else {"achieved_goal": 2, "desired_goal": 2}
        return {key: rng.uniform(-1, 1, (n_envs, size)).astype(np.float32) for key, size in parts.items()}

    image = {"dict": "image", "her": "observation"}.get(kind)
    before = draw_extra_entries(2)
    for obs, next_obs, *rest in recording.transitions():
        if image is None:
            yield obs, next_obs, *rest
            continue
        after = draw_extra_entries(len(obs))
        yield {image: obs, **before}, {image: next_obs, **after}, *rest
        before = after


def fill(kind: str, name: str, *, ours: bool, codec: str) -> None:
    """Fill one buffer; print the process's growth in bytes and the number of transitions."""
    recording = recordings.load(name)
    arguments: dict[str, Any] = {"ours": ours, "n_envs": 2, "action_space": recording.action_space, "codec": codec}
    stream = list(islice(transitions(kind, recording), WARM_UP))
    warm = make_buffer(kind, 2 * WARM_UP, **arguments)
    for transition in stream:
        warm.add(*transition)
    del stream
    rest = transitions(kind, recording)
    first = next(rest)
    before = resident_bytes()
    filled = make_buffer(kind, recording.n_transitions, **arguments)
    filled.add(*first)
    for transition in rest:
        filled.add(*transition)
    print(resident_bytes() - before, recording.n_transitions)


def fill_rollout(name: str, *, ours: bool, codec: str, collecting: bool = False) -> None:
    """Fill a rollout buffer; print the process's growth in bytes, and its transitions."""
    stream = memory.transitions(_ale_name(name), steps=3 * ROLLOUT)
    observations = [transition[0].copy() for transition in stream]
    arguments: dict[str, Any] = {"ours": ours, "n_envs": N_ENVS, "action_space": spaces.Discrete(18), "codec": codec}
    warm = make_buffer("ppo", ROLLOUT, **arguments)
    _collect_rollout(warm, observations[:ROLLOUT])
    before = resident_bytes()
    filled = make_buffer("ppo", ROLLOUT, **arguments)
    _collect_rollout(filled, observations[-ROLLOUT:], collecting=collecting)
    print(resident_bytes() - before, ROLLOUT * N_ENVS)


def _ale_name(name: str) -> str:
    """Convert a recording's name of a game to ALE's name, which has underscores."""
    return {"mspacman": "ms_pacman", "montezuma": "montezuma_revenge"}.get(name, name)


def _collect_rollout(buffer: Any, observations: list[np.ndarray], *, collecting: bool = False) -> None:
    """Refill a rollout buffer; also compute advantages, except while ``collecting``."""
    rest = np.zeros(N_ENVS), np.zeros(N_ENVS), np.zeros(N_ENVS), th.zeros(N_ENVS, 1), th.zeros(N_ENVS)
    buffer.reset()
    for obs in observations:
        buffer.add(obs, *rest)
    if not collecting:
        buffer.compute_returns_and_advantage(th.zeros(N_ENVS, 1), np.zeros(N_ENVS, dtype=bool))


def bytes_per_transition(kind: str, name: str, *, ours: bool, codec: str, collecting: bool = False) -> float:
    """Return the resident bytes per transition, measured in a fresh process."""
    options = ["--recordings", name, "--codec", codec, "--fill", "ours" if ours else "sb3"]
    line = run_module("benchmarks.buffer_family", kind, *options, *["--collecting"] * collecting)
    n_bytes, count = map(int, line.split())
    return n_bytes / count


def off_policy(kind: str, name: str, *, codec: str) -> str:
    """Measure one kind of buffer on one recording, and return a row of the table."""
    recording = recordings.load(name)
    buffers = {
        label: make_buffer(
            kind, recording.n_transitions, ours=ours, n_envs=2, action_space=recording.action_space, codec=codec
        )
        for label, ours in (("plain", False), ("ours", True))
    }
    for transition in transitions(kind, recording):
        for buffer in buffers.values():
            buffer.add(*transition)
    speeds = [sampling_speedup(buffers["ours"], buffers["plain"], size, rounds=DRAWS // 10) for size in (32, 256)]
    del buffers
    plain, ours = (bytes_per_transition(kind, name, ours=ours, codec=codec) for ours in (False, True))
    return f"{kind:6} {name:10} {plain:9,.0f} {ours:7,.0f} {plain / ours:6.0f}× {speeds[0]:6.2f}× {speeds[1]:6.2f}×"


def on_policy(name: str, *, codec: str) -> str:
    """Measure a rollout, filled once and read four times, and return a row of the table."""
    observations = [step[0].copy() for step in memory.transitions(_ale_name(name), steps=3 * ROLLOUT)][-ROLLOUT:]

    def make_iteration(buffer: Any) -> Callable[[], object]:
        """Return a function that refills a rollout buffer, and reads it in four epochs."""

        def refill_and_read() -> None:
            """Refill the rollout buffer, and read all batches four times."""
            _collect_rollout(buffer, observations)
            for _ in range(4):
                for batch in buffer.get(256):
                    batch.observations.shape  # noqa: B018 - stays in memory while the next batch is drawn

        return refill_and_read

    buffers = {
        label: make_buffer("ppo", ROLLOUT, ours=ours, n_envs=N_ENVS, action_space=spaces.Discrete(18), codec=codec)
        for label, ours in (("plain", False), ("ours", True))
    }
    turns = {label: make_iteration(buffer) for label, buffer in buffers.items()}
    time_in_turns(turns, rounds=2)
    speed = speedup(time_in_turns(turns, rounds=20, clock=time.thread_time), "ours", baseline="plain")
    plain, ours = (bytes_per_transition("ppo", name, ours=ours, codec=codec) for ours in (False, True))
    before = bytes_per_transition("ppo", name, ours=True, codec=codec, collecting=True)
    return f"{'ppo':6} {name:10} {plain:9,.0f} {ours:7,.0f} {plain / ours:6.0f}× {speed:6.2f}× ({plain / before:.0f}×)"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer_family", description=main.__doc__)
    parser.add_argument("kinds", nargs="*", default=list(CLASSES))
    parser.add_argument("--recordings", nargs="*", default=list(GAMES), metavar="NAME")
    parser.add_argument("--codec", default="patch")
    parser.add_argument("--fill", choices=["ours", "sb3"], help="fill one buffer in this process")
    parser.add_argument("--collecting", action="store_true", help="measure the rollout before it is complete")
    options = parser.parse_args()
    th.set_num_threads(1)
    if options.fill:
        given = {"ours": options.fill == "ours", "codec": options.codec}
        if options.kinds == ["ppo"]:
            fill_rollout(options.recordings[0], **given, collecting=options.collecting)
        else:
            fill(options.kinds[0], options.recordings[0], **given)
        return
    print(machine())
    print(f"{'buffer':6} {'recording':10} {'SB3, B':>9} {'ours, B':>7} {'memory':>7} {'n=32':>7} {'n=256':>7}")
    print("bytes: resident, per transition; then the speedup over SB3: sample(n), or add() and get() of a rollout")
    for kind in tqdm(options.kinds, leave=False):
        for name in options.recordings:
            row = on_policy(name, codec=options.codec) if kind == "ppo" else off_policy(kind, name, codec=options.codec)
            tqdm.write(row, file=sys.stdout)


if __name__ == "__main__":
    main()

"""Train DQN on an Atari game with SB3's replay buffer and with the compressed one.

Both trainings use the same seeds and environments, each in its own process. This prints a table and plots the resident
memory:

    python examples/dqn_atari_memory.py [--game Breakout] [--steps 16000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

N_ENVS = 2
N_STACK = 4
BUFFERS = {"sb3": "SB3 ReplayBuffer", "compressed": "CompressedReplayBuffer"}


def record_seconds(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Wrap a function so that the duration of each call is appended to ``seconds``."""

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        """Call the function, and append the duration to ``seconds``."""
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    return timed_call


def train(buffer: str, *, game: str, steps: int) -> dict[str, Any]:
    """Train DQN, and return memory, times and a hash of the trained weights."""
    import ale_py
    import gymnasium
    import psutil
    from stable_baselines3 import DQN
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    from sb3_ext import CompressedReplayBuffer

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else each environment prints a banner
    gymnasium.register_envs(ale_py)
    process = psutil.Process()
    memory: list[tuple[int, int]] = []

    class WatchMemory(BaseCallback):
        """Callback that records steps and the process's memory at every 200th call."""

        def _on_step(self) -> bool:
            if self.n_calls % 200 == 0:
                memory.append((self.num_timesteps, process.memory_info().rss))
            return True

    env = VecFrameStack(make_atari_env(f"{game}NoFrameskip-v4", n_envs=N_ENVS, seed=0), n_stack=N_STACK)
    model = DQN(
        "CnnPolicy",
        env,
        replay_buffer_class=CompressedReplayBuffer if buffer == "compressed" else ReplayBuffer,
        buffer_size=steps,
        learning_starts=steps // 2,
        train_freq=4,
        batch_size=32,
        exploration_fraction=0.5,
        seed=0,
        device="cpu",
    )
    replay = model.replay_buffer
    assert replay is not None
    add_seconds: list[float] = []
    sample_seconds: list[float] = []
    replay.add = record_seconds(replay.add, add_seconds)  # type: ignore[method-assign]
    replay.sample = record_seconds(replay.sample, sample_seconds)  # type: ignore[method-assign]
    before = process.memory_info().rss
    model.learn(steps, callback=WatchMemory(), progress_bar=True)

    weights = hashlib.sha256()
    for tensor in model.policy.state_dict().values():
        weights.update(tensor.numpy().tobytes())
    rows = sum(getattr(replay, name).nbytes for name in ("actions", "rewards", "dones", "timeouts"))
    if isinstance(replay, CompressedReplayBuffer):
        stored_bytes = replay.stored_nbytes
    else:
        stored_bytes = replay.observations.nbytes + replay.next_observations.nbytes + rows
    return {
        "memory": [(step, rss - before) for step, rss in memory],
        "bytes": stored_bytes / (replay.size() * N_ENVS),
        "add": statistics.median(add_seconds),
        "sample": statistics.median(sample_seconds),
        "weights": weights.hexdigest(),
    }


def train_in_process(buffer: str, *, game: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run :func:`train` in a fresh process, whose memory is measured alone."""
    result = folder / f"{buffer}.json"
    command = [sys.executable, __file__, "--train", buffer, "--game", game, "--steps", str(steps)]
    subprocess.run([*command, "--result", str(result)], check=True)
    values: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return values


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    plain, ours = results["sb3"], results["compressed"]
    table = Table(title="The same DQN training with two replay buffers; times are medians")
    for column in ("", *BUFFERS.values(), ""):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)

    def add_result_row(label: str, values: list[float], unit: str, note: str) -> None:
        """Add a row to the table: a label, one value per buffer and a note."""
        table.add_row(label, *(f"{value:,.1f} {unit}" for value in values), note)

    def add_ratio_row(label: str, key: str, scale: float, unit: str, word: str) -> None:
        """Add a row with a result of both buffers, and the ratio of the two."""
        values = [result[key] * scale for result in (plain, ours)]
        add_result_row(label, values, unit, f"{values[0] / values[1]:,.1f}× {word}")

    grown = [result["memory"][-1][1] / 1e6 for result in (plain, ours)]
    add_result_row("process grew by", grown, "MB", f"{grown[0] / grown[1]:,.1f}× less")
    add_ratio_row("per transition", "bytes", 1, "B", "less")
    add_ratio_row("sample(32)", "sample", 1e6, "µs", "as fast")
    add_ratio_row("add()", "add", 1e6, "µs", "as fast")
    same = plain["weights"] == ours["weights"]
    table.add_row("trained weights", plain["weights"][:12], ours["weights"][:12], "identical" if same else "DIFFERENT")
    Console().print(table)


def draw(results: dict[str, dict[str, Any]], path: Path, *, game: str) -> None:
    """Plot the growth of both processes' memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for buffer, label in BUFFERS.items():
        steps, memory = zip(*results[buffer]["memory"], strict=True)
        axes.plot(steps, [grown / 1e6 for grown in memory], label=label, linewidth=2)
    axes.set(title=f"DQN on {game}: the same training", xlabel="transitions", ylabel="process grew by (MB)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train with both buffers, and compare."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--steps", type=int, default=16_000, help="transitions; training starts after half of them")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    parser.add_argument("--train", choices=BUFFERS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        result = train(options.train, game=options.game, steps=options.steps)
        options.result.write_text(json.dumps(result))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for buffer, label in BUFFERS.items():
        print(f"{label}: {options.game}, {N_ENVS} environments, {options.steps:,} transitions", flush=True)
        results[buffer] = train_in_process(buffer, game=options.game, steps=options.steps, folder=options.out)
    show(results)
    plot = options.out / "dqn_atari_memory.png"
    draw(results, plot, game=options.game)
    print(f"plot: {os.path.relpath(plot)}")
    if results["sb3"]["weights"] != results["compressed"]["weights"]:
        sys.exit("the trained weights differ. Please report this.")


if __name__ == "__main__":
    main()

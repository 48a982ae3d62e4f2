from __future__ import annotations

import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rl_ext_core.errors import NotCopyableError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe
from tests.core.factory.copying import Line


class Counting(Line):
    """Environment that writes its calls to the cache folder, which is not protected."""

    def __init__(self) -> None:
        super().__init__(length=99)
        self._note("build")

    def _note(self, text: str) -> None:
        with Path(os.environ["XDG_CACHE_HOME"], "calls").open("a") as file:
            file.write(f"{text}\n")

    def reset(self, **options: Any) -> Any:
        self._note("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self._note("step")
        return super().step(action)


def test_unchanged_instance_is_built_once_and_a_changed_one_is_reset_and_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env, calls = Counting(), tmp_path / "calls"
    as_factory(env)
    assert calls.read_text().split() == ["build", "build"]
    env.gain = 4.0
    assert as_factory(env)().gain == 4.0
    found = calls.read_text().split()[2:-1]  # without those before, and the copy in this process
    assert (found.count("build"), found.count("reset")) == (3, 3)


class Logging(Line):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        (self.folder / "settings.json").write_text(json.dumps({"gain": self.gain, "builds": 1}))

    def reset(self, **options: Any) -> Any:
        with open(self.folder / "monitor.csv", "a") as file:
            file.write(f"{self.left},{self.position}\n")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        (self.folder / "last_action.txt").write_text(str(action))
        (self.folder / "part").write_bytes(b"x")
        if (self.folder / "part").exists():
            os.replace(self.folder / "part", self.folder / "state")
        return super().step(action)

    def close(self) -> None:
        (self.folder / "settings.json").unlink()


def _contents(folder: Path) -> dict[str, Any]:
    """Return the contents of all files below a folder, with their times of modification."""
    paths = {str(path): path for path in folder.rglob("*")}
    return {n: (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else None for n, path in paths.items()}


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("gain", [1.0, 4.0])
def test_comparison_changes_no_file_of_an_environment_that_writes_files(
    steps: int, gain: float, tmp_path: Path
) -> None:
    env = Logging(str(tmp_path / "logs"))
    env.reset(seed=1)
    for _ in range(steps):
        env.step(1)
    env.gain = gain
    before = _contents(tmp_path)
    factory = as_factory(env)
    assert _contents(tmp_path) == before
    assert factory().gain == gain


class Archiving(Line):
    def __init__(self, file: str) -> None:
        super().__init__()
        if os.path.exists(file):
            os.rename(file, f"{file}.old")
        Path(file).write_text("new log")


def test_constructor_that_moves_a_file_is_rejected_by_its_name(tmp_path: Path) -> None:
    env = Archiving(str(tmp_path / "log.csv"))
    env.handle = open(os.devnull)  # A pickle of it is impossible, too.  # noqa: SIM115
    with env.handle, pytest.raises(NotCopyableError, match=r"must not change the file .*log\.csv"):
        as_factory(env)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_probe_changes_no_file_and_removes_what_it_created(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    Logging(str(logs)).reset(seed=1)
    before = _contents(tmp_path)
    assert probe(functools.partial(Logging, str(logs))).isolation is Isolation.INDEPENDENT
    verdict = probe(functools.partial(Archiving, str(logs / "monitor.csv")))
    assert verdict.isolation is Isolation.UNKNOWN
    assert "must not change the file" in verdict.explanation
    assert _contents(tmp_path) == before


def _record_video(env: Any, folder: str) -> Any:
    sys.modules.setdefault("moviepy", types.ModuleType("moviepy"))  # RecordVideo needs it only when it writes.
    env.metadata, env.render_mode, env.render = {"render_fps": 30}, "rgb_array", lambda: None
    return gym.wrappers.RecordVideo(env, folder, episode_trigger=lambda episode: True)


@pytest.mark.filterwarnings("ignore:.*Overwriting existing videos")
def test_no_video_is_recorded_in_a_comparison_or_probe(tmp_path: Path) -> None:
    env = _record_video(Line(), str(tmp_path))
    env.unwrapped.gain = 4.0
    assert as_factory(env)().unwrapped.gain == 4.0
    assert probe(lambda: _record_video(Line(), str(tmp_path))).isolation is Isolation.INDEPENDENT
    assert list(tmp_path.iterdir()) == []

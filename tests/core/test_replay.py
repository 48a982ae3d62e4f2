from __future__ import annotations

import dataclasses
import functools
import json
import re
import resource
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_ext_core.cli import main
from rl_ext_core.errors import CorruptFileError, StorageError
from rl_ext_core.factory import as_factory
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder
from rl_ext_core.recording.capsule import RecordedFailure, read_capsule, record_crash, write_capsule
from rl_ext_core.vector import replay
from tests import programs
from tests.environments import Counting, Failing

# How an environment fails, the failure that its capsule contains, and the text of its repetition.
CRASHES = {
    "raise": (RecordedFailure("exception", "it raised", "step", 1, exception="ValueError"), "ValueError in fail, "),
    "SIGSEGV": (RecordedFailure("signal", "it was killed", "step", -11), "SIGSEGV in string_at, "),
    "SIGABRT": (RecordedFailure("signal", "it was killed", "step", -6), "SIGABRT in fail, "),
    "os._exit": (RecordedFailure("exit", "it exited", "step", 0), "exit code 0"),
    "hang": (RecordedFailure("timeout", "it did not answer", "step"), "no answer (it hangs) in fail, "),
    "observation": (RecordedFailure("observation", "it returned another shape", "step", 1), "values that do not fit"),
    "info": (
        RecordedFailure("observation", "it returned another info", "step", 1),
        "values that do not fit the spaces",
    ),
}
RAISED = CRASHES["raise"][0]


class Faulty(Failing):
    """Environment that fails in its fifth step, or returns an observation of another shape or no info."""

    def __init__(self, how: str = "") -> None:
        super().__init__("step", "" if how in ("observation", "info") else how, after=4)
        self.action_space, self.how = gymnasium.spaces.Box(-1, 1, (2,)), how

    def step(self, action: Any) -> Any:
        observation, *result, info = super().step(action)
        is_faulty = self._steps == 5
        return (
            np.zeros(5, np.float32) if is_faulty and self.how == "observation" else observation,
            *result,
            None if is_faulty and self.how == "info" else info,
        )


@pytest.fixture
def replay_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``rl-ext replay``, and returns its status and what it prints to both streams."""
    return lambda *arguments: (main(["replay", *map(str, arguments)]), *capsys.readouterr())


@pytest.fixture
def capsule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the capsule of an environment that raised, and change to an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return record(tmp_path / "crashes", "raise")


def record(folder: Path, how: str, *, make: Any = Faulty, seed: int | None = None, **options: Any) -> Path:
    """Write the capsule of an environment that failed in its fifth step, without failing."""
    env = EpisodeRecorder(as_factory(make).for_workers(1)[0]())
    env.reset(seed=seed)
    for _ in range(5):
        env.step(env.action_space.sample())
    log = env.episode_log()
    log = EpisodeLog(log.generators, log.settings, log.calls, log.checksums[:-1])
    factory = as_factory(functools.partial(make, how)).for_workers(1)[0]
    return write_capsule(folder, factory=factory, log=log, failure=CRASHES[how][0], environment=2, **options)


@pytest.mark.parametrize("how", CRASHES)
@pytest.mark.sample(quick=4)
def test_crash_is_reproduced(how: str, tmp_path: Path, replay_command: Any) -> None:
    path = record(tmp_path / "crashes", how, step_timeout=0.6)
    status, printed, _ = replay_command(path, "--yes")
    assert status == 0
    assert f"reproduced at step 5: {CRASHES[how][1]}" in printed
    assert "executes the pickled code of the factory" in printed


# Statements of an environment that change files: in its constructor, and in a step that writes a line each.
WRITERS = {
    "append": ("self.file = open('log.txt', 'a')", "self.file.write('x'); self.file.flush()"),
    "truncate": ("self.file = Path('log.txt').open('w')", "self.file.write('x'); self.file.flush()"),
    "new file": ("os.makedirs('new/log', exist_ok=True)", "open('new/log/a.txt', 'a').write('x')"),
    "arrays": ("np.save('array.npy', np.ones(3))", "np.save('array.npy', 2 * np.load('array.npy'))"),
    "archive": ("np.savez('archive.npz', a=np.ones(3))", "np.savez('new.npz', a=np.ones(3)); np.load('new.npz')"),
    "torch": ("torch.save([1], 'array.npy')", "torch.save([1], Path('log.txt')); torch.save([1], 'new.pt')"),
    "csv": ("self.file = csv.writer(open('log.txt', 'w+', newline=''))", "self.file.writerow([1, 2])"),
    "text": ("Path('log.txt').write_text('x')", "Path('array.npy').write_bytes(b'x')"),
    "lock": ("self.file = os.open('empty.lock', os.O_RDWR | os.O_CREAT)", "os.write(self.file, b'x')"),
    "empty file": ("pass", "Path('empty.lock').open('a').write('x')"),
    "new files": ("Path('a').write_text('x'); os.rename('a', 'b')", "Path('b').read_text(); Path('b').touch()"),
    "copy": ("shutil.copy('log.txt', 'copy.txt')", "shutil.copyfile('array.npy', 'log.txt')"),
    "temporary": ("self.folder = tempfile.mkdtemp()", "Path(self.folder, 'a').write_text(Path('log.txt').read_text())"),
    "new monitor": ("self.monitor = Monitor(gymnasium.make('CartPole-v1'), 'new/log')", "self.monitor.reset()"),
    "videos": ("self.video = video(); self.video.reset(seed=1)", "self.video.step(0)[2] and self.video.reset()"),
}
# Statements that are refused in a constructor and in a step.
REFUSED = {
    "os": "os.open('log.txt', os.O_RDWR | os.O_TRUNC)",
    "in place": "open('log.txt', 'r+')",
    "map": "np.load('array.npy', mmap_mode='r+')",
    "delete": "Path('log.txt').unlink()",
    "replace": "Path('part').write_text('x'); os.replace('part', 'log.txt')",
    "move": "shutil.move('log.txt', 'old.txt')",
    "tree": "shutil.rmtree('folder')",
    "times": "os.utime('log.txt', (1, 1))",
    "mode": "Path('log.txt').chmod(0o600)",
}
WRITER = """
import csv, os, shutil, sys, tempfile, types
from pathlib import Path
import gymnasium, numpy as np, torch
sys.modules.setdefault("moviepy", types.ModuleType("moviepy"))  # RecordVideo needs it only when it writes
from tests.core.test_replay import Faulty
from gymnasium.wrappers import RecordVideo
from stable_baselines3.common.monitor import Monitor
{top}

def video():
    return RecordVideo(gymnasium.make("CartPole-v1", render_mode="rgb_array"), "folder", episode_trigger=lambda n: True)

class Writer(Faulty):
    def __init__(self):
        super().__init__("raise")
        {start}

    def step(self, action):
        {step}
        return super().step(action)
"""


@pytest.fixture
def replay_writer(capsule: Path, tmp_path: Path, replay_command: Any) -> Callable[..., tuple[int, str]]:
    """Return a function that replays with an environment that writes files, and asserts that none changes."""
    for name in ("log.txt", "folder/rl-video-episode-0.mp4", "archive.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("written by the run\n")
    (tmp_path / "empty.lock").touch()
    np.save(tmp_path / "array.npy", np.arange(3))

    def read_files() -> dict[str, Any]:
        paths = [path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts]
        return {str(path): (path.stat().st_mode, path.read_bytes()) if path.is_file() else None for path in paths}

    def replay_writer(*, top: str = "", start: str = "pass", step: str = "pass") -> tuple[int, str]:
        (tmp_path / "writers.py").write_text(WRITER.format(top=top, start=start, step=step))
        before = read_files()
        status, out, err = replay_command(capsule, "--env", "writers:Writer")
        assert read_files() == before
        return status, out + err

    return replay_writer


@pytest.mark.sample(quick=4)
@pytest.mark.parametrize("kind", WRITERS)
def test_replay_changes_no_file(kind: str, replay_writer: Any) -> None:
    start, step = WRITERS[kind]
    status, printed = replay_writer(start=start, step=step)
    assert "reproduced at step" in printed, printed
    assert status == 0


@pytest.mark.sample(quick=2)
@pytest.mark.parametrize("place", ["start", "step"])
@pytest.mark.parametrize("kind", REFUSED)
def test_replay_refuses_other_changes_of_files_in_one_sentence(kind: str, place: str, replay_writer: Any) -> None:
    status, printed = replay_writer(**{place: REFUSED[kind]})
    assert status == 1, printed
    (line,) = (line for line in printed.splitlines() if "must not change the file" in line)
    beginning = {"start": "rl-ext replay: ", "step": "crashed elsewhere: step 1, "}[place]
    assert line.startswith(f"{beginning}a temporary process must not change the file '"), printed


def test_replay_refuses_changes_of_files_by_an_import(replay_writer: Any) -> None:
    status, printed = replay_writer(top="shutil.rmtree('folder')")
    assert status != 0
    assert "must not change the file" in printed


@pytest.mark.parametrize("seed", [None, 4])
def test_lines_of_the_guide_repeat_a_crash(seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "resume.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "episode.npz" in code)
    monkeypatch.chdir(tmp_path)
    path = record(tmp_path / "crashes", "raise", seed=seed)
    assert main(["replay", str(path), "--yes", "--actions", "episode.npz"]) == 0
    log = read_capsule(path).log
    with np.load("episode.npz") as episode:
        np.testing.assert_array_equal(episode["actions"], [data for name, data in log.calls if name == "step"])
    names = {"make_my_env": lambda: EpisodeRecorder(Faulty("raise"))}
    with pytest.raises(ValueError, match="the rope has snapped"):
        exec(code, names)
    names["episode"].close()
    repeated = names["env"].episode_log()
    assert repeated.checksums == log.checksums
    assert repeated.steps == log.steps == 5


def test_failure_of_another_function_is_another_failure() -> None:
    def failure(kind: str, name: str, message: str) -> RecordedFailure:
        traceback = (
            f'Traceback (most recent call last):\n  File "/a/plant.py", line 3, in {name}\nValueError: {message}\n'
        )
        return RecordedFailure(kind, "it raised", "step", 1, traceback, "ValueError")

    def is_like(found: RecordedFailure, recorded: RecordedFailure) -> bool:
        return replay.ReplayResult(found, 3, None).is_like(recorded)

    assert is_like(failure("exception", "move", "3 m"), failure("exception", "move", "4 m"))
    assert not is_like(failure("exception", "move", "3 m"), failure("exception", "turn", "3 m"))
    assert not is_like(failure("exception", "move", "3 m"), dataclasses.replace(RAISED, exception="KeyError"))
    assert is_like(failure("observation", "check", "shape (3,)"), failure("observation", "check", "shape (3,)"))
    assert not is_like(failure("observation", "check", "shape (3,)"), failure("observation", "check", "shape (5,)"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--yes --actions episode.txt", "Use --actions episode.npz"),
        ("--yes --actions taken.npz", "Use --actions taken-2.npz"),
        ("--yes --actions no/a.npz", "existing"),
        ("--env no_such_module:make", "no_such_module"),
        (
            "--env CartPole-v1",
            "CartPoleEnv, is not built like the recorded one (3 instead of 0 wrappers); expected the",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, expected: str, capsule: Path, tmp_path: Path, replay_command: Any
) -> None:
    (tmp_path / "taken.npz").write_text("taken")
    status, _, printed = replay_command(capsule, *arguments.split())
    assert status == 2
    assert expected in printed
    assert "Traceback" not in printed
    assert (tmp_path / "taken.npz").read_text() == "taken"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Failing", "does not crash, and all observations are equal"),
        ("RandomEnv", "does not crash: first difference at step 0: --env tests.environments:RandomEnv is another envi"),
    ],
)
def test_crash_that_is_not_reproduced(source: str, expected: str, capsule: Path, replay_command: Any) -> None:
    status, printed, _ = replay_command(capsule, "--env", f"tests.environments:{source}")
    assert status == 1
    assert expected in printed


def test_code_is_executed_only_with_consent(
    capsule: Path, replay_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "play", lambda *arguments: pytest.fail("the code was executed"))
    monkeypatch.setattr(sys, "stdin", None)
    status, _, printed = replay_command(capsule)
    assert status == 2
    assert "expected --yes" in printed


def test_missing_gymnasium_is_reported(replay_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, printed = replay_command("crash.rlx")
    assert status == 1
    assert "a recorded crash needs the package 'gymnasium'" in printed


def test_factory_that_cannot_be_pickled(capsule: Path, tmp_path: Path, replay_command: Any) -> None:
    log, lock = read_capsule(capsule).log, threading.Lock()
    path = write_capsule(tmp_path / "others", factory=lambda: lock, log=log, failure=RAISED, environment=0)
    assert read_capsule(path).factory_pickle is None
    status, _, printed = replay_command(path, "--yes")
    assert status == 2
    assert "Use --env module:function" in printed


def test_class_of_the_script_itself(tmp_path: Path, replay_command: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tests.core.test_replay import Faulty, record\nclass Own(Faulty): ...\n"
        "if __name__ == '__main__': print(record('crashes', 'os._exit', make=Own))\n"
    )
    found = programs.run(script.read_text(), "torch", file=script, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    status, printed, _ = replay_command(tmp_path / found.stdout.strip(), "--yes")
    assert status == 0
    assert "exit code 0" in printed


def test_log_of_a_capsule_is_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MY_SECRET_TOKEN", "secret")
    options = {"table": np.arange(4.0), "name": "a", "pair": (1, b"x")}
    env = EpisodeRecorder(Counting())
    env.reset(seed=4, options=options)
    env.step(np.int64(1))
    env.set_wrapper_attr("depth", 8.0)
    log = env.episode_log()
    assert log is not None
    contents: dict[str, Any] = {"factory": as_factory(Counting), "failure": RAISED, "environment": 0}
    path = write_capsule(tmp_path, log=log, step_timeout=3.0, **contents)
    found = read_capsule(path)
    assert found.failure == RAISED
    assert found.log.generators == log.generators
    assert [name for name, _ in found.log.calls] == [name for name, _ in log.calls]
    np.testing.assert_equal(found.log.calls, log.calls)
    with zipfile.ZipFile(path) as archive:
        about = json.loads(archive.read("capsule.json"))
        assert about["executable code"] == ["environment.pickle"]
        assert about["variables"]["OMP_NUM_THREADS"] == "1"
        assert b"secret" not in b"".join(map(archive.read, archive.namelist()))
    log.calls.append(("call", ("set_task", (RecordedFailure("", ""),), {})))
    text = record_crash(tmp_path / "others", log=log, **contents)
    assert "The episode is not recorded: its actions, options or calls contain an object (rl_ext_core.recording" in text
    assert not (tmp_path / "others").exists()


def write_steps(folder: Path, actions: Sequence[Any]) -> Path:
    """Write the capsule of an episode with these actions."""
    calls = [("reset", {}), *(("step", action) for action in actions)]
    log, failure = EpisodeLog({}, [], calls, [None] * len(calls)), RecordedFailure("exception", "")
    return write_capsule(folder, factory=None, log=log, failure=failure, environment=0)


@pytest.mark.parametrize(("kind", "shape"), [(np.float32, ()), (np.array, ()), (np.array, (3,))])
def test_actions_of_a_capsule_are_read_unchanged(kind: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((4, *shape), np.float32)
    actions = [kind(row) for row in rows]
    found = [data for name, data in read_capsule(write_steps(tmp_path, actions)).log.calls if name == "step"]
    assert [type(action) for action in found] == [type(action) for action in actions]
    np.testing.assert_array_equal(found, actions)
    if kind is np.array:  # environments may change an action, which must not change the others
        found[0][...] = 0
        np.testing.assert_array_equal(found[1:], actions[1:])


def test_full_disk_leaves_no_part_of_a_capsule(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written"):
            write_steps(tmp_path, np.random.default_rng(0).random((50, 64), np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_capsule_with_damaged_bytes(tmp_path: Path) -> None:
    path = write_steps(tmp_path, np.random.default_rng(0).random((50, 64), np.float32))
    data = path.read_bytes()
    for place in range(data.index(b"log.pickle") + 64, len(data) - 1000, 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        with pytest.raises(CorruptFileError, match="is not a complete capsule"):
            read_capsule(path)
    path.write_bytes(data[:-30])
    assert main(["replay", str(path), "--yes"]) == 2
    assert main(["replay", str(tmp_path / "missing.rlx"), "--yes"]) == 2

"""What a worker applies before it imports its environment, by itself and for what a probe recommends."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.isolation import apply_cure, probe
from rl_ext_core.isolation.cures import Mirrored, mirror
from tests.boundaries import ROOT
from tests.core.isolation.conftest import Variant

# Keeps one alive until it is told to end, as a worker does.
WORKER = """
import sys
from pathlib import Path
from rl_ext_core.isolation import apply_cure
cure, scratch, library = sys.argv[1:]
if cure:
    apply_cure(cure, Path(scratch))
from tests.core.isolation.simulator import Simulator
try:
    env = Simulator(library)
except RuntimeError as error:
    print(error, flush=True)
else:
    print("built", flush=True)
    sys.stdin.read()
"""


def in_two_workers(cure: str, library: str, tmp_path: Path) -> list[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    workers = []
    for index in range(2):
        command = [sys.executable, "-c", WORKER, cure, str(tmp_path / f"{cure}{index}"), library]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path))
        assert workers[-1].stdout is not None
        workers[-1].said = workers[-1].stdout.readline().strip()  # type: ignore[attr-defined]
    for worker in workers:
        worker.communicate(timeout=120)
    return [worker.said for worker in workers]  # type: ignore[attr-defined]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["LOCK_IN_CWD", "LOCK_IN_TMPDIR", "LOCK_BESIDE_LIBRARY"])
def test_the_recommended_cure_is_the_one_that_helps_workers(name: str, variant: Variant, tmp_path: Path) -> None:
    library = variant(name).args[0]
    verdict = probe(variant(name), cache=False)
    assert verdict.cure is not None
    assert f'apply_cure("{verdict.cure}", ' in verdict.explanation
    assert in_two_workers("", library, tmp_path) == ["built", "the toy simulator gives no handle"]
    assert in_two_workers(verdict.cure, library, tmp_path) == ["built", "built"]


@pytest.mark.slow
def test_one_that_this_process_has_is_told_from_a_broken_one(variant: Variant) -> None:
    source = variant("LOCK_BESIDE_LIBRARY")
    with open(f"{source.args[0]}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        verdict = probe(source, cache=False)
    assert (verdict.isolation.value, verdict.cure) == ("processes-collide", "library copy")
    assert "where another may run" in verdict.explanation


def test_a_mirror_has_small_files_of_its_own_and_the_rest_in_common(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    (source / "small").write_text("small")
    (source / "small").chmod(0o444)
    (source / "big").write_bytes(bytes(2 << 20))
    (source / "link").symlink_to("small")
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    mirror(source, target)
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}
    assert not (target / "small").is_symlink()
    assert (target / "small").stat().st_mode & 0o777 == 0o444
    assert (target / "link").read_text() == "small"
    (target / "link").write_text("changed")
    assert (source / "small").read_text() == "small"
    assert (target / "big").resolve() == source / "big"
    assert not (target / "folder").is_symlink()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.ismount("/proc"), reason="there is no /proc")
def test_what_the_kernel_shows_as_files_is_linked_or_not_read(tmp_path: Path) -> None:
    """Reading /proc/kmsg, of whoever may, has no end."""
    mirror(Path("/"), tmp_path / "root")
    assert (tmp_path / "root/proc").is_symlink()
    mirror(Path("/proc/self"), tmp_path / "self")
    assert (tmp_path / "self/status").read_text() == ""


WRITES = """
import os, shutil, sys
from pathlib import Path
from rl_ext_core.isolation import apply_cure
apply_cure("working directory", Path(sys.argv[1]))
with open("big.bin", "r+b") as file:
    file.write(b"spoilt")
Path("data/deep/new.txt").write_text("new")
Path("data/deep/big.bin").write_bytes(b"")
os.truncate("data/bigger.bin", 3)
os.remove("data/note.txt")
os.rename("note.txt", "other.txt")
os.mkdir("many/of_the_probe")
Path("many/1/in.txt").write_text("new")
print(os.path.getsize("big.bin"), os.path.getsize("data/bigger.bin"), sorted(os.listdir()))
"""


@pytest.mark.slow
def test_nothing_of_the_users_folder_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "data" / "deep").mkdir(parents=True)
    for name in ("big.bin", "data/bigger.bin", "data/deep/big.bin"):
        (folder / name).write_bytes(bytes(3 << 20))
    for name in ("note.txt", "data/note.txt"):
        (folder / name).write_text("note")
    for index in range(1200):  # too many to be copied
        (folder / "many" / str(index)).mkdir(parents=True)
    before = {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path / "own")], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{3 << 20} 3 ['big.bin', 'data', 'many', 'other.txt']\n", done.stderr
    assert {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")} == before


def test_much_is_linked_and_a_folder_that_nothing_was_written_to_is_used_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for index in range(100):  # 30 MB
        (source / f"{index}.npy").write_bytes(bytes(300_000))
    mirrored = Mirrored(source, tmp_path / "scratch")
    first = mirrored.path()
    assert sum(path.lstat().st_size for path in first.iterdir()) < 17 << 20
    assert mirrored.path() == first
    next(path for path in first.iterdir() if not path.is_symlink()).write_bytes(b"")
    assert mirrored.path() != first
    assert {(path.name, path.stat().st_size) for path in mirrored.path().iterdir()} == {
        (f"{index}.npy", 300_000) for index in range(100)
    }


LOADS = """
import ctypes, json, sys
from pathlib import Path
from rl_ext_core.isolation import apply_cure
apply_cure("library copy", Path(sys.argv[1]))
names = [sys.argv[2], Path(sys.argv[2]), "libc.so.6", None]
loaded = [str(ctypes.CDLL(name)._name) for name in names] + [str(ctypes.cdll.LoadLibrary(sys.argv[2])._name)]
print(json.dumps(loaded))
"""


def test_libraries_are_copied_where_they_are_loaded_by_path(variant: Variant, tmp_path: Path) -> None:
    library = str(tmp_path / "libbig.so")
    # Too big to be copied for lying beside a library.
    Path(library).write_bytes(Path(variant("GOOD").args[0]).read_bytes() + bytes(2 << 20))
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "own"), library], capture_output=True, text=True, check=True
    )
    by_text, by_path, by_name, itself, by_loader = json.loads(done.stdout)
    assert by_text == by_path == by_loader
    assert by_text.startswith(str(tmp_path / "own"))
    assert not Path(by_text).is_symlink()
    assert (by_name, itself) == ("libc.so.6", "None")
    assert Path(by_text).read_bytes() == Path(library).read_bytes()


@pytest.mark.parametrize("name", ["", "prayer", None])
def test_another_cure_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="working directory, TMPDIR, library copy"):
        apply_cure(name, tmp_path)
    assert ctypes.CDLL.__init__.__module__ == "ctypes"

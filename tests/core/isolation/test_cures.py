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
from rl_ext_core.isolation.cures import _copied
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
@pytest.mark.parametrize("name", ["LOCK_IN_TMPDIR", "LOCK_BESIDE_LIBRARY"])
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


@pytest.mark.slow
def test_the_own_directory_helps_workers_with_a_lock_in_the_working_directory(variant: Variant, tmp_path: Path) -> None:
    verdict = probe(variant("LOCK_IN_CWD"), cache=False)
    assert (verdict.isolation.value, verdict.cure) == ("processes-collide", None)
    assert 'write make_vec_env(..., cwd="own")' in verdict.explanation


def test_a_library_copy_has_small_files_of_its_own_and_the_rest_in_common(variant: Variant, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    (source / "libsim.so").write_bytes(Path(variant("GOOD").args[0]).read_bytes())
    (source / "small").write_text("small")
    (source / "big").write_bytes(bytes(2 << 20))
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    copy = Path(_copied(str(source / "libsim.so"), tmp_path / "own", {}))
    target = copy.parent
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}
    assert not copy.is_symlink()
    assert not (target / "small").is_symlink()
    assert (target / "big").resolve() == source / "big"
    assert (target / "folder").resolve() == source / "folder"


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


@pytest.mark.parametrize("name", ["", "prayer", "working directory", None])
def test_another_cure_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="expected one of TMPDIR, library copy"):
        apply_cure(name, tmp_path)
    assert ctypes.CDLL.__init__.__module__ == "ctypes"

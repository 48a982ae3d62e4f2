from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_ext_core import resources
from rl_ext_core.errors import InvalidTypeError, StorageError
from rl_ext_core.resources import available_memory, check_folder, check_path, private_memory, usable_cores

Tree = Callable[[dict[str, str]], None]

V2 = {"proc/self/cgroup": "0::/job/step\n"}
V1 = {"proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n"}
MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
KIB = 1024


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Return a function that writes fake files of a machine with eight cores."""
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_all_cores_count_on_systems_without_affinity(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


V2_QUOTA, V1_QUOTA = "sys/fs/cgroup/job/step/cpu.max", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us"
V1_PERIOD = {"sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({V2_QUOTA: "max 100000\n"}, 8),
        ({V2_QUOTA: "200000 100000\n"}, 2),
        ({V2_QUOTA: "250000 100000\n"}, 3),
        ({V2_QUOTA: "5000 100000\n"}, 1),
        ({V2_QUOTA: "9900000 100000\n"}, 8),
        # Quotas of outer groups.
        ({V2_QUOTA: "max 100000\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({V2_QUOTA: "max 100000\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}, 3),
        ({**V1, **V1_PERIOD, V1_QUOTA: "-1\n"}, 8),
        ({**V1, **V1_PERIOD, V1_QUOTA: "200000\n"}, 2),
    ],
)
def test_quotas_of_control_groups_limit_cores(tree: Tree, files: dict[str, str], cores: int) -> None:
    tree({**V2, **files})
    assert usable_cores() == cores


def limited_memory(limit: str, used: int, stat: str, version: int = 2) -> dict[str, str]:
    """Return the files of a machine whose control group limits the memory."""
    folder = "sys/fs/cgroup/job" if version == 2 else "sys/fs/cgroup/memory/job"
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    values = {f"{folder}/memory.{name}": f"{value}\n" for name, value in zip(names, (limit, used), strict=True)}
    return {**MACHINE, **(V2 if version == 2 else V1), **values, f"{folder}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MACHINE, 8000 * KIB),
        (limited_memory("max", 100, "inactive_file 0\n"), 8000 * KIB),
        (limited_memory(str(4000 * KIB), 1000 * KIB, "anon 5\nactive_file 7\ninactive_file 0\n"), 3000 * KIB),
        (limited_memory(str(4000 * KIB), 3000 * KIB, f"active_file 7\ninactive_file {500 * KIB}\n"), 1500 * KIB),
        (limited_memory(str(4000 * KIB), 5000 * KIB, "inactive_file 0\n"), 0),
        (limited_memory("9223372036854771712", 1000, "inactive_file 1\n", version=1), 8000 * KIB),
        (limited_memory("5000", 1000, "inactive_file 1\n", version=1), 4001),
        (limited_memory("5000", 1000, "inactive_file 1\ntotal_inactive_file 500\n", version=1), 4500),
    ],
)
def test_available_memory_excludes_page_cache_of_the_control_group(
    tree: Tree, files: dict[str, str], available: int | None
) -> None:
    tree(files)
    assert available_memory() == available


def test_private_memory_is_the_sum_of_clean_and_dirty_pages(tree: Tree) -> None:
    assert private_memory() is None
    lines = "Rss: 900 kB\nShared_Clean: 500 kB\nPrivate_Clean: 30 kB\nPrivate_Dirty: 12 kB\nSwap: 7 kB\n"
    tree({"proc/self/smaps_rollup": lines})
    assert private_memory() == 42 * KIB


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not report it")
def test_resources_of_this_machine_are_plausible() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    available, private = available_memory(), private_memory()
    assert 0 < available <= psutil.virtual_memory().total
    assert 0 < private <= psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file", r"\S+/file is a file\. Use another folder"),
        ("file/a/b", r"\S+/file is a file\. Use another folder"),
        ("link/a", r"\S+/link is a link to a path that does not exist\. Use"),
        ("new/a/full", r"No space left on device \(\S+\)\. Free space there, or use another folder"),
        ("new/a/read_only", r"Read-only file system \(\S+\)\. Use"),
        ("new/a/denied", r"Permission denied: \S+ belongs to .+\. Use"),
    ],
)
def test_folders_that_cannot_be_written_are_refused(
    path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    numbers = {"full": errno.ENOSPC, "read_only": errno.EROFS, "denied": errno.EACCES}
    number = numbers.get(Path(path).name)

    def fail(**_: object) -> None:
        raise OSError(number, os.strerror(number or 0))

    if number is not None:
        monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(StorageError, match=f"^folder='.*{path}' cannot be written to: {problem}"):
        check_folder("folder", tmp_path / path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize(
    ("path", "error", "problem"),
    [(3, InvalidTypeError, "3 is not a path"), (b"x", InvalidTypeError, "not a path"), ("", ValueError, "'' is empty")],
)
def test_other_values_than_paths_are_refused(path: Any, error: type[Exception], problem: str) -> None:
    for check in (check_path, check_folder):
        with pytest.raises(error, match=problem):
            check("folder", path)


def test_check_of_a_folder_leaves_nothing(tmp_path: Path) -> None:
    check_folder("folder", tmp_path / "a" / "b")
    check_folder("folder", tmp_path)
    assert not list(tmp_path.iterdir())

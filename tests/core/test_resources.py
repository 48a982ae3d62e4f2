"""Cores and memory, read from trees of files like the kernel's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rl_ext_core import resources
from rl_ext_core.resources import available_memory, private_memory, usable_cores

Tree = Callable[[dict[str, str]], None]

V2 = {"proc/self/cgroup": "0::/job/step\n"}
V1 = {"proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n"}
MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
KIB = 1024


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Write a machine's files."""
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_the_affinity_counts(tree: Tree) -> None:
    assert usable_cores() == 8


def test_where_there_is_no_affinity_all_cores_count(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("5000 100000", 1),
        ("9900000 100000", 8),
        ("", 8),
        ("nonsense", 8),
    ],
)
def test_the_quota_of_the_group_counts(tree: Tree, quota: str, cores: int) -> None:
    tree({**V2, "sys/fs/cgroup/job/step/cpu.max": f"{quota}\n"})
    assert usable_cores() == cores


@pytest.mark.parametrize("place", ["cpu.max", "job/cpu.max", "job/step/cpu.max"])
def test_quotas_of_outer_groups_count_too(tree: Tree, place: str) -> None:
    tree({**V2, "sys/fs/cgroup/job/step/cpu.max": "max 100000\n", f"sys/fs/cgroup/{place}": "300000 100000\n"})
    assert usable_cores() == 3


def test_groups_of_others_do_not_count(tree: Tree) -> None:
    tree({**V2, "sys/fs/cgroup/other/cpu.max": "100000 100000\n", "sys/fs/cgroup/job/step/a/cpu.max": "1 1\n"})
    assert usable_cores() == 8


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2)])
def test_quotas_of_version_1_count(tree: Tree, quota: str, cores: int) -> None:
    folder = "sys/fs/cgroup/cpu/job"
    tree({**V1, f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"})
    assert usable_cores() == cores


def test_what_the_machine_has_counts(tree: Tree) -> None:
    assert available_memory() is None
    tree(MACHINE)
    assert available_memory() == 8000 * KIB


@pytest.mark.parametrize(
    ("limit", "used", "cached", "available"),
    [
        ("max", 100, 0, 8000 * KIB),
        (str(4000 * KIB), 1000 * KIB, 0, 3000 * KIB),
        (str(4000 * KIB), 3000 * KIB, 500 * KIB, 1500 * KIB),
        (str(4000 * KIB), 5000 * KIB, 0, 0),
        (str(90_000 * KIB), 1000 * KIB, 0, 8000 * KIB),
    ],
)
def test_the_limit_of_the_group_counts_without_its_page_cache(
    tree: Tree, limit: str, used: int, cached: int, available: int
) -> None:
    folder = "sys/fs/cgroup/job"
    stat = f"anon 5\nactive_file 7\ninactive_file {cached}\n"
    tree(MACHINE | V2 | {f"{folder}/memory.max": limit, f"{folder}/memory.current": f"{used}\n"})
    tree({f"{folder}/memory.stat": stat})
    assert available_memory() == available


def test_a_limit_is_known_where_the_machine_does_not_say(tree: Tree) -> None:
    tree({**V2, "sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "2000\n"})
    assert available_memory() == 3000


def test_limits_of_version_1_count(tree: Tree) -> None:
    folder = "sys/fs/cgroup/memory/job"
    tree(MACHINE | V1 | {f"{folder}/memory.limit_in_bytes": "9223372036854771712\n"})
    tree({f"{folder}/memory.usage_in_bytes": "1000\n", f"{folder}/memory.stat": "inactive_file 1\n"})
    assert available_memory() == 8000 * KIB
    tree({f"{folder}/memory.limit_in_bytes": "5000\n", f"{folder}/memory.stat": "inactive_file 1\n"})
    assert available_memory() == 4001
    tree({f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n"})
    assert available_memory() == 4500


def test_private_memory_is_what_ends_with_the_process(tree: Tree) -> None:
    assert private_memory() is None
    lines = "Rss: 900 kB\nShared_Clean: 500 kB\nPrivate_Clean: 30 kB\nPrivate_Dirty: 12 kB\nSwap: 7 kB\n"
    tree({"proc/self/smaps_rollup": lines, "proc/77/smaps_rollup": lines.replace("12", "20")})
    assert private_memory() == 42 * KIB
    assert private_memory(77) == 50 * KIB
    assert private_memory(78) is None


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not say")
def test_this_machine_says_what_it_has() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    available, private = available_memory(), private_memory()
    assert available is not None
    assert 0 < available <= psutil.virtual_memory().total
    assert private is not None
    assert 0 < private <= psutil.Process().memory_info().rss
    assert private_memory(os.getpid()) is not None

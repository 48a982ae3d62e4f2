"""Settings of all test sessions: CPU, fixed seeds, sampled cases, and a check for leaks."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

# Set before torch or numba is imported. Runs on a GPU or with threads set these variables themselves.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if not os.environ.get("OMP_NUM_THREADS"):
    os.environ["OMP_NUM_THREADS"] = "1"

# Shells start background jobs with SIGINT ignored, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import settings

from tests.leaks import files_below, remaining_children
from tests.programs import stop_servers

ROOT = Path(__file__).resolve().parent.parent

# Tests kill processes by signals. Core files would count as leaked files.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# Use the same examples in every run, without a database of examples in the repository.
settings.register_profile("project", derandomize=True, database=None, deadline=None, print_blob=True)
settings.load_profile("project")


_GOLDEN_RATIO = 0.618034
_LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")  # names of sockets may have 107 characters


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of each ``sample`` test as quick, ``slow`` or ``exhaustive``.

    The first ``quick`` cases keep their marks, those up to ``ci`` become slow, and the others exhaustive. The order
    spreads the cases over the product of the parameters.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        options = cases[0].get_closest_marker("sample").kwargs
        slower = [any(case.get_closest_marker(tier) for tier in ("slow", "exhaustive")) for case in cases]
        order = sorted(range(len(cases)), key=lambda i: (slower[i], i * _GOLDEN_RATIO % 1))
        for rank, i in enumerate(order):
            if rank >= options.get("ci", len(cases)):
                cases[i].add_marker("exhaustive")
            elif rank >= options.get("quick", 1):
                cases[i].add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def crash_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write records of crashes to a temporary folder, instead of the working directory."""
    from rl_ext_core.recording import capsule

    folder = tmp_path_factory.mktemp("crashes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capsule, "CRASH_FOLDER", str(folder))
        yield folder


def pytest_collection_finish() -> None:
    """Exempt what the imports created from garbage collections, which then take milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def check_for_leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if it leaves a process, a file in the repository, or a temporary file."""
    # Use a private folder, because other programs write to the machine's own. It is next to pytest's tmp_path.
    scratch = tmp_path_factory.mktemp("tmpdir")
    short = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp")) if len(str(scratch)) > _LONGEST_TMPDIR else None
    if short is not None:
        scratch = short
        # The priority is lower than that of multiprocessing, which removes its folders in it first.
        util.Finalize(None, shutil.rmtree, (short,), exitpriority=-200)
    before = files_below(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr(tempfile, "tempdir", None)
        from tests.worker_servers import warm_server

        with warm_server():
            yield
        stop_servers()
        left = [f"process {child}" for child in remaining_children()]
        own = tmp_path_factory.getbasetemp().parent
        left += [f"file {path}" for path in files_below(ROOT) - before if own not in path.parents]
        # multiprocessing removes its folders when the interpreter ends, and torch creates its cache at import.
        expected = ("pymp-", "torchinductor_")
        left += [f"temporary {path}" for path in scratch.iterdir() if not path.name.startswith(expected)]
    if left:
        pytest.fail("the session left behind:\n" + "\n".join(sorted(left)), pytrace=False)


@pytest.fixture(autouse=True)
def independent_tests() -> None:
    """Seed the global generators, and remove what ALE writes into a class of gymnasium, before each test."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "gymnasium.vector" in sys.modules:
        sys.modules["gymnasium.vector"].VectorEnv.metadata.clear()  # a copy of an environment reports such a change

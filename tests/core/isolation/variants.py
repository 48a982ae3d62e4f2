"""Variants of the toy simulator: their compilation and expected verdicts."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from rl_ext_core.isolation import Isolation
from tests.core.devices.fakes.build import compile_library
from tests.core.isolation.simulator import Simulator

SOURCE = Path(__file__).parent / "sim.c"
# The name contains the process id, because the same tests may run in several processes at a time.
SHARED_MEMORY = Path(f"/dev/shm/toy_simulator-{os.getpid()}")

INDEPENDENT, SINGLE, SHARED = Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE, Isolation.SHARED_STATE
COLLIDE, NON_DETERMINISTIC, BROKEN = Isolation.PROCESSES_COLLIDE, Isolation.NON_DETERMINISTIC, Isolation.BROKEN
UNKNOWN = Isolation.UNKNOWN

OWN_CWD, ONE_AT_A_TIME = 'use make_vec_env(..., cwd="own")', "so only one instance can run at a time"
# Expected verdict of each variant, and a part of the explanation.
VARIANTS = {
    "SEEDED_BY_CLOCK": (NON_DETERMINISTIC, "does not return the same twice"),
    "GOOD": (INDEPENDENT, "bit for bit"),
    "BACKGROUND_THREAD": (INDEPENDENT, "bit for bit"),
    "NULL_FOR_SECOND": (SINGLE, "building the second raises RuntimeError: the toy simulator gives no handle"),
    "NULL_FOR_LATER": (SINGLE, "building the third, after the first was closed, raises RuntimeError"),
    "CRASH_OF_SECOND": (SINGLE, "building the second kills the process by SIGSEGV"),
    "EXIT_OF_SECOND": (SINGLE, "exit code 3 (it printed: 'toy simulator: the license is for one instance')"),
    "ABORT_IN_STEP": (SINGLE, "step 3 of the first kills the process by SIGABRT"),
    "CLOSE_KILLS_OTHERS": (SINGLE, "of the first, after the second was closed, kills the process by SIGSEGV"),
    "CRASH_OF_LAST_CLOSE": (SINGLE, "closing the first, after the second was closed, kills the process by SIGABRT"),
    "SHARED_GLOBALS": (SHARED, "the first returns something else from its"),
    "SHARED_RANDOM": (SHARED, "returns something else from its step"),
    "SHARED_AT_RESET": (SHARED, "returns something else from its"),
    "SHARED_LATER": (SHARED, "the first returns something else from its step 5"),
    "LAZY_TABLE": (SHARED, "returns something else from its step"),
    "CLOSE_CHANGES_OTHERS": (SHARED, "returns something else from its step"),
    "LAST_CLOSE_CHANGES_LATER": (SHARED, "the third returns something else from its step 1"),
    "NOTHING_SEEN": (NON_DETERMINISTIC, "nothing that it returned depended on seeds or actions"),
    "NULL_ALWAYS": (UNKNOWN, "could not be tested: building it raises RuntimeError: the toy simulator gives no handle"),
    "CRASH_IN_STEP": (BROKEN, "step 5 of it kills the process by SIGSEGV"),
    "HANG_OF_SECOND": (SINGLE, "building the second hangs"),  # until the timeout
    "LOCK_IN_CWD": (COLLIDE, OWN_CWD),
    "LOCK_IN_TMPDIR": (COLLIDE, ONE_AT_A_TIME),
    "LOCK_NEXT_TO_LIBRARY": (COLLIDE, ONE_AT_A_TIME),
    "LOCK_PER_PROCESS": (COLLIDE, OWN_CWD),
    "STATE_IN_FILES": (COLLIDE, OWN_CWD),
    "SHARED_MEMORY": (COLLIDE, ONE_AT_A_TIME),
}
# Variants of which one process may run several.
IN_PROCESS = ("GOOD", "BACKGROUND_THREAD", "NULL_ALWAYS", "LOCK_PER_PROCESS", "STATE_IN_FILES")


def compiled(name: str, folder: Path) -> functools.partial[Simulator]:
    library = folder / name.lower() / "libsim.so"
    library.parent.mkdir()
    defined = [f"-DVARIANT={name}", f'-DSHARED_MEMORY_NAME="/{SHARED_MEMORY.name}"']
    compile_library(SOURCE, library, "-fPIC", "-Werror", *defined, "-pthread", "-lrt", "-ldl")
    return functools.partial(Simulator, str(library))

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.isolation.simulator import Simulator
from tests.requirements import compile_library

Variant = Callable[[str], "functools.partial[Simulator]"]
# The name contains the process id, because the same tests may run in several processes at a time.
SHARED_MEMORY = Path(f"/dev/shm/toy_simulator-{os.getpid()}")


def compile_variant(folder: Path, name: str) -> functools.partial[Simulator]:
    """Compile a variant of the toy simulator, and return the factory of its environment."""
    library = folder / name.lower() / "libsim.so"
    library.parent.mkdir()
    defined = [f"-DVARIANT={name}", f'-DSHARED_MEMORY_NAME="/{SHARED_MEMORY.name}"']
    source = Path(__file__).parent / "sim.c"
    compile_library(source, library, "-fPIC", "-Werror", *defined, "-pthread", "-lrt", "-ldl")
    return functools.partial(Simulator, str(library))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """Return a function that compiles a variant of the toy simulator once."""
    return functools.cache(functools.partial(compile_variant, tmp_path_factory.mktemp("simulators")))


@pytest.fixture
def variant(compiled: Variant) -> Iterator[Variant]:
    """Return a function that compiles a variant of the toy simulator, and returns the factory of its environment."""
    yield compiled
    SHARED_MEMORY.unlink(missing_ok=True)

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.core.devices.fakes.build import skip_or_fail
from tests.core.isolation import variants
from tests.core.isolation.simulator import Simulator

Variant = Callable[[str], "functools.partial[Simulator]"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """Return a function that compiles a variant of the toy simulator once. Without a C compiler, skip the test."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("simulators")
    if compiler is None:
        skip_or_fail("no C compiler (cc) for the toy simulator: apt-get install gcc libc6-dev")
    return functools.cache(lambda name: variants.compiled(name, folder, compiler))


@pytest.fixture
def variant(compiled: Variant) -> Iterator[Variant]:
    """Return a function that compiles a variant of the toy simulator, and returns the factory of its environment."""
    yield compiled
    variants.SHARED_MEMORY.unlink(missing_ok=True)

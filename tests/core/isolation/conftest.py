from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from tests.core.isolation import variants
from tests.core.isolation.simulator import Simulator

Variant = Callable[[str], "functools.partial[Simulator]"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """Return a function that compiles a variant of the toy simulator once."""
    folder = tmp_path_factory.mktemp("simulators")
    return functools.cache(lambda name: variants.compiled(name, folder))


@pytest.fixture
def variant(compiled: Variant) -> Iterator[Variant]:
    """Return a function that compiles a variant of the toy simulator, and returns the factory of its environment."""
    yield compiled
    variants.SHARED_MEMORY.unlink(missing_ok=True)

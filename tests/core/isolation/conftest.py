"""Compiles the toy simulator's variants, and keeps verdicts away from the user's cache."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.devices.fakes.build import skip_or_fail
from tests.core.isolation import variants
from tests.core.isolation.simulator import Simulator

Variant = Callable[[str], "functools.partial[Simulator]"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rl-ext" / "isolation"


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        skip_or_fail("no C compiler (cc) for the toy simulator: apt-get install gcc libc6-dev")
    return found


@pytest.fixture(scope="session")
def compiled(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    folder = tmp_path_factory.mktemp("simulators")
    return functools.cache(lambda name: variants.compiled(name, folder, compiler))


@pytest.fixture
def variant(compiled: Variant) -> Iterator[Variant]:
    """Give what builds an environment around a variant of the toy simulator."""
    yield compiled
    variants.SHARED_MEMORY.unlink(missing_ok=True)

"""Verdicts are cached until something that they depend on changes. Damaged files are ignored."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, Verdict, probe, probing
from tests.core.isolation import simulator
from tests.core.isolation.conftest import Variant

VERDICT = Verdict(Isolation.INDEPENDENT, "text", "probe", in_process=True, step_seconds=0.5, libraries=("a", "b"))


def test_second_probe_reads_the_cache(own_cache: Path, variant: Variant, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    first, second = (probe(variant("NULL_FOR_SECOND"), cache=str(cache)) for _ in range(2))
    assert (first.declared_by, second.declared_by) == ("probe", "cache")
    assert second == dataclasses.replace(first, declared_by="cache", seconds=second.seconds)
    assert len(list(cache.iterdir())) == 1
    assert not own_cache.exists()


@pytest.mark.slow
def test_cache_is_invalidated_by_a_replaced_library_or_variable(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libsim.so"
    library.write_bytes(Path(variant("GOOD").args[0]).read_bytes())
    monkeypatch.setenv("TOY_LIBRARY", str(library))
    assert [probe(simulator.make_from_env_variable).declared_by for _ in range(2)] == ["probe", "cache"]
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")
    assert probe(simulator.make_from_env_variable).declared_by == "cache"
    monkeypatch.setenv("TOY_LIBRARY", variant("SHARED_RANDOM").args[0])
    assert probe(simulator.make_from_env_variable).isolation is Isolation.SHARED_STATE
    monkeypatch.setenv("TOY_LIBRARY", str(library))
    assert probe(simulator.make_from_env_variable).declared_by == "cache"
    library.write_bytes(Path(variant("SHARED_RANDOM").args[0]).read_bytes())
    assert probe(simulator.make_from_env_variable).isolation is Isolation.SHARED_STATE


@pytest.mark.sample(quick=0)
@pytest.mark.parametrize("place", ["lib/python3/site-packages", "code"])
def test_cache_is_invalidated_by_an_edited_module(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / place
    monkeypatch.syspath_prepend(site)
    found = []
    for kind in ("Plain", "Plain", "DrawsFromNumPy"):
        core = f"from tests.core.isolation.simulator import {kind} as Simulator\n"
        files = {"__init__": "", "core": core, "env": "from edited import core\ndef make(): return core.Simulator()\n"}
        if len(found) != 1:
            (site / "edited").mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (site / "edited" / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        found.append(probe(importlib.import_module("edited.env").make))
        for name in [name for name in sys.modules if name.split(".")[0] == "edited"]:
            del sys.modules[name]
    assert [verdict.declared_by for verdict in found] == ["probe", "cache", "probe"]
    assert found[2].isolation is Isolation.SHARED_STATE


@pytest.mark.slow
def test_verdict_is_not_cached_if_a_library_is_deleted_or_the_recipe_is_unknown(
    own_cache: Path, variant: Variant
) -> None:
    generator = np.random.default_rng(1)
    probe(functools.partial(simulator.make_with_library_copy, variant("GOOD").args[0]))
    probe(lambda: generator and simulator.Plain())
    assert not own_cache.exists() or not list(own_cache.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"independent"', '"splendid"'),
        lambda text: text.replace('"independent"', '"broken"'),
        lambda text: text.replace('"explanation"', '"explication"'),
        lambda text: text.replace('"files": {', '"files": {"\\u0000": 3, '),
        lambda text: "\0" * len(text),
    ],
)
def test_damaged_file_is_ignored_and_replaced(damage: Callable[[str], str], tmp_path: Path) -> None:
    path, now = tmp_path / "cache" / "verdict.json", time.time_ns()
    probing._write_verdict(path, VERDICT, [__file__], now)
    assert probing._read_verdict(path) == dataclasses.replace(VERDICT, declared_by="cache")
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert probing._read_verdict(path) is None
    probing._write_verdict(path, VERDICT, [__file__], now)
    assert probing._read_verdict(path) is not None
    assert list(path.parent.iterdir()) == [path]


def test_user_cache_folder_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probing._user_cache_folder() == Path(os.environ["XDG_CACHE_HOME"], "rl-ext", "isolation")
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert probing._user_cache_folder() == tmp_path / ".cache" / "rl-ext" / "isolation"


# -- keys

SCRIPT = """
import functools, json
import gymnasium, numpy as np
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation.probing import _cache_file
from tests.core.isolation import simulator
SIZE = {size}
class Mine(simulator.Plain):
    size = {{"a", "b", "c", "d"}}
    @property
    def double(self): return 2
    @staticmethod
    def helper(): return SIZE
def make(width=3, *, names=("x", "y")):
    return [Mine(), {{"p", "q"}}, helper]
def helper():
    return make()
sources = [make, Mine, lambda: Mine(), functools.partial(Mine, np.arange(3), k={{"b": 1}}), "CartPole-v1",
           functools.partial(simulator.Simulator, "/nowhere.so"), gymnasium.make("CartPole-v1")]
print(json.dumps([str(_cache_file([as_factory(source, verify=False)], "/", 100)) for source in sources]))
"""


def cache_files_of_script(script: Path, seed: str) -> list[str]:
    """Run a script, and return the cache file of each of its environment sources."""
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_keys_of_a_script_repeat_in_each_run_and_differ_with_its_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(size=3))
    one = cache_files_of_script(script, "1")
    assert len({*one} - {"None"}) == len(one)
    assert cache_files_of_script(script, "2") == one
    script.write_text(SCRIPT.format(size=14))
    assert [same == key for same, key in zip(cache_files_of_script(script, "1"), one, strict=True)] == [False] * 4 + [
        True
    ] * 3


def cache_file(source: Any, steps: int = 100) -> Path | None:
    """Return the file in which the verdict on a source is cached, or None."""
    return probing._cache_file([as_factory(source, verify=False)], "/", steps)


def test_keys_differ_with_recipe_file_steps_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_closure(value: Any) -> Any:
        """Return a factory whose closure contains a value."""
        return lambda: value and simulator.Plain()

    changed, data = gymnasium.make("CartPole-v1"), tmp_path / "model.bin"
    changed.unwrapped.gravity = 5.0  # type: ignore[attr-defined]
    data.write_text("1")
    of_file = functools.partial(simulator.Simulator, data)
    sources = [
        make_closure(1),
        make_closure(2),
        make_closure(True),
        make_closure(np.zeros(2)),
        make_closure(np.zeros(3)),
    ]
    sources += [lambda: gymnasium.make("a"), lambda: gymnasium.make("b"), "CartPole-v1", "CartPole-v0"]
    sources += [gymnasium.make("CartPole-v1"), changed, of_file, functools.partial(simulator.Simulator, "b")]
    found = [cache_file(source) for source in sources]
    assert found == [cache_file(source) for source in sources]
    assert len({*found} - {None}) == len(found)
    data.write_text("12")
    assert cache_file(of_file) not in found
    assert cache_file("CartPole-v1", steps=50) not in found
    monkeypatch.setattr(os, "cpu_count", lambda: 1024)
    assert cache_file("CartPole-v1") not in found

"""Verdicts are kept for as long as what they were found on is the same, and a bad cache is no cache."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, Verdict, probe, probing
from rl_ext_core.isolation.probing import key_of
from tests.core.isolation import simulator
from tests.core.isolation.conftest import Variant


def entry(own_cache: Path) -> Path:
    (path,) = own_cache.iterdir()
    return path


def test_a_second_probe_is_answered_from_the_cache(own_cache: Path, variant: Variant, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    first, second = (probe(variant("NULL_FOR_SECOND"), cache=str(cache)) for _ in range(2))
    assert (first.declared_by, second.declared_by) == ("probe", "cache")
    assert second == dataclasses.replace(first, declared_by="cache", seconds=second.seconds)
    assert len(list(cache.iterdir())) == 1
    assert not own_cache.exists()


@pytest.mark.slow
def test_a_library_that_is_not_named_by_the_recipe_is_noticed_too(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libsim.so"
    library.write_bytes(Path(variant("GOOD").args[0]).read_bytes())
    monkeypatch.setenv("TOY_LIBRARY", str(library))
    assert probe(simulator.from_the_environment).declared_by == "probe"
    assert probe(simulator.from_the_environment).declared_by == "cache"
    library.write_bytes(Path(variant("SHARED_RANDOM").args[0]).read_bytes())
    assert probe(simulator.from_the_environment).isolation is Isolation.SHARED_STATE


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("place", ["lib/python3/site-packages", "code"])
def test_an_edited_module_is_probed_again(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / place
    package, record = site / "installed_sim", site / "installed_sim-1.0.dist-info"
    package.mkdir(parents=True)
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-sim\nVersion: 1.0\n")
    (record / "RECORD").write_text("installed_sim/__init__.py,,\ninstalled_sim/core.py,,\ninstalled_sim/env.py,,\n")
    (package / "__init__.py").write_text("")
    (package / "env.py").write_text("from installed_sim import core\ndef make():\n    return core.Simulator()\n")
    monkeypatch.syspath_prepend(site)
    found = []
    for kind in ("Plain", "Plain", "DrawsFromNumPy"):
        edited = f"from tests.core.isolation.simulator import {kind} as Simulator\n"
        if not (package / "core.py").exists() or (package / "core.py").read_text() != edited:
            (package / "core.py").write_text(edited)
        importlib.invalidate_caches()
        found.append(probe(importlib.import_module("installed_sim.env").make))
        for name in [name for name in sys.modules if name.split(".")[0] == "installed_sim"]:
            del sys.modules[name]
    assert [verdict.declared_by for verdict in found] == ["probe", "cache", "probe"]
    assert found[2].isolation is Isolation.SHARED_STATE


@pytest.mark.slow
def test_code_in_an_archive_is_known_by_the_archive(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "archive.zip")
    found = []
    for kind, written in (("Plain", True), ("Plain", False), ("DrawsFromNumPy", True)):
        if written:
            with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
                core = f"from tests.core.isolation.simulator import {kind} as Simulator\n"
                archive.writestr("archived_sim.py", f"{core}def make():\n    return Simulator()\n")
        importlib.invalidate_caches()
        found.append(probe(importlib.import_module("archived_sim").make).declared_by)
        probing._of_this_process.clear()
        del sys.modules["archived_sim"]
    assert found == ["probe", "cache", "probe"]


READS = """
import ctypes, json, os, pathlib
from tests.core.isolation import simulator
VARIANTS = {variants!r}
def make():
    folder = pathlib.Path(__file__).parent
    return simulator.Simulator({which})
"""


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    "which",
    [
        "VARIANTS[json.load(open(folder / 'config.json'))]",
        "VARIANTS[(folder / 'data' / 'config.json').read_text()[1:-1]]",
        "VARIANTS[os.environ.get('TOY_KIND', 'GOOD')]",
        "VARIANTS[['GOOD', 'SHARED_RANDOM'][len((folder / 'config.json').read_text()) > 8]]",
        "VARIANTS[read_by_c(folder / 'data' / 'config.json')]",
        "VARIANTS[KIND]",
    ],
)
def test_what_the_environment_reads_by_itself_is_noticed(
    which: str, variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = {name: variant(name).args[0] for name in ("GOOD", "SHARED_RANDOM")}
    folder = tmp_path / "code"
    (folder / "data").mkdir(parents=True)
    source = READS.format(variants=variants, which=which) + READS_BY_C
    (folder / "reads_by_itself.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "reads_by_itself", raising=False)
    found = []
    for kind in ("GOOD", "GOOD", "SHARED_RANDOM"):
        for name in ("config.json", "data/config.json"):
            if not (folder / name).exists() or (folder / name).read_text() != json.dumps(kind):
                (folder / name).write_text(json.dumps(kind))
        monkeypatch.setenv("TOY_KIND", kind)
        module = importlib.import_module("reads_by_itself")
        monkeypatch.setattr(module, "KIND", kind)
        found.append(probe(module.make))
    monkeypatch.delitem(sys.modules, "reads_by_itself")
    assert [verdict.declared_by for verdict in found] == ["probe", "cache", "probe"]
    assert found[2].isolation is Isolation.SHARED_STATE


READS_BY_C = """
KIND = "GOOD"
def read_by_c(path):
    c = ctypes.CDLL(None)
    c.fopen.restype = ctypes.c_void_p
    file, text = ctypes.c_void_p(c.fopen(str(path).encode(), b"r")), ctypes.create_string_buffer(100)
    c.fgets(text, 100, file)
    c.fclose(file)
    return json.loads(text.value)
"""


def test_a_file_of_the_same_time_and_size_is_known_by_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    state = probing._state_of(str(path))
    times = path.stat()
    for text, same in (("two", False), ("one", True)):
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert probing._is_as(str(path), state) is same
    path.unlink()
    assert not probing._is_as(str(path), state)
    assert probing._is_as(str(path), None)


@pytest.mark.exhaustive
def test_a_session_says_nothing_of_another_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    probe(simulator.Plain)
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")
    assert probe(simulator.Plain).declared_by == "cache"
    monkeypatch.setenv("SIMULATOR_HOME", "/elsewhere")
    assert probe(simulator.Plain).declared_by == "probe"


@pytest.mark.slow
def test_what_cannot_be_recognized_again_is_kept_for_this_process(own_cache: Path, variant: Variant) -> None:
    source = functools.partial(simulator.unpacks_its_library, variant("GOOD").args[0])
    assert probe(source).declared_by == "probe"
    assert probe(source).declared_by == "cache"
    assert not own_cache.exists() or not list(own_cache.iterdir())


def test_a_verdict_of_another_machine_is_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("CartPole-v1")
    monkeypatch.setattr(os, "cpu_count", lambda: 1024)
    assert key("CartPole-v1") != before


@pytest.mark.slow
def test_more_steps_are_probed_again_where_that_may_show_more(variant: Variant) -> None:
    assert probe(variant("SHARED_LATER"), steps=20).isolation is Isolation.INDEPENDENT
    assert probe(variant("SHARED_LATER"), steps=10).declared_by == "cache"
    assert probe(variant("SHARED_LATER"), steps=100).isolation is Isolation.SHARED_STATE
    assert probe(variant("SHARED_LATER"), steps=1000).declared_by == "cache"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"format": 5', '"format": 6', 1),
        lambda text: text.replace('"steps": 100', '"steps": "many"'),
        lambda text: text.replace('"independent"', '"splendid"'),
        lambda text: text.replace('"independent"', '"broken"'),
        lambda text: text.replace('"in_process": true', '"in_process": 1'),
        lambda text: text.replace('"explanation"', '"explication"'),
        lambda text: text.replace('"files": {', '"files": {"\\u0000": 3, '),
        lambda text: text.replace('"cure": null', '"cure": 3'),
        lambda text: text.replace('"cure": null', '"cure": null, "more": 1'),
        lambda text: "\0" * len(text),
    ],
)
def test_a_damaged_entry_is_no_entry_and_is_mended(damage: Callable[[str], str], own_cache: Path) -> None:
    kept = probing.Cache.of([as_factory(simulator.Plain)], [0], True, 100)
    assert kept is not None
    verdict = Verdict(Isolation.INDEPENDENT, "text", "probe", in_process=True, step_seconds=0.5)
    known = {"libraries": [], "sources": [__file__]}
    kept.write(verdict, known)
    assert kept.read() == dataclasses.replace(verdict, declared_by="cache")
    path = entry(own_cache)
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert kept.read() is None
    kept.write(verdict, known)
    assert kept.read() is not None
    path.write_bytes(b"\xff\xfe\x00")
    assert kept.read() is None
    path.unlink()
    path.mkdir()
    assert kept.read() is None
    kept.write(verdict, known)  # in vain
    assert list(own_cache.iterdir()) == [path]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path / "file"))
    assert probe(simulator.Plain).declared_by == "probe"
    assert (tmp_path / "file").read_text() == ""


def test_the_users_folder_is_the_systems_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probing._users_folder() == Path(os.environ["XDG_CACHE_HOME"], "rl-ext", "isolation")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert probing._users_folder() == tmp_path / ".cache" / "rl-ext" / "isolation"


# -- keys

SCRIPT = """
import functools, sys
import gymnasium, numpy as np
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation.probing import key_of
from tests.core.isolation import simulator
SIZE = {size}
class Mine(simulator.Plain):
    size = {{"a", "b", "c", "d"}}
    @property
    def double(self): return 2 * {factor}
    @staticmethod
    def helper(): return SIZE
def make(width=3, *, names=("x", "y")):
    return [Mine(), {{"p", "q"}}, helper]
def helper():
    return make()
sources = [make, Mine, lambda: Mine(), functools.partial(Mine, np.arange(3), k={{"b": 1}}), "CartPole-v1",
           functools.partial(simulator.Simulator, "/nowhere.so"), gymnasium.make("CartPole-v1")]
print([key_of([as_factory(source, verify=False)], [0], 1) for source in sources])
"""


def keys(tmp_path: Path, *, seed: int, size: int = 3, factor: int = 1) -> list[str]:
    script = tmp_path / f"script{seed}.py"
    script.write_text("\n" * seed + SCRIPT.format(size=size, factor=factor))
    environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.replace("'", '"').replace("None", "null"))
    return found


def test_keys_of_a_script_are_the_same_in_every_run_and_differ_with_its_code(tmp_path: Path) -> None:
    one = keys(tmp_path, seed=1)
    assert None not in one
    assert len(set(one)) == len(one)
    assert keys(tmp_path, seed=2) == one
    by_size, by_factor = keys(tmp_path, seed=1, size=4), keys(tmp_path, seed=1, factor=2)
    changed = [index for index, key in enumerate(one) if by_size[index] != key]
    assert changed == [0, 1, 2, 3]
    assert [index for index, key in enumerate(one) if by_factor[index] != key] == [0, 1, 2, 3]


def key(source: Any) -> str | None:
    return key_of([as_factory(source, verify=False)], [0], 1)


def test_keys_differ_where_the_recipe_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(value: Any) -> Any:
        return lambda: value and simulator.Plain()

    pairs = [
        (lambda: gymnasium.make("a"), lambda: gymnasium.make("b")),
        (captured(1), captured(2)),
        (captured(1), captured(True)),
        (captured(np.zeros(2)), captured(np.zeros(3))),
        (functools.partial(simulator.Simulator, "a"), functools.partial(simulator.Simulator, "b")),
        ("CartPole-v1", "CartPole-v0"),
        ("CartPole-v1", gymnasium.make("CartPole-v1")),
    ]
    for one, other in pairs:
        assert key(one) is not None
        assert key(one) == key(one)
        assert key(one) != key(other)
    assert key_of([as_factory("CartPole-v1")], [0], 1) != key_of([as_factory("CartPole-v1")], [0], 2)
    here = key("CartPole-v1")
    monkeypatch.chdir(tmp_path)
    assert key("CartPole-v1") != here


@pytest.mark.parametrize("kind", [str, os.fsencode, Path])
@pytest.mark.parametrize("folders", [1, 3])
def test_keys_differ_where_a_file_does_that_the_recipe_names(folders: int, kind: Any, tmp_path: Path) -> None:
    data = tmp_path.joinpath(*["deep" * 30] * folders, "model.bin")
    data.parent.mkdir(parents=True)
    data.write_text("1")
    before = key(functools.partial(simulator.Simulator, kind(data)))
    assert before is not None
    assert key(functools.partial(simulator.Simulator, kind(data))) == before
    data.write_text("12")
    assert key(functools.partial(simulator.Simulator, kind(data))) != before


def test_an_instance_that_was_changed_has_another_key() -> None:
    env, other = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    assert key(env) == key(other)
    other.unwrapped.gravity = 5.0  # type: ignore[attr-defined]
    assert key(env) != key(other)


@pytest.mark.slow
def test_what_cannot_be_described_has_no_key_and_is_not_kept(own_cache: Path) -> None:
    generator = np.random.default_rng(1)

    def make() -> Any:
        return generator and simulator.Plain()

    assert key(make) is None
    assert probe(make).declared_by == "probe"
    assert not own_cache.exists()


# -- the verdict as text


def test_a_verdict_goes_through_json() -> None:
    verdict = Verdict(Isolation.SHARED_STATE, "text", "user", libraries=("a", "b"), cure="TMPDIR", step_seconds=0.5)
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert json.loads(verdict.to_json())["isolation"] == "shared-state"

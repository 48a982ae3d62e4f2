from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from rl_ext_core._import_path import is_importable_elsewhere
from rl_ext_core.vector import SharedMemoryVectorEnv
from tests.launch_modes import LAUNCH_MODES, run_program

NAME = "module_of_a_user"
SOURCE = """
import gymnasium, numpy as np

LEVEL = {"value": 3.0, "steps": 0}

class Info:
    value = 5

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sum = float(self.np_random.random())
        LEVEL["steps"] = 0
        return np.full(1, self.sum, np.float32), {"info": Info()}

    def step(self, action):
        LEVEL["steps"] += 1
        self.sum += level() + float(action) + LEVEL["steps"] / 1000
        return np.full(1, self.sum % 9, np.float32), level(), False, False, {}

    def set_level(self, value):
        LEVEL["value"] = value
        return level()

def level():
    return LEVEL["value"]
"""


def _import_from(entry: str) -> Any:
    sys.path.insert(0, entry)
    return importlib.import_module(NAME)


def import_by_relative_entry(folder: Path) -> Any:
    os.chdir(folder)
    module = _import_from(".")
    os.chdir("/")
    return module


def import_and_remove_entry(folder: Path) -> Any:
    module = _import_from(str(folder))
    sys.path.remove(str(folder))
    return module


def import_from_namespace_package(folder: Path) -> Any:
    (folder / "parts").mkdir()
    shutil.move(folder / f"{NAME}.py", folder / "parts")
    sys.path.insert(0, str(folder))
    module = importlib.import_module(f"parts.{NAME}")
    sys.path.remove(str(folder))
    return module


def import_and_delete_file(folder: Path) -> Any:
    module = _import_from(str(folder))
    shutil.rmtree(folder)
    return module


def import_by_specification(folder: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.py")
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_by_finder(folder: Path) -> Any:
    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(fullname, self) if fullname == NAME else None

        def exec_module(self, module: types.ModuleType) -> None:
            exec(SOURCE, module.__dict__)

    sys.meta_path.insert(0, Finder())
    return importlib.import_module(NAME)


def import_and_shadow(folder: Path) -> Any:
    module = _import_from(str(folder))
    (folder / "other").mkdir()
    (folder / "other" / f"{NAME}.py").write_text("raise RuntimeError('another module')")
    sys.path.insert(0, str(folder / "other"))
    return module


FINDABLE = (import_by_relative_entry, import_and_remove_entry, import_from_namespace_package, import_by_specification)
BY_VALUE = (import_and_delete_file, import_by_finder, import_and_shadow)


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module in the way that is the parameter, and remove it after the test."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield request.param(folder)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (NAME, "parts"):
            del sys.modules[name]


@pytest.mark.sample(quick=3, ci=7)
@pytest.mark.parametrize("module", [*BY_VALUE, *FINDABLE], indirect=True, ids=lambda make: make.__name__)
def test_workers_run_the_code_of_this_process(module: Any, request: pytest.FixtureRequest) -> None:
    assert is_importable_elsewhere(module.__name__) is (request.node.callspec.params["module"] in FINDABLE)
    module.LEVEL["value"] = 3.0
    envs = SharedMemoryVectorEnv([module.Env, lambda: module.Env()])
    try:
        assert envs.call("set_level", 2.0) == (2.0, 2.0)
        _, infos = envs.reset(seed=1)
        # Infos are instances of this process's own class.
        assert [type(info) for info in infos["info"]] == [module.Info] * 2
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [2.0, 2.0]
        assert module.LEVEL == {"value": 3.0, "steps": 0}
    finally:
        envs.close()
    assert cloudpickle.list_registry_pickle_by_value() == set()


OF_A_NOTEBOOK = f"""
import os, sys
sys.path.insert(0, "")
open("{NAME}.py", "w").write({SOURCE!r})
import {NAME}
# %%
os.makedirs("out")
os.chdir("out")
# %%
import numpy as np
from rl_ext_core.isolation import probe
from rl_ext_core.vector import SharedMemoryVectorEnv
class Cell({NAME}.Env):
    def set_level(self, value): return super().set_level(value) + 1
for kind in ({NAME}.Env, Cell):
    envs = SharedMemoryVectorEnv([kind] * 2)
    print(envs.call("set_level", 2.0), probe([kind] * 2).isolation.value)
    envs.close()
"""


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize("launch_mode", [launch_mode for launch_mode in LAUNCH_MODES if launch_mode != "script"])
def test_modules_are_found_if_the_working_directory_changed_before_the_import(launch_mode: str, tmp_path: Path) -> None:
    lines = run_program(launch_mode, OF_A_NOTEBOOK, tmp_path, preloaded="torch").splitlines()
    assert lines == ["(2.0, 2.0) shared-state", "(3.0, 3.0) shared-state"]

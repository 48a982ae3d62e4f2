"""Run a library's own tests with this project's classes in place of the library's.

``upstream_tests.sh`` runs it. The tests run twice, with the library's classes and with this project's. This file is
also the pytest plugin of the second run.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DIFFERENCES = Path(__file__).with_name("upstream_differences.txt")


class Suite(NamedTuple):
    """Tests of a library, and its classes that ours replace in them.

    :param tests: Folder of tests in its repository.
    :param files: Patterns of test files that use the replaced classes, below that folder.
    :param replacements: Its classes and functions, with their replacements.
    """

    tests: str
    files: tuple[str, ...]
    replacements: dict[str, str]


_SB3 = {
    "stable_baselines3.common.buffers:ReplayBuffer": "sb3_ext:CompressedReplayBuffer",
    "stable_baselines3.common.buffers:DictReplayBuffer": "sb3_ext:CompressedDictReplayBuffer",
    "stable_baselines3.common.buffers:NStepReplayBuffer": "sb3_ext:CompressedNStepReplayBuffer",
    "stable_baselines3.common.buffers:RolloutBuffer": "sb3_ext:CompressedRolloutBuffer",
    "stable_baselines3.common.buffers:DictRolloutBuffer": "sb3_ext:CompressedDictRolloutBuffer",
    "stable_baselines3.her.her_replay_buffer:HerReplayBuffer": "sb3_ext:CompressedHerReplayBuffer",
    "stable_baselines3.common.vec_env.subproc_vec_env:SubprocVecEnv": "sb3_ext:SharedMemoryVecEnv",
    "stable_baselines3.common.env_util:make_vec_env": "sb3_ext:make_vec_env",
}
_PRIORITIZED = {
    "stable_baselines3.common.buffers:ReplayBuffer": "sb3_ext:CompressedPrioritizedReplayBuffer",
    "stable_baselines3.common.buffers:DictReplayBuffer": "sb3_ext:CompressedPrioritizedDictReplayBuffer",
    "stable_baselines3.common.buffers:NStepReplayBuffer": "sb3_ext:CompressedPrioritizedNStepReplayBuffer",
    "stable_baselines3.her.her_replay_buffer:HerReplayBuffer": "sb3_ext:CompressedPrioritizedHerReplayBuffer",
}
_CONTRIB = {
    "sb3_contrib.common.maskable.buffers:MaskableRolloutBuffer": "sb3_ext.contrib:CompressedMaskableRolloutBuffer",
    "sb3_contrib.common.maskable.buffers:MaskableDictRolloutBuffer": (
        "sb3_ext.contrib:CompressedMaskableDictRolloutBuffer"
    ),
    "sb3_contrib.common.recurrent.buffers:RecurrentRolloutBuffer": "sb3_ext.contrib:CompressedRecurrentRolloutBuffer",
    "sb3_contrib.common.recurrent.buffers:RecurrentDictRolloutBuffer": (
        "sb3_ext.contrib:CompressedRecurrentDictRolloutBuffer"
    ),
}
_TORCHRL = {
    "torchrl.envs.libs.gym:GymWrapper": "torchrl_ext:GymWrapper",
    "torchrl.envs.libs.gym:GymEnv": "torchrl_ext:GymEnv",
    "torchrl.envs.batched_envs:ParallelEnv": "torchrl_ext:ParallelEnv",
    "torchrl.data.replay_buffers.storages:LazyTensorStorage": "torchrl_ext:FrameStorage",
    "torchrl.data.replay_buffers.samplers.slice:SliceSampler": "torchrl_ext:SliceSampler",
}
_GYMNASIUM = {"gymnasium.vector.async_vector_env:AsyncVectorEnv": "rl_ext_core.vector:SharedMemoryVectorEnv"}
SUITES = {
    "gymnasium": Suite("tests", ("vector/test_*.py", "wrappers/vector/test_*.py"), _GYMNASIUM),
    "sb3": Suite("tests", ("test_*.py",), _SB3),
    "sb3-prioritized": Suite("tests", ("test_*.py",), _PRIORITIZED),
    "sb3-contrib": Suite("tests", ("test_*.py",), {**_SB3, **_CONTRIB}),
    "torchrl": Suite(
        "test",
        (
            *("envs/*.py", "rb/*.py", "libs/test_gym.py", "test_collectors.py", "test_shared.py"),
            *("transforms/test_action*.py", "transforms/test_env*.py", "transforms/test_compose*.py"),
        ),
        _TORCHRL,
    ),
}


def main() -> int:
    """Run the suite twice; return 1 if any test fails unexpectedly with our classes only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("checkout", type=Path, help="a checkout of that library")
    parser.add_argument("files", nargs="*", help="test files below its folder of tests, patterns allowed")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    own, _, options = _split_at_dashes(sys.argv[1:])
    arguments = parser.parse_args(own)
    suite = SUITES[arguments.suite]
    tests = arguments.checkout / suite.tests
    if not tests.is_dir():
        parser.error(f"{tests} is not a folder: expected a checkout of {arguments.suite}, got {arguments.checkout}")
    with tempfile.TemporaryDirectory() as scratch:
        # In the checkout itself, pytest would import the library from there instead of the installed one.
        copy = Path(scratch, suite.tests)
        shutil.copytree(tests, copy)
        files = [str(f.relative_to(copy)) for p in arguments.files or suite.files for f in sorted(copy.glob(p))]
        theirs = _run(copy, files, options, arguments.timeout, plugin=None)
        ours = _run(copy, files, options, arguments.timeout, plugin=arguments.suite)
    return _compare(theirs, ours, _differences(arguments.suite))


def _split_at_dashes(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Split command-line words into those before ``--``, itself, and those after it."""
    if "--" not in words:
        return words, "", []
    at = words.index("--")
    return words[:at], "--", words[at + 1 :]


def _run(tests: Path, files: list[str], options: list[str], timeout: int, *, plugin: str | None) -> dict[str, str]:
    """Run the files, and return the outcome of each test by its id."""
    report = tests.parent / f"report-{plugin}.xml"
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT), str(ROOT / "shared")])
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "RL_EXT_UPSTREAM_SUITE": plugin or ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
    command += ["--continue-on-collection-errors", f"--timeout={timeout}", f"--junitxml={report}"]
    command += ["-p", "upstream_tests"] if plugin else []
    print(f"--- {len(files)} files with {'our' if plugin else 'its own'} classes", flush=True)
    subprocess.run([*command, *files, *options], cwd=tests, env=environ, check=False, stdin=subprocess.DEVNULL)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = "failed" if failed else "skipped" if skipped else "passed"
    return outcomes


def _differences(suite: str) -> dict[str, str]:
    """Read the deliberate differences: lines ``suite  pattern``, each with a reason below."""
    found: dict[str, str] = {}
    pattern = ""
    for line in DIFFERENCES.read_text().splitlines():
        if line.startswith(f"{suite} "):
            pattern = line.split(maxsplit=1)[1]
            found[pattern] = ""
        elif line.startswith(" ") and pattern:
            found[pattern] += line.strip() + " "
        elif line and not line.startswith("#"):
            pattern = ""
    return found


def _compare(theirs: dict[str, str], ours: dict[str, str], differences: dict[str, str]) -> int:
    """Print tests that pass with the library's classes only; return 1 if one is unexpected."""
    passed = [name for name, outcome in theirs.items() if outcome == "passed"]
    if not passed:
        print("no test passes with the library's own classes, so nothing can be compared")
        return 1
    not_passing = [name for name in passed if ours.get(name, "missing") != "passed"]
    # Test ids contain brackets, which fnmatch treats as a set of characters.
    patterns = {pattern: pattern.replace("[", "[[]") for pattern in differences}
    known = {name: p for name in not_passing for p, text in patterns.items() if fnmatch.fnmatchcase(name, text)}
    for pattern, reason in differences.items():
        count = sum(p == pattern for p in known.values())
        if count:
            print(f"{count} differ on purpose: {pattern}\n    {reason}")
    unknown = [name for name in not_passing if name not in known]
    for name in unknown:
        print(f"passes there, {ours.get(name, 'missing')} here: {name}")
    print(f"{len(passed)} pass there; {len(passed) - len(not_passing)} of them here, {len(known)} differ on purpose,")
    print(f"{len(unknown)} differ without a reason.")
    return 1 if unknown else 0


def pytest_configure() -> None:
    """Replace the library's classes before any test is imported."""
    suite = SUITES[os.environ["RL_EXT_UPSTREAM_SUITE"]]
    new = {_import_name(old): _import_name(name) for old, name in suite.replacements.items()}
    defining_modules = {old.split(":")[0] for old in suite.replacements}
    library = {home.split(".")[0] for home in defining_modules}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in library:
            continue
        found = {key: _replacement_of(value, new) for key, value in vars(module).items() if _is_replaced(value, new)}
        if name in defining_modules:
            # The classes' own methods refer to them by name, so importers get a copy of the module instead.
            module = _replace_module(module)
        if found:
            vars(module).update(found)


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    """Give a test that is parametrized with our class the id that it has with the library's."""
    suite = SUITES[os.environ["RL_EXT_UPSTREAM_SUITE"]]
    names = (old.partition(":")[2] for old, ours in suite.replacements.items() if val is _import_name(ours))
    return next(names, None)


def _replace_module(module: types.ModuleType) -> types.ModuleType:
    """Put a copy of a module in its place, and return the copy."""
    copy = types.ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    sys.modules[module.__name__] = copy
    package, _, name = module.__name__.rpartition(".")
    setattr(sys.modules[package], name, copy)
    return copy


def _import_name(name: str) -> Any:
    """Import an object by a name of the form ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _is_replaced(value: Any, new: dict[Any, Any]) -> bool:
    """Return whether a value is one of the objects with a replacement, by identity."""
    return any(value is old for old in new)


def _replacement_of(value: Any, new: dict[Any, Any]) -> Any:
    """Return the replacement of an object, found by identity."""
    return next(ours for old, ours in new.items() if value is old)


if __name__ == "__main__":
    sys.exit(main())

"""Limits on the number of source files that one call passes through."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys, threading
import gymnasium
{imports}

class Shared(gymnasium.Env):
    metadata = {{"isolation": "shared-state"}}
    observation_space = gymnasium.spaces.Box(0, 1)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {{}}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {{}}

def main():
    env = gymnasium.make("CartPole-v1")
    passed = set()
    def note(frame, event, argument):
        if event == "call" and not imports(frame):
            passed.add(frame.f_code.co_filename.partition(" <")[0])  # names that warnings skip
    def imports(frame):  # code that runs during imports does not count
        while frame is not None and frame.f_code.co_filename != __file__:
            if frame.f_code.co_name == "<module>":
                return True
            frame = frame.f_back
        return False
    threading.setprofile(note)
    sys.setprofile(note)
    made = {call}
    sys.setprofile(None)
    threading.setprofile(None)
    if hasattr(type(made), "step_wait"):  # otherwise the workers start in the first reset
        made.close()
    print(*passed, sep="\\n")

if __name__ == "__main__":
    main()
"""


@pytest.mark.sample(quick=0, ci=2)
@pytest.mark.parametrize(
    # The present numbers of files. Two of ParallelEnv are the pool that VecEnvs have, too. Four record the state at
    # construction, which resume() needs, and one has the memory of the episode's log.
    ("imports", "call", "most"),
    [
        ("from torchrl_ext import ParallelEnv", "ParallelEnv(2, env)", 28),
        ("from sb3_ext import make_vec_env", 'make_vec_env("CartPole-v1", 2)', 28),
        ("from sb3_ext import make_vec_env", "make_vec_env(Shared, 2)", 27),
    ],
    ids=["ParallelEnv", "make_vec_env, in process", "make_vec_env, in workers"],
)
def test_first_call_passes_few_source_files(imports: str, call: str, most: int, tmp_path: Path) -> None:
    preloaded = imports.split()[1].removesuffix("_ext")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shared'}"}
    (script := tmp_path / "script.py").write_text(SCRIPT.format(imports=imports, call=call), encoding="utf-8")
    done = programs.run(script.read_text(), preloaded, file=script, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    folders = tuple(f"{ROOT / name}{os.sep}" for name in ("shared/rl_ext_core", "torchrl_ext", "sb3_ext"))
    passed_files = sorted(
        line.removeprefix(f"{ROOT}/") for line in done.stdout.splitlines() if line.startswith(folders)
    )
    assert 5 < len(passed_files) <= most, "\n".join(passed_files)

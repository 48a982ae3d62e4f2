from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import programs
from tests.programs import ROOT
from tests.ray_scripts import MARK, wait_for_marked_processes

pytestmark = pytest.mark.slow

OWN = """
import gymnasium as gym, torch
from torchrl_ext import GymEnv, GymWrapper, ParallelEnv

class Own(gym.Env):
    observation_space = gym.spaces.Box(-100, 100, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=1.0):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low * 0 + self.size, {}

    def step(self, action):
        return self.observation_space.low * 0 + helper(self.size), 1.0, False, False, {}

def helper(size):
    return 2 * size

def make():
    return GymWrapper(Own(7.0))

gym.register("Own-v0", Own, kwargs={"size": 9.0})
"""

USES = """
own = Own()
own.size = 8.0
made = gym.make("Own-v0")
for source in (
    own, GymWrapper(own), make, lambda: Own(7.0), Own, "Own-v0", gym.spec("Own-v0"), lambda: GymEnv("Own-v0"), made
):
    env = ParallelEnv(2, source)
    rollout = env.rollout(2)
    print(rollout["observation"][0, 0, 0].item(), rollout["next", "observation"][1, 0, 0].item())
    env.close()
env = ParallelEnv(2, Own)  # which ends with the script
env.reset()
"""
PRINTED = [8, 8, 7, 7, 1, 9, 9, 9, 9]


def start_script(folder: Path, text: str) -> programs.Program:
    (folder / "script.py").write_text(text)
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}", "TORCHINDUCTOR_CACHE_DIR": str(folder), MARK: str(folder)}
    environ = {**os.environ, **own}
    return programs.start(text, "torchrl", file=folder / "script.py", cwd=folder, environ=environ)


def wait_for_script(program: programs.Program, folder: Path, timeout_s: float = 150.0) -> tuple[int, str, str]:
    """Wait for a script, and assert that it leaves no process."""
    done = program.wait(timeout_s)
    left = wait_for_marked_processes(str(folder))
    for process in left:
        process.kill()
    assert not left
    return done.returncode, done.stdout, done.stderr


def test_script_without_guard_runs_its_classes_and_ids_in_workers_and_exits_cleanly(tmp_path: Path) -> None:
    code, out, err = wait_for_script(start_script(tmp_path, OWN + USES), tmp_path)
    assert (code, err) == (0, "")
    assert [float(line.split()[0]) for line in out.splitlines()] == PRINTED
    assert [float(line.split()[1]) for line in out.splitlines()] == [2 * size for size in PRINTED]


STEPS = f"""{OWN}
env = ParallelEnv(2, Own)
env.reset()
open("running", "w").close()
while True: env.rollout(10)
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_or_killed_scripts_leave_no_process(signal_: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C goes to the process group, as in a terminal, and SIGKILL to the script alone."""
    program = start_script(tmp_path, STEPS)
    end = time.monotonic() + 120
    while not (tmp_path / "running").exists():
        assert time.monotonic() < end, "the script did not start"
        time.sleep(0.05)
    (os.killpg if signal_ == signal.SIGINT else os.kill)(program.pid, signal_)
    code, _, err = wait_for_script(program, tmp_path)
    assert code == (1 if signal_ == signal.SIGINT else -signal_)
    if signal_ == signal.SIGINT:
        assert err.count("Traceback") == 1
        assert err.splitlines()[-1] == "KeyboardInterrupt"


# -- tests with private names missing in TorchRL: one warning for each class, and the same results

# torchrl_ext looks names up in the text of TorchRL's modules, in which this renames one.
RENAMING = """
import json, pathlib, re, sys, warnings
import gymnasium, torch
from torchrl.envs import GymWrapper

name, read_unchanged_text = sys.argv[1], pathlib.Path.read_text

def read_text(self, *args):
    return re.sub(rf"\\b{name}\\b", f"{name}_of_later", read_unchanged_text(self, *args))

def rollout(cls):
    env = cls(gymnasium.make("CartPole-v1"))
    env.set_seed(3)
    torch.manual_seed(0)
    return env.rollout(40, break_when_any_done=False)["next", "observation"].tolist()

for module in [module for module in sys.modules if module.partition(".")[0] == "torchrl_ext"]:
    del sys.modules[module]
pathlib.Path.read_text = read_text
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchrl_ext
texts = [str(warning.message) for warning in caught if "rl-ext" in str(warning.message)]
print(json.dumps([texts, rollout(torchrl_ext.GymWrapper), rollout(GymWrapper), torchrl_ext.SliceSampler.__module__]))
"""


@pytest.mark.parametrize("name", ["_step_mdp", "_make_specs", "_get_stop_and_length", "unknown"])
def test_missing_private_name_costs_only_speed(name: str, tmp_path: Path) -> None:
    done = programs.run(RENAMING, "torchrl", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts, ours, theirs, sampler = json.loads(done.stdout.splitlines()[-1])
    assert len(texts) == len(set(texts)) == (name != "unknown")
    assert all(f"has no {name}: torchrl_ext." in text and "Install a version of rl-ext" in text for text in texts)
    assert ours == theirs
    assert sampler.startswith("torchrl." if name == "_get_stop_and_length" else "torchrl_ext.")

"""Tests with private names missing in TorchRL: one warning for each class, and the same results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import programs

# torchrl_ext looks names up in the code of TorchRL's modules, in which this renames one.
SCRIPT = """
import importlib.machinery, json, re, sys, warnings
import gymnasium, torch
from torchrl.envs import GymWrapper

loader, name = importlib.machinery.SourceFileLoader, sys.argv[1]
get_unchanged_code = loader.get_code

def get_code(self, module):
    source = self.get_data(self.get_filename(module)).decode()
    if name not in source or not module.startswith(("torchrl.", "tensordict.")):
        return get_unchanged_code(self, module)
    renamed = re.sub(rf"\\b{name}\\b", f"{name}_of_later", source)
    return compile(renamed, self.get_filename(module), "exec", dont_inherit=True)

def rollout(cls):
    env = cls(gymnasium.make("CartPole-v1"))
    env.set_seed(3)
    torch.manual_seed(0)
    return env.rollout(40, break_when_any_done=False)["next", "observation"].tolist()

for module in [module for module in sys.modules if module.partition(".")[0] == "torchrl_ext"]:
    del sys.modules[module]
loader.get_code = get_code
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchrl_ext
texts = [str(warning.message) for warning in caught if "rl-ext" in str(warning.message)]
print(json.dumps([texts, rollout(torchrl_ext.GymWrapper), rollout(GymWrapper), torchrl_ext.SliceSampler.__module__]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_step_mdp", "_make_specs", "_get_stop_and_length", "unknown"])
def test_missing_private_name_costs_only_speed(name: str, tmp_path: Path) -> None:
    done = programs.run(SCRIPT, "torchrl", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts, ours, theirs, sampler = json.loads(done.stdout.splitlines()[-1])
    assert len(texts) == len(set(texts)) == (name != "unknown")
    assert all(f"has no {name}: torchrl_ext." in text and "Install a version of rl-ext" in text for text in texts)
    assert ours == theirs
    assert sampler.startswith("torchrl." if name == "_get_stop_and_length" else "torchrl_ext.")

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from itertools import accumulate
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parent.parent
OF_READER = re.compile(r"(make_)?my_\w+|MyEnv")  # objects of the reader's program, see docs/quickstart.md


def read_blocks(page: Path) -> list[str]:
    return [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if read_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_define_their_names_or_blocks_above_do(page: Path) -> None:
    for code in accumulate(read_blocks(page)):
        compile(code, str(page), "exec")
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
        undefined = {re.findall(r"`(\w+)`", error["message"])[0] for error in json.loads(done.stdout)}
        assert not [name for name in undefined if not OF_READER.fullmatch(name)]
        for module, names in re.findall(
            r"^from ((?:rl_ext_core|sb3_ext|torchrl_ext)[\w.]*) import ([\w, ]+)", code, re.M
        ):
            imported = importlib.import_module(module)
            assert not [name for name in names.split() if not hasattr(imported, name.strip(","))]


# Objects of the reader, and short trainings.
PRELUDE = """
import functools
import gymnasium
import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from tests.environments import RandomEnv
from tests.sb3_ext.tensor_envs import Points

pixels = gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8)
Images, Dicts = functools.partial(RandomEnv, pixels), functools.partial(RandomEnv, gymnasium.spaces.Dict(camera=pixels))

def make_my_env():
    return gymnasium.make("CartPole-v1")

setup_learn = BaseAlgorithm._setup_learn
BaseAlgorithm._setup_learn = lambda self, steps, *args, **kwargs: setup_learn(self, min(steps, 64), *args, **kwargs)
my_isaac_lab_env, my_env, MyEnv = Points(), make_my_env(), make_my_env
"""
DATASET = """
import os
from stable_baselines3 import SAC
from sb3_ext import CompressedReplayBuffer
os.environ["MINARI_DATASETS_PATH"] = os.getcwd()
"""
RECORDED = f"""{DATASET}
model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=CompressedReplayBuffer, buffer_size=500)
model.learn(64)
model.replay_buffer.to_dataset("pendulum/mine-v0")
"""
PIXELS = """
from tensordict import TensorDict
pixels = torch.zeros(300, 4, 84, 84, dtype=torch.uint8)
my_data = TensorDict({"pixels": pixels, "next": {"pixels": pixels.clone()}, "episode": torch.zeros(300)}, [300])
"""
# What the reader of a page has besides.
OF_PAGE = {
    "README": "my_env = Dicts()",
    "datasets": DATASET,
    "frame_storage": PIXELS,
    "index": "my_env = Images()",
    "recipes": RECORDED,
    "rendering_gpu": "my_env = Dicts()",
    "resume": "make_my_env = Images",
}
# Numbers of the blocks that do not run here. Other tests run such programs.
ELSEWHERE = {
    "README": {3: "Melting Pot"},
    "gym_wrapper": {0: "JAX"},
    "migrate": {1: "programs before and after", 2: "another package", 6: "programs before and after", 7: "supersuit"},
    "ray": {0: "a cluster", 1: "a cluster"},
    "quickstart": {5: "a new process"},
    "recipes": {**dict.fromkeys(range(4), "check_other_tools.sh"), 4: "sb3-contrib", 6: "too long", 7: "sbx"},
    "resume": {1: "TorchRL's losses", 2: "a recording", 3: "files of a killed run", 4: "files of a killed run"},
    "single_instance": {1: "an environment without methods"},
    "torchrl_parallel": {0: "overrides of the reader's environment", 1: "processes need a main guard"},
    "troubleshooting": {0: "images", 2: "dicts", 3: "Melting Pot", 9: "files of a killed run"},
    "vectorized_gpu": {0: "Isaac Lab", 1: "JAX", 2: "Brax", 3: "Brax", 4: "ManiSkill"},
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    left_out = ELSEWHERE.get(page.stem, {})
    blocks = [code for number, code in enumerate(read_blocks(page)) if number not in left_out]
    code = "\n".join([PRELUDE, OF_PAGE.get(page.stem, ""), *blocks])
    file = tmp_path / "page.py"
    file.write_text(code)
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # for SB3's logs
    done = programs.run(code, "sb3", file=file, cwd=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]

"""Classes, functions and globals of the user's own main module: they travel, and nothing of them is changed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.factory.main_script import DEFINED, USED, in_pools
from tests.ways import run_as

ASYNC = in_pools("", "[gym.vector.AsyncVectorEnv]", "envs.reset(seed=0)[0].tolist()")


@pytest.mark.sample(ci=2)
@pytest.mark.parametrize("way", ["-c", "notebook", "script", "stdin"])
def test_they_travel_and_stay_as_they_are(way: str, tmp_path: Path) -> None:
    assert "as expected" in run_as(way, DEFINED + USED + ASYNC, tmp_path)


# What is packed twice, sent back, or loaded where it was loaded before.
ROUNDS = """
import gc
import cloudpickle
from multiprocessing import get_context
from rl_ext_core.factory import as_factory
from running import run

made = []

def counted():
    made.append(1)
    if len(made) > 1:
        raise RuntimeError("only one in a process")
    return Env()

class Single(Env):
    count = 0
    def __init__(self):
        super().__init__()
        type(self).count += 1
        if type(self).count > 1:
            raise RuntimeError("only one in a process")

def twice(packed):
    answers = []
    for one in packed:
        gc.collect()
        try:
            cloudpickle.loads(one)()
            answers.append("made")
        except RuntimeError as error:
            answers.append(str(error))
    return answers

def grown(packed):
    env = cloudpickle.loads(packed)()
    other = cloudpickle.loads(packed)()
    type(env).gravity = 7.0
    again = as_factory(env, verify=False)()
    is_one = type(env) is type(other) is type(again) and env.step.__globals__ is again.step.__globals__
    return is_one, other.gravity, again.gravity

if __name__ == "__main__":
    with get_context("fork").Pool(1) as fork, get_context("spawn").Pool(1) as spawn:
        for pool in (fork, spawn):
            call = lambda function, *args: pool.apply(run, (cloudpickle.dumps(function), args))
            for source in (counted, Single):
                packed = [cloudpickle.dumps(factory) for factory in as_factory(source).for_workers(2)]
                print(call(twice, packed))
            print(call(grown, cloudpickle.dumps(as_factory(Env(), verify=False))))
"""


def test_a_process_that_loads_twice_has_one_module(tmp_path: Path) -> None:
    (tmp_path / "running.py").write_text(
        "import cloudpickle\ndef run(function, args):\n    return cloudpickle.loads(function)(*args)\n"
    )
    said = run_as("script", DEFINED + ROUNDS, tmp_path).splitlines()
    one = ["made", "only one in a process"]
    assert said == [repr(one), repr(one), "(True, 7.0, 7.0)"] * 2

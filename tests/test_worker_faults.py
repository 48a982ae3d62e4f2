"""Any fault of an environment in a worker raises one WorkerError with cause and place, and leaves no process.

One table of faults, for each class that steps environments in workers.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from torchrl.envs import RewardSum, TransformedEnv

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import SharedMemoryVecEnv
from tests.sb3_ext.vec_checks import expect_error
from tests.sb3_ext.vec_test_envs import Counting, Failing
from torchrl_ext import GymWrapper, ParallelEnv

ACTIONS = np.zeros(3, np.int64)

IN_TORCHRL = "ParallelEnv, TorchRL's environments"
# Names of occasions and methods in errors.
PLACES = {"constructor": "its constructor", "reset in step": "reset", "method": "method"}

# Kind and text of the error for each fault.
FAULTS = {
    "raise": ("exception", "raised ValueError('the rope has snapped')"),
    "raise what does not pickle": ("exception", "raised UnpicklableError('a lock')"),
    "raise what does not unpickle": ("exception", "raised NeedsArgumentsError('one and two')"),
    "SIGSEGV": ("signal", "was killed by SIGSEGV"),
    "SIGKILL": ("signal", "was killed by SIGKILL"),
    "SIGABRT": ("signal", "was killed by SIGABRT"),
    "os._exit": ("exit", "ended with exit code 0"),
    "sys.exit": ("exit", "exited by SystemExit('enough')"),
    "hang": ("timeout", "did not answer within"),
    "hang in C": ("timeout", "did not answer within"),
}
PHASES = {name: name for name in ("constructor", "reset", "step", "close")}


class Surface(NamedTuple):
    """Class that steps environments in workers.

    :ivar make: function that starts environments from a list of functions
    :ivar run: function that seeds the environments with 40, and uses them until any fault has occurred
    :ivar label: what errors call an environment
    :ivar phases: phase of the error for each occasion of a fault
    """

    make: Callable[..., Any]
    run: Callable[[Any], object]
    label: str
    phases: dict[str, str]


def run_vec_env(venv: SharedMemoryVecEnv) -> None:
    venv.seed(40)
    venv.reset()
    for _ in range(12):
        venv.step(ACTIONS)
    venv.env_method("method")


def run_vector_env(envs: SharedMemoryVectorEnv) -> None:
    envs.reset(seed=40)
    for _ in range(12):
        envs.step(ACTIONS)
    envs.call("method")


def run_parallel_env(env: ParallelEnv) -> None:
    env.rollout(12, break_when_any_done=False)
    env.method()


def make_parallel_env(env_fns: Any, *, method: Any = None, **options: Any) -> ParallelEnv:
    return ParallelEnv(3, env_fns, seed=40, mp_start_method=method, **options)


def make_vec_env(env_fns: Any, *, method: Any = None, **options: Any) -> SharedMemoryVecEnv:
    return SharedMemoryVecEnv(env_fns, method, **options)


def make_vector_env(env_fns: Any, *, method: Any = None, **options: Any) -> SharedMemoryVectorEnv:
    return SharedMemoryVectorEnv(env_fns, context=method, autoreset_mode="SameStep", **options)


class InTorchRL:
    """Function that builds an environment which workers step by TorchRL, because of its transform."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> TransformedEnv:
        return TransformedEnv(GymWrapper(self.build()), RewardSum())


SURFACES = {
    "VecEnv": Surface(
        make_vec_env, run_vec_env, "environment", {**PHASES, "reset in step": "reset", "method": "env_method"}
    ),
    "VectorEnv": Surface(
        make_vector_env, run_vector_env, "environment", {**PHASES, "reset in step": "reset", "method": "call"}
    ),
    "ParallelEnv": Surface(make_parallel_env, run_parallel_env, "worker", {**PHASES, "method": "call"}),
    IN_TORCHRL: Surface(  # a seed resets them
        lambda env_fns, **options: make_parallel_env(list(map(InTorchRL, env_fns)), **options),
        run_parallel_env,
        "worker",
        {**PHASES, "reset": "apply", "method": "call"},
    ),
}


def cases() -> Iterator[Any]:
    """Yield the faults that each surface reports: those that its calls do not raise as they are."""
    for name, surface in SURFACES.items():
        for when in surface.phases:
            for how, (kind, _) in FAULTS.items():
                # Closing waits for hanging environments, and expects workers to exit. VecEnv and VectorEnv raise an
                # exception of a method as it is, and their environments stay usable.
                is_other = when == "close" and (kind == "timeout" or how == "os._exit")
                is_raised = when == "method" and "Vec" in name and kind == "exception"
                if not (is_other or is_raised):
                    yield name, when, how


def close(env: Any) -> None:
    """Close environments, which may be closed."""
    env.close(**({"raise_if_closed": False} if isinstance(env, ParallelEnv) else {}))


@pytest.mark.sample(quick=10, ci=40)
@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize(("name", "when", "how"), list(cases()))
def test_faults_reach_the_caller(name: str, when: str, how: str, method: str) -> None:
    surface, (kind, said) = SURFACES[name], FAULTS[how]
    env_fns = [Counting, functools.partial(Failing, when, how), Counting]
    limits = {"start_timeout": 10.0} if when == "constructor" else {"step_timeout": 2.0}
    with expect_error() as caught:
        env = surface.make(env_fns, method=method, **(limits if kind == "timeout" else {}))
        try:
            surface.run(env)
        finally:
            close(env)
            close(env)
    error, seed = caught.value, caught.value.seed
    assert (error.worker, error.kind, error.phase) == (1, kind, surface.phases[when])
    assert error.notes["environment"] == 1
    if surface.label == "environment":
        assert seed == (None if when == "constructor" else 41)
    named = "" if seed is None else f" (seed {seed})"
    where = "seed_if_possible" if surface.phases[when] == "apply" else PLACES.get(when, when)
    assert str(error).startswith(f"{surface.label} 1 of 3{named}, in {where}: {said}")
    if kind == "exception" or how in ("SIGSEGV", "SIGABRT", "sys.exit"):
        assert "vec_test_envs.py" in error.traceback
        assert "in fail" in error.traceback
        assert error.traceback.splitlines()[-1] in str(error)
    if kind == "timeout":
        parts = "does not even react to signals", "in fail", "in hang_in_c"
        assert any(part in str(error) for part in parts)
    assert (repr(error.__cause__) == "ValueError('the rope has snapped')") == (how == "raise")
    assert (error.exitcode == -signal.SIGSEGV) == (how == "SIGSEGV")


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize(
    ("name", "then"),
    [("VecEnv", "step"), ("VectorEnv", "step"), ("ParallelEnv", "close"), (IN_TORCHRL, "step"), (IN_TORCHRL, "close")],
)
def test_worker_killed_between_calls_is_reported_at_the_next_call(name: str, then: str) -> None:
    surface = SURFACES[name]
    env = surface.make([Counting] * 3, method="fork")
    surface.run(env)
    call = {"VecEnv": lambda: env.env_method("pid"), "VectorEnv": lambda: env.call("pid")}.get(name, lambda: env.pid())
    os.kill(list(call())[2], signal.SIGKILL)
    with expect_error() as caught:
        close(env) if then == "close" else surface.run(env)
    assert str(caught.value).startswith(f"{surface.label} 2 of 3")
    assert "between two calls: was killed by SIGKILL" in str(caught.value)
    if then == "step" and surface.label == "environment":  # other environments start new workers
        with pytest.raises(WorkerError, match="environment 2 of 3"):
            env.reset()
    close(env)

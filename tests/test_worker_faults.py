"""Any fault of an environment in a worker raises one WorkerError with cause and place, and leaves no process.

One table of faults, for each class that steps environments in workers.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import process, util
from typing import Any

import numpy as np
import pytest
import torch

from rl_ext_core.errors import WorkerError
from rl_ext_core.vector import SharedMemoryVectorEnv
from sb3_ext import SharedMemoryVecEnv
from tests.environments import Counting, Failing
from tests.forks import result_in_fork
from tests.sb3_ext.vec_checks import expect_error, no_workers

IN_TORCHRL = "ParallelEnv, TorchRL's environments"
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
COMMON = {"constructor": "constructor", "reset": "reset", "step": "step", "close": "close"}
# Phase of the error for each occasion of a fault, by class.
PHASES = {
    "VecEnv": {**COMMON, "reset in step": "reset", "method": "env_method"},
    "VectorEnv": {**COMMON, "reset in step": "reset", "method": "call"},
    "ParallelEnv": {**COMMON, "method": "call"},
    IN_TORCHRL: {**COMMON, "reset": "apply", "method": "call"},  # the seed resets them
}
PLACES = {"constructor": "its constructor", "reset in step": "reset"}


class InTorchRL:
    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> Any:
        from torchrl.envs import RewardSum, TransformedEnv

        from torchrl_ext import GymWrapper

        return TransformedEnv(GymWrapper(self.build()), RewardSum())


def make(name: str, env_fns: list[Any], method: str, **options: Any) -> Any:
    if name == "VecEnv":
        return SharedMemoryVecEnv(env_fns, method, **options)
    if name == "VectorEnv":
        return SharedMemoryVectorEnv(env_fns, context=method, autoreset_mode="SameStep", **options)
    pytest.importorskip("torchrl")
    from torchrl_ext import ParallelEnv

    env_fns = [InTorchRL(env_fn) for env_fn in env_fns] if name == IN_TORCHRL else env_fns
    return ParallelEnv(len(env_fns), env_fns, seed=40, mp_start_method=method, **options)


def is_parallel_env(env: Any) -> bool:
    return isinstance(env, torch.nn.Module)


def use(env: Any) -> None:
    """Seed the environments with 40, reset and step them, and call a method, so that any fault occurs."""
    if is_parallel_env(env):
        env.rollout(12, break_when_any_done=False)
        env.method()
        return
    is_vec_env = isinstance(env, SharedMemoryVecEnv)
    env.reset(**({} if is_vec_env and env.seed(40) else {"seed": 40}))
    for _ in range(12):
        env.step(np.zeros(3, np.int64))
    (env.env_method if is_vec_env else env.call)("method")


def close(env: Any) -> None:
    env.close(**({"raise_if_closed": False} if is_parallel_env(env) else {}))


def cases() -> Iterator[Any]:
    for name, phases in PHASES.items():
        for when in phases:
            for how, (kind, _) in FAULTS.items():
                # Closing waits for hanging environments, and expects workers to exit. VecEnv and VectorEnv raise an
                # exception of a method as it is, and their environments stay usable.
                is_no_failure = when == "close" and (kind == "timeout" or how == "os._exit")
                is_raised = when == "method" and kind == "exception" and "Parallel" not in name
                if not (is_no_failure or is_raised):
                    yield name, when, how


@pytest.mark.sample(quick=5, ci=24)
@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize(("name", "when", "how"), list(cases()))
def test_faults_reach_the_caller(name: str, when: str, how: str, method: str) -> None:
    phase, (kind, said), label = PHASES[name][when], FAULTS[how], "worker" if "Parallel" in name else "environment"
    limits = {"start_timeout": 10.0} if when == "constructor" else {"step_timeout": 2.0}
    with expect_error() as caught:
        env_fns = [Counting, functools.partial(Failing, when, how), Counting]
        env = make(name, env_fns, method, **(limits if kind == "timeout" else {}))
        try:
            use(env)
        finally:
            close(env)
            close(env)
    error, text = caught.value, str(caught.value)
    assert (error.worker, error.notes["environment"], error.kind, error.phase) == (1, 1, kind, phase)
    assert label == "worker" or error.seed == (None if when == "constructor" else 41)
    seed = "" if error.seed is None else f" (seed {error.seed})"
    where = "seed_if_possible" if phase == "apply" else PLACES.get(when, when)
    assert text.startswith(f"{label} 1 of 3{seed}, in {where}: {said}")
    if kind == "timeout":
        assert any(part in text for part in ("does not even react to signals", "in fail", "in hang_in_c"))
    elif how not in ("SIGKILL", "os._exit"):
        assert "environments.py" in error.traceback
        assert "in fail" in error.traceback
        assert error.traceback.splitlines()[-1] in text
    assert (repr(error.__cause__) == "ValueError('the rope has snapped')") == (how == "raise")
    assert (error.exitcode == -signal.SIGSEGV) == (how == "SIGSEGV")


@pytest.mark.sample(ci=3)
@pytest.mark.parametrize(
    ("name", "then"),
    [("VecEnv", "use"), ("VectorEnv", "use"), ("ParallelEnv", "close"), (IN_TORCHRL, "use"), (IN_TORCHRL, "close")],
)
def test_worker_killed_between_calls_is_reported_at_the_next_call(name: str, then: str) -> None:
    env = make(name, [Counting] * 3, "fork")
    use(env)
    pids = {"VecEnv": lambda: env.env_method("pid"), "VectorEnv": lambda: env.call("pid")}.get(name, lambda: env.pid())
    os.kill(list(pids())[2], signal.SIGKILL)
    with expect_error() as caught:
        close(env) if then == "close" else use(env)
    assert "2 of 3" in str(caught.value)
    assert "between two calls: was killed by SIGKILL" in str(caught.value)
    if "Parallel" not in name:  # others start new workers
        with pytest.raises(WorkerError, match="environment 2 of 3"):
            env.reset()
    close(env)


# -- a forked process cannot use the workers that it inherited, nor end them


def calls_of(env: Any) -> list[Callable[[], Any]]:
    if is_parallel_env(env):
        data = env.rand_action(env.reset())
        steps = [lambda: env.step(data.clone()), lambda: env.step_and_maybe_reset(data.clone())]
        return [env.reset, *steps, lambda: env.set_seed(3), lambda: env.depth()]
    own = [lambda: env.env_is_wrapped(Counting)] if isinstance(env, SharedMemoryVecEnv) else [env.render]
    return [env.reset, lambda: env.step(np.zeros(3, np.int64)), lambda: env.get_attr("_count"), *own]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", PHASES)
def test_forked_process_cannot_use_or_end_the_workers(name: str) -> None:
    others = set(process._children)  # such as the process in which other tests build copies
    env = make(name, [Counting] * 3, "fork", step_timeout=60.0)
    use(env)
    for call in calls_of(env):
        text = result_in_fork(call)
        assert text.startswith("InvalidArgumentError: these environments belong to process "), text
    assert not getattr(env._pool, "_pool", env._pool)._awaits_answers()  # the forks have sent no command

    def close_and_exit() -> str:
        close(env)
        process._children.difference_update(others)
        if isinstance(env, SharedMemoryVecEnv):  # a fork may use its own environments
            own = make(name, [Counting] * 3, "fork")
            use(own)
            own.close()
            vars(env).clear()  # as if the last reference was dropped
        gc.collect()
        util._exit_function()
        return "left"

    assert result_in_fork(close_and_exit) == "'left'"
    use(env)
    close(env)
    assert no_workers()

"""Test that steps of a torch environment on a GPU do not synchronize with it.

The test runs on the CPU. It records operations and methods whose results need synchronization on a GPU, such as
numbers, positions of true entries, and copies to the CPU.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torchrl_ext.environments import Isaac
from torchrl_ext import GymWrapper

SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
SYNCHRONIZING += ("cpu", "numpy", "tolist")


class OperationRecorder(TorchDispatchMode):
    """Torch mode that records the wrapper's operations, without the environment's."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False
        self._step, env.step = env.step, self._step_unrecorded

    def _step_unrecorded(self, action: Any) -> Any:
        """Step the environment without recording its operations."""
        self._inside = True
        try:
            return self._step(action)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class MethodRecorder(TorchFunctionMode):
    """Torch mode that records method calls, including those that run no operation."""

    def __init__(self, operations: OperationRecorder) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.operations._inside:
            self.operations.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def operations_of_steps(*, finds_done_rows: bool, final_obs: bool, missing: str = "nan") -> list[str]:
    """Return the names of all operations of a wrapper's steps and partial resets."""
    env = Isaac(6, final_obs=final_obs)
    watch = OperationRecorder(env)
    wrapper = GymWrapper(env, missing_final_obs=missing)
    tensordict = wrapper.reset()
    wrapper.__dict__["_engine"]._finds_done_rows = finds_done_rows
    done = 0
    actions = wrapper.action_spec.zero()
    with watch, MethodRecorder(watch):
        for _ in range(12):
            tensordict.set("action", actions)
            step, tensordict = wrapper.step_and_maybe_reset(tensordict)
            done += step["next", "done"].sum()
    assert done > 0, "no episode ended in these steps"
    return [name for name in watch.names if name in SYNCHRONIZING]


def test_gpu_step_does_not_synchronize() -> None:
    for final_obs, missing in ((True, "nan"), (False, "nan"), (False, "previous")):
        assert operations_of_steps(finds_done_rows=False, final_obs=final_obs, missing=missing) == []
    assert operations_of_steps(finds_done_rows=True, final_obs=True)  # the check can fail

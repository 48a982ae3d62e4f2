"""``BoundFactory``: pickling, and the decision in workers and in the process that created the factory."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path

import pytest

from rl_ext_core.devices import BoundFactory, Decision, resolve
from rl_ext_core.errors import InvalidTypeError
from tests.core.devices.machines import machine
from tests.core.devices.run_code import run

DECISION = resolve("cuda:2", render="same", renderer="gymnasium", inventory=machine(order=(3, 2, 1, 0)), environ={})
NOTHING = Decision("cpu", "the CPU was asked for")


def raise_key_error() -> None:
    """Raise a KeyError instead of creating an environment."""
    raise KeyError("the environment's own")


def test_lambdas_and_closures_can_be_bound_and_pickled() -> None:
    value = 5
    for factory in (NOTHING.bind(lambda: value + 1), NOTHING.bind(partial(int, "6"))):
        assert isinstance(factory, BoundFactory)
        assert pickle.loads(pickle.dumps(factory))() == factory() == 6


def test_pickled_factory_has_its_decision() -> None:
    factory = pickle.loads(pickle.dumps(DECISION.bind(raise_key_error)))
    assert factory.decision == DECISION
    assert repr(factory) == "BoundFactory(cuda:2, render=gpu)"


@pytest.mark.parametrize("env_fn", [None, "CartPole-v1", 3])
def test_bind_rejects_uncallable_objects(env_fn: object) -> None:
    with pytest.raises(InvalidTypeError, match=r"is not callable.*Use bind\(lambda: make_env\(\)\)") as caught:
        NOTHING.bind(env_fn)  # type: ignore[arg-type]
    assert repr(env_fn) in str(caught.value)


def test_bind_rejects_functions_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidTypeError, match="cannot be pickled for a worker process: cannot pickle") as caught:
        NOTHING.bind(lambda: lock)
    assert isinstance(caught.value.__cause__, TypeError)


def test_errors_of_the_environment_are_not_wrapped() -> None:
    with pytest.raises(KeyError, match="the environment's own"):
        NOTHING.bind(raise_key_error)()


# GPU 2 is EGL device 1, and GPU 3 is EGL device 0.
TWO = """
inventory = machine(order=[3, 2, 1, 0])
one, other = (
    resolve(f"cuda:{n}", render="same", renderer="gymnasium", inventory=inventory, environ={}) for n in (2, 3)
)
"""
FIRST = ["egl", "1", "egl"]


def test_creating_process_keeps_first_decision_and_warns_once(tmp_path: Path) -> None:
    packed = tmp_path / "factory"
    ended = run(
        TWO,
        f"""
        import dataclasses, pickle, subprocess, sys
        answer = [one.bind(variables)()]  # it applies its decision, because none was applied
        answer.append(dataclasses.replace(one, reason="").bind(variables)())  # the same variables for another reason
        os.environ["MUJOCO_EGL_DEVICE_ID"] = "7"
        answer += [one.bind(variables)(), resolve("cpu").bind(variables)()]
        sys.stderr.write("OTHERS\\n")
        answer += [other.bind(variables)() for _ in range(2)]
        # In another process, the factory's own decision applies, although the parent had another one.
        open({str(packed)!r}, "wb").write(pickle.dumps(other.bind(lambda: dict(os.environ))))
        code = "import pickle; print(pickle.load(open({str(packed)!r}, 'rb'))()['MUJOCO_EGL_DEVICE_ID'])"
        answer.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
        """,
    )
    assert ended.answer == [FIRST] * 6 + ["0"]
    before, after = ended.stderr.split("OTHERS\n")
    assert before == ""
    assert after.count("under the decision that was applied here") == 1
    assert "cuda:3 was asked for" in after


def test_worker_rejects_a_second_decision() -> None:
    other = resolve("cuda:0", render="same", renderer="gymnasium", inventory=machine(order=(3, 2, 1, 0)), environ={})
    packed = [pickle.dumps(decision.bind(dict)) for decision in (DECISION, other)]
    ended = run(
        "import pickle",
        f"""
        first, second = (pickle.loads(packed) for packed in {packed!r})
        first()
        try:
            second()
        except Exception as error:
            first()
            answer = [type(error).__name__, str(error)]
        """,
    )
    assert ended.answer[0] == "DeviceConflictError"
    assert "Use one worker for each device" in ended.answer[1]

"""What is asked about is what runs: several at once, several functions, infos, masks, setters, options, races."""

from __future__ import annotations

import functools
import os
import struct
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from rl_ext_core.errors import InvalidArgumentError
from rl_ext_core.factory import as_factory
from rl_ext_core.isolation import Isolation, probe, trials
from rl_ext_core.isolation.experiments import RACE
from tests.core.isolation import simulator
from tests.core.isolation.conftest import Variant
from tests.load import busy
from tests.ways import run_as

INDEPENDENT, SINGLE, SHARED = Isolation.INDEPENDENT, Isolation.SINGLE_INSTANCE, Isolation.SHARED_STATE


class FailsAtReset(simulator.Plain):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("no world")


def fails_at_reset() -> FailsAtReset:
    return FailsAtReset()


class Slots(simulator.Plain):
    """Three places in the library; the fourth instance gets the place of the first one."""

    places: ClassVar[list[float]] = [0.0] * 3
    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self._place = len(self.made) % 3
        self.made.append(self._place)

    def noise(self) -> float:
        self.places[self._place] += 1
        return self.places[self._place]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.places[self._place] = 0
        return super().reset(seed=seed)


class AtMostThree(simulator.Plain):
    alive: ClassVar[list[int]] = []

    def __init__(self) -> None:
        if len(self.alive) == 3:
            raise RuntimeError("there are three already")
        super().__init__()
        self.alive.append(1)

    def close(self) -> None:
        self.alive.pop()


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize(("kind", "isolation"), [(Slots, SHARED), (AtMostThree, SINGLE)])
def test_as_many_are_tried_as_will_share_a_process(kind: Any, isolation: Isolation) -> None:
    assert probe([kind] * 4, cache=False).isolation is isolation
    few = probe([kind] * 3, cache=False)
    assert few.isolation is INDEPENDENT
    assert "Up to 3 in one process" in few.explanation
    assert "more than 3 at once" in few.explanation


@pytest.mark.slow
def test_more_than_eight_are_not_tried_and_that_is_said() -> None:
    assert "Not tried: more than 8 at once" in probe([simulator.Plain] * 12, cache=False).explanation


@pytest.mark.slow
def test_each_function_of_a_list_is_asked_about(own_cache: Path) -> None:
    verdict = probe([simulator.Plain, simulator.ClassAttribute, simulator.ClassAttribute])
    assert verdict.isolation is SHARED
    assert probe([simulator.Plain, simulator.ClassAttribute, simulator.ClassAttribute]).declared_by == "cache"
    for build, isolation, text in (
        (simulator.exits, Isolation.UNKNOWN, "could not be tried: building"),
        (fails_at_reset, Isolation.BROKEN, "does not work: resetting"),
    ):
        verdict = probe([simulator.Plain, build], cache=False)
        assert verdict.isolation is isolation
        assert f"Of the functions, number 2 {text}" in verdict.explanation


def test_the_strictest_of_what_several_say_counts() -> None:
    assert probe([simulator.SaysIndependent, simulator.SaysSingle]).isolation is SINGLE
    assert probe([simulator.SaysIndependent, simulator.SaysIndependent]).declared_by == "environment"


class Masked(simulator.Plain):
    """Legal actions lie in a buffer that all share; what is returned is a copy."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how
        if how == "array":
            self.mask = _MASK

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *flags, info = super().step(action)
        _MASK[:] = observation * np.arange(5) % 2 > 1
        _COUNT[0] += 1
        if self._how == "info":
            info = {"count": _COUNT[0]}
        elif self._how == "buffer in info":
            info = {"mask": _MASK}
        return observation, reward, *flags, info  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        if name == "action_masks" and self._how == "method":
            return lambda: _MASK
        raise AttributeError(name)


class MaskedByMethod(Masked):
    def action_masks(self) -> np.ndarray:
        return _MASK


_MASK, _COUNT = np.zeros(5, bool), [0]


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (functools.partial(Masked, "info"), "info"),
        (functools.partial(Masked, "buffer in info"), "info"),
        (functools.partial(Masked, "array"), "mask"),
        (functools.partial(MaskedByMethod, ""), "action_masks()"),
        (lambda: gymnasium.wrappers.TimeLimit(MaskedByMethod(""), 7), "action_masks()"),
    ],
)
def test_infos_masks_and_public_arrays_are_compared(source: Any, text: str) -> None:
    verdict = probe(source, cache=False)
    assert verdict.isolation is SHARED
    assert f"has something else in its {text}" in verdict.explanation


class Tasks(simulator.Plain):
    """The task is a global of the library."""

    metadata: ClassVar[dict[str, Any]] = {"reset_options": [{"gain": 1.0}, {"gain": 3.0}]}
    gain: ClassVar[dict[str, float]] = {"all": 0.0}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options:
            self.gain["all"] = options["gain"]
        return super().reset(seed=seed)

    def noise(self) -> float:
        return self.gain["all"]


class TasksBySetter(Tasks):
    metadata: ClassVar[dict[str, Any]] = {}

    def set_task(self, gain: float) -> None:
        self.gain["all"] = float(gain)

    def choose_map(self, name: str) -> None:
        raise AssertionError("nobody knows the names")


class OwnTask(simulator.Plain):
    task = 0.0

    def set_task(self, gain: float) -> None:
        if gain > 1:
            raise ValueError("there is one task only")
        self.task = gain

    def set_world(self, name: str) -> None:
        raise SystemExit(name)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"since": time.perf_counter(), "steps": 3}  # type: ignore[return-value]

    def noise(self) -> float:
        return self.task


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("kind", [Tasks, TasksBySetter])
def test_tasks_that_all_share_show(kind: Any) -> None:
    assert probe(kind, cache=False).isolation is SHARED


@pytest.mark.slow
def test_tasks_of_their_own_do_no_harm_and_what_was_not_called_or_compared_is_named() -> None:
    verdict = probe(OwnTask, cache=False)
    assert verdict.isolation is INDEPENDENT
    assert "set_world()" in verdict.explanation
    assert "options of reset()" in verdict.explanation
    assert "info['since'] (never twice the same)" in verdict.explanation


class StateInAFile(simulator.Plain):
    """Writes its state to a file and reads it back, all in one step: in turns, nobody sees that."""

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        super().step(action)
        for _ in range(3):
            # In place: a file that is cut off is written to the disk at once, which takes long.
            file = os.open("state.bin", os.O_RDWR | os.O_CREAT)
            os.pwrite(file, struct.pack("d", self._sum), 0)
            (self._sum,) = struct.unpack("d", os.pread(file, 8, 0))
            os.close(file)
        return np.array([self._sum]), 1.0, False, False, {}


class Meets(simulator.Plain):
    """Its first step ends when another process has come to its own."""

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Path(f"here {os.getpid()}").touch()
        until = time.monotonic() + 120
        while len(list(Path().glob("here *"))) < 2:
            assert time.monotonic() < until, "nobody else is here"
            time.sleep(0.001)
        return super().step(action)


@pytest.mark.slow
def test_processes_run_at_the_same_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with trials.TrialRunner([as_factory(Meets)]) as runner:
        assert [run.end for run in runner.run(RACE, 10) if not run.done] == []


@pytest.mark.slow
def test_advice_on_processes_that_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    verdict = probe(StateInAFile, cache=False)
    # Whether they meet is chance, in two processes and, where those had the file first, in one; that they may is not.
    met = (Isolation.PROCESSES_COLLIDE, Isolation.NON_DETERMINISTIC, Isolation.SHARED_STATE)
    assert verdict.isolation in (*met, INDEPENDENT)
    assert verdict.cure is None
    assert 'write make_vec_env(..., cwd="own")' in verdict.explanation
    assert list(tmp_path.iterdir()) == []


# -- the script's own classes

OF_THE_SCRIPT = """
import gymnasium, numpy as np
from rl_ext_core.isolation import probe
class Base(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.random()
        return np.array([self.x]), {}
    def step(self, action):
        self.x += self.height() + int(action)
        return np.array([self.x]), 0.0, False, False, {}
    def height(self): return LEVEL
LEVEL, live, world = 1, [], {"x": 0.0}
class ByGlobal(Base):
    def __init__(self):
        if live: raise RuntimeError("only one instance per process")
        live.append(self)
class ByClass(Base):
    count = 0
    def __init__(self):
        type(self).count += 1
        if type(self).count > 1: raise RuntimeError("only one instance per process")
class World(Base):
    def height(self):
        world["x"] += 1
        return world["x"]
# %%
step, one = Base.step, Base()
for source in (ByGlobal, ByClass, World, Base, lambda: World()):
    print(probe(source, cache=False).isolation.value)
LEVEL = 7
print(Base.step is step, one.height(), ByClass.count, live, world)
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("way", ["notebook", "-c", "stdin", "script"])
def test_classes_and_globals_of_the_script(way: str, tmp_path: Path) -> None:
    assert run_as(way, OF_THE_SCRIPT, tmp_path).split("\n")[:6] == [
        "single-instance",
        "single-instance",
        "shared-state",
        "independent",
        "shared-state",
        "True 7 0 [] {'x': 0.0}",
    ]


# -- time


class SlowReset(simulator.Plain):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(self._seconds)
        return super().reset(seed=seed)


@pytest.mark.exhaustive
def test_a_reset_that_takes_long_makes_the_trial_short(own_cache: Path) -> None:
    verdict = probe([functools.partial(SlowReset, 2.1)] * 2, cache=False)
    assert verdict.isolation is INDEPENDENT
    assert "in 6 steps" in verdict.explanation


@pytest.mark.slow
def test_what_takes_longer_than_is_waited_is_not_called_broken(own_cache: Path) -> None:
    verdict = probe(functools.partial(SlowReset, 1000.0), timeout=3)
    assert verdict.isolation is Isolation.UNKNOWN
    for words in ("resetting it hangs, or takes more than 3 s", "timeout=", "probe_timeout=", 'isolation="process"'):
        assert words in verdict.explanation
    assert not list(own_cache.glob("*"))


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan")])
def test_a_timeout_is_a_time(timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout="):
        probe(simulator.Plain, timeout=timeout)


class SlowConstructor(simulator.Plain):
    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)
        super().__init__()


@pytest.mark.slow
def test_a_slow_constructor_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_LEAST_S", 1.0)
    assert probe([functools.partial(SlowConstructor, 1.2)] * 2, cache=False).isolation is INDEPENDENT


@pytest.mark.slow
def test_a_busy_machine_changes_no_verdict(variant: Variant) -> None:
    with busy():
        assert probe([functools.partial(SlowReset, 0.1)] * 2, cache=False).isolation is INDEPENDENT
        assert probe(variant("SHARED_RANDOM"), cache=False).isolation is SHARED


class LeavesALock(simulator.Plain):
    """Starts only once, until it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)
        self._path.touch(exist_ok=False)

    def close(self) -> None:
        self._path.unlink()


@pytest.mark.exhaustive
def test_trials_close_what_they_have_built(own_cache: Path) -> None:
    path = own_cache / "lock"  # which trials may write to
    path.parent.mkdir(parents=True)
    verdict = probe(functools.partial(LeavesALock, str(path)), cache=False)
    assert verdict.isolation is Isolation.PROCESSES_COLLIDE
    assert list(path.parent.iterdir()) == []


MANY_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
from rl_ext_core.isolation import probe
print(probe("CartPole-v1", cache=False).isolation.value)
"""


@pytest.mark.slow
def test_a_process_with_a_thousand_open_files(tmp_path: Path) -> None:
    assert run_as("script", MANY_FILES, tmp_path) == "independent\n"


@pytest.mark.slow
def test_a_changed_global_of_the_module_is_tried_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    (tmp_path / "has_a_mode.py").write_text(
        "from tests.core.isolation import simulator\nMODE = 'good'\n"
        "class Env(simulator.ClassAttribute):\n"
        "    def noise(self): return super().noise() if MODE == 'bad' else 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import has_a_mode  # type: ignore[import-not-found]

    assert probe(has_a_mode.Env).isolation is INDEPENDENT
    assert probe(has_a_mode.Env).declared_by == "cache"
    has_a_mode.MODE = "bad"
    verdict = probe(has_a_mode.Env)
    assert verdict.isolation is SHARED
    assert "has_a_mode.MODE" in verdict.explanation
    has_a_mode.MODE = "good"
    assert probe(has_a_mode.Env).declared_by == "cache"

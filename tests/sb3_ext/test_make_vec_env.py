from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common import env_util
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rl_ext_core.errors import InvalidArgumentError, InvalidTypeError, IsolationError, WorkerError
from sb3_ext import AutoVecEnv, EnvFactory, SharedMemoryVecEnv, as_factory, make_vec_env
from tests.core.isolation.conftest import Variant, compiled, variant
from tests.core.isolation.simulator import ReadsAFile, SaysIndependent
from tests.environments import EVENT_LOG, Bounded, Counting, Failing, RandomEnv, Slow, build_and_record, cart_pole
from tests.launch_modes import LAUNCH_MODES, run_program
from tests.sb3_ext.test_multi_agent_vec_env import Race
from tests.sb3_ext.vec_checks import FAST, assert_equal, no_workers
from tests.torchrl_ext.environments import BoxInfoWalk, InPlaceInfoWalk

__all__ = ["compiled", "variant"]


def roll_out(venv: VecEnv) -> list[Any]:
    """Step without a new seed, and return the results without times."""
    actions = np.random.default_rng(0).integers(2, size=(60, venv.num_envs))
    found: list[Any] = [venv.reset(), copy.deepcopy(venv.reset_infos)]
    for action in actions:
        observations, rewards, dones, infos = venv.step(action)
        for info in infos:
            info.get("episode", {}).pop("t", None)
        if type(venv) in (SubprocVecEnv, SharedMemoryVecEnv):  # whose rewards have the dtype of the environments
            rewards = rewards.astype(np.float32)
        found.append([observations, rewards, dones, infos, copy.deepcopy(venv.reset_infos)])
    found.append([space.sample() for space in venv.get_attr("action_space")])
    found.append([venv.env_is_wrapped(kind) for kind in (env_util.Monitor, Bounded)])
    venv.close()
    return found


OURS = {
    "in process": {"isolation": "in-process"},
    "processes": {"isolation": "process", "vec_env_kwargs": {"start_method": FAST}},
    "auto": {},
    "two workers": {"vec_env_cls": SharedMemoryVecEnv, "vec_env_kwargs": {"start_method": FAST, "n_workers": 2}},
    "SB3's": {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": FAST}},
}


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "id": ("CartPole-v1", {}),
    "id with arguments": ("CartPole-v1", {"env_kwargs": {"max_episode_steps": 12}}),
    "function": (cart_pole, {"env_kwargs": {"gravity": 30.0}}),
    "wrapper": ("CartPole-v1", {"wrapper_class": Bounded, "wrapper_kwargs": {"bound": 0.5}, "start_index": 3}),
    "wrapped by a lambda": ("CartPole-v1", {"wrapper_class": lambda env: gym.wrappers.TimeLimit(env, 5)}),
    "lambda as argument": (
        "CartPole-v1",
        {"wrapper_class": gym.wrappers.TransformReward, "wrapper_kwargs": {"func": lambda reward: 2 * reward}},
    ),
    "large rewards": (lambda: RandomEnv(actions=gym.spaces.Discrete(2), rewards="large int"), {}),
    "monitor's options": (lambda: Bounded(cart_pole()), {"monitor_kwargs": {"info_keywords": ("bound",)}}),
}


@pytest.mark.sample(quick=5, ci=10)
@pytest.mark.filterwarnings("ignore:.*latest versioned environment:UserWarning")
@pytest.mark.parametrize("how", list(OURS))
@pytest.mark.parametrize("call", list(CALLS))
def test_rollouts_equal_those_of_sb3s_make_vec_env(call: str, how: str) -> None:
    env_id, options = CALLS[call]
    theirs = roll_out(env_util.make_vec_env(env_id, 3, seed=7, **options))
    assert_equal(roll_out(make_vec_env(env_id, 3, seed=7, **options, **OURS[how])), theirs)
    assert any(step[2].any() for step in theirs[2:-2])
    assert call != "id" or any("episode" in info for step in theirs[2:-2] for info in step[3])
    assert no_workers()


@pytest.mark.parametrize("isolation", ["in-process", "process"])
def test_results_do_not_change_if_environments_reuse_their_objects(isolation: Any) -> None:
    def keep_results(venv: VecEnv) -> list[Any]:
        """Return results without copying them, after the environments have written to what they returned."""
        found: list[Any] = [venv.seed(0), venv.reset()]
        found += [venv.step(np.full((2, 1), 0.5, np.float32)) for _ in range(30)]
        venv.close()
        return found

    theirs = keep_results(DummyVecEnv([BoxInfoWalk] * 2))
    assert_equal(keep_results(AutoVecEnv([InPlaceInfoWalk] * 2, isolation)), theirs)
    assert any(step[2].any() for step in theirs[2:])


@pytest.mark.parametrize(("how", "seed"), [("in process", None), pytest.param("auto", 0, marks=pytest.mark.slow)])
def test_numpy_generator_state_equals_that_after_sb3s_make_vec_env(seed: int | None, how: str) -> None:
    def generator_state_after(make: Any, env_id: Any, n_envs: int, **options: Any) -> Any:
        np.random.seed(0)
        make(env_id, n_envs, seed=seed, **options).close()
        return np.random.get_state()

    for n_envs in (1, 3):
        theirs = generator_state_after(env_util.make_vec_env, "CartPole-v1", n_envs)
        for env_id in ("CartPole-v1", cart_pole, cart_pole()) if how != "auto" else (cart_pole,):
            ours = generator_state_after(make_vec_env, env_id, n_envs, **OURS[how])
            assert_equal(ours, theirs, f"{n_envs} of {env_id}")


def test_arguments_extend_those_of_sb3s_make_vec_env() -> None:
    theirs = inspect.signature(env_util.make_vec_env).parameters
    ours = inspect.signature(make_vec_env).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [parameter.default for parameter in theirs.values()]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])


@pytest.mark.parametrize("how", ["in process", "processes"])
def test_monitor_files_equal_those_of_sb3(how: str, tmp_path: Path) -> None:
    found = {}
    for name, make, options in (("theirs", env_util.make_vec_env, {}), ("ours", make_vec_env, OURS[how])):
        folder = tmp_path / name
        roll_out(make("CartPole-v1", 2, seed=3, start_index=5, monitor_dir=str(folder), **options))
        assert sorted(path.name for path in folder.iterdir()) == ["5.monitor.csv", "6.monitor.csv"]
        texts = [path.read_text().splitlines() for path in sorted(folder.iterdir())]
        assert all(re.fullmatch(r'#\{"t_start": .*, "env_id": "CartPole-v1"\}', text[0]) for text in texts)
        found[name] = [[line.split(",")[:2] for line in text[1:]] for text in texts]
    assert found["ours"] == found["theirs"]
    assert all(len(lines) > 2 for lines in found["ours"])


def test_instances_and_factories_are_copied() -> None:
    env = cart_pole()
    env.unwrapped.gravity = 25.0  # type: ignore[attr-defined]
    theirs = roll_out(env_util.make_vec_env(lambda: cart_pole(25.0), 2, seed=1))
    for source in (env, as_factory(env)):
        assert isinstance(source, gym.Env | EnvFactory)
        assert_equal(roll_out(make_vec_env(source, 2, seed=1, isolation="in-process")), theirs)
        assert_equal(roll_out(make_vec_env(source, 2, seed=1, isolation="process")), theirs)


def test_seeds_make_all_streams_reproducible() -> None:
    def draws(seed: int | None) -> list[Any]:
        venv = make_vec_env(RandomEnv, 2, seed=seed, **OURS["processes"])
        venv.reset()
        found = venv.env_method("draws")
        venv.close()
        return found

    once, again, other, none = draws(4), draws(np.int64(4)), draws(5), draws(None)  # type: ignore[arg-type]
    assert once == again
    for name in ("random", "numpy", "torch", "libc", "own"):
        values = [tuple(found[name]) for found in (*once, *other, *none)]
        # SB3 gives environment 1 of seed 4 the seed of environment 0 of seed 5.
        assert len(set(values)) == (5 if name == "own" else 6), name


# -- isolation


def process_ids(venv: VecEnv) -> list[int]:
    if isinstance(venv, DummyVecEnv):
        return [os.getpid()] * venv.num_envs
    assert isinstance(venv, SharedMemoryVecEnv)
    return [worker.process.pid for worker in venv._pool.worker_by_env]


def test_dependent_environments_get_own_processes(variant: Variant, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "built"  # trials may write to the cache
    folder.mkdir(parents=True)
    venv = make_vec_env(functools.partial(build_and_record, variant("SHARED_GLOBALS"), str(folder)), 3, seed=0)
    assert len(set(process_ids(venv))) == 3
    assert not list(folder.glob(f"{os.getpid()}-*")), "it was built in this process"
    assert "So each of the 3 has its own process." in venv.isolation_report  # type: ignore[attr-defined]
    venv.reset()
    for _ in range(5):
        venv.step(np.zeros((3, 1)))
    venv.close()
    assert no_workers()


@pytest.mark.slow
def test_replaced_worker_continues_monitor_file(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    options = {"monitor_dir": str(folder), "isolation": "process", "vec_env_kwargs": {"restart": "truncate"}}
    build = functools.partial(Failing, "step", "SIGKILL", after=50)
    for _ in range(2):  # the second run overwrites the file
        venv = make_vec_env(build, 1, **options)  # type: ignore[arg-type]
        venv.reset()
        infos = [venv.step(np.zeros(1, np.int64))[3][0] for _ in range(130)]
        ends = [info["episode"] for info in infos if "episode" in info]
        venv.close()
        assert len(ends) == 12
        rows = (folder / "0.monitor.csv").read_text().splitlines()[2:]
        assert rows == [f"{end['r']},{end['l']},{end['t']}" for end in ends]
        assert [end["t"] for end in ends] == sorted(end["t"] for end in ends)


@pytest.mark.sample
@pytest.mark.parametrize("how", ["copies", "AutoVecEnv", "two workers"])
def test_own_working_directories_are_kept_and_reported(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(EVENT_LOG, "log.txt")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "log.txt").write_text("0 copied\n")
    monkeypatch.setattr("sb3_ext.auto_vec_env.probe", None)
    venv: Any
    if how == "AutoVecEnv":
        venv = AutoVecEnv([Counting] * 3, cwd="own", start_method=FAST)
    else:
        options = {"start_method": FAST, **({"n_workers": 2} if how == "two workers" else {})}
        cwd = "assets" if how == "copies" else "own"
        venv = make_vec_env(Counting, 3, cwd=cwd, monitor_dir="monitors", vec_env_kwargs=options)
        assert len(list((tmp_path / "monitors").iterdir())) == 3
    assert venv.working_directory in venv.isolation_report
    count = len(set(process_ids(venv)))
    assert count == (2 if how == "two workers" else 3)
    venv.reset()
    venv.close()
    logs = sorted(Path(venv.working_directory).glob("*/log.txt"))
    assert [log.parent.name for log in logs] == [str(number) for number in range(count)]
    events = Counter(line.split()[1] for log in logs for line in log.read_text().splitlines())
    expected = dict.fromkeys(("built", "reset", "closed"), 3)
    assert events == {**expected, **({"copied": 3} if how == "copies" else {})}
    assert (tmp_path / "assets" / "log.txt").read_text() == "0 copied\n"
    assert not (tmp_path / "log.txt").exists()
    shutil.rmtree(venv.working_directory)


class Batch(Counting):
    """Environment that says that it steps several environments at once."""

    num_envs = 4


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"env_id": lambda: 3}, InvalidTypeError, r"builtins\.int"),
        ({"env_id": lambda: Race()}, InvalidTypeError, r"hand over a parallel environment itself"),
        ({"cwd": "mine"}, InvalidArgumentError, "cwd='mine' is not a folder"),
        (
            {"cwd": "own", "vec_env_cls": DummyVecEnv, "isolation": "auto"},
            *(InvalidArgumentError, "cwd='own' is not supported"),
        ),
        ({"isolation": "thread"}, InvalidArgumentError, "isolation='thread'"),
        ({"recorder": 7}, InvalidArgumentError, "recorder=7 is not a folder"),
        (
            {"recorder": False, "vec_env_cls": DummyVecEnv, "isolation": "auto"},
            *(InvalidArgumentError, "recorder=False is not supported with vec_env_cls"),
        ),
        ({"env_id": Counting(), "env_kwargs": {"a": 1}}, InvalidArgumentError, "env_kwargs"),
        ({"env_kwargs": {"nonsense": 1}}, (WorkerError, TypeError, IsolationError), "nonsense"),
        ({"n_envs": 0}, InvalidArgumentError, "num_workers=0|n_envs=0"),
        ({"seed": "a"}, InvalidTypeError, "seed='a' must be a whole number"),
        ({"seed": -1}, InvalidArgumentError, "seed=-1 must be at least 0"),
        ({"vec_env_kwargs": {"timeout": 9}}, InvalidTypeError, r"unknown options \['timeout'\].*'step_timeout'"),
        ({"env_id": Batch}, InvalidTypeError, r"steps 4 environments at once.*GymVecEnv\(env\)"),
        (
            {"env_id": Race(), "isolation": "auto", "vec_env_kwargs": {"n_workers": 2}},
            *(InvalidArgumentError, "vec_env_kwargs=.* is for single environments"),
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        make_vec_env(**{"env_id": Counting, "n_envs": 2, **OURS["in process"], **arguments})
    assert no_workers()


@pytest.mark.parametrize(
    ("make", "noun"),
    [
        (lambda: SharedMemoryVecEnv([Counting] * 3, FAST), "environment"),
        (lambda: make_vec_env(gym.vector.SyncVectorEnv([Counting] * 3)), "environment"),
        (lambda: make_vec_env(Race(), 1), "agent"),
    ],
    ids=["SharedMemoryVecEnv", "GymVecEnv", "MultiAgentVecEnv"],
)
def test_calls_in_the_wrong_order_are_refused(make: Any, noun: str) -> None:
    def refuse(said: str, call: Any, *arguments: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=said):
            call(*arguments)

    venv, actions = make(), np.zeros(3, np.int64)
    venv.reset()
    refuse("no step is pending", venv.step_wait)
    refuse(f"number of actions: 2, expected 3, one for each {noun}", venv.step, actions[:2])
    for count in (2, 4):
        refuse(f"number of options: {count}, expected 3, one for each {noun}", venv.set_options, [{"level": 1}] * count)
    venv.step_async(actions)
    venv.reset()  # discards the step
    refuse("no step is pending", venv.step_wait)
    venv.close()
    venv.close()
    for call, *arguments in ((venv.reset,), (venv.step, actions), (venv.step_wait,), (venv.get_attr, "metadata")):
        refuse(r"is closed\. Make a new one", call, *arguments)


def test_environments_in_this_process_are_built_by_functions_of_caller() -> None:
    made: list[int] = []

    def make() -> Counting:
        made.append(len(made))
        return Counting()

    make_vec_env(make, 3, isolation="in-process").close()
    AutoVecEnv([make] * 3, "in-process").close()
    assert made == [0, 1, 2, 3, 4, 5]


class GlobalCounter(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that adds the number of steps of all instances to observations."""

    steps: ClassVar[list[float]] = [0.0]

    def step(self, action: Any) -> Any:
        self.steps[0] += 1
        observation, *rest = self.env.step(action)
        return observation + np.float32(self.steps[0]), *rest


@pytest.mark.slow
def test_wrappers_and_each_different_function_are_probed(variant: Variant) -> None:
    venv: Any = make_vec_env("CartPole-v1", 2, wrapper_class=GlobalCounter)
    assert isinstance(venv, SharedMemoryVecEnv)
    venv.close()
    venv = AutoVecEnv([variant("GOOD"), *[variant("SHARED_GLOBALS")] * 2])
    assert len(set(process_ids(venv))) == 3
    venv.close()
    venv = AutoVecEnv([functools.partial(cart_pole, gravity) for gravity in (1.0, 2.0, 3.0)])
    assert isinstance(venv, DummyVecEnv)
    assert venv.get_attr("gravity") == [1.0, 2.0, 3.0]
    venv.close()


def test_errors_for_unknown_ids_derive_from_gymnasiums_and_ours() -> None:
    for env_id, kind in (
        ("NoSuchEnv-v0", gym.error.NameNotFound),
        ("CartPole-v77", gym.error.VersionNotFound),
        ("no_such_module_of_mine:Env-v0", ModuleNotFoundError),
    ):
        with pytest.raises(kind, match=r"NoSuchEnv|CartPole|no_such_module_of_mine") as caught:
            make_vec_env(env_id, 2)
        assert isinstance(caught.value, InvalidArgumentError)


def fail_in_children(pid: int) -> Any:
    """Return an environment in the process ``pid``; raise an error in any other."""
    if os.getpid() != pid:
        raise RuntimeError("the license is taken")
    return Counting()


NOT_SENT = "The environments cannot be sent to another process"


@pytest.mark.parametrize(
    ("build", "env_kwargs", "said"),
    [
        (lambda lock: Counting() if lock else None, {"lock": threading.Lock()}, NOT_SENT),
        (ReadsAFile, {}, r"""directory: 'world\.txt'.*use isolation="process\""""),
        (fail_in_children, {"pid": os.getpid()}, "RuntimeError: the license is taken.*use isolation="),
    ],
)
def test_environments_that_cannot_be_probed_stay_in_this_process_with_one_warning(
    build: Any, env_kwargs: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "world.txt").touch()
    venv = make_vec_env(build, 2, env_kwargs=env_kwargs)
    assert isinstance(venv, DummyVecEnv)
    venv.reset()
    venv.close()
    (record,) = caplog.records
    assert re.search(said, record.getMessage(), re.DOTALL)


# Class, number of environments, arguments, sizes of the processes (None: in this one), and a part of the report.
LAYOUTS: list[Any] = [
    (Counting, 1, {}, None, "only one"),
    (Counting, 2, {"isolation": "in-process"}, None, "All environments run in this process, as requested."),
    (
        *(Counting, 4, {"isolation": "process", "n_workers": 2}, [2, 2]),
        "2 processes share the 4 environments, as requested.",
    ),
    (Counting, 2, {"isolation": "process", "n_workers": 5}, [1, 1], "Each has its own process, as requested."),
    (Counting, 2, {"isolation": "process", "n_workers": 1}, [2], "1 process runs the 2 environments, as requested."),
    pytest.param(
        *(Counting, 3, {"n_workers": 2}, [2, 1], "2 processes share the 3 environments, as requested."),
        marks=pytest.mark.slow,
    ),
    (Counting, 3, {}, None, "So they share this process: a step of 3 takes"),
    pytest.param(Slow, 4, {}, [2, 2], "So 2 processes share them: a step of 4 takes", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "n_envs", "options", "sizes", "said"), LAYOUTS)
def test_layout_is_chosen_and_reported(
    kind: Any, n_envs: int, options: dict[str, Any], sizes: list[int] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_ext_core.resources.usable_cores", lambda: 2)
    if ("as requested" in said and "isolation" in options) or n_envs == 1:
        monkeypatch.setattr("sb3_ext.auto_vec_env.probe", None)
    own = {name: value for name, value in options.items() if name != "n_workers"}
    workers = {"start_method": FAST, "n_workers": options["n_workers"]} if "n_workers" in options else {}
    venv = make_vec_env(kind, n_envs, vec_env_kwargs=workers, **own)
    assert said in venv.isolation_report  # type: ignore[attr-defined]
    pids = process_ids(venv)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == ([n_envs] if sizes is None else sizes)
    assert (os.getpid() in pids) == (sizes is None)
    venv.close()


@pytest.mark.parametrize("n_envs", [1, 2])
def test_options_that_only_processes_can_use_choose_processes(n_envs: int) -> None:
    for option in ({"restart": "truncate"}, {"step_timeout": 60.0}, {"close_timeout": 60}, {"n_workers": 1}):
        (name,) = option
        venv: Any = make_vec_env(SaysIndependent, n_envs, vec_env_kwargs={"start_method": FAST, **option})
        assert os.getpid() not in process_ids(venv)
        if name != "n_workers":
            assert f"because only processes can use {min(name, 'start_method')}=" in venv.isolation_report
        venv.close()
        with pytest.raises(InvalidArgumentError, match=rf'isolation="in-process" does not use \[.{name}'):
            make_vec_env(SaysIndependent, n_envs, isolation="in-process", vec_env_kwargs=option)
    for isolation in ("auto", "in-process"):
        options = {"restart": None, "step_timeout": None, "recorder": False}
        assert isinstance(
            make_vec_env(SaysIndependent, n_envs, isolation=isolation, vec_env_kwargs=options), DummyVecEnv
        )


OF_THE_SCRIPT = """
import gymnasium, numpy as np
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}
    def step(self, action):
        seen.append(int(action))
        return np.full(1, LEVEL + int(action), np.float32), 0.0, False, False, {}
class Single(Env):
    count = 0
    def __init__(self):
        type(self).count += 1
        if type(self).count > 1: raise RuntimeError("only one instance per process")
LEVEL, seen, world = 1, [], [0]
class World(Env):
    def step(self, action):
        world[0] += 1
        return np.full(1, world[0], np.float32), 0.0, False, False, {}
# %%
from sb3_ext import AutoVecEnv, make_vec_env
step = Env.step
for make in (lambda kind: make_vec_env(kind, 2), lambda kind: AutoVecEnv([lambda: kind(), lambda: kind()])):
    venv = make(Env)
    LEVEL = 3
    venv.reset()
    print(type(venv).__name__, venv.step([1, 0])[0].tolist(), seen, Env.step is step)
    venv.close()
    LEVEL, seen = 1, []
    venv = make(Single)
    venv.reset()
    print(type(venv).__name__, venv.step(np.array([1, 0]))[0].tolist(), seen, Single.count)
    venv.close()
    venv = make(World)
    venv.reset()
    print(type(venv).__name__, venv.step(np.array([1, 0]))[0].tolist(), world)
    venv.close()
"""


@pytest.mark.sample(quick=0, ci=1)
@pytest.mark.parametrize("launch_mode", LAUNCH_MODES)
def test_classes_and_globals_of_main_script_work_in_every_launch_mode(launch_mode: str, tmp_path: Path) -> None:
    here, apart = "InProcessVecEnv [[4.0], [3.0]] [1, 0] True\n", "SharedMemoryVecEnv [[2.0], [1.0]] [] 0\n"
    shared = "SharedMemoryVecEnv [[1.0], [1.0]] [0]\n"
    assert run_program(launch_mode, OF_THE_SCRIPT, tmp_path, preloaded="sb3") == 2 * (here + apart + shared)

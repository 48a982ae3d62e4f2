"""Saves of a training run, and resuming from them as if the run had not been stopped.

Each environment is restored by repeating the actions of its current episode, see :mod:`rl_ext_core.recording`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import pickle
import re
import shutil
import threading
import types
import uuid
import warnings
import weakref
import zlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EventCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import is_json_serializable
from stable_baselines3.common.utils import check_for_correct_spaces, get_device
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from rl_ext_core import _system
from rl_ext_core.errors import CorruptFileError, InvalidArgumentError, InvalidTypeError, StorageError
from rl_ext_core.frames.log_folder import copy_folder, restore_folder
from rl_ext_core.recording import EpisodeLog, EpisodeRecorder, Repetition
from rl_ext_core.recording.generators import global_states, restore_global_states
from rl_ext_core.recording.layers import (
    LayerState,
    describe_layers,
    layer_state,
    layer_states,
    record_construction,
    record_layer,
    restore_layer,
    restore_layers,
    unsaved_attributes,
)
from rl_ext_core.resources import NO_SPACE, check_folder, check_path, write_problem
from rl_ext_core.vector.environments import CALLS, check_count
from rl_ext_core.vector.pool import Pool
from sb3_ext.replay_buffers import CompressedReplayBuffer
from sb3_ext.vec_env import PoolVecEnv

__all__ = ["ResumeCallback", "resume"]

_FORMAT = "sb3_ext save 6"
_MARKER, _MODEL, _BUFFER, _STATE = "save.json", "model.zip", "replay_buffer.pkl", "state.pkl"
_STORAGE = "storage"  # copy of storage_dir
_LOCK = "lock"
_SAVE_NAME, _UNFINISHED_NAME = re.compile(r"save-(\d+)"), re.compile(r"\.unfinished-save-\d+(-old)?")
_N_SAVES = 2
_SDE_ATTRIBUTES = ("exploration_mat", "exploration_matrices")
# Attributes of a logger with the values that it has not written yet.
_LOGGED = ("name_to_value", "name_to_count", "name_to_excluded")
# Attributes of callbacks and wrappers of a VecEnv that are not their state.
_LINKS = ("locals", "globals", "logger", "class_attributes", "_marks")

# Names of the runs, by which a folder with saves of another run is refused.
_runs: weakref.WeakKeyDictionary[BaseAlgorithm, str] = weakref.WeakKeyDictionary()
# State that the first rollout of a resumed model restores.
_pending: weakref.WeakKeyDictionary[BaseAlgorithm, dict[str, Any]] = weakref.WeakKeyDictionary()


class ResumeCallback(BaseCallback):
    """Callback that saves a training run, so that :func:`resume` can continue it exactly.

    A save contains the model, its replay buffer, all random generators, and the state of wrappers and callbacks.
    It also contains the actions of each environment's current episode, which :func:`resume` repeats. A process that is
    killed leaves its previous save. The last two saves are kept.

    The environments must be in a ``DummyVecEnv`` or a :class:`SharedMemoryVecEnv`.

    :param folder: folder of the saves, one per run
    :param every: number of timesteps between saves

    >>> import tempfile
    >>> from stable_baselines3 import PPO
    >>> from sb3_ext import ResumeCallback, resume
    >>> folder = tempfile.mkdtemp()
    >>> model = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1)
    >>> model = model.learn(96, callback=ResumeCallback(folder, every=32))
    >>> model = resume(folder, model.get_env())
    >>> model.num_timesteps
    64
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 50_000) -> None:
        super().__init__()
        check_path("folder", folder)
        self.folder = pathlib.Path(folder)
        self.every = check_count("every", every)
        self._warned = False

    def _init_callback(self) -> None:
        """Check the model and the folder, and record the environments."""
        model = self.model
        if not isinstance(model, (OnPolicyAlgorithm, OffPolicyAlgorithm)):
            raise InvalidTypeError(
                f"ResumeCallback does not support {type(model).__name__}, which draws random numbers before a rollout "
                "starts: expected an on-policy or off-policy algorithm. Use CheckpointCallback"
            )
        if getattr(model, "uses_tensors", False):
            raise InvalidTypeError(
                f"ResumeCallback does not save the tensors of sb3_ext.tensor.{type(model).__name__}: expected an "
                f"algorithm on arrays. Use from stable_baselines3 import {type(model).__name__}, or use "
                "CheckpointCallback"
            )
        if self.parent is not None:
            raise InvalidArgumentError(
                f"ResumeCallback is inside {type(self.parent).__name__}, which does not report the start of rollouts, "
                "so it would never save: expected a callback of learn(). Use callback=[ResumeCallback(folder, "
                f"every={self.every}), ...]"
            )
        for found in (type(model), model.policy_class):
            if "<locals>" in found.__qualname__:
                raise InvalidTypeError(
                    f"{found.__qualname__} is defined inside a function, where resume() cannot find it: expected a "
                    "class at the top level of a module or script. Move it there"
                )
        self.folder = self.folder.absolute()  # callbacks and environments may change the working directory
        check_folder("folder", self.folder)
        _check_storage(model)
        saves = _saves(self.folder)
        run = _runs.setdefault(model, uuid.uuid4().hex)
        state = _pending.get(model)
        is_resumed = state is not None and state["num_timesteps"] == model.num_timesteps
        is_earlier = saves and not is_resumed and model.num_timesteps < _timesteps_of(saves[-1])
        if saves and (_read_marker(saves[-1]).get("run") != run or is_earlier):
            raise InvalidArgumentError(
                f"folder={str(self.folder)!r} contains saves of another run, the last one at "
                f"{_timesteps_of(saves[-1])} timesteps, and this run is at {model.num_timesteps}. Continue it with "
                f"sb3_ext.resume({str(self.folder)!r}, env) and learn(..., reset_num_timesteps=False), or use a new "
                "folder"
            )
        _recorded_environments(self.training_env, was_reset=model.num_timesteps == 0)
        _lock_folder(self)
        self._next_save = (model.num_timesteps // self.every + 1) * self.every

    def _on_training_start(self) -> None:
        for callback in self._callbacks(before=True):
            for name in ("_on_training_start", "_on_rollout_start"):
                if getattr(type(callback), name) not in (getattr(BaseCallback, name), getattr(EventCallback, name)):
                    raise InvalidArgumentError(
                        f"{type(callback).__name__} comes before ResumeCallback, so a resumed run would call its "
                        f"{name} twice: expected ResumeCallback first. Use callback=[ResumeCallback(...), ...]"
                    )
        for callback in self._callbacks():
            record_layer(callback, _links_of(callback, self.model))

    def _on_rollout_start(self) -> None:
        model = self.model
        state = _pending.pop(model, None)
        if state is not None:
            _restore_generators(model, state)
            _restore_callbacks(self._callbacks(), state["callbacks"], model)
            for name, values in state["logged"].items():
                getattr(self.logger, name).update(values)
            if model._total_timesteps != (total := state["total_timesteps"]):
                warnings.warn(
                    f"learn() ends at {model._total_timesteps} timesteps, but the saved run at {total}, so schedules "
                    f"differ: use model.learn({total} - model.num_timesteps, reset_num_timesteps=False, ...)",
                    stacklevel=2,
                )
        if model.num_timesteps >= self._next_save:
            self._next_save = (model.num_timesteps // self.every + 1) * self.every
            callbacks = self._callbacks()
            state = _state_of_run(model, callbacks)
            if not self._warned:
                _warn_of_unsaved_attributes(callbacks, state)
                self._warned = True
            _write_save(self.folder, model, state)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        _unlock_folder(self.folder)

    def _callbacks(self, *, before: bool = False) -> list[BaseCallback]:
        """Return all callbacks of this training, except this class and lists, or only those before this one."""
        found = list(_flatten(self.locals.get("callback")))
        found = found[: found.index(self)] if before else found
        return [each for each in found if not isinstance(each, (ResumeCallback, CallbackList))]


def resume(
    folder: str | os.PathLike[str],
    env: VecEnv | gymnasium.Env[Any, Any],
    *,
    device: th.device | str = "auto",
    custom_objects: dict[str, Any] | None = None,
) -> Any:
    """Return the model of the last save, to continue the run as if it had not been stopped.

    Pass a :class:`ResumeCallback` to the next ``learn()``, at the same position among the callbacks. Saves contain
    pickles, which can execute code: open only your own.

    :param folder: folder of a :class:`ResumeCallback`
    :param env: environment that was built like that of the run, and not used since
    :param device: device of the model
    :param custom_objects: replacements of saved attributes, see SB3's ``load()``
    :return: the model, with its replay buffer, on ``env``
    :raises CorruptFileError: If the folder contains no complete save.
    :raises InvalidArgumentError: If ``env`` differs from the environment of the run: its number of environments, their
        wrappers, or the id, arguments or time limit of ``gymnasium.make``. ``render_mode`` and absolute paths may
        differ. Files of ``storage_dir`` are unchanged then.
    """
    check_path("folder", folder)
    save = _newest_complete_save(pathlib.Path(folder))
    with (save / _STATE).open("rb") as file:
        state = _RunUnpickler(file).load()
    custom_objects = custom_objects or {}
    if state["storage"] is not None and "replay_buffer_kwargs" in custom_objects:
        raise InvalidArgumentError(
            f"the replay buffer is not in storage_dir={state['storage']['folder']!r}, as in the saved run. Leave "
            "replay_buffer_kwargs out of custom_objects"
        )
    custom_objects = {**state["objects"], **custom_objects}
    _check_number_of_envs(env, len(state["environments"]))
    vec_env = state["class"]._wrap_env(env, verbose=0)  # as load() does
    load_line = f"{state['class'].__name__}.load({str(save / _MODEL)!r}, env=env)"
    wrappers = " of ".join(type(layer).__name__ for layer in _layers(vec_env))
    _check_description("env has the wrappers", wrappers, state["layers"], load_line)
    environments = _recorded_environments(vec_env)
    for index, layers in enumerate(state["environments"]):
        (description,) = environments.call([index], "apply", (describe_layers,))
        _check_description(f"environment {index} is", description, layers, load_line)
    device = get_device(device)
    if state["storage"] is not None:
        # Before files are replaced, because their newer transitions are lost then
        check_for_correct_spaces(vec_env, custom_objects["observation_space"], custom_objects["action_space"])
        restore_folder(save / _STORAGE, pathlib.Path(state["storage"]["folder"]))
    model = state["class"].load(
        save / _MODEL, env=vec_env, device=device, custom_objects=custom_objects, force_reset=False
    )
    if isinstance(model, OffPolicyAlgorithm):
        if state["storage"] is None:
            model.load_replay_buffer(save / _BUFFER, truncate_last_traj=False)
        else:
            vars(model.replay_buffer).update(state["storage"]["attributes"])
            # Opening the folder has ended the running episodes of hindsight.
            model.replay_buffer._allocate_arrays()  # type: ignore[union-attr]
    for present, tensor in zip(_lstm_states(model), state["lstm_states"], strict=True):
        present.copy_(tensor)
    if state["shares_action_space"]:  # from which environments of a DummyVecEnv may draw, too
        model.action_space = vec_env.action_space
    problems = _repeat_episodes(environments, state["logs"])
    model.action_space._np_random = state["action_generator"]
    vec_env.unwrapped._reset_seeds()
    vec_env.unwrapped._reset_options()
    for layer, saved in zip(_layers(vec_env), state["layers"], strict=True):
        for sentence in restore_layer(layer, saved, _links_of(layer, vec_env)):
            warnings.warn(f"Wrapper: {sentence}.", stacklevel=2)
    for index, layers in enumerate(state["environments"]):
        (sentences,) = environments.call([index], "apply", (restore_layers, layers))
        for sentence in sentences:
            warnings.warn(f"Environment {index}: {sentence}.", stacklevel=2)
    for problem in problems:
        warnings.warn(f"{problem}, so all environments start new episodes.", stacklevel=2)
    if problems:
        _truncate_episodes(model)
    _restore_generators(model, state)
    _runs[model] = _read_marker(save)["run"]
    _pending[model] = state
    return model


# Locks of the folders to which this process saves: the thread of the training, and the function that unlocks.
_locks: dict[pathlib.Path, tuple[threading.Thread, weakref.finalize[..., Any]]] = {}


def _lock_folder(callback: ResumeCallback) -> None:
    """Lock the folder of the saves until the training ends, or the callback is deleted.

    A training that an exception has ended in this thread gives up its lock.
    """
    folder = callback.folder.resolve()
    if folder in _locks and (_locks[folder][0] is threading.current_thread() or not _locks[folder][0].is_alive()):
        _unlock_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _system.open_exclusive(folder / _LOCK)
    except BlockingIOError:
        owner = f"process {(folder / _LOCK).read_text()[:32]}"
        owner = "another thread of this process" if folder in _locks else owner
        raise StorageError(
            f"folder={str(callback.folder)!r} is in use by {owner}, which saves its training there. Wait until it "
            f"ends, or use another folder: ResumeCallback({str(callback.folder) + '-2'!r})"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot lock {folder / _LOCK}: {error}. Use a folder on a local disk") from error
    os.ftruncate(descriptor, 0)
    _system.write_at(descriptor, str(os.getpid()).encode(), 0)
    _locks[folder] = threading.current_thread(), weakref.finalize(callback, _close_lock, folder, descriptor)


def _unlock_folder(folder: pathlib.Path) -> None:
    if (lock := _locks.get(folder.resolve())) is not None:
        lock[1]()


def _close_lock(folder: pathlib.Path, descriptor: int) -> None:
    del _locks[folder]
    with contextlib.suppress(OSError):
        _system.remove_file(folder / _LOCK)
    os.close(descriptor)


def _forget_locks_in_child() -> None:
    """Close the locks in a forked process, which would hold them after its parent's end."""
    while _locks:
        if (finalizer := _locks.popitem()[1][1].detach()) is not None:
            os.close(finalizer[2][1])


_system.after_fork(_forget_locks_in_child)


class _EnvironmentsHere:
    """Environments of a ``DummyVecEnv``, with the methods by which a pool records those in workers.

    A recorder is added to each environment that has none.

    :param was_reset: whether the environments were reset, and not stepped since
    """

    def __init__(self, vec_env: DummyVecEnv, *, was_reset: bool) -> None:
        self._vec_env, self._envs = vec_env, vec_env.envs
        for index, env in enumerate(vec_env.envs):
            if isinstance(env, EpisodeRecorder):
                continue
            vec_env.envs[index] = recorder = EpisodeRecorder(env)
            if was_reset:
                recorder.assume_seeded_reset()

    def episode_logs(self) -> list[EpisodeLog | None]:
        """Return the log of each environment's episode; None where there is none."""
        return [env.episode_log() for env in self._envs]  # type: ignore[attr-defined]

    def repeat_episode(self, index: int, log: EpisodeLog) -> Repetition:
        """Repeat the episode of an environment."""
        repetition: Repetition = self._envs[index].repeat(log)  # type: ignore[attr-defined]
        self._vec_env._save_obs(index, repetition.observation)
        return repetition

    def call(self, environments: Sequence[int], name: str, data: Any) -> list[Any]:
        """Make the same call for some environments, and return the results."""
        return [CALLS[name](self._envs[index], data) for index in environments]


def _recorded_environments(vec_env: VecEnv, *, was_reset: bool = False) -> _EnvironmentsHere | Pool:
    """Return the recorded environments inside a VecEnv and its wrappers; raise an error if it cannot record them."""
    base = vec_env.unwrapped
    if isinstance(base, PoolVecEnv) and base._pool.log_memory is not None:
        return base._pool
    if isinstance(base, PoolVecEnv):
        raise InvalidArgumentError(
            f"{type(base).__name__} does not record its episodes: expected recorder=True. Use "
            "SharedMemoryVecEnv(env_fns, recorder=True)"
        )
    if isinstance(base, DummyVecEnv):
        return _EnvironmentsHere(base, was_reset=was_reset)
    raise InvalidTypeError(
        f"ResumeCallback cannot record the environments of {type(base).__name__}: expected a DummyVecEnv or a "
        "SharedMemoryVecEnv. Use sb3_ext.make_vec_env(env_id, n_envs=4), or SharedMemoryVecEnv(env_fns)"
    )


class _RunPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that stores classes and functions of the script by name, and the layout of arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__" and "<" not in obj.__qualname__:
            return obj.__qualname__
        if type(obj) is np.ndarray and not obj.dtype.hasobject and obj.size and min(obj.strides, default=0) > 0:
            contiguous = obj.copy(order="C")
            if obj.strides != contiguous.strides:
                return _copy_with_strides, (contiguous, obj.strides)
        return super().reducer_override(obj)


def _copy_with_strides(saved: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """Return a copy of an array with the layout of the original, on which the order of later sums depends."""
    n_bytes = sum((size - 1) * step for size, step in zip(saved.shape, strides, strict=True)) + saved.itemsize
    found: np.ndarray = np.ndarray(saved.shape, saved.dtype, np.zeros(n_bytes, np.uint8), strides=strides)
    found[...] = saved
    return found


class _RunUnpickler(pickle.Unpickler):
    """Unpickler that reports missing classes and modules."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except ImportError as error:
            problem = f"cannot be imported ({error})"
            line = f'import new_name, sys; sys.modules["{module}"] = new_name'
        except AttributeError:
            problem, line = "has no such name now", f"import {module}; {module}.{name} = {module}.NewName"
        raise InvalidArgumentError(
            f"the saved run uses {name} of the module {module!r}, which {problem}. Define or import it before "
            f"resume(...), or, if it was renamed, write {line}"
        )


def _check_number_of_envs(env: Any, expected: int) -> None:
    """Raise an error if ``env`` is not an environment, or has another number of them than the saved run."""
    if not isinstance(env, (VecEnv, gymnasium.Env)):
        raise InvalidTypeError(
            f"env is of type {type(env).__name__}: expected an environment that was built like that of the run. Use "
            "sb3_ext.resume(folder, make_vec_env(env_id, n_envs=4))"
        )
    found = getattr(env, "num_envs", 1)
    if found != expected:
        raise InvalidArgumentError(
            f"env has {found} environments: expected {expected}, as in the saved run. Use n_envs={expected}"
        )


def _check_description(name: str, found: str, layers: list[LayerState], load_line: str) -> None:
    """Raise an error if the wrappers of an environment or VecEnv differ from those of the saved run."""
    expected = " of ".join(layer.description for layer in layers)
    if found != expected:
        raise InvalidArgumentError(
            f"{name} {found or 'nothing'}: expected {expected or 'nothing'}, as in the saved run. Build it like that "
            f"of the run, or continue with new episodes: {load_line}"
        )


def _objects_of(model: Any) -> dict[str, Any]:
    """Return the attributes of a model that SB3 pickles."""
    states, variables = model._get_torch_save_params()
    left_out = {*model._excluded_save_params(), *(name.split(".")[0] for name in states + variables)}
    return {
        name: value for name, value in vars(model).items() if name not in left_out and not is_json_serializable(value)
    }


def _repeat_episodes(environments: Any, logs: list[EpisodeLog | None]) -> list[str]:
    """Repeat the episode of each environment; return clauses on those that are not the same."""
    problems = []
    for index, log in enumerate(logs):
        if log is None or log.is_interrupted:
            problems.append(f"Environment {index} has no record of its episode")
            continue
        try:
            if environments.repeat_episode(index, log).first_difference is not None:
                problems.append(f"Environment {index} is not deterministic, or its episode depends on earlier ones")
        except Exception as error:  # the environment's code may raise anything
            problems.append(f"Environment {index} raised {error!r} when its episode was repeated")
    return problems


def _layers(vec_env: Any) -> list[Any]:
    """Return the wrappers of a VecEnv, outermost first."""
    found = []
    while isinstance(vec_env, VecEnvWrapper):
        found.append(vec_env)
        vec_env = vec_env.venv
    return found


def _links_of(owner: Any, model_or_env: Any) -> list[Any]:
    """Return the objects that are not part of a callback or wrapper: the model, environments, other callbacks."""
    vec_env: Any = model_or_env.get_env() if isinstance(model_or_env, BaseAlgorithm) else model_or_env
    types = (gymnasium.Env, VecEnv, BaseAlgorithm, BaseCallback)
    envs = getattr(vec_env.unwrapped, "envs", None)
    found = [model_or_env, *_layers(vec_env), vec_env.unwrapped, *(envs if isinstance(envs, list) else ())]
    return [*found, *(value for name, value in vars(owner).items() if name in _LINKS or isinstance(value, types))]


def _state_of(owner: Any, model_or_env: Any) -> LayerState:
    state = layer_state(owner, _links_of(owner, model_or_env), type(owner).__name__)
    if isinstance(owner, BaseCallback):
        state.values.pop("num_timesteps")  # the model's
    return state


_wrap_env = BaseAlgorithm._wrap_env


@functools.wraps(_wrap_env)
def _wrap_and_record(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
    """Record how environments are before the first reset, after which ResumeCallback gets them."""
    vec_env = _wrap_env(env, verbose, monitor_wrapper)
    for layer in _layers(vec_env):
        record_layer(layer, _links_of(layer, vec_env))
    if isinstance(vec_env.unwrapped, DummyVecEnv):
        for each in vec_env.unwrapped.envs:
            record_construction(each)
    return vec_env


BaseAlgorithm._wrap_env = staticmethod(_wrap_and_record)  # type: ignore[method-assign]


def _warn_of_unsaved_attributes(callbacks: list[BaseCallback], state: dict[str, Any]) -> None:
    """Report attributes of environments and callbacks that are not saved."""
    for index, layers in enumerate(state["environments"]):
        if unsaved := unsaved_attributes(layers):
            warnings.warn(
                f"Environment {index}: these attributes have changed and cannot be saved, so they start again after "
                f"resume(): {', '.join(unsaved)}. Use numbers, arrays, lists, dicts or objects for what must continue",
                stacklevel=4,
            )
            break  # others are usually alike
    packages = ("stable_baselines3", "sb3_contrib", "sb3_ext")
    pairs = zip(callbacks, state["callbacks"], strict=True)
    states = [saved for each, saved in pairs if type(each).__module__.partition(".")[0] not in packages]
    if unsaved := unsaved_attributes(states, opaque=True):
        warnings.warn(
            f"These attributes of callbacks are not saved, and start again after resume(): {', '.join(unsaved)}. Use "
            "numbers, strings, arrays, lists or dicts for what must continue",
            stacklevel=4,
        )


def _truncate_episodes(model: Any) -> None:
    """End the running episodes in the model's data. SB3 resets all environments when training starts."""
    model._last_obs = None
    buffer = getattr(model, "replay_buffer", None)
    if buffer is None or buffer.size() == 0:
        return
    row = (buffer.pos - 1) % buffer.buffer_size
    for index in np.flatnonzero(np.asarray(buffer.dones[row]) == 0):
        if hasattr(buffer, "_compute_episode_length") and buffer.pos != buffer._current_ep_start[index]:
            buffer._compute_episode_length(index)
        buffer.dones[row, index] = 1
        if hasattr(buffer, "timeouts"):
            buffer.timeouts[row, index] = buffer.handle_timeout_termination
    if isinstance(buffer, CompressedReplayBuffer):
        buffer._observations.store.write_newest_data()


def _flatten(callback: Any) -> Iterator[BaseCallback]:
    """Yield a callback and the callbacks inside, in order."""
    if isinstance(callback, BaseCallback):
        yield callback
        for inner in callback.callbacks if isinstance(callback, CallbackList) else ():
            yield from _flatten(inner)
        for name in ("callback", "callback_on_new_best"):
            yield from _flatten(vars(callback).get(name))


def _restore_callbacks(callbacks: list[BaseCallback], states: list[LayerState], model: Any) -> None:
    """Set the attributes of callbacks, matched by class and order."""
    for kind in {type(callback).__name__ for callback in callbacks}:
        found = [callback for callback in callbacks if type(callback).__name__ == kind]
        saved = [state for state in states if state.description == kind]
        if saved and len(found) != len(saved):
            warnings.warn(
                f"learn() got {len(found)} callbacks {kind}, but {len(saved)} in the saved run, so they start again.",
                stacklevel=3,
            )
            continue
        for callback, state in zip(found, saved, strict=False):
            for sentence in restore_layer(callback, state, _links_of(callback, model)):
                warnings.warn(f"Callback: {sentence}.", stacklevel=3)


def _sde_distributions(model: Any) -> list[Any]:
    """Return the distributions that have exploration matrices of gSDE."""
    owners = [model.policy, getattr(model.policy, "actor", None)]
    found = [getattr(owner, "action_dist", None) for owner in owners]
    return [each for each in found if hasattr(each, _SDE_ATTRIBUTES[0])]


def _generator_states(model: Any) -> dict[str, Any]:
    """Return the states of all global generators, and what was drawn for exploration."""
    return {
        "global": global_states(),
        "cuda": th.cuda.get_rng_state_all() if model.device.type == "cuda" else [],
        "sde": [
            {name: getattr(each, name).detach().cpu() for name in _SDE_ATTRIBUTES} for each in _sde_distributions(model)
        ],
        "action_noise": deepcopy(getattr(model, "action_noise", None)),  # the model gets another copy from its pickle
    }


def _restore_generators(model: Any, saved: dict[str, Any]) -> None:
    """Set all global generators, and what was drawn for exploration."""
    states = saved["generators"]
    restore_global_states(None, states["global"])
    if model.device.type == "cuda" and states["cuda"]:
        th.cuda.set_rng_state_all(states["cuda"])
    for distribution, matrices in zip(_sde_distributions(model), states["sde"], strict=False):
        for name, matrix in matrices.items():
            setattr(distribution, name, matrix.to(model.device))
    if states["action_noise"] is not None:
        vars(model.action_noise).update(deepcopy(vars(states["action_noise"])))


def _lstm_states(model: Any) -> list[th.Tensor]:
    """Return the last states of a recurrent policy, which SB3 does not save."""
    return [tensor for pair in getattr(model, "_last_lstm_states", ()) for tensor in pair]


def _state_of_run(model: Any, callbacks: list[BaseCallback]) -> dict[str, Any]:
    """Return the state of a run, except what SB3 saves in files."""
    vec_env = model.get_env()
    environments = _recorded_environments(vec_env)
    return {
        "class": type(model),
        "objects": _objects_of(model),
        "num_timesteps": model.num_timesteps,
        "total_timesteps": model._total_timesteps,
        "lstm_states": [tensor.cpu() for tensor in _lstm_states(model)],
        "action_generator": model.action_space._np_random,
        "shares_action_space": model.action_space is vec_env.action_space,
        "generators": _generator_states(model),
        "callbacks": [_state_of(each, model) for each in callbacks],
        "logged": _logged_values(model.logger),
        "layers": [_state_of(each, vec_env) for each in _layers(vec_env)],
        "environments": environments.call(range(vec_env.num_envs), "apply", (layer_states,)),
        "logs": environments.episode_logs(),
        "storage": _storage_state(model),
    }


def _logged_values(logger: Any) -> dict[str, dict[str, Any]]:
    """Return the numbers and texts that a logger has not written yet, such as losses of the last update."""
    found = {name for name, value in logger.name_to_value.items() if isinstance(value, (int, float, str, np.generic))}
    return {each: {name: value for name, value in getattr(logger, each).items() if name in found} for each in _LOGGED}


def _storage_dir(model: Any) -> Any:
    """Return the folder of the model's replay buffer; None if the buffer is in memory."""
    return (getattr(model, "replay_buffer_kwargs", None) or {}).get("storage_dir")


def _check_storage(model: Any) -> None:
    """Raise an error if opening the folder of the replay buffer again would change later transitions."""
    folder = _storage_dir(model)
    observations = getattr(getattr(model, "replay_buffer", None), "_observations", None)
    used = getattr(observations, "storage_dir", None)
    if used is not None and (folder is None or os.path.realpath(used) != os.path.realpath(folder)):
        # load_replay_buffer has opened another folder, which a saved model would not find.
        raise InvalidArgumentError(
            f"the replay buffer is in {str(used)!r}, expected replay_buffer_kwargs['storage_dir']={folder!r}. Use "
            f"model.replay_buffer_kwargs['storage_dir'] = {str(used)!r} before learn()"
        )
    if folder is None:
        return
    store = model.replay_buffer._observations.store
    if store.lossy or store.max_bytes is not None:
        raise InvalidArgumentError(
            f"ResumeCallback does not support storage_dir={str(folder)!r} together with max_bytes, "
            "max_error or a lossy codec, whose results depend on when the folder was opened. Leave these out of "
            "replay_buffer_kwargs"
        )


def _storage_state(model: Any) -> dict[str, Any] | None:
    """Return what the files of a replay buffer do not contain; None if the buffer is in memory."""
    if _storage_dir(model) is None:
        return None
    attributes = {name: value for name, value in model.replay_buffer._saved_attributes().items() if name != "device"}
    return {"folder": os.fspath(_storage_dir(model)), "attributes": attributes}


def _write_save(folder: pathlib.Path, model: Any, state: dict[str, Any]) -> None:
    """Write a save under a temporary name, rename it, and delete older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _UNFINISHED_NAME.fullmatch(path.name):
            shutil.rmtree(path)
    temporary = folder / f".unfinished-save-{model.num_timesteps}"
    try:
        temporary.mkdir()
        with (temporary / _STATE).open("wb") as file:
            _RunPickler(file).dump(state)
        model.save(temporary / _MODEL)
        if isinstance(model, OffPolicyAlgorithm):
            if (storage_dir := _storage_dir(model)) is None:
                model.save_replay_buffer(temporary / _BUFFER)
            else:
                copy_folder(pathlib.Path(storage_dir), temporary / _STORAGE)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        checksums = {path.relative_to(temporary).as_posix(): _file_checksum(path) for path in files}
        (temporary / _MARKER).write_text(json.dumps({"format": _FORMAT, "run": _runs[model], "files": checksums}))
        for path in temporary.rglob("*"):
            _flush_to_disk(path)
        _flush_to_disk(temporary)
    except OSError as error:  # a full disk, for example
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"folder={str(folder)!r}: the save at {model.num_timesteps} timesteps cannot be written "
            f"({write_problem(folder.absolute(), error)}). Earlier saves are complete. "
            f"{'Free space' if error.errno in NO_SPACE else 'Make the folder writable'}, and continue with "
            "sb3_ext.resume(folder, env)"
        ) from error
    target = folder / f"save-{model.num_timesteps}"
    if _is_save(target):
        _delete_save(target)
    os.replace(temporary, target)
    _flush_to_disk(folder)
    for save in _saves(folder)[:-_N_SAVES]:
        _delete_save(save)


def _delete_save(save: pathlib.Path) -> None:
    """Delete a save. If this process is killed, the rest does not look like a save, and the next save deletes it."""
    rest = save.with_name(f".unfinished-{save.name}-old")
    os.replace(save, rest)
    shutil.rmtree(rest)


def _flush_to_disk(path: pathlib.Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_checksum(path: pathlib.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _is_save(path: pathlib.Path) -> bool:
    return _SAVE_NAME.fullmatch(path.name) is not None and (path / _MARKER).is_file()


def _read_marker(save: pathlib.Path) -> dict[str, Any]:
    """Return the format and run of a save, and the checksums of its files; nothing if the marker is damaged."""
    try:
        return dict(json.loads((save / _MARKER).read_text()))
    except (ValueError, TypeError):
        return {}


def _timesteps_of(save: pathlib.Path) -> int:
    return int(save.name.removeprefix("save-"))


def _saves(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the saves in a folder, oldest first."""
    return sorted(filter(_is_save, folder.iterdir()), key=_timesteps_of) if folder.is_dir() else []


def _newest_complete_save(folder: pathlib.Path) -> pathlib.Path:
    """Return the newest save whose files are not damaged."""
    for save in reversed(_saves(folder)):
        marker = _read_marker(save)
        if marker.get("format", _FORMAT) != _FORMAT:
            raise CorruptFileError(
                f"{str(save)!r} has the format {marker['format']!r}: expected {_FORMAT!r}. Use the version of rl-ext "
                "that wrote it"
            )
        with contextlib.suppress(FileNotFoundError):
            files = marker.get("files")
            if files and all(_file_checksum(save / name) == value for name, value in files.items()):
                return save
        warnings.warn(f"{save} is damaged, so the save before it is used.", stacklevel=3)
    raise CorruptFileError(
        f"folder={str(folder)!r}: expected a complete save of ResumeCallback, found none. Start the run with "
        f"model.learn(..., callback=ResumeCallback({str(folder)!r}))"
    )

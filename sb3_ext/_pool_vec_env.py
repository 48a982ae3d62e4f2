"""Stable Baselines3's side of environments in workers: what it asks of a ``VecEnv``, whatever the workers are."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from rl_ext_core.errors import InvalidArgumentError, WorkerError
from rl_ext_core.vector._worker import CHANGED, DONE, OTHER, TRUNCATED
from rl_ext_core.vector.pool import Pool
from rl_ext_core.vector.ray_pool import RayPool
from sb3_ext._restarts import Restarts
from sb3_ext.timings import Timings

__all__ = ["PoolVecEnv"]

# By the number of the kind, see rl_ext_core.vector._worker.KINDS.
_REWARD_DTYPES = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64), np.dtype(bool)]

Indices = int | Iterable[int] | None


def _is_like(actions: Any, shared: np.ndarray[Any, Any]) -> bool:
    return type(actions) is np.ndarray and actions.dtype == shared.dtype and actions.shape == shared.shape


class PoolVecEnv(VecEnv):
    """A vectorised environment over workers.

    :param pool: of the workers
    :param timings: where steps are counted
    :param restarts: replaces workers; None: the failure of one is the failure of all

    :ivar reward_dtype: of rewards; None: what environments return, as with ``SubprocVecEnv``. ``DummyVecEnv`` gives
        32-bit floats, and so does what is chosen in its place
    """

    reward_dtype: type[np.float32] | None = None

    def __init__(self, pool: Pool | RayPool, timings: Timings, *, restarts: Restarts | None = None) -> None:
        self._pool: Any = pool
        self.closed = self.waiting = False
        self.timings = timings
        arrays, layout = pool.arrays, pool.layout
        # Taken out of the dict once: this is the path of every step.
        self._observations = [arrays[f"observation {index}"] for index in range(len(layout.keys))]
        self._actions = arrays.get("action")
        self._rewards, self._reward_kinds, self._flags = arrays["reward"], arrays["reward kind"], arrays["flags"]
        self._flag_bytes, self._kind_bytes = self._flags.data, self._reward_kinds.data
        self._zeros = bytes(len(pool.of_env))
        self._restarts = restarts
        self._changes_told = False
        try:
            super().__init__(len(pool.of_env), *pool.spaces)
            # What records videos takes the frames per second from it.
            with contextlib.suppress(Exception):  # there is none, or it cannot leave its process
                self.metadata = {**self.get_attr("metadata", 0)[0], **self.metadata}
        except BaseException:
            pool.end()
            raise

    def step_async(self, actions: Any) -> None:
        """Have all environments start a step.

        :param actions: (n_envs, ...)
        """
        if self.closed or self.waiting:
            self._require_idle()
        self._pool.settle()
        self._began = time.perf_counter()
        shared = self._actions
        if shared is not None and _is_like(actions, shared):
            shared[...] = actions
            self._pool.step()
        elif len(actions) != self.num_envs:
            raise InvalidArgumentError(
                f"there are {len(actions)} actions for {self.num_envs} environments; expected an action for each"
            )
        else:
            # One by one, as SubprocVecEnv sends them: a conversion could change their bits.
            for seat in self._pool.seats:
                self._pool.send(seat, "step", list(actions[seat.first : seat.last]))
        self.waiting = True

    def step_wait(self) -> Any:
        """Wait for the step.

        :return: observations, (n_envs, ...) each; rewards, (n_envs,); dones, (n_envs,) bool; a list of infos
        :raises WorkerError: a worker has failed
        """
        self._require_open()
        if not self.waiting:
            raise InvalidArgumentError("no step was begun; write step_async(actions) first, or step(actions)")
        pool = self._pool
        pool.wait_for_step()
        # From here on, Ctrl-C could not be followed by another step_wait.
        self.waiting = False
        # Most steps end no episode and have nothing to say: told by comparing bytes, a tenth of what NumPy takes.
        if self._flag_bytes == self._kind_bytes == self._zeros and all(seat.said is None for seat in pool.seats):
            quiet: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
            dtype = self.reward_dtype
            rewards = self._rewards.copy() if dtype is None else self._rewards.astype(dtype)
            result = self._returned(), rewards, np.zeros(self.num_envs, bool), quiet
        else:
            self._tell_of_changes()
            infos, others = self._informations()
            for info, value in zip(infos, (self._flags & TRUNCATED).tolist(), strict=True):
                info["TimeLimit.truncated"] = value != 0
            result = self._returned(), self._rewards_of_step(others), (self._flags & DONE).astype(bool), infos
        self.timings.add_step(time.perf_counter() - self._began)
        return result

    def _informations(self) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Give the informations that workers have sent, and rewards that are no plain numbers."""
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        reset_infos = list(self.reset_infos)  # those before are the caller's to keep
        rewards: dict[int, Any] = {}
        for seat in self._pool.seats:
            said = seat.said
            if isinstance(said, WorkerError):
                said = self._replaced(seat, said)
            for index, entry in enumerate(said or (), seat.first):
                if entry is not None:
                    infos[index], reset_info, rewards[index] = entry
                    if reset_info is not None:
                        reset_infos[index] = reset_info
        self.reset_infos = reset_infos
        return infos, rewards

    def reset(self) -> Any:
        """Reset all environments, with the seeds and options that were set.

        :return: observations, (n_envs, ...) each
        :raises WorkerError: a worker has failed
        """
        self._require_open()
        pool = self._pool
        pool.settle()
        self.waiting = False
        asked = list(zip(self._seeds, self._options, strict=True))
        for seat in pool.seats:
            pool.reset(seat, asked[seat.first : seat.last])
        pool.wait_for_step()
        infos: list[dict[str, Any]] = []
        for seat in pool.seats:
            if isinstance(seat.said, WorkerError):
                infos += [reset_info for _, reset_info, _ in self._replaced(seat, seat.said)]
            else:
                infos += seat.said
        self._tell_of_changes()
        self.reset_infos = infos
        self._reset_seeds()
        self._reset_options()
        return self._returned()

    def _tell_of_changes(self) -> None:
        if self._changes_told or not (self._flags & CHANGED).any():
            return
        self._changes_told = True
        who = int(np.argmax(self._flags & CHANGED))
        warnings.warn(
            f"environment {who} returns observations with values that the dtype of its observation space, "
            f"{self.observation_space}, cannot hold: they are changed to such that it can, as DummyVecEnv does. Give "
            "the space the dtype of what reset and step return",
            stacklevel=4,
        )

    def _replaced(self, seat: Any, failure: WorkerError) -> Any:
        if self._restarts is None:
            raise failure
        return self._restarts.replace(seat, failure)

    def close(self) -> None:
        """Close the environments and end the workers; it always returns.

        :raises WorkerError: an environment fails in its ``close``
        """
        self.closed = True
        self._pool.close()  # again, if Ctrl-C has come before it was done

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Render all environments.

        :return: (height, width, 3) uint8 each; None where the render mode is another one
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._call("render", None, None)

    def has_attr(self, attr_name: str) -> bool:
        """Tell whether all environments have an attribute."""
        return all(self._call("has_attr", attr_name, None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of environments.

        :raises AttributeError: there is none; the environments live on
        """
        return self._call("get_attr", attr_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of environments."""
        self._call("set_attr", (attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of environments; what one raises is raised here, and the environments live on."""
        return self._call("env_method", (method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Tell which environments have a wrapper of a class."""
        # By name: to unpickle the class, a worker would have to import its module.
        return self._call("env_is_wrapped", (wrapper_class.__module__, wrapper_class.__qualname__), indices)

    def _call(self, name: str, data: Any, indices: Indices) -> list[Any]:
        self._require_idle()
        numbers = range(len(self._pool.of_env))
        results: list[Any] = self._pool.call([numbers[index] for index in self._get_indices(indices)], name, data)
        return results

    def _get_indices(self, indices: Indices) -> Iterable[int]:
        return range(len(self._pool.of_env)) if indices is None else super()._get_indices(indices)

    def _returned(self) -> Any:
        if self._restarts is not None:
            self._restarts.remember(self._observations)
        return self._pool.layout.joined([array.copy() for array in self._observations])

    def _rewards_of_step(self, others: dict[int, Any]) -> Any:
        kinds = self._reward_kinds
        if self.reward_dtype is not None:
            rewards = self._rewards.astype(self.reward_dtype)
            for index, value in others.items():
                if kinds[index] == OTHER:
                    rewards[index] = value
            return rewards
        if not kinds.any():
            return self._rewards.copy()
        # As SubprocVecEnv does it: the environments' own objects decide on the dtype.
        return np.stack(
            [
                others[index] if kind == OTHER else _REWARD_DTYPES[kind].type(value)
                for index, (kind, value) in enumerate(zip(kinds.tolist(), self._rewards.tolist(), strict=True))
            ]
        )

    def _require_open(self) -> None:
        if self.closed:
            raise InvalidArgumentError(
                f"this {type(self).__name__} is closed; make a new one: {type(self).__name__}(env_fns)"
            )

    def _require_idle(self) -> None:
        self._require_open()
        self._pool.raise_failure()
        if self.waiting:
            raise InvalidArgumentError(
                "a step was begun, and what it returns was not taken yet; write step_wait(), or reset(), first"
            )

"""What steps a vectorised environment for :class:`GymVecEnv`: its sub-environments one by one, or in batches."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, InvalidTypeError
from rl_ext_core.vector.autoreset import (
    RESET,
    STEP,
    Autoreset,
    PartialReset,
    final_information,
    final_observation,
    info_is_after_reset,
    partial_reset,
    require_own_final_observations,
    unpacked,
    without_final,
)
from rl_ext_core.vector.environments import copy_output, store_reward

__all__ = ["Batched", "Ended", "Layout", "Separate"]

Array = np.ndarray[Any, Any]


class Ended(NamedTuple):
    """What is known of the episodes that a step has ended, one of each.

    :ivar rows: their sub-environments
    :ivar infos: their own
    :ivar observations: their last ones
    :ivar time_outs: whether they were truncated and did not end by themselves
    :ivar reset_infos: of the resets after them; empty dicts if the environment does not return them
    """

    rows: Array
    infos: Iterable[dict[str, Any]]
    observations: Iterable[Any]
    time_outs: Iterable[bool]
    reset_infos: list[Any]


# Observations, rewards, dones, infos of those that go on, and what has ended, if anything.
Step = tuple[Any, Array, Array, list[Any], Ended | None]


class Layout:
    """What observations are made of: one array, a dict or a tuple of arrays, as in ``DummyVecEnv``.

    :raises InvalidArgumentError: they are nested deeper
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        self.keys: list[Any] = [None]
        inner: list[spaces.Space[Any]] = [space]
        if isinstance(space, spaces.Dict):
            self.keys, inner = list(space.spaces), list(space.spaces.values())
        elif isinstance(space, spaces.Tuple):
            self.keys, inner = list(range(len(space.spaces))), list(space.spaces)
        for part in inner:
            if part.shape is None or part.dtype is None:
                raise InvalidArgumentError(
                    f"observations hold {part}, which is no array of fixed shape. Stable Baselines3 takes a Dict or "
                    "Tuple of Box, Discrete, MultiDiscrete and MultiBinary; name a part with observation_key=..., or "
                    "flatten it: gymnasium.wrappers.FlattenObservation"
                )
        self.shapes = [(tuple(part.shape or ()), part.dtype) for part in inner]
        self._single = self.keys == [None]
        # One array of rows, as most environments have it.
        self.flat = self._single and self.shapes[0][0] != ()

    def empty(self, count: int) -> list[Array]:
        return [np.empty((count, *shape), dtype) for shape, dtype in self.shapes]

    def parts(self, observation: Any) -> list[Any]:
        return [observation] if self._single else [observation[key] for key in self.keys]

    def joined(self, leaves: Sequence[Any]) -> Any:
        if self._single:
            return leaves[0]
        return dict(zip(self.keys, leaves, strict=True)) if isinstance(self._space, spaces.Dict) else tuple(leaves)

    def rows(self, leaves: Sequence[Array]) -> Iterable[Any]:
        """Take batches apart."""
        return leaves[0] if self._single else [self.joined(parts) for parts in zip(*leaves, strict=True)]

    def keep_freed_memory(self, count: int) -> None:
        """Let glibc keep blocks of this size when they are freed: mapping them anew takes longer than filling them.

        Its threshold rises to the largest block that was freed, up to 32 MB. Source: mallopt(3), M_MMAP_THRESHOLD.
        """
        size = min(4 * sum(leaf.nbytes for leaf in self.empty(count)), 31 << 20)
        if size > 128 << 10:
            np.empty(size, np.uint8)

    def empty_rows(self, count: int) -> tuple[list[Array], Iterable[Any]]:
        """Make arrays for all, and what :meth:`write` takes for each: views, which cost less than indices.

        Where the layout is flat, they are arrays that observations can be written to without it.
        """
        leaves = self.empty(count)
        # An Ellipsis keeps rows of no dimensions arrays.
        rows = [[leaf[index, ...] for leaf in leaves] for index in range(count)] if not self.flat else leaves[0]
        return leaves, rows

    def write(self, row: Any, observation: Any) -> None:
        for leaf, part in zip([row] if self.flat else row, self.parts(observation), strict=True):
            leaf[...] = part


class Separate:
    """Steps the sub-environments of a ``SyncVectorEnv``, as ``DummyVecEnv`` does.

    :param all_infos: whether to return informations of environments whose episodes go on
    """

    def __init__(self, envs: list[Any], layout: Layout, all_infos: bool) -> None:
        self._envs, self._layout, self._all_infos = envs, layout, all_infos
        self._running = RunningInfo()

    def step(self, actions: Any) -> Step:
        layout, flat, all_infos = self._layout, self._layout.flat, self._all_infos
        leaves, rows = layout.empty_rows(len(self._envs))
        infos: list[Any] = [self._running] * len(self._envs)
        rewards = np.empty(len(self._envs), np.float32)
        indices: list[int] = []
        own: list[Any] = []
        lasts: list[Any] = []
        time_outs: list[bool] = []
        reset_infos: list[Any] = []
        for index, (env, action, row) in enumerate(zip(self._envs, actions, rows, strict=True)):
            observation, reward, terminated, truncated, info = env.step(action)
            store_reward(rewards, index, reward)
            if terminated or truncated:
                indices.append(index)
                # Copied before the reset, which may write into both.
                own.append(copy_output(info))
                lasts.append(copy_output(observation))
                time_outs.append(bool(truncated and not terminated))
                observation, reset_info = env.reset()
                reset_infos.append(copy_output(reset_info))
            elif info and all_infos:
                infos[index] = {**copy_output(info), "TimeLimit.truncated": False}
            elif info:
                self._running.left_out.update(info)
            if flat:
                row[...] = observation  # a call would take as long
            else:
                layout.write(row, observation)
        dones = np.zeros(len(rewards), bool)
        ended = None
        if indices:
            rows = np.array(indices)
            dones[rows] = True
            ended = Ended(rows, own, lasts, time_outs, reset_infos)
        return layout.joined(leaves), rewards, dones, infos, ended

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> tuple[Any, list[Any]]:
        leaves, rows = self._layout.empty_rows(len(self._envs))
        infos = []
        for env, seed, given, row in zip(self._envs, seeds, options, rows, strict=True):
            observation, info = env.reset(seed=seed, **({"options": given} if given else {}))
            self._layout.write(row, observation)
            infos.append(copy_output(info))
        return self._layout.joined(leaves), infos


class Batched:
    """Steps environments that return batches, of arrays or of tensors.

    :param device: where actions go; None: they stay arrays
    :param key: the part of the observations that is returned
    :param mode: None: the first step that ends an episode shows it
    :param previous: whether the observation before stands for a last one that is missing
    """

    def __init__(
        self,
        env: Any,
        layout: Layout,
        *,
        num_envs: int,
        device: torch.device | None,
        key: str | None,
        mode: Autoreset | None,
        previous: bool,
        all_infos: bool,
        copy: bool,
        action_space: spaces.Space[Any],
    ) -> None:
        self._env, self._layout, self._count, self._device = env, layout, num_envs, device
        self._key, self._mode, self._previous, self._all_infos, self._copy = key, mode, previous, all_infos, copy
        self._action_dtype = action_space.dtype
        self._last: list[Array] | None = None
        self._partial: PartialReset | None = None
        self._trusted = True
        self._running, self._info_is_after_reset = RunningInfo(), info_is_after_reset(env)
        if mode in (Autoreset.NEXT_STEP, Autoreset.DISABLED):
            self._partial, self._trusted = partial_reset(env, mode)
            if mode is Autoreset.NEXT_STEP and not self._trusted:
                raise InvalidArgumentError(
                    f"{type(getattr(env, 'unwrapped', env)).__name__} resets sub-environments one step after their "
                    "episodes have ended (autoreset_mode NextStep), and is not known to reset some of them when asked "
                    "to: the step in between would be a transition that never happened. If its "
                    "reset(options={'reset_mask': ...}) resets those of the mask at once, write "
                    'autoreset_mode="Disabled"; else make it of single environments: '
                    'gymnasium.make_vec(..., vectorization_mode="sync")'
                )
        layout.keep_freed_memory(num_envs)

    def step(self, actions: Any) -> Step:
        if self._device is not None:
            # Its own copy: environments that clip do so in place.
            actions = torch.from_numpy(np.array(actions, dtype=self._action_dtype)).to(self._device)
        before, self._last = self._last, None
        observation, reward, terminated, truncated, info = unpacked(self._env.step(actions), STEP)
        info = self._checked_info(info)
        parts = [*self._parts(observation), reward, terminated, truncated]
        *leaves, reward, terminated, truncated = _on_cpu(parts)
        leaves = self._checked(leaves)
        rewards = self._flat(reward, "rewards").astype(np.float32)
        terminated = self._flat(terminated, "terminations").astype(bool, copy=False)
        truncated = self._flat(truncated, "truncations").astype(bool, copy=False)
        dones = terminated | truncated
        rows = dones.nonzero()[0]
        infos: list[Any] = [self._running] * self._count
        ended = None
        if len(rows):
            time_outs = (truncated[rows] & ~terminated[rows]).tolist()
            lasts, own, reset_infos = self._finish(leaves, dones, rows, info, before)
            ended = Ended(rows, own, self._layout.rows(lasts), time_outs, reset_infos)
        if self._all_infos and info:
            rest = without_final(info)
            for index in np.flatnonzero(~dones).tolist():
                infos[index] = {**_info_of(rest, index, self._count), "TimeLimit.truncated": False}
        elif info:
            self._leave_out(info, ~dones)
        if self._previous:
            self._last = [leaf.copy() for leaf in leaves]
        return self._layout.joined(leaves), rewards, dones, infos, ended

    def _finish(
        self, leaves: list[Array], dones: Array, rows: Array, info: Any, before: list[Array] | None
    ) -> tuple[list[Array], Iterable[dict[str, Any]], list[Any]]:
        """Return last observations, infos and infos of resets of those ended; put the observations after resets in."""
        final, ended = final_observation(info), rows.tolist()
        if self._mode is None:
            self._mode = self._guessed(final)
        if self._partial is not None:
            lasts = [leaf[rows] for leaf in leaves]
            own = [_info_of(info, index, self._count) for index in ended]  # before the reset, which may write into it
            fresh, resets = self._reset_some(leaves, dones)
            for leaf, new in zip(leaves, fresh, strict=True):
                leaf[rows] = new
            return lasts, own, resets
        if final is not None:
            require_own_final_observations(self._env, final, ended)
            lasts = self._last_rows(final, rows)
        elif self._previous and before is not None:
            lasts = [leaf[rows] for leaf in before]
        else:
            raise EnvironmentOutputError(
                f"episodes have ended, {type(self._env).__name__} has reset itself, and its info holds no final_obs: "
                "their last observations are lost. Make it return them (Isaac Lab: cfg.compute_final_obs = True), or "
                'write missing_final_obs="previous", which takes the observations before'
            )
        return lasts, *self._infos_of_ended(info, rows)

    def _infos_of_ended(self, info: Any, rows: Array) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the infos of the last steps and those of the resets, from an info that holds both.

        Beside ``final_info`` are the infos of the resets, and episode statistics of wrappers. An info without it is
        that of the last step, except ALE's.
        """
        rest, final, count = without_final(info), final_information(info), self._count
        last = {} if final is None and self._info_is_after_reset else final
        indices = rows.tolist()
        if self._device is not None and isinstance(info, dict) and not _one_each(final):
            # Tensors cross together. What concerns all environments is not repeated for each.
            rest, last = _taken(rest, rows, count), None if last is None else _taken(last, rows, count)
            count, indices = len(rows), range(len(rows))
        resets = [_info_of(rest, index, count) for index in indices]
        own = resets if last is None else [_info_of(last, index, count) for index in indices]
        if last is None:
            return own, [{} for _ in own]
        for mine, reset in zip(own, resets, strict=True):
            if "episode" in reset:
                mine.setdefault("episode", reset.pop("episode"))
        return own, resets

    def _leave_out(self, info: Any, running: Array) -> None:
        """Record which parts of an info are not handed out for environments whose episodes go on."""
        left_out = self._running.left_out
        if _one_each(info):
            for index in running.nonzero()[0].tolist():
                left_out.update(info[index] or ())
            return
        for key in info.keys() - left_out:
            mask = _mask_of(info, key, self._count)
            if mask is None or _array(mask)[running].any():
                left_out.add(key)

    def _guessed(self, final: Any) -> Autoreset:
        if final is not None:
            return Autoreset.SAME_STEP
        raise InvalidArgumentError(
            f"{type(self._env).__name__} says nowhere when it resets sub-environments whose episodes have ended, and "
            'its info holds no final_obs. Write autoreset_mode="SameStep", "Disabled" (it resets those of '
            "reset(options={'reset_mask': ...})), or give it metadata[\"autoreset_mode\"]"
        )

    def _reset_some(self, leaves: list[Array], dones: Array) -> tuple[list[Array], list[dict[str, Any]]]:
        """Reset the environments of a mask, and return their observations and infos."""
        assert self._partial is not None
        observation, info = unpacked(self._partial(dones), RESET)
        info = self._checked_info(info, {self._count, int(dones.sum())})
        found = _on_cpu(self._parts(observation))
        count = int(dones.sum())
        if count < self._count and all(len(leaf) == count for leaf in found):
            return self._checked(found, count), [_info_of(info, position, count) for position in range(count)]
        fresh = self._checked(found)
        if not self._trusted:
            for old, new in zip(leaves, fresh, strict=True):
                if old[~dones].tobytes() != new[~dones].tobytes():
                    raise EnvironmentOutputError(
                        f"{type(self._env).__name__}.reset(options={{'reset_mask': ...}}) also changed "
                        "sub-environments that it was not to reset: it cannot reset some of them alone. Write "
                        'gymnasium.make_vec(..., vectorization_mode="sync"), or give its reset an argument env_ids'
                    )
        return [leaf[dones] for leaf in fresh], [
            _info_of(info, index, self._count) for index in dones.nonzero()[0].tolist()
        ]

    def _last_rows(self, final: Any, rows: Array) -> list[Array]:
        if _one_each(final):
            each = [[np.asarray(_array(part)) for part in self._parts(final[index])] for index in rows.tolist()]
            stacked = [np.stack(parts) for parts in zip(*each, strict=True)]
        else:
            stacked = _on_cpu([_some(part, rows) for part in self._parts(final)])
        return self._checked(stacked, len(rows), copy=False)

    def reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]]) -> tuple[Any, list[Any]]:
        given: dict[str, Any] = {}
        if any(option != options[0] for option in options):
            raise InvalidArgumentError(
                f"the options differ between environments, and {type(self._env).__name__} resets all of them with the "
                "same. Write set_options({...}) with one dict"
            )
        if options[0]:
            given["options"] = dict(options[0])
        if seeds[0] is not None:
            given["seed"] = int(seeds[0])  # environments number on from it, as ``VecEnv.seed`` does
        try:
            result = self._env.reset(**given)
        except TypeError:
            if "seed" not in given or _takes_seed(self._env):
                raise
            warnings.warn(
                f"{type(self._env).__name__}.reset takes no seed: the seed is not used. Give it where the environment "
                "is made",
                stacklevel=3,
            )
            del given["seed"]
            result = self._env.reset(**given)
        observation, info = unpacked(result, RESET)
        info = self._checked_info(info)
        leaves = self._checked(_on_cpu(self._parts(observation)))
        if self._previous:
            self._last = [leaf.copy() for leaf in leaves]
        return self._layout.joined(leaves), [_info_of(info, index, self._count) for index in range(self._count)]

    def _parts(self, observation: Any) -> list[Any]:
        if self._key is not None:
            observation = observation[self._key]
        return self._layout.parts(observation)

    def _checked(self, leaves: list[Array], count: int | None = None, *, copy: bool | None = None) -> list[Array]:
        """Cast leaves to what the space promises, and copy what is the environment's."""
        count = self._count if count is None else count
        copy = self._copy if copy is None else copy
        found = []
        for leaf, (shape, dtype) in zip(leaves, self._layout.shapes, strict=True):
            if leaf.shape != (count, *shape):
                raise EnvironmentOutputError(
                    f"{type(self._env).__name__} returned observations of shape {leaf.shape}; its space promises "
                    f"{(count, *shape)}"
                )
            found.append(leaf.astype(dtype, order="C", copy=copy or not leaf.flags.writeable))
        return found

    def _checked_info(self, info: Any, counts: Iterable[int] = ()) -> Any:
        """Check that an info is a dict, or a list with one dict for each environment."""
        if isinstance(info, dict):
            return info
        each = list(info) if _one_each(info) or isinstance(info, tuple) else None
        if each is None or len(each) not in (counts or {self._count}):
            found = f"a value of type {type(info).__name__}" if each is None else f"a list of {len(each)} infos"
            raise EnvironmentOutputError(
                f"{type(self._env).__name__} returned {found} as the info of {self._count} environments; expected a "
                "dict of arrays, or a list with a dict for each environment"
            )
        return each

    def _flat(self, values: Array, name: str) -> Array:
        if values.size != self._count:
            raise EnvironmentOutputError(
                f"{type(self._env).__name__} returned {name} of shape {values.shape}; expected ({self._count},)"
            )
        return values.reshape(self._count)


# -- infos


class RunningInfo(dict[str, Any]):
    """The info of environments whose episodes go on: one dict for all of them, so it cannot be written to.

    :ivar left_out: keys that environments have returned and that are not in it; asking for one of them raises
    """

    # SB3 asks for these in every step.
    _ASKED_BY_SB3 = frozenset({"episode", "is_success", "terminal_observation", "TimeLimit.truncated"})

    def __init__(self) -> None:
        super().__init__({"TimeLimit.truncated": False})
        self.left_out: set[str] = set()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidTypeError(
            "this info belongs to all environments whose episodes go on and cannot be changed. Change a copy of it, "
            'info.copy(), or write GymVecEnv(..., infos="all")'
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r}: infos are built for environments whose episodes have ended. For all of them write "
            'GymVecEnv(..., infos="all")'
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value.

        :raises KeyError: If an environment has returned this key: the default would be wrong.
        """
        if key in self.left_out and key not in self._ASKED_BY_SB3:
            self.__missing__(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self.get(str(key)) is not None

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _one_each(values: Any) -> bool:
    return isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype == object)


def _mask_of(info: Any, key: str, count: int) -> Any:
    """Return gymnasium's mask of the environments that have a key. None if there is no mask."""
    mask = info.get(f"_{key}")
    return mask if getattr(mask, "dtype", None) in (np.bool_, torch.bool) and mask.shape == (count,) else None


def _info_of(info: Any, index: int, count: int) -> dict[str, Any]:
    """Return a copy of the info of one environment, from what gymnasium makes of all: arrays and their masks."""
    if _one_each(info):
        return copy_output(dict(info[index] or {}))  # type: ignore[no-any-return]
    found: dict[str, Any] = {}
    for key, value in info.items():
        mask = _mask_of(info, key, count)
        if (mask is not None and not mask[index]) or _is_mask(info, key, count):
            continue
        if isinstance(value, dict):
            found[key] = _info_of(value, index, count)
        elif (
            isinstance(value, np.ndarray | torch.Tensor | list | tuple) and len(np.shape(value)) and len(value) == count
        ):
            found[key] = copy_output(_array(value[index]))
        else:
            found[key] = copy_output(value)
    return found


def _is_mask(info: Any, key: Any, count: int) -> bool:
    if not isinstance(key, str) or not key.startswith("_"):
        return False
    return key[1:] in info and _mask_of(info, key[1:], count) is not None


def _taken(info: Any, rows: Array, count: int) -> dict[str, Any]:
    """Take rows out of the tensors and arrays of an info, and their masks, to the CPU together."""
    if not info:
        return {}
    flat: dict[tuple[str, ...], Any] = {}

    def collect(part: Any, path: tuple[str, ...]) -> None:
        for key, value in part.items():
            if _is_mask(part, key, count):
                continue
            taken = len(flat)
            if isinstance(value, dict):
                collect(value, (*path, key))
            elif isinstance(value, torch.Tensor | np.ndarray) and value.shape[:1] == (count,) and value.dtype != object:
                flat[(*path, key)] = _some(value, rows)
            mask = _mask_of(part, key, count)
            if mask is not None and len(flat) > taken:
                flat[(*path, f"_{key}")] = _some(mask, rows)

    collect(info if isinstance(info, dict) else {}, ())
    found: dict[str, Any] = {}
    for path, value in zip(flat, _on_cpu(list(flat.values())), strict=True):
        part = found
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = value
    return found


# -- tensors


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return value.numpy()
    except (RuntimeError, TypeError):  # takes three times as long where it is not needed
        return value.numpy(force=True)


def _some(batch: Any, rows: Array) -> Any:
    """Take rows of an array or tensor, where it is."""
    if not isinstance(batch, torch.Tensor):
        return batch[rows]
    return _array(batch).take(rows, 0) if batch.is_cpu else batch[torch.from_numpy(rows).to(batch.device)]


def _on_cpu(parts: list[Any]) -> list[Array]:
    """Turn tensors into arrays: those on other devices in one copy, those here without one."""
    away = [index for index, part in enumerate(parts) if isinstance(part, torch.Tensor) and not part.is_cpu]
    found = list(parts)
    if len(away) > 1:
        for index, array in zip(away, _unpacked([parts[index] for index in away]), strict=True):
            found[index] = array
    return [part if type(part) is np.ndarray else np.asarray(_array(part)) for part in found]


def _unpacked(tensors: list[torch.Tensor]) -> list[Array]:
    """Copy tensors of one device into one block on the CPU, and give arrays in it."""
    # The widest first: each then begins at a multiple of its size.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    block = torch.cat([tensors[index].detach().contiguous().view(-1).view(torch.uint8) for index in order]).cpu()
    found: list[Any] = [None] * len(tensors)
    start = 0
    for index in order:
        tensor = tensors[index]
        end = start + tensor.numel() * tensor.element_size()
        found[index] = block[start:end].view(tensor.dtype).view(tensor.shape).numpy()
        start = end
    return found


def _takes_seed(env: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(env.reset).parameters.values()
        return any(part.name == "seed" or part.kind is part.VAR_KEYWORD for part in parameters)
    return True

"""Small environments with the behavior and the faults of real ones."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch.utils._pytree import tree_map

F32 = np.float32


def box(*shape: int, dtype: Any = F32) -> spaces.Box:
    """Return a Box from -1 to 1 of this shape, float32 by default."""
    return spaces.Box(-1, 1, shape, dtype)


class Walk(gymnasium.Env[Any, Any]):
    """Episodes of random length, which end in turn by termination and by truncation.

    Observations contain the episode, its step, the sum of the actions and a random number, so all observations differ.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), F32)
    action_space = spaces.Discrete(3)

    def __init__(self, shortest: int = 2, longest: int = 9) -> None:
        self.lengths, self.episode = (shortest, longest), -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first = seed is None and self._np_random is None
        super().reset(seed=int(np.random.randint(1 << 30)) if first else seed)  # reproducible in a test
        self.episode = 0 if seed is not None else self.episode + 1
        self.step_count, self.total = 0, 0
        self.length = int(self.np_random.integers(*self.lengths, endpoint=True))
        return self.observation(), {"age": np.array(0), "length": np.array(self.length)}

    def observation(self) -> np.ndarray[Any, Any]:
        return np.array([self.episode, self.step_count, self.total, self.np_random.normal()], F32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        self.total += int(action)
        ended = self.step_count >= self.length
        terminated = ended and self.episode % 2 == 0
        info = {"age": np.array(self.step_count), "length": np.array(self.length)}
        return self.observation(), float(self.total) + 0.5, terminated, ended and not terminated, info


class DictWalk(Walk):
    observation_space = spaces.Dict(
        inner=spaces.Dict(place=spaces.Box(-np.inf, np.inf, (4,), F32), kind=spaces.Discrete(5)),
        image=spaces.Box(0, 255, (2, 2, 3), np.uint8),
    )

    def observation(self) -> Any:
        place = super().observation()
        inner = {"place": place, "kind": int(self.np_random.integers(5))}
        return {"inner": inner, "image": np.full((2, 2, 3), int(place[:2].sum()) % 255, np.uint8)}


class InfoWalk(Walk):
    """Walk with infos in all steps, some steps, last steps, resets and nested dicts."""

    KEYS = ("age", "number", "odd", "score", "fresh", "late", "early", "inner.age", "inner.score", "marks")

    def _info(self, ended: bool) -> dict[str, Any]:
        """Return an info whose keys depend on the step and on the end of the episode."""
        number, step = self.episode + 1, self.step_count
        mark = 100.0 * number + step
        info: dict[str, Any] = {"age": step, "number": number, "marks": np.array([mark, -mark])}
        info["inner"] = {"age": -step, **({"score": mark} if ended else {})}
        info |= ({"odd": mark} if step % 2 else {}) | ({"score": mark} if ended else {"early": mark})
        return info | ({"late": mark} if step else {})

    def reset(self, **kwargs: Any) -> Any:
        observation, _ = super().reset(**kwargs)
        return observation, {**self._info(False), "fresh": self.episode + 0.5}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, self._info(terminated or truncated)


class BoxInfoWalk(InfoWalk):
    action_space = spaces.Box(-1, 1, (1,), F32)

    def step(self, action: Any) -> Any:
        return super().step(round(3 * action.item()))


class InPlaceInfoWalk(BoxInfoWalk):
    """BoxInfoWalk that reuses one object each for observations, rewards, infos and marks, and overwrites its action."""

    overwrites_actions = True

    def __init__(self) -> None:
        super().__init__()
        self.place, self.reward, self.marks, self.report = np.zeros(4, F32), np.zeros(()), np.zeros(2), {}

    def _info(self, ended: bool) -> dict[str, Any]:
        info = super()._info(ended)
        self.marks[...] = info["marks"]
        self.report.clear()
        self.report.update(info, marks=self.marks)
        return self.report

    def observation(self) -> Any:
        self.place[...] = super().observation()
        return self.place

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        self.report.update(info)
        return observation, self.report

    def step(self, action: Any) -> Any:
        observation, self.reward[...], *flags, info = super().step(action)
        if self.overwrites_actions:
            action[...] = 9
        return observation, self.reward, *flags, info


class SamplingEnv(gymnasium.Env[Any, Any]):
    """Environment of any two spaces that samples observations, and records them and its actions."""

    def __init__(self, observation_space: Any, action_space: Any, length: int = 5) -> None:
        self.observation_space, self.action_space, self.length = observation_space, action_space, length
        self.received: list[Any] = []
        self.returned: list[Any] = []
        observation_space.seed(0)

    def _sample(self) -> Any:
        self.returned.append(self.observation_space.sample())
        return self.returned[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.step_count = 0
        return self._sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        self.step_count += 1
        return self._sample(), 1.5, self.step_count % self.length == 0, False, {}


class WalkWithoutInfos(Walk):
    """``Walk`` without infos, which upstream writes into the data of SAME_STEP environments."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {}

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


# No two episodes end in the same step before the 77th. In SameStep mode, upstream resets twice if all end together.
STAGGERED: list[Any] = [partial(WalkWithoutInfos, length, length) for length in (7, 11, 13)]


class VectorRewards(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.reward_space = spaces.Box(-np.inf, np.inf, (2,), F32)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, np.array([reward, -reward], F32), *rest)


class FaultyWalk(Walk):
    """``Walk`` that returns given faulty results from ``reset``, ``step`` or observations."""

    def __init__(self, **faults: Any) -> None:
        super().__init__(30, 40)
        self.faults = faults

    def observation(self) -> Any:
        value = super().observation()
        fault = self.faults.get("observation", value)
        return fault(value) if callable(fault) else fault

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        return self.faults.get("reset", lambda pair: pair)(result)

    def step(self, action: Any) -> Any:
        result = list(super().step(action))
        for place, name in enumerate(("observation", "reward", "terminated", "truncated")):
            if name in self.faults and name != "observation":
                result[place] = self.faults[name]
        return self.faults.get("step", tuple)(result)


class FaultyDictWalk(FaultyWalk, DictWalk):
    """``FaultyWalk`` with observations in a nested Dict."""


class ForeignBox:
    def __init__(self, low: Any, high: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> None:
        self.low, self.high, self.shape, self.dtype = low, high, shape, dtype


class ForeignDict:
    def __init__(self, **parts: Any) -> None:
        self.spaces = parts


class BareBatch:
    """Vectorized environment without a base class."""

    render_mode = spec = None
    unwrapped = property(lambda self: self)

    def close(self) -> None:
        """Do nothing, since there is nothing to close."""


class Isaac(BareBatch):
    """Batch in the style of Isaac Lab: tensors written in place, and resets within the step.

    :param final_obs: Whether extras contain final observations.
    :param lengths: Steps per episode of each row; by default they differ.
    :param foreign: Whether its spaces are not gymnasium's.
    :param overwrites_actions: Whether it writes into its actions.
    """

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        num_envs: int,
        *,
        final_obs: bool = False,
        lengths: list[int] | None = None,
        foreign: bool = False,
        overwrites_actions: bool = False,
    ) -> None:
        self.num_envs, self.device, self.final_obs = num_envs, "cpu", final_obs
        self.overwrites_actions = overwrites_actions
        self.lengths = torch.tensor(lengths or [3 + row % 5 for row in range(num_envs)])
        self.cfg = SimpleNamespace(is_finite_horizon=False, auto_reset=True)  # auto_reset is mjlab's setting
        make, many = (ForeignBox, ForeignDict) if foreign else (spaces.Box, spaces.Dict)
        self.single_observation_space = many(policy=make(-np.inf, np.inf, (6,), F32))
        self.single_action_space = make(-np.inf, np.inf, (2,), F32)
        self.observation_space = many(policy=make(-np.inf, np.inf, (num_envs, 6), F32))
        self.action_space = make(-np.inf, np.inf, (num_envs, 2), F32)
        self.state = torch.zeros(num_envs, 6)
        self.reward_buf = torch.zeros(num_envs)
        self.terminated = torch.zeros(num_envs, dtype=torch.bool)
        self.truncated = torch.zeros(num_envs, dtype=torch.bool)
        self.steps = torch.zeros(num_envs, dtype=torch.long)
        self.episodes = torch.zeros(num_envs, dtype=torch.long)
        self.extras: dict[str, Any] = {}
        self.requested_rows: list[list[int]] = []

    def _reset_rows(self, rows: torch.Tensor) -> None:
        self.episodes[rows] += 1
        self.steps[rows] = 0
        # Only the row and the episode, so that observations after a reset are predictable.
        self.state[rows] = 0.0
        self.state[rows, 0] = rows.float()
        self.state[rows, 1] = self.episodes[rows].float()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.episodes.zero_()
        self._reset_rows(torch.arange(self.num_envs))
        return {"policy": self.state}, self.extras

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        self.steps += 1
        self.state[:, 2] += 1.0
        self.state[:, 3:5] += action
        self.reward_buf.copy_(self.state[:, 2] * 10 + self.state[:, 0])
        ended = self.steps >= self.lengths
        torch.logical_and(ended, self.episodes % 2 == 0, out=self.terminated)
        torch.logical_and(ended, self.episodes % 2 == 1, out=self.truncated)
        rows = ended.nonzero().squeeze(-1)
        if len(rows) and self.cfg.auto_reset:
            if self.final_obs:
                self.extras["final_obs"] = {"policy": self.state.clone()}
            self._reset_rows(rows)
        if self.overwrites_actions:
            action[...] = 99.0
        return {"policy": self.state}, self.reward_buf, self.terminated, self.truncated, self.extras


class IsaacByIds(Isaac):
    def reset(
        self, seed: int | None = None, env_ids: torch.Tensor | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if env_ids is None:
            return super().reset(seed, options)
        self.requested_rows.append(env_ids.tolist())
        self._reset_rows(env_ids)
        return {"policy": self.state}, self.extras


class ManiSkill(Isaac):
    """``Isaac`` with ManiSkill's partial resets by an option, infos in all steps, and last infos as ``final_info``."""

    __module__ = "mani_skill.envs.sapien_env"

    def __init__(self, *, auto_reset: bool | None) -> None:
        super().__init__(3, lengths=[2, 3, 5], final_obs=True)
        self.cfg.auto_reset = int(auto_reset is True)  # not a boolean, since only mjlab's setting is one
        if auto_reset is not None:
            self.auto_reset = auto_reset  # as in its vector wrapper
        self.single_observation_space = self.single_observation_space["policy"]
        self.observation_space = self.observation_space["policy"]

    def _report(self) -> dict[str, Any]:
        return {"age": self.steps.clone(), "number": self.episodes.clone()}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        rows = (options or {}).get("env_idx")
        if rows is None:
            super().reset(seed)
        else:
            self._reset_rows(rows)
        return self.state, self._report()

    def step(self, action: Any) -> Any:
        self.extras = {}
        last = {"age": self.steps + 1, "number": self.episodes.clone()}
        observation, *rest, info = super().step(action)
        info, done = info | self._report(), rest[1] | rest[2]
        if self.cfg.auto_reset and done.any():
            info["final_observation"] = info.pop("final_obs")["policy"]
            info |= {"final_info": last, "_final_info": done, "_final_observation": done}
        return observation["policy"], *rest, info


class SameStep(BareBatch):
    """Batch that resets within the step, and returns final observations and infos in one of many forms.

    An observation's place contains the row, the episode and the step. Its kind is the sum of row and step. Infos
    contain the step, and ``"fresh"`` at a reset.

    :param form: ``"batch"``, ``"masks"`` (a batch with gymnasium's mask ``"_key"`` for each ``"key"``), ``"rows"`` (of
        finished episodes), ``"objects"``, ``"list"``, ``"infos"`` (a list of infos), or None.
    :param nested: Whether observations are nested Dicts.
    :param name: Key of final observations in infos.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": "SameStep"}
    FORMS = ("batch", "masks", "rows", "objects", "list", "infos")

    def __init__(
        self,
        lengths: list[int],
        form: str | None,
        *,
        nested: bool = False,
        torch_tensors: bool = False,
        name: str = "final_obs",
    ) -> None:
        self.num_envs, self.form, self.nested, self.name = len(lengths), form, nested, name
        self.array = torch.as_tensor if torch_tensors else np.asarray
        self.lengths = np.array(lengths)
        place = spaces.Box(-np.inf, np.inf, (3,), F32)
        self.single_observation_space: Any = place
        if nested:
            inner = spaces.Dict(place=place, _private=spaces.Box(-np.inf, np.inf, (1,), F32))
            self.single_observation_space = spaces.Dict(inner=inner, kind=spaces.Discrete(40))
        self.single_action_space = self.action_space = spaces.Discrete(2)
        self.observation_space = self.single_observation_space
        self.episodes, self.steps = np.full(self.num_envs, -1), np.zeros(self.num_envs, int)

    def observation(self, rows: Any) -> Any:
        number = np.arange(self.num_envs)[rows]
        place = np.stack([number, self.episodes[rows], self.steps[rows]], -1).astype(F32)
        if not self.nested:
            return self.array(place)
        inner = {"place": self.array(place), "_private": self.array(place[:, :1] * 2)}
        return {"inner": inner, "kind": self.array(number + self.steps[rows])}

    def single_observation(self, row: int) -> Any:
        return tree_map(lambda batch: batch[0], self.observation([row]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.episodes[mask] += 1
        self.steps[mask] = 0
        info = {"elapsed_step": self.array(self.steps.copy()), "fresh": self.array(mask * 1)}
        return self.observation(slice(None)), info

    def final_observations(self, rows: list[int]) -> Any:
        if self.form == "batch":
            return self.observation(slice(None))
        if self.form == "masks" and self.nested:
            mask, batch = np.isin(np.arange(self.num_envs), rows), self.observation(slice(None))
            return {**batch, "inner": {**batch["inner"], "_place": mask}, "_inner": mask, "_kind": mask}
        if self.form in ("rows", "masks"):
            return self.observation(rows)
        return self._per_row([self.single_observation(row) if row in rows else None for row in range(self.num_envs)])

    def final_infos(self, rows: list[int]) -> Any:
        if self.form in ("batch", "masks", "rows"):
            return {"elapsed_step": self.array(self.steps.copy())}
        return self._per_row([{"elapsed_step": step} if row in rows else None for row, step in enumerate(self.steps)])

    def _per_row(self, values: list[Any]) -> Any:
        if self.form == "list":
            return values
        objects = np.full(self.num_envs, None, object)
        objects[:] = values
        return objects

    def step(self, action: Any) -> Any:
        self.steps += 1
        done = self.steps >= self.lengths
        rows = done.nonzero()[0].tolist()
        final: Any = {}
        if rows and self.form is not None:
            final = {self.name: self.final_observations(rows), "final_info": self.final_infos(rows)}
        self.episodes[rows] += 1
        self.steps[rows] = 0
        info: Any = {"elapsed_step": self.array(self.steps.copy()), "fresh": self.array(done * 1), "_fresh": done}
        if self.form == "infos":
            info = [{"elapsed_step": step} for step in self.steps]
            for row in rows:
                info[row] |= {"fresh": 1, **{key: part[row] for key, part in final.items()}}
        else:
            info |= final
        reward, none = np.ones(self.num_envs), np.zeros(self.num_envs, bool)
        return self.observation(slice(None)), *(self.array(part) for part in (reward, done, none)), info

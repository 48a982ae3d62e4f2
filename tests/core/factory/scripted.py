"""Environments that are made of a few instructions: what is set by the constructor, by resets and by steps."""

from __future__ import annotations

import dataclasses
import types
import zlib
from typing import Any

import gymnasium as gym
import numpy as np

NAMES = ("a", "b", "c")
# What an instruction does to an attribute; some of them only now and then.
OPERATIONS = ("set", "add", "take", "least", "toggle", "keep if more", "draw", "when c")
Instruction = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """What an environment is made of.

    :ivar begin: values of the attributes in the constructor
    :ivar resets: instructions of resets
    :ivar steps: instructions of steps
    :ivar length: of episodes
    :ivar shown: which attributes can be seen at once; others show at the end of an episode only
    """

    begin: tuple[int, ...]
    resets: tuple[Instruction, ...]
    steps: tuple[Instruction, ...]
    length: int
    shown: tuple[str, ...]


class Scripted(gym.Env[Any, Any]):
    action_space = gym.spaces.Discrete(4)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (len(NAMES) + 1,), np.float64)

    def __init__(self, program: Program) -> None:
        self.program = program
        for name, value in zip(NAMES, program.begin, strict=True):
            setattr(self, name, value)
        self.nested = types.SimpleNamespace(bias=0, trace=[])
        self.left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = self.program.length
        self.nested.trace.clear()
        self._run(self.program.resets, 0)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        self.nested.trace.append(int(action))
        self._run(self.program.steps, int(action))
        return self._seen(), float(self.nested.bias + len(self.nested.trace)), False, self.left <= 0, {}

    def _run(self, instructions: tuple[Instruction, ...], action: int) -> None:
        for operation, name, number in instructions:
            value = getattr(self, name)
            other = getattr(self, NAMES[number % len(NAMES)])
            results = {
                "set": number,
                "add": value + number,
                "take": other + action,
                "least": min(value, number),
                "toggle": -value,
                "keep if more": value if value > 10 else 0,
                "draw": int(self.np_random.integers(5)),
                "when c": value + 1 if self.c > number else value,
            }
            setattr(self, name, results[operation] % 1_000)

    def _seen(self) -> Any:
        shown = NAMES if self.left <= 0 else self.program.shown
        values = [float(getattr(self, name)) if name in shown else 0.0 for name in NAMES]
        return np.array([*values, float(self.left)])


class SealedScripted(Scripted):
    """One that holds what cannot be copied."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.engine = zlib.compressobj()


class Doubled(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper without a specification, with state of its own."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.factor, self.episodes = 2.0, 0

    def reset(self, **kwargs: Any) -> Any:
        self.episodes += 1
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, self.factor * float(reward) + self.episodes, terminated, truncated, info


for _cls in (Scripted, SealedScripted):
    gym.register(f"scripted/{_cls.__name__}-v0", entry_point=f"tests.core.factory.scripted:{_cls.__name__}")

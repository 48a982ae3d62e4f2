"""One step and one reset of the wrapped environment, as dicts of tensors: what the wrapper's methods have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import Composite, TensorSpec

from rl_ext_core.errors import EnvironmentOutputError
from torchrl_ext._actions import compile_action
from torchrl_ext._memory import without_need
from torchrl_ext._partial import pair
from torchrl_ext._readers import compile_observation
from torchrl_ext._signals import compile_reward, no_end, no_flags

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Layout", "SingleEngine", "compiled_reader", "compiled_step"]


@dataclass(frozen=True)
class Layout:
    """What an engine is compiled from.

    :param env: the environment
    :param observation: spec of what it returns, with the batch, without infos
    :param key: of the one entry, where observations are no dicts
    :param observation_starts: what the integers in it count from, where that is not zero
    :param action: spec of its action
    :param action_starts: the same of it
    :param reward: spec of its reward
    :param batch_size: of the wrapper
    :param device: of the tensors
    :param env_type: ``"numpy"`` or ``"torch"``
    :param env_device: where a torch environment lives
    :param copy: True, False or ``"auto"``
    :param clip_actions: bound on the magnitude of continuous actions
    :param frame_skip: environment steps to a step
    :param finite_horizon: whether time-outs are terminations
    """

    env: Any
    observation: Composite
    key: str | None
    observation_starts: Any
    action: TensorSpec
    action_starts: Any
    reward: TensorSpec
    batch_size: torch.Size
    device: torch.device | None
    env_type: str
    env_device: torch.device | None
    copy: bool | str
    clip_actions: float | None
    frame_skip: int
    finite_horizon: bool


def compiled_step(layout: Layout) -> Callable[[Any], tuple[Any, Any, Any, Any, Any]]:
    """Compile an environment step that takes the action of a TensorDict and sums rewards over skipped frames."""
    decode = compile_action(
        layout.action,
        env_type=layout.env_type,
        batched=bool(layout.batch_size),
        clip=layout.clip_actions,
        device=layout.env_device if layout.env_device != layout.device else None,
        start=layout.action_starts,
    )
    env, skip = layout.env, layout.frame_skip
    if layout.finite_horizon:
        return _ending(compiled_step(replace(layout, finite_horizon=False)))
    if skip == 1:
        return lambda action: _five(env.step(decode(action)))

    def repeat(action: Any) -> tuple[Any, Any, Any, Any, Any]:
        total: Any = 0
        for _ in range(skip):
            # decoded anew: the environment may have edited its action
            observation, reward, terminated, truncated, info = _five(env.step(decode(action)))
            try:
                total = total + reward
                done = terminated | truncated
            except TypeError:
                raise EnvironmentOutputError(
                    f"step() returned the reward {reward!r} and the flags {terminated!r} and {truncated!r}; expected a "
                    "number, or an array, and booleans, or arrays of them"
                ) from None
            if done.any() if hasattr(done, "any") else done:
                break
        return observation, total, terminated, truncated, info

    return repeat


def _ending(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turn time-outs into terminations."""

    def run(action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, terminated, truncated, info = step(action)
        try:
            ended = terminated | truncated
            return observation, reward, ended, ended ^ ended, info
        except TypeError:
            raise no_flags(terminated, truncated) from None

    return run


def _five(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    if type(result) is tuple and len(result) == 5:
        return result
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return tuple(result)
    found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a value of type {type(result).__name__}"
    raise EnvironmentOutputError(
        f"step() returned {found}; expected the 5 of gymnasium: observation, reward, terminated, truncated, info"
    )


def compiled_reader(layout: Layout, sample: Any) -> Callable[[Any], dict[str, Any]]:
    """Compile the reader of observations."""

    def compile_with(copy: bool) -> Callable[[Any], dict[str, Any]]:
        starts = layout.observation_starts
        return compile_observation(
            layout.observation, sample, key=layout.key, device=layout.device, copy=copy, starts=starts
        )

    if layout.copy != "auto":
        return compile_with(bool(layout.copy))
    copied = compile_with(True)
    return copied if layout.key is None else without_need(copied, compile_with(False))


class SingleEngine:
    """Steps and resets one environment.

    :param layout: what to compile from
    :param sample: one of its observations; None: not seen yet
    """

    def __init__(self, layout: Layout, sample: Any) -> None:
        self._read = compiled_reader(layout, sample)
        self.step = self._compile_step(layout, self._read)
        self.env, self.batch_size, self.device = layout.env, layout.batch_size, layout.device
        self.frame_skip = layout.frame_skip
        self.containers = tuple(key for key, part in layout.observation.items() if isinstance(part, Composite))

    @staticmethod
    def _compile_step(
        layout: Layout, read: Callable[[Any], dict[str, Any]]
    ) -> Callable[[Any], tuple[dict[str, Any], bool, Any]]:
        step, device = compiled_step(layout), layout.device
        read_reward = compile_reward(layout.reward, batched=False, device=device)
        tensor, shape = torch.tensor, (1,)

        def run(action: Any) -> tuple[dict[str, Any], bool, Any]:
            observation, reward, terminated, truncated, info = step(action)
            data = read(observation)
            data["reward"] = read_reward(reward)
            try:
                ended = bool(terminated or truncated)
            except (ValueError, RuntimeError):  # of arrays
                raise no_flags(terminated, truncated) from None
            if ended:
                flags = ((True,), (bool(terminated),), (bool(truncated),))
                data["done"], data["terminated"], data["truncated"] = tensor(flags, device=device).unbind(0)
                return data, True, info
            if terminated is None or truncated is None:
                raise no_flags(terminated, truncated)
            data["done"], data["terminated"], data["truncated"] = no_end(shape, device)
            return data, False, info

        return run

    memory = None

    def take_up(self, memory: Any) -> None:
        """Remember nothing: there is nothing that the next reset has to know."""

    @staticmethod
    def closing(info: Any) -> Any:
        """Give the info that belongs to the observations of the last step."""
        return info

    def begin(self, result: Any) -> tuple[dict[str, Any], Any]:
        """Take in what a reset returned.

        :return: the observations, and the info
        """
        observation, info = pair(result)
        return self._read(observation), info

    def reset(self, mask: torch.Tensor | None, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """Reset.

        :param mask: says that all are reset: there is one
        :return: the observations, and the info
        """
        del mask
        return self.begin(self.env.reset(**kwargs))

    def reset_done(self, data: dict[str, Any]) -> dict[str, Any]:
        """Reset after a step in which it was done.

        :param data: the entries of ``next``
        :return: the observations
        """
        del data
        return self.begin(self.env.reset())[0]

    def not_done(self) -> tuple[torch.Tensor, ...]:
        """Make flags for what follows a reset: done, terminated, truncated."""
        return no_end((1,), self.device)

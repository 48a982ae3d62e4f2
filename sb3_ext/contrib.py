"""
Compressed rollout buffers for the algorithms of sb3-contrib.

Pass the class to ``MaskablePPO``::

    MaskablePPO("CnnPolicy", env, rollout_buffer_class=CompressedMaskableRolloutBuffer)

Replace the buffer of ``RecurrentPPO``, which has no such argument::

    model = RecurrentPPO("CnnLstmPolicy", env)
    model.rollout_buffer = CompressedRecurrentRolloutBuffer.like(model.rollout_buffer)
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeVar

from rl_ext_core.errors import InvalidTypeError, _missing_dependency_error
from sb3_ext.compressed_buffer import atomic, atomic_start
from sb3_ext.rollout_buffers import CompressedDictRolloutBuffer, CompressedRolloutBuffer

if importlib.util.find_spec("sb3_contrib") is None:
    raise _missing_dependency_error("sb3_contrib", "contrib", "sb3_ext.contrib")

from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer

__all__ = [
    "CompressedMaskableDictRolloutBuffer",
    "CompressedMaskableRolloutBuffer",
    "CompressedRecurrentDictRolloutBuffer",
    "CompressedRecurrentRolloutBuffer",
]


_Buffer = TypeVar("_Buffer", bound="_RecurrentMixin")


class CompressedMaskableRolloutBuffer(MaskableRolloutBuffer, CompressedRolloutBuffer):
    """Compressed ``MaskableRolloutBuffer`` of sb3-contrib, with storage options."""

    _OTHER_CLASS_HINT = "Use rollout_buffer_class=CompressedMaskableDictRolloutBuffer"
    __init__ = CompressedRolloutBuffer.__init__  # has the storage options
    add, reset = atomic(MaskableRolloutBuffer.add), atomic(MaskableRolloutBuffer.reset)
    get = atomic_start(MaskableRolloutBuffer.get)


class CompressedMaskableDictRolloutBuffer(MaskableDictRolloutBuffer, CompressedDictRolloutBuffer):
    """Compressed ``MaskableDictRolloutBuffer`` of sb3-contrib, with storage options."""

    _OTHER_CLASS_HINT = "Use rollout_buffer_class=CompressedMaskableRolloutBuffer"
    __init__ = CompressedRolloutBuffer.__init__  # has the storage options
    add, reset = atomic(MaskableDictRolloutBuffer.add), atomic(MaskableDictRolloutBuffer.reset)
    get = atomic_start(MaskableDictRolloutBuffer.get)  # type: ignore[assignment]


class _RecurrentMixin:
    """Mixin that creates a compressed buffer like the one of a ``RecurrentPPO``."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        hidden_state_shape: tuple[int, int, int, int],
        *args: Any,
        **options: Any,
    ) -> None:
        self.hidden_state_shape = hidden_state_shape
        self.seq_start_indices = self.seq_end_indices = None
        spaces: Any = observation_space, action_space
        CompressedRolloutBuffer.__init__(self, buffer_size, *spaces, *args, **options)  # type: ignore[arg-type]

    @classmethod
    def like(
        cls: type[_Buffer], buffer: RecurrentRolloutBuffer | RecurrentDictRolloutBuffer, **options: Any
    ) -> _Buffer:
        """
        Create an empty buffer with the settings of a ``RecurrentPPO``'s buffer.

        :param buffer: Buffer that ``RecurrentPPO`` created
        :param options: Storage options, see :class:`CompressedRolloutBuffer`
        :return: Buffer to replace it with
        :raises InvalidTypeError: If ``buffer`` is not a buffer of ``RecurrentPPO``.
        """
        if not isinstance(buffer, (RecurrentRolloutBuffer, RecurrentDictRolloutBuffer)):
            raise InvalidTypeError(
                f"buffer is a {type(buffer).__name__}, expected that of a RecurrentPPO. Use "
                f"model.rollout_buffer = {cls.__name__}.like(model.rollout_buffer)"
            )
        return cls(
            buffer.buffer_size,
            buffer.observation_space,
            buffer.action_space,
            buffer.hidden_state_shape,
            buffer.device,
            gae_lambda=buffer.gae_lambda,
            gamma=buffer.gamma,
            n_envs=buffer.n_envs,
            **options,
        )


class CompressedRecurrentRolloutBuffer(_RecurrentMixin, RecurrentRolloutBuffer, CompressedRolloutBuffer):
    """Compressed ``RecurrentRolloutBuffer`` of sb3-contrib, with storage options."""

    _OTHER_CLASS_HINT = "Use CompressedRecurrentDictRolloutBuffer"
    add, reset = atomic(RecurrentRolloutBuffer.add), atomic(RecurrentRolloutBuffer.reset)
    get = atomic_start(RecurrentRolloutBuffer.get)


class CompressedRecurrentDictRolloutBuffer(_RecurrentMixin, RecurrentDictRolloutBuffer, CompressedDictRolloutBuffer):
    """Compressed ``RecurrentDictRolloutBuffer`` of sb3-contrib, with storage options."""

    _OTHER_CLASS_HINT = "Use CompressedRecurrentRolloutBuffer"
    add, reset = atomic(RecurrentDictRolloutBuffer.add), atomic(RecurrentDictRolloutBuffer.reset)  # type: ignore[assignment]
    get = atomic_start(RecurrentDictRolloutBuffer.get)  # type: ignore[assignment]

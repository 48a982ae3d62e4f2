"""
Compressed rollout buffers for sb3-contrib's algorithms, which this module alone needs.

``MaskablePPO`` takes its class as the others do::

    MaskablePPO("CnnPolicy", env, rollout_buffer_class=CompressedMaskableRolloutBuffer)

``RecurrentPPO`` has no such argument, so its buffer is replaced::

    model = RecurrentPPO("CnnLstmPolicy", env)
    model.rollout_buffer = CompressedRecurrentRolloutBuffer.like(model.rollout_buffer)
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeVar

from rl_ext_core.errors import InvalidTypeError, _missing_dependency_error
from sb3_ext.buffers import (
    CompressedDictRolloutBuffer,
    CompressedRolloutBuffer,
    StoreOptionsMixin,
    atomic_start,
    without_copy,
    atomic,
)

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


class CompressedMaskableRolloutBuffer(StoreOptionsMixin, MaskableRolloutBuffer, CompressedRolloutBuffer):
    """
    :class:`CompressedRolloutBuffer` in place of sb3-contrib's ``MaskableRolloutBuffer``, whose arguments it takes.

    :param options: As in :class:`CompressedRolloutBuffer`

    >>> model = MaskablePPO("CnnPolicy", env, rollout_buffer_class=CompressedMaskableRolloutBuffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "use rollout_buffer_class=CompressedMaskableDictRolloutBuffer for it"
    add, reset = atomic(MaskableRolloutBuffer.add), atomic(MaskableRolloutBuffer.reset)
    get = atomic_start(MaskableRolloutBuffer.get)
    _get_samples: Any = without_copy(MaskableRolloutBuffer._get_samples)


class CompressedMaskableDictRolloutBuffer(StoreOptionsMixin, MaskableDictRolloutBuffer, CompressedDictRolloutBuffer):
    """
    :class:`CompressedDictRolloutBuffer` in place of sb3-contrib's ``MaskableDictRolloutBuffer``, whose arguments it
    takes.

    :param options: As in :class:`CompressedDictRolloutBuffer`

    >>> model = MaskablePPO(  # doctest: +SKIP
    ...     "MultiInputPolicy", env, rollout_buffer_class=CompressedMaskableDictRolloutBuffer
    ... )
    """

    _OTHER_CLASS_HINT = "use rollout_buffer_class=CompressedMaskableRolloutBuffer for it"
    add, reset = atomic(MaskableDictRolloutBuffer.add), atomic(MaskableDictRolloutBuffer.reset)
    get = atomic_start(MaskableDictRolloutBuffer.get)  # type: ignore[assignment]
    _get_samples: Any = without_copy(MaskableDictRolloutBuffer._get_samples)


class _RecurrentMixin(StoreOptionsMixin):
    @classmethod
    def like(
        cls: type[_Buffer], buffer: RecurrentRolloutBuffer | RecurrentDictRolloutBuffer, **options: Any
    ) -> _Buffer:
        """
        An empty buffer for the same rollouts.

        :param buffer: What ``RecurrentPPO`` has made
        :param options: As in :class:`CompressedRolloutBuffer`
        :return: The buffer to put in its place
        :raises InvalidTypeError: if it is no buffer of ``RecurrentPPO``
        """
        if not isinstance(buffer, (RecurrentRolloutBuffer, RecurrentDictRolloutBuffer)):
            raise InvalidTypeError(
                f"buffer is a {type(buffer).__name__}, expected that of a RecurrentPPO; write "
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
    """
    :class:`CompressedRolloutBuffer` in place of sb3-contrib's ``RecurrentRolloutBuffer``, whose arguments it takes. The
    states of the LSTM are stored as they are.

    :param options: As in :class:`CompressedRolloutBuffer`

    >>> model = RecurrentPPO("CnnLstmPolicy", env)  # doctest: +SKIP
    >>> model.rollout_buffer = CompressedRecurrentRolloutBuffer.like(model.rollout_buffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "use CompressedRecurrentDictRolloutBuffer for it"
    add, reset = atomic(RecurrentRolloutBuffer.add), atomic(RecurrentRolloutBuffer.reset)
    get = atomic_start(RecurrentRolloutBuffer.get)
    _get_samples: Any = without_copy(RecurrentRolloutBuffer._get_samples)


class CompressedRecurrentDictRolloutBuffer(_RecurrentMixin, RecurrentDictRolloutBuffer, CompressedDictRolloutBuffer):
    """
    :class:`CompressedDictRolloutBuffer` in place of sb3-contrib's ``RecurrentDictRolloutBuffer``, whose arguments it
    takes. The states of the LSTM are stored as they are.

    :param options: As in :class:`CompressedDictRolloutBuffer`

    >>> model = RecurrentPPO("MultiInputLstmPolicy", env)  # doctest: +SKIP
    >>> model.rollout_buffer = CompressedRecurrentDictRolloutBuffer.like(model.rollout_buffer)  # doctest: +SKIP
    """

    _OTHER_CLASS_HINT = "use CompressedRecurrentRolloutBuffer for it"
    add, reset = atomic(RecurrentDictRolloutBuffer.add), atomic(RecurrentDictRolloutBuffer.reset)  # type: ignore[assignment]
    get = atomic_start(RecurrentDictRolloutBuffer.get)  # type: ignore[assignment]
    _get_samples: Any = without_copy(RecurrentDictRolloutBuffer._get_samples)

"""Search for the algorithm that creates, loads or trains with a buffer, among the calling functions.

Stable Baselines3 passes buffers neither the algorithm nor its ``gamma``, and environments not the algorithm either.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of the callers of this module, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        frame = frame.f_back  # f_locals of the first frame would contain the frame: a reference cycle
        if frame is not None and frame.f_globals is not globals():
            yield frame


def find_creating_algorithm(buffer: Any) -> tuple[OffPolicyAlgorithm | None, bool]:
    """
    Return the algorithm whose ``_setup_model`` is creating a buffer, or None.

    :param buffer: Buffer whose constructor is running
    :return: The algorithm, and whether its ``load()`` creates the buffer with the arguments of a saved model
    """
    algorithm = None
    for frame in calling_frames():
        if frame.f_locals.get("self") is buffer:
            continue
        if frame.f_code.co_name != "_setup_model":
            return algorithm, algorithm is not None and frame.f_code.co_name == "load"
        found = frame.f_locals.get("self")
        algorithm = found if isinstance(found, OffPolicyAlgorithm) else None
    return algorithm, False


def find_replaced_buffer() -> Any:
    """Return the buffer that ``load_replay_buffer`` is replacing, or None."""
    for frame in calling_frames():
        if frame.f_code.co_name == "load_replay_buffer":
            return getattr(frame.f_locals.get("self"), "replay_buffer", None)
    return None


def find_training_algorithm() -> tuple[OffPolicyAlgorithm, CodeType] | None:
    """Return the algorithm whose ``train()`` is running, and the code of that method; None if there is none."""
    for frame in calling_frames():
        if frame.f_code.co_name == "train" and isinstance(found := frame.f_locals.get("self"), OffPolicyAlgorithm):
            return found, frame.f_code
    return None

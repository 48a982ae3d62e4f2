"""Kernel that lists the new frames of a push, for a codec that encodes them in Python."""

from __future__ import annotations

from numba import int64, njit, uint64

from rl_ext_core.frames.interleave import extract_frame
from rl_ext_core.frames.kernel_primitives import are_equal, atomic_kernel, copy_frame
from rl_ext_core.frames.log_state import (
    CASES,
    FRAME_BYTES,
    N_ENVS,
    N_STACK,
    OBS_INPUT,
    OBS_ORDER,
    PADDED_BYTES,
    column_start,
    shape_of,
    uint8s,
)
from rl_ext_core.frames.log_write import (
    CONTINUED,
    MOVED,
    NEW,
    NEW_FRAME,
    OTHER_FRAME,
    REPEATED,
    continues,
    find_cases,
    is_padding,
    scratch,
    stack_bytes,
)


@njit(nogil=True)
def _follows_obs(state, c, env, shift):  # type: ignore[no-untyped-def]
    """Return whether a next observation is the observation of the same push, moved on by ``shift`` frames."""
    n_stack, n_bytes, shape = state[c + N_STACK], state[c + FRAME_BYTES], shape_of(state, c)
    start, size = env * stack_bytes(state, c), stack_bytes(state, c)
    frames = scratch(state, c, NEW_FRAME), scratch(state, c, OTHER_FRAME)
    for i in range(n_stack - shift):
        for side in range(2):
            stack = state[c + OBS_INPUT + 2 * side] + start
            extract_frame(
                uint64(stack), state[c + OBS_ORDER + 2 * side], i + (1 - side) * shift, shape, uint64(frames[side])
            )
        if not are_equal(uint64(frames[0]), uint64(frames[1]), n_bytes):
            return False
    return size > 0


@atomic_kernel
def list_new_frames(state, number, out):  # type: ignore[no-untyped-def]
    """Copy the frames that ``push`` will write for a column, in its order.

    :param number: Number of the column.
    :param out: Address of the output, with space for two stacks of each environment.
    :return: Number of frames.
    """
    find_cases(state)
    c, found = column_start(number), 0
    n_stack, n_bytes, size, shape = (
        state[c + N_STACK],
        state[c + FRAME_BYTES],
        stack_bytes(state, c),
        shape_of(state, c),
    )
    cases, frame = uint8s(state[c + CASES], state[N_ENVS]), scratch(state, c, NEW_FRAME)
    for env in range(state[N_ENVS]):
        case = int64(cases[env])
        for side in range(2):
            if (side == 0 and case != NEW) or (side == 1 and case == REPEATED):
                continue
            stack, order = state[c + OBS_INPUT + 2 * side] + env * size, state[c + OBS_ORDER + 2 * side]
            shift = 1 if case == MOVED else -1
            if case == NEW:
                for other in range(2):
                    if shift < 0 and (other == 0 or n_stack > 1):
                        follows = (
                            continues(state, c, env, stack, order, other)
                            if side == 0
                            else _follows_obs(state, c, env, other)
                        )
                        shift = other if follows else -1
            if shift == 0 and case != CONTINUED:
                continue
            depth = 0
            for i in range(n_stack - 1 if shift == 1 else 0, n_stack):
                extract_frame(uint64(stack), order, i, shape, uint64(frame))
                if depth or i == n_stack - 1 or not is_padding(frame, state[c + PADDED_BYTES]):
                    depth += 1
                    copy_frame(uint64(out + found * n_bytes), uint64(frame), n_bytes)
                    found += 1
    return found

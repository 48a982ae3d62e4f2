"""Conversion between bytes n and float32 values n/255, which ``ToTensorImage`` makes of bytes."""

from __future__ import annotations

from numba import float32, int32, uint8

from rl_ext_core.frames.kernel_primitives import kernel


@kernel
def as_bytes(floats, bits, found):  # type: ignore[no-untyped-def]
    """Write the numerators of floats, and return whether all floats are n/255 bit for bit.

    :param floats: float32 values, shape ``(n,)``.
    :param bits: The same memory as int32.
    :param found: Output, uint8 of the same shape.
    """
    is_exact = True
    for i in range(len(floats)):
        value = floats[i] if floats[i] > float32(0) else float32(0)
        value = value if value < float32(1) else float32(1)
        byte = uint8(int32(value * float32(255) + float32(0.5)))
        found[i] = byte
        # -0.0 equals 0.0, so its sign is checked.
        is_exact &= (float32(byte) / float32(255) == floats[i]) & (bits[i] >= 0)
    return is_exact


@kernel
def as_floats(numerators, found):  # type: ignore[no-untyped-def]
    """Write n/255 as float32.

    :param numerators: uint8 values, shape ``(n,)``.
    :param found: Output, float32 of the same shape.
    """
    for i in range(len(numerators)):
        found[i] = float32(numerators[i]) / float32(255)

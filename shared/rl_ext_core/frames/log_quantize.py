"""Quantized frames, for frames of a bounded error whose patches would be long, such as those of a moving camera.

Every byte is rounded to one of the values ``origin + i * (2 * bound + 1)``, so errors are within the bound. The frame
is cut into groups of ``GROUP`` bytes. For each byte, its ``i`` is stored, minus that of the byte ``above`` bytes before
it, modulo 256. In groups that begin before byte ``above``, ``i`` alone is stored. In a group with ``BY_CHANNEL``, this
difference is stored minus that of the byte ``channel`` bytes before it, because channels change at the same places.

The contents are ``[bits of each group, and BY_CHANNEL or 0: u8][planes of all groups]``. A plane has one bit for each
byte of its group. Plane ``p`` has bit ``p`` of the two's complement with that many bits. ``origin`` is half of
``255 % (2 * bound + 1)``. ``above`` is the smallest multiple of a row that is at least ``GROUP``. ``channel`` is the
size of a channel, see ``StackLayout``. Only groups that begin at byte ``above + channel`` or later have ``BY_CHANNEL``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, types, uint8, uint32, uint64
from numba.core import cgutils

from rl_ext_core.frames.kernel_primitives import (
    define_move,
    inner,
    instruction,
    load,
    load_u8,
    splat,
    store,
    store_u8,
    store_u64,
    uint8s,
)

GROUP = 64  # bytes
BY_CHANNEL = 16  # flag of a group
_PLANES = 4  # that are added at a time
_WORD = ir.VectorType(ir.IntType(8), GROUP)
_move_group = define_move(GROUP)


@instruction(types.uint64, types.uint64, types.uint8)
def _take_plane(builder: Any, group: Any, bit: Any) -> Any:
    """Return bit number ``bit`` of each byte of a group."""
    shifted = builder.lshr(load(builder, group, _WORD), splat(builder, bit, GROUP))
    return builder.bitcast(builder.trunc(shifted, ir.VectorType(ir.IntType(1), GROUP)), ir.IntType(64))


@instruction(types.void, *[types.uint64] * 4)
def _add_planes(builder: Any, target: Any, source: Any, planes: Any, amounts: Any) -> None:
    """Write a group plus ``_PLANES`` planes, the bytes of ``amounts`` times these, to another address."""
    total, zero = load(builder, source, _WORD), ir.Constant(_WORD, [0] * GROUP)
    for number in range(_PLANES):
        address = builder.add(planes, ir.Constant(planes.type, number * GROUP // 8))
        amount = builder.trunc(builder.lshr(amounts, ir.Constant(amounts.type, 8 * number)), ir.IntType(8))
        mask = builder.bitcast(load(builder, address, ir.IntType(GROUP)), ir.VectorType(ir.IntType(1), GROUP))
        total = builder.add(total, builder.select(mask, splat(builder, amount, GROUP), zero))
    store(builder, total, target)


@instruction(types.void, *[types.uint64] * 3)
def _predict_by_channel(builder: Any, target: Any, source: Any, channel: Any) -> None:
    """Write a group plus the difference of two groups, ``channel`` bytes before the target and before it."""
    change = builder.sub(*(load(builder, builder.sub(place, channel), _WORD) for place in (target, source)))
    store(builder, builder.add(load(builder, source, _WORD), change), target)


@instruction(types.uint64, *[types.uint64] * 3)
def _subtract_group(builder: Any, target: Any, group: Any, before: Any) -> Any:
    """Write the difference of two groups; return the number of planes that it needs."""
    values = builder.sub(load(builder, group, _WORD), load(builder, before, _WORD))
    store(builder, values, target)
    signs = builder.ashr(values, ir.Constant(_WORD, [7] * GROUP))
    byte, word = ir.IntType(8), ir.IntType(64)
    join, count_zeros = (
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(byte, kinds), name)
        for name, kinds in ((f"llvm.vector.reduce.or.v{GROUP}i8", [_WORD]), ("llvm.ctlz.i8", [byte, ir.IntType(1)]))
    )
    any_bit, magnitude = builder.call(join, [values]), builder.call(join, [builder.xor(values, signs)])
    zeros = builder.call(count_zeros, [magnitude, ir.Constant(ir.IntType(1), 0)])
    n_bits = builder.sub(ir.Constant(byte, 9), zeros)  # with the sign
    return builder.zext(builder.select(builder.icmp_unsigned("==", any_bit, byte(0)), byte(0), n_bits), word)


@inner
def _origin(bound):  # type: ignore[no-untyped-def]
    """Return the smallest value. It and the largest one are within the bound of 0 and 255."""
    return 255 % (2 * bound + 1) // 2


@inner
def quantize_frame(frame, n_bytes, above, channel, bound, decoded, work, out):  # type: ignore[no-untyped-def]
    """Write a quantized frame.

    :param frame: Address of the frame.
    :param n_bytes: Its size.
    :param above: Distance of a byte to the one that predicts it, at least ``GROUP``.
    :param channel: Distance to the same byte of the previous channel, at least ``GROUP``, or 0.
    :param decoded: Address for the frame that the decoder obtains.
    :param work: Address of work memory, two frames and ``3 * GROUP`` bytes.
    :param out: Address to write to, with space for a frame and ``GROUP`` bytes.
    :return: Size, or -1 if the frame itself is about as small.
    """
    step, origin, n_groups = 2 * bound + 1, _origin(bound), (n_bytes + GROUP - 1) // GROUP
    given, made, levels = uint8s(frame, n_bytes), uint8s(decoded, n_bytes), uint8s(work, n_groups * GROUP)
    changes, other = uint64(work + n_groups * GROUP), uint64(work + 2 * n_groups * GROUP)
    factor, shift = uint32((1 << 20) // step + 1), uint32(bound - origin)  # a multiplication divides exactly here
    for i in range(n_bytes):
        level = uint8((uint32(given[i]) + shift) * factor >> uint32(20))
        levels[i] = level
        made[i] = uint8(level * uint8(step) + uint8(origin))
    for i in range(n_bytes, n_groups * GROUP):
        levels[i] = levels[i - above] if (n_groups - 1) * GROUP >= above else uint8(0)
    uint8s(int64(other), GROUP)[:] = 0
    size = n_groups
    for group in range(n_groups):
        at, flag = group * GROUP, uint64(0)
        here, planes = uint64(work + at), changes + uint64(at)
        n_bits = _subtract_group(planes, here, here - uint64(above) if at >= above else other)
        if channel and at >= above + channel + GROUP and n_bits:  # all of the changes there are from above
            fewer = _subtract_group(other, planes, planes - uint64(channel))
            if fewer < n_bits:
                n_bits, planes, flag = fewer, other, uint64(BY_CHANNEL)
        if size + int64(n_bits) * (GROUP // 8) > n_bytes - n_bytes // 16:
            return -1
        store_u8(uint64(out + group), uint8(n_bits | flag))
        for bit in range(n_bits):
            store_u64(uint64(out + size), _take_plane(planes, uint8(bit)))
            size += GROUP // 8
    return size


@inner
def decode_quantized(contents, out, n_bytes, above, channel, bound):  # type: ignore[no-untyped-def]
    """Decode a quantized frame.

    :param contents: Address of what :func:`quantize_frame` wrote, with ``_PLANES * GROUP`` readable bits behind it.
    :param out: Address of the decoded frame, with ``GROUP`` writable bytes behind it.
    :param n_bytes, above, channel, bound: As for :func:`quantize_frame`.
    """
    step, n_groups = uint64(2 * bound + 1), (n_bytes + GROUP - 1) // GROUP
    planes, to, amounts = uint64(contents + n_groups), uint64(out), uint64(0)
    for bit in range(8):
        amounts |= (step << uint64(bit) & uint64(255)) << uint64(8 * bit)
    first = uint8(_origin(bound))
    for group in range(n_groups):
        n_bits = uint64(load_u8(uint64(contents + group)))
        source = to - uint64(above)
        if group * GROUP < above:
            uint8s(int64(to), GROUP)[:] = first
            source = to
        if n_bits >= uint64(BY_CHANNEL):
            n_bits -= uint64(BY_CHANNEL)
            _predict_by_channel(to, source, uint64(channel))
            source = to
        if n_bits == uint64(0):
            _move_group(to, source)
        else:
            top = uint64(8) * (n_bits - uint64(1))
            sign = (uint64(0) - (amounts >> top)) & uint64(255)  # the highest bit counts negatively
            used = amounts & ((uint64(1) << top) - uint64(1)) | sign << top
            _add_planes(to, source, planes, used)
            if n_bits > uint64(_PLANES):
                _add_planes(to, to, planes + uint64(_PLANES * GROUP // 8), used >> uint64(8 * _PLANES))
            planes += n_bits * uint64(GROUP // 8)
        to += uint64(GROUP)

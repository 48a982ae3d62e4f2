"""The bounded format: a frame within a bound, where so much has changed that a patch is long.

Each row of a frame is cut into equal groups of at most 64 bytes. A group is predicted from bytes that the decoder has
by then, and what is missing is stored in steps of ``2 * bound + 1``, which is as coarse as the bound allows. The number
of steps takes as many bits as the group's largest one needs, in planes of one bit a byte: one vector instruction
decodes a plane, in a time that hardly depends on its contents.

An entry of a block is then ``[0xFFFE: u16][independent: u8][size: u32]``, a byte a group, and the planes of all groups,
each as many bytes as a group has lanes, divided by eight: the signs first, then the bits of the numbers of steps, the
lowest first. The byte of a group is the number of those bits, or 7 for bytes as they are, and eight times one of these
predictions, modulo 256:

=  ========================================================================================================
0  the frame before
1  the row above
2  the frame before, and what has changed since then in the channel before (of a frame that lies in planes)
3  the row above, and the step from that row to this one in the channel before
=  ========================================================================================================

An independent frame uses 1 and 3 only: whoever looks for a later frame need not decode those before it. The idea is
that of near-lossless JPEG-LS (ITU-T T.87) without its entropy coder, which takes longer than copying the whole stack.

Groups are predicted and packed by vector instructions. All that a group might need is read, so there are ``GROUP``
bytes behind every region.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, njit, uint8, uint16, uint32, uint64
from numba.core import cgutils, types
from numba.extending import intrinsic

from rl_ext_core.frames.geometry import ENTRY_HEADER, GROUP
from rl_ext_core.frames.machine import (
    copy_bytes,
    lane_distances,
    load_u8,
    load_u16,
    load_u32,
    splat,
    store_u8,
    store_u16,
    store_u32,
)
from rl_ext_core.frames.patch import PACKED, append_entry, apply_entry

_BIT_PLANE = ir.IntType(GROUP)


def _load_group(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), GROUP).as_pointer()))
    value.align = 1
    return value


def _store_group(builder: Any, group: Any, address: Any) -> None:
    builder.store(group, builder.inttoptr(address, group.type.as_pointer())).align = 1


def _predict(builder: Any, first: Any, second: Any, third: Any) -> Any:
    return builder.sub(
        builder.add(_load_group(builder, first), _load_group(builder, second)), _load_group(builder, third)
    )


def _add_saturating(builder: Any, prediction: Any, by: Any, down: Any) -> Any:
    """A prediction, moved by some steps; beyond the ends of the range it stays there."""
    kind = ir.FunctionType(by.type, [by.type, by.type])
    plus, minus = (
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.sat.v{GROUP}i8") for name in ("uadd", "usub")
    )
    return builder.select(down, builder.call(minus, [prediction, by]), builder.call(plus, [prediction, by]))


def _lane_mask(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(ir.VectorType(ir.IntType(8), GROUP), list(range(GROUP)))
    return builder.icmp_unsigned("<", lanes, splat(builder, builder.trunc(count, ir.IntType(8)), GROUP))


@intrinsic  # type: ignore[untyped-decorator]
def group_distance(typingctx: Any, wanted: Any, first: Any, second: Any, third: Any, lanes: Any) -> Any:
    """How far the first ``lanes`` bytes of a group are at most from ``first + second - third``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        distance = lane_distances(builder, _load_group(builder, args[0]), _predict(builder, *args[1:4]))
        zero = ir.Constant(distance.type, [0] * GROUP)
        distance = builder.select(_lane_mask(builder, args[4]), distance, zero)
        kind = ir.FunctionType(ir.IntType(8), [distance.type])
        largest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.umax.v{GROUP}i8")
        return builder.call(largest, [distance])

    return types.uint8(*[types.uint64] * 4, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_group(
    typingctx: Any, wanted: Any, first: Any, second: Any, third: Any, made: Any, planes: Any, bound: Any, lanes: Any
) -> Any:
    """Writes to ``made`` what is unpacked later, and to ``planes`` seven planes: the signs, then six of steps."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, planes, bound, lanes = args[4:8]
        wanted, prediction = _load_group(builder, args[0]), _predict(builder, *args[1:4])
        byte = bound.type
        step = builder.add(builder.shl(bound, ir.Constant(byte, 1)), ir.Constant(byte, 1))
        start = builder.add(lane_distances(builder, wanted, prediction), splat(builder, bound, GROUP))
        rest, zero = start, ir.Constant(start.type, [0] * GROUP)
        inside = _lane_mask(builder, lanes)

        def put(number: int, plane: Any) -> None:
            address = builder.add(planes, ir.Constant(planes.type, number * GROUP // 8))
            plane = builder.bitcast(builder.and_(plane, inside), _BIT_PLANE)
            builder.store(plane, builder.inttoptr(address, _BIT_PLANE.as_pointer())).align = 1

        for number in reversed(range(6)):
            # A step so large does not fit into a byte where the bound is coarse: no distance takes it then.
            amount = builder.shl(builder.zext(step, ir.IntType(16)), ir.Constant(ir.IntType(16), number))
            fits = builder.icmp_unsigned("<", amount, ir.Constant(amount.type, 256))
            amount = splat(builder, builder.trunc(amount, byte), GROUP)
            taken = builder.and_(builder.icmp_unsigned(">=", rest, amount), splat(builder, fits, GROUP))
            rest = builder.sub(rest, builder.select(taken, amount, zero))
            put(number + 1, taken)
        down = builder.icmp_unsigned(">", prediction, wanted)
        put(0, down)
        _store_group(builder, _add_saturating(builder, prediction, builder.sub(start, rest), down), target)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 6, types.uint8, types.int64), codegen


def _make_kind_table(builder: Any, n_planes: int) -> Any:
    """For each kind of group, as numbers of 64 bits: masks of the two bits of its prediction, and of its planes."""
    rows = []
    for kind in range(32):
        bits, spatial, channel = kind & 7, kind >> 3 & 1, kind >> 4
        rows += [-spatial, -channel, *(-int(max(number, 1) <= bits) for number in range(n_planes))]
    kind = ir.ArrayType(ir.IntType(64), len(rows))
    return cgutils.global_constant(builder.module, f"rl_ext_kinds_{n_planes}", ir.Constant(kind, rows))


def _define_unpacker(most: int, *, channels: bool) -> Any:
    def unpack_frame(
        typingctx: Any,
        before: Any,
        above: Any,
        made: Any,
        row: Any,
        plane: Any,
        payload: Any,
        plane_bytes: Any,
        step: Any,
        kind: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            before, above, made, row, plane, address, plane_bytes, step, kind = args
            table, width, word = _make_kind_table(builder, most + 1), most + 3, ir.IntType(64)
            first_entry = builder.mul(kind, ir.Constant(word, width))

            def entry(number: int) -> Any:
                place = builder.add(first_entry, ir.Constant(word, number))
                return builder.load(builder.gep(table, [ir.Constant(word, 0), place]))

            def either(mask: Any, yes: Any, no: Any) -> Any:
                # No branch anywhere: it would be mispredicted too often, and LLVM makes branches of selects.
                return builder.add(no, builder.and_(mask, builder.sub(yes, no)))

            spatial, channel = entry(0), entry(1)
            first = either(spatial, above, before)
            if channels:
                previous_channel = builder.sub(either(spatial, builder.sub(made, row), before), plane)
                second, third = (
                    either(channel, builder.sub(made, plane), first),
                    either(channel, previous_channel, first),
                )
                prediction = _predict(builder, first, second, third)
            else:
                prediction = _load_group(builder, first)  # loads are what takes the time
            masks = []
            for number in range(most + 1):
                bits = builder.load(builder.inttoptr(address, _BIT_PLANE.as_pointer()))
                bits.align = 1
                # What is beyond the planes is read and not used.
                bits = builder.and_(bits, entry(2 + number))
                masks.append(builder.bitcast(bits, ir.VectorType(ir.IntType(1), GROUP)))
                address = builder.add(address, plane_bytes)
            by = zero = ir.Constant(prediction.type, [0] * GROUP)
            for number, mask in enumerate(masks[1:]):
                amount = splat(builder, builder.shl(step, ir.Constant(step.type, number)), GROUP)
                by = builder.add(by, builder.select(mask, amount, zero))
            group = _add_saturating(builder, prediction, by, masks[0])
            _store_group(builder, group, made)
            _store_group(builder, group, above)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 7, types.uint8, types.uint64), codegen

    unpack_frame.__doc__ = f"""Writes a group that has at most {most} planes of steps to ``made`` and ``above``.

    :param before: address of the group in the frame before.
    :param above: of the group above, see :func:`unpack_frame`.
    :param row: bytes of a row.
    :param plane: bytes of a channel.
    :param kind: the byte of the group{"" if channels else ", which is not predicted from the channel before"}.
    """
    return intrinsic(unpack_frame)


unpack_group_of_3 = _define_unpacker(3, channels=True)
unpack_group_of_6 = _define_unpacker(6, channels=True)
unpack_group_alone = _define_unpacker(3, channels=False)


_SIZE_BYTES = 4
_PADDING = 16  # with ``SLACK``, what is read behind the planes of the last group
_RAW = 7  # instead of a number of bits
_MAX_BITS = 6
_FEW_BITS = 3  # decoded without a look at how many they are
_SPATIAL, _CHANNEL = 1, 2  # the bits of a prediction
_SHORT_PATCH_DIVISOR = 16  # a patch that takes less than this part of a frame is kept unseen
_INDEPENDENT_BONUS_DIVISOR = 8  # an independent frame may take this part more, since it saves decoding others


@njit(nogil=True, inline="always")
def _group_sizes(geometry):  # type: ignore[no-untyped-def]
    """Groups a row, bytes a group, and bytes a plane of bits. The last group of a row may be shorter."""
    groups = (geometry.row + GROUP - 1) // GROUP
    lanes = (geometry.row + groups - 1) // groups
    return groups, lanes, (lanes + 7) // 8


@njit(nogil=True, inline="always")
def _prediction_terms(which, before, above, after, geometry):  # type: ignore[no-untyped-def]
    """Addresses of three groups of bytes: the first, plus the second, minus the third is the prediction.

    :param before: address of the group in the frame before.
    :param above: of the one above it in this frame.
    :param after: of the group itself.
    """
    spatial, channel = which & _SPATIAL, which & _CHANNEL
    first = above if spatial else before
    second = after - uint64(geometry.plane) if channel else first
    third = (after - uint64(geometry.row) if spatial else before) - uint64(geometry.plane) if channel else first
    return first, second, third


@njit(nogil=True, inline="always")
def _can_predict(which, at, geometry):  # type: ignore[no-untyped-def]
    """Whether the bytes that a prediction needs come before the group at ``at``."""
    if which & _CHANNEL and geometry.plane == 0:
        return False
    needed = (geometry.row if which & _SPATIAL else 0) + (geometry.plane if which & _CHANNEL else 0)
    return at >= needed


@njit(nogil=True, inline="always")
def _bits_for_distance(distance, bound):  # type: ignore[no-untyped-def]
    """How many bits the number of steps up to a distance takes; ``_RAW`` where there are too many."""
    if distance + bound > 255:
        return _RAW
    steps, bits = (distance + bound) // (2 * bound + 1), 0
    while steps > 0:
        bits += 1
        steps >>= 1
    return bits if bits <= _MAX_BITS else _RAW


@njit(nogil=True, inline="always")
def _payload_size(bits, lanes, plane_bytes):  # type: ignore[no-untyped-def]
    planes = bits + 1 if bits > 0 else 0
    return planes * plane_bytes if bits != _RAW else lanes


@njit(nogil=True)
def _best_prediction(frame, before, after, at, lanes, independent, geometry):  # type: ignore[no-untyped-def]
    """The prediction that is least far off, and how far that is; 256 where none is possible."""
    best, smallest = 0, 256
    for which in range(1 if independent else 0, 4, 2 if independent else 1):
        if _can_predict(which, at, geometry):
            here = after + uint64(at)
            a, b, c = _prediction_terms(which, before + uint64(at), here - uint64(geometry.row), here, geometry)
            distance = int64(group_distance(frame + uint64(at), a, b, c, lanes))
            if distance < smallest:
                best, smallest = which, distance
    return best, smallest


@njit(nogil=True)
def _pack_frame(frame, before, after, out, planes, limit, independent, geometry):  # type: ignore[no-untyped-def]
    """Writes a packed frame without its header, and to ``after`` what the decoder makes of it.

    All regions have ``GROUP`` bytes behind them.

    :param planes: address of room for the planes of a group.
    :return: its bytes, or -1 once they would exceed ``limit``.
    """
    n_bytes, bound = geometry.frame_bytes, geometry.max_error
    groups, most_lanes, plane_bytes = _group_sizes(geometry)
    payload = n_bytes // geometry.row * groups
    group = 0
    for row in range(0, n_bytes, geometry.row):
        for start in range(0, geometry.row, most_lanes):
            at, lanes = row + start, min(most_lanes, geometry.row - start)
            best, distance = _best_prediction(frame, before, after, at, lanes, independent, geometry)
            bits = _bits_for_distance(distance, bound)
            size = _payload_size(bits, most_lanes, plane_bytes)
            if payload + size + _PADDING > limit:
                return -1
            here, target = after + uint64(at), out + uint64(payload)
            if bits == _RAW:
                best = 0
                copy_bytes(target, frame + uint64(at), most_lanes)
                copy_bytes(here, frame + uint64(at), most_lanes)
            else:
                a, b, c = _prediction_terms(best, before + uint64(at), here - uint64(geometry.row), here, geometry)
                pack_group(frame + uint64(at), a, b, c, here, planes, uint8(bound), lanes)
                for plane in range(size // plane_bytes):
                    copy_bytes(target + uint64(plane * plane_bytes), planes + uint64(plane * GROUP // 8), plane_bytes)
            store_u8(out + uint64(group), uint8(bits | (best << 3)))
            payload += size
            group += 1
    for i in range(_PADDING):
        store_u8(out + uint64(payload + i), uint8(0))
    return payload + _PADDING


@njit(nogil=True)
def unpack_frame(before, contents, after, above, geometry):  # type: ignore[no-untyped-def]
    """Writes to ``after`` the frame that a packed entry makes of the frame ``before``.

    Both are different regions with ``GROUP`` bytes behind them; ``before`` does not matter to an independent frame.

    :param above: address of room for a row, with ``GROUP`` bytes for each group. Read from ``after``, a group of the
        row above would wait until the two groups that it overlaps have left the processor's queue of stores.
    """
    step = uint8(2 * geometry.max_error + 1)
    above = (above + uint64(GROUP - 1)) & ~uint64(GROUP - 1)
    row, plane = uint64(geometry.row), uint64(geometry.plane)
    groups, lanes, plane_bytes = _group_sizes(geometry)
    rows, n_plane = geometry.frame_bytes // geometry.row, uint64(plane_bytes)
    kinds = contents + uint64(_SIZE_BYTES)
    payload = kinds + uint64(rows * groups)
    at = uint64(0)
    for _ in range(rows):
        here, slot, end = after + at, above, kinds + uint64(groups)
        while kinds < end:
            kind = uint64(load_u8(kinds))
            bits = kind & uint64(7)
            if bits <= uint64(_FEW_BITS) and plane == uint64(0):
                unpack_group_alone(before + (here - after), slot, here, row, plane, payload, n_plane, step, kind)
                payload += (bits + min(bits, uint64(1))) * n_plane
            elif bits <= uint64(_FEW_BITS):
                unpack_group_of_3(before + (here - after), slot, here, row, plane, payload, n_plane, step, kind)
                payload += (bits + min(bits, uint64(1))) * n_plane
            elif bits == uint64(_RAW):
                copy_bytes(here, payload, lanes)
                copy_bytes(slot, payload, lanes)
                payload += uint64(lanes)
            else:
                unpack_group_of_6(before + (here - after), slot, here, row, plane, payload, n_plane, step, kind)
                payload += (bits + uint64(1)) * n_plane
            kinds += uint64(1)
            here += uint64(lanes)
            slot += uint64(GROUP)
        at += row


@njit(nogil=True, inline="always")
def is_packed(entry):  # type: ignore[no-untyped-def]
    """Whether an entry is a packed frame."""
    return load_u16(entry) == PACKED


@njit(nogil=True, inline="always")
def packed_size(entry):  # type: ignore[no-untyped-def]
    """Size of a packed entry's contents, and whether it is independent of the frame before."""
    contents = entry + uint64(ENTRY_HEADER)
    return int64(load_u32(contents)) + _SIZE_BYTES, load_u8(entry + uint64(2)) != uint8(0)


@njit(nogil=True)
def _append_packed(newest, frame, out, scratch, stride, limit, geometry):  # type: ignore[no-untyped-def]
    """Writes a packed entry of at most ``limit`` bytes at ``out``, and what it makes to ``newest``.

    :return: its size, or -1 where nothing is written because it is not that short.
    """
    n_bytes, planes, wanted, before = geometry.frame_bytes, scratch, scratch + stride, scratch + 2 * stride
    after, data = before + stride, before + 2 * stride
    other_after, other_data = data + stride, data + 2 * stride
    copy_bytes(wanted, frame, n_bytes)
    copy_bytes(before, newest, n_bytes)
    limit -= ENTRY_HEADER + _SIZE_BYTES
    used = _pack_frame(wanted, before, after, data, planes, limit, int64(1), geometry)
    independent = used >= 0
    if independent:
        limit = used - used // _INDEPENDENT_BONUS_DIVISOR
    shorter = _pack_frame(wanted, before, other_after, other_data, planes, limit, int64(0), geometry)
    if shorter >= 0:
        used, independent, after, data = shorter, False, other_after, other_data
    if used < 0:
        return -1
    store_u16(out, uint16(PACKED))
    store_u8(out + uint64(2), uint8(1 if independent else 0))
    store_u32(out + uint64(ENTRY_HEADER), uint32(used))
    copy_bytes(out + uint64(ENTRY_HEADER + _SIZE_BYTES), data, used)
    copy_bytes(newest, after, n_bytes)
    return ENTRY_HEADER + _SIZE_BYTES + used


@njit(nogil=True)
def append_bounded_entry(newest, frame, out, scratch, stride, geometry):  # type: ignore[no-untyped-def]
    """Writes one entry of a frame within the bound at ``out``: a patch, or a packed frame where that is shorter.

    :param newest: address of what the decoder has; what it will have is written there.
    :param scratch: address of ``SCRATCH_FRAMES`` regions that are ``stride`` bytes apart: a frame and ``GROUP`` more.
    :return: the entry's size.
    """
    n_bytes = geometry.frame_bytes
    size = append_entry(newest, frame, n_bytes, out, scratch, geometry.max_error)
    if size > n_bytes // _SHORT_PATCH_DIVISOR:
        packed = _append_packed(newest, frame, out, scratch, uint64(stride), size - 1, geometry)
        if packed >= 0:
            return packed
    made, _ = apply_entry(newest, out, n_bytes, newest)
    if made != newest:
        copy_bytes(newest, made, n_bytes)
    return size

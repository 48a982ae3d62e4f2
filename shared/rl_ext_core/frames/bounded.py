"""Packed frames, the near-lossless format for frames whose patch would be long.

Each row of a frame is cut into equal groups of at most 64 bytes. The encoder predicts a group from bytes that the
decoder already has. It stores the difference in steps of ``2 * bound + 1``, the coarsest that the bound allows.
All step counts of a group take as many bits as its largest one. They are stored as bit planes, one bit per byte.
One vector instruction decodes a plane, in a time that hardly depends on its contents.

An entry of a block is ``[0xFFFE: u16][independent: u8][size: u32]``, one byte per group, and the bit planes of all
groups. A plane has one bit for each byte of its group. The plane of signs comes first, then the bits of the step
counts, the lowest first. The byte of a group is the number of those bits plus eight times its prediction. The number
is 7 if the group's bytes are stored uncompressed. Predictions are modulo 256:

- 0: the previous frame
- 1: the row above
- 2: the previous frame, plus the change since then in the previous channel (only channel-first frames)
- 3: the row above, plus the step from that row to this one in the previous channel

An independent frame uses predictions 1 and 3 only, so later frames can be decoded without the frames before it. The
method is near-lossless JPEG-LS (ITU-T T.87) without its entropy coder, which is slower than copying the whole stack.

The kernels read whole vectors, so callers must keep ``GROUP`` readable bytes behind every region.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, njit, uint8, uint16, uint32, uint64
from numba.core import cgutils, types
from numba.extending import intrinsic

from rl_ext_core.frames.geometry import ENTRY_HEADER, GROUP
from rl_ext_core.frames.kernel_primitives import (
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
    """Emit code that loads a group of bytes from an address, as a vector."""
    value = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), GROUP).as_pointer()))
    value.align = 1
    return value


def _store_group(builder: Any, group: Any, address: Any) -> None:
    """Emit code that stores a vector of bytes at an address."""
    builder.store(group, builder.inttoptr(address, group.type.as_pointer())).align = 1


def _predict(builder: Any, first: Any, second: Any, third: Any) -> Any:
    """Emit code that computes first + second - third, from the groups at three addresses."""
    return builder.sub(
        builder.add(_load_group(builder, first), _load_group(builder, second)), _load_group(builder, third)
    )


def _add_saturating(builder: Any, prediction: Any, by: Any, down: Any) -> Any:
    """Emit code that adds ``by``, or subtracts it where ``down`` is set, and clips to 0…255."""
    kind = ir.FunctionType(by.type, [by.type, by.type])
    plus, minus = (
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.sat.v{GROUP}i8") for name in ("uadd", "usub")
    )
    return builder.select(down, builder.call(minus, [prediction, by]), builder.call(plus, [prediction, by]))


def _lane_mask(builder: Any, count: Any) -> Any:
    """Emit code that makes a mask of the first ``count`` bytes of a group."""
    lanes = ir.Constant(ir.VectorType(ir.IntType(8), GROUP), list(range(GROUP)))
    return builder.icmp_unsigned("<", lanes, splat(builder, builder.trunc(count, ir.IntType(8)), GROUP))


@intrinsic  # type: ignore[untyped-decorator]
def group_distance(typingctx: Any, wanted: Any, first: Any, second: Any, third: Any, lanes: Any) -> Any:
    """Return the largest distance of ``lanes`` bytes from ``first + second - third``."""

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
    """Write a decoded group to ``made`` and its bit planes to ``planes``.

    There are seven planes: the signs, then six of step counts.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, planes, bound, lanes = args[4:8]
        wanted, prediction = _load_group(builder, args[0]), _predict(builder, *args[1:4])
        byte = bound.type
        step = builder.add(builder.shl(bound, ir.Constant(byte, 1)), ir.Constant(byte, 1))
        start = builder.add(lane_distances(builder, wanted, prediction), splat(builder, bound, GROUP))
        rest, zero = start, ir.Constant(start.type, [0] * GROUP)
        inside = _lane_mask(builder, lanes)

        def store_plane(number: int, plane: Any) -> None:
            """Emit code that stores the bit plane with that number."""
            address = builder.add(planes, ir.Constant(planes.type, number * GROUP // 8))
            plane = builder.bitcast(builder.and_(plane, inside), _BIT_PLANE)
            builder.store(plane, builder.inttoptr(address, _BIT_PLANE.as_pointer())).align = 1

        for number in reversed(range(6)):
            # With a coarse bound this step exceeds a byte, and then it exceeds every distance too.
            amount = builder.shl(builder.zext(step, ir.IntType(16)), ir.Constant(ir.IntType(16), number))
            fits = builder.icmp_unsigned("<", amount, ir.Constant(amount.type, 256))
            amount = splat(builder, builder.trunc(amount, byte), GROUP)
            taken = builder.and_(builder.icmp_unsigned(">=", rest, amount), splat(builder, fits, GROUP))
            rest = builder.sub(rest, builder.select(taken, amount, zero))
            store_plane(number + 1, taken)
        down = builder.icmp_unsigned(">", prediction, wanted)
        store_plane(0, down)
        _store_group(builder, _add_saturating(builder, prediction, builder.sub(start, rest), down), target)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 6, types.uint8, types.int64), codegen


def _make_kind_table(builder: Any, n_planes: int) -> Any:
    """Add a constant table to the machine code, with 64-bit masks for each kind of group.

    Each row has masks for the two flags of the prediction, then one for each bit plane.
    """
    rows = []
    for kind in range(32):
        bits, spatial, channel = kind & 7, kind >> 3 & 1, kind >> 4
        rows += [-spatial, -channel, *(-int(max(number, 1) <= bits) for number in range(n_planes))]
    kind = ir.ArrayType(ir.IntType(64), len(rows))
    return cgutils.global_constant(builder.module, f"rl_ext_kinds_{n_planes}", ir.Constant(kind, rows))


def _define_unpacker(most: int, *, channels: bool) -> Any:
    """Define a kernel function that decodes a group with at most ``most`` bits per byte."""

    def unpack_group(
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
        """Write a group that has at most ``most`` bits per step count to ``made`` and ``above``.

        :param before: Address of the group in the previous frame
        :param above: Address of the group above, see :func:`unpack_frame`
        :param row: Bytes per row
        :param plane: Bytes per channel
        :param kind: Byte of the group, which is predicted from the previous channel only if ``channels``
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            before, above, made, row, plane, address, plane_bytes, step, kind = args
            table, width, word = _make_kind_table(builder, most + 1), most + 3, ir.IntType(64)
            first_entry = builder.mul(kind, ir.Constant(word, width))

            def load_mask(number: int) -> Any:
                """Emit code that loads a mask from the table's row for the group's kind."""
                place = builder.add(first_entry, ir.Constant(word, number))
                return builder.load(builder.gep(table, [ir.Constant(word, 0), place]))

            def choose(mask: Any, yes: Any, no: Any) -> Any:
                """Emit code that gives ``yes`` if the mask is set, else ``no``."""
                # Masks instead of selects: LLVM turns selects into branches, which are mispredicted too often.
                return builder.add(no, builder.and_(mask, builder.sub(yes, no)))

            spatial, channel = load_mask(0), load_mask(1)
            first = choose(spatial, above, before)
            if channels:
                previous_channel = builder.sub(choose(spatial, builder.sub(made, row), before), plane)
                second, third = (
                    choose(channel, builder.sub(made, plane), first),
                    choose(channel, previous_channel, first),
                )
                prediction = _predict(builder, first, second, third)
            else:
                prediction = _load_group(builder, first)  # one load instead of three: loads dominate the time
            masks = []
            for number in range(most + 1):
                bits = builder.load(builder.inttoptr(address, _BIT_PLANE.as_pointer()))
                bits.align = 1
                # Bits behind the last plane are loaded too, and masked out here.
                bits = builder.and_(bits, load_mask(2 + number))
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

    return intrinsic(unpack_group)


unpack_group_of_3 = _define_unpacker(3, channels=True)
unpack_group_of_6 = _define_unpacker(6, channels=True)
unpack_group_alone = _define_unpacker(3, channels=False)


_SIZE_BYTES = 4
_PADDING = 16  # bytes behind the last group's planes, because the decoder reads whole vectors
_RAW = 7  # the number of bits of a group whose bytes are stored uncompressed
_MAX_BITS = 6
_FEW_BITS = 3  # up to this many bits, one instruction sequence decodes every group
_SPATIAL, _CHANNEL = 1, 2  # flags in the number of a prediction
_SHORT_PATCH_DIVISOR = 16  # a patch below 1/16 of the frame is stored without trying a packed frame
_INDEPENDENT_BONUS_DIVISOR = 8  # an independent frame may be 1/8 longer, because it saves decoding others


@njit(nogil=True, inline="always")
def _group_sizes(geometry):  # type: ignore[no-untyped-def]
    """Return groups per row, bytes per group, and bytes per bit plane.

    The last group of a row may be shorter.
    """
    groups = (geometry.row + GROUP - 1) // GROUP
    lanes = (geometry.row + groups - 1) // groups
    return groups, lanes, (lanes + 7) // 8


@njit(nogil=True, inline="always")
def _prediction_terms(which, before, above, after, geometry):  # type: ignore[no-untyped-def]
    """Return the addresses of the three groups of a prediction: first + second - third.

    :param before: Address of the group in the previous frame
    :param above: Address of the group above it in this frame
    :param after: Address of the group itself
    """
    spatial, channel = which & _SPATIAL, which & _CHANNEL
    first = above if spatial else before
    second = after - uint64(geometry.plane) if channel else first
    third = (after - uint64(geometry.row) if spatial else before) - uint64(geometry.plane) if channel else first
    return first, second, third


@njit(nogil=True, inline="always")
def _can_predict(which, at, geometry):  # type: ignore[no-untyped-def]
    """Return whether the bytes that a prediction needs precede the group at ``at``."""
    if which & _CHANNEL and geometry.plane == 0:
        return False
    needed = (geometry.row if which & _SPATIAL else 0) + (geometry.plane if which & _CHANNEL else 0)
    return at >= needed


@njit(nogil=True, inline="always")
def _bits_for_distance(distance, bound):  # type: ignore[no-untyped-def]
    """Return the number of bits for a distance's step count; ``_RAW`` if there are too many."""
    if distance + bound > 255:
        return _RAW
    steps, bits = (distance + bound) // (2 * bound + 1), 0
    while steps > 0:
        bits += 1
        steps >>= 1
    return bits if bits <= _MAX_BITS else _RAW


@njit(nogil=True, inline="always")
def _payload_size(bits, lanes, plane_bytes):  # type: ignore[no-untyped-def]
    """Return the bytes that a group takes with this number of bits per step count."""
    planes = bits + 1 if bits > 0 else 0
    return planes * plane_bytes if bits != _RAW else lanes


@njit(nogil=True)
def _best_prediction(frame, before, after, at, lanes, independent, geometry):  # type: ignore[no-untyped-def]
    """Return the best prediction and its largest distance, or 256 if there is no prediction."""
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
    """Write a packed frame without its header to ``out``, and the decoded frame to ``after``.

    All regions have ``GROUP`` bytes behind them.

    :param planes: Address of a scratch buffer for the planes of one group
    :return: Size in bytes, or -1 once it would exceed ``limit``
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
    """Decode a packed entry against the frame ``before``, and write the result to ``after``.

    The two regions must not overlap, and both have ``GROUP`` bytes behind them. Independent frames ignore ``before``.

    :param above: Address of a scratch buffer for one row, with ``GROUP`` bytes per group. It avoids a stall: loads
        from ``after`` would wait until the processor has stored the two groups that they overlap.
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
    """Return whether an entry is a packed frame."""
    return load_u16(entry) == PACKED


@njit(nogil=True, inline="always")
def packed_size(entry):  # type: ignore[no-untyped-def]
    """Return the size of a packed entry's contents, and whether it is independent."""
    contents = entry + uint64(ENTRY_HEADER)
    return int64(load_u32(contents)) + _SIZE_BYTES, load_u8(entry + uint64(2)) != uint8(0)


@njit(nogil=True)
def _append_packed(newest, frame, out, scratch, stride, limit, geometry):  # type: ignore[no-untyped-def]
    """Write a packed entry to ``out``, and the decoded frame to ``newest``.

    :return: Size of the entry, or -1 if it would be longer; nothing is written then
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
    """Write one entry to ``out``: a patch, or a packed frame if that is shorter.

    :param newest: Address of the decoder's newest frame; it is replaced by the newly decoded one
    :param scratch: Address of ``SCRATCH_FRAMES`` buffers, ``stride`` bytes apart, each for a frame and ``GROUP`` bytes
    :return: Size of the entry
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

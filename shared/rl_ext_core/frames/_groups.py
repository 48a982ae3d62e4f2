"""Groups of up to 64 bytes, predicted and packed by vector instructions; see ``_packed``, which names what they do.

Addresses are ``uint64`` and nothing is checked, as in ``_memory``. All that a group might need is read, so there are
``GROUP`` bytes behind every region.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from rl_ext_core.frames._memory import distance_of, splat
from rl_ext_core.frames._state import GROUP

_BIT_PLANE = ir.IntType(GROUP)


def _group(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), GROUP).as_pointer()))
    value.align = 1
    return value


def _store_group(builder: Any, group: Any, address: Any) -> None:
    builder.store(group, builder.inttoptr(address, group.type.as_pointer())).align = 1


def _prediction(builder: Any, first: Any, second: Any, third: Any) -> Any:
    return builder.sub(builder.add(_group(builder, first), _group(builder, second)), _group(builder, third))


def _moved(builder: Any, prediction: Any, by: Any, down: Any) -> Any:
    """A prediction, moved by some steps; beyond the ends of the range it stays there."""
    kind = ir.FunctionType(by.type, [by.type, by.type])
    plus, minus = (
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.sat.v{GROUP}i8") for name in ("uadd", "usub")
    )
    return builder.select(down, builder.call(minus, [prediction, by]), builder.call(plus, [prediction, by]))


def _first_lanes(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(ir.VectorType(ir.IntType(8), GROUP), list(range(GROUP)))
    return builder.icmp_unsigned("<", lanes, splat(builder, builder.trunc(count, ir.IntType(8)), GROUP))


@intrinsic  # type: ignore[untyped-decorator]
def group_distance(typingctx: Any, wanted: Any, first: Any, second: Any, third: Any, lanes: Any) -> Any:
    """How far the first ``lanes`` bytes of a group are at most from ``first + second - third``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        distance = distance_of(builder, _group(builder, args[0]), _prediction(builder, *args[1:4]))
        zero = ir.Constant(distance.type, [0] * GROUP)
        distance = builder.select(_first_lanes(builder, args[4]), distance, zero)
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
        wanted, prediction = _group(builder, args[0]), _prediction(builder, *args[1:4])
        byte = bound.type
        step = builder.add(builder.shl(bound, ir.Constant(byte, 1)), ir.Constant(byte, 1))
        start = builder.add(distance_of(builder, wanted, prediction), splat(builder, bound, GROUP))
        rest, zero = start, ir.Constant(start.type, [0] * GROUP)
        inside = _first_lanes(builder, lanes)

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
        _store_group(builder, _moved(builder, prediction, builder.sub(start, rest), down), target)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 6, types.uint8, types.int64), codegen


def _kinds_table(builder: Any, n_planes: int) -> Any:
    """For each kind of group, as numbers of 64 bits: masks of the two bits of its prediction, and of its planes."""
    rows = []
    for kind in range(32):
        bits, spatial, channel = kind & 7, kind >> 3 & 1, kind >> 4
        rows += [-spatial, -channel, *(-int(max(number, 1) <= bits) for number in range(n_planes))]
    kind = ir.ArrayType(ir.IntType(64), len(rows))
    return cgutils.global_constant(builder.module, f"rl_ext_kinds_{n_planes}", ir.Constant(kind, rows))


def _unpacker(most: int, *, channels: bool) -> Any:
    def unpack(
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
            table, width, word = _kinds_table(builder, most + 1), most + 3, ir.IntType(64)
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
                beside = builder.sub(either(spatial, builder.sub(made, row), before), plane)
                second, third = either(channel, builder.sub(made, plane), first), either(channel, beside, first)
                prediction = _prediction(builder, first, second, third)
            else:
                prediction = _group(builder, first)  # loads are what takes the time
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
            group = _moved(builder, prediction, by, masks[0])
            _store_group(builder, group, made)
            _store_group(builder, group, above)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 7, types.uint8, types.uint64), codegen

    unpack.__doc__ = f"""Writes a group that has at most {most} planes of steps to ``made`` and ``above``.

    :param before: address of the group in the frame before.
    :param above: of the group above, see ``_packed``.
    :param row: bytes of a row.
    :param plane: bytes of a channel.
    :param kind: the byte of the group{"" if channels else ", which is not predicted from the channel before"}.
    """
    return intrinsic(unpack)


unpack_group_of_3 = _unpacker(3, channels=True)
unpack_group_of_6 = _unpacker(6, channels=True)
unpack_group_alone = _unpacker(3, channels=False)

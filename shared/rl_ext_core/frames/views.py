"""Pointer types through which kernels access the arrays of a pool.

A numba array consists of its owner, shape and strides. A tuple of fifteen arrays has over a hundred values, which each
function that receives it unpacks. That took half of the compilation time.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from numba import njit, types, uint64
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from rl_ext_core.frames.arrays import PoolArrays
from rl_ext_core.frames.geometry import Geometry


class _Table(types.Type):  # type: ignore[misc]
    """Numba type of a pointer to a table, with the number of columns. Indices are not checked."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Table({dtype})")


@register_model(_Table)
class _TableModel(models.StructModel):  # type: ignore[misc]
    """Structure that compiled code uses for a :class:`_Table`: address and number of columns."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("start", types.CPointer(kind.dtype)), ("width", types.int64)])


_PLACE = types.UniTuple(types.int64, 2)


@infer_global(operator.getitem)
class _GetItemTemplate(AbstractTemplate):  # type: ignore[misc]
    """Rule for numba: ``table[row, column]`` has the dtype of the table."""

    def generic(self, args: Any, kws: Any) -> Any:
        return signature(args[0].dtype, args[0], _PLACE) if isinstance(args[0], _Table) else None


@infer_global(operator.setitem)
class _SetItemTemplate(AbstractTemplate):  # type: ignore[misc]
    """Rule for numba: ``table[row, column] = value`` is allowed."""

    def generic(self, args: Any, kws: Any) -> Any:
        return signature(types.none, args[0], _PLACE, args[0].dtype) if isinstance(args[0], _Table) else None


def _element_pointer(context: Any, builder: Any, kind: Any, table: Any, row: Any, column: Any) -> Any:
    """Emit code that computes the address of an element of a table."""
    view = cgutils.create_struct_proxy(kind)(context, builder, value=table)
    return builder.gep(view.start, [builder.add(builder.mul(row, view.width), column)])


@lower_builtin(operator.getitem, _Table, types.UniTuple)  # type: ignore[untyped-decorator]
def _load_element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Emit code for ``table[row, column]``."""
    return builder.load(
        _element_pointer(context, builder, signature.args[0], args[0], *cgutils.unpack_tuple(builder, args[1], 2))
    )


@lower_builtin(operator.setitem, _Table, types.UniTuple, types.Integer)  # type: ignore[untyped-decorator]
def _store_element(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Emit code for ``table[row, column] = value``."""
    place = cgutils.unpack_tuple(builder, args[1], 2)
    builder.store(args[2], _element_pointer(context, builder, signature.args[0], args[0], *place))
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def address_in(typingctx: Any, table: Any, row: Any) -> Any:
    """Return the address of a row of a table."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = args[1].type(0)
        place = _element_pointer(context, builder, signature.args[0], args[0], args[1], first)
        return builder.ptrtoint(place, args[1].type)

    return types.uint64(table, types.int64), codegen


def _table_constructor(dtype: Any) -> Any:
    """Define a kernel function that makes a table of this dtype from an address."""

    def table(typingctx: Any, address: Any, width: Any) -> Any:
        """Return the table at an address, with ``width`` columns."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = cgutils.create_struct_proxy(signature.return_type)(context, builder)
            view.start = builder.inttoptr(args[0], view.start.type)
            view.width = args[1]
            return view._getvalue()

        return _Table(dtype)(types.uint64, types.int64), codegen

    return intrinsic(table)


def _pointer_constructor(dtype: Any) -> Any:
    """Define a kernel function that makes a pointer of this dtype from an address."""

    def pointer(typingctx: Any, address: Any) -> Any:
        """Return an address as a pointer."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.uint64), codegen

    return intrinsic(pointer)


_bytes, _words, _numbers = (_pointer_constructor(dtype) for dtype in (types.uint8, types.uint32, types.int64))
_byte_rows, _word_rows, _number_rows = (_table_constructor(dtype) for dtype in (types.uint8, types.uint32, types.int64))


class PoolPointers(NamedTuple):
    """Pointers to the arrays of :class:`PoolArrays`, and the addresses of grains and references."""

    head: Any
    blocks: Any
    sums: Any
    free_blocks: Any
    unsealed: Any
    filled: Any
    edges: Any
    users: Any
    reference_sums: Any
    free_references: Any
    streams: Any
    last: Any
    frame: Any
    open: Any
    entry_sums: Any
    has_checksums: int  # whether there are checksums
    most_streams: int
    open_bytes: int  # width of ``open``
    block_frames: int  # width of ``entry_sums``
    grains: int  # address of the first grain
    grain_bytes: int
    references: int  # address of the first reference
    reference_bytes: int  # bytes from one reference to the next


_N_GEOMETRY = len(Geometry._fields)
_N_ARRAYS = len(PoolArrays._fields)
_FIELD = {name: _N_GEOMETRY + 3 * number for number, name in enumerate(PoolArrays._fields)}
_BLOCKS, _SUMS, _STREAMS, _LAST = _FIELD["blocks"], _FIELD["sums"], _FIELD["streams"], _FIELD["last"]
_HEAD, _FREE_BLOCKS, _UNSEALED, _FILLED = (_FIELD[name] for name in ("head", "free_blocks", "unsealed", "filled"))
_EDGES, _USERS, _REFERENCE_SUMS = _FIELD["edges"], _FIELD["users"], _FIELD["reference_sums"]
_FREE_REFERENCES, _FRAME, _OPEN = _FIELD["free_references"], _FIELD["frame"], _FIELD["open"]
_ENTRY_SUMS, _STARTS = _FIELD["entry_sums"], _N_GEOMETRY + 3 * _N_ARRAYS


@njit(nogil=True)
def geometry_in(state):  # type: ignore[no-untyped-def]
    """Return the sizes of the observation layout that a kernel state contains."""
    return Geometry(
        state[0],
        state[1],
        state[2],
        state[3],
        state[4],
        state[5],
        state[6],
        state[7],
        state[8],
        state[9],
        state[10],
        state[11],
    )


@njit(nogil=True)
def pool_in(state):  # type: ignore[no-untyped-def]
    """Return the pointers to a pool's arrays that a kernel state contains."""
    return PoolPointers(
        _numbers(uint64(state[_HEAD])),
        _word_rows(uint64(state[_BLOCKS]), state[_BLOCKS + 2]),
        _word_rows(uint64(state[_SUMS]), state[_SUMS + 2]),
        _words(uint64(state[_FREE_BLOCKS])),
        _words(uint64(state[_UNSEALED])),
        _words(uint64(state[_FILLED])),
        _bytes(uint64(state[_EDGES])),
        _words(uint64(state[_USERS])),
        _words(uint64(state[_REFERENCE_SUMS])),
        _words(uint64(state[_FREE_REFERENCES])),
        _number_rows(uint64(state[_STREAMS]), state[_STREAMS + 2]),
        _byte_rows(uint64(state[_LAST]), state[_LAST + 2]),
        _byte_rows(uint64(state[_FRAME]), state[_FRAME + 2]),
        _byte_rows(uint64(state[_OPEN]), state[_OPEN + 2]),
        _word_rows(uint64(state[_ENTRY_SUMS]), state[_ENTRY_SUMS + 2]),
        state[_SUMS + 1],
        state[_STREAMS + 1],
        state[_OPEN + 2],
        state[_ENTRY_SUMS + 2],
        uint64(state[_STARTS]),
        state[_STARTS + 1],
        uint64(state[_STARTS + 2]),
        state[_STARTS + 3],
    )

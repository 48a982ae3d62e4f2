"""Building blocks of the compiled kernels: compilation, memory access, checksums.

The kernels follow pointers across slabs that grow one by one, which a typed array cannot express. They read eight bytes
at any alignment, which NumPy indexing cannot do without a temporary array. Addresses are ``uint64``, and are not
checked. Callers keep 16 readable and writable bytes behind every region, because short runs are moved in whole words.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import int64, njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_logger = logging.getLogger("rl_ext_core.frames")

_cache_failures: list[str] = []  # the reason that was logged, if any


def sources_digest(folder: Path) -> str:
    """Return a hash of the source files of a folder that use numba, which all may end up in the machine code."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        source = path.read_bytes()
        if b"numba" in source:
            digest.update(source)
    return digest.hexdigest()


_OPTIONS: dict[str, Any] = {"no_cfunc_wrapper": True, "no_rewrites": True, "error_model": "numpy"}
_DIGEST = sources_digest(Path(__file__).parent)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, without the GIL and with cached machine code."""
    return _compile(function, nogil=True)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call.

    Without what Python calls, compilation takes two thirds of the time. Pass no literal numbers, because each one would
    be compiled separately.
    """
    return njit(no_cpython_wrapper=True, _nrt=False, **_OPTIONS)(function)


def specialize(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call, without the branches that an argument of None excludes."""
    return njit(no_cpython_wrapper=True, _nrt=False, **{**_OPTIONS, "no_rewrites": False})(function)


def atomic_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, with the GIL, so that no other thread or signal handler interrupts it."""
    return _compile(function, nogil=False)


def _compile(function: Callable[..., Any], *, nogil: bool) -> Any:
    """Compile a function with cached machine code.

    numba's cache checks only the modification time of the function's own file. These functions inline others from other
    files, and all files of a wheel have one modification time. So the cache key is a hash of all files of the folder.
    """
    try:
        compiled = njit(nogil=nogil, cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # no folder is writable, as in containers whose user has no home
        if "cannot cache" not in str(error):
            raise
        _warn_once_not_cached(str(error))
        return njit(nogil=nogil)(function)
    cache = compiled._cache
    cache._cache_file._source_stamp = (cache._cache_file._source_stamp, _DIGEST)
    # numba has this hook to ignore file errors, but uses it on Windows only.
    cache._guard_against_spurious_io_errors = _ignore_file_errors
    return compiled


@contextlib.contextmanager
def _ignore_file_errors() -> Iterator[None]:
    """Ignore file errors of the cache, such as a full disk; numba compiles the function then."""
    try:
        yield
    except OSError as error:
        _warn_once_not_cached(str(error))


def _warn_once_not_cached(reason: str) -> None:
    """Log a warning, once per process, that numba cannot cache compiled functions."""
    if not _cache_failures:
        _cache_failures.append(reason)
        _logger.warning(
            "numba cannot cache compiled functions (%s), so every process compiles them again, which takes some "
            "seconds; set the environment variable NUMBA_CACHE_DIR to a writable folder",
            reason,
        )


WORD = 32  # bytes that are compared or moved at a time


def _define_load(bits: int, result: Any) -> Any:
    """Define a kernel function that loads an unsigned integer of ``bits`` from an address."""

    def load(typingctx: Any, address: Any) -> Any:
        """Load an unsigned integer from an address."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            """Emit code that loads an unaligned integer of ``bits`` bits."""
            value = builder.load(builder.inttoptr(args[0], ir.IntType(bits).as_pointer()))
            value.align = 1
            return value

        return result(types.uint64), codegen

    return intrinsic(load)


def _define_store(bits: int, stored: Any) -> Any:
    """Define a kernel function that stores an integer of ``bits`` at an address."""

    def store(typingctx: Any, address: Any, value: Any) -> Any:
        """Store an integer at an address."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            builder.store(args[1], target).align = 1
            return context.get_dummy_value()

        return types.void(types.uint64, stored), codegen

    return intrinsic(store)


load_u8 = _define_load(8, types.uint8)
load_u16 = _define_load(16, types.uint16)
load_u32 = _define_load(32, types.uint32)
load_u64 = _define_load(64, types.uint64)
store_u8 = _define_store(8, types.uint8)
store_u16 = _define_store(16, types.uint16)
store_u32 = _define_store(32, types.uint32)
store_u64 = _define_store(64, types.uint64)


@intrinsic  # type: ignore[untyped-decorator]
def publish_u32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an integer at an aligned address, after everything that was stored before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store_atomic(args[1], target, "release", 4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32), codegen


def _define_array(dtype: Any) -> Any:
    """Define a kernel function that returns the array at an address, which must outlive it."""

    def array_at(typingctx: Any, address: Any, n: Any) -> Any:
        """Return the array of ``n`` numbers at an address."""
        array = types.Array(dtype, 1, "C")

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = context.make_array(array)(context, builder)
            itemsize = context.get_constant(types.intp, dtype.bitwidth // 8)
            data = builder.inttoptr(args[0], made.data.type)
            populate_array(made, data=data, shape=[args[1]], strides=[itemsize], itemsize=itemsize, meminfo=None)
            return made._getvalue()

        return array(types.int64, types.int64), codegen

    return intrinsic(array_at)


int64s, uint32s, uint16s, uint8s = map(_define_array, (types.int64, types.uint32, types.uint16, types.uint8))


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(typingctx: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    """Copy bytes with C's ``memcpy``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source_pointer = (builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2])
        cgutils.raw_memcpy(builder, to, source_pointer, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), codegen


def define_move(n_bytes: int) -> Any:
    """Define a kernel function that copies ``n_bytes`` as one vector."""
    word = ir.VectorType(ir.IntType(8), n_bytes)

    def move(typingctx: Any, target: Any, source: Any) -> Any:
        """Copy a vector from one address to another."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[1], word.as_pointer()))
            value.align = 1
            builder.store(value, builder.inttoptr(args[0], word.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return intrinsic(move)


_move_16, _move_word = define_move(16), define_move(WORD)


@njit(nogil=True, inline="always")
def copy_bytes(target, source, n_bytes):  # type: ignore[no-untyped-def]
    """Copy bytes between two regions that do not overlap.

    It is a loop of vector moves. libc's ``memcpy`` uses ``rep movsb`` at the size of a frame. That took 2.8 times as
    long on Zen 5 with glibc 2.36.
    """
    if n_bytes <= 16:
        _memcpy(target, source, int64(n_bytes))
        return
    if n_bytes <= WORD:
        rest = uint64(n_bytes - 16)
        _move_16(target, source)
        _move_16(target + rest, source + rest)
        return
    last = target + uint64(n_bytes - WORD)
    rest = source + uint64(n_bytes - WORD)
    while target < last:
        _move_word(target, source)
        target += uint64(WORD)
        source += uint64(WORD)
    _move_word(last, rest)


# The same, but not inlined: each place where a function is inlined takes a quarter of a second to compile.
copy_frame = inner(copy_bytes.py_func)


@intrinsic  # type: ignore[untyped-decorator]
def blend_16(typingctx: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    """Overwrite the first ``n_bytes`` of 16 bytes, and rewrite the rest unchanged."""
    word = ir.VectorType(ir.IntType(8), 16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = builder.inttoptr(args[0], word.as_pointer())
        old, new = builder.load(to), builder.load(builder.inttoptr(args[1], word.as_pointer()))
        old.align = new.align = 1
        one = builder.insert_element(ir.Constant(word, ir.Undefined), args[2], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)
        length = builder.shuffle_vector(one, ir.Constant(word, ir.Undefined), lanes)
        inside = builder.icmp_unsigned("<", ir.Constant(word, list(range(16))), length)
        builder.store(builder.select(inside, new, old), to).align = 1
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint8), codegen


@intrinsic  # type: ignore[untyped-decorator]
def zero_bytes(typingctx: Any, target: Any, n_bytes: Any) -> Any:
    """Set bytes to zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = builder.inttoptr(args[0], cgutils.voidptr_t)
        cgutils.memset(builder, to, args[1], 0)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address, which may be invalid."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        signature_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, signature_type, "llvm.prefetch.p0")
        read, keep, data = number(0), number(3), number(1)
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


def _load_word(builder: Any, address: Any) -> Any:
    """Emit code that loads ``WORD`` bytes from an address, as a vector."""
    value = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), WORD).as_pointer()))
    value.align = 1
    return value


def _is_nonzero(builder: Any, word: Any) -> Any:
    """Emit code that gives 1 if any byte of a vector is not zero, else 0."""
    lanes = builder.bitcast(word, ir.IntType(8 * WORD))
    return builder.zext(builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0)), ir.IntType(64))


_LINES = 128  # bytes that are compared at a time, if regions are large


@intrinsic  # type: ignore[untyped-decorator]
def _lines_differ(typingctx: Any, left: Any, right: Any) -> Any:
    """Return 1 if the ``_LINES`` bytes at two addresses differ, else 0."""
    word = ir.VectorType(ir.IntType(64), _LINES // 8)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sides = [builder.load(builder.inttoptr(arg, word.as_pointer())) for arg in args]
        for side in sides:
            side.align = 1
        lanes = builder.bitcast(builder.xor(*sides), ir.IntType(8 * _LINES))
        return builder.zext(builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


@inner
def are_equal(left, right, n_bytes):  # type: ignore[no-untyped-def]
    """Return whether two regions contain the same bytes."""
    i = 0
    while i + _LINES <= n_bytes:
        if _lines_differ(left + uint64(i), right + uint64(i)) != uint64(0):
            return False
        i += _LINES
    while i + 8 <= n_bytes:
        if load_u64(left + uint64(i)) != load_u64(right + uint64(i)):
            return False
        i += 8
    while i < n_bytes:
        if load_u8(left + uint64(i)) != load_u8(right + uint64(i)):
            return False
        i += 1
    return True


@intrinsic  # type: ignore[untyped-decorator]
def words_differ_where(typingctx: Any, left: Any, right: Any, mask: Any) -> Any:
    """Return 1 if the ``WORD`` bytes at two addresses differ in bits of a mask, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        difference = builder.xor(_load_word(builder, args[0]), _load_word(builder, args[1]))
        return _is_nonzero(builder, builder.and_(difference, _load_word(builder, args[2])))

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def count_different(typingctx: Any, left: Any, right: Any) -> Any:
    """Count the ``WORD`` bytes at two addresses that differ."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        unequal = builder.icmp_unsigned("!=", _load_word(builder, args[0]), _load_word(builder, args[1]))
        count = builder.ctpop(builder.bitcast(unequal, ir.IntType(WORD)))
        return builder.zext(count, ir.IntType(64))

    return types.int64(types.uint64, types.uint64), codegen


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit code that makes a vector with the value in every lane."""
    word = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(word, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    every = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(word, ir.Undefined), every)


def lane_distances(builder: Any, left: Any, right: Any) -> Any:
    """Emit code that computes the absolute differences of two vectors of unsigned bytes."""
    above = builder.icmp_unsigned(">", left, right)
    return builder.sub(builder.select(above, left, right), builder.select(above, right, left))


def _lanes_far_apart(builder: Any, left: Any, right: Any, bound: Any) -> Any:
    """Emit code that makes a mask of lanes in which two vectors differ by more than ``bound``."""
    return builder.icmp_unsigned(">", lane_distances(builder, left, right), splat(builder, bound, left.type.count))


@intrinsic  # type: ignore[untyped-decorator]
def count_far_apart(typingctx: Any, left: Any, right: Any, bound: Any) -> Any:
    """Count the ``WORD`` bytes at two addresses that differ by more than ``bound``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        far = _lanes_far_apart(builder, _load_word(builder, args[0]), _load_word(builder, args[1]), args[2])
        count = builder.ctpop(builder.bitcast(far, ir.IntType(WORD)))
        return builder.zext(count, ir.IntType(64))

    return types.int64(types.uint64, types.uint64, types.uint8), codegen


@intrinsic  # type: ignore[untyped-decorator]
def far_apart_8(typingctx: Any, left: Any, right: Any, bound: Any) -> Any:
    """Return 255 for each of 8 bytes that differs by more than ``bound``, else 0."""
    word = ir.VectorType(ir.IntType(8), 8)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sides = [builder.load(builder.inttoptr(arg, word.as_pointer())) for arg in args[:2]]
        for side in sides:
            side.align = 1
        far = _lanes_far_apart(builder, sides[0], sides[1], args[2])
        return builder.bitcast(builder.sext(far, word), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64, types.uint8), codegen


@intrinsic  # type: ignore[untyped-decorator]
def narrow_8(typingctx: Any, target: Any, source: Any, shift: Any) -> Any:
    """Shift eight ``uint32`` right by ``shift`` bits, and store the low byte of each."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, narrow = ir.VectorType(ir.IntType(32), 8), ir.VectorType(ir.IntType(8), 8)
        values = builder.load(builder.inttoptr(args[1], wide.as_pointer()))
        values.align = 1
        low = builder.trunc(builder.lshr(values, splat(builder, args[2], 8)), narrow)
        builder.store(low, builder.inttoptr(args[0], narrow.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint32), codegen


def _load_four_interleaved(builder: Any, addresses: Any) -> Any:
    """Emit code that takes 64 bytes in turn from 16 bytes at each of four addresses."""
    narrow, wide = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(16), 16)

    def zip_lanes(left: Any, right: Any) -> Any:
        n = left.type.count
        lanes = [lane for pair in zip(range(n), range(n, 2 * n), strict=True) for lane in pair]
        return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), 2 * n), lanes))

    parts = [builder.load(builder.inttoptr(address, narrow.as_pointer())) for address in addresses]
    for part in parts:
        part.align = 1
    pairs = [builder.bitcast(zip_lanes(*parts[i : i + 2]), wide) for i in (0, 2)]
    return zip_lanes(*pairs)


@intrinsic  # type: ignore[untyped-decorator]
def interleave_4(typingctx: Any, target: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Write 64 bytes that are taken in turn from 16 bytes at each of four addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stack = _load_four_interleaved(builder, args[1:])
        builder.store(stack, builder.inttoptr(args[0], stack.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 5), codegen


@intrinsic  # type: ignore[untyped-decorator]
def stack_of_four_differs(typingctx: Any, stack: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Return 1 if 64 bytes differ from those taken in turn from 16 bytes at each of four addresses, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        expected = _load_four_interleaved(builder, args[1:])
        found = builder.load(builder.inttoptr(args[0], expected.type.as_pointer()))
        found.align = 1
        lanes = builder.bitcast(builder.xor(expected, found), ir.IntType(512))
        return builder.zext(builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0)), ir.IntType(64))

    return types.uint64(*[types.uint64] * 5), codegen


# Checksums. A change within eight bytes goes undetected with a probability of 2**-32.
SUM_START = 0x2545F4914F6CDD1D
_FACTOR = 0x9E3779B97F4A7C15


@njit(nogil=True, inline="always")
def mix_word(total, word):  # type: ignore[no-untyped-def]
    """Add a word to a checksum."""
    total = (uint64(total) ^ uint64(word)) * uint64(_FACTOR)
    return total ^ (total >> uint64(29))


@inner
def add_bytes(total, start, n_bytes):  # type: ignore[no-untyped-def]
    """Add bytes to a checksum.

    They may be added in parts, if the size of each part except the last is a multiple of 8.
    """
    total = uint64(total)
    i = 0
    while i + 8 <= n_bytes:
        total = mix_word(total, load_u64(start + uint64(i)))
        i += 8
    if i < n_bytes:
        word = uint64(n_bytes - i)
        while i < n_bytes:
            word = (word << uint64(8)) | uint64(load_u8(start + uint64(i)))
            i += 1
        total = mix_word(total, word)
    return total


@njit(nogil=True, inline="always")
def fold_sum(total):  # type: ignore[no-untyped-def]
    """Fold a checksum to the 32 bits that are stored."""
    return uint32((total ^ (total >> uint64(32))) & uint64(0xFFFFFFFF))

"""Building blocks of the compiled kernels: compilation, memory access, checksums.

The kernels follow pointers across slabs that grow one by one, which a typed array cannot express. They read eight bytes
at any alignment, which NumPy indexing cannot do without a temporary array. Addresses are ``uint64``, and are not
checked. Callers keep 16 readable and writable bytes behind every region, because short runs are moved in whole words.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import int64, njit, types, uint32, uint64
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
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


class _WithoutObjects:
    """Owner of a library without machine code."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """LLVM code of a function that only kernels call, which becomes machine code as a part of each kernel only.

    Otherwise LLVM would optimize and translate each function again in every function that calls it.
    """

    def _optimize_final_module(self) -> None:
        """Do nothing."""

    def _finalize_final_module(self) -> None:
        """Mark the code as complete, without translating it."""
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self) -> Any:
        """Owner that numba tells of objects which the code may use. A part uses none."""
        return _WithoutObjects()


@contextlib.contextmanager
def _remember_types() -> Iterator[None]:
    """Within the context, find the types of equal calls once.

    numba tries all overloads of a function at each call, three times. This takes a third of the compilation.
    """
    search, found = types.Function.get_call_type, dict[Any, Any]()

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        key = function, tuple(args), tuple(kws.items())
        if key not in found:
            found[key] = search(function, context, args, kws)
        return found[key]

    types.Function.get_call_type = get_call_type
    try:
        yield
    finally:
        types.Function.get_call_type = search


class _KernelCompiler(Compiler):  # type: ignore[misc]
    """Compiler of kernels."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        with _remember_types():
            return super().compile_extra(func)


class _PartCompiler(Compiler):  # type: ignore[misc]
    """Compiler of functions that only kernels call."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


_BASIC_OPTIONS: dict[str, Any] = {"no_cfunc_wrapper": True, "no_rewrites": True, "error_model": "numpy"}
_OPTIONS = {**_BASIC_OPTIONS, "pipeline_class": _KernelCompiler}
_PART_OPTIONS = {**_BASIC_OPTIONS, "pipeline_class": _PartCompiler, "no_cpython_wrapper": True, "_nrt": False}
_DIGEST = sources_digest(Path(__file__).parent)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, without the GIL and with cached machine code."""
    return _compile(function, nogil=True)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call.

    Without what Python calls, compilation takes two thirds of the time. Pass no literal numbers, because each one would
    be compiled separately.
    """
    return njit(**_PART_OPTIONS)(function)


def specialize(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call, without the branches that an argument of None excludes."""
    return njit(**{**_PART_OPTIONS, "no_rewrites": False})(function)


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


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Define a kernel function by the code that it emits.

    :param result: Type of the result.
    :param arguments: Types of the arguments.
    :return: Decorator of a function of the LLVM builder and the values of the arguments, which returns that of the
        result, or None without one.
    """

    def define(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            found = emit(builder, *values)
            return context.get_dummy_value() if found is None else found

        @functools.wraps(emit)  # numba reads the names of the arguments
        def define_call(typingctx: Any, *given: Any) -> Any:
            return result(*arguments), codegen

        return intrinsic(define_call)

    return define


_ADDRESS = types.uint64


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Emit code that loads a value from any address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, address: Any) -> None:
    """Emit code that stores a value at any address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _define_load(bits: int, result: Any) -> Any:
    """Define a kernel function that loads an unsigned integer of ``bits`` from an address."""

    @instruction(result, _ADDRESS)
    def load_integer(builder: Any, address: Any) -> Any:
        return load(builder, address, ir.IntType(bits))

    return load_integer


def _define_store(stored: Any) -> Any:
    """Define a kernel function that stores an integer at an address."""

    @instruction(types.void, _ADDRESS, stored)
    def store_integer(builder: Any, address: Any, value: Any) -> None:
        store(builder, value, address)

    return store_integer


load_u8 = _define_load(8, types.uint8)
load_u16 = _define_load(16, types.uint16)
load_u32 = _define_load(32, types.uint32)
load_u64 = _define_load(64, types.uint64)
store_u8 = _define_store(types.uint8)
store_u16 = _define_store(types.uint16)
store_u32 = _define_store(types.uint32)
store_u64 = _define_store(types.uint64)


@instruction(types.void, _ADDRESS, types.uint32)
def publish_u32(builder: Any, address: Any, value: Any) -> None:
    """Store an integer at an aligned address, after everything that was stored before."""
    builder.store_atomic(value, builder.inttoptr(address, value.type.as_pointer()), "release", 4)


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


@instruction(types.void, _ADDRESS, _ADDRESS, types.int64)
def _memcpy(builder: Any, target: Any, source: Any, n_bytes: Any) -> None:
    """Copy bytes with C's ``memcpy``."""
    to, at = (builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
    cgutils.raw_memcpy(builder, to, at, n_bytes, 1)


def define_move(n_bytes: int) -> Any:
    """Define a kernel function that copies ``n_bytes`` as one vector."""

    @instruction(types.void, _ADDRESS, _ADDRESS)
    def move(builder: Any, target: Any, source: Any) -> None:
        store(builder, load(builder, source, ir.VectorType(ir.IntType(8), n_bytes)), target)

    return move


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


@instruction(types.void, _ADDRESS, _ADDRESS, types.uint8)
def blend_16(builder: Any, target: Any, source: Any, n_bytes: Any) -> None:
    """Overwrite the first ``n_bytes`` of 16 bytes, and rewrite the rest unchanged."""
    word = ir.VectorType(ir.IntType(8), 16)
    old, new = load(builder, target, word), load(builder, source, word)
    inside = builder.icmp_unsigned("<", ir.Constant(word, list(range(16))), splat(builder, n_bytes, 16))
    store(builder, builder.select(inside, new, old), target)


@instruction(types.void, _ADDRESS, types.int64)
def zero_bytes(builder: Any, target: Any, n_bytes: Any) -> None:
    """Set bytes to zero."""
    cgutils.memset(builder, builder.inttoptr(target, cgutils.voidptr_t), n_bytes, 0)


@instruction(types.void, _ADDRESS)
def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address, which may be invalid."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = number(0), number(3), number(1)
    builder.call(function, [builder.inttoptr(address, cgutils.voidptr_t), read, keep, data])


def _load_word(builder: Any, address: Any) -> Any:
    """Emit code that loads ``WORD`` bytes from an address, as a vector."""
    return load(builder, address, ir.VectorType(ir.IntType(8), WORD))


def _is_nonzero(builder: Any, vector: Any, n_bytes: int) -> Any:
    """Emit code that gives 1 if any byte of a vector is not zero, else 0."""
    lanes = builder.bitcast(vector, ir.IntType(8 * n_bytes))
    return builder.zext(builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0)), ir.IntType(64))


def _count_lanes(builder: Any, lanes: Any) -> Any:
    """Emit code that counts the set lanes of a mask of ``WORD`` lanes."""
    return builder.zext(builder.ctpop(builder.bitcast(lanes, ir.IntType(WORD))), ir.IntType(64))


_LINES = 128  # bytes that are compared at a time, if regions are large


@instruction(types.uint64, _ADDRESS, _ADDRESS)
def _lines_differ(builder: Any, left: Any, right: Any) -> Any:
    """Return 1 if the ``_LINES`` bytes at two addresses differ, else 0."""
    sides = [load(builder, address, ir.VectorType(ir.IntType(64), _LINES // 8)) for address in (left, right)]
    return _is_nonzero(builder, builder.xor(*sides), _LINES)


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


@instruction(types.uint64, _ADDRESS, _ADDRESS, _ADDRESS)
def words_differ_where(builder: Any, left: Any, right: Any, mask: Any) -> Any:
    """Return 1 if the ``WORD`` bytes at two addresses differ in bits of a mask, else 0."""
    difference = builder.xor(_load_word(builder, left), _load_word(builder, right))
    return _is_nonzero(builder, builder.and_(difference, _load_word(builder, mask)), WORD)


@instruction(types.int64, _ADDRESS, _ADDRESS)
def count_different(builder: Any, left: Any, right: Any) -> Any:
    """Count the ``WORD`` bytes at two addresses that differ."""
    return _count_lanes(builder, builder.icmp_unsigned("!=", _load_word(builder, left), _load_word(builder, right)))


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit code that makes a vector with the value in every lane."""
    word = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(word, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    every = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(word, ir.Undefined), every)


def _lanes_far_apart(builder: Any, left: Any, right: Any, bound: Any) -> Any:
    """Emit code that makes a mask of lanes in which two vectors of unsigned bytes differ by more than ``bound``."""
    above = builder.icmp_unsigned(">", left, right)
    distances = builder.sub(builder.select(above, left, right), builder.select(above, right, left))
    return builder.icmp_unsigned(">", distances, splat(builder, bound, left.type.count))


@instruction(types.int64, _ADDRESS, _ADDRESS, types.uint8)
def count_far_apart(builder: Any, left: Any, right: Any, bound: Any) -> Any:
    """Count the ``WORD`` bytes at two addresses that differ by more than ``bound``."""
    sides = _load_word(builder, left), _load_word(builder, right)
    return _count_lanes(builder, _lanes_far_apart(builder, *sides, bound))


@instruction(types.uint64, _ADDRESS, _ADDRESS, types.uint8)
def far_apart_8(builder: Any, left: Any, right: Any, bound: Any) -> Any:
    """Return 255 for each of 8 bytes that differs by more than ``bound``, else 0."""
    word = ir.VectorType(ir.IntType(8), 8)
    far = _lanes_far_apart(builder, load(builder, left, word), load(builder, right, word), bound)
    return builder.bitcast(builder.sext(far, word), ir.IntType(64))


@instruction(types.void, _ADDRESS, _ADDRESS, types.uint32)
def narrow_8(builder: Any, target: Any, source: Any, shift: Any) -> None:
    """Shift eight ``uint32`` right by ``shift`` bits, and store the low byte of each."""
    values = load(builder, source, ir.VectorType(ir.IntType(32), 8))
    low = builder.trunc(builder.lshr(values, splat(builder, shift, 8)), ir.VectorType(ir.IntType(8), 8))
    store(builder, low, target)


def _load_four_interleaved(builder: Any, addresses: Any) -> Any:
    """Emit code that takes 64 bytes in turn from 16 bytes at each of four addresses."""
    wide = ir.VectorType(ir.IntType(16), 16)

    def zip_lanes(left: Any, right: Any) -> Any:
        n = left.type.count
        lanes = [lane for pair in zip(range(n), range(n, 2 * n), strict=True) for lane in pair]
        return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), 2 * n), lanes))

    parts = [load(builder, address, ir.VectorType(ir.IntType(8), 16)) for address in addresses]
    return zip_lanes(*(builder.bitcast(zip_lanes(*parts[i : i + 2]), wide) for i in (0, 2)))


@instruction(types.void, *[_ADDRESS] * 5)
def interleave_4(builder: Any, target: Any, first: Any, second: Any, third: Any, fourth: Any) -> None:
    """Write 64 bytes that are taken in turn from 16 bytes at each of four addresses."""
    store(builder, _load_four_interleaved(builder, (first, second, third, fourth)), target)


@instruction(types.uint64, *[_ADDRESS] * 5)
def stack_of_four_differs(builder: Any, stack: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Return 1 if 64 bytes differ from those taken in turn from 16 bytes at each of four addresses, else 0."""
    expected = _load_four_interleaved(builder, (first, second, third, fourth))
    return _is_nonzero(builder, builder.xor(expected, load(builder, stack, expected.type)), 64)


# Checksums. A change within eight bytes goes undetected with a probability of 2**-32.
SUM_START = 0x2545F4914F6CDD1D
FACTOR = 0x9E3779B97F4A7C15


@njit(nogil=True, inline="always")
def mix_word(total, word):  # type: ignore[no-untyped-def]
    """Add a word to a checksum."""
    total = (uint64(total) ^ uint64(word)) * uint64(FACTOR)
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

"""Random streams of workers: distinct, reproducible, in every generator that an environment may draw from."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import os
import random
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rl_ext_core.factory import _objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_keep: contextvars.ContextVar[bool] = contextvars.ContextVar("keep", default=False)
# Of this process, and what goes before it where an environment is built: several may be, in threads.
_stream: np.random.SeedSequence | None = None
_stream_here: contextvars.ContextVar[np.random.SeedSequence | None] = contextvars.ContextVar("stream", default=None)


def sequence(seed: int | None, worker: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return a worker's source of seeds.

    :param seed: of the whole group; None takes entropy from the operating system
    :param worker: its index in the group
    :param attempt: how often this worker was started before
    """
    return np.random.SeedSequence(seed, spawn_key=(worker, attempt))


def seed_process(stream: np.random.SeedSequence) -> None:
    """Seed the generators of this process: Python's, NumPy's, torch's now or when it is imported, and the C library's.

    Copies of generators that are unpickled from here on draw from the same stream.

    :param stream: of this worker
    """
    global _stream
    _stream = stream
    words = [int(word) for word in stream.generate_state(4)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(words[2])
    else:
        _SeedsTorch.word = words[2]
        if _SeedsTorch not in sys.meta_path:
            sys.meta_path.insert(0, _SeedsTorch)
    _seed_c(words[3])


class _SeedsTorch:
    """Finds torch as others do, and has it seeded when it is loaded: by itself, it takes entropy then."""

    word: ClassVar[int]

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Do what a finder does; many ask only whether torch is installed."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec")]
        found = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if found is not None and found.loader is not None:
            found.loader.exec_module = functools.partial(cls._exec, found.loader.exec_module)  # type: ignore[method-assign]
        return found

    @classmethod
    def _exec(cls, exec_module: Callable[[Any], None], module: Any) -> None:
        exec_module(module)
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
            module.manual_seed(cls.word)


def _seed_c(word: int) -> None:
    # Libraries in C draw from these; the C library starts them with the same number in every process.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("ucrtbase" if os.name == "nt" else None)  # there it is no part of the program
        library.srand(ctypes.c_uint(word))
        library.srandom(ctypes.c_uint(word))
        library.srand48(ctypes.c_long(word))


@contextlib.contextmanager
def copies_from(stream: np.random.SeedSequence) -> Iterator[None]:
    """Let copies of generators that are unpickled in here draw from this stream; the process's own stay as they are."""
    before = _stream_here.set(stream)
    try:
        yield
    finally:
        _stream_here.reset(before)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Unpickle generators in the very state that the original had, to compare a copy with it."""
    before = _keep.set(True)
    try:
        yield
    finally:
        _keep.reset(before)


def _entropy(state: Any) -> np.random.SeedSequence:
    """Return the seed of a copied generator: of its worker's stream, distinct for generators that were distinct."""
    stream = _stream_here.get() or _stream
    if stream is None:
        return np.random.SeedSequence()
    return stream_of(stream, state)


def stream_of(stream: np.random.SeedSequence, name: Any) -> np.random.SeedSequence:
    """Derive the seed of one generator from its worker's stream.

    :param name: differs from those of the worker's other generators; plain data
    """
    words = np.frombuffer(hashlib.blake2b(_packed(name), digest_size=16).digest(), np.uint32)
    return np.random.SeedSequence([*map(int, stream.generate_state(4)), *map(int, words)])


def _packed(state: Any) -> bytes:
    if isinstance(state, dict):
        return b"".join(_packed(key) + _packed(state[key]) for key in sorted(state))
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()


def _bit_generator(cls: Any, state: dict[str, Any]) -> Any:
    bits = cls(_entropy(state))
    if _keep.get():
        bits.state = state
    return bits


def _random_state(cls: Any, bits: Any, gauss: dict[str, Any]) -> Any:
    copy = cls(bits)
    if _keep.get():
        copy.set_state({**copy.get_state(legacy=False), **gauss})
    return copy


def _python_random(cls: Any, state: Any) -> random.Random:
    copy: random.Random = random.Random.__new__(cls)
    random.Random.seed(copy, int.from_bytes(_entropy(state).generate_state(8).tobytes(), "little"))
    if _keep.get():
        random.Random.setstate(copy, state)
    return copy


def _torch_generator(device: str, state: np.ndarray[Any, Any]) -> Any:
    import torch

    copy = torch.Generator(device=device)
    if _keep.get():
        copy.set_state(torch.from_numpy(state.copy()))
    else:
        copy.manual_seed(int(_entropy(state).generate_state(1, np.uint64)[0] >> 1))
    return copy


def _with_attributes(reduced: tuple[Any, ...], generator: Any, without: str = "") -> tuple[Any, ...]:
    """Add the attributes of an instance of somebody's own subclass."""
    held = {name: value for name, value in (_objects.dictionary(generator) or {}).items() if name != without}
    return (*reduced, held, None, None, _objects.set_state) if held else reduced


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from this."""
    torch = sys.modules.get("torch")
    known = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
    return issubclass(type(value), known) or (torch is not None and issubclass(type(value), torch.Generator))


def reseed(generator: Any, seed: np.random.SeedSequence) -> None:
    """Seed a generator in place. Those of the process and of the operating system are left alone."""
    torch = sys.modules.get("torch")
    if isinstance(generator, random.Random):
        if generator is not random._inst and not isinstance(generator, random.SystemRandom):
            random.Random.seed(generator, int.from_bytes(seed.generate_state(8).tobytes(), "little"))
    elif torch is not None and isinstance(generator, torch.Generator):
        if _reduce_torch_generator(generator)[0] is _torch_generator:
            generator.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
    elif generator is not np.random.mtrand._rand:
        bits = generator
        if not isinstance(generator, np.random.BitGenerator):
            bits = getattr(generator, "_bit_generator", None) or generator.bit_generator
        bits.state = type(bits)(seed).state
        if isinstance(generator, np.random.RandomState):  # drops the second number of a pair of normal ones
            generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def reduce_generator(generator: Any) -> tuple[Any, ...] | str | None:
    """Reduce a random generator to one that continues in its state, or in a stream of its worker's own.

    :return: what ``__reduce__`` returns, the name of one of the process's own too; None: it is no generator
    """
    kind = type(generator)
    if not is_generator(generator):
        return None
    if generator is np.random.mtrand._rand:
        return "_rand"
    if generator is random._inst:
        return "_inst"
    if issubclass(kind, np.random.BitGenerator):
        return _bit_generator, (kind, generator.state)
    if issubclass(kind, np.random.Generator):
        return _with_attributes((kind, (generator.bit_generator,)), generator)
    if issubclass(kind, np.random.RandomState):
        gauss = {name: generator.get_state(legacy=False)[name] for name in ("has_gauss", "gauss")}
        return _with_attributes((_random_state, (kind, generator._bit_generator, gauss)), generator)
    if issubclass(kind, random.SystemRandom):
        return kind, ()
    if issubclass(kind, random.Random):
        return _with_attributes((_python_random, (kind, generator.getstate())), generator, without="gauss_next")
    return _reduce_torch_generator(generator)


def _reduce_torch_generator(generator: Any) -> tuple[Any, ...] | str:
    torch = sys.modules["torch"]
    if generator is torch.default_generator:
        return "default_generator"
    for index, default in enumerate(torch.cuda.default_generators):
        if generator is default:
            return _torch_default, (index,)
    return _torch_generator, (str(generator.device), generator.get_state().numpy())


def _torch_default(index: int) -> Any:
    import torch

    torch.cuda.current_device()  # makes them
    return torch.cuda.default_generators[index]


def own_seed(seed: int) -> int:
    """Return the seed of a generator inside a simulator: the worker's, or the original's under :func:`keeping`.

    :param seed: of the original
    """
    return seed if _keep.get() else int(_entropy(seed).generate_state(1)[0] >> 1)


def is_keeping() -> bool:
    """Whether copies of generators are to be in the original's state."""
    return _keep.get()

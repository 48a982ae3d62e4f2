"""Copies of what the standard library has and pickle does not copy, and what is refused, by name and with a reason."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import logging
import multiprocessing
import pathlib
import queue
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_ext_core.factory import _graft
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import copied, different
from tests.core.factory.test_fingerprint import Holder


def test_locks_are_free_and_stay_one_object() -> None:
    lock, recursive = threading.Lock(), threading.RLock()
    held = Holder(locks=[lock, recursive, lock], condition=threading.Condition(lock), event=threading.Event())
    held.event.set()
    held.semaphore, held.barrier, held.queue = threading.Semaphore(3), threading.Barrier(2), queue.Queue()
    held.processes = [multiprocessing.Lock(), multiprocessing.RLock()]
    held.queue.put("first")
    copy = copied(held)
    assert different(held, copy) == []
    assert copy.locks[0] is copy.locks[2] is copy.condition._lock
    assert copy.locks[0] is not lock
    assert copy.event.is_set()
    assert copy.queue.get_nowait() == "first"
    with copy.condition, held.processes[0], copy.processes[0]:
        copy.condition.notify_all()


def test_a_lock_that_somebody_holds_is_waited_for_then_refused() -> None:
    lock = threading.Lock()
    with lock, pytest.raises(_graft.Refused, match=r"\.lock .*it is locked"):
        _graft.dumps(Holder(lock=lock))
    lock.acquire()
    timer = threading.Timer(0.05, lock.release)
    timer.start()
    assert copied(Holder(lock=lock)).lock.acquire(blocking=False)
    timer.join()


def test_what_belongs_to_this_thread_is_there_in_the_copy() -> None:
    local = threading.local()
    local.gain = 3
    copy = copied(Holder(local=local))
    assert copy.local.gain == 3
    assert different(local, copy.local) == []


def test_executors_are_made_anew() -> None:
    with concurrent.futures.ThreadPoolExecutor(2, "pool") as pool:
        assert pool.submit(int, "3").result() == 3
        copy = copied(Holder(pool=pool))
        with copy.pool:
            assert copy.pool.submit(int, "4").result() == 4
        assert copy.pool._max_workers == 2


def test_weak_references_refer_to_the_copy() -> None:
    target = Holder(gain=1)
    world = Holder(target=target, reference=weakref.ref(target), proxy=weakref.proxy(target))
    world.named, world.keyed = weakref.WeakValueDictionary(a=target), weakref.WeakKeyDictionary({target: 2})
    world.members, world.method = weakref.WeakSet([target]), weakref.WeakMethod(target.__init__)
    copy = copied(world)
    assert different(world, copy) == []
    assert copy.reference() is copy.target is copy.named["a"]
    assert copy.keyed[copy.target] == 2
    assert set(copy.members) == {copy.target}
    assert copy.method().__self__ is copy.target
    copy.target.gain = 7
    assert copy.proxy.gain == 7


def test_loggers_and_standard_streams_are_those_of_the_process() -> None:
    logger = logging.getLogger("rl_ext_core.somebody")
    copy = copied(Holder(logger=logger, root=logging.getLogger(), out=sys.__stdout__))
    assert (copy.logger, copy.root, copy.out) == (logger, logging.getLogger(), sys.__stdout__)


def test_a_file_that_is_mapped_for_reading_is_mapped_again(tmp_path: Path) -> None:
    np.arange(6.0).tofile(tmp_path / "prices")
    prices = np.memmap(tmp_path / "prices", np.float64, "r", shape=(2, 3))
    copy = copied(Holder(prices=prices))
    assert different(prices, copy.prices) == []
    assert isinstance(copy.prices, np.memmap)
    assert copy.prices[1, 2] == 5.0
    with pytest.raises(_graft.Refused, match="a copy would write to the same file"):
        _graft.dumps(np.memmap(tmp_path / "prices", np.float64, "r+", shape=(2, 3)))


def _counting() -> Iterator[int]:
    yield 1
    yield 2


def _file() -> Any:
    return Path(__file__).open(encoding="utf-8")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (_counting, r"\.held \(builtins\.generator\): how far a generator has come cannot be copied"),
    "file": (_file, r"\.held \(_io\.TextIOWrapper\): an open file has a position"),
    "library": (lambda: ctypes.CDLL(None), "what a library in C holds cannot be read"),
    "pointer": (lambda: ctypes.c_void_p(1), "pointers cannot be pickled"),
    "pipe": (lambda: multiprocessing.Pipe()[0], "belongs to another process"),
    "shared number": (lambda: multiprocessing.Value("i", 0), "memory that processes share"),
    "shared semaphore": (multiprocessing.Semaphore, "memory that processes share"),
    "folder": (tempfile.TemporaryDirectory, "a copy would delete the same"),
    "finalizer": (lambda: weakref.finalize(_file, print), "would be done for every copy"),
    "thread": (lambda: threading.Thread(target=print), r"make and start it in reset\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    held = make()
    try:
        with pytest.raises(_graft.Refused, match=reason) as caught:
            _graft.dumps(Holder(held=held, other=[1]))
        assert caught.value.path.startswith(".held")
        fingerprint(Holder(held=held))
    finally:
        # By the type: libc's own close, with whatever the register holds, closes a file of somebody else.
        end = next((name for name in ("close", "cleanup", "detach") if hasattr(type(held), name)), None)
        if end:
            getattr(held, end)()


def test_shared_memory_is_refused() -> None:
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:
        with pytest.raises(_graft.Refused, match="memory that processes share"):
            _graft.dumps(Holder(memory=memory))
    finally:
        memory.close()
        memory.unlink()


def test_tables_are_compared_by_what_is_in_them() -> None:
    pandas = pytest.importorskip("pandas")
    prices = pandas.DataFrame({"price": [1.0, 2.5], "name": ["x", "y"], "at": pandas.date_range("2020", periods=2)})
    prices.attrs["currency"] = "EUR"
    world = Holder(prices=prices, column=prices["price"], row=prices.iloc[0], index=prices.index)
    assert prices["price"].mean() == 1.75  # fills caches
    copy = copied(world)
    assert different(world, copy) == []
    copy.prices.loc[1, "price"] = 7.0
    assert ".prices.columns[0][1]" in fingerprint(world).differences(fingerprint(copy))
    # Whether the column changes too depends on the version of pandas: in the copy as in the original.
    world.prices.loc[1, "price"] = 7.0
    assert different(world, copy) == []


def test_pictures_are_compared_by_what_is_on_them() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 3), (1, 2, 3))
    copy = copied(Holder(image=image))
    assert different(Holder(image=image), copy) == []
    copy.image.putpixel((1, 1), (9, 9, 9))
    assert fingerprint(Holder(image=image)).differences(fingerprint(copy)) == [".image.pixels"]


class World:
    gravity = 9.81

    def __call__(self) -> float:
        return self.gravity


class Still:
    """Cannot be called: its proxy is of another type."""


@pytest.mark.parametrize("make", [World, Still])
def test_a_proxy_stands_for_the_copy_and_is_refused_where_its_target_is_gone(make: Any) -> None:
    target = make()
    original = SimpleNamespace(target=target, proxy=weakref.proxy(target), size=1)
    target.parts = [SimpleNamespace(world=original.proxy)]
    for world in (original, SimpleNamespace(met_before=target.parts, target=target, proxy=original.proxy)):
        copy = copied(world)
        assert different(world, copy) == []
        copy.target.size = 5
        assert copy.proxy.size == copy.proxy.parts[0].world.size == 5
        assert isinstance(copy.proxy, weakref.ProxyTypes)
    assert not hasattr(target, "size")
    with pytest.raises(_graft.Refused, match=r"\.proxy .*what it stands for is gone"):
        _graft.dumps(SimpleNamespace(proxy=weakref.proxy(make()), kept=3))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_views_are_those_of_the_copied_dictionary(kind: Any) -> None:
    held = kind(a=1, b=[2])
    original = SimpleNamespace(held=held, views=[held.keys(), held.values(), held.items()])
    copy = copied(original)
    assert different(original, copy) == []
    copy.held["c"] = 3
    assert [list(view) for view in copy.views] == [list(copy.held), list(copy.held.values()), list(copy.held.items())]
    assert {len(view) for view in original.views} == {2}


def test_a_reference_to_what_nobody_else_holds_is_missed() -> None:
    target = Holder(gain=1)
    world = Holder(reference=weakref.ref(target))
    assert fingerprint(world).differences(fingerprint(copied(world))) != []


def test_caches_keep_their_size_and_are_refused_with_something_in_them() -> None:
    world = Holder(factor=3)
    world.cached = functools.lru_cache(maxsize=7)(lambda value: value * world.factor)
    copy = copied(world)
    assert different(world, copy) == []
    assert copy.cached.cache_parameters()["maxsize"] == 7
    copy.factor = 5
    assert (copy.cached(3), world.cached(3)) == (15, 9)
    with pytest.raises(_graft.Refused, match=r"call its cache_clear\(\) first"):
        _graft.dumps(world)


def test_a_path_is_the_same_whatever_it_was_asked_for() -> None:
    path = pathlib.PurePosixPath("a") / "b"
    before = fingerprint(path)
    assert {path: str(path)} == {path: "a/b"}
    assert before.tokens == fingerprint(path).tokens == fingerprint(copied(path)).tokens

"""Environments whose every step depends on a state that is easily lost: what it is, what was changed, what is expected.

``SAME``: a copy does the same. ``REFUSED``: there is none. ``WARNED``: there is one, and what it lacks was named.
``OWN_STREAM``: it draws its own random numbers, as all copies do.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextvars
import copyreg
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import queue
import random
import sqlite3
import threading
import types
import weakref
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

SAME, REFUSED, WARNED, OWN_STREAM = "same", "refused", "warned", "own stream"
NEEDS = {"Networkx": "networkx", "Scipy": "scipy", "Torch": "torch", "TorchView": "torch", "TorchGenerator": "torch"}

GRAVITY = 9.8
TABLE = {"k": [1.0]}
COUNTER = itertools.count(5)
HANDLES: Any = None
STATES: dict[str, tuple[type[State], str]] = {}


class State(gym.Env[Any, Any]):
    """What all have in common: the position grows by what :meth:`tick` reads out of the state."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.x = 0.0
        self.make()

    def make(self) -> None:
        """Make the state."""

    def change(self, patch: Any) -> None:
        """Change it, as a user does after construction; ``patch`` undoes what is not the instance's."""

    def tick(self) -> float:
        """Read it."""
        return 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x]), {}

    def step(self, action: Any) -> Any:
        self.x += float(self.tick())
        return np.array([self.x]), 0.0, False, False, {}


def expect(what: str) -> Any:
    """Enter a class into the table."""

    def enter(state: type[State]) -> type[State]:
        STATES[state.__name__] = state, what
        return state

    return enter


def scaled(x: float) -> float:
    return x * 1.0


class Body:
    def __init__(self, mass: float) -> None:
        self.mass = mass


class Terrain:
    rough = 1.0

    @staticmethod
    def height() -> float:
        return 1.0


# Objects.


@expect(SAME)
class Slots(State):
    class Point:
        __slots__ = ("__private", "a")

        def set(self, value: float) -> None:
            self.a = self.__private = value

        def get(self) -> float:
            return self.a + self.__private

    def make(self) -> None:
        self.point = Slots.Point()
        self.point.set(1.0)

    def change(self, patch: Any) -> None:
        self.point.set(7.0)

    def tick(self) -> float:
        return self.point.get()


@expect(SAME)
class Cycle(State):
    def make(self) -> None:
        self.n: dict[str, Any] = {"v": 1.0}
        self.n.update(itself=self.n, env=self)

    def change(self, patch: Any) -> None:
        self.n["v"] = 3.0

    def tick(self) -> float:
        return float(self.n["itself"]["env"].n["v"])


@expect(SAME)
class Property(State):
    @property
    def mass(self) -> float:
        return self._mass

    @mass.setter
    def mass(self, value: float) -> None:
        self._mass, self._cache = value, value * 2

    def make(self) -> None:
        self.mass = 1.0

    def change(self, patch: Any) -> None:
        self._mass = 4.0

    def tick(self) -> float:
        return self._cache + self.mass


@expect(SAME)
class CachedProperty(State):
    def make(self) -> None:
        self.k = 1.0

    @functools.cached_property
    def table(self) -> float:
        return self.k * 10

    def change(self, patch: Any) -> None:
        assert self.table
        self.k = 5.0

    def tick(self) -> float:
        return self.table + self.k


@expect(SAME)
class Weak(State):
    def make(self) -> None:
        self.o = collections.UserList([1.0])
        self.w = weakref.ref(self.o)
        self.d = weakref.WeakValueDictionary(a=self.o)

    def tick(self) -> float:
        self.o[0] += 1
        target = self.w()
        assert target is not None
        return float(target[0] + self.d["a"][0])


@expect(SAME)
class BoundMethod(State):
    class Other:
        v = 1.0

        def f(self) -> float:
            self.v += 1
            return self.v

    def make(self) -> None:
        self.o = BoundMethod.Other()
        self.f, self.g = self.o.f, self.own

    def own(self) -> float:
        return self.x

    def tick(self) -> float:
        return self.f() + self.o.v + self.g()


@expect(SAME)
class InstancePatched(State):
    def change(self, patch: Any) -> None:
        self.tick = types.MethodType(lambda self: 8.0 + self.x, self)  # type: ignore[method-assign]


@expect(SAME)
class AnotherClass(State):
    class Light:
        v = 1.0

    class Heavy(Light):
        v = 2.0

    def make(self) -> None:
        self.o = AnotherClass.Light()

    def change(self, patch: Any) -> None:
        self.o.__class__ = AnotherClass.Heavy

    def tick(self) -> float:
        return self.o.v


@expect(SAME)
class ClassMadeAtRunTime(State):
    def make(self) -> None:
        self.o = type("Made", (), {"v": 1.0, "f": lambda self: self.v * 2})()

    def change(self, patch: Any) -> None:
        type(self.o).v = 6.0

    def tick(self) -> float:
        return float(self.o.f())


@expect(REFUSED)
class Forgetful(State):
    class P:
        v = 1.0

        def __getstate__(self) -> dict[str, Any]:
            return {}

        def __setstate__(self, state: Any) -> None:
            self.v = 1.0

    def make(self) -> None:
        self.p = Forgetful.P()

    def change(self, patch: Any) -> None:
        self.p.v = 4.0

    def tick(self) -> float:
        return self.p.v


@expect(REFUSED)
class ReducedByItsClass(State):
    class D(dict[str, float]):
        extra = 1.0

        def __missing__(self, key: str) -> float:
            return self.extra

        def __reduce__(self) -> Any:
            return ReducedByItsClass.D, (dict(self),)

    def make(self) -> None:
        self.d = ReducedByItsClass.D(a=1.0)

    def change(self, patch: Any) -> None:
        self.d.extra = 5.0

    def tick(self) -> float:
        return self.d["zzz"]


class Registered:
    v = 1.0


copyreg.pickle(Registered, lambda _: (Registered, ()))


@expect(REFUSED)
class ReducedByAnother(State):
    def make(self) -> None:
        self.p = Registered()

    def change(self, patch: Any) -> None:
        self.p.v = 3.0

    def tick(self) -> float:
        return self.p.v


@expect(REFUSED)
class Singleton(State):
    class One:
        one: ClassVar[Any] = None
        v = 1.0

        def __new__(cls) -> Any:
            cls.one = cls.one or object.__new__(cls)
            return cls.one

        def __reduce__(self) -> Any:
            return Singleton.One, ()

    def make(self) -> None:
        self.s = Singleton.One()

    def change(self, patch: Any) -> None:
        patch.setattr(Singleton.One, "one", self.s)
        self.s.v = 4.0

    def tick(self) -> float:
        return Singleton.One().v


@expect(REFUSED)
class Caught(State):
    def change(self, patch: Any) -> None:
        try:
            raise KeyError(3)
        except KeyError as error:
            self.error = error

    def tick(self) -> float:
        return float(self.error.__traceback__ is not None)


@expect(SAME)
class Enumerated(State):
    class Mode(enum.Enum):
        SLOW = 1.0
        FAST = 4.0

    def make(self) -> None:
        self.mode = Enumerated.Mode.SLOW

    def change(self, patch: Any) -> None:
        self.mode = Enumerated.Mode.FAST

    def tick(self) -> float:
        return float(self.mode.value) + (self.mode is Enumerated.Mode.FAST)


# Containers, and where iterators are.


@expect(SAME)
class Containers(State):
    def make(self) -> None:
        self.d = collections.deque([1.0, 2.0], maxlen=3)
        self.dd: Any = collections.defaultdict(lambda: self.x)
        self.c, self.cm = collections.Counter("aab"), collections.ChainMap({}, {"a": 1})

    def change(self, patch: Any) -> None:
        self.d.append(5.0)
        self.cm["a"] = 9

    def tick(self) -> float:
        self.d.append(self.d[0])
        return sum(self.d) + self.dd["q"] + self.c["a"] + self.cm["a"]


@expect(SAME)
class ArrayOfTheStandardLibrary(State):
    def make(self) -> None:
        self.a = array.array("d", [1, 2, 3])

    def change(self, patch: Any) -> None:
        bisect.insort(self.a, 2.5)

    def tick(self) -> float:
        return self.a[2]


@expect(SAME)
class Numbers(State):
    def make(self) -> None:
        self.f, self.t = fractions.Fraction(1, 3), datetime.timedelta(seconds=1)

    def change(self, patch: Any) -> None:
        self.f += 2
        self.t *= 4

    def tick(self) -> float:
        return float(self.f) + self.t.total_seconds()


@expect(SAME)
class ListIterator(State):
    def make(self) -> None:
        self.i = iter(list(range(50)))

    def change(self, patch: Any) -> None:
        next(self.i), next(self.i)

    def tick(self) -> float:
        return next(self.i)


@expect(SAME)
class Itertools(State):
    def make(self) -> None:
        self.zip = zip(itertools.cycle([1, 2, 3]), map(abs, itertools.count(-50)), strict=False)
        self.chain = itertools.chain(range(3), range(100, 200))
        self.a, self.b = itertools.tee(iter(range(100)))

    def change(self, patch: Any) -> None:
        for item in (self.zip, self.chain, self.chain, self.chain, self.chain, self.a):
            next(item)  # type: ignore[call-overload]

    def tick(self) -> float:
        return sum(next(self.zip)) + next(self.chain) + next(self.a) * 100 + next(self.b)


@expect(REFUSED)
class DictIterator(State):
    def make(self) -> None:
        self.d = {i: i * 2 for i in range(50)}
        self.i = iter(self.d.items())

    def change(self, patch: Any) -> None:
        next(self.i)

    def tick(self) -> float:
        return next(self.i)[1]


@expect(REFUSED)
class SetIterator(State):
    def make(self) -> None:
        self.s = {3.5, 2.5, 99.5, -1.5, 7.25}
        self.i = iter(self.s)

    def change(self, patch: Any) -> None:
        next(self.i)

    def tick(self) -> float:
        return next(self.i, 0.0)


@expect(REFUSED)
class Generator(State):
    def make(self) -> None:
        self.g = (i * i for i in range(1000))

    def change(self, patch: Any) -> None:
        next(self.g)

    def tick(self) -> float:
        return next(self.g)


@expect(WARNED)
class SetOfTexts(State):
    def make(self) -> None:
        self.s = set("abcdefghijklmnop")

    def tick(self) -> float:
        return sum(ord(k) * 2.0**-i for i, k in enumerate(self.s))


@expect(WARNED)
class SetOfObjects(State):
    def make(self) -> None:
        self.s = {Body(i) for i in range(20)}

    def tick(self) -> float:
        return sum(k.mass * 2.0**-i for i, k in enumerate(self.s))


@expect(REFUSED)
class KeyedById(State):
    def make(self) -> None:
        self.objects = [Body(i) for i in range(3)]
        self.d = {id(o): i + 1.0 for i, o in enumerate(self.objects)}

    def tick(self) -> float:
        return sum(self.d.get(id(o), -100) for o in self.objects)


# Memory.


@expect(SAME)
class Views(State):
    def make(self) -> None:
        self.a = np.zeros(10)
        self.v = self.a[::2]
        self.m: Any = np.ma.masked_array([1.0, 2, 3], [0, 1, 0])
        self.r = np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])

    def tick(self) -> float:
        self.v += 1
        return float(self.a.sum() + self.m.sum() + self.r.b[0])


@expect(SAME)
class ReadOnly(State):
    def make(self) -> None:
        self.a = np.array([1, 2, 3])
        self.a.flags.writeable = False

    def tick(self) -> float:
        try:
            self.a[0] = 5
        except ValueError:
            return 1
        return 2


@expect(REFUSED)
class ViewOfBytes(State):
    def make(self) -> None:
        self.b = bytearray(8)
        self.v = memoryview(self.b)

    def tick(self) -> float:
        self.v[0] += 1
        return self.b[0]


@expect(SAME)
class CStructure(State):
    class S(ctypes.Structure):
        _fields_ = [("a", ctypes.c_double), ("b", ctypes.c_double * 3)]

    def make(self) -> None:
        self.s = CStructure.S(1.0)

    def change(self, patch: Any) -> None:
        self.s.a, self.s.b[1] = 5.0, 2.0

    def tick(self) -> float:
        return float(self.s.a + self.s.b[1])


@expect(REFUSED)
class CPointer(State):
    def make(self) -> None:
        self.b = (ctypes.c_double * 4)(1, 2, 3, 4)
        self.p = ctypes.pointer(self.b)

    def tick(self) -> float:
        return self.p.contents[0]


@expect(REFUSED)
class CLibrary(State):
    def make(self) -> None:
        self.library = ctypes.CDLL(None)

    def tick(self) -> float:
        return float(self.library.abs(-3))


@expect(WARNED)
class HandleInTheModule(State):
    def make(self) -> None:
        globals()["HANDLES"] = types.SimpleNamespace(library=ctypes.CDLL(None), opened=[3.0])
        self.handle = 0

    def tick(self) -> float:
        return float(HANDLES.opened[self.handle])


@expect(SAME)
class TorchView(State):
    def make(self) -> None:
        import torch

        self.t = torch.zeros(4)
        self.v, self.n = self.t[1:3], self.t.numpy()

    def tick(self) -> float:
        self.v += 1
        self.n[0] += 1
        return float(self.t.sum())


@expect(SAME)
class Torch(State):
    def make(self) -> None:
        import torch

        self.m = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
        self.m.register_buffer("b", torch.ones(1), persistent=False)
        self.m[0].register_forward_hook(self.hook)

    def hook(self, module: Any, given: Any, out: Any) -> Any:
        return out * 2

    def change(self, patch: Any) -> None:
        self.m.b.mul_(7)
        self.m[0].weight.data.fill_(2.0)
        self.m.eval()

    def tick(self) -> float:
        import torch

        return float((self.m(torch.ones(2, 1)).sum() + self.m.b).detach())


# Functions.


@expect(SAME)
class Closure(State):
    def make(self) -> None:
        k = [1.0]
        self.f, self.k = (lambda: k[0]), k

    def change(self, patch: Any) -> None:
        self.k[0] = 9.0

    def tick(self) -> float:
        self.k[0] += 1
        return self.f()


@expect(SAME)
class SharedVariable(State):
    def make(self) -> None:
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        self.count, self.total = count, lambda: n * 10

    def change(self, patch: Any) -> None:
        self.count()
        self.count()

    def tick(self) -> float:
        return self.count() + self.total()


@expect(SAME)
class Recursive(State):
    def make(self) -> None:
        depth = 3

        def f(k: int) -> int:
            return depth if k == 0 else f(k - 1) + depth

        def deeper() -> None:
            nonlocal depth
            depth += 1

        self.f, self.deeper = f, deeper

    def change(self, patch: Any) -> None:
        self.deeper()

    def tick(self) -> float:
        self.deeper()
        return self.f(4)


@expect(SAME)
class Partial(State):
    def make(self) -> None:
        self.k = [1.0]
        self.f = functools.partial(lambda k, by: k[0] * by, self.k, by=2)

    def change(self, patch: Any) -> None:
        self.k[0] = 5.0

    def tick(self) -> float:
        self.k[0] += 1
        return self.f()


@expect(SAME)
class Dispatched(State):
    def make(self) -> None:
        self.f = functools.singledispatch(lambda x: 1.0)

    def change(self, patch: Any) -> None:
        self.f.register(float, lambda x: 5.0)

    def tick(self) -> float:
        return self.f(1.0)


@expect(REFUSED)
class Cache(State):
    """What is kept was computed before the change."""

    def make(self) -> None:
        self.level = 1.0
        self.cell = functools.lru_cache(None)(self._cell)

    def _cell(self, i: float) -> float:
        return self.level * 10 + i

    def change(self, patch: Any) -> None:
        self.cell(3)
        self.level = 7.0

    def tick(self) -> float:
        return self.cell(3)


@expect(SAME)
class EmptyCache(Cache):
    def change(self, patch: Any) -> None:
        self.cell(3)
        self.cell.cache_clear()
        self.level = 7.0


@expect(WARNED)
class CacheOfTheClass(State):
    level = 1.0

    @functools.lru_cache(None)  # noqa: B019
    def cell(self, i: int) -> float:
        return self.level * 10 + i

    def change(self, patch: Any) -> None:
        self.cell(3)
        self.level = 7.0

    def tick(self) -> float:
        return self.cell(3)


# What the code reads beside the instance.


@expect(WARNED)
class ClassAttribute(State):
    speed = 1.0

    def change(self, patch: Any) -> None:
        patch.setattr(type(self), "speed", 6.0)

    def tick(self) -> float:
        return self.speed


@expect(WARNED)
class ClassAttributeOfABase(ClassAttribute):
    def change(self, patch: Any) -> None:
        patch.setattr(ClassAttribute, "speed", 6.0)


@expect(WARNED)
class ClassObject(State):
    body: ClassVar[Body] = Body(1.0)

    def change(self, patch: Any) -> None:
        patch.setattr(self.body, "mass", 6.0)

    def tick(self) -> float:
        return self.body.mass


@expect(WARNED)
class ClassTable(State):
    bodies: ClassVar[dict[str, Body]] = {"a": Body(1.0)}

    def change(self, patch: Any) -> None:
        patch.setitem(self.bodies, "a", Body(8.0))

    def tick(self) -> float:
        return self.bodies["a"].mass


@expect(WARNED)
class MethodReplaced(State):
    def change(self, patch: Any) -> None:
        patch.setattr(type(self), "tick", lambda self: 11.0)


@expect(WARNED)
class PropertyReplaced(State):
    @property
    def speed(self) -> float:
        return 1.0

    def change(self, patch: Any) -> None:
        patch.setattr(type(self), "speed", property(lambda self: 5.0))

    def tick(self) -> float:
        return self.speed


@expect(WARNED)
class AnotherClassesAttribute(State):
    def change(self, patch: Any) -> None:
        patch.setattr(Terrain, "rough", 5.0)

    def tick(self) -> float:
        return Terrain.rough


@expect(WARNED)
class AnotherClassesMethod(State):
    def change(self, patch: Any) -> None:
        patch.setattr(Terrain, "height", staticmethod(lambda: 9.0))

    def tick(self) -> float:
        return Terrain.height()


@expect(WARNED)
class ModuleGlobal(State):
    def change(self, patch: Any) -> None:
        patch.setitem(globals(), "GRAVITY", 3.7)

    def tick(self) -> float:
        return GRAVITY


@expect(WARNED)
class ModuleTable(State):
    def change(self, patch: Any) -> None:
        patch.setitem(TABLE, "k", [1.0, 2.0])

    def tick(self) -> float:
        return sum(TABLE["k"])


@expect(WARNED)
class ModuleFunction(State):
    def change(self, patch: Any) -> None:
        patch.setitem(globals(), "scaled", lambda x: x * 50)

    def tick(self) -> float:
        return scaled(1.0)


@expect(WARNED)
class ModuleCounter(State):
    def change(self, patch: Any) -> None:
        patch.setitem(globals(), "COUNTER", itertools.count(9))

    def tick(self) -> float:
        return next(COUNTER)


@expect(WARNED)
class Instances(State):
    class Ball:
        made: ClassVar[list[Any]] = []

        def __init__(self, v: float) -> None:
            self.v = v
            self.made.append(self)

    def make(self) -> None:
        Instances.Ball.made.clear()
        self.balls = [Instances.Ball(1.0), Instances.Ball(2.0)]

    def tick(self) -> float:
        return sum(ball.v for ball in Instances.Ball.made)


@expect(WARNED)
class DecimalContext(State):
    def change(self, patch: Any) -> None:
        patch.setattr(decimal.getcontext(), "prec", 3)

    def tick(self) -> float:
        return float(decimal.Decimal(1) / decimal.Decimal(3))


@expect(WARNED)
class NumpyErrors(State):
    def change(self, patch: Any) -> None:
        self.before = np.geterr()["divide"]
        np.seterr(divide="raise")

    def tick(self) -> float:
        try:
            return float(np.isinf(np.ones(1) / np.zeros(1))[0])
        except FloatingPointError:
            return 7.0


@expect(REFUSED)
class ContextVariable(State):
    def make(self) -> None:
        self.v = contextvars.ContextVar("v", default=1.0)

    def change(self, patch: Any) -> None:
        self.v.set(5.0)

    def tick(self) -> float:
        return self.v.get()


# Random numbers.


@expect(OWN_STREAM)
class Generators(State):
    def make(self) -> None:
        self.a, self.c, self.d = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)

    def change(self, patch: Any) -> None:
        self.a.normal(size=3)

    def tick(self) -> float:
        return self.a.normal() + self.c.normal() + self.d.gauss(0, 1)


@expect(OWN_STREAM)
class SpaceReplaced(State):
    def change(self, patch: Any) -> None:
        self.action_space = gym.spaces.Discrete(2**40, start=5, seed=3)

    def tick(self) -> float:
        return float(self.action_space.sample())


@expect(SAME)
class SeedSequence(State):
    def make(self) -> None:
        self.s = np.random.SeedSequence(5)

    def change(self, patch: Any) -> None:
        self.s.spawn(3)

    def tick(self) -> float:
        return float(np.random.default_rng(self.s.spawn(1)[0]).random())


@expect(OWN_STREAM)
class TorchGenerator(State):
    def make(self) -> None:
        import torch

        self.g = torch.Generator().manual_seed(3)

    def tick(self) -> float:
        import torch

        return float(torch.rand(1, generator=self.g))


# What belongs to the process or to the system.


@expect(SAME)
class Lock(State):
    def make(self) -> None:
        self.lock = threading.RLock()

    def tick(self) -> float:
        with self.lock:
            return 1


@expect(REFUSED)
class HeldLock(Lock):
    def change(self, patch: Any) -> None:
        self.lock.acquire()


@expect(REFUSED)
class Thread(State):
    def make(self) -> None:
        self.n = 0.0
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        k = 0.0
        while True:
            self.go.acquire()
            k += 1
            self.n = k
            self.done.release()

    def change(self, patch: Any) -> None:
        self.tick()
        self.tick()

    def tick(self) -> float:
        self.go.release()
        self.done.acquire()
        return self.n


@expect(REFUSED)
class ThreadThatEnded(Thread):
    def run(self) -> None:
        self.n += 1

    def change(self, patch: Any) -> None:
        self.thread.join()

    def tick(self) -> float:
        return float(self.thread.is_alive())


@expect(SAME)
class ThreadNotStarted(State):
    def make(self) -> None:
        self.n = 0.0
        self.thread = threading.Thread(target=self.count)

    def count(self) -> None:
        self.n += 1

    def tick(self) -> float:
        self.thread.start()
        self.thread.join()
        self.thread = threading.Thread(target=self.count)
        return self.n


@expect(SAME)
class Queue(State):
    def make(self) -> None:
        self.q: queue.Queue[int] = queue.Queue()
        for i in range(500):
            self.q.put(i)

    def change(self, patch: Any) -> None:
        self.q.get()

    def tick(self) -> float:
        return self.q.get()


@expect(REFUSED)
class OpenFile(State):
    def make(self) -> None:
        self.f = open(__file__)  # noqa: SIM115

    def tick(self) -> float:
        return len(self.f.readline())


@expect(REFUSED)
class ClosedFile(OpenFile):
    def change(self, patch: Any) -> None:
        self.f.close()

    def tick(self) -> float:
        return float(self.f.closed)


@expect(SAME)
class FileInMemory(State):
    def make(self) -> None:
        self.f = io.StringIO("".join(f"{i}\n" for i in range(100)))

    def change(self, patch: Any) -> None:
        self.f.readline()

    def tick(self) -> float:
        return float(self.f.readline())


@expect(REFUSED)
class Database(State):
    def make(self) -> None:
        self.c = sqlite3.connect(":memory:")

    def tick(self) -> float:
        return float(self.c.execute("select 7").fetchone()[0])


@expect(REFUSED)
class Scipy(State):
    def make(self) -> None:
        from scipy.spatial import cKDTree

        self.t = cKDTree(np.random.default_rng(0).random((20, 2)))

    def tick(self) -> float:
        return float(self.t.query([0.5, 0.5])[0])


@expect(SAME)
class Networkx(State):
    def make(self) -> None:
        import networkx

        self.g: Any = networkx.path_graph(5)

    def change(self, patch: Any) -> None:
        self.g.add_edge(0, 4, weight=3.0)

    def tick(self) -> float:
        return sum(d.get("weight", 1.0) for *_, d in self.g.edges(data=True))

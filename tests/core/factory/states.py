"""Environments whose every step depends on a state that is easily lost: what it is, what was changed, what is expected.

``SAME``: a copy does the same. ``REFUSED``: there is none. ``WARNED``: there is one, and what it lacks was named.
``OWN_STREAM``: it draws its own random numbers, as all copies do.
"""

# ruff: noqa: F401 (what the code in the table uses)

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
import textwrap
import threading
import types
import weakref
from typing import Any

import gymnasium as gym
import numpy as np

SAME, REFUSED, WARNED, OWN_STREAM = "same", "refused", "warned", "own stream"
NEEDS = {"Networkx": "networkx", "Scipy": "scipy", "Torch": "torch", "TorchView": "torch", "TorchGenerator": "torch"}

GRAVITY = 9.8
TABLE = {"k": [1.0]}
COUNTER = itertools.count(5)
HANDLES: Any = None
STATES: dict[str, str] = {}


class State(gym.Env[Any, Any]):
    """What all have in common: the position grows by what ``tick`` reads out of the state."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.x = 0.0
        self.make()

    def make(self) -> None:
        """Make the state."""

    def change(self, patch: Any) -> None:
        """Change it, as a user does after construction; ``patch`` undoes what is not the instance's."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x]), {}

    def step(self, action: Any) -> Any:
        self.x += float(self.tick())  # type: ignore[attr-defined]
        return np.array([self.x]), 0.0, False, False, {}


def scaled(x: float) -> float:
    return x * 1.0


class Body:
    kind = 1.0

    def __init__(self, mass: float) -> None:
        self.mass = mass


class Terrain:
    rough = 1.0

    @staticmethod
    def height() -> float:
        return 1.0


class Point:
    __slots__ = ("__private", "a")

    def set(self, value: float) -> None:
        self.a = self.__private = value

    def get(self) -> float:
        return self.a + self.__private


class Counts:
    v = 1.0

    def f(self) -> float:
        self.v += 1
        return self.v


class Heavy(Body):
    @property
    def mass(self) -> float:
        return 2.0

    @mass.setter
    def mass(self, value: float) -> None:
        vars(self)["mass"] = value


class Forgets:
    v = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.v = 1.0


class ReducedDict(dict[str, float]):
    extra = 1.0

    def __missing__(self, key: str) -> float:
        return self.extra

    def __reduce__(self) -> Any:
        return ReducedDict, (dict(self),)


class Registered:
    v = 1.0


copyreg.pickle(Registered, lambda _: (Registered, ()))


class One:
    one: Any = None
    v = 1.0

    def __new__(cls) -> Any:
        cls.one = cls.one or object.__new__(cls)
        return cls.one

    def __reduce__(self) -> Any:
        return One, ()


class Mode(enum.Enum):
    SLOW = 1.0
    FAST = 4.0


class CPair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_double), ("b", ctypes.c_double * 3)]


class Ball:
    made: list[Any] = []  # noqa: RUF012

    def __init__(self, v: float) -> None:
        self.v = v
        self.made.append(self)


def counting() -> Any:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count, lambda: n * 10


def recursive() -> Any:
    depth = 3

    def f(k: int) -> int:
        return depth if k == 0 else f(k - 1) + depth

    def deeper() -> None:
        nonlocal depth
        depth += 1

    return f, deeper


def caught() -> KeyError:
    try:
        raise KeyError(3)
    except KeyError as error:
        return error


def raises(function: Any, *args: Any) -> float:
    try:
        function(*args)
    except (ValueError, FloatingPointError):
        return 7.0
    return 1.0


def network() -> Any:
    import torch

    made = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    made.register_buffer("b", torch.ones(1), persistent=False)
    return made


def state(name: str, expected: str, make: str, tick: str, change: str = "pass", *, body: str = "") -> None:
    """Enter an environment into the table, as a class of this module.

    :param make: code that makes the state
    :param tick: code that reads it, the last line an expression
    :param change: code that changes it
    :param body: more of the class
    """
    *before, last = tick.split("; ")
    parts = {"make(self)": make, "change(self, patch)": change, "tick(self)": "; ".join([*before, f"return {last}"])}
    functions = [f"def {head}:\n    {text}" for head, text in parts.items() if text]
    within = textwrap.indent("\n".join([body or "pass", *functions]), "    ")
    code = f"class {name}(State):\n{within}"
    exec(compile(code, f"<{name}>", "exec"), globals())
    STATES[name] = expected


# fmt: off

# Objects.
state("Slots", SAME, "self.p = Point(); self.p.set(1.0)", "self.p.get()", "self.p.set(7.0)")
state("Cycle", SAME, "self.n = {'v': 1.0}; self.n.update(itself=self.n, env=self)", "self.n['itself']['env'].n['v']",
      "self.n['v'] = 3.0")
state("Property", SAME, "self.body = Heavy(1.0)", "self.body.mass + vars(self.body)['mass']",
      "vars(self.body)['mass'] = 4.0")
state("CachedProperty", SAME, "self.k = 1.0", "self.table + self.k", "self.table; self.k = 5.0",
      body="table = functools.cached_property(lambda self: self.k * 10)")
state("Weak", SAME, "self.o = collections.UserList([1.0]); self.w = weakref.ref(self.o); "
      "self.d = weakref.WeakValueDictionary(a=self.o)", "self.o[0] += 1; self.w()[0] + self.d['a'][0]")
state("BoundMethod", SAME, "self.o = Counts(); self.f, self.g = self.o.f, self.own", "self.f() + self.o.v + self.g()",
      body="def own(self): return self.x")
state("InstancePatched", SAME, "", "0.0", "self.tick = types.MethodType(lambda self: 8.0 + self.x, self)")
state("AnotherClass", SAME, "self.o = Body(1.0)", "self.o.mass", "self.o.__class__ = Heavy")
state("ClassMadeAtRunTime", SAME, "self.o = type('Made', (), {'v': 1.0, 'f': lambda self: self.v * 2})()", "self.o.f()",
      "type(self.o).v = 6.0")
state("Forgetful", REFUSED, "self.p = Forgets()", "self.p.v", "self.p.v = 4.0")
state("ReducedByItsClass", REFUSED, "self.d = ReducedDict(a=1.0)", "self.d['zzz']", "self.d.extra = 5.0")
state("ReducedByAnother", REFUSED, "self.p = Registered()", "self.p.v", "self.p.v = 3.0")
state("Singleton", REFUSED, "self.s = One()", "One().v", "patch.setattr(One, 'one', self.s); self.s.v = 4.0")
state("Caught", REFUSED, "", "self.error.__traceback__ is not None", "self.error = caught()")
state("Enumerated", SAME, "self.mode = Mode.SLOW", "self.mode.value + (self.mode is Mode.FAST)",
      "self.mode = Mode.FAST")

# Containers, and where iterators are.
state("Containers", SAME, "self.d = collections.deque([1.0, 2.0], maxlen=3); "
      "self.dd = collections.defaultdict(lambda: self.x); self.c = collections.Counter('aab'); "
      "self.cm = collections.ChainMap({}, {'a': 1})",
      "self.d.append(self.d[0]); sum(self.d) + self.dd['q'] + self.c['a'] + self.cm['a']",
      "self.d.append(5.0); self.cm['a'] = 9")
state("ArrayOfTheStandardLibrary", SAME, "self.a = array.array('d', [1, 2, 3])", "self.a[2]",
      "bisect.insort(self.a, 2.5)")
state("Numbers", SAME, "self.f, self.t = fractions.Fraction(1, 3), datetime.timedelta(seconds=1)",
      "self.f + self.t.total_seconds()", "self.f += 2; self.t *= 4")
state("ListIterator", SAME, "self.i = iter(list(range(50)))", "next(self.i)", "next(self.i), next(self.i)")
state("Itertools", SAME, "self.zip = zip(itertools.cycle([1, 2, 3]), map(abs, itertools.count(-50))); "
      "self.chain = itertools.chain(range(3), range(100, 200)); self.a, self.b = itertools.tee(iter(range(100)))",
      "sum(next(self.zip)) + next(self.chain) + next(self.a) * 100 + next(self.b)",
      "[next(i) for i in (self.zip, self.chain, self.chain, self.chain, self.chain, self.a)]")
state("DictIterator", REFUSED, "self.d = {i: i * 2 for i in range(50)}; self.i = iter(self.d.items())",
      "next(self.i)[1]", "next(self.i)")
state("SetIterator", REFUSED, "self.s = {3.5, 2.5, 99.5, -1.5, 7.25}; self.i = iter(self.s)", "next(self.i, 0.0)",
      "next(self.i)")
state("Generator", REFUSED, "self.g = (i * i for i in range(1000))", "next(self.g)", "next(self.g)")
state("SetOfTexts", WARNED, "self.s = set('abcdefghijklmnop')", "sum(ord(k) * 2.0**-i for i, k in enumerate(self.s))")
state("SetOfObjects", WARNED, "self.s = {Body(i) for i in range(20)}",
      "sum(k.mass * 2.0**-i for i, k in enumerate(self.s))")
state("KeyedById", REFUSED,
      "self.o = [Body(i) for i in range(3)]; self.d = {id(o): i + 1.0 for i, o in enumerate(self.o)}",
      "sum(self.d.get(id(o), -100) for o in self.o)")

# Memory.
state("Views", SAME,
      "self.a = np.zeros(10); self.v = self.a[::2]; self.m = np.ma.masked_array([1.0, 2, 3], [0, 1, 0]); "
      "self.r = np.rec.array([(1, 2.0)], dtype=[('a', int), ('b', float)])",
      "self.v += 1; self.a.sum() + self.m.sum() + self.r.b[0]")
state("ReadOnly", SAME, "self.a = np.array([1, 2, 3]); self.a.flags.writeable = False", "raises(self.a.fill, 5)")
state("ViewOfBytes", REFUSED, "self.b = bytearray(8); self.v = memoryview(self.b)", "self.v[0] += 1; self.b[0]")
state("CStructure", SAME, "self.s = CPair(1.0)", "self.s.a + self.s.b[1]", "self.s.a, self.s.b[1] = 5.0, 2.0")
state("CPointer", REFUSED, "self.b = (ctypes.c_double * 4)(1, 2, 3, 4); self.p = ctypes.pointer(self.b)",
      "self.p.contents[0]")
state("CLibrary", REFUSED, "self.library = ctypes.CDLL(None)", "self.library.abs(-3)")
state("HandleInTheModule", WARNED, "global HANDLES; self.handle = 0; "
      "HANDLES = types.SimpleNamespace(library=ctypes.CDLL(None), opened=[3.0])", "HANDLES.opened[self.handle]")
state("TorchView", SAME, "import torch; self.t = torch.zeros(4); self.v, self.n = self.t[1:3], self.t.numpy()",
      "self.v += 1; self.n[0] += 1; self.t.sum()")
state("Torch", SAME, "self.m = network(); self.m[0].register_forward_hook(self.hook)",
      "import torch; (self.m(torch.ones(2, 1)).sum() + self.m.b).detach()",
      "self.m.b.mul_(7); self.m[0].weight.data.fill_(2.0); self.m.eval()",
      body="def hook(self, module, given, out): return out * 2")

# Functions.
state("Closure", SAME, "k = [1.0]; self.f, self.k = (lambda: k[0]), k", "self.k[0] += 1; self.f()", "self.k[0] = 9.0")
state("SharedVariable", SAME, "self.count, self.total = counting()", "self.count() + self.total()",
      "self.count(); self.count()")
state("Recursive", SAME, "self.f, self.deeper = recursive()", "self.deeper(); self.f(4)", "self.deeper()")
state("Partial", SAME, "self.k = [1.0]; self.f = functools.partial(lambda k, by: k[0] * by, self.k, by=2)",
      "self.k[0] += 1; self.f()", "self.k[0] = 5.0")
state("Dispatched", SAME, "self.f = functools.singledispatch(lambda x: 1.0)", "self.f(1.0)",
      "self.f.register(float, lambda x: 5.0)")
# What is kept was computed before the change.
CELL = "self.level = 1.0; self.cell = functools.lru_cache(None)(self._cell)"
CELL_BODY = "def _cell(self, i): return self.level * 10 + i"
state("Cache", REFUSED, CELL, "self.cell(3)", "self.cell(3); self.level = 7.0", body=CELL_BODY)
state("EmptyCache", SAME, CELL, "self.cell(3)", "self.cell(3); self.cell.cache_clear(); self.level = 7.0",
      body=CELL_BODY)
state("CacheOfTheClass", WARNED, "self.level = 1.0", "self.cell(3)", "self.cell(3); self.level = 7.0",
      body="@functools.lru_cache(None)\ndef cell(self, i): return self.level * 10 + i")

# What the code reads beside the instance.
state("ClassAttribute", WARNED, "", "self.speed", "patch.setattr(type(self), 'speed', 6.0)", body="speed = 1.0")
state("AttributeOfABase", WARNED, "self.body = Heavy(1.0)", "self.body.kind", "patch.setattr(Body, 'kind', 6.0)")
state("ClassObject", WARNED, "", "self.body.mass", "patch.setattr(self.body, 'mass', 6.0)", body="body = Body(1.0)")
state("ClassTable", WARNED, "", "self.bodies['a'].mass", "patch.setitem(self.bodies, 'a', Body(8.0))",
      body="bodies = {'a': Body(1.0)}")
state("MethodReplaced", WARNED, "", "0.0", "patch.setattr(type(self), 'tick', lambda self: 11.0)")
state("PropertyReplaced", WARNED, "", "self.speed",
      "patch.setattr(type(self), 'speed', property(lambda self: 5.0))", body="speed = property(lambda self: 1.0)")
state("AnotherClassesAttribute", WARNED, "", "Terrain.rough", "patch.setattr(Terrain, 'rough', 5.0)")
state("AnotherClassesMethod", WARNED, "", "Terrain.height()",
      "patch.setattr(Terrain, 'height', staticmethod(lambda: 9.0))")
state("ModuleGlobal", WARNED, "", "GRAVITY", "patch.setitem(globals(), 'GRAVITY', 3.7)")
state("ModuleTable", WARNED, "", "sum(TABLE['k'])", "patch.setitem(TABLE, 'k', [1.0, 2.0])")
state("ModuleFunction", WARNED, "", "scaled(1.0)", "patch.setitem(globals(), 'scaled', lambda x: x * 50)")
state("ModuleCounter", WARNED, "", "next(COUNTER)", "patch.setitem(globals(), 'COUNTER', itertools.count(9))")
state("Instances", WARNED, "Ball.made.clear(); self.balls = [Ball(1.0), Ball(2.0)]",
      "sum(ball.v for ball in Ball.made)")
state("DecimalContext", WARNED, "", "decimal.Decimal(1) / decimal.Decimal(3)",
      "patch.setattr(decimal.getcontext(), 'prec', 3)")
state("NumpyErrors", WARNED, "", "raises(np.divide, np.ones(1), np.zeros(1))",
      "np.seterr(divide='raise')")
state("ContextVariable", REFUSED, "self.v = contextvars.ContextVar('v', default=1.0)", "self.v.get()",
      "self.v.set(5.0)")

# Random numbers.
state("Generators", OWN_STREAM,
      "self.a, self.c, self.d = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)",
      "self.a.normal() + self.c.normal() + self.d.gauss(0, 1)", "self.a.normal(size=3)")
state("SpaceReplaced", OWN_STREAM, "", "self.action_space.sample()",
      "self.action_space = gym.spaces.Discrete(2**40, start=5, seed=3)")
state("SeedSequence", SAME, "self.s = np.random.SeedSequence(5)", "np.random.default_rng(self.s.spawn(1)[0]).random()",
      "self.s.spawn(3)")
state("TorchGenerator", OWN_STREAM, "import torch; self.g = torch.Generator().manual_seed(3)",
      "import torch; torch.rand(1, generator=self.g)")

# What belongs to the process or to the system.
state("Lock", SAME, "self.lock = threading.RLock()", "self.lock.acquire(); self.lock.release() or 1.0")
state("HeldLock", REFUSED, "self.lock = threading.RLock()", "1.0", "self.lock.acquire()")
state("Thread", REFUSED, "self.go = threading.Event(); "
      "self.thread = threading.Thread(target=self.go.wait, daemon=True); self.thread.start()",
      "self.thread.is_alive()")
state("ThreadThatEnded", REFUSED, "self.thread = threading.Thread(target=int); self.thread.start(); self.thread.join()",
      "self.thread.is_alive()")
state("ThreadNotStarted", REFUSED, "self.n = 0.0; self.thread = threading.Thread(target=self.count)",
      "self.thread.start(); self.thread.join(); self.thread = threading.Thread(target=self.count); self.n",
      body="def count(self): self.n += 1")
state("Queue", SAME, "self.q = queue.Queue(); [self.q.put(i) for i in range(500)]", "self.q.get()", "self.q.get()")
state("OpenFile", REFUSED, "self.f = open(__file__)", "len(self.f.readline())")
state("ClosedFile", REFUSED, "self.f = open(__file__)", "self.f.closed", "self.f.close()")
state("FileInMemory", SAME, "self.f = io.StringIO('1\\n2\\n3\\n4\\n5\\n')", "self.f.readline()", "self.f.readline()")
state("Database", REFUSED, "self.c = sqlite3.connect(':memory:')", "self.c.execute('select 7').fetchone()[0]")
state("Scipy", REFUSED, "from scipy.spatial import cKDTree; self.t = cKDTree(np.random.default_rng(0).random((20, 2)))",
      "self.t.query([0.5, 0.5])[0]")
state("Networkx", SAME, "import networkx; self.g = networkx.path_graph(5)",
      "sum(d.get('weight', 1.0) for *_, d in self.g.edges(data=True))", "self.g.add_edge(0, 4, weight=3.0)")

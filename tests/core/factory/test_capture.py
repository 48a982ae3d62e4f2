"""Environments that hold what cannot be copied, and whose constructor's arguments were remembered."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import cloudpickle
import pytest

from rl_ext_core.errors import InvalidTypeError, NotCopyableError
from rl_ext_core.factory import _sources, as_factory, capture_constructors
from rl_ext_core.factory._sources import recorded
from tests.core.factory.worlds import Line, Sealed, rollout


class Kept(Sealed):
    """Captured."""


class Heir(Kept):
    """A subclass that is not."""


class Adopted(Kept):
    """A subclass that is too."""


class Equal(Kept):
    """All its instances are equal, and none can be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


class Threaded(Line):
    """Its constructor starts a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.wait, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait for the end."""
        self.ended.wait()


class Slotted:
    """To which nothing can refer weakly."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Meta(type):
    """As that of TorchRL's environments: takes an option out of the arguments."""

    def __call__(cls, *args: Any, doubled: bool = False, **kwargs: Any) -> Any:
        env = super().__call__(*args, **kwargs)
        env.gain *= 2 if doubled else 1
        return env


class Doubled(Sealed, metaclass=Meta):
    """Made by that."""


for _cls in (Kept, Adopted, Equal, Slotted, Doubled):
    capture_constructors(_cls)


def test_what_was_changed_since_is_kept() -> None:
    env = Kept(2.0, length=9)
    rollout(env, steps=15)
    env.gain, env.rewards.bonus, env.weights[0] = 3.0, 9.0, -5.0
    factory = as_factory(env)
    assert factory.origin == "graft"
    copy = factory()
    assert type(copy.engine) is type(env.engine)
    assert rollout(copy) == rollout(env)


def test_arguments_of_a_class_are_those_of_its_own_instances() -> None:
    one, other, doubled = Equal(1.0), Equal(2.0), Doubled(3.0, doubled=True)
    known = {Kept(2.0, length=9): (Kept, (2.0,), {"length": 9}), Heir(2.0): None, Adopted(2.0): (Adopted, (2.0,), {})}
    for instance, call in [*known.items(), (Line(2.0), None), (object(), None), (Slotted(3), None)]:
        assert recorded(instance) == call
    assert (recorded(one), recorded(other)) == ((Equal, (1.0,), {}), (Equal, (2.0,), {}))
    # Before its metaclass takes the options.
    assert recorded(doubled) == (Doubled, (3.0,), {"doubled": True})
    assert rollout(as_factory(doubled)()) == rollout(doubled)


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    before = len(_sources._calls)
    env = Kept()
    assert len(_sources._calls) == before + 1
    del env
    gc.collect()
    assert len(_sources._calls) == before


def test_capturing_twice_is_capturing_once() -> None:
    made_by = Kept.__init__
    capture_constructors(Kept)
    assert Kept.__init__ is made_by
    called_by = Meta.__call__
    capture_constructors(Doubled)
    assert Meta.__call__ is called_by


def test_a_class_that_travels_with_its_instances_can_be_sources() -> None:
    # As one of a script or a notebook does.
    own: Any = type("Own", (Kept,), {"__module__": "__main__"})
    capture_constructors(own)
    env = own(3.0)
    assert pickle.loads(cloudpickle.dumps(own))(4.0).gain == 4.0
    env.gain = 5.0
    assert as_factory(env)().gain == 5.0


@pytest.mark.parametrize("thing", ["Kept", 5, None, Line()])
def test_what_is_no_class_is_refused(thing: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"is not a class; write capture_constructors\(MyEnv\)"):
        capture_constructors(thing)


def test_that_the_thread_of_a_copy_begins_anew_is_said(caplog: pytest.LogCaptureFixture) -> None:
    capture_constructors(Threaded)
    env = Threaded()
    try:
        assert as_factory(env).origin == "constructor"
        [said] = [record.getMessage() for record in caplog.records if ".thread" in record.getMessage()]
        assert said.startswith(".thread (threading.Thread): this cannot be looked into")
    finally:
        env.ended.set()
        env.thread.join()
    with pytest.raises(NotCopyableError, match="<running> is False in the instance and True in a copy"):
        as_factory(env)

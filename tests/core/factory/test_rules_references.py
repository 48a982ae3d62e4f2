"""Proxies and views of dictionaries refer to the copy of what they refer to."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from rl_ext_core.factory import _graft
from tests.core.factory.grafting import copied, different


class World:
    def __init__(self) -> None:
        self.gravity = 9.81
        self.parts: list[Any] = []

    def __call__(self) -> float:
        return self.gravity


class Still:
    def __init__(self, world: World) -> None:
        self.world = world
        self.size = 1


@pytest.mark.parametrize("make", [World, lambda: Still(World())])
def test_a_proxy_stands_for_the_copy(make: Any) -> None:
    target = make()
    original = SimpleNamespace(proxy=weakref.proxy(target), target=target)
    copy = copied(original)
    assert different(original, copy) == []
    copy.target.size = 5
    assert copy.proxy.size == 5
    assert not hasattr(target, "size") or target.size == 1
    assert isinstance(copy.proxy, weakref.ProxyTypes)


def test_a_proxy_that_is_met_before_its_target_stands_for_it_too() -> None:
    world = World()
    world.parts = [SimpleNamespace(world=weakref.proxy(world))]
    original = SimpleNamespace(a=world.parts, b=world)
    copy = copied(original)
    assert different(original, copy) == []
    copy.b.gravity = 1.0
    assert copy.a[0].world() == 1.0


@pytest.mark.parametrize("make", [World, lambda: Still(World())])
def test_a_proxy_whose_target_is_gone_is_refused(make: Any) -> None:
    with pytest.raises(_graft.Refused, match=r"\.proxy .*what it stands for is gone"):
        _graft.dumps(SimpleNamespace(proxy=weakref.proxy(make()), kept=3))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", ["keys", "values", "items"])
def test_a_view_is_one_of_the_copied_dictionary(kind: Any, name: str) -> None:
    held = kind(a=1, b=[2])
    original = SimpleNamespace(held=held, view=getattr(held, name)())
    copy = copied(original)
    assert different(original, copy) == []
    copy.held["c"] = 3
    assert list(copy.view) == list(getattr(copy.held, name)())
    assert len(original.view) == 2

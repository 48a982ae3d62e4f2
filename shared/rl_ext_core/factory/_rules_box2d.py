"""How Box2D's worlds are copied: bodies, fixtures and joints are created again, where they are, in the same order.

What a world remembers of contacts from one step to the next cannot be read: it begins anew in the copy. Until the next
reset of an environment, a copy may hence move a little differently.

https://github.com/pybox2d/pybox2d
"""

from __future__ import annotations

import gc
import importlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_ext_core.factory import _objects, _rules

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


_WORLD = ("gravity", "allowSleeping", "warmStarting", "continuousPhysics", "subStepping", "autoClearForces")
_LISTENERS = ("contactListener", "contactFilter", "destructionListener", "renderer")
# In an order in which they can be set: what wakes a body up comes before whether it is awake.
_BODY = (
    *("type", "position", "angle", "linearDamping", "angularDamping", "fixedRotation", "bullet", "gravityScale"),
    *("linearVelocity", "angularVelocity", "sleepingAllowed", "active", "awake"),
)
_FIXTURE = ("density", "friction", "restitution")
_FILTER = ("categoryBits", "maskBits", "groupIndex")
_SHAPES = {
    "b2PolygonShape": ("vertices", "radius"),
    "b2CircleShape": ("pos", "radius"),
    "b2EdgeShape": ("vertex1", "vertex2", "vertex0", "vertex3", "hasVertex0", "hasVertex3", "radius"),
}
_REVOLUTE = ("collideConnected", "lowerLimit", "upperLimit", "motorSpeed", "limitEnabled", "motorEnabled")
_ARGUMENTS = {"lowerLimit": "lowerAngle", "upperLimit": "upperAngle", "limitEnabled": "enableLimit"}
_ARGUMENTS["motorEnabled"] = "enableMotor"
_KINDS = "Box2D.Box2D"
# Whether two of the wrappers are of the same world tells this.
_owners: dict[int, Any] = {}


def _plain(value: Any) -> Any:
    return tuple(value) if type(value).__name__ in ("b2Vec2", "b2Vec3") else value


def _read(item: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plain(getattr(item, name)) for name in names}


def _held(item: Any) -> dict[str, Any]:
    """Return what somebody has put on one of Box2D's objects."""
    return {name: value for name, value in vars(item).items() if name not in ("this", "_b2World__data")}


def _owner(world: Any) -> Any:
    """Return the object that a world was made as: asked for its world, a body makes a new one every time."""
    if world.thisown:
        return world
    address = int(world.this)
    found = _owners.get(address)
    if found is None or not found.thisown or int(found.this) != address:
        same = (item for item in gc.get_objects() if type(item) is type(world) and item.thisown)
        found = next((item for item in same if int(item.this) == address), None)
        _owners.clear()  # one at a time: this keeps it alive
        _owners[address] = found
    return found


def _world(world: Any) -> tuple[Any, ...]:
    owner = _owner(world)
    if owner is not world:
        return _itself, (owner,)
    state = {"held": _held(world), "listeners": _read(world, _LISTENERS), "user": _user_data(world)}
    return _make_world, (_definition(world),), state, None, None, _fill_world


def _itself(world: Any) -> Any:
    return world


def _definition(world: Any) -> dict[str, Any]:
    index = {int(body.this): number for number, body in enumerate(world.bodies)}
    return {
        **_read(world, _WORLD),
        "bodies": [_body_definition(body) for body in world.bodies],
        "joints": [_joint_definition(joint, index) for joint in world.joints],
    }


def _body_definition(body: Any) -> dict[str, Any]:
    mass = body.massData
    return {
        **_read(body, _BODY),
        "mass": (mass.mass, _plain(mass.center), mass.I),
        "fixtures": [_fixture_definition(fixture) for fixture in body.fixtures],
    }


def _fixture_definition(fixture: Any) -> dict[str, Any]:
    return {
        **_read(fixture, _FIXTURE),
        **_read(fixture.filterData, _FILTER),
        "isSensor": fixture.sensor,
        "shape": _shape_definition(fixture.shape),
    }


def _shape_definition(shape: Any) -> dict[str, Any]:
    kind = type(shape).__name__
    if kind not in _SHAPES:
        raise pickle.PicklingError(f"a shape of the kind {kind} cannot be read")
    return {"kind": kind, **_read(shape, _SHAPES[kind])}


def _joint_definition(joint: Any, index: dict[int, int]) -> dict[str, Any]:
    if type(joint).__name__ != "b2RevoluteJoint":
        raise pickle.PicklingError(f"a joint of the kind {type(joint).__name__} cannot be read")
    return {
        **_read(joint, _REVOLUTE),
        "localAnchorA": _plain(joint.GetLocalAnchorA()),
        "localAnchorB": _plain(joint.GetLocalAnchorB()),
        "maxMotorTorque": joint.GetMaxMotorTorque(),
        "referenceAngle": joint.GetReferenceAngle(),
        "bodies": (index[int(joint.bodyA.this)], index[int(joint.bodyB.this)]),
    }


def _user_data(world: Any) -> dict[str, Any]:
    bodies = [(body.userData, [fixture.userData for fixture in body.fixtures]) for body in world.bodies]
    return {"bodies": bodies, "joints": [joint.userData for joint in world.joints]}


def _make_world(definition: dict[str, Any]) -> Any:
    world = importlib.import_module("Box2D").b2World(gravity=definition["gravity"], doSleep=definition["allowSleeping"])
    for name in _WORLD[2:]:
        setattr(world, name, definition[name])
    bodies = [_make_body(world, body) for body in definition["bodies"]]
    for joint in definition["joints"]:
        named = {_ARGUMENTS.get(name, name): value for name, value in joint.items() if name != "bodies"}
        first, second = (bodies[number] for number in joint["bodies"])
        world.CreateRevoluteJoint(bodyA=first, bodyB=second, **named)
    # Joints wake up what they hold together.
    for body, wanted in zip(bodies, definition["bodies"], strict=True):
        body.awake = wanted["awake"]
    return world


def _make_body(world: Any, definition: dict[str, Any]) -> Any:
    box2d = importlib.import_module("Box2D")
    body = world.CreateBody(type=definition["type"], position=definition["position"], angle=definition["angle"])
    for fixture in definition["fixtures"]:
        named = {name: value for name, value in fixture.items() if name != "shape"}
        body.CreateFixture(box2d.b2FixtureDef(shape=_make_shape(fixture["shape"]), **named))
    mass, center, inertia = definition["mass"]
    made = body.massData
    if (made.mass, tuple(made.center), made.I) != (mass, center, inertia):
        body.massData = box2d.b2MassData(mass=mass, center=center, I=inertia)
    for name in _BODY[3:]:
        if _plain(getattr(body, name)) != definition[name]:
            setattr(body, name, definition[name])
    return body


def _make_shape(definition: dict[str, Any]) -> Any:
    box2d = importlib.import_module("Box2D")
    corners = definition.get("vertices")
    if corners is not None and list(corners) == _box(*map(abs, corners[0])):
        # Given by its corners, it would begin with another one.
        return box2d.b2PolygonShape(box=tuple(map(abs, corners[0])), radius=definition["radius"])
    shape = getattr(box2d, definition["kind"])()
    for name, value in definition.items():
        if name != "kind":
            setattr(shape, name, value)
    return shape


def _box(x: float, y: float) -> list[tuple[float, float]]:
    return [(-x, -y), (x, -y), (x, y), (-x, y)]


def _fill_world(world: Any, state: dict[str, Any]) -> None:
    vars(world).update(state["held"])
    for name, listener in state["listeners"].items():
        if listener is not None:
            setattr(world, name, listener)
    for body, (data, of_fixtures) in zip(world.bodies, state["user"]["bodies"], strict=True):
        for item, value in ((body, data), *zip(body.fixtures, of_fixtures, strict=True)):
            if value is not None:
                item.userData = value
    for joint, data in zip(world.joints, state["user"]["joints"], strict=True):
        if data is not None:
            joint.userData = data


def _world_settings(world: Any) -> dict[str, Any]:
    owner = _owner(world)
    if owner is not world:
        return {"owner": owner}
    return {**_held(world), **_read(world, _LISTENERS), "<user>": _user_data(world), "<made>": _definition(world)}


def _part_of(owner: Any, listed: str, number: int) -> Any:
    return getattr(owner, listed)[number]


def _placed(listed: str, owner_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the rule of what is found in a list of its owner's."""

    def rule(item: Any) -> tuple[Any, ...]:
        owner, address = owner_of(item), int(item.this)
        number = next(n for n, other in enumerate(getattr(owner, listed)) if int(other.this) == address)
        return _part_of, (owner, listed, number), _held(item), None, None, _objects.set_state

    return rule


def _shape(shape: Any) -> tuple[Any, ...]:
    return _make_shape, (_shape_definition(shape),)


def _loose_fixture(definition: Any) -> tuple[Any, ...]:
    return _make_loose_fixture, (type(definition), _loose_fixture_settings(definition))


def _loose_fixture_settings(definition: Any) -> dict[str, Any]:
    named = _read(definition, (*_FIXTURE, *_FILTER, "isSensor", "userData"))
    return {**named, "shape": None if definition.shape is None else _shape_definition(definition.shape)}


def _make_loose_fixture(cls: Any, named: dict[str, Any]) -> Any:
    shape = named.pop("shape")
    return cls(**named) if shape is None else cls(shape=_make_shape(shape), **named)


def _callback(callback: Any) -> tuple[Any, ...]:
    return _make_callback, (type(callback),), _held(callback), None, None, _objects.set_state


def _make_callback(cls: Any) -> Any:
    base = next(kind for kind in cls.__mro__ if kind.__module__ == _KINDS)
    callback = cls.__new__(cls)
    base.__init__(callback)
    return callback


_CALLBACKS = ("b2ContactListener", "b2ContactFilter", "b2DestructionListener", "b2QueryCallback", "b2RayCastCallback")

# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    (f"{_KINDS}:b2World", _world, _world_settings),
    (f"{_KINDS}:b2Body", _placed("bodies", lambda body: _owner(body.world)), None),
    (f"{_KINDS}:b2Joint", _placed("joints", lambda joint: _owner(joint.bodyA.world)), None),
    (f"{_KINDS}:b2Fixture", _placed("fixtures", lambda fixture: fixture.body), None),
    (f"{_KINDS}:b2FixtureDef", _loose_fixture, None),
    (f"{_KINDS}:b2Shape", _shape, None),
    (f"{_KINDS}:b2Vec2", _rules.by_parts, None),
    (f"{_KINDS}:b2Vec3", _rules.by_parts, None),
    *((f"{_KINDS}:{name}", _callback, None) for name in _CALLBACKS),
]

"""Copies of what MuJoCo, the Arcade Learning Environment, Box2D and pygame hold in memory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest

from rl_ext_core.factory import _graft
from rl_ext_core.factory._fingerprint import fingerprint
from tests.core.factory.grafting import act, copied, different, equal, made
from tests.core.factory.test_fingerprint import Holder

_XML = '<mujoco><worldbody><light pos="0 0 3"/><body><freejoint/><geom size=".5"/></body></worldbody></mujoco>'


@pytest.fixture
def mujoco() -> Any:
    return pytest.importorskip("mujoco")


@pytest.fixture
def pygame(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pygame.init()
    return pygame


def _stepped(mujoco: Any) -> Any:
    model = mujoco.MjModel.from_xml_string(_XML)
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, 5)
    return Holder(model=model, data=data)


def test_the_copied_data_belongs_to_the_copied_model(mujoco: Any) -> None:
    world = _stepped(mujoco)
    world.model.body_mass[1] = 7.0
    copy = copied(world)
    assert different(world, copy) == []
    assert copy.data.model is copy.model
    assert copy.model is not world.model
    for held in (world, copy):
        mujoco.mj_step(held.model, held.data, 20)
    assert world.data.qpos.tobytes() == copy.data.qpos.tobytes()
    # Its bytes are in the pickle once, and those of the data beside it.
    alone = len(_graft.dumps(Holder(model=world.model)))
    assert len(_graft.dumps(world)) < alone + len(world.data.__getstate__()) - len(world.model.__getstate__()) + 4_000


def test_views_of_a_simulator_s_memory_are_views_of_the_copy_s(mujoco: Any) -> None:
    world = _stepped(mujoco)
    world.height, world.masses, world.gravity = world.data.qpos[2:3], world.model.body_mass, world.model.opt.gravity[1:]
    copy = copied(world)
    assert different(world, copy) == []
    copy.data.qpos[2], copy.model.body_mass[1], copy.model.opt.gravity[2] = 5.0, 6.0, 7.0
    assert (copy.height[0], copy.masses[1], copy.gravity[1]) == (5.0, 6.0, 7.0)
    assert world.height[0] != 5.0


def test_structures_of_mujoco_are_copied_field_by_field(mujoco: Any) -> None:
    camera, options = mujoco.MjvCamera(), mujoco.MjvOption()
    camera.distance, camera.lookat[1], options.flags[3] = 2.5, 1.5, 1
    copy = copied(Holder(camera=camera, options=options, rectangle=mujoco.MjrRect(1, 2, 3, 4)))
    assert (copy.camera.distance, copy.camera.lookat[1], copy.options.flags[3]) == (2.5, 1.5, 1)
    assert (copy.rectangle.left, copy.rectangle.height) == (1, 4)
    with pytest.raises(_graft.Refused, match="it is a part of a model"):
        _graft.dumps(Holder(visual=_stepped(mujoco).model.vis))


_DRAWING = """
import warnings; warnings.simplefilter("ignore")
import gymnasium as gym, mujoco
from tests.core.factory.grafting import copied, different, equal
from tests.core.factory.test_fingerprint import Holder
environment = gym.make("InvertedPendulum-v5", render_mode="rgb_array", width=64, height=48)
environment.reset(seed=0)
before = environment.render()
print("drawn")
viewer = environment.unwrapped.mujoco_renderer.viewer
viewer.cam.distance, viewer.vopt.flags[0] = 1.5, 1
copy = copied(environment)
assert different(environment, copy) == []
assert equal(environment.render(), copy.render())
assert not equal(environment.render(), before)
assert copy.unwrapped.mujoco_renderer.viewer.data is copy.unwrapped.data
model, data = environment.unwrapped.model, environment.unwrapped.data
world = Holder(model=model, data=data, renderer=mujoco.Renderer(model, 48, 64))
other = copied(world)
assert different(world, other) == []
for held in (world, other):
    held.renderer.update_scene(held.data)
assert equal(world.renderer.render(), other.renderer.render())
for held in (environment, copy, world.renderer, other.renderer):
    held.close()
print("done")
"""


@pytest.mark.slow
def test_cameras_of_a_renderer_stay_as_they_were_set(mujoco: Any) -> None:
    environ = {**os.environ, "MUJOCO_GL": "egl"}
    done = subprocess.run([sys.executable, "-c", _DRAWING], check=False, capture_output=True, text=True, env=environ)
    if "drawn" not in done.stdout:
        pytest.skip(f"nothing to draw with: {done.stderr[-300:]}")
    assert "done" in done.stdout, done.stderr


def test_an_emulator_keeps_settings_game_and_place() -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    environment = made("ALE/Pong-v5", mode=1, difficulty=1, repeat_action_probability=0.0)
    environment.reset(seed=3)
    act(environment, 40)
    goes_on = copied(environment)
    for action in [1, 2, 3, 0] * 10:
        assert equal(environment.step(action)[:4], goes_on.step(action)[:4])
    environment.unwrapped.ale.setFloat("repeat_action_probability", 0.5)
    copy = copied(environment)
    assert different(environment, copy) == []
    mine, theirs = environment.unwrapped.ale, copy.unwrapped.ale
    assert theirs.getFloat("repeat_action_probability") == 0.5
    assert theirs.cloneState().getCurrentMode() == 1
    assert theirs.cloneState().getDifficulty() == 1
    assert equal(mine.getRAM(), theirs.getRAM())
    assert different(ale_py.ALEInterface(), copied(ale_py.ALEInterface())) == []


def test_a_world_of_bodies_is_made_again() -> None:
    pytest.importorskip("Box2D")
    environment = made("LunarLander-v3")
    environment.reset(seed=3)
    act(environment, 5)
    environment.unwrapped.world.warmStarting = False
    copy = copied(environment)
    assert different(environment, copy) == []
    one, other = environment.unwrapped, copy.unwrapped
    assert other.world.contactListener.env is other
    assert not other.world.warmStarting
    assert tuple(one.lander.position) == tuple(other.lander.position)
    other.lander.position = (1.0, 2.0)
    assert tuple(other.drawlist[0].position) == (1.0, 2.0)
    assert tuple(one.lander.position) != (1.0, 2.0)
    copy.step(0)


def test_joints_that_cannot_be_read_are_refused() -> None:
    box2d = pytest.importorskip("Box2D")
    world = box2d.b2World()
    first, second = world.CreateDynamicBody(), world.CreateDynamicBody()
    world.CreateDistanceJoint(bodyA=first, bodyB=second)
    with pytest.raises(_graft.Refused, match="b2DistanceJoint cannot be read"):
        _graft.dumps(Holder(world=world))


def test_pictures_keep_what_is_on_them(pygame: Any) -> None:
    picture = pygame.Surface((7, 5), pygame.SRCALPHA)
    picture.fill((1, 2, 3, 4), (1, 1, 2, 2))
    indexed = pygame.Surface((4, 4), 0, 8)
    indexed.set_palette_at(1, (9, 8, 7))
    indexed.set_at((2, 2), 1)
    indexed.set_colorkey((9, 8, 7))
    indexed.set_clip((0, 0, 3, 3))
    world = Holder(picture=picture, part=picture.subsurface((1, 1, 2, 2)), indexed=indexed, clock=pygame.time.Clock())
    world.sprite = pygame.sprite.Sprite(pygame.sprite.Group())
    world.color = pygame.Color(1, 2, 3, 4)
    copy = copied(world)
    assert different(world, copy) == []
    assert copy.part.get_parent() is copy.picture
    assert tuple(copy.indexed.get_at((2, 2))) == (9, 8, 7, 255)
    copy.picture.fill((5, 5, 5, 5))
    assert tuple(copy.part.get_at((0, 0))) == (5, 5, 5, 5)
    assert fingerprint(world.picture).differences(fingerprint(copy.picture)) != []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda pygame: pygame.font.Font(None, 23),
            "from which file it comes cannot be read; make it where it is used",
        ),
        (lambda pygame: pygame.display.set_mode((40, 30)), "hand the environment over before it is drawn"),
        (lambda pygame: pygame.mask.Mask((3, 2)), r"keep the picture, and write pygame.mask.from_surface\(picture\)"),
        (lambda pygame: pygame.mixer.Sound(buffer=bytes(100)), "would be played in every worker; make it where"),
    ],
    ids=["font", "window", "mask", "sound"],
)
def test_windows_and_what_is_made_of_files_and_pictures_are_refused(
    pygame: Any, make: Callable[[Any], Any], reason: str
) -> None:
    if pygame.mixer.get_init() is None:
        pygame.mixer.init()
    with pytest.raises(_graft.Refused, match=reason):
        _graft.dumps(Holder(held=make(pygame)))

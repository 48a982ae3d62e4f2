"""State of wrappers and environments that lasts over episodes."""

from __future__ import annotations

import pickle

import gymnasium
import pytest

from rl_ext_core.recording import EpisodeRecorder
from rl_ext_core.recording.layers import layer_states, restore_layers


def test_restored_layers_keep_objects_that_other_objects_share() -> None:
    pytest.importorskip("Box2D")
    pytest.importorskip("pygame")
    env, other = (EpisodeRecorder(gymnasium.make("CarRacing-v3", continuous=False)) for _ in range(2))
    env.reset(seed=3)
    for _ in range(30):
        env.step(3)
    other.repeat(env.episode_log())
    polygons = other.unwrapped.road_poly  # the car paints them through the tiles that it touches
    restore_layers(other, pickle.loads(pickle.dumps(layer_states(env))))
    assert other.unwrapped.road_poly is polygons
    polygons[0] = ([(0.0, 0.0)], polygons[0][1])
    restore_layers(other, pickle.loads(pickle.dumps(layer_states(env))))
    assert other.unwrapped.road_poly[0][0] == env.unwrapped.road_poly[0][0]
    env.close()
    other.close()

"""A user's program: classes, functions and globals of its main module, in each launch mode."""

DEFINITIONS = """
import gymnasium as gym, numpy as np

LEVEL = 1
seen = []

def bonus():
    return LEVEL * 10

class Base(gym.Env):
    observation_space = gym.spaces.Box(-100, 100, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)
    gravity = 1.0

    def look(self):
        return np.array([LEVEL, bonus(), self.gravity, self.extra()], np.float64)

    def extra(self):
        return 0

class Env(Base):
    def __init__(self, extra=0):
        self.given = extra

    def extra(self):
        return super().extra() + self.given

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seen.append("reset")
        return self.look(), {}

    def step(self, action):
        seen.append("step")
        return self.look(), 0.0, False, False, {}

def make(extra=0):
    return Env(extra)

# %%
"""

CHECKS = """
from rl_ext_core.factory import as_factory

def check(use):
    global LEVEL
    held = 5
    methods = [(kind, name, part) for kind in (Base, Env) for name, part in vars(kind).items() if callable(part)]
    env = Env(3)
    env.reset(seed=0)
    env.extra = lambda: held + LEVEL
    of_instance, of_class, of_function = as_factory(env), as_factory(Env), as_factory(lambda: make(held))
    # Workers have all as it is now.
    assert use(of_instance.for_workers(2, seed=0)) == [[1, 10, 1, 6]] * 2
    assert use(of_class.for_workers(2, overrides=[dict(extra=1), dict(extra=2)])) == [[1, 10, 1, 1], [1, 10, 1, 2]]
    assert use([of_function] * 2) == [[1, 10, 1, 5]] * 2
    class Local(Env): ...
    gym.register("Own-v0", entry_point=Env, kwargs=dict(extra=3))
    sources = Local(3), lambda: gym.make("Own-v0"), gym.make("Own-v0"), gym.spec("Own-v0"), "Own-v0"
    assert use([as_factory(source) for source in sources]) == [[1, 10, 1, 3]] * 5
    # Here nothing has changed, and what changes is seen.
    del seen[:]
    LEVEL, Base.gravity = 2, 9.8
    # A function that was set on the instance is pickled with the globals that it had then.
    for made, extra in ((env, 7), (of_instance(), 6)):
        assert type(made) is Env
        assert made.reset()[0].tolist() == [2, 20, 9.8, extra], made.look()
    assert of_instance() is not env
    for factory, extra in ((of_class, 0), (of_function, 5)):
        made = factory()
        assert type(made) is Env
        assert made.reset()[0].tolist() == [2, 20, 9.8, extra]
        made.step(0)
    assert seen == ["reset", "reset", "reset", "step", "reset", "step"]
    assert all(vars(kind)[name] is part for kind, name, part in methods)
    LEVEL, Base.gravity = 1, 1.0
"""

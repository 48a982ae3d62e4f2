"""Rules for classes of torch, TorchRL, Stable Baselines3 and VMAS whose own way of pickling loses something."""

from __future__ import annotations

import inspect
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_ext_core.factory import _objects, _rules

if TYPE_CHECKING:
    from rl_ext_core.factory._rules import Rules


# TorchRL's ``__new__`` puts these on the class; in a process that has constructed no environment it has none or others,
# and so have its bases.
_OF_ENV_BASE = ("_inplace_update", "_batch_locked", "_device", "_cache_in_keys")


def _env_base(env: Any) -> tuple[Any, ...]:
    kind, state = type(env), _rules.new(type(env), dict(vars(env)))[2:]
    of_classes = [
        (base, name, vars(base)[name]) for base in kind.__mro__ for name in _OF_ENV_BASE if name in vars(base)
    ]
    return _new_env_base, (kind, of_classes), *state


def _new_env_base(kind: Any, of_classes: list[tuple[Any, str, Any]]) -> Any:
    for base, name, value in of_classes:
        setattr(base, name, value)
    return object.__new__(kind)


# All that the class has, as a dictionary: taken from the class again.
_OF_WRAPPER = "class_attributes"


def _wrapper(wrapper: Any) -> tuple[Any, ...]:
    held = {name: value for name, value in vars(wrapper).items() if name != _OF_WRAPPER}
    return _rules.new(type(wrapper), held, _fill_wrapper)


def _fill_wrapper(copy: Any, state: dict[str, Any]) -> None:
    _objects.set_state(copy, {**state, _OF_WRAPPER: dict(inspect.getmembers(type(copy)))})


# VMAS's random streams belong to its class, and go along as generators.


def _vmas(environment: Any) -> tuple[Any, ...]:
    state = (dict(vars(environment)), _generators(environment))
    return _rules.new(type(environment), state, _fill_vmas)


def _generators(environment: Any) -> tuple[Any, np.random.RandomState, random.Random]:
    import torch

    of_torch, of_numpy, of_python = torch.Generator(), np.random.RandomState(), random.Random()
    states = type(environment).vmas_random_state
    of_torch.set_state(states[0])
    of_numpy.set_state(states[1])
    of_python.setstate(states[2])
    return of_torch, of_numpy, of_python


def _fill_vmas(environment: Any, state: tuple[dict[str, Any], tuple[Any, Any, Any]]) -> None:
    attributes, (of_torch, of_numpy, of_python) = state
    _objects.set_state(environment, attributes)
    # The list itself: every method holds it.
    type(environment).vmas_random_state[:] = of_torch.get_state(), of_numpy.get_state(), of_python.getstate()


def _uninitialized(tensor: Any) -> tuple[Any, ...]:
    """Reduce a buffer or parameter of a lazy module. torch's own way loses dtype, device and ``persistent``."""
    args = (tensor.requires_grad, tensor.data.device, tensor.data.dtype)
    return type(tensor), args, dict(vars(tensor)), None, None, _objects.set_state


# Class, rule, and what a copy has in common with the original; None: what the rule keeps.
RULES: Rules = [
    ("torch.nn.parameter:UninitializedTensorMixin", _uninitialized, None),
    ("torchrl.envs.common:EnvBase", _env_base, None),
    ("stable_baselines3.common.vec_env.base_vec_env:VecEnvWrapper", _wrapper, None),
    ("vmas.simulator.environment.environment:Environment", _vmas, None),
]

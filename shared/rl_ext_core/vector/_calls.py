"""What the methods of a ``VecEnv`` do to one of its environments, beside steps and resets."""

from __future__ import annotations

from typing import Any

__all__ = ["call"]


def call(env: Any, name: str, data: Any) -> Any:
    """Do what the method of this name does.

    :param env: the environment
    :param name: of the method of ``VecEnv``; ``"render"`` is part of ``get_images``
    :param data: its arguments
    """
    if name == "render":
        return env.render()
    if name == "env_method":
        method, args, kwargs = data
        return env.get_wrapper_attr(method)(*args, **kwargs)
    if name == "get_attr":
        return env.get_wrapper_attr(data)
    if name == "has_attr":
        try:
            env.get_wrapper_attr(data)
        except AttributeError:
            return False
        return True
    if name == "set_attr":
        return setattr(env, *data)
    if name == "env_is_wrapped":
        return any(_is(layer, data) for layer in _wrappers(env))
    raise NotImplementedError(name)


def _wrappers(env: Any) -> list[Any]:
    import gymnasium

    layers = []
    while isinstance(env, gymnasium.Wrapper):
        layers.append(env)
        env = env.env
    return layers


def _is(layer: Any, name: tuple[str, str]) -> bool:
    """Whether a layer is of a class, given by module and name: naming it must not import the framework here."""
    own = [(base.__module__, base.__qualname__) for base in type(layer).__mro__]
    return name in own or name in getattr(type(layer), "stands_for", ())

"""Vectorized gymnasium environments in worker processes that share memory."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_ext_core.vector.vector_env import SharedMemoryVectorEnv

__all__ = ["SharedMemoryVectorEnv"]


def __getattr__(name: str) -> Any:
    # Workers import this package, and do not need the vectorized environment.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import gymnasium.vector

    if not hasattr(gymnasium.vector, "AutoresetMode"):
        from rl_ext_core.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs gymnasium 1.1 or later, which has AutoresetMode; installed is {gymnasium.__version__}. "
            'Install it with:\n    pip install "gymnasium>=1.1"'
        )
    from rl_ext_core.vector.vector_env import SharedMemoryVectorEnv

    return SharedMemoryVectorEnv


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

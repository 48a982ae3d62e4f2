"""Core that sb3_ext and torchrl_ext share: devices, factories, isolation and frame stores.

The core imports neither TorchRL nor Stable Baselines3, and this package does not import its subpackages. Import them by
name, for example ``from rl_ext_core.devices import resolve``.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"

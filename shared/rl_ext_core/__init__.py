"""What the adapters share: devices, factories, isolation and frame stores.

The core imports neither TorchRL nor Stable Baselines3, and importing this package loads none of its parts.
Import what you need by name, for example ``from rl_ext_core.devices import resolve``.
"""

from __future__ import annotations

from rl_ext_core import _import_path as _import_path  # what relative entries of sys.path mean now

__all__ = ["__version__"]

__version__ = "0.1.0"

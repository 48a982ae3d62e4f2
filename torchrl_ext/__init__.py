"""Extensions of TorchRL. They bear the names of what they replace and take the same arguments."""

from __future__ import annotations

__all__: list[str] = []

"""Output of the commands to a terminal, a pipe or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["new_console"]

# Columns of output to a log or a pipe; a terminal reports its own width.
_DEFAULT_WIDTH, _MIN_WIDTH = 120, 20


def new_console() -> Console:
    """Create a console for tables and plain text, 120 columns wide if there is no terminal."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if console.width < _MIN_WIDTH or (not console.is_terminal and "COLUMNS" not in console._environ):
        console.width = _DEFAULT_WIDTH
    return console

"""Output of the commands to a terminal, a pipe or a file."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = ["new_console", "show_progress"]

# Columns of output to a log or a pipe; a terminal reports its own width.
_DEFAULT_WIDTH, _MIN_WIDTH = 120, 20


def new_console() -> Console:
    """Create a console for tables and plain text, 120 columns wide if there is no terminal."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    if console.width < _MIN_WIDTH or (not console.is_terminal and "COLUMNS" not in console._environ):
        console.width = _DEFAULT_WIDTH
    return console


@contextlib.contextmanager
def show_progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr within the context, if that is a terminal.

    :param task: Name of the work
    :param total: Number of steps
    :return: Function that adds a number of finished steps
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        number = bar.add_task(task, total=total)
        yield lambda n_steps: bar.advance(number, n_steps)

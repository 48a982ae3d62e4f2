"""``rl-ext doctor --watch``: the memory of every GPU and of the processes on it, until Ctrl-C."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from rl_ext_core.devices import _nvml
from rl_ext_core.devices.doctor import _processes
from rl_ext_core.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl_ext_core.devices.doctor._processes import Usage


def watch(console: Console, seconds: float, count: int | None) -> None:
    """Show who uses which GPU, again and again; on anything but a terminal one table below the other.

    :param console: where to
    :param seconds: between two looks
    :param count: how many looks; None for no end
    :raises DeviceUnavailableError: there is no GPU, or NVML ceases to answer
    """
    from rich.live import Live

    looks = itertools.count(1) if count is None else range(1, count + 1)
    try:
        with Live(console=console, auto_refresh=False) if console.is_terminal else console as screen:
            for look in looks:
                table = _table(_read())
                if isinstance(screen, Live):
                    screen.update(table, refresh=True)
                else:
                    console.print(table)
                if look != count:
                    time.sleep(seconds)
    except KeyboardInterrupt:
        return  # which is how one ends it


def _read() -> list[Usage]:
    try:
        usages = _processes.read()
    except _nvml.UnavailableError as error:
        raise DeviceUnavailableError(f"no GPU to watch: {error}") from error
    if not usages:
        raise DeviceUnavailableError("no GPU to watch: NVML lists none")
    return usages


def _table(usages: list[Usage]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from rl_ext_core.devices.doctor._text import clean

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("nvidia-smi", no_wrap=True)
    table.add_column("name", overflow="fold")
    for column in ("pid", "kind", "MiB used", "MiB free"):
        table.add_column(column, justify="right", no_wrap=True)
    for usage in usages:
        used, free = usage.memory_total - usage.memory_free, usage.memory_free
        table.add_row(str(usage.index), Text(clean(usage.name)), "", "", _mib(used), _mib(free), style="bold")
        for process in usage.processes:
            name = Text(clean(f"  {process.name or '?'}"))
            table.add_row("", name, str(process.pid), process.kind, _mib(process.memory), "")
    return table


def _mib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:.0f}"

"""Examines copies of an environment in a process of its own, so that none is ever built in this one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rl_ext_core import processes
from rl_ext_core.devices import READ_AT_IMPORT
from rl_ext_core.factory import _byvalue

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rl_ext_core.factory._examine import Examination

__all__ = ["run"]

_LABEL = "trial copy"


def run(
    task: Callable[[], Examination],
    *,
    preload: Sequence[str] = (),
    start_method: str | None = None,
    environ: Mapping[str, str | None] | None = None,
    timeout: float | None = None,
) -> Examination:
    """Call a function in a process that ends with it.

    :param task: classes and functions in it may be of the main module
    :param preload: modules for the fork server
    :param start_method: of the process
    :param environ: variables to set, and to unset (None), in the process
    :param timeout: seconds that it may take
    :raises WorkerError: it has raised, which is the cause, or its process has died
    """
    context = processes.get_context(
        start_method, preload=preload, environs=[environ or {}], import_time=READ_AT_IMPORT, label=_LABEL
    )
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, _byvalue.dumps(task)))
    try:
        process.start()
        sender.close()
        watch = processes.Watch([process], label=_LABEL)
        try:
            with watch.operation("building and stepping a copy", timeout=timeout):
                examination: Examination = pickle.loads(receiver.recv_bytes())
                watch.closing()
        finally:
            watch.kill()
            watch.stop()
    finally:
        sender.close()
        receiver.close()
    return examination


def _main(sender: Connection, packed: bytes) -> None:
    sender.send_bytes(_byvalue.dumps(pickle.loads(packed)()))
    sender.close()

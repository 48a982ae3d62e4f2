"""What a fork server does before it serves."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence

__all__ = ["run"]

_log = logging.getLogger("rl_ext_core.processes")


def run(modules: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Import modules, and leave them where forked workers share them.

    :param modules: what to import; one that fails is left to the workers, which report it
    :param variables: what libraries read at import; None unsets
    """
    # Ctrl-C in the terminal is the parent's affair. Held back by the parent until now, see _servers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for module in modules:
        before = threading.active_count()
        try:
            importlib.import_module(module)
        except BaseException as error:  # an import may call sys.exit; the server has other modules to serve
            _log.debug("preloading %s failed: %r", module, error)
        if threading.active_count() > before:
            _warn_of_threads(module)
    gc.collect()
    # A collection in a worker would write to every object that it looks at, and so copy every page.
    gc.freeze()


def _warn_of_threads(module: str) -> None:
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    _log.warning(
        "importing %s starts threads (%s), which do not exist in workers forked from here: leave it out of preload",
        module,
        ", ".join(names),
    )

"""Worker processes that start fast, say why they died, and never outlive their parent.

:func:`get_context` gives a multiprocessing context whose processes carry their environment variables from before the
first import, come from a fork server of their own, and report to the parent. A :class:`Watch` waits for them beside
the main thread: when one ends that should not, it finds out why, ends the others, and raises one
:class:`~rl_ext_core.errors.WorkerError` in place of the ``EOFError`` that a pipe has to offer.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_ext_core.processes.contexts import get_context, registered
    from rl_ext_core.processes.failures import Failure
    from rl_ext_core.processes.watch import Watch
    from rl_ext_core.processes.worker import at_end, fail, import_main, note

__all__ = [
    "SUPPORTED",
    "Failure",
    "Watch",
    "at_end",
    "fail",
    "get_context",
    "import_main",
    "note",
    "registered",
    "require",
]

# Other systems than Linux lack what workers are made of, and have all else; ``spawned`` holds what stands for them.
SUPPORTED = hasattr(os, "memfd_create")
# Imported when they are used.
_MODULES = {"Failure": "failures", "Watch": "watch", "get_context": "contexts", "registered": "contexts"}


def require() -> None:
    """See that workers of this package can run here.

    :raises WorkerError: they cannot
    """
    if not SUPPORTED:
        from rl_ext_core.errors import WorkerError

        raise WorkerError(
            f"workers of this package need Linux, and this is {sys.platform!r}. Write "
            "sb3_ext.make_vec_env(...) or torchrl_ext.ParallelEnv(...), which take other workers here"
        )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        require()
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'worker')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Worker processes that start fast, say why they died, and never outlive their parent.

:func:`get_context` gives a multiprocessing context whose processes carry their environment variables from before the
first import, come from a fork server of their own, and report to the parent. A :class:`Watch` waits for them beside
the main thread: when one ends that should not, it finds out why, ends the others, and raises one
:class:`~rl_ext_core.errors.WorkerError` in place of the ``EOFError`` that a pipe has to offer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_ext_core.processes._child import at_end, fail, import_main, note
    from rl_ext_core.processes.contexts import get_context, registered
    from rl_ext_core.processes.failures import Failure
    from rl_ext_core.processes.watch import Watch

__all__ = ["Failure", "Watch", "at_end", "fail", "get_context", "import_main", "note", "registered"]

# Imported when they are used: on Windows, what needs workers is refused then, and not when it is imported.
_MODULES = ("_child", "contexts", "failures", "watch")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (importlib.import_module(f"{__name__}.{module}") for module in _MODULES):
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

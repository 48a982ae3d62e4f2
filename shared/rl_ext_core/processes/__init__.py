"""Worker processes that start fast, report why they died, and never outlive their parent.

:func:`get_context` gives a multiprocessing context whose processes carry their environment variables from before the
first import, and report to the parent. A :class:`Watch` waits for them in a thread: when one ends that should not, it
finds the reason, ends the others, and raises one :class:`~rl_ext_core.errors.WorkerError` in place of the ``EOFError``
that a pipe raises.
"""

from rl_ext_core.processes.context import get_context, named_context
from rl_ext_core.processes.failures import Failure
from rl_ext_core.processes.watch import Watch
from rl_ext_core.processes.worker import on_abnormal_exit, abort_worker, import_main, set_status

__all__ = [
    "Failure",
    "Watch",
    "on_abnormal_exit",
    "abort_worker",
    "get_context",
    "import_main",
    "set_status",
    "named_context",
]

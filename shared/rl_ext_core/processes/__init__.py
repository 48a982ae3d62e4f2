"""Worker processes that start fast, report why they died, and never outlive their parent.

:func:`get_context` returns a multiprocessing context. Its processes have their environment variables before the first
import, and report to the parent. A :class:`Watch` waits for them in a thread. If one ends unexpectedly, it finds the
reason and ends the others. The parent gets one :class:`~rl_ext_core.errors.WorkerError` instead of a pipe's
``EOFError``.
"""

from rl_ext_core.processes.context import get_context
from rl_ext_core.processes.failures import Failure
from rl_ext_core.processes.watch import Watch
from rl_ext_core.processes.worker import import_main, on_abnormal_exit

__all__ = ["Failure", "Watch", "get_context", "import_main", "on_abnormal_exit"]

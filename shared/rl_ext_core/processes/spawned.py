"""One call in a process of its own where the system lacks what workers are made of here: macOS, Windows.

The process is the standard library's, spawned: it imports the program's main module again, so that scripts need
``if __name__ == "__main__":`` there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import struct
import sys
from collections.abc import Mapping
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from rl_ext_core._system import set_variables
from rl_ext_core.errors import WorkerError
from rl_ext_core.processes.failures import LARGEST_CHOSEN, exit_code_name
from rl_ext_core.processes.report import Raised

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["call", "death_of", "take_along"]

# For a process whose pipe is closed already.
_ENDS_WITHIN_S = 10.0
# Of Windows' winnt.h. Programs that ask to leave the job may.
_EXTENDED_LIMIT_INFORMATION, _KILL_ON_JOB_CLOSE, _BREAKAWAY_OK = 9, 0x2000, 0x800


def call(packed: bytes, *, environ: Mapping[str, str | None], timeout: float | None, label: str) -> Any:
    """Call a pickled function in a process that ends with it.

    :param environ: variables to set, and to unset (None), in the process
    :param timeout: seconds that it may take; None: ever
    :param label: what the process is, for errors
    :return: what it returned
    :raises WorkerError: it has raised, which is the cause, its process has died, or it took longer
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, packed, dict(environ)), daemon=True)
    try:
        process.start()
        sender.close()
        if not receiver.poll(timeout):
            raise WorkerError(f"the {label} took longer than {timeout:g} s", kind="timeout")
        answer = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise death_of(process, f"the {label}") from None
    finally:
        sender.close()
        receiver.close()
        if process.pid is not None:
            process.kill()
            process.join()
    if isinstance(answer, Raised):
        text = f"the {label} raised {answer.summary}"
        raise WorkerError(text, kind="exception", traceback=answer.traceback) from answer.exception()
    return answer


def _main(sender: Connection, packed: bytes, environ: Mapping[str, str | None]) -> None:
    take_along()
    set_variables(environ)
    try:
        answer = pickle.dumps(pickle.loads(packed)())
    except Exception as error:
        answer = pickle.dumps(Raised.of(error))
    sender.send_bytes(answer)


def take_along() -> None:
    """Have what this process starts from now on end with it, however it ends: on Windows, which has no groups of
    processes that are killed together, by a job object. Elsewhere this does nothing.
    """
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
        job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))  # never closed: Windows does that with the process
        # JOBOBJECT_EXTENDED_LIMIT_INFORMATION, all zero but its LimitFlags. Where this fails, psutil may find them.
        limits = struct.pack("@qqIPPIPII6Q4P", 0, 0, _KILL_ON_JOB_CLOSE | _BREAKAWAY_OK, *[0] * 16)
        if kernel.SetInformationJobObject(job, _EXTENDED_LIMIT_INFORMATION, limits, len(limits)):
            kernel.AssignProcessToJobObject(job, ctypes.c_void_p(kernel.GetCurrentProcess()))


def death_of(process: BaseProcess, who: str, worker: int | None = None) -> WorkerError:
    """Return the error that says how a process has ended that no longer answers."""
    process.join(_ENDS_WITHIN_S)
    code = process.exitcode
    how = "is still running and does not answer"
    if code is None and connection.wait([process.sentinel], 0):
        how = "has ended; the system does not tell how, because this process ignores SIGCHLD"
    if code is not None:
        how = f"has ended, with exit code {exit_code_name(code)}"
    return WorkerError(
        f"{who} {how}. What it raised stands above, if it raised; a library that it loads may have ended it",
        worker=worker,
        kind="exit" if code is None or 0 <= code <= LARGEST_CHOSEN else "signal",
        exitcode=code,
    )

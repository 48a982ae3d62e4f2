"""Functions that workers run in these tests, by commands from the parent."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from rl_ext_core.processes import get_context, import_main, on_abnormal_exit


class NeedsArgumentsError(Exception):  # can be pickled, but not unpickled
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class RaisesWhenUnpickledError(Exception):
    def __reduce__(self) -> Any:
        return raise_runtime_error, ()


class HostileError(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


def raise_runtime_error() -> None:
    raise RuntimeError("this does not unpickle")


def serve(pipe: Connection, *rest: Any) -> None:
    """Answer commands, which are names of ``ACTIONS``, until ``"close"``."""
    while True:
        command = pipe.recv()
        if command == "close":
            return
        pipe.send(ACTIONS[command]())


# Functions whose names tests expect in stacks.


def recurse() -> None:
    recurse()


def exit_3() -> None:
    sys.exit(3)


def segfault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    """Sleep for a minute, longer than any time limit of the tests."""
    time.sleep(60)


def hang_in_c() -> None:
    """Deadlock in C code, with the GIL held and in spite of signals."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def wait_for_a_simulator() -> None:
    """Wait for ever for a message, as for a simulator that has hung."""
    parent_end, worker_end = multiprocessing.Pipe()
    parent_end.recv()
    worker_end.close()


# Other functions.


def throw(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


def raise_bad_level() -> None:
    raise ValueError("bad level")


def raise_from_cause() -> None:
    raise ValueError("outer") from KeyError("inner")


def raise_while_a_thread_runs() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("with a thread")


def kill_after_a_grandchild(end: Any) -> None:
    child = os.fork()
    if child == 0:
        os.close(2)
        end()
    os.waitpid(child, 0)
    kill()


def start_helpers() -> list[int]:
    """Start a program, a forked process, and a program with its own session."""
    program, apart = (
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], start_new_session=apart)
        for apart in (False, True)
    )
    forked = os.fork()
    if forked == 0:
        time.sleep(100)
        os._exit(0)
    return [program.pid, forked, apart.pid]


def send_helper_pids(writer: Any) -> None:
    writer.send(start_helpers())


def register_file_cleanup() -> list[str]:
    """Register an exit callback that deletes a file, and one that fails; return the file and another one."""
    files = [tempfile.mkstemp()[1] for _ in range(2)]
    on_abnormal_exit(functools.partial(os.unlink, files[0]))
    on_abnormal_exit(functools.partial(os.unlink, "/nowhere"))
    return files


def remove_file_at_exit() -> str:
    """Create a file that an ``atexit`` handler deletes, and return its path."""
    file = tempfile.mkstemp()[1]
    atexit.register(os.unlink, file)
    return file


def list_inherited_files() -> list[str]:
    """Start a program that inherits all possible descriptors, and list its open files."""
    code = "import os; print(*(os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')), sep='\\n')"
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, close_fds=False, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def start_nested_worker() -> list[int]:
    """Start a worker in this worker, which starts a program and one with its own session."""
    context = get_context("forkserver")
    parent_end, worker_end = context.Pipe()
    nested = context.Process(target=serve, args=(worker_end,))
    nested.start()
    NESTED.extend([nested, parent_end])
    parent_end.send("start_helpers")
    program, _, apart = parent_end.recv()
    return [program, apart]


NESTED: list[Any] = []


def child_sigint_disposition() -> int:
    """Raise SIGINT here, then return whether a new program has the default SIGINT handler."""
    signal.raise_signal(signal.SIGINT)
    code = "import signal; print(int(signal.getsignal(signal.SIGINT) is signal.default_int_handler))"
    return int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


pid = os.getpid
kill = functools.partial(signal.raise_signal, signal.SIGKILL)
ACTIONS: dict[str, Any] = {name: value for name, value in vars().items() if callable(value)}
ACTIONS |= {
    "terminate": functools.partial(signal.raise_signal, signal.SIGTERM),
    "stop": functools.partial(signal.raise_signal, signal.SIGSTOP),
    "os_exit": functools.partial(os._exit, 0),
    "environment": lambda: dict(os.environ),
    "modules": lambda: list(sys.modules),
    "is_frozen": lambda: gc.get_freeze_count() > 1000,
    "import_main": import_main,
    "close_slowly": functools.partial(on_abnormal_exit, functools.partial(time.sleep, 100)),
    "kill_after_a_grandchild_crashed": functools.partial(kill_after_a_grandchild, segfault),
    "kill_after_a_grandchild_raised": functools.partial(kill_after_a_grandchild, raise_bad_level),
    "raise_needs_arguments": functools.partial(throw, NeedsArgumentsError, "one", "two"),
    "raise_when_unpickled": functools.partial(throw, RaisesWhenUnpickledError, "a trap"),
    "raise_hostile": functools.partial(throw, HostileError),
    "raise_memory_error": functools.partial(throw, MemoryError, "too small"),
    "raise_huge": functools.partial(throw, ValueError, "start " + "x" * 1_000_000 + " end"),
    "raise_holding_much": functools.partial(throw, ValueError, b"x" * 5_000_000),
    "raise_interrupt": functools.partial(throw, KeyboardInterrupt),
    "exit_text": functools.partial(throw, SystemExit, "giving up"),
}

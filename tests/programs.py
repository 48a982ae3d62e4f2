"""Programs forked from a process that has imported their libraries, which saves the seconds that imports take.

A forked program has its own ``__main__``, arguments, variables, working folder, session, signal handlers and random
numbers. Libraries have read the variables of the test session when they were imported. Therefore tests of imports, and
of variables that libraries read at import, start a new interpreter instead.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Libraries that each server imports. No renderer is among them, because renderers read variables at import.
PRELOADED = {
    "renderers": (
        *("rl_ext_core.devices", "tests.core.devices.machines", "numpy", "scipy.spatial.transform"),
        *("scipy.interpolate", "numba", "h5py", "PIL.Image", "lxml.etree", "gymnasium", "absl.logging"),
        *("xml.etree.ElementTree", "html.parser", "unittest.mock", "multiprocessing.pool"),
    ),
    "torch": ("rl_ext_core.factory", "gymnasium", "torch", "pytest"),
    "sb3": ("sb3_ext", "stable_baselines3"),
    "torchrl": ("torchrl_ext", "torchrl.envs", "torchrl.data"),
}
_servers: dict[str, subprocess.Popen[str]] = {}
_lock = threading.Lock()


class Program:
    """Running program.

    :ivar pid: its process id, which is also the id of its session
    """

    def __init__(self, folder: Path, status: int) -> None:
        self._folder, self._status = folder, os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._read_line(60))

    def _read_line(self, timeout_s: float) -> bytes:
        line, end = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([self._status], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError
            byte = self._status.read(1)
            assert byte, "the server of programs has ended"
            line += byte
        return line

    def wait(self, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the program, and return its status and output. After a timeout, kill its session."""
        files = [self._folder / name for name in ("stdout", "stderr")]
        try:
            status = int(self._read_line(timeout_s))
            return subprocess.CompletedProcess([], status, *(file.read_text(errors="replace") for file in files))
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            self._read_line(60)
            output = [file.read_bytes() for file in files]
            raise subprocess.TimeoutExpired([str(self._folder)], timeout_s, *output) from None
        finally:
            self._status.close()
            shutil.rmtree(self._folder)


def start(
    code: str,
    preloaded: str,
    *arguments: str,
    file: Path | None = None,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Program:
    """Start a program.

    :param preloaded: key of ``PRELOADED``
    :param file: path that the program has as a script; default: it runs as with ``python -c``
    :param cwd: working folder, by default the present one
    :param environ: environment variables, by default the present ones
    """
    folder = Path(tempfile.mkdtemp())
    os.mkfifo(folder / "status")
    status = os.open(folder / "status", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(status, True)
    request = {
        "code": code,
        "file": file and str(file),
        "arguments": arguments,
        "cwd": str(cwd or Path.cwd()),
        "environ": dict(os.environ if environ is None else environ),
        "folder": str(folder),
    }
    with _lock:
        server = _find_server(preloaded)
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        # Before the program's supervisor has written to the pipe, a read would return the end of the file.
        assert select.select([status], [], [], 60)[0], "the server of programs does not answer"
    return Program(folder, status)


def run(code: str, preloaded: str, *arguments: str, timeout_s: float = 240, **options: Any) -> Any:
    """Run a program to its end as :func:`start` does, and return its status and output."""
    return start(code, preloaded, *arguments, **options).wait(timeout_s)


def stop_servers() -> None:
    """Stop the servers. Later programs start new ones."""
    while _servers:
        _servers.popitem()[1].communicate()


def _find_server(preloaded: str) -> subprocess.Popen[str]:
    """Return the running server with these libraries, or start one."""
    if preloaded not in _servers:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "shared")])}
        command, pipe = [sys.executable, "-m", "tests.programs", preloaded], subprocess.PIPE
        _servers[preloaded] = server = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environ, start_new_session=True
        )
        assert server.stdout.readline() == "\n", "the server of programs did not start"
    return _servers[preloaded]


def _serve(preloaded: str) -> dict[str, Any]:
    """Import libraries, and fork a process for each request. Return the request in the new process."""
    for name in PRELOADED[preloaded]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request: dict[str, Any] = json.loads(line)
            return request
    sys.exit()


def _reap(*_: object) -> None:
    """Read the status of ended children, whose CPU time then counts as the server's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_program(folder: Path) -> None:
    """Fork the program, which reports its process id. This process supervises it, and reports its status."""
    status = os.open(folder / "status", os.O_WRONLY)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(status, f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    for number, name in enumerate((os.devnull, "stdout", "stderr")):
        source = os.open(folder / name, (os.O_WRONLY | os.O_CREAT) if number else os.O_RDONLY)
        os.dup2(source, number)
        os.close(source)
    os.write(status, f"{os.getpid()}\n".encode())
    os.close(status)


def _set_up_program(request: dict[str, Any]) -> dict[str, Any]:
    """Give this process the variables, arguments and state of a new interpreter. Return its main module's names."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0)  # noqa: SIM115 (the server's has read requests)
    file = request["file"]
    sys.argv = [file or "-c", *request["arguments"]]
    sys.path[0] = os.path.dirname(file) if file else ""
    sys.excepthook = _print_error
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(
        __builtins__=builtins, __annotations__={}, **({"__file__": file, "__cached__": None} if file else {})
    )
    return vars(main)


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an error with a traceback that begins in the program, as in a new interpreter."""
    while trace is not None and trace.tb_frame.f_code.co_filename in ("<frozen runpy>", __file__):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    _request = _serve(sys.argv[1])
    _fork_program(Path(_request["folder"]))
    exec(compile(_request["code"], _request["file"] or "<string>", "exec"), _set_up_program(_request))

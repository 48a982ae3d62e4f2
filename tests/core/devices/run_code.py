"""Run lines of Python in a new process, in which no renderer is imported and no variable is set."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

# Only Mesa's EGL, so that EGL device 0 renders on the CPU, on machines with GPUs too.
_MESA = Path("/usr/share/glvnd/egl_vendor.d/50_mesa.json")
_TRACEBACK = "Traceback (most recent call last):"
# Variables that select devices, which must not affect the process.
_DEVICE_VARIABLE_PREFIXES = (
    "CUDA_",
    "MUJOCO_",
    "PYOPENGL_",
    "EGL_",
    "DISPLAY",
    "WAYLAND_",
    "XDG_SESSION_TYPE",
    "LOCAL_RANK",
    "SLURM_",
)
_DEVICE_VARIABLE_PREFIXES += ("OMPI_", "MV2_", "MPI_", "PMI_")
_PREAMBLE = """
import logging, os
from rl_ext_core.devices import resolve
from tests.core.devices.machines import machine
answer = None
NAMES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")
def variables(): return [os.environ.get(name) for name in NAMES]
"""

# Calls a function in a forked child and returns its result, "done", its error, or "it hangs".
IN_CHILD = """
def in_child(function, seconds=20):
    import select, signal
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = function() or "done"
        except Exception as error:
            answer = repr(error)
        os.write(writing, str(answer).encode())
        os._exit(0)
    ready, _, _ = select.select([reading], [], [], seconds)
    answer = os.read(reading, 10000).decode() if ready else "it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer
"""

# Imports the slow dependencies of renderers, but no renderer, and forks for each request.
_SERVER = """
import contextlib, gc, importlib, json, os, sys
import rl_ext_core.devices, tests.core.devices.machines
for name in %r:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()
del contextlib, gc, importlib, name
sys.argv = ["-c"]
print(flush=True)
for request in sys.stdin:
    child = os.fork()
    if child == 0:
        request = json.loads(request)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), *((os.open(path, os.O_WRONLY), n) for n, path in request["to"].items())):
            os.dup2(source, int(target))
            os.close(source)
        os.environ.clear()
        os.environ.update(request["environ"])
        code = compile(request["code"], "<string>", "exec")
        break
    print(json.dumps([child]), flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
del request, child, null, source, target
exec(code)
"""
_PRELOADED = (
    *("numpy", "scipy.spatial.transform", "scipy.interpolate", "numba", "h5py", "PIL.Image", "lxml.etree"),
    *("gymnasium", "absl.logging", "xml.etree.ElementTree", "html.parser", "unittest.mock", "multiprocessing.pool"),
)
_server: subprocess.Popen[str] | None = None


def stop_server() -> None:
    """Stop the server process from which the others are forked."""
    global _server
    if _server is not None:
        _server.communicate()
        _server = None


def _run_forked(code: str, environ: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run code in a process forked from a server that has imported the libraries."""
    global _server
    if _server is None:
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "shared")])}
        command, pipe = [sys.executable, "-c", _SERVER % (_PRELOADED,)], subprocess.PIPE
        _server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env={**environment(), **path})
        assert _server.stdout is not None
        assert _server.stdout.readline() == "\n", "the server did not start"
    assert _server.stdin is not None
    assert _server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = {number: Path(folder, number) for number in ("1", "2")}
        for file in files.values():
            file.touch()
        request = {"code": code, "environ": environ, "to": {number: str(file) for number, file in files.items()}}
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        (child,) = json.loads(_server.stdout.readline())
        if not select.select([_server.stdout], [], [], timeout_s)[0]:
            os.kill(child, signal.SIGKILL)
            _server.stdout.readline()
            raise subprocess.TimeoutExpired(code, timeout_s, *(file.read_bytes() for file in files.values()))
        status = int(_server.stdout.readline())
        return subprocess.CompletedProcess([], status, *(file.read_text() for file in files.values()))


@dataclass(frozen=True)
class RunResult:
    """Result of a process.

    :param answer: the value that the lines assigned to ``answer``; None if they failed
    :param error: last line of the traceback; empty if the lines did not fail
    :param stderr: the process's standard error
    """

    answer: Any
    error: str
    stderr: str


def run(*parts: str, timeout_s: float = 120, python: Path = Path(sys.executable), **variables: str) -> RunResult:
    """Run lines of Python in a new process, with only these variables that select devices.

    :param parts: the lines, in one or several parts
    :param python: interpreter of another virtual environment, in which this project may be missing
    """
    code = "\n".join((_PREAMBLE, *map(dedent, parts), "import json; print(); print(json.dumps(answer))"))
    environ = {**environment(**variables), "PYTHONPATH": str(ROOT / "shared")}
    if python == Path(sys.executable):
        done = _run_forked(code, environ, timeout_s)
    else:
        command, pipe = [str(python), "-c", code], subprocess.PIPE
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, timeout=timeout_s, check=False
        )
    if done.returncode:
        return RunResult(
            None, _find_error_line(done.stderr.splitlines()) or f"exit {done.returncode}: {done.stderr}", done.stderr
        )
    return RunResult(json.loads(done.stdout.splitlines()[-1]), "", done.stderr)


def environment(**variables: str) -> dict[str, str]:
    """Return this process's variables without those that select devices, plus ``variables``."""
    # COLUMNS, which some shells set, changes the width of tables.
    left_out = (*_DEVICE_VARIABLE_PREFIXES, "COLUMNS")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    if _MESA.exists():
        environ["__EGL_VENDOR_LIBRARY_FILENAMES"] = str(_MESA)
    return {**environ, **variables}


def _find_error_line(lines: list[str]) -> str:
    """Return the line of the error that ended the program, without its causes and later errors of destructors."""
    starts = [
        number for number, line in enumerate(lines) if line == _TRACEBACK and not _is_ignored_exception(lines, number)
    ]
    return next((line for line in lines[starts[-1] + 1 :] if line and line[0] != " "), "") if starts else ""


def _is_ignored_exception(lines: list[str], traceback: int) -> bool:
    """Return whether Python printed this traceback for an exception that it ignored."""
    return traceback > 0 and lines[traceback - 1].startswith("Exception ignored")

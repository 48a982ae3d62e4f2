from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.core.processes.worker_groups import UNPICKLING_METHODS
from tests.ray_scripts import MARK, wait_for_marked_processes

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120

# The body may use `group`, a context manager that starts three workers by the method. The guard may be empty.
SCRIPT = """
import os, sys, time
from tests.core.processes.worker_groups import group
METHOD = {method!r}
{top}
def main():
{body}
{guard}main()
"""
GUARD = "if __name__ == '__main__': "


# Bodies whose workers need the main module, do not need it, or are executing a command.
START = """
    with group(METHOD, arguments=(main,)) as workers, workers.watch.operation("start"):
        workers.pipes[0].recv()
"""
ASK = """
    with group(METHOD) as workers, workers.watch.operation("step"):
        workers.ask(0, {command!r})
"""
OPEN = """
    global kept
    kept = group(METHOD)
    workers = kept.__enter__()
    workers.ask(0, "pid")
"""
FAIL = """
    with workers.watch.operation("step"):
        workers.ask(1, "raise_bad_level")
"""
MISSING_GUARD = r"WorkerError: worker \d of 3 cannot start. Each worker imports the main script"
GUARD_EXAMPLE = r'\n    if __name__ == "__main__":\n        main\(\)\n'
MAIN_IMPORT_FAILED = r"WorkerError: worker \d of 3 {}.* while it imported the main script:"


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(
        self, method: str, body: str, *, top: str = "", guard: str = GUARD, **options: object
    ) -> subprocess.Popen[str]:
        script = self.folder / "train.py"
        body = indent(dedent(body), "    ")
        script.write_text(SCRIPT.format(method=method, top=dedent(top), body=body, guard=guard))
        return self.run([str(script)], **options)

    def run_to_end(self, method: str, body: str, **options: str) -> tuple[int, str]:
        process = self.start(method, body, **options)
        _, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, errors

    def run(self, arguments: list[str], **options: object) -> subprocess.Popen[str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join([str(ROOT), str(ROOT / "shared")])
        own = {"PYTHONPATH": path, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", MARK: str(self.folder)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")  # torch would create it in TMPDIR
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
            start_new_session=True,
            **options,
        )
        self.running.append(process)
        return process


@pytest.fixture
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Give the test a Program; at the end, kill its processes and fail if files remain."""
    started_program = Program(tmp_path_factory.mktemp("p"))  # a short name, because paths of sockets are limited
    yield started_program
    left = wait_for_marked_processes(str(started_program.folder)) if started_program.running else []
    for process in left:
        process.kill()
    for program in started_program.running:
        program.communicate()
    assert not left
    assert not list((started_program.folder / "tmp").glob("*"))


@pytest.mark.parametrize(
    ("method", "body", "top", "guard", "once"),
    [
        ("forkserver", START, "", "", [MISSING_GUARD, GUARD_EXAMPLE, "bootstrapping phase"]),
        # A worker that imports the script later starts no workers.
        ("spawn", ASK.format(command="import_main"), "", "", ["WorkerError: worker 0 of 3 raised RuntimeError"]),
        (
            "forkserver",
            START,
            "if __name__ != '__main__': 1 / 0",
            GUARD,
            [MAIN_IMPORT_FAILED.format("raised Zero"), "1 / 0"],
        ),
        # An error that ends the parent is printed once.
        ("forkserver", OPEN + FAIL, "", GUARD, [r'raise ValueError\("bad level"\)']),
    ],
)
def test_error_of_a_script_is_printed_once(
    method: str, body: str, top: str, guard: str, once: list[str], program: Program
) -> None:
    code, errors = program.run_to_end(method, body, top=top, guard=guard)
    assert code == 1
    assert [len(re.findall(pattern, errors)) for pattern in once] == [1] * len(once), errors


@pytest.mark.parametrize("method", UNPICKLING_METHODS)
def test_script_without_guard_runs_if_workers_do_not_need_main(method: str, program: Program) -> None:
    assert program.run_to_end(method, ASK.format(command="pid"), guard="") == (0, "")


def test_missing_guard_is_explained_under_a_chained_error(program: Program) -> None:
    body = f"try:\n{indent(START, '    ')}\nexcept Exception as error:\n    raise ValueError('no training') from error"
    assert re.search(MISSING_GUARD, program.run_to_end("spawn", body, guard="")[1])


def delete_pymp_folders(program: Program) -> None:
    # The killed program could not remove multiprocessing's folder.
    for folder in (program.folder / "tmp").glob("pymp-*"):
        shutil.rmtree(folder)


@pytest.mark.sample(ci=2)
def test_starting_workers_do_not_outlive_a_killed_parent(method: str, program: Program) -> None:
    body = "import signal\nwith group(METHOD):\n    os.kill(os.getpid(), signal.SIGKILL)"
    process = program.start(method, body, top="time.sleep(0.3)")
    process.wait(LIMIT_S)
    assert not wait_for_marked_processes(str(program.folder))
    delete_pymp_folders(program)


@pytest.mark.sample(ci=2)
def test_interpreter_exit_kills_watched_workers(method: str, program: Program) -> None:
    assert program.run_to_end(method, OPEN + "    workers.pipes[1].send('hang')\n    sys.exit(7)") == (7, "")


@pytest.mark.sample(quick=2, ci=4)
@pytest.mark.parametrize("starting", [False, True])
def test_ctrl_c_interrupts_only_the_parent(starting: bool, method: str, program: Program) -> None:
    body = """
        try:
            with group(METHOD) as workers, workers.watch.operation("step"):
                for worker in range(3):
                    workers.ask(worker, "pid")
                print("ready")
                while {starting}:
                    with group(METHOD):
                        pass
                workers.ask(1, "hang")
        except KeyboardInterrupt as error:
            assert workers.watch.failure is None
            sys.exit(9)
    """
    process = program.start(method, body.format(starting=starting))
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3 if starting else 0)
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5 if starting else LIMIT_S)
    errors = process.stderr.read()
    assert process.returncode == 9, errors
    # Python ignores an interrupt in any finalizer, and the program runs until the next one.
    ignored = r"(Exception ignored in: <.*\nTraceback.*\n( .*\n)+KeyboardInterrupt: ?\n)*"
    assert errors == "" or (starting and re.fullmatch(ignored, errors)), errors


@pytest.mark.parametrize("method", UNPICKLING_METHODS)
def test_workers_run_functions_of_the_main_module(method: str, program: Program) -> None:
    top = """
        from rl_ext_core.processes import get_context
        class MineError(Exception): ...
        def mine(): raise MineError("of main")
    """
    body = """
        from rl_ext_core.processes import Watch
        process = get_context(METHOD).Process(target=mine)
        process.start()
        watch = Watch([process])
        process.join()
        time.sleep(0.2)
        assert type(watch.failure.exception) is MineError, watch.failure
        watch.stop()
    """
    assert program.run_to_end(method, body, top=top) == (0, "")


def test_starting_workers_does_not_fix_the_global_start_method(program: Program) -> None:
    body = """
        with group(METHOD) as workers:
            workers.ask(0, "pid")
        import multiprocessing
        assert multiprocessing.get_start_method(allow_none=True) is None
        multiprocessing.set_start_method("spawn")
    """
    assert program.run_to_end("forkserver", body) == (0, "")


def test_workers_start_from_an_uninstalled_package(program: Program) -> None:
    source = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "shared")!r}]
        from tests.core.processes.worker_functions import pid
        from rl_ext_core.processes import get_context
        for method in ("spawn", "forkserver"):
            process = get_context(method, preload=["wave"]).Process(target=pid)
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    process = program.run(["-I", "-S", "-c", dedent(source)])
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")

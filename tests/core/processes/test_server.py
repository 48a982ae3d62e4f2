from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes import get_context, server
from rl_ext_core.processes.server import stop_server
from tests.core.processes.worker_groups import LIMIT_S, group


@pytest.fixture(autouse=True)
def no_server() -> Iterator[None]:
    stop_server()
    yield
    stop_server()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path of a new module that is only on the parent's ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "preloaded_module.py"
    sys.modules.pop("preloaded_module", None)


def server_of_worker(**options: object) -> int:
    with group("forkserver", 1, **options) as workers:
        return psutil.Process(workers.ask(0, "pid")).ppid()


def test_preloaded_modules_are_loaded_in_workers(module: Path) -> None:
    module.write_text("")
    with group("forkserver", 1) as workers:
        assert "preloaded_module" not in workers.ask(0, "modules")
    with group("forkserver", 1, preload=["preloaded_module"]) as workers:
        assert "preloaded_module" in workers.ask(0, "modules")
        assert workers.ask(0, "is_frozen")  # garbage collections in workers do not copy the shared pages
    assert "preloaded_module" not in sys.modules


def test_forked_workers_share_the_modules_and_objects_of_their_parent(module: Path) -> None:
    """Without that, each of them imports the modules and copies the parent's memory."""
    module.write_text("")
    gc.unfreeze()  # objects that the test session has frozen
    with group("fork", 1, preload=["preloaded_module", "module_that_does_not_exist"]) as workers:
        assert "preloaded_module" in workers.ask(0, "modules")
        assert "preloaded_module" in sys.modules
        assert workers.ask(0, "is_frozen")


def test_crash_is_named_if_a_preloaded_library_handles_its_signal(module: Path) -> None:
    module.write_text("import ctypes\nctypes.CDLL(None).signal(11, ctypes.CDLL(None)._exit)\n")  # as pygame does
    with group("forkserver", 1, preload=["preloaded_module"]) as workers:
        assert "was killed by SIGSEGV" in str(workers.fail("segfault", 0))


def test_server_is_replaced_for_a_missing_module_and_ends_with_its_last_worker() -> None:
    first = server_of_worker(preload=["json"])
    assert server_of_worker() == server_of_worker(preload=["json"], environs=[{"OTHER": "1"}]) == first
    with group("forkserver", 1) as workers:
        second = server_of_worker(preload=["csv"])
        assert second != first
        assert server_of_worker(preload=["json"]) == second, "it has the modules of the one before"
        assert workers.ask(0, "pid")
        workers.close()
        assert workers.workers[0].exitcode == 0
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=LIMIT_S)
    assert server_of_worker() == second
    assert not psutil.pid_exists(first)


def test_server_is_replaced_for_other_import_time_variables(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import os\nos.environ['SEEN_AT_IMPORT'] = os.environ.get('MUJOCO_GL', 'none')\n")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    for value in ("egl", None, "osmesa"):
        environs = [{"MUJOCO_GL": value}] * 2
        with group("forkserver", 2, preload=["preloaded_module"], environs=environs) as workers:
            servers = {psutil.Process(workers.ask(worker, "pid")).ppid() for worker in (0, 1)}
            assert len(servers) == 1
            # Workers get the parent's variables, so read the server's variables from its command line.
            assert "MUJOCO_GL': " + repr(value) in psutil.Process(servers.pop()).cmdline()[-1]


def test_modules_that_fail_to_import_are_skipped_by_the_server(module: Path) -> None:
    sources = {"missing": "import no_such_module", "raises": "1 / 0", "exits": "raise SystemExit(3)", "wrong": "a b"}
    for name, source in sources.items():
        (module.parent / f"{name}_module.py").write_text(source)
    with group("forkserver", 1, preload=[*(f"{name}_module" for name in sources), "wave"]) as workers:
        assert "wave" in workers.ask(0, "modules")
    module.write_text("import os\nos._exit(5)")
    with group("forkserver", 1, preload=["preloaded_module"]) as workers:
        assert workers.ask(0, "pid")


def test_interrupt_during_server_imports_ends_the_server(module: Path) -> None:
    module.write_text("import pathlib, time\npathlib.Path(__file__).with_suffix('.begun').touch()\ntime.sleep(600)\n")
    before, main = set(psutil.Process().children()), threading.main_thread().ident or 0

    def interrupt() -> None:
        """Send SIGINT to the main thread when the server has begun the import."""
        while not module.with_suffix(".begun").exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        get_context("forkserver", preload=["preloaded_module"]).Process(target=module.touch).start()
    thread.join()
    left = [child for child in set(psutil.Process().children()) - before if "preloaded_module" in str(child.cmdline())]
    assert not left


def test_dead_server_is_replaced_and_its_workers_are_killed() -> None:
    with group("forkserver") as workers:
        pids = [workers.ask(worker, "pid") for worker in range(3)]
        first = psutil.Process(pids[0]).ppid()
        assert first != os.getpid()
        failed = pytest.raises(
            WorkerError, match="ended in step; its exit code is unknown: the fork server that started it was"
        )
        with failed, workers.watch.operation("step"):
            os.kill(first, signal.SIGKILL)
            workers.pipes[0].recv()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LIMIT_S)
    assert not alive
    second = server_of_worker()
    assert second != first
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)  # another part of the process waited for it
    assert server_of_worker() not in (first, second)


def test_stop_server_leaks_nothing_and_keeps_multiprocessings_server() -> None:
    default = multiprocessing.context._default_context._actual_context
    own = dict(vars(forkserver._forkserver))
    pid = server_of_worker(preload=["json"])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    socket = Path(server._server._forkserver_address)
    assert socket.is_socket()
    stop_server()
    assert not psutil.pid_exists(pid)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert not socket.exists()
    assert vars(forkserver._forkserver) == own
    assert multiprocessing.context._default_context._actual_context is default


def test_workers_are_spawned_if_the_server_cannot_start_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = get_context("forkserver")
    pipes = [end for _ in range(150) for end in context.Pipe()]
    process = context.Process(target=len, args=(pipes,))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0, "a fork server takes 252 descriptors"
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    stop_server()
    assert server_of_worker() == os.getpid(), "a socket's name has 107 bytes"


def test_forked_process_starts_its_own_server() -> None:
    of_parent = server_of_worker()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 2 if server._server or server_of_worker() == of_parent else 0
            stop_server()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert server_of_worker() == of_parent

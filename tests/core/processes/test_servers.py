"""Fork servers of our own: what they preload, when they are shared, and when they end."""

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
from multiprocessing import forkserver, util
from pathlib import Path

import psutil
import pytest

from rl_ext_core.errors import WorkerError
from rl_ext_core.processes import get_context, servers
from rl_ext_core.processes.servers import stop_servers
from tests.core.processes.groups import LIMIT_S, group


@pytest.fixture(autouse=True)
def no_servers() -> Iterator[None]:
    stop_servers()
    yield
    stop_servers()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of its own for each test, on ``sys.path`` of the parent only."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "preloaded_module.py"
    sys.modules.pop("preloaded_module", None)


def server_pids() -> list[int]:
    return [server._forkserver_pid for server in servers._servers.values()]  # type: ignore[attr-defined]


def parent_of_worker(**options: object) -> int:
    with group("forkserver", 1, **options) as workers:  # type: ignore[arg-type]
        return psutil.Process(workers.ask(0, "pid")).ppid()


def test_preloaded_modules_are_there_before_the_worker_imports_anything(module: Path) -> None:
    module.write_text("")
    with group("forkserver", 1, preload=["preloaded_module"]) as workers:
        assert "preloaded_module" in workers.ask(0, "modules")
        assert workers.ask(0, "is_frozen")  # collections in workers leave the shared pages alone
    with group("forkserver", 1) as workers:
        assert "preloaded_module" not in workers.ask(0, "modules")
    assert "preloaded_module" not in sys.modules


def test_a_server_is_shared_by_contexts_that_preload_the_same() -> None:
    first = parent_of_worker(preload=["json"])
    assert parent_of_worker(preload=["json"]) == first
    assert parent_of_worker(preload=["csv"]) != first
    assert parent_of_worker(preload=["json"], environs=[{"OTHER": "1"}]) == first


def test_each_value_that_is_read_at_import_has_its_server(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module.write_text("import os\nos.environ['SEEN_AT_IMPORT'] = seen = os.environ.get('DEVICE', 'none')\n")
    monkeypatch.setenv("DEVICE", "the parent's")
    options = {"preload": ["preloaded_module"], "import_time": ["DEVICE"]}
    assert parent_of_worker(**options, environs=[{"DEVICE": "1"}]) == parent_of_worker(
        **options, environs=[{"DEVICE": "1", "OTHER": "x"}]
    )
    assert len(server_pids()) == 1
    parents = {parent_of_worker(**options, environs=[{"DEVICE": value}]) for value in ("1", "2", None)}
    assert len(parents) == 3
    assert parent_of_worker(**options) not in parents
    environments = [psutil.Process(pid).cmdline()[-1] for pid in server_pids()]
    assert [text.count("DEVICE") for text in environments] == [1, 1, 1, 1]


def test_modules_that_cannot_be_preloaded_are_left_out(module: Path) -> None:
    sources = {"missing": "import no_such_module", "raises": "1 / 0", "exits": "raise SystemExit(3)", "wrong": "a b"}
    for name, source in sources.items():
        (module.parent / f"{name}_module.py").write_text(source)
    with group("forkserver", 1, preload=[*(f"{name}_module" for name in sources), "wave"]) as workers:
        assert "wave" in workers.ask(0, "modules")


def test_a_module_that_ends_the_server_is_named(module: Path) -> None:
    module.write_text("import os\nos._exit(5)")
    with pytest.raises(WorkerError, match=r"ended with exit code 5 while it imported \['preloaded_module'\]"):
        get_context("forkserver", preload=["preloaded_module"]).Process().start()
    assert not servers._servers


def test_an_interrupt_while_a_server_imports_ends_it(module: Path) -> None:
    module.write_text("import pathlib, time\npathlib.Path(__file__).with_suffix('.begun').touch()\ntime.sleep(600)\n")
    before, main = set(psutil.Process().children()), threading.main_thread().ident or 0

    def interrupt() -> None:
        while not module.with_suffix(".begun").exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        get_context("forkserver", preload=["preloaded_module"]).Process(target=module.touch).start()
    thread.join()
    assert not servers._servers
    left = [child for child in set(psutil.Process().children()) - before if "preloaded_module" in str(child.cmdline())]
    assert not left


def test_ctrl_c_is_held_back_from_a_server_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    start, held = util.spawnv_passfds, []

    def noted(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        if "forkserver" in str(arguments):
            held.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return int(start(path, arguments, descriptors))

    monkeypatch.setattr(util, "spawnv_passfds", noted)
    parent_of_worker()
    assert held == [True]


def test_threads_started_by_a_preloaded_module_are_reported(module: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='feeder', daemon=True).start()\n"
    )
    with group("forkserver", 1, preload=["preloaded_module"]) as workers:
        workers.ask(0, "pid")
    assert "importing preloaded_module starts threads (feeder)" in capfd.readouterr().err


def test_a_server_that_died_is_replaced() -> None:
    first = parent_of_worker()
    os.kill(first, signal.SIGKILL)
    second = parent_of_worker()
    assert second != first
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)  # somebody else waited for it
    assert parent_of_worker() not in (first, second)
    assert not psutil.pid_exists(second)


def test_the_death_of_a_server_ends_its_workers_and_is_told() -> None:
    with group("forkserver") as workers:
        pids = [workers.ask(worker, "pid") for worker in range(3)]
        with (  # noqa: PT012
            pytest.raises(WorkerError, match="is lost in step: the fork server that started it was killed by SIGKILL"),
            workers.watch.operation("step"),
        ):
            os.kill(server_pids()[0], signal.SIGKILL)
            workers.pipes[0].recv()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LIMIT_S)
    assert not alive


def test_multiprocessings_own_server_and_default_are_left_alone() -> None:
    before = multiprocessing.context._default_context._actual_context  # type: ignore[attr-defined]
    own = dict(vars(forkserver._forkserver))  # type: ignore[attr-defined]
    parent_of_worker(preload=["json"])
    assert vars(forkserver._forkserver) == own  # type: ignore[attr-defined]
    assert multiprocessing.context._default_context._actual_context is before  # type: ignore[attr-defined]


def test_stopped_servers_leave_no_process_no_socket_and_no_descriptor() -> None:
    parent_of_worker()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    (server,) = servers._servers.values()
    socket = Path(server._forkserver_address)  # type: ignore[attr-defined]
    (pid,) = server_pids()
    assert socket.is_socket()
    stop_servers()
    assert not psutil.pid_exists(pid)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert not socket.exists()


def test_a_folder_for_temporary_files_with_too_long_a_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    stop_servers()
    with pytest.raises(WorkerError, match=r"longlong.* bytes leave too few .* write export TMPDIR=/tmp"):
        parent_of_worker()
    monkeypatch.undo()
    assert parent_of_worker()


def test_a_forked_child_has_servers_of_its_own() -> None:
    of_parent = parent_of_worker()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 2 if servers._servers or parent_of_worker() == of_parent else 0
            stop_servers()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parent_of_worker() == of_parent

"""A device decision in the workers of TorchRL's ParallelEnv."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.devices.binding import EXPECTED, UNSET
from tests.core.devices.processes import run

TORCHRL = """
import functools, torch
from torchrl.envs import ParallelEnv
from tests.core.devices.binding import bound, in_torchrl, on_mesa
from tests.core.devices.reporting import reports
FROM_WORKERS = dict(metadata_from_workers=True, use_buffers=False)
"""


@pytest.fixture(autouse=True)
def torchs_own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing TorchRL makes a folder for compiled kernels; let it be one of the test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))


start_methods = pytest.mark.parametrize(
    "start_method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)


@pytest.mark.sample(quick=0, ci=2)
@start_methods
@pytest.mark.parametrize(
    "from_workers",
    [
        pytest.param(True, id="metadata from workers"),
        pytest.param(False, id="metadata from the parent", marks=pytest.mark.slow),
    ],
)
def test_each_worker_gets_its_gpu_before_its_factory_is_unpickled(
    start_method: str, from_workers: bool, tmp_path: Path
) -> None:
    ended = run(
        TORCHRL,
        f"""
        folder, options = {str(tmp_path)!r}, FROM_WORKERS if {from_workers} else {{}}
        env = ParallelEnv(3, bound(folder, wrap=in_torchrl), mp_start_method={start_method!r}, **options)
        shape = env.rollout(2).batch_size
        env.close(raise_if_closed=False)
        answer = [reports(folder), variables(), torch.cuda.is_initialized(), list(shape)]
        """,
    )
    found, parent, cuda, shape = ended.answer
    workers = [report for report in found if not report["in_parent"]]
    in_parent = [report for report in found if report["in_parent"]]
    assert [report["called"] for report in workers] == EXPECTED
    assert [report["unpickled"] for report in workers] == EXPECTED
    assert [report["imported"] for report in workers] == ([UNSET] * 3 if start_method == "fork" else EXPECTED)
    assert shape == [3, 2]
    assert not cuda
    if from_workers:
        assert (in_parent, parent) == ([], UNSET)
    else:  # the parent builds one of each, all under the first one's decision, and says so
        assert [report["called"] for report in in_parent] == [EXPECTED[0]] * 3
        assert parent == EXPECTED[0]
    said = ended.stderr.count("a worker's environment is built in the parent process")
    assert said == (0 if from_workers else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("start_method", "options"), [("fork", "FROM_WORKERS"), ("forkserver", "{}")])
def test_workers_render_with_mesa(start_method: str, options: str, tmp_path: Path) -> None:
    ended = run(
        TORCHRL,
        f"""
        factories = on_mesa({str(tmp_path)!r}, wrap=functools.partial(in_torchrl, from_pixels=True))
        env = ParallelEnv(2, factories, mp_start_method={start_method!r}, **{options})
        pixels = env.rollout(2)["pixels"]
        env.close(raise_if_closed=False)
        answer = [list(pixels.shape), pixels.float().std(dim=(1, 2, 3, 4)).tolist()]
        """,
        CUDA_VISIBLE_DEVICES="1",
    )
    assert ended.error == ""
    shape, spreads = ended.answer
    assert shape == [2, 2, 64, 64, 3]
    assert min(spreads) > 10


@pytest.mark.slow
def test_rendering_in_forked_workers_after_the_parent_rendered_is_an_error_instead_of_a_hang(tmp_path: Path) -> None:
    # TorchRL builds one environment in the parent for its specs, and this one renders when it is built.
    ended = run(
        TORCHRL,
        f"""
        factories = on_mesa({str(tmp_path)!r}, wrap=functools.partial(in_torchrl, from_pixels=True))
        specs = factories[0]()
        ParallelEnv(2, factories, mp_start_method="fork", **FROM_WORKERS)
        """,
        timeout_s=60,
    )
    assert "DeviceConflictError: mujoco.egl had made its display before this process was forked" in ended.stderr
    assert "mp_start_method=" in ended.stderr


@pytest.mark.slow
def test_mujocos_own_renderer_needs_the_decision_above_the_import_of_torchrl(tmp_path: Path) -> None:
    # Importing TorchRL imports mujoco, which reads MUJOCO_GL then.
    lines = f"""
        folder = {str(tmp_path)!r}
        env = ParallelEnv(3, bound(folder, wrap=in_torchrl, renderer="mujoco"), mp_start_method="fork", **FROM_WORKERS)
        env.close(raise_if_closed=False)
        answer = [report["called"] for report in reports(folder)]
        """
    ended = run(TORCHRL, lines)
    assert "write resolve(...).apply() above `import torchrl`, which imports mujoco, in the script" in ended.stderr
    assert run("resolve('cpu', render='same').apply()", TORCHRL, lines).answer == EXPECTED

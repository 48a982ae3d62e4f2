"""Ranks of launchers, from public bug reports: the GPU that ``"auto"`` picks, the error, and the finding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rl_ext_core.cli.doctor import examine
from rl_ext_core.devices import Inventory, check_environment, resolve
from rl_ext_core.errors import DeviceUnavailableError
from tests.core.devices.machines import machine, uuid

MASK, RANK, TASK = "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "SLURM_LOCALID"
OMPI, HYDRA = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"
MPI = (OMPI, "MV2_COMM_WORLD_LOCAL_RANK", HYDRA, "PMI_LOCAL_RANK")
TORCHRUN = {"GROUP_RANK": "0"}
RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
ONE, FOUR = (machine(count, without=RENDERERS) for count in (1, 4))
SLICES = ["MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"]
WITH_MIG = machine(2, mig={0: SLICES}, without=RENDERERS)
BOTH = ",".join(SLICES)
ALL_FOUR = "0,1,2,3"


@pytest.mark.parametrize(
    ("there", "environ", "ordinal", "why"),
    [
        # Slurm shows a GPU to each task (ignite#3843, ignite#3259).
        (ONE, {TASK: "3", MASK: "0"}, 0, f"{TASK}='3', and {MASK}='0' shows this process one GPU of its own"),
        (FOUR, {TASK: "3", MASK: "3"}, 0, "one GPU of its own"),
        (ONE, {TASK: "3", RANK: "3", MASK: "0"}, 0, f"{RANK}='3', and {MASK}='0'"),
        (FOUR, {TASK: "3", MASK: ALL_FOUR}, 3, "place on this machine"),
        # MPI, and nested launchers.
        *((FOUR, {name: "2"}, 2, f"{name}='2'") for name in MPI),
        (FOUR, {OMPI: "3", TASK: "0"}, 3, f"{OMPI}='3'"),
        (FOUR, {OMPI: "2", MASK: "1"}, 0, "one GPU"),  # a script sets the mask of each rank
        # Ray Train sets the mask of each worker, and so does torchrun --virtual-local-rank.
        (FOUR, {RANK: "2", MASK: "2", "RAY_JOB_ID": "01"}, 0, "one GPU"),
        (FOUR, {RANK: "2", MASK: "1,2,3", "RAY_JOB_ID": "01"}, 2, "place on this machine"),
        (FOUR, {RANK: "0", MASK: "2", **TORCHRUN}, 0, "place on this machine"),
        # A MIG slice for each process.
        (WITH_MIG, {RANK: "0", MASK: SLICES[1]}, 0, "place on this machine"),
        (WITH_MIG, {TASK: "1", MASK: SLICES[1]}, 0, "one GPU of its own"),
    ],
)
def test_auto_uses_rank_of_innermost_launcher(
    there: Inventory, environ: dict[str, str], ordinal: int, why: str
) -> None:
    decision = resolve(inventory=there, environ=environ)
    assert decision.device == f"cuda:{ordinal}"
    assert why in decision.reason
    assert decision.warnings == ()
    assert not [found for found in check_environment(environ, inventory=there) if found.severity == "error"]


@pytest.mark.parametrize(
    ("there", "environ", "says", "fix"),
    [
        (FOUR, {TASK: "6", MASK: ALL_FOUR}, "sees 4 GPUs", "srun --ntasks-per-node=4"),
        (FOUR, {TASK: "2", MASK: "2,3"}, 'device="cuda:0"', "srun --ntasks-per-node=2"),
        (ONE, {TASK: "0", RANK: "3", MASK: "0"}, f"{RANK}='3'", "torchrun"),
        (ONE, {TASK: "3", RANK: "3", MASK: "0", **TORCHRUN}, f"{RANK}='3'", "torchrun"),
        # pytorch/torchtitan#423
        (FOUR, {RANK: "7", **TORCHRUN}, f"{RANK}='7' asks for cuda:7", "torchrun --nproc-per-node=4"),
        (FOUR, {RANK: "1", MASK: "1", **TORCHRUN}, f"{MASK}='1'", "--nproc-per-node=1"),
        (FOUR, {OMPI: "4"}, f"{OMPI}='4'", "mpirun --map-by ppr:4:node"),
        (FOUR, {HYDRA: "5"}, f"{HYDRA}='5'", "mpiexec -ppn 4"),
        (WITH_MIG, {RANK: "1", MASK: BOTH}, "sees 1 GPU", "torchrun --nproc-per-node=1"),
    ],
)
def test_rank_beyond_visible_gpus_raises_with_launchers_fix(
    there: Inventory, environ: dict[str, str], says: str, fix: str
) -> None:
    with pytest.raises(DeviceUnavailableError) as caught:
        resolve(inventory=there, environ=environ)
    text = str(caught.value)
    assert says in text
    assert fix in text
    (found,) = (found for found in check_environment(environ, inventory=there) if found.severity == "error")
    assert found.variable == next(name for name in (RANK, *MPI, TASK) if name in environ)
    assert found.fix.split(" train.py")[0] in text


@pytest.mark.parametrize("ask", [{"device": 6}, {"device": "cuda:6"}, {"render": "cuda:6"}])
def test_error_recognizes_nvidia_smi_index_under_a_mask(ask: Mapping[str, int | str]) -> None:
    (name, asked), eight = *ask.items(), machine(8)
    with pytest.raises(DeviceUnavailableError) as caught:
        resolve(**ask, inventory=eight, environ={MASK: "4,5,6,7"})  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"{name}={asked!r} is not visible: expected cuda:0 to cuda:3")
    assert f'Use {name}="nvidia-smi:6" (nvidia-smi:6 -> cuda:2)' in text
    decision = resolve(**{name: "nvidia-smi:6"}, inventory=eight, environ={MASK: "4,5,6,7"})  # type: ignore[arg-type]
    assert uuid(6) in (decision.gpu if name == "device" else decision.render_gpu).uuid  # type: ignore[union-attr]
    with pytest.raises(DeviceUnavailableError, match=f'Use {name}="cuda:1", or {name}="auto"'):
        resolve(**ask, inventory=eight, environ={MASK: "4,5"})  # type: ignore[arg-type]


def test_report_has_variables_of_all_launchers() -> None:
    environ = dict.fromkeys((*MPI, "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "WSL_DISTRO_NAME"), "1")
    assert examine(FOUR, environ).environ == environ
    report = examine(ONE, {TASK: "3", MASK: "0"})
    assert (report.healthy, report.findings) == (True, ())

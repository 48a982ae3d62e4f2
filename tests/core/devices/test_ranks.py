"""Ranks of launchers, from public bug reports: the GPU that ``"auto"`` picks, the error, and the finding."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from rl_ext_core.devices import Inventory, check_environment, resolve
from rl_ext_core.devices.doctor import examine
from rl_ext_core.errors import DeviceUnavailableError, InvalidArgumentError
from tests.core.devices.machines import machine, run_shell_line, uuid

MASK, RANK, TASK = "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "SLURM_LOCALID"
OMPI, MV2, HYDRA, PMI = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    *("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
)
MPI = (OMPI, MV2, HYDRA, PMI)
PER_GPU, PER_TASK, GPU_BIND, TRES_BIND, TRES = (
    *("SLURM_NTASKS_PER_GPU", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK"),
)
TORCHRUN = {"GROUP_RANK": "0"}
RENDERERS = ("mujoco", "gymnasium", "dm_control", "robosuite")
ONE, FOUR, EIGHT = (machine(count, without=RENDERERS) for count in (1, 4, 8))
SLICES = ["MIG-11111111-0000-4000-8000-000000000000", "MIG-22222222-0000-4000-8000-000000000000"]
WITH_MIG = machine(2, mig={0: SLICES}, without=RENDERERS)
BOTH = ",".join(SLICES)
ALL_FOUR = "0,1,2,3"


@pytest.mark.parametrize(
    ("there", "environ", "ordinal", "why"),
    [
        # Slurm binds a GPU to each task (ignite#3843, ignite#3259), and cgroups hide the others.
        (ONE, {TASK: "3", PER_GPU: "1", MASK: "0"}, 0, PER_GPU),
        (FOUR, {TASK: "3", PER_GPU: "1", MASK: "3"}, 0, "a GPU of its own"),
        (FOUR, {TASK: "7", PER_GPU: "2", MASK: "3"}, 0, PER_GPU),
        (FOUR, {TASK: "7", PER_GPU: "2"}, 3, "2 tasks per GPU"),
        (FOUR, {TASK: "7", PER_GPU: "2", TRES_BIND: "gres/gpu:none"}, 3, "2 tasks per GPU"),
        *(
            (ONE, {TASK: "3", MASK: "0", TRES_BIND: f"gres/gpu:{kind}"}, 0, TRES_BIND)
            for kind in ("single:1", "verbose,single:2", "per_task:1", "closest", "map:0,1,2,3", "mask:0x1,0x2")
        ),
        (ONE, {TASK: "3", MASK: "0", TRES_BIND: "gres/shard:none+gres/gpu:map_gpu:0*4"}, 0, TRES_BIND),
        (ONE, {TASK: "3", MASK: "0", GPU_BIND: "verbose,single:1"}, 0, GPU_BIND),
        (ONE, {TASK: "3", MASK: "0", TRES: "cpu=32,gres/gpu=1"}, 0, TRES),
        (ONE, {TASK: "3", MASK: "0", "SLURM_ACCEL_BIND_TYPE": "gn"}, 0, "SLURM_ACCEL_BIND_TYPE"),
        (ONE, {TASK: "3", RANK: "3", PER_GPU: "1", MASK: "0"}, 0, f"{RANK}='3', and Slurm"),
        (FOUR, {TASK: "3", PER_TASK: "1", GPU_BIND: "none", MASK: ALL_FOUR}, 3, "place on this machine"),
        (FOUR, {TASK: "2", MASK: "2"}, 0, "one GPU"),  # srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID ...'
        # MPI, and nested launchers.
        *((FOUR, {name: "2"}, 2, f"{name}='2'") for name in MPI),
        *((FOUR, {name: "3", TASK: "0"}, 3, f"({name} comes before {TASK}='0')") for name in MPI),
        *((FOUR, {RANK: "1", name: "0"}, 1, f"({RANK} comes before {name}='0')") for name in MPI),
        *((FOUR, {name: "2", MASK: "1"}, 0, "one GPU") for name in MPI),  # a script sets the mask of each rank
        (FOUR, {OMPI: "3", TASK: "0", PER_GPU: "1"}, 3, OMPI),
        (FOUR, {HYDRA: "1", OMPI: "1"}, 1, f"{OMPI}='1'"),
        # Ray Train sets the mask of each worker, and so does torchrun --virtual-local-rank.
        (FOUR, {RANK: "2", MASK: "2", "RAY_JOB_ID": "01"}, 0, "one GPU"),
        (FOUR, {RANK: "2", MASK: "1,2,3", "RAY_JOB_ID": "01"}, 2, "place on this machine"),
        (FOUR, {RANK: "0", MASK: "2", **TORCHRUN}, 0, "place on this machine"),
        # A MIG slice for each process.
        (WITH_MIG, {RANK: "0", MASK: SLICES[1]}, 0, "place on this machine"),
        (WITH_MIG, {TASK: "1", PER_TASK: "1", MASK: SLICES[1]}, 0, "a GPU of its own"),
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
        (FOUR, {TASK: "6", GPU_BIND: "none", MASK: ALL_FOUR}, f"{GPU_BIND}='none' shows every task all", "per-node=4"),
        (FOUR, {TASK: "4", PER_GPU: "1", TRES_BIND: "gres/gpu:none"}, TRES_BIND, "srun --ntasks-per-node=4"),
        (FOUR, {TASK: "8", PER_GPU: "2", TRES_BIND: "gres/gpu:none"}, "below 4", "srun --ntasks-per-node=4"),
        (ONE, {TASK: "3", MASK: "0"}, "sees 1 GPU", "srun --gpus-per-task=1"),
        (ONE, {TASK: "3", TRES: "cpu=8"}, f"{TASK}='3'", "srun --gpus-per-task=1"),  # of --cpus-per-task=8
        (ONE, {TASK: "3", GPU_BIND: "verbose"}, f"{TASK}='3'", "srun"),
        (
            ONE,
            {TASK: "0", RANK: "3", PER_TASK: "1"},
            f"{RANK}='3'",
            "torchrun",
        ),  # more processes than the task has GPUs
        (ONE, {TASK: "3", RANK: "3", PER_TASK: "1", **TORCHRUN}, f"{RANK}='3'", "torchrun"),
        (FOUR, {RANK: "1", MASK: "1", **TORCHRUN}, f"{MASK}='1'", "list 2 GPUs"),  # CUDA_VISIBLE_DEVICES=1 torchrun
        (FOUR, {OMPI: "4"}, f"{OMPI}='4'", "mpirun --map-by ppr:4:node"),
        (FOUR, {HYDRA: "5"}, f"{HYDRA}='5'", "mpiexec -ppn 4"),
        (ONE, {PMI: "1"}, "below 1", 'device="cuda:0"'),
        (WITH_MIG, {RANK: "1", MASK: BOTH}, "one MIG slice", f"export {MASK}={SLICES[1]} {RANK}=0"),
        (WITH_MIG, {TASK: "1", MASK: BOTH}, "one MIG slice", f"export {MASK}={SLICES[1]} {RANK}=0"),
        (WITH_MIG, {RANK: "1"}, "one MIG slice", f"export {MASK}={SLICES[1]} {RANK}=0"),
        (WITH_MIG, {RANK: "2", MASK: BOTH}, f"{RANK}='2'", "torchrun --nproc-per-node=2"),
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
    if found.fix.startswith("export"):
        assert found.fix == fix
        after = run_shell_line(found.fix, environ)
        assert resolve(inventory=there, environ=after).mig == SLICES[1]
        assert check_environment(after, inventory=there) == ()
    else:
        assert found.fix.split(" train.py")[0] in text


def test_rank_argument_beyond_visible_slices_raises() -> None:
    with pytest.raises(DeviceUnavailableError, match=f"Use rank=0 and `export {MASK}={SLICES[1]}`"):
        resolve(rank=1, inventory=WITH_MIG, environ={})


def test_findings_on_mig_slices_name_the_slice_of_the_rank() -> None:
    error, warning = check_environment({RANK: "1", MASK: BOTH}, inventory=WITH_MIG)
    assert (error.variable, warning.variable) == (RANK, MASK)
    assert warning.fix == f"export {MASK}={SLICES[1]}"
    (unset,) = check_environment({RANK: "0"}, inventory=WITH_MIG)
    assert unset.fix == f"export {MASK}={SLICES[0]}"


@pytest.mark.parametrize("name", MPI)
@pytest.mark.parametrize(("value", "fix"), [("", None), ("one", None), ("-1", None), ("'2'", "2")])
def test_invalid_mpi_rank_raises_and_is_found(name: str, value: str, fix: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{name}={value!r} is not a rank")):
        resolve(inventory=FOUR, environ={name: value})
    (found,) = check_environment({name: value}, inventory=FOUR)
    assert found.fix == (f"unset {name}" if fix is None else f"export {name}={fix}")


@pytest.mark.parametrize(
    ("environ", "finding"),
    [
        # `export LOCAL_RANK=$SLURM_LOCALID` in a batch script gives every task the 0 of the script.
        ({RANK: "0", TASK: "3"}, True),
        ({RANK: "1", OMPI: "3"}, True),
        ({OMPI: "0", TASK: "2"}, True),
        ({RANK: "3", TASK: "0"}, False),
        ({RANK: "3", TASK: "3"}, False),
        ({RANK: "0", TASK: "3", **TORCHRUN}, False),  # torchrun in each task
        ({RANK: "0", TASK: "3", "RAY_JOB_ID": "01"}, False),
        ({RANK: "0", TASK: "3", MASK: "3"}, False),  # only one GPU is visible
        ({RANK: "0", TASK: "x"}, False),
    ],
)
def test_rank_that_contradicts_outer_launcher_is_reported(environ: dict[str, str], finding: bool) -> None:
    decision = resolve(inventory=FOUR, environ=environ)
    found = check_environment(environ, inventory=FOUR)
    assert (len(decision.warnings), len(found)) == (finding, finding)
    if finding:
        name = found[0].variable
        assert (found[0].severity, found[0].fix) == ("warning", f"unset {name}")
        assert f"{name}={environ[name]!r} contradicts" in decision.warnings[0]
        assert check_environment(run_shell_line(found[0].fix, environ), inventory=FOUR) == ()
    # A named device or worker does not depend on ranks.
    for ask in ({"device": "cuda:0"}, {"worker": 1}, {"rank": 0}, {"pick": "free-memory"}):
        assert resolve(**ask, inventory=FOUR, environ=environ).warnings == ()  # type: ignore[arg-type]


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
    environ = dict.fromkeys((*MPI, TRES_BIND, TRES, GPU_BIND, PER_GPU, "SLURM_ACCEL_BIND_TYPE", "WSL_DISTRO_NAME"), "1")
    assert examine(FOUR, environ).environ == environ
    report = examine(ONE, {TASK: "3", TRES_BIND: "gres/gpu:single:1", MASK: "0"})
    assert (report.healthy, report.findings) == (True, ())

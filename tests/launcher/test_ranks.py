"""Who started this process: told from the variables that each launcher sets, and from no others."""

from __future__ import annotations

import pytest

from glmexp.config.errors import ConfigError
from glmexp.launcher.ranks import Outside, first_host, outside_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-head-4711@1",
}


def test_five_variables_make_a_rank_and_four_do_not() -> None:
    assert outside_ranks(TORCHRUN) == Outside(3, 4, 1, 0, "head", 29500)
    assert outside_ranks({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}) == Outside(3, 4, 1, 2, "head", 29500)
    for name in TORCHRUN:
        assert outside_ranks({key: value for key, value in TORCHRUN.items() if key != name}) is None, name


def test_a_task_of_srun_is_a_rank() -> None:
    found = outside_ranks(SRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert found.master_addr == "gpu03"
    other = outside_ranks({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other is not None
    assert other.master_port == found.master_port, "derived alike by all"
    assert 15_000 <= found.master_port < 32_000, "below what Linux hands out"
    another = outside_ranks({**SRUN, "SLURM_JOB_ID": "72"})
    assert another is not None
    assert another.master_port != found.master_port
    chosen = outside_ranks({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert chosen is not None
    assert (chosen.master_addr, chosen.master_port) == ("head", 1234)


def test_a_batch_script_and_a_single_task_are_no_ranks() -> None:
    assert outside_ranks({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert outside_ranks({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_inside_srun_counts() -> None:
    assert outside_ranks({**SRUN, **TORCHRUN}) == outside_ranks(TORCHRUN)


def test_a_process_of_mpirun_is_a_rank() -> None:
    found = outside_ranks(MPIRUN)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 1, 2)
    assert found.master_addr == "127.0.0.1"
    intel = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert outside_ranks(intel) is not None
    assert outside_ranks({"PMI_RANK": "0", "PMI_SIZE": "2"}) is None, "srun --mpi=pmi2 sets those as well"
    assert outside_ranks({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_mpirun_over_machines_asks_for_the_address_of_rank_0() -> None:
    several = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"mpirun -x MASTER_ADDR=HOST"):
        outside_ranks(several)
    found = outside_ranks({**several, "MASTER_ADDR": "head"})
    assert found is not None
    assert found.master_addr == "head"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-07,12],login1", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]-ib", "rack1-ib"),
        ("a-b.example,c", "a-b.example"),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first

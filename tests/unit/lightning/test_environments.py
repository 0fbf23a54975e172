"""Ranks of mpirun, Slurm and torchrun, as environment variables tell them; real ones: tests/clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.environments.agreement import rank_problems
from lightning_megatron.lightning.environments.mpi import MPIRanks, MpirunEnvironment, environment_of_ranks


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def environment(variables: dict[str, str]) -> MpirunEnvironment:
    found = environment_of_ranks(LightningEnvironment(), variables)
    assert isinstance(found, MpirunEnvironment)
    return found


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variables",
    [
        open_mpi(5, 8, 1, 4),
        {
            "MV2_COMM_WORLD_RANK": "5",
            "MV2_COMM_WORLD_SIZE": "8",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "4",
        },
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    ],
    ids=["openmpi", "mvapich", "hydra"],
)
def test_ranks_of_every_mpirun(variables: dict[str, str]) -> None:
    found = environment(variables)
    assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (8, 5, 1, 1)
    assert found.creates_processes_externally


def test_the_trainer_takes_mpiruns_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in open_mpi(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2), logger=False)
    assert (trainer.global_rank, trainer.world_size, trainer.local_rank) == (1, 2, 1)
    assert isinstance(trainer.strategy.cluster_environment, MpirunEnvironment)
    with pytest.raises(ConfigError, match=r"devices=4: .* but Mpirun has started 2.*nearest valid: 2"):
        Trainer(accelerator="cpu", devices=4, strategy=MegatronStrategy(), logger=False)


def test_others_environments_stay() -> None:
    alone, own = open_mpi(0, 1, 0, 1), LightningEnvironment()
    assert environment_of_ranks(own, alone) is own
    assert environment_of_ranks(own, {}) is own
    elastic = TorchElasticEnvironment()  # torchrun below mpirun
    assert environment_of_ranks(elastic, open_mpi(1, 2, 0, 1)) is elastic
    assert environment_of_ranks(None, open_mpi(1, 2, 0, 1)) is None
    # A bare PMI of Slurm does not tell local ranks, and has Slurm's own variables beside it.
    assert environment_of_ranks(own, {"PMI_RANK": "1", "PMI_SIZE": "2"}) is own


def test_mpirun_in_a_job_of_slurm_is_mpiruns() -> None:
    slurm = SLURMEnvironment()
    assert isinstance(environment_of_ranks(slurm, open_mpi(1, 2, 1, 2)), MpirunEnvironment)
    assert environment_of_ranks(slurm, {"PMI_RANK": "1", "PMI_SIZE": "2"}) is slurm


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((2, 2, 0, 2), "OMPI_COMM_WORLD_RANK=2"),
        ((1, 2, 2, 2), "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        ((1, 2, 1, 4), "OMPI_COMM_WORLD_LOCAL_SIZE=4"),
    ],
)
def test_ranks_that_contradict_each_other(ranks: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MPIRanks.found(open_mpi(*ranks))
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK='one'"):
        MPIRanks.found({**open_mpi(1, 2, 1, 2), "OMPI_COMM_WORLD_RANK": "one"})


def test_the_place_where_ranks_meet(tmp_path: Path) -> None:
    here = environment(open_mpi(1, 2, 1, 2))
    assert here.main_address == "127.0.0.1"
    named = environment({**open_mpi(3, 4, 1, 2), "MASTER_ADDR": "node7", "MASTER_PORT": "1234"})
    assert (named.main_address, named.main_port) == ("node7", 1234)
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=HOST"):
        _ = environment(open_mpi(3, 4, 1, 2)).main_address
    (tmp_path / "hosts").write_text("# first\n10.0.0.5 slots=2\n10.0.0.6 slots=2\n")
    listed = {**open_mpi(3, 4, 1, 2), "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hosts")}
    assert environment(listed).main_address == "10.0.0.5"
    ports = {environment({**open_mpi(1, 2, 1, 2), "PMIX_NAMESPACE": str(job)}).main_port for job in range(50)}
    assert len(ports) > 45
    assert all(10000 <= port < 30000 for port in ports)


def test_ranks_that_are_dealt_out_to_machines_in_turn_are_refused() -> None:
    by_node = environment({**open_mpi(1, 4, 0, 2), "MASTER_ADDR": "a"})
    (problem,) = rank_problems(by_node, 2, 2)
    assert (problem.argument, problem.nearest) == ("rank", (0,))
    assert "--map-by slot" in problem.reason
    assert rank_problems(environment(open_mpi(3, 4, 1, 2)), 2, 2) == []


def test_machines_with_other_numbers_of_ranks_are_found_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):  # one machine with four was meant, and there are two with two
        (problem,) = rank_problems(environment(open_mpi(rank, 4, rank % 2, 2)), 1, 4)
        assert "Mpirun has started 2 on a machine" in problem.reason
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (problem,) = rank_problems(TorchElasticEnvironment(), 1, 4, {"LOCAL_WORLD_SIZE": "2"})
    assert "TorchElastic has started 2 on a machine" in problem.reason
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    (problem,) = rank_problems(_slurm(), 2, 2, _tasks("3,1"))
    assert "SLURM has started 1 or 3 on a machine" in problem.reason
    assert rank_problems(_slurm(), 2, 2, _tasks("2(x2)")) == []


def _slurm() -> SLURMEnvironment:
    return SLURMEnvironment.__new__(SLURMEnvironment)  # its constructor looks for variables of a whole job


def _tasks(text: str) -> dict[str, str]:
    return {"SLURM_STEP_TASKS_PER_NODE": text}

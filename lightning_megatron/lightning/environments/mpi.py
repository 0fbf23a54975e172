"""Ranks that ``mpirun`` has started, read from the environment: no MPI library is loaded."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.lightning.environments.given_ranks import GivenRanks
from lightning_megatron.machine.hostsfile import read_hosts

_FAMILIES = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    "MVAPICH": (
        *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
        *("MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ),
    "MPICH or Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
}
"""Variables of each implementation: world size, rank, local size, local rank."""

_HOSTSFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE")
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_KVSNAME", "PMI_JOBID", "SLURM_JOB_ID")
_FIRST_PORT, _PORTS = 10000, 20000
"""First port, and number of ports, below those that a kernel gives to connections by itself."""


@dataclass(frozen=True)
class MPIRanks:
    """Numbers that ``mpirun`` gives a process.

    Attributes:
        family: name of the MPI implementation.
        world_size: ranks of the job.
        rank: global rank of this process.
        local_size: ranks on this machine.
        local_rank: rank of this process on its machine.
    """

    family: str
    world_size: int
    rank: int
    local_size: int
    local_rank: int

    @classmethod
    def found(cls, variables: Mapping[str, str]) -> MPIRanks | None:
        """The numbers of this process; ``None`` if no ``mpirun`` has started it, or it is the only one.

        Raises:
            ConfigError: for numbers that contradict each other.
        """
        for family, names in _FAMILIES.items():
            if all(variables.get(name) for name in names):
                given = {name: variables[name] for name in names}
                raise_if_any(
                    Problem(name, text, f"{family} sets whole numbers here")
                    for name, text in given.items()
                    if not text.isdigit()
                )
                numbers = [int(text) for text in given.values()]
                found = cls(family, *numbers)
                raise_if_any(_contradictions(found, names))
                return found if found.world_size > 1 else None
        return None


def _contradictions(ranks: MPIRanks, names: tuple[str, ...]) -> list[Problem]:
    world, rank, local, local_rank = names
    found = []
    if ranks.rank >= ranks.world_size:
        found.append(Problem(rank, ranks.rank, f"{world}={ranks.world_size}, so ranks end at {ranks.world_size - 1}"))
    if ranks.local_rank >= ranks.local_size:
        found.append(
            Problem(local_rank, ranks.local_rank, f"{local}={ranks.local_size}, so they end at {ranks.local_size - 1}")
        )
    if ranks.local_size > ranks.world_size:
        found.append(Problem(local, ranks.local_size, f"more than the {ranks.world_size} ranks of {world}"))
    return found


class MpirunEnvironment(GivenRanks):
    """Ranks of ``mpirun`` or ``mpiexec``; ``MegatronStrategy`` selects it by itself in processes that they start.

    The rendezvous is at ``MASTER_ADDR`` and ``MASTER_PORT``, which ``mpirun -x`` exports to all ranks. Without these,
    it is on the loopback address if there is one machine, else on the first machine of the hostsfile, at a port derived
    from the job's name.
    """

    def __init__(self, ranks: MPIRanks, variables: Mapping[str, str] = os.environ) -> None:
        self.ranks = ranks
        self._variables = variables

    def world_size(self) -> int:
        """Ranks of the job."""
        return self.ranks.world_size

    def global_rank(self) -> int:
        """Number of this rank."""
        return self.ranks.rank

    def local_rank(self) -> int:
        """Number of this rank on its machine."""
        return self.ranks.local_rank

    def node_rank(self) -> int:
        """Number of this machine, if all have equally many ranks and are numbered one after another."""
        return self.ranks.rank // self.ranks.local_size

    @property
    def main_address(self) -> str:
        """Address of rank 0's machine.

        Raises:
            ConfigError: if neither a variable nor a hostsfile has it.
        """
        given = self._variables.get("MASTER_ADDR")
        if given:
            return given
        if self.ranks.local_size == self.ranks.world_size:
            return "127.0.0.1"
        for name in _HOSTSFILES:
            path = self._variables.get(name)
            if path and os.path.isfile(path):
                return read_hosts(path)[0].name
        reason = (
            "ranks on several machines do not know where to meet: `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500`, "
            "with rank 0's machine (`mpiexec -genv MASTER_ADDR HOST` with MPICH and Intel MPI)"
        )
        raise ConfigError([Problem("MASTER_ADDR", None, reason)])

    @property
    def main_port(self) -> int:
        """Port on which rank 0 listens: the same on all ranks, and another one for most other jobs."""
        given = self._variables.get("MASTER_PORT")
        job = next((self._variables[name] for name in _JOBS if self._variables.get(name)), "")
        return int(given) if given else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def environment_of_ranks(
    environment: ClusterEnvironment | None, variables: Mapping[str, str] = os.environ
) -> ClusterEnvironment | None:
    """The environment that has started this process, also if it is ``mpirun`` and Lightning has missed that.

    Without mpi4py Lightning does not detect ``mpirun``, and takes each rank for the first process of a separate job. In
    a Slurm job it gives every rank the numbers of the Slurm task in which ``mpirun`` runs.

    Raises:
        ConfigError: for variables of ``mpirun`` that contradict each other.
    """
    is_missed = isinstance(environment, SLURMEnvironment) or (
        isinstance(environment, LightningEnvironment) and not environment.creates_processes_externally
    )
    ranks = MPIRanks.found(variables) if is_missed else None
    return environment if ranks is None else MpirunEnvironment(ranks, variables)

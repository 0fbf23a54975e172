"""Commands for machines without a scheduler: ``torchrun`` on each, or one ``mpirun`` for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.machine.hostsfile import Host, read_hosts, slots_of
from lightning_megatron.tools.launching.job import MODULE, TrainingJob

LOOPBACK = "127.0.0.1"


def hosts_of(job: TrainingJob) -> list[Host]:
    """Machines of a job, each with as many slots as it has devices.

    Raises:
        ConfigError: if the hostsfile is missing, or does not list ``cluster.nodes`` machines.
        OSError: if it cannot be read.
    """
    cluster = job.cluster
    if cluster.hosts is None:
        if cluster.nodes > 1:
            reason = f"cluster.nodes is {cluster.nodes}: name a hostsfile with {cluster.nodes} machines"
            raise ConfigError([Problem("cluster.hosts", None, reason)])
        return [Host(LOOPBACK, cluster.devices_per_node)]
    hosts = read_hosts(cluster.hosts)
    if len(hosts) != cluster.nodes:
        reason = f"lists {len(hosts)} machines, but cluster.nodes is {cluster.nodes}"
        raise ConfigError([Problem("cluster.hosts", cluster.hosts, reason)])
    slots = slots_of(hosts, cluster.world_size, "cluster.hosts")
    return [Host(host.name, slots) for host in hosts]


def torchrun_words(job: TrainingJob, hosts: Sequence[Host], node: int) -> list[str]:
    """Words of ``torchrun`` on one machine, the host of number ``node``."""
    place = ["--nnodes", str(len(hosts)), "--nproc-per-node", str(job.cluster.devices_per_node)]
    if len(hosts) == 1:
        place.append("--standalone")
    else:
        place += ["--node-rank", str(node), "--master-addr", hosts[0].name, "--master-port", str(job.cluster.port)]
    return [job.cluster.python, "-m", "torch.distributed.run", *place, "-m", MODULE, *job.fit_words()]


def mpirun_words(job: TrainingJob, hosts: Sequence[Host], hostsfile: str | None) -> list[str]:
    """Words of Open MPI's ``mpirun``, which starts all ranks.

    It passes SIGUSR1 on to them; after SIGTERM it would kill them within a second.

    Args:
        hosts: machines of the job.
        hostsfile: path of the file with these machines; ``None`` for this machine alone.
    """
    cluster = job.cluster
    words = ["mpirun", "-n", str(cluster.world_size)]
    words += ["--host", f"localhost:{cluster.devices_per_node}"] if hostsfile is None else ["--hostfile", hostsfile]
    words += ["--map-by", "slot", "--bind-to", "none"]
    if cluster.ssh_port is not None:
        words += ["--mca", "plm_rsh_args", f"-p {cluster.ssh_port}"]
    if hostsfile is not None:
        words += ["-x", f"MASTER_ADDR={hosts[0].name}", "-x", f"MASTER_PORT={cluster.port}"]
    for name in cluster.environment:
        words += ["-x", name]
    return [*words, *job.python_words()]

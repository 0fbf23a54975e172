"""A real Slurm of two nodes on the loopback address, for tests that submit jobs.

Further nodes are there by name alone, powered down: scripts for many machines are accepted or refused by their sizes.

The programs come from ``PATH``, or from below the folder that ``SLURM_PREFIX`` names: where packages were unpacked
without being installed. Nothing needs root, and nothing listens on another address.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin")
_NEEDED = ("slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_CONF = """\
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={first}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port={first}-{last} CPUs=8 State=UNKNOWN
NodeName=far[1-600] CPUs=256 Gres=gpu:8 State=CLOUD
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=300
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=far Nodes=far[1-600] MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Programs:
    """Slurm's programs.

    Attributes:
        paths: path of each, by its name.
        libraries: folders of libraries that are not installed.
        plugins: folder of plugins that are not installed; ``None`` for Slurm's own.
    """

    paths: dict[str, Path]
    libraries: tuple[Path, ...] = ()
    plugins: Path | None = None


def programs() -> Programs | None:
    """Slurm's programs; ``None`` without one of them."""
    prefix = os.environ.get("SLURM_PREFIX")
    folders = [Path(prefix, folder) for folder in _FOLDERS] if prefix else None
    where = None if folders is None else os.pathsep.join(map(str, folders))
    found = {name: shutil.which(name, path=where) or shutil.which(f"{name}-wlm", path=where) for name in _NEEDED}
    if not prefix and found["slurmstepd"] is None and found["slurmd"] is not None:
        found["slurmstepd"] = shutil.which("slurmstepd", path="/usr/sbin:/usr/libexec/slurm:/usr/lib/slurm")
    paths = {name: Path(path) for name, path in found.items() if path is not None}
    if set(paths) != set(_NEEDED):
        return None
    if not prefix:
        return Programs(paths)
    plugin = next(Path(prefix).rglob("auth_none.so"), None)
    if plugin is None:
        return None
    return Programs(paths, (plugin.parent, plugin.parent.parent), plugin.parent)


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes:
        found: its programs.
        folder: configuration, logs and state.
    """

    found: Programs
    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Environment in which Slurm's commands reach this cluster."""
        bins = os.pathsep.join(sorted({str(path.parent) for path in self.found.paths.values()}))
        known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        known |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{bins}{os.pathsep}{os.environ['PATH']}"}
        if self.found.libraries:
            known["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, self.found.libraries))
        return known | more

    def run(self, *words: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command, such as ``sbatch``, to its end."""
        path = self.found.paths.get(words[0])
        return subprocess.run(
            [str(path or words[0]), *words[1:]],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=check,
            timeout=120,
        )

    def submit(self, *words: str, **variables: str) -> str:
        """Number of a job that ``sbatch`` has accepted."""
        return self.run("sbatch", "--parsable", *words, **variables).stdout.strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Fields of a job by ``scontrol show job``."""
        text = self.run("scontrol", "show", "job", "-o", number).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 300) -> dict[str, str]:
        """Fields of a job when it has one of the states.

        Raises:
            TimeoutError: if that takes too long.
        """
        end = time.monotonic() + seconds
        while (fields := self.job(number))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {number} is {fields['JobState']}, not {states}: {fields}")
            time.sleep(0.2)
        return fields


def _free_ports(count: int) -> list[int]:
    """A free port, and so many in a row."""
    for start in range(17000 + os.getpid() % 500 * 20, 60000, 20):
        held = []
        try:
            for port in range(start, start + count):
                each = socket.socket()
                held.append(each)
                each.bind(("127.0.0.1", port))
            return list(range(start, start + count))
        except OSError:
            continue
        finally:
            for each in held:
                each.close()
    raise OSError("no free ports")


@contextmanager
def cluster(found: Programs, folder: Path) -> Iterator[Slurm]:
    """A cluster that lives as long as this block."""
    for name in ("state", "run", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    controller, first, last = _free_ports(3)
    plugins = "" if found.plugins is None else f"PluginDir={found.plugins}"
    settings = {"folder": folder, "user": getpass.getuser(), "plugins": plugins}
    (folder / "slurm.conf").write_text(_CONF.format(controller=controller, first=first, last=last, **settings))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    slurm, daemons = Slurm(found, folder), []
    try:
        daemons.append(_daemon(slurm, ["slurmctld", "-D", "-c", "-i"]))
        for node in ("n1", "n2"):
            stepd = str(found.paths["slurmstepd"])
            daemons.append(_daemon(slurm, ["slurmd", "-D", "-c", "-N", node, "-d", stepd]))
        _await_nodes(slurm, daemons)
        yield slurm
    finally:
        for job in slurm.run("squeue", "-h", "-o", "%i", check=False).stdout.split():
            slurm.run("scancel", "--signal=KILL", "--full", job, check=False)
            slurm.run("scancel", job, check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _daemon(slurm: Slurm, words: Sequence[str]) -> subprocess.Popen[bytes]:
    output = (slurm.folder / f"{'-'.join([words[0], *words[3:5]])}.out".replace("/", "_")).open("wb")
    path = str(slurm.found.paths[words[0]])
    with output:
        return subprocess.Popen([path, *words[1:]], env=slurm.environment(), stdout=output, stderr=subprocess.STDOUT)


def _await_nodes(slurm: Slurm, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 60
    while True:
        states = slurm.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).stdout.split()
        if states == ["idle", "idle"]:
            return
        if time.monotonic() > end or any(daemon.poll() is not None for daemon in daemons):
            logs = "\n".join(path.read_text()[-2000:] for path in slurm.folder.glob("*.log"))
            raise RuntimeError(f"nodes are {states}:\n{logs}")
        time.sleep(0.2)

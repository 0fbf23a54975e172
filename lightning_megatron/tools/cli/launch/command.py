"""``lightning-megatron launch``: start a recipe under Slurm, Kubernetes, torchrun or mpirun, or print how."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.machine.hostsfile import Host, read_hosts
from lightning_megatron.tools.cli.common import command_parser, exit_status, fail
from lightning_megatron.tools.cli.launch.recipe import read_job, refuse_unknown_partition
from lightning_megatron.tools.cli.recipes.options import NamedAsGiven, required
from lightning_megatron.tools.launching.commands import hosts_of, mpirun_words, torchrun_words
from lightning_megatron.tools.launching.job import TrainingJob, exports, shell_line
from lightning_megatron.tools.launching.slurm import batch_script

_ABSENT = "{} is not on PATH; --dry-run prints the command"
LAUNCHERS = ("slurm", "kubernetes", "torchrun", "mpirun")
_DESCRIPTION = """\
Start a training recipe on many machines, or with --dry-run print the batch script, manifest or command.

The recipe's section `cluster` describes the machines; `fit` ignores it. examples/clusters has one for each
launcher. Every run resumes from its last checkpoint, so the same command starts it again."""

_EXAMPLES = """\
examples:
  lightning-megatron launch --recipe llama3.1-8b --config examples/clusters/slurm.yaml \\
      --launcher slurm --dry-run
  lightning-megatron launch --recipe llama-tiny --launcher torchrun -- --trainer.max_steps 100"""


def launch_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("launch", _DESCRIPTION, _EXAMPLES, brief_errors=True)
    add = parser.add_argument
    add("--config", action=NamedAsGiven, metavar="YAML", help="the recipe; several as with fit")
    add("--recipe", action=NamedAsGiven, dest="config", metavar="NAME", help="a recipe of this package")
    add("--launcher", required=True, choices=LAUNCHERS, help="program that starts the processes")
    add("--dry-run", action="store_true", help="print, and start nothing")
    add("--hostsfile", metavar="FILE", help="machines, for torchrun and mpirun: `NAME slots=8` on each line")
    add("--node", type=int, metavar="N", help="with torchrun: number of this machine in the hostsfile")
    add("--tasks", choices=("device", "node"), help="with slurm: one task per device, or one torchrun per node")
    add("--from-hf", action="store_true", help="with slurm: begin with the weights in the directory HF_DIR")
    add("arguments", nargs="*", metavar="-- WORDS", help="more words for fit")
    return parser


def launch_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron launch`` with these arguments; returns the exit status, a launcher's if one ran."""
    args = launch_parser().parse_args(list(argv))
    return exit_status(lambda: _run(args, argv), ConfigError, OSError)


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    given: dict[str, Any] = {}
    if args.hostsfile is not None:
        given = {"hosts": args.hostsfile, "nodes": len(read_hosts(args.hostsfile))}
    if args.from_hf and args.launcher != "slurm":
        raise ConfigError([Problem("--from-hf", args.launcher, "is for batch scripts: give `-- --model.from_hf DIR`")])
    job = read_job(required(args), args.arguments, given, from_hf=args.from_hf)
    if args.launcher == "slurm":
        return _slurm(job, args, argv)
    if args.launcher == "kubernetes":
        return _kubernetes(job, args, argv)
    return _torchrun(job, args) if args.launcher == "torchrun" else _mpirun(job, args)


def origin(argv: Sequence[str]) -> str:
    """The command that prints a text, for the header of that text."""
    return shlex.join(["lightning-megatron", "launch", *argv])


# Slurm and Kubernetes take a text


def _slurm(job: TrainingJob, args: argparse.Namespace, argv: Sequence[str]) -> int:
    if args.tasks is not None:
        job = replace(job, cluster=replace(job.cluster, slurm=replace(job.cluster.slurm, tasks=args.tasks)))
    refuse_unknown_partition(job.cluster, _partitions())
    text = batch_script(job, "finetune.sbatch" if job.from_hf else "pretrain.sbatch", origin(argv))
    return _show(text) if args.dry_run else _hand_over(text, ["sbatch"])


def _partitions() -> list[str]:
    """Partitions of this site; none where there is no Slurm."""
    if shutil.which("sinfo") is None:
        return []
    done = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def _kubernetes(job: TrainingJob, args: argparse.Namespace, argv: Sequence[str]) -> int:
    from lightning_megatron.tools.launching.kubernetes import manifests
    from lightning_megatron.tools.launching.yaml_text import yaml_text

    documents = "---\n".join(map(yaml_text, manifests(job)))
    text = f"# Made by: {origin(argv)}\n{documents}"
    return _show(text) if args.dry_run else _hand_over(text, ["kubectl", "apply", "-f", "-"])


def _show(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _hand_over(text: str, words: Sequence[str]) -> int:
    """Pipe a text into the launcher's command."""
    if shutil.which(words[0]) is None:
        return fail(f"{words[0]} is not on PATH; --dry-run prints what it would get")
    return subprocess.run(words, input=text, text=True, check=False).returncode


# torchrun and mpirun are started here


def _torchrun(job: TrainingJob, args: argparse.Namespace) -> int:
    hosts = hosts_of(job)
    if args.node is not None and not 0 <= args.node < len(hosts):
        reason = f"the {len(hosts)} machines have the numbers 0 to {len(hosts) - 1}"
        raise ConfigError([Problem("--node", args.node, reason)])
    if args.dry_run:
        nodes = range(len(hosts)) if args.node is None else [args.node]
        for node in nodes:
            title = f"# on {hosts[node].name}" if len(hosts) > 1 else ""
            _print_command(job, torchrun_words(job, hosts, node), title)
        return 0
    node = _own_number(hosts) if args.node is None else args.node
    return _replace_process(job, torchrun_words(job, hosts, node))


def _mpirun(job: TrainingJob, args: argparse.Namespace) -> int:
    words = mpirun_words(job, hosts_of(job), job.cluster.hosts)
    if args.dry_run:
        _print_command(job, words, "")
        return 0
    program = shutil.which(words[0])
    return fail(_ABSENT.format(words[0])) if program is None else _saving_on_sigterm(job, [program, *words[1:]])


def _print_command(job: TrainingJob, words: Sequence[str], title: str) -> None:
    lines = [*([title] if title else []), *exports(sorted(job.cluster.environment.items())), shell_line(words)]
    print("\n".join(lines))


def _own_number(hosts: Sequence[Host]) -> int:
    """Number of this machine among those of the job.

    Raises:
        ConfigError: if its name and addresses are not there.
    """
    if len(hosts) == 1:
        return 0
    own = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn()}
    with suppress(OSError):  # the file may list a name that cannot be resolved
        own |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    found = [number for number, host in enumerate(hosts) if host.name in own]
    if len(found) != 1:
        reason = f"this machine ({socket.gethostname()}) is not to be found in the hostsfile: give its number"
        raise ConfigError([Problem("--node", None, reason, tuple(range(len(hosts))))])
    return found[0]


def _replace_process(job: TrainingJob, words: Sequence[str]) -> int:
    """Become the launcher, so that signals reach it; returns only if there is none."""
    program = shutil.which(words[0])
    if program is not None:
        sys.stdout.flush()
        os.execve(program, list(words), {**os.environ, **job.cluster.environment})
    return fail(_ABSENT.format(words[0]))


def _saving_on_sigterm(job: TrainingJob, words: Sequence[str]) -> int:
    """Run ``mpirun`` with SIGUSR1 in place of SIGTERM: it passes SIGUSR1 on, but kills ranks a second after SIGTERM."""
    sys.stdout.flush()
    process = subprocess.Popen(words, env={**os.environ, **job.cluster.environment})
    ours = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda *_: process.send_signal(signal.SIGUSR1)) for number in ours}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Batch scripts for Slurm: a run that is preempted or out of time is requeued and resumes by itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from textwrap import fill

from lightning_megatron.tools.launching.job import (
    MODEL_SIZES,
    MODULE,
    OPTIONS,
    SIZES,
    TrainingJob,
    exports,
    option_lines,
)

_USAGE = """\
#
# sbatch {name} [more words for `fit`]. In the environment:
#   RECIPE            names of recipes and YAML files, separated by spaces (default: {recipe})
#   DATA_PATH         prefix of the token files (default: the recipe's)
{more}{sizes}
#                     sizes in place of the recipe's
#   DEVICES           devices of a node (default: {devices})
#   PYTHON            interpreter (default: {python}); VENV: a virtual environment to activate before
#   IMAGE, MOUNTS     container image for Pyxis, and folders for it (default: the current one)
#   MASTER_ADDR, MASTER_PORT    where ranks meet (default: the first node, a port by the job's number)
# The current folder must be on a file system that all nodes share."""

_HF_HEAD = """\
#   HF_DIR            Hugging Face directory whose weights the run begins with
#   CHECKPOINTS       folder with the run's own checkpoints, with which it goes on (default: {checkpoints})
"""

_HF_SIZES = """\
for name in {names}; do
    if [[ -n ${{!name:-}} ]]; then
        echo "$name=${{!name}}: the weights in HF_DIR have sizes of their own" >&2
        exit 2
    fi
done"""

_CONTAINER = """\
container=()
if [[ -n ${IMAGE:-} ]]; then
    container=(--container-image="$IMAGE" --container-mounts="${MOUNTS:-$PWD:$PWD}" --container-workdir="$PWD")
fi"""

_OPEN_FILES = """\
# A job of more than 128 ranks has more connections than the usual limit.
ulimit -n "$(ulimit -H -n)\""""

_ADDRESS = """\
if [[ -z ${{MASTER_ADDR:-}} ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${{hosts%%$'\\n'*}}
fi
MASTER_PORT=${{MASTER_PORT:-$(({first} + SLURM_JOB_ID % 10000))}}
export MASTER_ADDR MASTER_PORT"""

_A_TASK_A_DEVICE = """\
status=0
srun --label --wait={grace} "${{container[@]}}" "$PYTHON" -m {module} "${{words[@]}}" || status=$?"""

_TORCHRUN = """\
# torchrun ignores SIGUSR1, which its ranks get from Slurm as well. Those that are not up yet get it from here, until
# torchrun has ended; its own status would not tell that there was one.
# shellcheck disable=SC2016 # it is the shell of each node that expands this
node='
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
run=("$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$DEVICES"
    --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if "$PYTHON" -m torch.distributed.run --help | grep shutdown-timeout >/dev/null; then
    run+=(--shutdown-timeout {grace})
fi
noted=
trap "noted=yes" USR1
(trap "" USR1; exec "${{run[@]}}" -m {module} "$@") &
agent=$!
trap "kill -TERM $agent" TERM
while true; do
    if [[ -n $noted ]] && kill -0 "$agent" 2>/dev/null; then
        pkill -USR1 -P "$agent" || true
        sleep 5 &
        wait "$!" || true
        continue
    fi
    status=0
    wait "$agent" || status=$? # of 128 and more if a signal has interrupted it
    if [[ $status -lt 128 ]] || ! kill -0 "$agent" 2>/dev/null; then
        break
    fi
done
if [[ $status != 0 && -n $noted ]]; then
    status=138
fi
exit "$status"'
export PYTHON DEVICES
status=0
srun --label --wait={grace} "${{container[@]}}" bash -euo pipefail -c "$node" node "${{words[@]}}" || status=$?"""

_END = """\
# 138 is the status after SIGUSR1. The run has requeued itself, unless the signal came before its first step.
if [[ $status == 138 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$status\""""


def batch_script(job: TrainingJob, script: str = "pretrain.sbatch", origin: str = "") -> str:
    """A batch script; its head tells its file name, ``script``, and the command that makes it, ``origin``."""
    cluster = job.cluster
    head = ["#!/bin/bash", *_directives(job)]
    checkpoints = job.checkpoints or "checkpoints"
    sizes = [name for name in SIZES if not job.from_hf or name not in MODEL_SIZES]
    usage = _USAGE.format(
        name=script,
        recipe=" ".join(job.configs),
        more=_HF_HEAD.format(checkpoints=checkpoints) if job.from_hf else "",
        sizes=fill(", ".join(sizes), 110, initial_indent="#   ", subsequent_indent="#   "),
        devices=cluster.devices_per_node,
        python=cluster.python,
    )
    made = [] if not origin else ["#", f"# Made by: {origin}"]
    body = [
        "set -euo pipefail",
        ': "${SLURM_JOB_ID:?submit this script with sbatch}"',
        *_environment_lines(cluster.environment),
        *_recipe_lines(job),
        option_lines({name: words for name, words in OPTIONS.items() if name == "DATA_PATH" or name in sizes}),
        'words+=("$@")',
        "",
        'if [[ -n ${VENV:-} ]]; then\n    # shellcheck disable=SC1091\n    source "$VENV/bin/activate"\nfi',
        f"PYTHON=${{PYTHON:-{shlex.quote(cluster.python)}}}",
        _container(job),
        _OPEN_FILES,
        _ADDRESS.format(first=15000),
        "",
        (_A_TASK_A_DEVICE if cluster.slurm.tasks == "device" else _TORCHRUN).format(grace=cluster.grace, module=MODULE),
        _END,
    ]
    return "\n".join([*head, *made, usage, *body]) + "\n"


def _directives(job: TrainingJob) -> list[str]:
    cluster, slurm = job.cluster, job.cluster.slurm
    tasks = cluster.devices_per_node if slurm.tasks == "device" else 1
    given: dict[str, object] = {
        "job-name": cluster.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "nodes": cluster.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": slurm.cpus_per_task,
        "gres": slurm.gres,
        "time": slurm.time,
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": f"USR1@{cluster.grace}",
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [f"#SBATCH {word}" for word in [*words, *(["--exclusive"] if slurm.exclusive else []), "--requeue"]]


def _environment_lines(environment: Mapping[str, str]) -> list[str]:
    """Lines that set the job's variables; those of the submission replace sizes and data."""
    fixed = exports(sorted((name, value) for name, value in environment.items() if name not in OPTIONS))
    return fixed + [f"export {n}=${{{n}:-{shlex.quote(environment[n])}}}" for n in OPTIONS if n in environment]


def _recipe_lines(job: TrainingJob) -> list[str]:
    recipe = " ".join(map(shlex.quote, job.configs))
    words = ["fit"]
    lines = []
    if job.from_hf:
        lines += [
            ': "${HF_DIR:?the Hugging Face directory to begin with}"',
            _HF_SIZES.format(names=" ".join(MODEL_SIZES)),
        ]
        words += ["--model.from_hf", '"$HF_DIR"']
    lines += [
        f"DEVICES=${{DEVICES:-{job.cluster.devices_per_node}}}",
        f"words=({' '.join(words)})",
        f"for part in ${{RECIPE:-{recipe}}}; do",
        "    case $part in",
        '        */* | *.yaml | *.yml | *.json) words+=(--config "$part") ;;',
        '        *) words+=(--recipe "$part") ;;',
        "    esac",
        "done",
        *_start_lines(job),
        'words+=(--trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$DEVICES")',
    ]
    if job.arguments:
        lines.append(f"words+=({' '.join(map(shlex.quote, job.arguments))})")
    return lines


def _start_lines(job: TrainingJob) -> list[str]:
    if not job.from_hf:
        return ["words+=(--ckpt_path last)"]
    folder = shlex.quote(job.checkpoints or "checkpoints")
    return [
        f'if compgen -G "${{CHECKPOINTS:-{folder}}}/*.ckpt" >/dev/null; then',
        "    words+=(--ckpt_path last) # of this run, not the weights that it began with",
        "fi",
    ]


def _container(job: TrainingJob) -> str:
    lines = []
    if job.cluster.image is not None:
        lines.append(f"IMAGE=${{IMAGE:-{shlex.quote(job.cluster.image)}}}")
    if job.cluster.mounts:
        lines.append(f"MOUNTS=${{MOUNTS:-{shlex.quote(','.join(job.cluster.mounts))}}}")
    return "\n".join([*lines, _CONTAINER])

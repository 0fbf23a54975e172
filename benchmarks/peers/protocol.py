"""The part that all contestants of a comparison share: the job, the tokens, and the reports of rounds.

A contestant trains when its standard input says ``go``, a round of steps at a time, and prints one line of JSON after
each round. After ``profile`` instead, the operators of the round are timed, and the line has them too. It imports
nothing of lightning_megatron, so that a peer can live in an environment without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""AdamW and gradient clipping, equal for all contestants."""

MARK = "ROUND "


@dataclass(frozen=True)
class Job:
    """One training that all contestants of a row do.

    Attributes:
        weights: Hugging Face directory of the model's initial weights.
        precision: "fp32" or "bf16".
        layout: "single", or axes and their sizes such as "dp2", "tp2", "ep8", "tp4dp2".
        seq: tokens of a sample.
        micro_batch: samples of a micro-batch.
        micro_batches: micro-batches of a step, over all replicas.
        steps: optimizer steps of a round.
        accelerator: torch's device type.
        compiled: True to run the model through ``torch.compile``.
    """

    weights: str
    precision: str = "fp32"
    layout: str = "single"
    seq: int = 512
    micro_batch: int = 2
    micro_batches: int = 4
    steps: int = 1
    accelerator: str = "cpu"
    compiled: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Size of every parallel axis that the layout names: "dp", "tp", "pp", "cp", "ep"."""
        if self.layout == "single":
            return {}
        return {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", self.layout)}

    @property
    def axis(self) -> str:
        """The first axis of the layout; "dp" for one process."""
        return next(iter(self.axes), "dp")

    @property
    def devices(self) -> int:
        """Number of processes. Experts are spread over ranks that data parallelism has anyway."""
        return math.prod(size for axis, size in self.axes.items())

    @property
    def replicas(self) -> int:
        """Number of processes, or groups of them, with samples of their own."""
        return math.prod(size for axis, size in self.axes.items() if axis in ("dp", "ep"))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.micro_batch * self.micro_batches

    @property
    def own_micro_batches(self) -> int:
        """Micro-batches of a step on one replica."""
        return self.micro_batches // self.replicas

    def words(self) -> list[str]:
        """Command-line words from which :func:`job_of` makes this job."""
        return [f"--job={json.dumps(self.__dict__)}"]


def job_of(argv: list[str] | None = None) -> Job:
    """The job of this process, from its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=json.loads, required=True)
    job = Job(**parser.parse_args(argv).job)
    if job.accelerator == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.devices))
    torch.manual_seed(1)
    return job


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Endless seeded tokens; their meaning does not matter for speed."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size = vocab_size
        self._length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}

    def micro_batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels ``[b, s]`` of the micro-batch of that number, for loops without a loader."""
        rows = [self[number * size + row] for row in range(size)]
        return torch.stack([row["tokens"] for row in rows]), torch.stack([row["labels"] for row in rows])


class Operators(TorchDispatchMode):
    """CPU time of each operator on one thread, which other work of the machine hardly disturbs.

    Attributes:
        found: seconds and calls by the operator's name and the shapes of its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], tuple[float, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.thread_time()
        out = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - begun
        shapes = [list(x.shape) for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        key = str(func), f"{shapes} {next((str(x.dtype)[6:] for x in args if isinstance(x, Tensor)), '')}"
        before, calls = self.found.get(key, (0.0, 0))
        self.found[key] = before + seconds, calls + 1
        return out


class Rounds:
    """Contestant's side of the protocol: waits for a command before each round, and reports after it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = (0.0, 0.0)
        self._group: dist.ProcessGroup | None = None
        self._operators: Operators | None = None

    def begin(self) -> None:
        """Wait for the driver's command on rank 0, and for rank 0 on the others; then start the clocks."""
        if dist.is_initialized() and self._group is None:
            # On the host: ranks that wait must not keep a device busy while another contestant trains.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
        word = sys.stdin.readline().strip() if _rank() == 0 else "go"
        if word not in ("go", "profile"):
            os._exit(0)
        if self._group is not None:
            dist.barrier(self._group)
        self._synchronize()
        if word == "profile":
            torch.set_num_threads(1)
            self._operators = Operators()
            self._operators.__enter__()
        self._begun = (time.perf_counter(), time.process_time())

    def end(self, loss: float) -> None:
        """Report a round of all ranks from rank 0.

        Args:
            loss: mean loss of the round's last step, over the whole batch; a smaller number on ranks without it.
        """
        self._synchronize()
        wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        wall, peak, loss = self._over_ranks([wall, self._peak_mb(), loss], dist.ReduceOp.MAX)
        (cpu,) = self._over_ranks([cpu], dist.ReduceOp.SUM)
        steps = self._job.steps
        report: dict[str, Any] = {"wall": wall / steps, "cpu": cpu / steps, "peak_mb": peak, "loss": loss}
        if self._operators is not None:
            self._operators.__exit__(None, None, None)
            report["operators"] = [(*key, s / steps, n / steps) for key, (s, n) in self._operators.found.items()]
            self._operators = None
        if _rank() == 0:
            print(MARK + json.dumps({**report, "tokens": self._job.tokens}), flush=True)

    def _over_ranks(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self._group is None:
            return values
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, op, group=self._group)
        return found.tolist()

    def _synchronize(self) -> None:
        if self._job.accelerator != "cpu":
            torch.get_device_module(self._job.accelerator).synchronize()

    def _peak_mb(self) -> float:
        if self._job.accelerator != "cpu":
            return torch.get_device_module(self._job.accelerator).max_memory_allocated() / 2**20
        try:  # of this program: getrusage also counts the process that started it
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) / 1024
        except (OSError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(job: Job, step: Callable[[int], float]) -> None:
    """Run rounds of a plain loop until the driver ends the process.

    Args:
        job: the training.
        step: function of the step's number that trains one step and returns the mean loss of its batch.
    """
    rounds, number = Rounds(job), 0
    while True:
        rounds.begin()
        loss = 0.0
        for _ in range(job.steps):
            loss = step(number)
            number += 1
        rounds.end(loss)


def free_port() -> int:
    """A port on which nothing listens, for ranks that a contestant starts by itself."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

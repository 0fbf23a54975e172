"""Cost of the checks that are on by default: hashes of a checkpoint that is loaded, and NaN in every step.

    python benchmarks/checks_by_default.py [--megabytes 1024] [--rounds 5] [--ranks 1 2] [--steps 40]

Loading: tensors that ranks have written are read with ``verify_on_load`` on and off, in turn; from the page cache, and
from the disk, after asking the kernel to drop the pages.

Steps: a Trainer trains one model with ``check_for_nan_in_loss_and_grad`` on and off, in turn; a step is timed from its
batch to the next, after the device has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.checkpoint import load, model_state, save
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerPool

TENSOR = 1 << 22  # elements: 16 MiB
WARM_UP = 4


def loads(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each load on this rank, all ranks together."""
    layout = ParallelLayout().resolve(dist.get_world_size())
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    count = max(1, megabytes * 1_000_000 // (4 * TENSOR))
    names = [f"t{number}" for number in range(count)]
    state = {name: torch.randn(TENSOR) for name in names}
    path = folder / "a.ckpt"
    save(path, model_state(state, {}, mesh), {}, mesh)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for where in ("page cache", "disk"):
            for check in ("sizes", "hashes"):
                if where == "disk":
                    _let_go(path)
                dist.barrier()
                begun = time.perf_counter()
                load(path, model_state(state, {}, mesh), mesh, check=check)
                found.setdefault(f"{where}, {check}", []).append(time.perf_counter() - begun)
    return found


def _let_go(path: Path) -> None:
    for file in path.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class StepTimes(Callback):
    """Seconds from the beginning of each step to that of the next."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        taken = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return taken[WARM_UP:]


def step_times(count: int, checks: bool, device: str, sizes: dict[str, Any], batch: int, length: int) -> list[float]:
    """Steps of one run."""
    seed_everything(1, verbose=False)
    times = StepTimes()
    precision: Any = "32-true" if device == "cpu" else "bf16-mixed"
    trainer = quiet_trainer(
        MegatronStrategy(check_for_nan_in_loss_and_grad=checks),
        max_steps=count + WARM_UP + 1,
        callbacks=[times],
        accelerator=device,
        precision=precision,
        log_every_n_steps=10**6,
    )
    tokens = torch.randint(256, ((count + WARM_UP + 1) * batch, length + 1))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer.fit(LlamaModule("llama-tiny", **sizes), DataLoader(rows, batch_size=batch))
    if device != "cpu":
        devices.synchronize(torch.device(device))
    return times.seconds


def steps(count: int, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of steps without and with the check, in turn."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sizes: dict[str, Any] = {}
    batch, length = 4, 256
    if device != "cpu":
        sizes = {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 8}
        sizes |= {"ffn_hidden_size": 5632, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 2048}
        length = 2048
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for checks in (False, True):
            taken = step_times(count, checks, device, sizes, batch, length)
            found.setdefault("with the check" if checks else "without", []).extend(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as scratch, WorkerPool(size=ranks) as pool:
            by_rank = pool.run(ranks, loads, Path(scratch), options.megabytes, options.rounds)
        for name in by_rank[0]:
            slowest = [max(times) for times in zip(*(found[name] for found in by_rank), strict=True)]
            print(f"load {options.megabytes} MB, {ranks} ranks, {name:20} {statistics.median(slowest):8.3f} s")
    for name, taken in steps(options.steps, options.rounds, options.device).items():
        quartiles = statistics.quantiles(taken, n=4)
        shown = ", ".join(f"{1e3 * value:.2f}" for value in quartiles)
        print(f"step on {options.device}, {name:15} quartiles {shown} ms of {len(taken)}")


if __name__ == "__main__":
    main()

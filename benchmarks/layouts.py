"""Profile of a layout on a CPU: collectives of a step by axis, time spent waiting for them, and operators by time.

    python benchmarks/layouts.py --layout tp2 --precision bf16-mixed
    python benchmarks/layouts.py --layout cp2 --seq 8192 --micro-batches 1 --micro-batch 1

Every rank prints the median wall and CPU time of a step; rank 0 also its collectives (number, bytes, seconds waited
for each kind on each axis) and, with ``--operators``, torch's operators by their own time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning as L
import torch
from peers.protocol import RandomTokens
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.traffic import TrafficLog

AXES = {"single": {}, "tp": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}, "pp": {"pp": 2}, "cp": {"cp": 2}}


class Watch(L.Callback):
    """Times steps after the first ones, and reports at the end.

    Args:
        warm_up: steps that are not counted.
        operators: True to profile the last step.
    """

    def __init__(self, warm_up: int, operators: bool) -> None:
        self._warm_up, self._operators = warm_up, operators
        self._begun = (0.0, 0.0)
        self._times: list[tuple[float, float]] = []
        self._profile: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == self._warm_up:
            strategy.recorder.main.take(strategy.mesh)
        if self._operators and batch_idx == trainer.max_steps - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.__enter__()
        strategy.barrier()
        self._begun = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx >= self._warm_up:
            self._times.append((time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        steps = len(self._times)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
        for rank in range(trainer.world_size):
            strategy.barrier()
            time.sleep(0.2)
            if rank != trainer.global_rank:
                continue
            wall, cpu = (statistics.median(column) for column in zip(*self._times, strict=True))
            print(f"rank {rank}: {wall:.3f} s a step, {cpu:.3f} s of CPU", flush=True)
            for traffic, amount in strategy.recorder.main.take(strategy.mesh).items():
                print(
                    f"  {traffic.axis:9} {traffic.kind:16} {amount.number / steps:7.1f} a step"
                    f" {amount.size / steps / 2**20:9.2f} MiB {amount.waited / steps * 1e3:8.1f} ms waited",
                    flush=True,
                )
            if self._profile is not None:
                table = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
                print("\n".join(line[:50] + line[-130:] for line in table.splitlines()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2", help="single, or one of dp, tp, sp, pp, cp with 2 behind it")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="arguments of MegatronStrategy")
    args = parser.parse_args()
    devices = 1 if args.layout == "single" else 2
    replicas = 2 if args.layout == "dp2" else 1
    options: dict[str, Any] = dict(AXES.get(args.layout.rstrip("2"), {}))
    for word in args.set:
        name, _, value = word.partition("=")
        options[name] = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
    torch.manual_seed(1)
    fields: dict[str, Any] = {"max_position_embeddings": max(2048, args.seq)}
    module = LlamaModule(args.model, **fields)
    strategy = MegatronStrategy(micro_batch_size=args.micro_batch, **options)
    strategy.recorder.main = TrafficLog(strategy.recorder)
    dataset = RandomTokens(module.config.vocab_size, args.seq)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            sampler: Any = DistributedSampler(dataset, shuffle=False) if replicas > 1 else None
            return DataLoader(dataset, args.micro_batch * args.micro_batches // replicas, sampler=sampler)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision=args.precision,
        max_steps=args.warm_up + args.steps + args.operators,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Watch(args.warm_up, args.operators)],
    )
    trainer.fit(module, Data())


if __name__ == "__main__":
    main()

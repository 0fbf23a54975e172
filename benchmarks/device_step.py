"""Speed, memory and kernels of a training step on the device at hand, compared with the prediction of `plan`.

    python benchmarks/device_step.py llama3.2-1b --seq 8192                       # eager
    python benchmarks/device_step.py llama3.2-1b --seq 8192 --compile
    python benchmarks/device_step.py mixtral-8x7b --layers 1 --seq 4096 --predict h200

One process, random weights and tokens. The last step runs under torch's profiler, whose time of kernels is printed by
kind; the other figures are of the steps before it. On a CPU there is no time of kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.device import best_available, synchronize
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.planning.core.device_file import load_device
from lightning_megatron.tools.planning.core.job import PlannedJob
from lightning_megatron.tools.planning.time.software import software_of
from lightning_megatron.tools.planning.time.step import time_of

KINDS = {
    "attention": "sdpa flash fmha",
    "products": "nvjet gemm cutlass",
    "optimizer and norms of gradients": "multi_tensor_apply normtwoops",
    "casts and copies": "direct_copy bfloat16_copy catarray memcpy",
    "compiled elementwise": "triton",
}
"""Words in the names of kernels, by kind of work; all others are elementwise kernels and sums."""


class Tokens(Dataset[dict[str, Tensor]]):
    """Endless random samples."""

    def __init__(self, seq: int, vocabulary: int) -> None:
        self.seq, self.vocabulary = seq, vocabulary

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(self.vocabulary, (self.seq + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": drawn[:-1], "labels": drawn[1:]}


class StepTimes(Callback):
    """Seconds of each step, profile of the last one, and on CUDA the most MB at the start and in parts of a step."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.seconds = device, steps, list[float]()
        self.profiler = profile()
        self.peaks: dict[str, int] = {}

    def note_peak(self, part: str) -> None:
        """Keep the most MB since the last call."""
        if self.device.type == "cuda":
            found = round(torch.cuda.max_memory_allocated() / 2**20)
            self.peaks[part] = max(found, self.peaks.get(part, 0))
            torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.note_peak("forward and backward")

    def on_train_batch_start(self, *args: Any) -> None:
        self.note_peak("between steps" if self.seconds else "start")
        synchronize(self.device)
        if len(self.seconds) == self.steps - 1:
            self.profiler.start()
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        synchronize(self.device)
        self.note_peak("optimizer")
        self.seconds.append(time.perf_counter() - self.begun)
        if len(self.seconds) == self.steps:
            self.profiler.stop()

    def kernels(self) -> dict[str, float]:
        """Milliseconds by kind of kernel; kernels have no time of a CPU."""
        found: dict[str, float] = defaultdict(float)
        for event in self.profiler.key_averages():
            took, name = event.self_device_time_total / 1e3, event.key.lower()
            if took and not event.self_cpu_time_total and "#" not in name:  # optimizers mark their whole step
                kinds = (kind for kind, words in KINDS.items() if any(word in name for word in words.split()))
                found[next(kinds, "elementwise and sums")] += took
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def predicted(config: TransformerConfig, args: argparse.Namespace) -> float:
    """Tokens a second that `plan` predicts."""
    job = PlannedJob(config, ParallelLayout().resolve(1), args.seq, args.micro_batch, args.micro_batches)
    device = load_device(args.predict)
    return time_of(job, device, software_of(device, compiled=args.compile)).tokens_per_second


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="name of a model")
    parser.add_argument("--layers", type=int, help="layers, if not all of the model's")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=6, help="steps, the first and the profiled one among them")
    parser.add_argument("--compile", action="store_true", help="compile blocks")
    parser.add_argument("--predict", metavar="DEVICE", help="device whose predicted speed is shown, such as h200")
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error(f"--steps {args.steps}: must be 3 at least: one to warm up, one to time, one to profile")
    device = best_available()
    config = preset(args.preset)
    config = config.replace(num_layers=args.layers or config.num_layers)
    seed_everything(1, verbose=False)
    times = StepTimes(torch.device(device.type, 0) if device.type != "cpu" else torch.device("cpu"), args.steps)
    trainer = Trainer(
        accelerator=device.type,
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=args.micro_batch, compile=args.compile),
        precision="bf16-mixed",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = args.micro_batch * args.micro_batches
    trainer.fit(GPTModule(config), DataLoader(Tokens(args.seq, config.vocab_size), batch_size=samples))
    seconds = statistics.median(times.seconds[1:-1])
    row: dict[str, Any] = {
        "tokens_per_s": round(samples * args.seq / seconds),
        "step_s": [round(each, 3) for each in times.seconds],
        "parameters": config.num_parameters(),
    }
    if times.peaks:
        row["peak_mb"] = times.peaks
    if args.predict:
        row["predicted_tokens_per_s"] = round(predicted(config, args))
    print(json.dumps(row))
    kernels = times.kernels()
    for kind, took in kernels.items():
        print(f"{took:10.1f} ms  {took / sum(kernels.values()):6.1%}  {kind}")


if __name__ == "__main__":
    main()

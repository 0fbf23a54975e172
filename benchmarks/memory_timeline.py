"""Draws the memory of one training step of ours by cause, and prints it at the step's peak.

    python benchmarks/memory_timeline.py --row llama-tiny/fp32 --out timeline
    python benchmarks/memory_timeline.py --row mixtral-tiny/bf16 --micro-batches 2

The model, tokens and optimizer are those of the row of ``bench.py``. A mode of torch sees every tensor that an
operation returns; what the process holds beside them (Python, libraries, blocks that its allocator keeps) is the rest
of its resident memory, on a GPU of the memory in use. Written under ``--out``: ``NAME.png`` (with matplotlib) and
``NAME.md``.
"""

from __future__ import annotations

import argparse
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from environments import ROOT, weights_of
from peers.ours import Module
from peers.protocol import CLIP, Job, RandomTokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron import device as devices

CAUSES = (
    "parameters",
    "main parameters",
    "gradients",
    "moments",
    "activations",
    "logits",
    "gradient of the output layer",
    "gradients on their way",
    "optimizer step",
)
MB = 1 << 20


class Timeline(TorchDispatchMode):
    """Bytes that are alive after every operation, by cause.

    Args:
        vocab_size: columns of a tensor of logits.
        device: device of the model.

    Attributes:
        phase: cause of a tensor that an operation returns now.
        samples: bytes by cause after each operation, and of the process.
        marks: number of the operation at which a phase has begun, with its name.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self._vocab_size, self._device = vocab_size, device
        self._alive: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.phase = "activations"
        self.samples: list[tuple[dict[str, int], int]] = []
        self.marks: list[tuple[int, str]] = []

    def hold(self, cause: str, tensors: Sequence[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._add(tensor, cause)

    def begin(self, phase: str, name: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.marks.append((len(self.samples), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor):
                self._add(tensor, self._cause(tensor))
        self.samples.append((dict(self._alive), devices.memory_in_use_bytes(self._device)))
        return out

    def _cause(self, tensor: Tensor) -> str:
        if tensor.dim() == 2 and tensor.shape[-1] >= self._vocab_size:
            return "logits"
        if self.phase == "activations" and tensor.dim() == 2 and tensor.shape[0] >= self._vocab_size:
            return "gradient of the output layer"
        return self.phase

    def _add(self, tensor: Tensor, cause: str) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self._alive[cause] -= size

        self._known[key] = weakref.ref(storage, forget)
        self._alive[cause] += size


class Watch(L.Callback):
    """Runs one step of a fit under a timeline.

    Args:
        timeline: the timeline.
        step: number of the step.

    Attributes:
        start: name of a moment before the first step, resident and peak megabytes.
    """

    def __init__(self, timeline: Timeline, step: int) -> None:
        self._timeline, self._step = timeline, step
        self.start: list[tuple[str, float, float]] = []
        self.peak = 0
        self.note("imports")

    def note(self, moment: str) -> None:
        """Record resident memory and its peak."""
        now = devices.memory_in_use_bytes(torch.device("cpu")) / MB
        self.start.append((moment, now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.note("before the model is built")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("model, weights and flat buffers")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.note("before the first step")
        if batch_idx != self._step:
            return
        line, zero = self._timeline, trainer.strategy.sharded_optimizers[0]  # type: ignore[attr-defined]
        line.hold("parameters", [buffer.params for buffer in zero.buffers])
        line.hold("gradients", [buffer.grads for buffer in zero.buffers])
        line.hold("main parameters", [main for _, main, _ in zero.updated_tensors()])
        state = zero.state.values()
        line.hold("moments", [value for values in state for value in values.values() if isinstance(value, Tensor)])
        model = pl_module.model
        model.register_forward_pre_hook(lambda *_: line.begin("activations", "forward"))
        model.register_forward_hook(lambda *_: line.begin("gradients on their way", "backward"))
        zero.optimizer.register_step_pre_hook(lambda *_: line.begin("optimizer step", "step"))
        line.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step + 1:
            self._timeline.__exit__(None, None, None)
            self.note("after the step that is drawn")


def peak_table(timeline: Timeline, start: Sequence[tuple[str, float, float]], name: str) -> str:
    """Markdown: the start, and the moment at which most memory was in use."""
    place = max(range(len(timeline.samples)), key=lambda i: timeline.samples[i][1])
    alive, total = timeline.samples[place]
    phase = next(name for first, name in reversed(timeline.marks) if first <= place)
    lines = [f"## {name}", "", "| moment | resident MB | peak MB so far |", "|---|---|---|"]
    lines += [f"| {moment} | {now:.0f} | {peak:.0f} |" for moment, now, peak in start]
    lines += ["", f"Peak of the step, in a {phase}: {total / MB:.0f} MB", "", "| cause | MB at the peak | most MB |"]
    lines += ["|---|---|---|"]
    for cause in CAUSES:
        most = max(sample[cause] for sample, _ in timeline.samples)
        if most > MB:
            lines.append(f"| {cause} | {alive[cause] / MB:.0f} | {most / MB:.0f} |")
    rests = [total - sum(sample.values()) for sample, total in timeline.samples]
    lines.append(f"| rest: Python, libraries, kept blocks | {rests[place] / MB:.0f} | {max(rests) / MB:.0f} |")
    return "\n".join(lines) + "\n"


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Stacked bytes over the operations of the step, below the line of the memory in use."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5))
    places = range(len(timeline.samples))
    shown = [cause for cause in CAUSES if max(sample[cause] for sample, _ in timeline.samples) > MB]
    stacks = [[sample[cause] / MB for sample, _ in timeline.samples] for cause in shown]
    axes.stackplot(places, stacks, labels=shown)
    axes.plot(places, [total / MB for _, total in timeline.samples], color="black", label="in use by the process")
    for place, name in timeline.marks:
        axes.axvline(place, color="grey", linewidth=0.5)
        axes.text(place, 0, f" {name}", rotation=90, fontsize=7, va="bottom")
    axes.set_xlabel("operations of one step")
    axes.set_ylabel("MB")
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="llama-tiny/fp32", help="model and precision")
    parser.add_argument("--seq", type=int, default=None, help="tokens of a sample (512; 256 for mixtral-tiny)")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--step", type=int, default=1, help="number of the step to draw, after 0")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="folder of the weights")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "out")
    args = parser.parse_args(argv)
    model, precision = args.row.split("/")[:2]
    weights = weights_of(model, args.cache / "weights").resolve()
    seq = args.seq or (256 if model == "mixtral-tiny" else 512)
    job = Job(
        str(weights), precision, "single", seq, args.micro_batch, args.micro_batches, accelerator=args.accelerator
    )
    torch.manual_seed(1)
    fields: dict[str, Any] = {"moe_aux_loss_coeff": 0.0} if "mixtral" in model else {}
    module = Module.from_hf(job.weights, **fields)
    device = torch.device(args.accelerator)
    timeline = Timeline(module.config.vocab_size, device)
    watch = Watch(timeline, args.step)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=job.micro_batch),
        precision="32-true" if precision == "fp32" else "bf16-mixed",
        max_steps=args.step + 1,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    tokens = RandomTokens(module.config.vocab_size, job.seq)
    trainer.fit(module, DataLoader(tokens, job.micro_batch * job.micro_batches))
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"memory_{model}_{precision}"
    text = peak_table(timeline, watch.start, args.row)
    (args.out / f"{name}.md").write_text(text)
    print(text)
    try:
        draw(timeline, args.out / f"{name}.png", args.row)
    except ImportError:
        print("no picture: matplotlib is not installed (the extra `plot` has it)")


if __name__ == "__main__":
    main()

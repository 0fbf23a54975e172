"""Losses of one training in bf16-mixed compared with fp32, on the corpus of the demo.

    make demo                                  # makes the corpus under .demo
    python benchmarks/precision_curves.py      # table on the screen, and a picture

A LLaMA of 3 layers, the same weights, batches and learning rates for all. The third run is in fp32 again, with its
batches cut into micro-batches: its distance from the first is due to the order of sums alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from lightning.pytorch import seed_everything

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import build_tokenizer
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

HOME = Path(".demo")
RUNS = {
    "fp32": ("32-true", None),
    "bf16-mixed": ("bf16-mixed", None),
    "fp32, micro-batches of 2": ("32-true", 2),
}
WINDOW = 20
"""Steps whose losses are averaged in the table."""


def losses(precision: str, micro_batch_size: int | None, steps: int) -> list[float]:
    """Loss of each step."""
    seed_everything(1, verbose=False)
    vocabulary = build_tokenizer("GPTSentencePieceTokenizer", str(HOME / "tokenizer.model")).vocab_size
    module = LlamaModule(
        "llama-tiny",
        lr=3e-3,
        warmup_steps=10,
        lr_schedule="cosine",
        num_layers=3,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=vocabulary,
        max_position_embeddings=256,
    )
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=micro_batch_size),
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=recorder,
    )
    prefix = str(HOME / "corpus_text_document")
    trainer.fit(module, MegatronDataModule(prefix, seq_length=128, batch_size=8, split="95,5,0"))
    return recorder.series("train_loss")


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Losses, and below them the relative distances from the first run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    first, *others = found
    for name, series in found.items():
        above.plot(range(1, len(series) + 1), series, label=name, linewidth=1)
    for number, name in enumerate(others, 1):
        distance = [100 * (own / right - 1) for own, right in zip(found[name], found[first], strict=True)]
        below.plot(range(1, len(distance) + 1), distance, label=name, color=f"C{number}", linewidth=1)
    above.set(ylabel="loss")
    below.set(xlabel="step", ylabel=f"% above {first}")
    above.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a row for each run, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--png", type=Path, default=Path("precision_curves.png"))
    asked = parser.parse_args()
    found = {name: losses(*run, asked.steps) for name, run in RUNS.items()}
    right = found["fp32"]
    print("| run | first loss | mean of the last 20 | from fp32 | largest distance of a step | mean distance |")
    print("|---|---|---|---|---|---|")
    for name, series in found.items():
        distances = [abs(own / exact - 1) for own, exact in zip(series, right, strict=True)]
        last, last_right = (statistics.mean(each[-WINDOW:]) for each in (series, right))
        print(
            f"| {name} | {series[0]:.5f} | {last:.4f} | {100 * (last / last_right - 1):+.3f} %"
            f" | {100 * max(distances):.3f} % | {100 * statistics.mean(distances):.3f} % |"
        )
    draw(found, asked.png)


if __name__ == "__main__":
    main()

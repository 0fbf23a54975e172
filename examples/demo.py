"""The main job from end to end, on text that every machine has; `make demo` runs it.

Python's own standard library becomes JSON lines, a tokenizer and token files; a small LLaMA trains on them with tensor
parallelism over two processes (one, where there is one accelerator), and continues a line of code. A run reuses the
results of earlier ones: interrupted training resumes from its last checkpoint, complete training is not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronHPUStrategy, Throughput, load_module
from lightning_megatron.data import build_tokenizer
from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess
from lightning_megatron.data.preprocessing.train_tokenizer import train_tokenizer
from lightning_megatron.device import CPU, best_available
from lightning_megatron.models.generate import generate

TOKENIZER = "GPTSentencePieceTokenizer"
SEQ_LENGTH = 128
BATCH_SIZE = 8
PROMPTS = ("def __init__(self, ", "import os\n", "    for name in ")
# Tests, and files that are mostly tables.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3"}

say = rank_zero_only(partial(print, "demo:", flush=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (default: 500)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of the tokenizer (default: 4096)")
    parser.add_argument("--files", type=int, help="source files of the corpus (default: all)")
    options = parser.parse_args(argv)

    home: Path = options.directory
    corpus = once(home / "corpus.jsonl", partial(write_corpus, limit=options.files))
    tokenizer = once(
        home / "tokenizer.model",
        lambda path: train_tokenizer([corpus], path, vocab_size=options.vocab_size, max_sentences=50_000),
    )
    prefix = home / "corpus_text_document"
    once(
        prefix.with_suffix(".idx"),
        lambda _: preprocess([corpus], home / "corpus", TokenizerSpec(TOKENIZER, str(tokenizer)), append_eod=True),
    )
    run = home / "run"
    if (run / "result.json").exists():
        say(f"reusing {run}, where training is complete; delete it to train again")
    else:
        train(run, prefix, tokenizer, options.steps)
    report(run, tokenizer)


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Make a file unless an earlier run has; makers rename a file to its final name when it is complete."""
    if path.exists():
        say(f"reusing {path}")
    else:
        say(f"making {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_corpus(path: Path, limit: int | None) -> None:
    """The source files of Python's standard library, one JSON object a line, in an order that mixes topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [file for file in sorted(root.rglob("*.py")) if not SKIPPED & {*file.relative_to(root).parts}]
    random.Random(0).shuffle(sources)
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in sources[:limit])
    write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(run: Path, prefix: Path, tokenizer: Path, steps: int) -> None:
    """Train a small LLaMA, and write its results to a file."""
    kind = best_available()
    devices = 2 if kind is CPU else min(2, torch.get_device_module(kind.type).device_count())
    best = ModelCheckpoint(run / "checkpoints", monitor="val_loss", save_last=True)
    speed = Throughput()
    L.seed_everything(1234)
    trainer = L.Trainer(
        accelerator=kind.type,
        devices=devices,
        strategy=MegatronHPUStrategy(tp=devices),
        precision="32-true" if kind is CPU else "bf16-mixed",  # few CPUs have fast bf16
        max_steps=steps,
        limit_train_batches=steps,  # for the progress bar's sake
        max_epochs=1,
        val_check_interval=max(1, steps // 5),
        limit_val_batches=16,
        gradient_clip_val=1.0,
        log_every_n_steps=min(10, steps),
        logger=[TensorBoardLogger(run, "tensorboard"), CSVLogger(run, "csv")],
        callbacks=[best, speed],
        default_root_dir=run,
    )
    model = LlamaModule(
        "llama-tiny",
        lr=6e-3,
        warmup_steps=steps // 25,
        lr_schedule="cosine",
        num_layers=3,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=build_tokenizer(TOKENIZER, str(tokenizer)).vocab_size,
        max_position_embeddings=2 * SEQ_LENGTH,
    )
    data = MegatronDataModule(
        str(prefix), seq_length=SEQ_LENGTH, batch_size=BATCH_SIZE, split="95,5,0", tokenizer_type=TOKENIZER
    )

    before = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    last = run / "checkpoints" / "last.ckpt"
    if last.exists():
        say(f"training goes on from {last}")
    trainer.fit(model, data, ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero and trainer.global_step == steps:
        facts = {
            "val_loss": [before, float(best.best_model_score or float("nan"))],
            "tokens_per_second": speed.total.tokens / max(speed.total.seconds, 1e-9),
            "checkpoint": os.path.relpath(best.best_model_path),
        }
        write_whole(run / "result.json", json.dumps(facts, indent=2) + "\n")


@rank_zero_only
def report(run: Path, tokenizer: Path) -> None:
    """Draw the losses, print continuations of the prompts, and end with one line of numbers."""
    facts = json.loads((run / "result.json").read_text())
    draw_losses(run)
    say("the model continues")
    print("", *continuations(facts["checkpoint"], tokenizer), "", sep="\n--------\n")
    losses = " -> ".join(f"{loss:.3f}" for loss in facts["val_loss"])
    print(f"demo: val_loss {losses}, {facts['tokens_per_second']:.0f} tokens/s, checkpoint {facts['checkpoint']}")


def continuations(checkpoint: str, tokenizer_model: Path) -> list[str]:
    """Continuations of some prompts by the checkpoint."""
    tokenizer = build_tokenizer(TOKENIZER, str(tokenizer_model))
    module = load_module(checkpoint)
    assert module.model is not None
    texts = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer.encode(prompt)])
        tokens = generate(module.model, tokens, 60, temperature=0.7, top_p=0.9, stop=tokenizer.eod, seed=0)
        texts.append(tokenizer.decode(tokens[0].tolist()))
    return texts


def draw_losses(run: Path) -> None:
    """Training and validation loss of all sessions of a run, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points: dict[str, list[tuple[int, float]]] = {"train_loss": [], "val_loss": []}
    for file in sorted(run.glob("csv/*/metrics.csv")):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                for name in points.keys() & {key for key, value in row.items() if value}:
                    points[name].append((int(row["step"]), float(row[name])))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, pairs in points.items():
        axes.plot(*zip(*sorted(pairs), strict=True), label=name, marker="o" if name == "val_loss" else None)
    axes.set(xlabel="step", ylabel="loss", title="A small LLaMA learns Python's standard library")
    axes.legend()
    figure.savefig(run / "loss.png", dpi=120)
    plt.close(figure)
    say(f"loss curve in {run / 'loss.png'}")


if __name__ == "__main__":
    main()

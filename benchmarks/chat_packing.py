"""Packed chats against padded ones: tokens of conversations for each second of CPU time of training.

    OMP_NUM_THREADS=1 python benchmarks/chat_packing.py

Conversations have log-normal lengths. Packed, they stand in rows as ``ChatDataModule`` makes them. Padded, each has a
row of its own, as long as all rows, or as the longest of its batch. The same conversations are trained on in all three
ways, in turns; the first round is for warming up. Losses are sums over the tokens that are learnt, so they must be
equal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from lightning_megatron import ChatDataModule, LlamaModule
from lightning_megatron.data import PackedChats

Batch = dict[str, Tensor]
SPECIAL = ["<|im_start|>", "<|im_end|>", "user", "assistant"]
WORDS = [f"w{number}" for number in range(500)]


def packed_chats(folder: Path, count: int, length: int) -> PackedChats:
    """Rows of conversations of log-normal lengths: median 180 tokens, most below ``length``."""
    names = [*SPECIAL, *WORDS, "<unk>"]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL[:2])
    backend.save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(1)
    lengths = draw.lognormal(np.log(180), 0.9, count).astype(int).clip(8, length - 8)
    lines = []
    for total in lengths.tolist():
        words = draw.choice(WORDS, total)
        asked = max(1, total // 3)
        lines.append(f'{{"prompt": "{" ".join(words[:asked])}", "completion": "{" ".join(words[asked:])}"}}')
    (folder / "chats.jsonl").write_text("\n".join(lines))
    rows = ChatDataModule(folder / "chats.jsonl", folder, length, chat_template="chatml").rows()
    assert rows is not None
    return rows


def padded(documents: Sequence[Batch], length: int | None) -> Batch:
    """Documents as rows of a batch, padded to ``length``, or to the longest of them if that is ``None``."""
    most = length or max(len(document["tokens"]) for document in documents)
    fill = {"tokens": 0, "labels": -100, "loss_mask": 0.0}
    return {
        name: torch.stack(
            [torch.nn.functional.pad(one[name], (0, most - len(one[name])), value=value) for one in documents]
        )
        for name, value in fill.items()
    }


def split(row: Batch) -> list[Batch]:
    """Documents of a row."""
    ends = int(row["segment_ids"].max())
    names = ("tokens", "labels", "loss_mask")
    return [{name: row[name][row["segment_ids"] == number] for name in names} for number in range(1, ends + 1)]


def cpu_seconds(module: LlamaModule, batches: Sequence[Batch]) -> tuple[float, float]:
    """CPU time of a step over some batches, and the sum of the losses of their tokens."""
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    total, start = 0.0, time.process_time()
    for batch in batches:
        loss = module.loss(batch) * batch["loss_mask"].sum()
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start, total


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=48)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = packed_chats(Path(folder), args.chats, args.length)
        packed = [rows[number] for number in range(len(rows))]
    documents = [document for row in packed for document in split(row)]
    # Equal numbers of documents in every batch, which are drawn at random, as by a shuffled loader.
    order = np.random.default_rng(2).permutation(len(documents)).tolist()
    groups = [[documents[i] for i in order[start : start + 8]] for start in range(0, len(order), 8)]
    ways: dict[str, Callable[[], list[Batch]]] = {
        "packed": lambda: [{name: row[name][None] for name in row} for row in packed],
        "padded to the row": lambda: [padded(group, args.length) for group in groups],
        "padded to the longest of 8": lambda: [padded(group, None) for group in groups],
    }
    module = LlamaModule("llama-tiny", num_layers=2, vocab_size=512, max_position_embeddings=args.length).train()
    module.configure_model()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for number in range(args.rounds + 1):
        for name, make in ways.items():
            took, losses[name] = cpu_seconds(module, make())
            seconds[name] += [took] if number else []
    tokens = rows.report.tokens
    print(f"{rows.report}\n")
    print("| rows | positions | filled | CPU s | tokens a CPU second | of padding to the row | sum of losses |")
    print("|---|---|---|---|---|---|---|")
    least = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, make in ways.items():
        positions = sum(batch["tokens"].numel() for batch in make())
        rate, ratio = tokens / least[name], least["padded to the row"] / least[name]
        print(
            f"| {name} | {positions:,} | {tokens / positions:.1%} | {least[name]:.2f} | {rate:,.0f} | {ratio:.2f} |"
            f" {losses[name]:.2f} |"
        )


if __name__ == "__main__":
    main()

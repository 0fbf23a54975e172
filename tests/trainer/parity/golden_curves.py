"""Ten steps of each family on one device, kept as numbers; run as a script, this file writes them anew.

What changes them changes what everybody trains: initialization, the order of samples, the model, the clipping, the
optimizer or the schedule of its rate. Such a change shows as a diff of ``golden_curves.csv``, and is made on purpose.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy, MixtralModule
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

FILE = Path(__file__).with_suffix(".csv")
STEPS, BATCH, LENGTH, VOCABULARY = 10, 4, 16, 64
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY, "init_std": 0.1}
FAMILIES: dict[str, tuple[type[GPTModule], dict[str, Any]]] = {
    "gpt": (GPTModule, {"config": "gpt-tiny"}),
    "llama": (LlamaModule, {"config": "llama-tiny", "num_query_groups": 2, "ffn_hidden_size": 48}),
    "mixtral": (MixtralModule, {"config": "mixtral-tiny", "num_query_groups": 2, "ffn_hidden_size": 48}),
}
RUN = {
    "lr": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 2,
    "decay_steps": STEPS,
    "lr_schedule": "cosine",
    "weight_decay": 0.1,
}


def curve(family: str) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    seed_everything(11, verbose=False)
    kind, options = FAMILIES[family]
    module = kind(**RUN, **SIZES, **options)
    tokens = (7 * torch.arange(STEPS * BATCH)[:, None] + torch.arange(LENGTH + 1)) % VOCABULARY  # easy to learn
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1, gradient_clip_val=1.0, logger=recorder)
    trainer.fit(module, DataLoader(rows, batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    return {
        f"{family} {name}": recorder.series(logged) for name, logged in (("loss", "train_loss"), ("norm", "grad_norm"))
    }


def kept() -> dict[str, list[float]]:
    """The curves of the file."""
    with FILE.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}


def main() -> None:
    columns: dict[str, list[float]] = {}
    for family in FAMILIES:
        columns |= curve(family)
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *columns])
        for step, values in enumerate(zip(*columns.values(), strict=True), start=1):
            writer.writerow([step, *(f"{value:.7g}" for value in values)])


if __name__ == "__main__":
    main()

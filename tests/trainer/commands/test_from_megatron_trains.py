"""A recipe from a command line of Megatron trains, at the rates that the line says."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.tools.cli.main import main

LINE = """
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu \\
    --ffn-hidden-size 64 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --vocab-size 96 \\
    --make-vocab-size-divisible-by 4 --attention-dropout 0 --hidden-dropout 0 --seq-length 16 \\
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 \\
    --lr-decay-style cosine --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --log-interval 1 --split 8,1,1 \\
    --num-workers 0 --save {out}/checkpoints --save-interval 2 --data-path {out}/corpus --use-distributed-optimizer
"""


@pytest.mark.slow
def test_what_is_printed_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(1)
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype(np.int32)) as writer:
        for _ in range(20):
            writer.add_document(draw.integers(0, 96, 100, dtype=np.int32), [100])
    assert main(["from-megatron-args", LINE.format(out=tmp_path)]) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(capsys.readouterr().out)
    logs = [
        "--trainer.logger",
        "CSVLogger",
        "--trainer.logger.save_dir",
        str(tmp_path),
        "--trainer.logger.version",
        "1",
    ]
    assert main(["fit", "--config", str(recipe), "--trainer.enable_progress_bar", "false", *logs]) == 0
    rows = list(csv.DictReader((tmp_path / "lightning_logs" / "version_1" / "metrics.csv").open()))
    losses = [float(row["train_loss"]) for row in rows if row.get("train_loss")]
    rates = [float(row["lr"]) for row in rows if row.get("lr")]
    assert len(losses) == 4
    assert rates == pytest.approx([0.0, 1e-2, 7.75e-3, 3.25e-3])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if "last" not in path.name)

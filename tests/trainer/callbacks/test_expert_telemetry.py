"""Tokens per expert and losses of balance, against what one process counts by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ExpertTelemetry, MegatronStrategy, MixtralModule
from lightning_megatron.lightning.callbacks.expert_telemetry import gathered_load, imbalance, text_table
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

STEPS, BATCH, LENGTH, TOPK, WINDOW = 4, 4, 8, 2, 2
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
SIZES |= {"head_dim": 8, "ffn_hidden_size": 16, "vocab_size": 40, "num_experts": 4, "moe_layers": (1, 2, 3)}
SIZES |= {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25, "vocab_multiple": 4}


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(40, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


class Windows(ExpertTelemetry):
    """Keeps every window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_steps=WINDOW, **options)
        self.all: list[dict[int, list[int]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        if trainer.global_step % WINDOW == 0:
            self.all.append(self.counts)


def watched(folder: Path | None, dp: int, options: dict[str, Any]) -> tuple[Any, dict[str, list[float]]]:
    L.seed_everything(2, verbose=False)
    windows, recorder = Windows(table=False, directory=folder), Recorder()
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    boards = [] if folder is None else [TensorBoardLogger(folder, name="board")]
    trainer = quiet_trainer(
        strategy, max_epochs=1, logger=[recorder, *boards], callbacks=[windows], log_every_n_steps=1
    )
    trainer.fit(MixtralModule("mixtral-tiny", **SIZES), DataLoader(samples(), batch_size=BATCH // dp, shuffle=True))  # type: ignore[arg-type]
    names = ("load_balancing_loss", "z_loss", "expert_imbalance")
    # Lightning shows a value again until there is a new one.
    return windows.all, {name: [recorder.series(name)[0], recorder.series(name)[-1]] for name in names}


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ep2": (2, 2, {"ep": 2}),
    "pp2": (2, 1, {"pp": 2}),
    "tp2, all recomputed": (2, 1, {"tp": 2, "recompute": "full"}),
    "tp2 pp2 ep2": (4, 1, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
}


@pytest.fixture(scope="module")
def expected(_pool):
    ((windows, losses),) = _pool.run(1, watched, None, 1, {})
    return windows, losses


def test_rows_sum_to_tokens_times_choices(expected):
    windows, losses = expected
    assert len(windows) == STEPS // WINDOW
    for counts in windows:
        assert list(counts) == [1, 2, 3], "layers that have experts"
        assert all(sum(row) == LENGTH * TOPK * BATCH * WINDOW for row in counts.values())
    worst = [max(imbalance(row) for row in counts.values()) for counts in windows]
    assert losses["expert_imbalance"] == pytest.approx(worst)
    assert min(losses["load_balancing_loss"]) > 0.5 * 0.99, "an even load costs the coefficient"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_counts_the_same_once(layout, expected, ranks):
    world, dp, options = LAYOUTS[layout]
    for windows, losses in ranks(world, watched, None, dp, options):
        assert windows == expected[0]
        for name, values in expected[1].items():
            assert losses[name] == pytest.approx(values, rel=1e-5), name


def test_pictures_are_written_and_shown_in_tensorboard(tmp_path, ranks):
    pytest.importorskip("matplotlib")
    ranks(2, watched, tmp_path, 2, {"ep": 2})
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["experts-step00000002.png", "experts-step00000004.png"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "board").rglob("events.*")
    shown = EventAccumulator(str(events)).Reload()
    assert [image.step for image in shown.Images("tokens_per_expert")] == [2, 4]


def test_without_matplotlib_one_warning_takes_the_place_of_pictures(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.warns(UserWarning, match="heat maps") as warned:
        windows, _ = watched(tmp_path, 1, {})
    assert len(windows) == STEPS // WINDOW
    texts = [str(warning.message) for warning in warned if "heat maps" in str(warning.message)]
    assert len(texts) == 1
    assert "goes on without heat maps: pictures need matplotlib: pip install" in texts[0]
    assert not list(tmp_path.glob("*.png"))


def test_modules_for_further_tokens_are_rows_behind_the_layers() -> None:
    torch.manual_seed(0)
    module = MixtralModule("mixtral-tiny", **SIZES, mtp_num_layers=2)
    module.configure_model()
    tokens = torch.stack([sample["tokens"] for sample in samples()[:2]])
    module.loss({"tokens": tokens, "labels": tokens})
    counts, losses = gathered_load(module, ParallelMesh.single())
    assert list(counts) == [1, 2, 3, 4, 5]
    assert all(sum(row) == tokens.numel() * TOPK for row in counts.values())
    assert losses.keys() == {"load_balancing_loss", "z_loss"}


def test_the_table_has_a_row_a_layer():
    table = text_table({3: [1, 20, 3, 0], 11: [4, 4, 4, 4]})
    assert table.splitlines() == [
        "layer  0   1  2  3  tokens  max/mean",
        "    3  1  20  3  0      24      3.33",
        "   11  4   4  4  4      16      1.00",
    ]

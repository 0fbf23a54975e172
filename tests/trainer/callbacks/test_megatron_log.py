"""The log of real runs: its lines, its scalars, what is skipped, and counts that go on from a checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fp16 import a_device_that_trains_fp16
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_megatron import (
    ConfigError,
    LlamaModule,
    MegatronDataModule,
    MegatronLog,
    MegatronPrecision,
    MegatronStrategy,
)
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "vocab_size": 131}
TINY |= {"num_attention_heads": 4, "num_query_groups": 2, "max_position_embeddings": 16}
LINE = re.compile(
    r" iteration {8}\s*(\d+)/ {6}\s*(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): [\d.]+ \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|)?"
    r" learning rate: (\S+) \| global batch size: +(\d+) \|(?: lm loss: (\S+) \|)? loss scale: (\S+) \|"
    r"(?: grad norm: (\S+) \|)? number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "tokens")
    random = np.random.default_rng(1)
    with IndexedDatasetWriter(path, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_item(random.integers(0, 131, 50).astype(np.uint16))
            writer.end_document()
    return path


def fitted(prefix: str, folder: Path, *callbacks: Callback, ckpt_path: Any = None, **options: Any) -> Trainer:
    seed_everything(7, verbose=False)
    data = MegatronDataModule(
        prefix, 16, split="1", cache_dir=folder, global_batch_size=8, rampup_batch_size=(4, 4, 10), train_samples=36
    )
    trainer = quiet_trainer(
        MegatronStrategy(**{"micro_batch_size": 4, **options.pop("layout", {})}),
        callbacks=list(callbacks),
        limit_val_batches=0,
        gradient_clip_val=1.0,
        **options,
    )
    module = LlamaModule("llama-tiny", lr=1e-2, warmup_samples=20, **TINY)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def test_lines_and_scalars_of_a_run(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    board = TensorBoardLogger(tmp_path, name="board")
    fitted(prefix, tmp_path, MegatronLog(throughput=True), logger=[recorder, board])
    printed = capsys.readouterr().out.splitlines()
    found = [match.groups() for line in printed if (match := LINE.fullmatch(line))]
    # The ramp has one step of 10 samples, so batches of 4, 4 and 4; then 24 samples in batches of 8.
    assert [(int(n), int(total), int(consumed), int(size)) for n, total, consumed, _, _, size, *_ in found] == [
        (n + 1, 6, consumed, size)
        for n, (consumed, size) in enumerate([(4, 4), (8, 4), (12, 4), (20, 8), (28, 8), (36, 8)])
    ]
    assert [row[4] for row in found] == ["2.000E-03", "4.000E-03", "6.000E-03", "1.000E-02", "1.000E-02", "1.000E-02"]
    losses = recorder.series("train_loss")
    assert [row[6] for row in found] == [f"{loss:.6E}" for loss in losses]
    assert [row[8] for row in found] == [f"{norm:.3f}" for norm in recorder.series("grad_norm")]
    assert {(row[7], row[9], row[10]) for row in found} == {("1.0", "0", "0")}
    assert all(float(row[3]) >= 0 for row in found)
    for line in (
        "  micro_batch_size ................................ 4",  # of the strategy
        "  ffn_hidden_size ................................. 48",  # of the model
        "  warmup_samples .................................. 20",  # of the module
        "  optimizer ....................................... AdamW",
        "  optimizer.weight_decay .......................... 0.1",
        "  data_module ..................................... MegatronDataModule",
        "  seq_length ...................................... 16",
        "  global_batch_size ............................... 8",
        "  rampup_batch_size ............................... (4, 4, 10)",
        "  train_samples ................................... 36",
        "  tokenizer_type .................................. None",
        "  gradient_clip_val ............................... 1.0",  # of the Trainer
        " > padded vocab (size: 131) with 125 dummy tokens (new size: 256)",
        "> initialized tensor model parallel with size 1",
        "> setting random seeds to 7 ...",
        "    train:      36",
    ):
        assert line in printed
    (accelerator,) = (line for line in printed if line.startswith("  accelerator ."))
    assert accelerator.endswith("Accelerator")  # the Trainer's
    assert any(line.startswith("will use batch size rampup starting from global batch size 4") for line in printed)
    assert recorder.series("lm loss") == pytest.approx(losses)
    assert recorder.series("consumed-samples") == [4, 8, 12, 20, 28, 36]
    assert recorder.series("consumed-tokens") == [64, 128, 192, 320, 448, 576]
    assert recorder.series("learning-rate")[0] == pytest.approx(2e-3)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board.log_dir)).Reload()
    samples = events.Scalars("lm loss vs samples")
    assert [event.step for event in samples] == [4, 8, 12, 20, 28, 36]
    assert [event.value for event in samples] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("batch-size vs tokens")][-1] == 576


class Refuses(Callback):
    """Lets no step but the first happen."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.asked = 0
        trainer.strategy.precision_plugin.step_gate = self

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.strategy.precision_plugin.step_gate = None

    def admits(self, overflow: bool) -> bool:
        self.asked += 1
        return self.asked == 1


def test_a_line_on_a_terminal_takes_the_place_of_the_bar_of_any_rank(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fitted(prefix, tmp_path, MegatronLog())
    printed = [line for line in capsys.readouterr().out.splitlines() if LINE.search(line)]
    assert printed
    assert all(line.startswith("\033[K") for line in printed)  # behind the carriage return, which ends a line here


def test_skipped_steps_have_no_loss(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(prefix, tmp_path, MegatronLog(every_n_steps=3), Refuses())
    first, second = (m.groups() for line in capsys.readouterr().out.splitlines() if (m := LINE.fullmatch(line)))
    assert first[6] is not None
    assert first[8] is None
    assert (first[9], second[9], second[6], second[8]) == ("2", "3", None, None)
    assert second[2] == "36"


def test_fp16_begins_with_skipped_steps_that_leave_the_learning_rate_where_it_is(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scale that always overflows, on a CPU that passes for a device with fp16; the first overflow is forgiven."""
    with a_device_that_trains_fp16():
        plugin = MegatronPrecision("16-mixed", DynamicLossScale(scale=2.0**60))
        fitted(prefix, tmp_path, MegatronLog(), plugins=[plugin])
    printed = capsys.readouterr().out.splitlines()
    assert "using torch.float16 for parameters ..." in printed
    found = [match.groups() for line in printed if (match := LINE.fullmatch(line))]
    assert [row[2] for row in found] == ["4", "8", "12", "20", "28", "36"], "skipped steps consume samples"
    assert {(row[4], row[6], row[8], row[9]) for row in found} == {("0.000E+00", None, None, "1")}
    assert [float(row[7]) for row in found] == [2.0 ** (60 - n) for n in range(6)]


def logged(prefix: str, folder: str) -> list[tuple[float, float]]:
    recorder = Recorder()
    fitted(prefix, Path(folder), MegatronLog(), logger=recorder, layout={"tp": 2})
    return list(zip(recorder.series("lm loss"), recorder.series("consumed-samples"), strict=True))


def test_counts_go_on_from_a_checkpoint(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
                trainer.should_stop = True

    for kept in (MegatronLog(), None):  # a checkpoint of a run without the callback says where its data stand
        fitted(prefix, tmp_path, *([kept] if kept else []), Stops())
        recorder = Recorder()
        fitted(prefix, tmp_path, MegatronLog(), ckpt_path=tmp_path / "mid.ckpt", logger=recorder)
        assert recorder.series("consumed-samples") == [28, 36]
        unknown = 0 if kept else 20  # samples whose tokens nobody has counted
        assert recorder.series("consumed-tokens") == [16 * (28 - unknown), 16 * (36 - unknown)]


class StopsAt(Callback):
    """Saves at a step and ends the run there."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def restarted_twice(prefix: str, folder: str, begun: int = 0, **options: Any) -> list[tuple[float, float]]:
    """Samples and tokens after each step of three runs, each from the checkpoint of the one before."""
    recorder, before, log = Recorder(), None, MegatronLog()
    log.load_state_dict({"samples": begun, "tokens": 16 * begun})
    for step in (2, 4, 9):
        path = Path(folder) / f"{step}.ckpt"
        kept = [StopsAt(step, path)]
        if begun and before is None:
            kept.append(Begins(log))
        fitted(prefix, Path(folder), log, *kept, ckpt_path=before, logger=recorder, **options)
        before, log = path, MegatronLog()
    return list(zip(recorder.series("consumed-samples"), recorder.series("consumed-tokens"), strict=True))


class Begins(Callback):
    """Sets the counts of the log behind its first hooks, as those of a long run."""

    def __init__(self, log: MegatronLog) -> None:
        self.counts, self.state = log, log.state_dict()

    def on_train_start(self, *args: Any) -> None:
        self.counts.load_state_dict(self.state)


RAMP = [4, 8, 12, 20, 28, 36]


def test_counts_go_on_over_two_restarts_in_the_ramp_and_behind_it(prefix: str, tmp_path: Path) -> None:
    assert restarted_twice(prefix, str(tmp_path)) == [(samples, 16 * samples) for samples in RAMP]


def test_counts_beyond_what_16_and_32_bits_hold_are_exact(prefix: str, tmp_path: Path) -> None:
    """In a run in bf16-mixed: a float32 has no odd number beyond 2**24."""
    begun = 2**31 + 1
    found = restarted_twice(prefix, str(tmp_path), begun, precision="bf16-mixed")
    assert found == [(begun + samples, 16 * (begun + samples)) for samples in RAMP]


@pytest.mark.slow
def test_replicas_count_what_one_process_counts_over_two_restarts(ranks: Any, prefix: str, tmp_path: Path) -> None:
    for found in ranks(2, restarted_on_two, prefix, str(tmp_path)):
        assert found in ([], [(samples, 16 * samples) for samples in RAMP])


def restarted_on_two(prefix: str, folder: str) -> list[tuple[float, float]]:
    return restarted_twice(prefix, folder, layout={"micro_batch_size": 2})


def test_ranks_that_share_a_model_have_the_losses_of_one(ranks, prefix, tmp_path):
    one = fitted_losses(prefix, tmp_path)
    for found in ranks(2, logged, prefix, str(tmp_path)):
        assert [consumed for _, consumed in found] == [4, 8, 12, 20, 28, 36]
        assert [loss for loss, _ in found] == pytest.approx(one, rel=1e-5)


def fitted_losses(prefix: str, folder: Path) -> list[float]:
    recorder = Recorder()
    fitted(prefix, folder, MegatronLog(), logger=recorder)
    return recorder.series("lm loss")


def test_another_strategy_is_refused() -> None:
    trainer = quiet_trainer("auto", callbacks=[MegatronLog()], max_steps=1)
    with pytest.raises(ConfigError, match="MegatronLog"):
        trainer.fit(LlamaModule("llama-tiny", **TINY), [{"tokens": 0}])

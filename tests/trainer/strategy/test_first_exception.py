"""The error of one rank is what every rank prints, at once, also where a stock callback saves on exceptions.

Real processes, started by the launcher: this file is also the script that they run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.checkpoint import verify
from lightning_megatron.machine.job_environment import own_environment

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "dp": (2, {}),
    "tp and pp": (4, {"tp": 2, "pp": 2}),
}
PLACES = "step", "batch hook", "data", "validation", "callback", "optimizer"
STEPS = 9
LIMIT = 10.0
"""Seconds from the error to the end of the job; the timeout of collectives is 30 minutes."""


class WordlessError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


ERRORS = {"value": ValueError("on purpose"), "exit": SystemExit("on purpose"), "wordless": WordlessError()}


def job(folder: Path, layout: str, place: str, saver: str, who: str, error: str = "value") -> None:
    """Train until one rank, or all, raise an error at a place, after `STEPS` batches; each rank has its own output."""
    rank, (size, axes) = int(os.environ.get("LOCAL_RANK", 0)), LAYOUTS[layout]
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)

    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
    from torch.utils.data import DataLoader, Dataset

    from lightning_megatron import LlamaModule, MegatronStrategy

    def reach(here: str, step: int) -> None:
        if here == place and step == STEPS and who in ("all", "last" if rank == size - 1 else str(rank)):
            (folder / "raised").write_text(str(time.time()))
            raise ERRORS[error]

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, number: int) -> Any:
            reach("data", number // 2)
            reach("worker", number // 2)
            row = torch.arange(number, number + 17) % 64
            return {"tokens": row[:-1], "labels": row[1:]}

    class Fails(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            reach("optimizer", trainer.global_step)
            return super().step(*args, **kwargs)

    class Model(LlamaModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            reach("step", batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            reach("batch hook", batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            reach("validation", self.global_step)
            return super().validation_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return Fails(self.parameters())

    class Hook(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            reach("callback", batch_idx)

    torch.set_num_threads(1)
    stock = OnExceptionCheckpoint(folder / "saved") if saver == "on exception" else None
    stock = stock or ModelCheckpoint(folder / "saved", save_on_exception=True, save_last=True, every_n_train_steps=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=MegatronStrategy(**axes, elementwise_optimizers=["Fails"]),
        callbacks=[Hook(), stock],
        max_steps=STEPS + 3,
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
    trainer.fit(
        Model("llama-tiny", **sizes, num_query_groups=2),
        DataLoader(Rows(), 2, num_workers=int(place == "worker")),
        DataLoader(Rows(), 2),
    )


def run(folder: Path, *how: str) -> float:
    """Seconds from the error to the end of a job that fails."""
    command = [sys.executable, __file__, str(folder), *how]
    process = subprocess.Popen(command, cwd=folder, env=own_environment(OMP_NUM_THREADS="1"))
    try:
        while not (folder / "raised").exists() or not (folder / "raised").read_text():
            assert process.poll() is None, outputs(folder)
            time.sleep(0.1)
        process.wait(120)
    finally:
        process.kill()
    assert process.returncode != 0
    return time.time() - float((folder / "raised").read_text())


def outputs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("output-*")}


rest = pytest.mark.exhaustive
QUICK = "tp", "step"
"""Case of the gate, which waits for the end of the job and not for a time."""


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        pytest.param(layout, place, marks=[] if (layout, place) == QUICK else rest)
        for layout in LAYOUTS
        for place in PLACES
    ],
)
@pytest.mark.parametrize("is_busy", [False, pytest.param(True, marks=rest)])
def test_an_error_of_one_rank_is_printed_by_all_and_ends_the_job(
    tmp_path: Path, layout: str, place: str, is_busy: bool
) -> None:
    saver = "on exception" if PLACES.index(place) % 2 == 0 else "save_on_exception"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * is_busy)]
    try:
        seconds = run(tmp_path, layout, place, saver, "last")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    found = outputs(tmp_path)
    assert len(found) == LAYOUTS[layout][0]
    for text in found.values():
        assert "ValueError: on purpose" in text, text
        assert "different actions" not in text
        assert "c10d" not in text
        assert "Traceback" in text or text.count("on purpose") == 1, "one line of a rank that has lost its peer"
    printed = {name: text.count("Traceback") for name, text in found.items()}
    assert printed == {name: int(name == f"output-{len(found) - 1}") for name in found}, "one traceback: of the first"
    assert not any("most recent call first" in text for text in found.values()), "stacks of others are in the record"
    assert seconds < LIMIT or ((layout, place) == QUICK and not is_busy), found
    assert not (tmp_path / "saved" / "on_exception.ckpt").exists()


@pytest.mark.parametrize(
    ("layout", "place", "error", "told"),
    [
        ("tp", "step", "exit", "SystemExit: on purpose"),
        pytest.param("dp", "step", "wordless", "WordlessError: its text cannot be made", marks=rest),
        pytest.param("tp", "worker", "value", "ValueError: on purpose", marks=rest),
    ],
)
def test_an_error_of_another_kind_is_printed_by_all_too(
    tmp_path: Path, layout: str, place: str, error: str, told: str
) -> None:
    seconds = run(tmp_path, layout, place, "on exception", "last", error)
    found = outputs(tmp_path)
    assert len(found) == 2
    assert all(told in text for text in found.values()), found
    assert seconds < LIMIT or error == "exit", found


@pytest.mark.slow
def test_an_error_of_all_ranks_leaves_a_checkpoint(tmp_path: Path) -> None:
    assert run(tmp_path, "tp", "callback", "on exception", "all") < LIMIT
    assert verify(tmp_path / "saved" / "on_exception.ckpt") == []
    assert [text.count("Traceback") for _, text in sorted(outputs(tmp_path).items())] == [1, 0]


if __name__ == "__main__":
    job(Path(sys.argv[1]), *sys.argv[2:])

"""What somebody in front of a terminal sees of a run: lines above the progress bar, and the bar itself.

Real terminals, of 80 and 120 columns; this file is also the script that runs in them.
"""

from __future__ import annotations

import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

LAYERS, EXPERTS = 4, 4


def job(bar: str, folder: Path) -> None:
    """Train six steps with two tables, resume for three, then train until Ctrl-C."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
    from torch.utils.data import DataLoader, Dataset

    from lightning_megatron import ExpertTelemetry, MegatronStrategy, MixtralModule, Throughput

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, number: int) -> Any:
            row = torch.arange(number, number + 17) % 64
            return {"tokens": row[:-1], "labels": row[1:]}

    warnings.filterwarnings("ignore", "The `srun` command is available")  # on a machine of a Slurm cluster
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 64}
    model = MixtralModule("mixtral-tiny", num_layers=LAYERS, num_experts=EXPERTS, num_query_groups=2, **sizes)
    torch.set_num_threads(1)
    for steps in (6, 9, -1):
        saver = ModelCheckpoint(folder / "run", save_last=True, every_n_train_steps=3)
        telemetry = [ExpertTelemetry(3)] if steps == 6 else []
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=MegatronStrategy(),
            callbacks=[saver, Throughput(3), *telemetry, RichProgressBar() if bar == "rich" else TQDMProgressBar()],
            max_steps=steps,
            logger=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        if steps < 0:
            print("press now", flush=True)
        trainer.fit(model, DataLoader(Rows(), 2), ckpt_path="last" if steps > 6 else None)


@pytest.mark.parametrize("bar", ["rich", pytest.param("tqdm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_lines_stay_above_the_bar_which_fits_and_counts_to_the_end(tmp_path: Path, bar: str, columns: int) -> None:
    from terminal import run, screen

    from lightning_megatron.machine.job_environment import own_environment

    pressed = []

    def press(said: str) -> str:
        _, _, since = said.partition("press now")
        if pressed or not re.search(r"([2-9]|\d\d)/500000000", since):  # a step has ended, and all hooks of it
            return ""
        pressed.append("Ctrl-C")
        return "\x03"

    command = [sys.executable, __file__, bar, str(tmp_path)]
    status, said = run(command, columns, own_environment(OMP_NUM_THREADS="1"), press)
    rows = screen(said, columns)
    text = "\n".join(rows)
    assert status == 128 + signal.SIGINT, text
    assert re.search(r"SIGINT: saving step \d+ to", text.replace("\n", "")), text
    assert "then leaving" in text.replace("\n", ""), text
    tables = [place for place, row in enumerate(rows) if row.startswith("tokens that chose each expert")]
    assert len(tables) == 2, text
    for place in tables:
        found = [row.split()[0] for row in rows[place + 1 : place + 2 + LAYERS]]
        assert found == ["layer", *map(str, range(LAYERS))], text
    bars = [place for place, row in enumerate(rows) if re.search(r"(Epoch 0|Training).*\b\d+/\d+ ", row)]
    assert any(re.search(r"\b6/6 ", rows[place]) for place in bars), text
    assert any(re.search(r"\b9/9 ", rows[place]) for place in bars), text
    assert text.count("Restored all states") == 1, "what is said without a bar is not lost"
    (end,) = (place for place, row in enumerate(rows) if row.endswith("`max_steps=9` reached."))
    heights = [number for number, row in enumerate(rows[end:]) if row.startswith("GPU available")]
    assert heights[0] <= 3, text  # one or two rows


if __name__ == "__main__":
    job(sys.argv[1], Path(sys.argv[2]))

"""The console of a job on two processes: every line of it, as files that can be reviewed in ``tests/fixtures/console``.

This file is also the script that the processes run. After a wanted change, delete a file and run its test twice.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest

from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.machine.job_environment import own_environment

GOLDEN = Path(__file__).parents[2] / "fixtures" / "console"
WRITTEN_WITH = "2.6.6"


def job(functions: list[str]) -> None:
    """The example of the README, with a small model, no progress bar and a plain summary of the model."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
    from lightning.pytorch.loggers import CSVLogger

    from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy

    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    for function in functions:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(tp=2, micro_batch_size=1),
            precision="bf16-mixed",
            max_steps=8 if function == "resume" else 4,
            val_check_interval=2,
            limit_val_batches=2,
            limit_test_batches=2,
            limit_predict_batches=2,
            enable_progress_bar=False,
            logger=CSVLogger("logs"),
            callbacks=[ModelSummary(), ModelCheckpoint("run", monitor="val_loss", save_last=True)],
        )
        module = LlamaModule("llama3.1-8b", num_query_groups=2, **sizes)
        data = MegatronDataModule("corpus", seq_length=64, batch_size=2, split="80,10,10", num_workers=1)
        run = trainer.fit if function in ("fit", "resume") else getattr(trainer, function)
        run(module, datamodule=data, ckpt_path=None if function == "fit" else "run/last.ckpt")


def corpus(folder: Path) -> None:
    """Token files in a folder, and a vocabulary to write them with."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    (folder / "vocab.txt").write_text("\n".join((*special, *(f"token{number}" for number in range(251)))))
    words = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus") as writer:
        for _ in range(60):
            writer.add_document(words.integers(0, 256, 200), [200])


GENERATE = (
    "-m lightning_megatron.tools.cli.main generate --checkpoint run/last.ckpt --tokenizer-type BertWordPieceLowerCase"
    " --vocab-file vocab.txt --max-new-tokens 4 --temperature 0 --device cpu --tp 2 --prompt"
)


def console(folder: Path, functions: list[str], **environment: str) -> str:
    """Everything that a job on two processes says."""
    words = [*GENERATE.split(), "token9 token8 token7"] if functions == ["generate"] else [__file__, *functions]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=own_environment(PYTHONUNBUFFERED="1", COLUMNS="120", **environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def without_numbers(text: str, folder: Path) -> str:
    """The lines without measured values, without paths of this machine, and without Lightning's advertisements."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"\S*/site-packages/(\S+?):\d+: ", r"\1: ", text)
    text = re.sub(r" *\d+\.\d{4,} *", " N ", text)
    text = re.sub(r"(predicted memory of a rank) .*", r"\1 ...", text)
    text = re.sub(r"^(token9 token8 token7)( (token\d+|\[\w+\]))+$", r"\1 ...", text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines() if "Tip:" not in line) + "\n"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(
    lightning.__version__ != WRITTEN_WITH, reason=f"the files have the lines of Lightning {WRITTEN_WITH}"
)
@pytest.mark.parametrize("name", ["fit", "resume-validate-test-predict", "generate"])
def test_each_line_of_a_job_on_two_processes_is_said_once(name: str, tmp_path: Path) -> None:
    corpus(tmp_path)
    if name != "fit":
        console(tmp_path, ["fit"])
    said = without_numbers(console(tmp_path, name.split("-")), tmp_path)
    golden = GOLDEN / f"{name}.txt"
    if not golden.exists():
        golden.write_text(said)
        pytest.fail(f"{golden} is written: read it, then run this test again")
    assert said == golden.read_text()
    assert not re.search(r"\[rank: [1-9]", said)


@pytest.mark.slow
def test_a_job_with_a_long_path_of_temporary_files_gets_the_batches_of_its_workers(tmp_path: Path) -> None:
    """torch's workers pass tensors through a socket below it; without a shorter path the rank waits for ever."""
    corpus(tmp_path)
    temporary = tmp_path / ("t" * 120)
    temporary.mkdir()
    said = console(tmp_path, ["fit"], TMPDIR=str(temporary))
    assert "`max_steps=4` reached" in said
    assert "AF_UNIX" not in said


if __name__ == "__main__":
    job(sys.argv[1:])

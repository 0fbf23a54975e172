"""The T5 recipes: the one for 8 devices passes every check and can be built, its twin trains on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronStrategy, T5Module
from lightning_megatron.data import build_tokenizer
from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.lightning.validation.job import Job, job_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import spec_registry
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.recipes.names import recipe_files
from tests.t5 import TINY, hf_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words with a tokenizer, and with files of sentences that it has made."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder, random = tmp_path_factory.mktemp("t5"), np.random.default_rng(1)
    names = [a + b for a in "bdfgklmnprst" for b in "aeiou"]

    def sentence() -> str:
        return " ".join("".join(random.choice(names, random.integers(1, 4))) for _ in range(9)) + "."

    documents = [{"text": " ".join(sentence() for _ in range(6))} for _ in range(60)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "text").write_text("\n".join(each["text"] for each in documents))
    how = {"vocab_size": 150, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "text"), model_prefix=str(folder / "sp"), **how)
    tokenizer = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(folder / "sp.model")]
    files = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "corpus")]
    assert main(["preprocess", *files, "--split-sentences", *tokenizer]) == 0
    return [f"--data.data_path={folder / 'corpus_text_sentence'}", f"--data.tokenizer_model={folder / 'sp.model'}"]


def test_the_recipe_passes_every_check_and_the_model_of_each_rank_can_be_built(tmp_path: Path, data: list[str]) -> None:
    words = ["--config", str(*recipe_files("t5-11b")), "--trainer.accelerator=cpu", *data]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[*words, f"--trainer.default_root_dir={tmp_path}"],
    )
    strategy, config = cli.trainer.strategy, cli.model.config
    assert isinstance(strategy, MegatronStrategy)
    layout = strategy.layout
    assert (layout.pp, layout.tp, layout.data_parallel_size) == (2, 4, 1)
    settings = JobSettings(layout, LayerSplit(), strategy.recompute, micro_batch_size=8)
    assert job_problems(Job(settings, layout, strategy.ops, torch.bfloat16, [cli.model, cli.datamodule])) == []
    assert cli.datamodule.batch_shape.batch_size == 2048

    whole: dict[str, tuple[int, ...]] = {}
    for part in LayerSplit().stages(config.num_layers, layout.pp, layout.vpp):
        stack = ("encoder", "decoder")[part.stage]
        assert part.layers == config.stacks[stack], "a stack a stage"
        with torch.device("meta"):
            model = T5Model(config, ParallelMesh(layout, 4 * part.rank), [part], StageBoundary(2))
        assert (model.encoder_bias is None, model.decoder_bias is None) == (stack != "encoder", stack != "decoder")
        whole |= {name: spec.global_shape for name, spec in spec_registry(model).items()}
    assert sum(torch.Size(shape).numel() for shape in whole.values()) == 11_307_321_344


def test_generate_answers_with_a_checkpoint(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    hf_model(TINY["1.0"] | {"vocab_size": 256}).save_pretrained(tmp_path / "hf")
    assert main(["convert", "hf-to-ckpt", str(tmp_path / "hf"), str(tmp_path / "a.ckpt")]) == 0
    capsys.readouterr()
    model = data[1].partition("=")[2]
    tokenizer = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model]
    words = ["generate", "--checkpoint", str(tmp_path / "a.ckpt"), "--prompt", "bada kebi", *tokenizer]
    words += ["--max-new-tokens", "9", "--temperature", "0", "--device", "cpu"]
    assert main(words) == 0
    said, ours = capsys.readouterr().out, build_tokenizer("GPTSentencePieceTokenizer", model)
    module = T5Module.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    written = module.generate(torch.tensor([ours.encode("bada kebi")]), 9, temperature=0.0, stop=ours.eod)
    assert said == ours.decode(token for token in written[0].tolist() if token < ours.vocab_size) + "\n"
    assert main([*words, "--tp", "2"]) == 2
    assert "only decoders can be split over devices" in capsys.readouterr().err


def test_generate_with_a_model_that_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path / "hf")
    assert main(["convert", "hf-to-ckpt", str(tmp_path / "hf"), str(tmp_path / "a.ckpt")]) == 0
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]))
    words = ["generate", "--checkpoint", str(tmp_path / "a.ckpt"), "--prompt", "a", "--vocab-file"]
    assert main([*words, str(tmp_path / "vocab.txt"), "--tokenizer-type", "BertWordPieceLowerCase"]) == 2
    assert "BertModule" in (said := capsys.readouterr().err)
    assert "cannot generate text" in said


@pytest.mark.exhaustive
def test_the_twin_trains_from_the_command_line(tmp_path: Path, data: list[str]) -> None:
    words = ["fit", "--recipe=t5-tiny", *data, "--data.split=80,20,0"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    words += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'logs'}"]
    command = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *words]
    env = own_environment()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    columns = set(log.read_text().splitlines()[0].split(","))
    assert {"train_loss", "val_loss", "grad_norm", "tflops_per_device", "tokens_per_second"} <= columns

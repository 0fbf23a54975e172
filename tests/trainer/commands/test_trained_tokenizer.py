"""A model reads and writes text with the tokenizer that it was trained with; another one is refused before it is built.

Two tokenizers of one size, learnt from other texts: nothing but their files tells them apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.data.preprocessing.encode import TokenizerSpec
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf, hf_to_checkpoint
from lightning_megatron.lightning.pretrained.trained_tokenizer import TrainedTokenizer
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli import main as command_line

pytest.importorskip("transformers")

from tests import evaluated
from tests.evaluated import VOCABULARY, make_tokenizer
from tests.families import TINY, hf_model
from tests.reads import reads_of

LENGTH = 16
OTHER = "tokenizer.files: |another tokenizer"
"""One of these words stands in every refusal."""


class Home(evaluated.Home):
    """Two tokenizers, token files, and a model in a Hugging Face directory and in checkpoints."""

    @property
    def own(self) -> Path:
        """Hugging Face directory of the model, with its tokenizer."""
        return self.hf("own")

    @property
    def other(self) -> Path:
        """Directory of another tokenizer of the same size."""
        return self.hf("other")

    def data(self, tokenizer: Path | None, **more: Any) -> MegatronDataModule:
        kind = None if tokenizer is None else "HuggingFaceTokenizer"
        return MegatronDataModule(
            str(self.folder / "tokens"), LENGTH, tokenizer_type=kind, tokenizer_model=tokenizer, split="2,1,1", **more
        )

    def fit(self, name: str, data: MegatronDataModule) -> Path:
        """A checkpoint of one step."""
        trainer = quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=self.folder)
        trainer.fit(module(), datamodule=data)
        trainer.save_checkpoint(self.folder / name)
        return self.folder / name


def module() -> LlamaModule:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}
    return LlamaModule("llama-tiny", ffn_hidden_size=32, vocab_size=VOCABULARY, lr=1e-3, warmup_steps=0, **shape)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    hf_model(TINY["llama"] | {"vocab_size": VOCABULARY}).save_pretrained(home.own)
    make_tokenizer(["abc abd " * 9 + "cab"] * 4).save_pretrained(home.own)
    make_tokenizer(["xyz zyx " * 9 + "yzz"] * 4).save_pretrained(home.other)
    with IndexedDatasetWriter(str(home.folder / "tokens"), np.dtype(np.uint16)) as writer:
        for start in range(40):
            writer.add_item(np.arange(start, start + 40).astype(np.uint16))
            writer.end_document()
    return home


@pytest.fixture(scope="module")
def trained(home: Home) -> Path:
    """A checkpoint whose data module knew its tokenizer."""
    return home.fit("trained.ckpt", home.data(home.own))


@pytest.fixture(scope="module")
def imported(home: Home) -> Path:
    """A checkpoint that begins with the Hugging Face directory."""
    hf_to_checkpoint(home.own, home.folder / "imported.ckpt")
    return home.folder / "imported.ckpt"


@pytest.fixture(scope="module")
def unsaid(home: Home) -> Path:
    """A checkpoint that knows nothing but the size of its vocabulary."""
    return home.fit("unsaid.ckpt", home.data(None))


def generate(checkpoint: Path, *words: str) -> int:
    common = ["--prompt", "abc", "--max-new-tokens", "4", "--temperature", "0", "--device", "cpu"]
    return command_line.main(["generate", "--checkpoint", str(checkpoint), *common, *words])


def named(tokenizer: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]


@pytest.mark.parametrize("kind", ["trained", "imported"])
def test_generate_takes_no_other(
    kind: str, home: Home, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = request.getfixturevalue(kind)
    assert generate(checkpoint, *named(home.other)) == 2
    said = capsys.readouterr().err
    assert f"--tokenizer-model='{home.other}': another tokenizer; or add --allow-other-tokenizer" in said
    assert f"nearest valid: {home.own}" in said
    assert generate(checkpoint, *named(home.other), "--allow-other-tokenizer") == 0
    capsys.readouterr()
    assert generate(checkpoint, *named(home.own)) == 0
    text = capsys.readouterr().out
    assert generate(checkpoint, *named(home.own / "tokenizer.json")) == 0, "one file of the directory"
    assert generate(checkpoint) == 0, "its own"
    assert capsys.readouterr().out == 2 * text


def test_generate_compares_sizes_where_nothing_else_is_known(
    home: Home, unsaid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(unsaid, *named(home.other)) == 0, "a tokenizer of this size"
    for size in (VOCABULARY, VOCABULARY + 200):  # NullTokenizer has one more
        assert generate(unsaid, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)) == 2
        said = f"vocab_size={size + 1}: the model was trained with {VOCABULARY}"
        assert said in capsys.readouterr().err
    assert generate(unsaid) == 2
    assert "--tokenizer-type=None: name the type" in capsys.readouterr().err
    assert generate(unsaid, "--tokenizer-model", str(home.own)) == 2


@pytest.mark.parametrize(
    ("tokens", "size", "refused"), [(1000, 2048, 0), (30001, 32048, 0), (2000, 4096, 1), (9, 8, 1)]
)
def test_a_vocabulary_may_be_padded_for_16_ranks(tokens: int, size: int, refused: bool) -> None:
    spec = TokenizerSpec("NullTokenizer", vocab_size=tokens - 1)
    assert bool(TrainedTokenizer(vocab_size=size).problems("tokenizer", spec, "")) == refused


def test_a_tokenizer_that_has_moved_must_be_named(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    file = (home.own / "tokenizer.json").rename(gone / "tokenizer.json")
    try:
        checkpoint = home.fit("moved.ckpt", home.data(gone))
    finally:
        file.rename(home.own / "tokenizer.json")
        gone.rmdir()
    assert generate(checkpoint) == 2
    assert "--tokenizer-type=None: name the type" in capsys.readouterr().err
    assert generate(checkpoint, *named(home.own)) == 0, "the same file elsewhere"
    assert generate(checkpoint, *named(home.other)) == 2


@pytest.mark.parametrize("kind", ["own", "trained", "imported"])
def test_evaluate_takes_no_other(
    kind: str, home: Home, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    source = home.own if kind == "own" else request.getfixturevalue(kind)
    text = home.folder / "text.txt"
    text.write_text("abc abd cab\n")
    words = ["evaluate", "--checkpoint", str(source), "--input", str(text), "--format", "wikitext", "--device", "cpu"]
    with patch.dict("os.environ"):
        assert command_line.main([*words, *named(home.other)]) == 2
        assert "another tokenizer; or add --allow-other-tokenizer" in capsys.readouterr().err
        assert command_line.main(words) == 0
        alone = capsys.readouterr().out
        assert command_line.main([*words, *named(home.own)]) == 0
        assert capsys.readouterr().out == alone


def test_an_export_takes_no_other(home: Home, trained: Path, imported: Path, tmp_path: Path) -> None:
    for number, source in enumerate((trained, imported)):
        with pytest.raises(ConfigError, match="another tokenizer; or add --allow-other-tokenizer"):
            checkpoint_to_hf(source, tmp_path / "out", tokenizer=home.other)
        assert not (tmp_path / "out").exists()
        words = [str(source), str(tmp_path / f"other{number}"), "--tokenizer", str(home.other)]
        assert command_line.main(["convert", "ckpt-to-hf", *words, "--allow-other-tokenizer"]) == 0
        assert (tmp_path / f"other{number}" / "tokenizer.json").read_bytes() == (
            home.other / "tokenizer.json"
        ).read_bytes()
        checkpoint_to_hf(source, tmp_path / f"out{number}", tokenizer=home.own)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_trainer_takes_no_other(stage: str, home: Home, trained: Path) -> None:
    trainer = quiet_trainer(MegatronStrategy(), max_steps=2, default_root_dir=home.folder)
    run = getattr(trainer, stage)
    with pytest.raises(ConfigError, match="another tokenizer; or give allow_other_data=True"):
        run(module(), datamodule=home.data(home.other), ckpt_path=trained)
    run(module(), datamodule=home.data(home.other, allow_other_data=True), ckpt_path=trained)
    run(module(), datamodule=home.data(None), ckpt_path=trained)
    run(module(), datamodule=home.data(home.own), ckpt_path=trained)


def fit_by_words(home: Home, checkpoint: Path) -> None:
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "default_root_dir": home.folder,
        "strategy": "megatron",
    }
    options |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), "false")
    data = {"data_path": home.folder / "tokens", "seq_length": LENGTH, "split": "2,1,1"}
    data |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": home.own}
    words = [f"--trainer.{name}={value}" for name, value in options.items()]
    words += ["--data=MegatronDataModule", *(f"--data.{name}={value}" for name, value in data.items())]
    with patch.dict(os.environ):
        assert command_line.main(["fit", *words, "--model=LlamaModule", f"--ckpt_path={checkpoint}"]) == 0


def fit_by_script(home: Home, checkpoint: Path) -> None:
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=home.folder)
    trainer.fit(module(), datamodule=home.data(home.own), ckpt_path=checkpoint)


@pytest.mark.parametrize("fit", [fit_by_words, fit_by_script])
def test_a_fit_opens_its_checkpoint_once(fit: Callable[[Home, Path], None], home: Home, trained: Path) -> None:
    """For the arguments of the module, the tokenizer, the shape of the model, and the load itself."""
    with reads_of(trained) as reads:
        fit(home, trained)
    assert reads.pop("manifest.json") <= 2, "once more for the order of the saves to come"
    assert reads == {"meta.pt": 1, ".metadata": 1}


def test_the_last_checkpoint_of_a_named_folder_is_asked_before_the_launch(home: Home, tmp_path: Path) -> None:
    def trainer(**options: Any) -> Any:
        saver = ModelCheckpoint(tmp_path, save_last=True)
        strategy = MegatronStrategy()
        return quiet_trainer(
            strategy, callbacks=[saver], default_root_dir=tmp_path, enable_checkpointing=True, **options
        )

    trainer(max_steps=1).fit(module(), datamodule=home.data(home.own))
    again = trainer(max_steps=2)
    (tmp_path / "damaged.ckpt").mkdir()  # newer, and no run goes on from it
    with pytest.raises(ConfigError, match="another tokenizer"):
        again.strategy.check(module(), home.data(home.other), "last", trainer=again)
    again.strategy.check(module(), home.data(home.own), "last", trainer=again)
    again.strategy.check(module(), home.data(home.other), trainer=again)


def test_training_from_a_hugging_face_directory_takes_no_other(home: Home, imported: Path) -> None:
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, default_root_dir=home.folder)
    for path in (home.own, imported):
        with pytest.raises(ConfigError, match="another tokenizer"):
            trainer.fit(LlamaModule.from_hf(home.own), datamodule=home.data(home.other), ckpt_path=path)
    with pytest.raises(ConfigError, match="another tokenizer"):
        trainer.fit(LlamaModule.from_hf(home.own), datamodule=home.data(home.other))
    trainer.fit(LlamaModule.from_hf(home.own, lr=1e-3, warmup_steps=0), datamodule=home.data(home.own))

"""Everything that reads files, each as a function of the folder in which the spoiled file lies."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_case import Case
from hostile_sources import SAMPLE, VOCAB, module, rows

Reader = Callable[[Path], object]


class RefusedError(Exception):
    """A command's error."""


def command(*words: object) -> None:
    """Run a command of the package in this process."""
    from lightning_megatron.tools.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    if status:
        text = out.getvalue() + err.getvalue()
        if "Traceback" in text:
            raise RuntimeError(text)
        raise RefusedError(text)


def trainer(**options: Any) -> Any:
    from lightning_megatron import MegatronStrategy
    from lightning_megatron.testing.trainer import quiet_trainer

    return quiet_trainer(MegatronStrategy(), max_steps=3, use_distributed_sampler=False, **options)


def _verify(home: Path) -> None:
    from lightning_megatron.checkpoint import verify

    if faults := verify(home / "run" / "last.ckpt"):
        raise RefusedError("\n".join(map(str, faults)))


def _load_module(path: Path) -> None:
    from lightning_megatron.lightning.modules.load_module import load_module

    load_module(path)


def _from_checkpoint(path: Path) -> None:
    from lightning_megatron import GPTModule

    GPTModule.load_from_checkpoint(path).configure_model()


def _read(path: Path) -> None:
    from lightning_megatron.lightning.modules.load_module import read_checkpoint

    read_checkpoint(path)


def _fit(path: Path) -> None:
    trainer().fit(module(), rows(), ckpt_path=str(path))


def _fit_checked(path: Path) -> None:
    from lightning_megatron import VerifyCheckpoint

    trainer(callbacks=[VerifyCheckpoint()]).fit(module(), rows(), ckpt_path=str(path))


def _fit_last(home: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(home / "run", save_last=True)
    trainer(callbacks=[saver], enable_checkpointing=True).fit(module(), rows(), ckpt_path="last")


def _validate(path: Path) -> None:
    trainer().validate(module(), rows(), ckpt_path=str(path), verbose=False)


def _cli_fit(home: Path, path: Path) -> None:
    from lightning_megatron.data import MegatronSampler  # noqa: F401 - imported with the rest

    quiet = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false")
    command(
        "validate", "--model=GPTModule", f"--ckpt_path={path}", "--data=MegatronDataModule",
        f"--data.data_path={home / 'corpus'}", f"--data.seq_length={SAMPLE}", "--trainer.accelerator=cpu",
        "--trainer.devices=1", "--trainer.strategy=megatron", "--trainer.limit_val_batches=1",
        f"--trainer.default_root_dir={home}", *quiet,
    )  # fmt: skip


def _hf_tokenizer(home: Path) -> tuple[str, ...]:
    return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(home / "hf-tok"))


def _generate(path: Path) -> None:
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path.parent.parent / "hf")
    command("generate", "--checkpoint", path, *tokenizer, "--prompt", "cats sat", "--max-new-tokens", 2)


def _from_hf(path: Path) -> None:
    from lightning_megatron import LlamaModule

    LlamaModule.from_hf(path).configure_model()


def fit_data(home: Path, **options: Any) -> None:
    from lightning_megatron import MegatronDataModule

    data = MegatronDataModule(str(home / "data" / "corpus"), SAMPLE, batch_size=2, split="1", **options)
    trainer(limit_val_batches=0).fit(module(), datamodule=data)


def _preprocess(home: Path, *words: object, text: Path | None = None) -> None:
    given = text or next(iter((home / "text").glob("corpus.jsonl*")))
    command("preprocess", "--strict", "--input", given, "--output-prefix", home / "out", *words)


def _tokenizer_words(home: Path) -> tuple[object, ...]:
    for folder, kind, name in (
        ("sp", "GPTSentencePieceTokenizer", "tok.model"),
        ("hf-tok", "HuggingFaceTokenizer", "."),
        ("gpt2", "GPT2BPETokenizer", "."),
        ("bert", "BertWordPieceLowerCase", "."),
    ):
        if (home / folder).is_dir():
            return "--tokenizer-type", kind, "--tokenizer-model", home / folder / name
    raise AssertionError(home)


def _tokenize(home: Path) -> None:
    (home / "in.jsonl").write_text('{"text": "3 cats sat on a mat aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}')
    _preprocess(home, *_tokenizer_words(home), text=home / "in.jsonl")


def _data_with_tokenizer(home: Path) -> None:
    from lightning_megatron import MegatronDataModule

    _, kind, _, path = _tokenizer_words(home)
    data = MegatronDataModule(str(home / "nowhere"), SAMPLE, tokenizer_type=str(kind), tokenizer_model=str(path))
    assert data.tokenizer is not None
    data.tokenizer.encode("cats sat")
    data.tokenizer.decode([1, 2])
    from lightning_megatron.data.fingerprint import tokenizer_fingerprint

    tokenizer_fingerprint(data.tokenizer, str(path))


def _megatron(home: Path, *words: object) -> None:
    source = home / ("dist" if (home / "dist").is_dir() else "legacy")
    command("convert", "megatron-to-ckpt", source, home / "out.ckpt", *words)


def _convert_config(home: Path) -> None:
    command("convert", "megatron-to-ckpt", home / "dist", home / "out.ckpt", "--config", home / "config" / "model.json")


def _hparams(home: Path) -> None:
    from lightning_megatron import GPTModule

    file = (home / "config" / "model.json").rename(home / "config" / "hparams.yaml")
    GPTModule.load_from_checkpoint(home / "run" / "last.ckpt", hparams_file=file)


def _recipe(home: Path) -> None:
    file = (home / "config" / "model.json").rename(home / "config" / "recipe.yaml")
    command("fit", "--config", file)


def _load_optimizer(home: Path) -> None:
    from lightning.pytorch import Callback

    class Loads(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.load_optimizer_state(home / "hf" / "model.safetensors")

    trainer(callbacks=[Loads()]).fit(module(), rows())


CONFIG = ("--config", "{home}/config/model.json")
OF_CHECKPOINT: dict[str, Reader] = {
    "verify()": _verify,
    "verify": lambda home: command("verify", home / "run" / "last.ckpt"),
    "verify --json": lambda home: command("verify", "--json", home / "run" / "last.ckpt"),
    "load_module": lambda home: _load_module(home / "run" / "last.ckpt"),
    "load_from_checkpoint": lambda home: _from_checkpoint(home / "run" / "last.ckpt"),
    "read_checkpoint": lambda home: _read(home / "run" / "last.ckpt"),
    "fit": lambda home: _fit(home / "run" / "last.ckpt"),
    "fit, VerifyCheckpoint": lambda home: _fit_checked(home / "run" / "last.ckpt"),
    "fit, last": _fit_last,
    "validate": lambda home: _validate(home / "run" / "last.ckpt"),
    "validate (command)": lambda home: _cli_fit(home / "data", home / "run" / "last.ckpt"),
    "ckpt-to-hf": lambda home: command("convert", "ckpt-to-hf", home / "run" / "last.ckpt", home / "out"),
    "generate": lambda home: _generate(home / "run" / "last.ckpt"),
}
OF_HF: dict[str, Reader] = {
    "hf-to-ckpt": lambda home: command("convert", "hf-to-ckpt", _hf(home), home / "out.ckpt"),
    "from_hf": lambda home: _from_hf(_hf(home)),
    "fit": lambda home: _fit(_hf(home)),
    "validate (command)": lambda home: _cli_fit(home / "data", _hf(home)),
}
OF_MEGATRON: dict[str, Reader] = {
    "megatron-to-ckpt": lambda home: _megatron(home, "--config", home / "config" / "model.json"),
    "--allow-pickle": lambda home: _megatron(home, "--allow-pickle", "--config", home / "config" / "model.json"),
    "--allow-pickle, own arguments": lambda home: _megatron(home, "--allow-pickle"),
    "fit": lambda home: _fit(home / ("dist" if (home / "dist").is_dir() else "legacy")),
}
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB)
OF_TEXT: dict[str, Reader] = {
    "preprocess": lambda home: _preprocess(home, *_hf_tokenizer(home)),
    "preprocess --workers 2": lambda home: _preprocess(home, *_hf_tokenizer(home), "--workers", 2),
    "train-tokenizer": lambda home: command(
        "train-tokenizer",
        "--input",
        next(iter((home / "text").glob("corpus.jsonl*"))),
        "--output",
        home / "new.model",
        "--vocab-size",
        270,
    ),
}
READERS: dict[str, dict[str, Reader]] = {
    "run": OF_CHECKPOINT,
    "single": {
        "fit": lambda home: _fit(home / "single" / "one.ckpt"),
        "load_module": lambda home: _load_module(home / "single" / "one.ckpt"),
        "load_from_checkpoint": lambda home: _from_checkpoint(home / "single" / "one.ckpt"),
        "validate": lambda home: _validate(home / "single" / "one.ckpt"),
        "generate": lambda home: _generate(home / "single" / "one.ckpt"),
    },
    "hf": OF_HF,
    "hf-index": OF_HF,
    "hf-bin": OF_HF,
    "dist": OF_MEGATRON,
    "legacy": OF_MEGATRON,
    "sp": {"preprocess": _tokenize, "data module": _data_with_tokenizer},
    "hf-tok": {"preprocess": _tokenize, "data module": _data_with_tokenizer},
    "gpt2": {"preprocess": _tokenize, "data module": _data_with_tokenizer},
    "bert": {"preprocess": _tokenize, "data module": _data_with_tokenizer},
    "data": {"fit": fit_data, "fit, cache": fit_data, "fit, workers": lambda home: fit_data(home, num_workers=1)},
    "text": OF_TEXT,
    "config": {"--config": _convert_config},
}
BESIDE = {  # other sound folders that a reader wants
    "run": ("hf", "data"), "single": ("hf",), "hf": ("data",), "hf-index": ("data",), "hf-bin": ("data",),
    "dist": ("config",), "legacy": ("config",), "text": ("hf-tok",), "config": ("dist", "run"),
}  # fmt: skip


def _hf(home: Path) -> Path:
    return next(home / name for name in ("hf", "hf-index", "hf-bin") if (home / name).is_dir())


def readers_of(case: Case) -> dict[str, Reader]:
    """Everything that may be handed the file of a case."""
    if case.kind == "generation_config.json":
        return {name: OF_HF[name] for name in ("hf-to-ckpt", "from_hf")}
    if case.kind == "safetensors":
        return {**OF_HF, "load_optimizer_state": _load_optimizer}
    if case.kind == "hparams.yaml":
        return {"load_from_checkpoint": _hparams}
    if case.kind == "recipe":
        return {"fit --config": _recipe}
    return READERS[case.source]

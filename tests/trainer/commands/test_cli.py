"""The command line, from text to a trained model and back to text, and what it says to a user's mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_megatron import LlamaModule, MegatronModule, load_module, read_checkpoint
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.lightning.modules import decoder as module
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf
from lightning_megatron.lightning.pretrained.hugging_face import hf_config
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli import main as command_line

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false"]
MODEL = ["--model=LlamaModule", "--model.config=llama-tiny", "--model.dict_kwargs.num_layers=2"]
MODEL += [f"--model.dict_kwargs.{field}={value}" for field, value in {"hidden_size": 32, "vocab_size": 300}.items()]
TRAINER = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=4", *QUIET]


def main(words: list[str]) -> int:
    """Run the command line in this process, and leave the environment as it was."""
    with patch.dict(os.environ):
        return command_line.main(words)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and token files, made by the commands."""
    home = tmp_path_factory.mktemp("cli")
    lines = [json.dumps({"text": f"the {n} cats of number {n} sat on {n * n} mats\n" * 5}) for n in range(60)]
    (home / "corpus.jsonl").write_text("\n".join(lines))
    text, model = str(home / "corpus.jsonl"), str(home / "tokenizer.model")
    assert main(["train-tokenizer", "--input", text, "--output", model, "--vocab-size", "300"]) == 0
    tokenizer = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model]
    assert main(["preprocess", "--input", text, "--output-prefix", str(home / "data"), "--append-eod", *tokenizer]) == 0
    return home


@pytest.fixture(scope="module", autouse=True)
def _inside(work: Path) -> Iterator[None]:
    """Recipes and checkpoints that nobody gave a place go to the working directory."""
    before = Path.cwd()
    os.chdir(work)
    yield
    os.chdir(before)


def data(work: Path) -> list[str]:
    return [
        "--data=MegatronDataModule",
        f"--data.data_path={work / 'data_text_document'}",
        "--data.seq_length=16",
        "--data.batch_size=4",
        "--data.split=90,10,0",
    ]


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """A checkpoint that `fit` wrote, everything named in short."""
    words = ["fit", "--seed_everything=1", "--trainer.strategy=megatron", *TRAINER, *MODEL, *data(work)]
    saves = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    saves += [f"--trainer.callbacks.dirpath={work / 'run'}", "--trainer.callbacks+=lightning_megatron.Throughput"]
    assert main([*words, *saves]) == 0
    return work / "run" / "last.ckpt"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    tools = ("train-tokenizer", "preprocess", "generate", "convert", "schedule", "ops")
    for name in ("fit", "validate", "test", "predict", *tools):
        assert f"\n  {name} " in text


@pytest.mark.parametrize("width", [80, 60])
def test_texts_of_help_fit_into_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("generate", "evaluate", "convert", "doctor", "preprocess", "plan", "parity", "inspect", "why"):
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out.partition("\n\n")[2]  # behind the usage
        assert [line for line in text.splitlines() if len(line) > width] == []
        for line in text.partition("\nexample")[2].splitlines():
            assert line.count("'") % 2 == 0, "a word in quotes is not broken"


def test_help_of_every_command_of_ours_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    names = [
        line.split()[0]
        for line in capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    ]
    assert {"train-tokenizer", "plan", "from-megatron-args", "schedule"} <= {*names}
    for name in names[4:]:  # behind LightningCLI's
        assert main([name, "--help"]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_help_of_fit_says_where_the_layout_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--trainer.strategy.tp 2" in text
    assert "--model.dict_kwargs.num_layers 4" in text


@pytest.mark.parametrize("name", ["num_layers", "vocab_size", "num_experts"])
def test_a_field_of_the_configuration_is_told_its_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model=MixtralModule", "--model.config=mixtral-tiny", f"--model.{name}=4"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {name} is a field of the model's configuration: write --model.dict_kwargs.{name}"


def test_the_strategy_is_ours_unless_another_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--model=LlamaModule", "--model.config=llama-tiny", "--data=MegatronDataModule"]
    words += ["--data.data_path=x", "--data.seq_length=8", "--print_config"]
    for given, expected in (
        ([], "lightning_megatron.MegatronStrategy\n"),
        (["--trainer.strategy.tp=2"], "lightning_megatron.MegatronStrategy\n    init_args:\n      tp: 2\n"),
        (["--trainer.strategy=ddp"], None),
    ):
        assert main([*words, *given]) == 0
        text = capsys.readouterr().out
        assert ("strategy: ddp\n" in text) if expected is None else f"strategy:\n    class_path: {expected}" in text


def test_validate_needs_no_strategy(trained: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *TRAINER, "--model=LlamaModule", f"--ckpt_path={trained}", *data(work)]) == 0
    assert "val_loss" in capsys.readouterr().out


def test_help_of_fit_offers_the_strategy_and_not_what_it_is_built_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert "lightning_megatron.MegatronStrategy" in text
    assert "StrategyHooks" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lightning-megatron 0.")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_mistyped_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preproces"]) == 2
    assert capsys.readouterr().err.startswith("error: 'preproces' is not a command; nearest: preprocess")


@pytest.mark.slow
def test_a_small_command_leaves_lightning_cli_alone() -> None:
    check = "assert main(['schedule', '--pp=2', '--micro-batches=4']) == 0; assert 'lightning.pytorch.cli' not in mods"
    code = f"import sys; mods = sys.modules; from lightning_megatron.tools.cli.main import main; {check}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)


def test_unknown_preset_is_told_without_a_traceback(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--trainer.strategy=megatron", *TRAINER, "--model=LlamaModule", "--model.config=llama-tyni"]
    assert main([*words, *data(work)]) == 2
    error = capsys.readouterr().err
    assert "config='llama-tyni': unknown preset; nearest valid: llama-tiny" in error
    assert "Traceback" not in error


def test_impossible_layout_is_told_without_a_traceback(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ["--trainer.strategy=lightning_megatron.MegatronHPUStrategy", "--trainer.strategy.tp=3"]
    assert main(["fit", *strategy, *TRAINER, *MODEL, *data(work)]) == 2
    error = capsys.readouterr().err
    assert "tp=3" in error
    assert "nearest valid: 1" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("word", "fault"),
    [("--trainer.max_stepz=3", "--trainer.max_stepz"), ("--config=nothere.yaml", "File does not exist")],
)
def test_a_wrong_word_is_told_in_two_lines(word: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", word]) == 2
    tip, error = capsys.readouterr().err.splitlines()
    assert tip.endswith("fit --help")
    assert error.startswith("error: ")
    assert fault in error


@pytest.mark.slow
def test_missing_data_of_two_ranks_is_told_before_the_second_is_started(tmp_path: Path) -> None:
    """One line for each fault, by its argument, and nothing of gloo's."""
    two = ["--trainer.strategy=lightning_megatron.MegatronStrategy", "--trainer.strategy.tp=2"]
    two += ["--trainer.accelerator=cpu", "--trainer.devices=2", *QUIET]
    done = script(["fit", *two, *MODEL, *data(tmp_path), "--data.val_data_path=nothere"], tmp_path)
    assert done.returncode == 2
    told = done.stderr[done.stderr.index("error: ") :].splitlines()
    assert told[0] == "error: 2 problems in the configuration:"
    assert told[1].startswith(f"  - data_path='{tmp_path}/data_text_document': {tmp_path}/data_text_document.idx and ")
    assert told[2].startswith("  - val_data_path='nothere': nothere.idx and nothere.bin not found")
    assert len(told) == 3
    assert "Initializing distributed" not in done.stderr


def test_missing_data_is_told_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--trainer.strategy=megatron", *TRAINER, *MODEL, *data(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "data_text_document.idx" in error
    assert "Traceback" not in error


def test_verify_of_nothing_is_a_wrong_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit statuses as its help says: 1 is for checkpoints that are there and damaged."""
    assert main(["verify", str(tmp_path / "nothere")]) == 2
    assert capsys.readouterr().err.endswith("nothere: there is no such directory or file\n")
    (tmp_path / "damaged.ckpt").mkdir()
    assert main(["verify", str(tmp_path / "damaged.ckpt")]) == 1


def test_validate_reads_what_fit_wrote(trained: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", "--trainer.strategy=megatron", *TRAINER, *MODEL, *data(work), f"--ckpt_path={trained}"]
    assert main(words) == 0
    assert "val_loss" in capsys.readouterr().out


def test_validate_takes_the_model_from_the_checkpoint(
    trained: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By class alone; what is given wins, and what then does not fit is told before a model is built."""
    alone = ["validate", "--trainer.strategy=megatron", *TRAINER, *data(work), f"--ckpt_path={trained}"]
    assert main([*alone, *MODEL]) == 0
    expected = capsys.readouterr().out
    assert "val_loss" in expected
    assert main([*alone, "--model=LlamaModule"]) == 0
    assert capsys.readouterr().out == expected
    with patch.object(module.GPTModule, "configure_model", side_effect=AssertionError("a model was built")):
        assert main([*alone, "--model=LlamaModule", "--model.config=llama-tiny"]) == 2
        error = capsys.readouterr().err
        assert "num_layers=8" in error
        assert "last.ckpt has 2; nearest valid: 2" in error
        assert main([*alone, "--model=LlamaModule", "--model.dict_kwargs.vocab_size=200"]) == 2
        error = capsys.readouterr().err
        assert "vocab_size=200" in error
        assert "num_layers" not in error


def test_a_model_that_nobody_configures_is_not_guessed(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ([], ["--ckpt_path=last"]):
        words = ["fit", "--trainer.strategy=megatron", *TRAINER, "--model=LlamaModule", *data(work), *path]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "model.config=None: is not given: name a preset" in error
        assert "llama3.1-8b" in error
        assert "Traceback" not in error


@pytest.fixture(scope="module")
def goes_on(trained: Path, work: Path) -> Path:
    """A longer run from the checkpoint, whose command names hyper-parameters of its own."""
    words = ["fit", "--seed_everything=1", "--trainer.strategy=megatron", *TRAINER, "--model=LlamaModule", *data(work)]
    words += ["--trainer.max_steps=5", "--model.eps=1e-7", f"--ckpt_path={trained}"]
    saves = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    assert main([*words, *saves, f"--trainer.callbacks.dirpath={work / 'on'}"]) == 0
    return work / "on" / "last.ckpt"


def test_fit_goes_on_with_the_model_of_the_checkpoint(goes_on: Path, trained: Path) -> None:
    before, after = LlamaModule.load_from_checkpoint(trained), LlamaModule.load_from_checkpoint(goes_on)
    assert (after.config, after.lr, after.eps) == (before.config, before.lr, 1e-7)
    assert read_checkpoint(goes_on)["global_step"] == 5


@pytest.fixture(scope="module")
def exported(goes_on: Path) -> Path:
    """The trained model as a Hugging Face directory."""
    checkpoint_to_hf(goes_on, goes_on.with_name("exported"))
    return goes_on.with_name("exported")


def test_a_hugging_face_directory_names_class_configuration_and_weights(
    exported: Path, goes_on: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hf_config(exported).num_layers == 2
    assert type(MegatronModule.from_hf(exported)) is LlamaModule
    common = ["--trainer.strategy=megatron", *TRAINER, *data(work)]
    assert main(["validate", *common, "--model=LlamaModule", f"--ckpt_path={goes_on}"]) == 0
    expected = capsys.readouterr().out
    assert main(["validate", *common, f"--model.from_hf={exported}"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["validate", *common, "--model.from_hf", str(exported), f"--ckpt_path={goes_on}"]) == 0
    assert capsys.readouterr().out == expected
    few = ["--trainer.max_steps=1", "--model.lr=1e-5"]
    assert main(["fit", *common, f"--model.from_hf={exported}", *few]) == 0
    assert main(["fit", *common, f"--model.from_hf={work}", *few]) == 2
    assert "no Hugging Face directory: it has no config.json" in capsys.readouterr().err


def generating(trained: Path, work: Path) -> list[str]:
    words = ["generate", "--checkpoint", str(trained), "--prompt", "the 7 cats", "--max-new-tokens", "8", "--seed", "1"]
    return [*words, "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(work / "tokenizer.model")]


def script(words: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    """Run the console script, which may start other processes with the same words."""
    command = [str(Path(sys.executable).with_name("lightning-megatron")), *words]
    env = own_environment()
    return subprocess.run(command, cwd=work, env=env, timeout=900, capture_output=True, text=True, check=False)


def test_generate_continues_a_prompt(trained: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = generating(trained, work)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("the 7 cats")
    assert main(words) == 0
    assert capsys.readouterr().out == text, "one seed, one text"


@pytest.mark.slow
def test_generate_over_two_devices_says_what_one_says(
    trained: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = generating(trained, work)
    assert main(words) == 0
    result = script([*words, "--tp", "2", "--device", "cpu"], work)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines(keepends=True) if not line.startswith("[Gloo]")]  # torch 2.10's
    assert "".join(said) == capsys.readouterr().out


def test_generate_over_more_devices_than_the_model_divides_into(
    trained: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*generating(trained, work), "--tp", "3", "--device", "cpu"]) == 2
    assert "tp=3" in capsys.readouterr().err


def test_generate_without_a_checkpoint(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "generate",
        "--checkpoint",
        str(work / "none.ckpt"),
        "--prompt",
        "the",
        "--tokenizer-type",
        "NullTokenizer",
    ]
    assert main(words) == 2
    assert "error: " in capsys.readouterr().err


def test_load_module_of_the_class_asked_for(trained: Path) -> None:
    module = load_module(trained, LlamaModule)
    assert type(module) is LlamaModule
    assert module.config.num_layers == 2
    assert not module.training
    logits = module(torch.arange(6).reshape(1, 6))
    assert logits.shape == (1, 6, 300)
    torch.testing.assert_close(load_module(trained)(torch.arange(6).reshape(1, 6)), logits)


def test_load_module_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.ckpt"):
        load_module(tmp_path / "none.ckpt")


@pytest.mark.slow
def test_the_console_script_starts_the_other_ranks(work: Path) -> None:
    """LightningCLI in two processes, from a YAML recipe: children run the same words again."""
    config = work / "recipe.yaml"
    run = work / "two"
    config.write_text(
        f"""
        trainer:
          accelerator: cpu
          devices: 2
          max_steps: 2
          limit_val_batches: 1
          strategy:
            class_path: lightning_megatron.MegatronHPUStrategy
            init_args: {{tp: 2, micro_batch_size: 2}}
          callbacks:
            - class_path: ModelCheckpoint
              init_args: {{dirpath: {run}, save_last: true}}
        data:
          class_path: MegatronDataModule
          init_args: {{data_path: {work / "data_text_document"}, seq_length: 16, batch_size: 4}}
        """
    )
    result = script(["fit", "--config", str(config), *MODEL, *QUIET], work)
    assert result.returncode == 0, result.stderr
    assert {file.name for file in (run / "last.ckpt").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert load_module(run / "last.ckpt").config.hidden_size == 32

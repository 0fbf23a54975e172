"""The recipe of fine-tuning on chats: a directory of transformers' in, two commands, and one out that answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_megatron.machine.job_environment import own_environment

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "configs"


def test_the_twin_differs_from_the_recipe_in_sizes_and_files_alone() -> None:
    large, small = (
        yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in ("llama-finetune", "llama-finetune-tiny")
    )
    assert large["data"]["class_path"] == small["data"]["class_path"] == "ChatDataModule"
    for part in ("model", "data"):
        assert large[part]["init_args"].keys() == small[part]["init_args"].keys()
    assert large.keys() == small.keys()


@pytest.mark.slow
def test_the_twin_goes_from_directory_to_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = [sys.executable, "-m", "lightning_megatron.tools.cli.main"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.max_steps=4"]
    commands = [
        [sys.executable, str(ROOT / "examples" / "make_chats.py")],
        [*program, "fit", "--config", str(RECIPES / "llama-finetune-tiny.yaml"), *quiet],
        [
            *program,
            "convert",
            "ckpt-to-hf",
            "out/llama-finetune-tiny/last.ckpt",
            "tuned",
            "--tokenizer",
            ".demo/chat-base",
        ],
    ]
    for command in commands:
        done = subprocess.run(
            command, cwd=tmp_path, env=own_environment(), capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "You have overridden" not in done.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in (".demo/chat-base", "tuned"))
    moved = (before.lm_head.weight - after.lm_head.weight).abs().max()
    assert moved > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").eos_token == "<|im_end|>"

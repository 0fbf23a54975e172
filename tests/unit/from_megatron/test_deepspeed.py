"""DeepSpeed's file beside a command line: its keys in the recipe, contradictions and unknown keys named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.from_megatron.deepspeed import HERE, KEYS, NONE
from lightning_megatron.tools.cli.from_megatron.recipe import Devices, recipe_of
from lightning_megatron.tools.cli.from_megatron.words import read_words

LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--train-iters 1000 --vocab-size 96 --data-path corpus --deepspeed "
)
FILE = Path(__file__).parent / "ds_config.json"


def read(contents: Any, folder: Path, more: str = "--lr 1e-3") -> tuple[dict[str, Any], dict[str, str]]:
    (folder / "ds.json").write_text(contents if isinstance(contents, str) else json.dumps(contents))
    line = read_words(f"{LINE} {more} --deepspeed_config {folder / 'ds.json'}")
    recipe = recipe_of(line, Devices(8))
    return recipe, {name.rpartition(": ")[2]: reason for name, reason in line.without.items()}


def test_the_file_says_what_the_line_does_not() -> None:
    line = read_words(f"{LINE} --lr 1e-3 --micro-batch-size 2 --deepspeed_config={FILE}")
    recipe = recipe_of(line, Devices(8))
    trainer, strategy = recipe["trainer"], recipe["trainer"]["strategy"]["init_args"]
    assert (trainer["precision"], trainer["gradient_clip_val"], trainer["log_every_n_steps"]) == ("bf16-mixed", 0.5, 25)
    assert (strategy["micro_batch_size"], recipe["data"]["init_args"]["batch_size"]) == (2, 8)
    assert (strategy["distributed_optimizer"], strategy["overlap_grad_reduce"]) == (True, True)
    assert strategy["bucket_size"] == 500_000_000
    model = recipe["model"]["init_args"]
    assert (model["lr"], model["betas"], model["eps"], model["weight_decay"]) == (1e-3, [0.9, 0.95], 1e-6, 0.1)
    named = {name.rpartition(": ")[2]: reason for name, reason in line.without.items()}
    assert named == {
        "activation_checkpointing.partition_activations": NONE["activation_checkpointing"],
        "monitor.tensorboard.enabled": "not known here",
    }


def test_accumulation_is_micro_batches_of_a_replica(tmp_path: Path) -> None:
    contents = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    recipe, _ = read(contents, tmp_path, "--lr 1e-3 --tensor-model-parallel-size 2")
    assert recipe["data"]["init_args"]["batch_size"] == 8
    assert recipe["trainer"]["strategy"]["init_args"]["micro_batch_size"] == 2


def test_a_rate_may_stand_in_the_file_alone(tmp_path: Path) -> None:
    recipe, _ = read({"optimizer": {"params": {"lr": 2e-4}}}, tmp_path, "")
    assert recipe["model"]["init_args"]["lr"] == 2e-4


def test_stages_above_one_and_other_optimizers_are_named(tmp_path: Path) -> None:
    contents = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "Lamb"},
    }
    _, named = read(contents, tmp_path)
    assert "stage 1 is what" in named["--zero-stage"]
    assert named["zero_optimization.offload_optimizer.device"] == NONE["zero_optimization.offload_optimizer"]
    assert "AdamW" in named["--optimizer"]


@pytest.mark.parametrize(
    ("contents", "more", "words"),
    [
        ({"train_batch_size": 32}, "--global-batch-size 64", "train_batch_size=32: is 64 by --global-batch-size"),
        ({"bf16": {"enabled": False}}, "--bf16", "bf16.enabled=False: is on by --bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "", "cannot be beside"),
        ({"zero_optimization": {"stage": 1}}, "--zero-stage 2", "zero_optimization.stage=1: is 2 by --zero-stage"),
        ({"gradient_clipping": 1.0}, "--clip-grad 0.5", "gradient_clipping=1.0: is 0.5 by --clip-grad"),
        ({"train_batch_size": 0}, "", "train_batch_size=0: must be at least 1"),
        ({"train_batch_size": "many"}, "", "train_batch_size='many': must be a number"),
        ({"train_batch_size": 1.5}, "", "train_batch_size=1.5: must be a whole number"),
        ({"bf16": {"enabled": 1}}, "", "bf16.enabled=1: must be true or false"),
        ({"optimizer": {"params": {"betas": 0.9}}}, "", "optimizer.params.betas=0.9: must be two numbers"),
        ('{"train_batch_size": NaN}', "", "train_batch_size=nan: must be a number"),
        ("{", "", "cannot be read"),
        ([1], "", "cannot be read"),
    ],
)
def test_what_cannot_be_is_told(contents: Any, more: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(contents, tmp_path, f"--lr 1e-3 {more}")
    assert words in str(error.value)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed_config='nothere\.json': cannot be read"):
        recipe_of(read_words(f"{LINE} --lr 1e-3 --deepspeed_config nothere.json"), Devices(8))


def test_no_key_is_in_two_tables() -> None:
    names = [*KEYS, *HERE, *NONE]
    assert len(names) == len(set(names))

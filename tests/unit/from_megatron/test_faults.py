"""Command lines of Megatron that cannot be, or say something else than they seem to: refused, never a wrong number."""

from __future__ import annotations

import pytest
import yaml

from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.from_megatron.recipe import Devices, recipe_of
from lightning_megatron.tools.cli.from_megatron.words import read_words
from lightning_megatron.tools.cli.main import main

LINE = {
    "--num-layers": "4", "--hidden-size": "64", "--num-attention-heads": "4", "--seq-length": "32",
    "--max-position-embeddings": "32", "--micro-batch-size": "1", "--train-iters": "1000", "--lr": "1e-3",
    "--vocab-size": "96", "--data-path": "corpus",
}  # fmt: skip


def line(without: tuple[str, ...] = (), **given: str) -> str:
    """The words of a line without some flags, and with others."""
    flags = {name: value for name, value in LINE.items() if name not in without}
    flags |= {"--" + name.replace("_", "-"): value for name, value in given.items()}
    return " ".join(f"{name} {value}" for name, value in flags.items())


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        recipe_of(read_words(text), Devices(8))
    return [str(problem) for problem in error.value.problems]


def test_the_line_itself_has_none() -> None:
    recipe_of(read_words(line()), Devices(8))


SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size", "global_batch_size", "train_iters",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "seq_length", "log_interval",
    "save_interval", "batch_size", "model_parallel_size",
)  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-2"])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_cannot_be_is_one_problem(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    without = ("--micro-batch-size",) if name == "batch_size" else ()
    assert problems(line(without, **{name: value})) == [f"{flag}={value}: must be at least 1"]


def test_samples_of_none() -> None:
    text = line(("--train-iters",), train_samples="0")
    assert problems(text) == ["--train-samples=0: must be at least 1"]


def test_all_faults_come_at_once() -> None:
    text = line(("--lr", "--seq-length"), tensor_model_parallel_size="0", hidden_size="63", fp16="", bf16="")
    found = "\n".join(problems(text))
    for part in ("--tensor-model-parallel-size=0", "--lr=None", "--seq-length=None", "--bf16", "hidden_size=63"):
        assert part in found


BY_SAMPLES = line(("--train-iters",), train_samples="1000")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line(("--lr",)), "--lr=None: is needed: Megatron has no default for it"),
        (line(("--seq-length",)), "--seq-length=None: is needed: Megatron has no default for it"),
        (line(lr_decay_samples="9"), "--lr-decay-samples=9: the run's length is --train-iters: give --lr-decay-iters"),
        (
            line(lr_warmup_samples="9"),
            "--lr-warmup-samples=9: the run's length is --train-iters: give --lr-warmup-iters",
        ),
        (
            f"{BY_SAMPLES} --lr-warmup-iters 9",
            "--lr-warmup-iters=9: the run's length is --train-samples: give --lr-warmup-samples",
        ),
        (
            f"{BY_SAMPLES} --lr-wsd-decay-iters 9 --lr-decay-style WSD",
            "--lr-wsd-decay-iters=9: the run's length is --train-samples: give --lr-wsd-decay-samples",
        ),
        (line(fp16="", bf16=""), "--bf16=True: cannot be beside --fp16"),
        (line(train_data_path="a"), "--train-data-path=['a']: cannot be beside --data-path"),
        (line(valid_data_path="a"), "--valid-data-path=['a']: cannot be beside --data-path"),
        (
            line(lr_warmup_iters="5", lr_warmup_fraction="0.1"),
            "--lr-warmup-fraction=0.1: cannot be beside --lr-warmup-iters",
        ),
        (line(start_weight_decay="0.1"), "--start-weight-decay=0.1: needs --weight-decay-incr-style linear or cosine"),
        (line(weight_decay_incr_style="linear"), "needs --start-weight-decay and --end-weight-decay too"),
        (line(weight_decay_incr_style="cosine", start_weight_decay="0.1"), "needs --end-weight-decay too"),
        (line(weight_decay_incr_style="square"), "nearest valid: constant, linear, cosine"),
        (line(num_layers="4 5"), "--num-layers='4 5': takes one value"),
        (line(cp_comm_type="p2p a2a"), "--cp-comm-type='p2p a2a': takes one value"),
        (line(bf16="", num_workers="2 | tee log"), "--num-workers='2 | tee log': | is for the shell: leave it out"),
        *(
            (f"torchrun --nproc_per_node 8 {script} {line()}", f"script='{script}': trains a model of another kind")
            for script in (
                "pretrain_bert.py", "pretrain_t5.py", "pretrain_ict.py", "pretrain_retro.py", "pretrain_vlm.py",
                "pretrain_mamba.py", "pretrain_vision_classify.py", "examples/multimodal/train.py",
            )
        ),
        (f"torchrun --nproc_per_node gpu pretrain_gpt.py {line()}", "--nproc_per_node='gpu': must be a number"),
        (f"torchrun --nnodes 1:4 pretrain_gpt.py {line()}", "--nnodes='1:4': must be a number"),
        (f"deepspeed --num_gpus 0 pretrain_gpt.py {line()}", "--num_gpus='0': must be a number of at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_the_one_problem(text: str, expected: str) -> None:
    (found,) = problems(text)
    assert expected in found


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("torchrun --nproc_per_node=8 --nnodes 4", (8, 4)),
        ("deepspeed --num_gpus 8", (8, None)),
        ("deepspeed --num_nodes 4 --num_gpus 8", (8, 4)),
        ("deepspeed --hostfile hosts --num_gpus 8", (None, None)),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8", (8, 2)),
    ],
)
def test_devices_are_those_of_the_launchers_words(launcher: str, devices: tuple[int | None, int | None]) -> None:
    assert read_words(f"{launcher} /home/bert/pretrain_gpt.py {line()}").devices == devices


def test_a_warm_up_of_none_may_stand_beside_a_share() -> None:
    made = recipe_of(read_words(line(lr_warmup_iters="0", lr_warmup_fraction="0.1")), Devices(8))
    assert made["model"]["init_args"]["warmup_steps"] == 100


def test_no_validation_with_an_interval_of_none() -> None:
    trainer = recipe_of(read_words(line(eval_interval="0", eval_iters="5")), Devices(8))["trainer"]
    assert trainer["limit_val_batches"] == 0
    assert "val_check_interval" not in trainer


def test_missing_data_is_named_as_a_place_to_fill_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron-args", "--devices", "8", line(("--data-path",))]) == 1
    out, err = capsys.readouterr()
    assert "to fill in: data.init_args.data_path: the line names no data" in err
    assert "# To fill in:\n#   data.init_args.data_path" in out
    assert yaml.safe_load(out)["data"]["init_args"]["data_path"] == "?"

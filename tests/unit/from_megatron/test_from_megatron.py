"""Recipes from command lines of Megatron: sizes and rates as the line says, no flag ignored, faults all at once."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy, MixtralModule
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.lr_schedule import LRSchedule
from lightning_megatron.tools.cli.from_megatron.flags import ALWAYS, ONLY, TAKEN, WITHOUT, Flag
from lightning_megatron.tools.cli.from_megatron.recipe import Devices, recipe_of
from lightning_megatron.tools.cli.from_megatron.words import read_words
from lightning_megatron.tools.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
GPT_345M = """
python -m torch.distributed.run --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 \\
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 \\
    --global-batch-size 64 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine \\
    --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path corpus \\
    --vocab-size 50257 --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \\
    --save checkpoints --load checkpoints
"""
LLAMA2_70B = """
torchrun --nproc_per_node 8 --nnodes 8 --node_rank 0 --master_addr host pretrain_gpt.py --use-mcore-models \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 \\
    --sequence-parallel --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 \\
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.0 \\
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 1024 \\
    --train-samples 512000 --rampup-batch-size 16 16 5000 \\
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-samples 2048 \\
    --lr-decay-samples 512000 --weight-decay 0.1 --adam-beta2 0.95 --bf16 --use-distributed-optimizer \\
    --overlap-grad-reduce --recompute-activations --vocab-size 32000 --data-path 0.3 a 0.7 b \\
    --use-fast-softmax true --use-fused-sdpa true
"""
MIXTRAL = """
torchrun --nproc_per_node=8 --nnodes=4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \\
    --max-position-embeddings 32768 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \\
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \\
    --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall \\
    --expert-model-parallel-size 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \\
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --bf16 --vocab-size 32000 \\
    --data-path corpus
"""
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 10000 --lr 1e-3 --vocab-size 96 --data-path corpus "
    "--position-embedding-type rope --disable-bias-linear --num-experts 4 "
)
DEVICES = Devices(8)


def recipe(text: str, devices: Devices = DEVICES) -> dict[str, Any]:
    return recipe_of(read_words(text), devices)


def strategy(made: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the strategy takes."""
    part = made["trainer"]["strategy"]
    assert part["class_path"] == "lightning_megatron.MegatronStrategy"
    MegatronStrategy(**part["init_args"])
    return dict(part["init_args"])


def test_gpt_345m() -> None:
    made = recipe(GPT_345M)
    module = GPTModule(**made["model"]["init_args"])
    h, v = 1024, 50257
    blocks = 24 * (12 * h * h + 13 * h)  # four matrices, their biases, and two norms
    assert module.config.num_parameters() == blocks + 2 * h + 1024 * h + v * h
    assert module.config.activation == "gelu_tanh"
    assert (module.config.hidden_dropout, module.config.attention_dropout) == (0.1, 0.1)
    assert (module.lr, module.min_lr, module.weight_decay, module.betas) == (1.5e-4, 1e-5, 0.01, (0.9, 0.999))
    assert (module.warmup_steps, module.decay_steps) == (3200, 320000)
    LRSchedule(module.lr, module.min_lr, warmup=module.warmup_steps, decay=320000, style=module.lr_schedule)
    trainer = made["trainer"]
    assert (trainer["precision"], trainer["max_steps"], trainer["devices"]) == ("16-mixed", 500000, 8)
    assert made["data"]["init_args"]["batch_size"] == 8, "64 samples over 8 replicas"
    assert made["ckpt_path"] == "last"
    assert not strategy(made)["distributed_optimizer"], "Megatron's default"


def test_llama2_70b_by_samples() -> None:
    line = read_words(LLAMA2_70B)
    assert line.devices == (8, 8)
    made = recipe_of(line, Devices(8, 8))
    module = LlamaModule(**made["model"]["init_args"])
    assert module.config.num_parameters() == 68_976_648_192
    given = strategy(made)
    assert (given["tp"], given["pp"], given["vpp"], given["pipeline_schedule"]) == (8, 4, 4, "interleaved")
    assert (given["recompute"], given["sequence_parallel"]) == ("selective", True)
    assert (given["distributed_optimizer"], given["overlap_grad_reduce"]) == (True, True)
    assert not given["overlap_param_gather"]
    assert "max_steps" not in made["trainer"]
    assert (made["model"]["init_args"]["warmup_samples"], made["model"]["init_args"]["decay_samples"]) == (2048, 512000)
    data = made["data"]["init_args"]
    assert (data["global_batch_size"], data["train_samples"], data["rampup_batch_size"]) == (
        1024,
        512000,
        [16, 16, 5000],
    )
    assert made["data"]["init_args"]["data_path"] == [0.3, "a", 0.7, "b"]
    assert made["trainer"]["strategy"]["init_args"]["ops"] == {"attention": "fast_softmax"}
    assert not line.without


def test_mixtral_8x7b() -> None:
    made = recipe(MIXTRAL, Devices(8, 4))
    module = MixtralModule(**made["model"]["init_args"])
    assert module.config.num_parameters() == 46_702_792_704
    assert module.config.rope_theta == 1e6
    assert module.lr_schedule == "linear", "Megatron's default"
    assert strategy(made)["ep"] == 8


VALUES = {"int": "2", "float": "0.5", "str": "other", "bool": "true", "list": "a", "pattern": "2"}
OWN = {
    "--encoder-num-layers": "8", "--num-layers": "8", "--hidden-size": "128", "--num-attention-heads": "8",
    "--num-query-groups": "2 --group-query-attention", "--group-query-attention": "--num-query-groups 2",
    "--position-embedding-type": "none", "--normalization": "RMSNorm", "--max-position-embeddings": "64",
    "--rope-scaling-factor": "2 --use-rope-scaling", "--kv-channels": "8", "--vocab-size": "80",
    "--no-position-embedding": "--position-embedding-type learned_absolute",
    "--use-rotary-position-embeddings": "--position-embedding-type learned_absolute",
    "--num-experts": "8", "--moe-layer-freq": "[0]*2+[1]*2", "--moe-router-topk": "1 --moe-router-pre-softmax",
    "--topk": "1 --moe-router-pre-softmax", "--openai-gelu": "--no-bias-gelu-fusion",
    "--moe-capacity-bins-num": "3 --moe-token-dispatcher-type alltoall",
    "--moe-router-score-function": "sigmoid", "--moe-router-group-topk": "1 --moe-router-num-groups 2",
    "--moe-router-num-groups": "2 --moe-router-group-topk 1", "--moe-router-load-balancing-type": "none",
    "--moe-router-enable-expert-bias": "--moe-router-score-function sigmoid",
    "--moe-router-bias-update-rate": "0.5 --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-pad-expert-input-to-capacity": "--moe-expert-capacity-factor 2 --moe-token-dispatcher-type alltoall",
    "--moe-token-drop-policy": "position --moe-expert-capacity-factor 2",
    "--moe-capacity-bins-exp-base": "1.7 --moe-capacity-bins-num 3 --moe-token-dispatcher-type alltoall",
    "--moe-capacity-bins-alignment": "2 --moe-capacity-bins-num 3 --moe-token-dispatcher-type alltoall",
    "--moe-capacity-bins-optimize-interval": "2 --moe-capacity-bins-num 3 --moe-token-dispatcher-type alltoall",
    "--moe-capacity-bins-max-overhead-factor": "0.5 --moe-capacity-bins-num 3 --moe-token-dispatcher-type alltoall",
    "--cp-comm-type": "a2a --context-parallel-size 2", "--sequence-parallel": "--tensor-model-parallel-size 2",
    "--num-layers-per-virtual-pipeline-stage": "1 --pipeline-model-parallel-size 2",
    "--num-virtual-stages-per-pipeline-rank": "2 --pipeline-model-parallel-size 2",
    "--recompute-granularity": "full", "--recompute-method": "block --recompute-granularity full",
    "--recompute-num-layers": "2 --recompute-granularity full",
    "--distribute-saved-activations": "--recompute-granularity full --tensor-model-parallel-size 2",
    "--recompute-modules": "mlp",
    "--fp8-format": "hybrid", "--fp8-amax-history-len": "2 --fp8-format hybrid",
    "--fp8-amax-compute-algo": "max --fp8-format hybrid", "--fp8-margin": "2 --fp8-format hybrid",
    "--first-last-layers-bf16": "--fp8-format hybrid",
    "--num-layers-at-start-in-bf16": "2 --first-last-layers-bf16 --fp8-format hybrid",
    "--num-layers-at-end-in-bf16": "2 --first-last-layers-bf16 --fp8-format hybrid",
    "--cache-fp8-weight": "false --fp8-format hybrid", "--use-fused-sdpa": "false",
    "--global-batch-size": "16", "--lr-decay-style": "cosine", "--zero-stage": "1", "--clip-grad": "0.5",
    "--wandb-exp-name": "a --wandb-project p", "--wandb-save-dir": "a --wandb-project p",
    "--save-interval": "7 --save out", "--persistent-save-interval": "7 --save out",
    "--moe-token-distribution-logging-interval": "7 --moe-per-layer-logging",
    "--profile-step-start": "7 --profile", "--profile-step-end": "20 --profile",
    "--lr-warmup-iters": "7", "--lr-warmup-samples": "80 --train-samples 10000",
    "--lr-decay-samples": "800 --train-samples 10000", "--rampup-batch-size": "8 8 100 --train-samples 10000",
    "--lr-wsd-decay-samples": "7 --lr-decay-style WSD --train-samples 10000", "--num-workers": "3",
    "--valid-data-path": "b --train-data-path a", "--test-data-path": "b --train-data-path a",
    "--train-data-path": "b", "--data-path": "other",
    "--optimizer": "sgd", "--num-key-value-heads": "2", "--seed": "7", "--eval-iters": "7", "--log-interval": "7",
    "--eval-interval": "7", "--split": "9,1,0", "--lr": "2e-3", "--min-lr": "1e-4", "--seq-length": "16",
    "--encoder-seq-length": "16", "--tokenizer-type": "GPT2BPETokenizer", "--ffn-hidden-size": "80",
    "--lr-wsd-decay-iters": "7 --lr-decay-style WSD", "--lr-wsd-decay-style": "linear --lr-decay-style WSD",
    "--start-weight-decay": "0.2 --end-weight-decay 0.3 --weight-decay-incr-style linear",
    "--mtp-loss-scaling-factor": "0.3 --mtp-num-layers 1",
    "--end-weight-decay": "0.2 --start-weight-decay 0.1 --weight-decay-incr-style linear",
    "--weight-decay-incr-style": "linear --start-weight-decay 0.1 --end-weight-decay 0.2",
    "--deepspeed_config": str(Path(__file__).parent / "ds_config.json"),
    **dict.fromkeys(("--tensor-model-parallel-size", "--model-parallel-size"), "2 --sequence-parallel"),
    "--context-parallel-size": "2 --attention-dropout 0",
    **{f"--decoder-{end}-pipeline-num-layers": "2 --pipeline-model-parallel-size 2" for end in ("first", "last")},
    "--pipeline-model-parallel-layout": "Et*2|t*2L --pipeline-model-parallel-size 2",
}  # fmt: skip
"""Words behind a flag, where those for its kind are none, and further flags that it needs to mean something."""
REFUSED = {
    "--rotary-percent", "--rotary-interleaved", "--rotary-seq-len-interpolation-factor", "--apply-layernorm-1p",
    "--apply-residual-connection-post-layernorm", "--squared-relu", "--qk-l2-norm",
}  # fmt: skip
"""Flags of models that are not here: refused by name."""
REPLACED = {
    "--train-samples": "--train-iters 10000",
    **dict.fromkeys(("--train-data-path", "--valid-data-path", "--test-data-path"), "--data-path corpus"),
    "--disable-bias-linear": "--disable-bias-linear --num-experts 4",
    "--distribute-saved-activations": "--num-experts 4",
    "--encoder-num-layers": "--num-layers 4",
    "--encoder-seq-length": "--seq-length 32",
    "--batch-size": "--micro-batch-size 1",
}


@pytest.mark.parametrize("flag", TAKEN, ids=lambda flag: flag.name)
def test_no_flag_is_ignored(flag: Flag) -> None:
    words = OWN.get(flag.name, "" if flag.kind in ("switch", "off") else VALUES[flag.kind])
    base = BASE.replace(REPLACED.get(flag.name, "?"), "")
    base = base.replace("--train-iters 10000", "") if "--train-samples" in words else base
    further = " --" + words.partition("--")[2] if "--" in words else ""
    text = f"{base} {flag.name} {words}"
    if flag.name in REFUSED:
        with pytest.raises(ConfigError, match=flag.key):
            recipe(text)
        return
    line = read_words(text)
    assert (recipe_of(line, DEVICES), line.without) != without_it(BASE + further)


DENSE = BASE.replace(" --num-experts 4", "").replace("--position-embedding-type rope ", "")


@pytest.mark.parametrize("flag", TAKEN, ids=lambda flag: flag.name)
def test_a_flag_that_needs_another_changes_the_recipe_or_is_named(flag: Flag) -> None:
    is_switch = flag.kind in ("switch", "off")
    words = "" if is_switch else OWN.get(flag.name, VALUES[flag.kind]).partition("--")[0]
    plain = DENSE.replace(f"{flag.name} ", "") if is_switch else DENSE
    try:
        line = read_words(f"{plain} {flag.name} {words}")
        made = recipe_of(line, DEVICES), line.without
    except ConfigError:
        return
    is_default = flag.name == "--openai-gelu"
    assert made != without_it(plain) or is_default or flag.name in line.idle


def test_flags_without_an_effect_are_named_in_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-query-groups 2 --save-interval 5 --train-data-path a --split 9,1,0"
    line = f"{DENSE.replace('--data-path corpus', '')} {flags}"
    assert main(["from-megatron-args", "--devices", "8", line]) == 0
    out, err = capsys.readouterr()
    assert "# Without an effect:\n#   --num-query-groups: is not read without --group-query-attention\n" in out
    assert "no effect: --save-interval: is not read without --save\n" in err
    assert "no effect: --split: is not read beside --train-data-path\n" in err


def test_compilation_by_regions_is_no_other_name_of_compilation() -> None:
    made = recipe(f"{BASE} --use-torch-compile true --use-regional-compilation false")
    assert strategy(made)["compile"] is True


def without_it(text: str) -> Any:
    """What the line gives without the flag; it may need the flag."""
    line = read_words(text)
    try:
        return recipe_of(line, DEVICES), line.without
    except ConfigError as error:
        return error


@pytest.mark.parametrize("name", ONLY)
def test_of_some_flags_one_value_is_the_same_here(name: str) -> None:
    same, _ = ONLY[name]
    for value, is_same in ((same, True), ("other", False)):
        line = read_words(f"{BASE} {name} {value}")
        assert recipe_of(line, DEVICES) == recipe(BASE)
        assert (name in line.always, name in line.without) == (is_same, not is_same)


@pytest.mark.parametrize("name", [*ALWAYS, *WITHOUT])
def test_other_flags_are_named_or_change_nothing(name: str) -> None:
    line = read_words(f"{BASE} {name} 1")
    assert recipe_of(line, DEVICES) == recipe(BASE)
    assert (name in line.without) == (name in WITHOUT)


def test_no_flag_is_in_two_tables() -> None:
    names = [*(flag.name for flag in TAKEN), *ALWAYS, *ONLY, *WITHOUT]
    assert len(names) == len(set(names))


def test_the_page_is_up_to_date() -> None:
    pages = run_path(str(DOCS / "from_megatron.py"))
    assert pages["page"]() == (DOCS / "from-megatron.md").read_text(), "run `python docs/from_megatron.py`"


def test_what_is_printed_is_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron-args", GPT_345M]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == recipe(GPT_345M)


def test_flags_without_a_counterpart_are_named_and_the_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron-args", "--devices", "8", f"{BASE} --tp-comm-overlap --num-layer 3"]) == 1
    out, err = capsys.readouterr()
    assert "--num-layer: not known here; nearest: --num-layers" in err
    assert "# Without a counterpart:" in out
    assert yaml.safe_load(out) == recipe(BASE)


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("--num-layers many", ["--num-layers", "whole number"]),
        ("--num-layers $LAYERS", ["$LAYERS", "variable of a shell"]),
        ("--sequence-parallel 1", ["--sequence-parallel", "takes no value"]),
        (f"$GPT_ARGS {BASE}", ["line='$GPT_ARGS'", "variable of a shell"]),
        (f"torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS {BASE}", ["line='$GPT_ARGS'", "variable of a shell"]),
        (f"python pretrain_gpt.py gpt.yaml {BASE}", ["line='gpt.yaml': belongs to no flag"]),
        (f"{BASE} --data-path corpus 2>&1 | tee log", ["--data-path", "2>&1 is for the shell: leave it out"]),
        (f"{BASE} --swiglu --use-mcore-models && date", ["--use-mcore-models", "&& is for the shell"]),
        (f"{BASE} --encoder-num-layers 8", ["--encoder-num-layers='8': is --num-layers by another name, which says 4"]),
        (f"{BASE} --moe-layer-freq __import__", ["--moe-layer-freq", "lists of numbers"]),
        (f"{BASE} --moe-layer-freq [0]*99999999", ["--moe-layer-freq", "lists of numbers"]),
        (f"{BASE} --tensor-model-parallel-size 3 --global-batch-size 7", ["--devices=8", "nearest valid: 6, 9"]),
        (f"{BASE} --global-batch-size 12", ["--global-batch-size=12", "nearest valid: 8, 16"]),
        (f"{BASE} --train-samples 100", ["--train-iters", "not both"]),
        (f"{BASE} --rampup-batch-size 16 16 500", ["--rampup-batch-size", "--train-samples"]),
        (BASE.replace("--vocab-size 96", ""), ["--vocab-size", "tokenizer"]),
        (f"{BASE} --squared-relu --qk-l2-norm", ["squared_relu", "qk_l2_norm"]),
        (
            f"{BASE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            ["--num-layers-per-virtual-pipeline-stage=3", "4 layers do not split"],
        ),
    ],
)
def test_faults_end_it_with_words(line: str, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron-args", "--devices", "8", line]) == 2
    err = capsys.readouterr().err
    assert all(text in err for text in texts), err


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--position-embedding-type rope --no-position-embedding", "rope"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding --position-embedding-type none", "none"),
        ("--no-position-embedding", "none"),
        ("", "learned"),
    ],
)
def test_no_position_embedding_means_learned_ones(flags: str, found: str) -> None:
    """Held against Megatron-LM, whose example for Mixtral has the flag beside rope, where it changes nothing."""
    config = GPTModule(**recipe(DENSE + flags)["model"]["init_args"]).config
    assert config.position_embedding == found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tensor-model-parallel-size 8", "--tensor-model-parallel-size=8: "),
        ("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size=8: 4 layers"),
        ("--decoder-first-pipeline-num-layers 2", "--decoder-first-pipeline-num-layers=2: there is one stage"),
        ("--num-experts 4 --expert-model-parallel-size 8", "--expert-model-parallel-size=8: "),
        ("--context-parallel-size 8 --seq-length 36", "36"),
    ],
)
def test_a_layout_that_cannot_exist_is_refused(flags: str, words: str) -> None:
    """Held against the strategy, which refuses the same layouts when training begins."""
    with pytest.raises(ConfigError) as error:
        recipe(DENSE + flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("--moe-router-topk 4 --moe-router-group-topk 2", 2),
        ("--moe-router-topk 4 --moe-router-group-topk 4", 0),
        ("--moe-router-topk 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid", 0),
        ("--moe-router-topk 6 --moe-router-group-topk 2 --moe-router-score-function sigmoid", 3),
    ],
)
def test_groups_of_experts_are_ranked_as_by_megatron(flags: str, best: int) -> None:
    """Held against Megatron's rule, the sum of ``topk // group_topk``; 0 is our default, 1, or 2 with sigmoids."""
    line = BASE.replace("--num-experts 4", "--num-experts 16") + f"--moe-router-num-groups 4 {flags}"
    assert GPTModule(**recipe(line)["model"]["init_args"]).config.moe_router_group_score_topk == best


def test_more_groups_than_visited_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-router-group-topk=4: a token visits 2 experts"):
        recipe(BASE + "--moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 4")

"""Recipes from ``HL_*`` variables: the documented commands of the fork for Gaudi, and every variable by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron import LlamaModule, MixtralModule
from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.from_megatron.habana import SCRIPTS, habana_line
from lightning_megatron.tools.cli.from_megatron.recipe import Devices, recipe_of
from lightning_megatron.tools.cli.from_megatron.variables import (
    COMPUTED,
    FLAGS,
    HERE,
    NONE,
    SWITCHES,
    WITH_BINS,
    WITH_FP8,
)
from lightning_megatron.tools.cli.from_megatron.words import read_words
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.names import recipe_files

VOCABULARY = {"2": 32000, "3.1": 128256}


def made(script: str, vocabulary: int = 32000, **variables: str) -> dict[str, Any]:
    given = {f"HL_{name}": value for name, value in variables.items()}
    line = read_words(f"{habana_line(script, given).text} --vocab-size {vocabulary}")
    on_node, nodes = line.devices
    assert on_node is not None
    recipe = recipe_of(line, Devices(on_node, nodes or 1))
    assert line.without == {}
    return recipe


# The commands of the fork's README: version, size, machines; dp, tp, pp, cp; tokens; our recipe with the same numbers.
DOCUMENTED = [
    ("2", "7", 1, (2, 2, 2, 1), None, "llama2-7b"),
    ("2", "70", 4, (1, 8, 4, 1), None, "llama2-70b"),
    ("3.1", "8", 1, (4, 2, 1, 1), None, "llama3.1-8b"),
    ("3.1", "70", 8, (8, 8, 1, 1), None, "llama3.1-70b"),
    ("3.1", "8", 1, (2, 4, 1, 1), 32768, None),
    ("3.1", "70", 4, (2, 8, 1, 2), 32768, None),
]


@pytest.mark.parametrize(("version", "size", "nodes", "axes", "tokens", "ours"), DOCUMENTED)
def test_documented_commands_of_llama(
    version: str, size: str, nodes: int, axes: tuple[int, ...], tokens: int | None, ours: str | None
) -> None:
    given = dict(zip(("DP", "TP", "PP", "CP"), map(str, axes), strict=True))
    given |= {"LLAMA_VER": version, "LLAMA_MODEL_SIZE": size, "NUM_NODES": str(nodes), "CKP_ACT": "2"}
    given |= {"SEQ_LEN": str(tokens)} if tokens else {}
    recipe = made("llama", VOCABULARY[version], **given)
    dp, tp, pp, cp = axes
    trainer, strategy = recipe["trainer"], recipe["trainer"]["strategy"]["init_args"]
    assert (trainer["devices"], trainer["num_nodes"]) == (8, nodes)
    assert [strategy.get(axis, 1) for axis in ("tp", "pp", "cp")] == [tp, pp, cp]
    assert strategy["recompute"] == "selective"
    data = recipe["data"]["init_args"]
    assert data["seq_length"] == (tokens or {"2": 4096, "3.1": 8192}[version])
    assert data["batch_size"] * dp == {"2": 1024, "3.1": 2048}[version]
    module = LlamaModule(**recipe["model"]["init_args"])
    parameters = {"7": 6_738_415_616, "8": 8_030_261_248}
    parameters["70"] = 68_976_648_192 if version == "2" else 70_553_706_496
    assert module.config.num_parameters() == parameters[size]
    if ours:
        numbers = contents_of(recipe_files(ours))["model"]["init_args"]
        same = ("lr", "min_lr", "warmup_steps", "decay_steps", "lr_schedule", "weight_decay", "betas")
        assert {name: recipe["model"]["init_args"][name] for name in same} == {name: numbers[name] for name in same}
        assert recipe["model"]["init_args"]["eps"] == numbers.get("eps", 1e-8)


def test_documented_command_of_mixtral() -> None:
    sizes = {"NUM_NODES": "4", "DP": "4", "MOE_EP": "1", "CKP_ACT": "3", "DIST_OPTIMIZER": "1"}
    recipe = made("mixtral", **sizes)
    module = MixtralModule(**recipe["model"]["init_args"])
    assert module.config.num_parameters() == 46_702_792_704
    config = module.config
    assert (config.moe_capacity_bins, config.moe_token_dispatcher, config.moe_aux_loss_coeff) == (10, "alltoall", 0.02)
    assert config.moe_router_pre_softmax
    strategy = recipe["trainer"]["strategy"]["init_args"]
    assert (strategy["tp"], strategy["recompute"], strategy["distributed_optimizer"]) == (8, ["moe"], True)
    assert recipe["data"]["init_args"]["batch_size"] * 4 == 128, "2^22 tokens"
    dynamic = made("mixtral", **sizes, MOE_DYNAMIC="1", MOE_NUM_CAPACITY_BINS="0")
    config = MixtralModule(**dynamic["model"]["init_args"]).config
    assert (config.moe_dynamic, config.moe_capacity_bins) == (True, 0)


def test_fp8_measures_once_a_step() -> None:
    fp8 = made("llama", 128256, DP="4", TP="2", PP="1", FP8="1", SEQ_PARALLEL="0")
    arguments = fp8["trainer"]["strategy"]["init_args"]
    assert arguments["ops"]["linear_fp8"] == "auto"
    expected = {"amax_history_len": 32, "amax_compute": "max", "margin": 0, "keep_weights": False}
    assert arguments["fp8"] == expected | {"first_layers": 0, "last_layers": 0}
    assert not arguments["sequence_parallel"]


TABLES = (FLAGS, SWITCHES, WITH_BINS, WITH_FP8, COMPUTED, HERE, NONE)
VALUES = {
    "HL_TP": {"HL_TP": "4", "HL_DP": "1"}, "HL_PP": {"HL_PP": "4", "HL_DP": "1"}, "HL_CP": {"HL_CP": "2", "HL_DP": "1"},
    "HL_CP_COMM_TYPE": {"HL_CP_COMM_TYPE": "a2a", "HL_CP": "2", "HL_DP": "1"}, "HL_GBS": {"HL_GBS": "64"},
    "HL_SEQ_LEN": {"HL_SEQ_LEN": "1024"}, "HL_HIDDEN_SIZE": {"HL_HIDDEN_SIZE": "1024"},
    "HL_NUM_HEADS": {"HL_NUM_HEADS": "64"}, "HL_NUM_QUERY_GROUPS": {"HL_NUM_QUERY_GROUPS": "4"},
    "HL_OPTIMIZER": {"HL_OPTIMIZER": "sgd"}, "HL_TOKENIZER_TYPE": {"HL_TOKENIZER_TYPE": "GPT2BPETokenizer"},
    "HL_TOKEN_DISPATCHER_TYPE": {"HL_TOKEN_DISPATCHER_TYPE": "allgather", "HL_MOE_NUM_CAPACITY_BINS": "0"},
    "HL_MOE_EXPERT_CAPACITY_FACTOR": {"HL_MOE_EXPERT_CAPACITY_FACTOR": "1.5", "HL_MOE_NUM_CAPACITY_BINS": "0"},
    "HL_MOE_TOKEN_DROP_POLICY": {
        "HL_MOE_TOKEN_DROP_POLICY": "position", "HL_MOE_EXPERT_CAPACITY_FACTOR": "1.5", "HL_MOE_NUM_CAPACITY_BINS": "0"
    },
    "HL_MOE_PAD_EXPERT_INPUT_TO_CAPACITY": {
        "HL_MOE_PAD_EXPERT_INPUT_TO_CAPACITY": "1", "HL_MOE_EXPERT_CAPACITY_FACTOR": "1.5",
        "HL_MOE_NUM_CAPACITY_BINS": "0",
    },
    "HL_MOE_LOAD_BALANCING_TYPE": {"HL_MOE_LOAD_BALANCING_TYPE": "none"},
    "HL_MOE_DYNAMIC": {"HL_MOE_DYNAMIC": "1", "HL_MOE_NUM_CAPACITY_BINS": "0"}, "HL_MOE_TOPK": {"HL_MOE_TOPK": "3"},
    "HL_MOE_NUM_EXPERTS": {"HL_MOE_NUM_EXPERTS": "16"}, "HL_DROPOUT": {"HL_DROPOUT": "0.1"},
    "HL_MOE_AUX_LOSS_COEFF": {"HL_MOE_AUX_LOSS_COEFF": "0.5"}, "HL_MOE_ZLOSS_COEFF": {"HL_MOE_ZLOSS_COEFF": "0.5"},
    "HL_USE_FUSED_SDPA": {"HL_USE_FUSED_SDPA": "0"}, "HL_USE_FAST_SOFTMAX": {"HL_USE_FAST_SOFTMAX": "0"},
    "HL_USE_TORCH_COMPILE": {"HL_USE_TORCH_COMPILE": "1"}, "HL_MICRO_BATCH": {"HL_MICRO_BATCH": "2"},
    "HL_NUM_LAYERS": {"HL_NUM_LAYERS": "8"}, "HL_FFN_HIDDEN_SIZE": {"HL_FFN_HIDDEN_SIZE": "64"},
    **{name: {name: "7"} for name in (
        "HL_TRAIN_ITERS", "HL_LR_WARMUP_ITERS", "HL_EVAL_ITERS", "HL_EVAL_INTERVAL", "HL_LOG_INTERVAL",
        "HL_NUM_WORKERS", "HL_DATA_CACHE_DIR", "HL_CACHE_PATH", "HL_TENSORBOARD_DIR", "HL_KILL_SWITCH_FILE",
        "HL_KILL_SWITCH",
        "HL_DATA_DIR_ROOT", "HL_DATA_FILE_PREFIX", "HL_TOKENIZER_MODEL", "HL_RESULTS_DIR", "HL_RESULTS_DIR_PREFIX",
        "HL_CHECKPOINTS_DIR", "HL_LOAD_DIR", "HL_SAVE_INTERVAL", "HL_PROFILE_TYPE",
    )},
    "HL_SAVE": {"HL_SAVE": "0"}, "HL_CKP_ACT": {"HL_CKP_ACT": "1"}, "HL_FP8": {"HL_FP8": "1"},
    "HL_RECOMPUTE_NUM_LAYERS": {"HL_RECOMPUTE_NUM_LAYERS": "2", "HL_CKP_ACT": "1"},
    "HL_PROFILE_STEP_START": {"HL_PROFILE_STEP_START": "2", "HL_PROFILE_TYPE": "pt"},
    "HL_PROFILE_STEP_END": {"HL_PROFILE_STEP_END": "9", "HL_PROFILE_TYPE": "pt"},
    "HL_FP8_FORMAT": {"HL_FP8_FORMAT": "e5m2", "HL_FP8": "1"}, "HL_FP8_MARGIN": {"HL_FP8_MARGIN": "2", "HL_FP8": "1"},
    "HL_FP8_AMAX_COMPUTE_ALGO": {"HL_FP8_AMAX_COMPUTE_ALGO": "most_recent", "HL_FP8": "1"},
    "HL_FP8_AMAX_HISTORY_LEN": {"HL_FP8_AMAX_HISTORY_LEN": "3", "HL_FP8": "1"},
    "HL_CACHE_FP8_WEIGHT": {"HL_CACHE_FP8_WEIGHT": "1", "HL_FP8": "1"},
    "HL_LLAMA_VER": {"HL_LLAMA_VER": "1", "HL_LLAMA_MODEL_SIZE": "7"},
    "HL_LLAMA_MODEL_SIZE": {"HL_LLAMA_MODEL_SIZE": "70"},
    "HL_NUM_NODES": {"HL_NUM_NODES": "2", "HL_DP": "4"},
    "HL_DEVICES_PER_NODE": {"HL_DEVICES_PER_NODE": "4", "HL_DP": "1"},
    "HL_DP": {"HL_DP": "1", "HL_PP": "4"}, "HL_ETP": {"HL_ETP": "2"},
    "HL_MOE_EP": {"HL_MOE_EP": "2", "HL_ETP": "1"},
    "HL_MOE_NUM_CAPACITY_BINS": {"HL_MOE_NUM_CAPACITY_BINS": "4"},
    "HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL": {
        "HL_MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL": "7", "HL_MOE_TOKEN_DISTRIBUTION_LOGGING": "1"
    },
    "HL_MOE_CAPACITY_BINS_EXP_BASE": {"HL_MOE_CAPACITY_BINS_EXP_BASE": "1.7"},
    "HL_MOE_CAPACITY_BINS_ALIGNMENT": {"HL_MOE_CAPACITY_BINS_ALIGNMENT": "32"},
    "HL_MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL": {"HL_MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL": "100"},
    "HL_MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR": {"HL_MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR": "0.5"},
    "HL_SEQ_PARALLEL": {"HL_SEQ_PARALLEL": "0"}, "HL_BF16": {"HL_BF16": "0"},
    "HL_USE_DISTRIBUTED_OPTIMIZER": {"HL_USE_DISTRIBUTED_OPTIMIZER": "0"},
    "HL_DETERMINISTIC_MODE": {"HL_DETERMINISTIC_MODE": "0"},
    "HL_MOE_ROUTER_PRE_SOFTMAX": {"HL_MOE_ROUTER_PRE_SOFTMAX": "0"},
    **{name: {name: "1"} for name in
       ("HL_OVERLAP_GRAD_REDUCE", "HL_DIST_OPTIMIZER", "HL_MOE_TOKEN_DISTRIBUTION_LOGGING")},
}  # fmt: skip
"""For each variable of a table of flags another value than its default, and what it needs to mean something."""


def of_variables(given: dict[str, str], script: str) -> Any:
    one_rank = {"HL_MOE_EP": "1"} if script == "mixtral" else {}  # the script's own default needs more machines
    line = habana_line(script, one_rank | given)
    read = read_words(f"{line.text} --vocab-size 32000")
    on_node, nodes = read.devices
    assert on_node is not None
    return recipe_of(read, Devices(on_node, nodes or 1)), read.without, line.without


def script_of(name: str) -> str:
    is_experts = "MOE" in name or name in ("HL_ETP", "HL_TOKEN_DISPATCHER_TYPE", "HL_DIST_OPTIMIZER")
    return "mixtral" if is_experts or name in ("HL_CACHE_PATH", "HL_KILL_SWITCH") else "llama"


def base_of(name: str, given: dict[str, str]) -> dict[str, str]:
    """The script's defaults, with what the variable needs."""
    return {each: value for each, value in given.items() if each != name}


@pytest.mark.parametrize("name", [*FLAGS, *SWITCHES, *WITH_BINS, *WITH_FP8, *COMPUTED])
def test_no_variable_is_ignored(name: str) -> None:
    if name == "HL_MIXTRAL_MODEL":  # there is one
        return
    given, script = VALUES[name], script_of(name)
    try:
        without = of_variables(base_of(name, given), script)
    except ConfigError:
        without = None  # it needs the variable
    assert of_variables(given, script) != without


@pytest.mark.parametrize("name", [*HERE, *NONE])
def test_other_variables_are_named_or_change_nothing(name: str) -> None:
    recipe, _, without = of_variables({name: "1"}, "llama")
    assert recipe == of_variables({}, "llama")[0]
    assert (name in without) == (name in NONE)
    assert of_variables({name: "0"}, "llama")[2] == {}


def test_no_variable_is_in_two_tables_and_defaults_are_of_known_ones() -> None:
    names = [name for table in TABLES for name in table]
    assert len(names) == len(set(names))
    assert all(set(defaults) <= set(names) for defaults in SCRIPTS.values())


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        ("llama", {"HL_DP": "4"}, "DP x TP x PP x CP are 16 ranks, the machines have 8 devices; nearest valid: 2"),
        ("llama", {"HL_LLAMA_MODEL_SIZE": "9"}, "HL_LLAMA_VER='3.1 of 9': is no model of the script"),
        ("llama", {"HL_TP": "two"}, "HL_TP='two': must be a whole number"),
        ("llama", {"HL_TP": "0"}, "HL_TP='0': must be a whole number of at least 1"),
        ("llama", {"HL_BF16": "yes"}, "HL_BF16='yes': must be 0 or 1"),
        ("llama", {"HL_CKP_ACT": "3"}, "HL_CKP_ACT='3'"),
        ("mixtral", {"HL_MIXTRAL_MODEL": "8x22b"}, "nearest valid: 8x7b"),
        ("mixtral", {"HL_MOE_DYNAMIC": "1"}, "cannot be beside HL_MOE_NUM_CAPACITY_BINS"),
        ("mixtral", {"HL_MOE_EXPERT_CAPACITY_FACTOR": "1.5"}, "cannot be beside HL_MOE_EXPERT_CAPACITY_FACTOR"),
    ],
)
def test_what_the_scripts_refuse_is_refused(script: str, given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        habana_line(script, given)
    assert words in str(error.value)


def test_the_command_reads_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vars.sh").write_text(
        '#!/bin/bash\nexport HL_LLAMA_VER=2\nHL_LLAMA_MODEL_SIZE="7" # small\n\nHL_ODD=1\n'
    )
    words = ["from-megatron-args", "--env", "llama", "--env-file", str(tmp_path / "vars.sh"), "--vocab-size 32000"]
    assert main([*words, "--devices", "8"]) == 1
    out, err = capsys.readouterr()
    assert "no counterpart: HL_ODD: not known here; nearest: " in err
    assert yaml.safe_load(out) == made("llama", LLAMA_VER="2", LLAMA_MODEL_SIZE="7")
    for name, value in {"HL_LLAMA_VER": "2", "HL_LLAMA_MODEL_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)
    assert main(["from-megatron-args", "--env", "llama", "--vocab-size 32000 --lr 1e-5"]) == 0
    out, _ = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["init_args"]["lr"] == 1e-5
    assert main(["from-megatron-args", "--env-file", "x", "--num-layers 2"]) == 2


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("llama", {"HL_MOE_NUM_EXPERTS": "8"}),
        ("llama", {"HL_MOE_EP": "4"}),
        ("llama", {"HL_ETP": "1"}),
        ("llama", {"HL_MIXTRAL_MODEL": "8x7b"}),
        ("llama", {"HL_FP8_MARGIN": "3"}),
        ("llama", {"HL_RECOMPUTE_NUM_LAYERS": "4"}),
        ("llama", {"HL_PROFILE_STEP_END": "9"}),
        ("mixtral", {"HL_LLAMA_VER": "2"}),
        ("mixtral", {"HL_SAVE_INTERVAL": "7"}),
        ("mixtral", {"HL_MOE_CAPACITY_BINS_ALIGNMENT": "32", "HL_MOE_NUM_CAPACITY_BINS": "0"}),
        ("mixtral", {"HL_MOE_TOKEN_DROP_POLICY": "position"}),
    ],
)
def test_a_variable_that_changes_nothing_is_named(script: str, given: dict[str, str]) -> None:
    """Held against the line without it, which is the same; a variable that has its default anyway is not named."""
    name, *others = given
    line = habana_line(script, given)
    assert line.text == habana_line(script, {each: given[each] for each in others}).text
    assert list(line.without) == [name]
    if name in SCRIPTS[script]:
        assert habana_line(script, given | {name: SCRIPTS[script][name]}).without == {}


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        (
            "llama",
            {"HL_TP": "4", "HL_DP": "1", "HL_NUM_HEADS": "34", "HL_NUM_QUERY_GROUPS": "34", "HL_HIDDEN_SIZE": "2176"},
            "--tensor-model-parallel-size=4",
        ),
        (
            "llama",
            {"HL_PP": "8", "HL_TP": "1", "HL_DP": "1", "HL_NUM_LAYERS": "12"},
            "--pipeline-model-parallel-size=8: 12 layers",
        ),
        ("mixtral", {}, "--expert-model-parallel-size=8: ep x etp = 8 x 8"),
    ],
)
def test_a_layout_of_variables_that_cannot_exist_is_refused(script: str, given: dict[str, str], words: str) -> None:
    """Held against the strategy, which refuses the same layouts when training begins."""
    line = read_words(f"{habana_line(script, given).text} --vocab-size 32000")
    with pytest.raises(ConfigError) as error:
        recipe_of(line, Devices(8))
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["HL_SAVE", "HL_FP8", "HL_BF16"])
def test_switches_are_0_or_1(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='yes': must be 0 or 1"):
        habana_line("llama", {name: "yes"})

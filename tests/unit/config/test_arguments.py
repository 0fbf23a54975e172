"""Wrong types and values of single arguments, with the text a user reads; and names that other programs use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer

from lightning_megatron import (
    ConfigError,
    KillSwitch,
    LlamaModule,
    MegatronDataModule,
    MegatronPrecision,
    MegatronStrategy,
    ParallelLayout,
    Throughput,
    TransformerConfig,
)
from lightning_megatron.arguments import above, argument_problems, at_least, checked
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import problems_of
from lightning_megatron.optim.loss_scale import DynamicLossScale

WHOLE = "must be a whole number of at least 1"
NAN = float("nan")


def strategy(**given: Any) -> Callable[[], object]:
    return lambda: MegatronStrategy(**given)


def llama(**given: Any) -> Callable[[], object]:
    return lambda: LlamaModule(**{"config": "llama-tiny"} | given)


def data(**given: Any) -> Callable[[], object]:
    return lambda: MegatronDataModule(**{"data_path": "corpus", "seq_length": 8} | given)


FAULTS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "sizes of other types": (
        strategy(tp="2", pp=None, cp=1.5, ep=True, vpp=[1]),
        [
            f"tp='2': {WHOLE}; nearest valid: 2, 1",
            f"pp=None: {WHOLE}; nearest valid: 1",
            f"cp=1.5: {WHOLE}; nearest valid: 1, 2",
            f"ep=True: {WHOLE}; nearest valid: 1",
            f"vpp=[1]: {WHOLE}; nearest valid: 1",
        ],
    ),
    "what used to pass": (
        strategy(bucket_size=1.5, distributed_optimizer="x", micro_batch_size="1", timeout=30),
        [
            f"micro_batch_size='1': {WHOLE} or None; nearest valid: 1, None",
            "distributed_optimizer='x': must be True or False; nearest valid: True",
            f"bucket_size=1.5: {WHOLE} or None; nearest valid: 1, 2, None",
            "timeout=30: must be a timedelta above 0:00:00 or None; nearest valid: None, 0:10:00",
        ],
    ),
    "words": (
        strategy(pipeline_schedule=3, cp_comm_type="rings", pipeline_layout=5, recompute=["mlpp"], ops="x=y"),
        [
            "pipeline_schedule=3: must be 'gpipe' or '1f1b' or 'interleaved' or 'zero-bubble' or None; "
            "nearest valid: None",
            "cp_comm_type='rings': unknown; nearest valid: p2p, all_gather, a2a",
            "pipeline_layout=5: must be text or None; nearest valid: None",
            "recompute='mlpp': no part of a layer; nearest valid: mlp",
            "ops='x': there is no such op; nearest valid: attention, rms_norm, layer_norm, rope, "
            "mixture_of_experts, grouped_linear, linear_fp8, adamw",
        ],
    ),
    "names of other programs": (
        strategy(tensor_model_parallel_size=2, dp=2, tpp=2, pp=0),
        [
            "tensor_model_parallel_size=2: no such argument of MegatronStrategy; nearest valid: tp",
            "dp=2: no such argument of MegatronStrategy: it is what tp, pp and cp leave of devices x num_nodes",
            "tpp=2: no such argument of MegatronStrategy; nearest valid: tp, pp, vpp",
            f"pp=0: {WHOLE}; nearest valid: 1",
        ],
    ),
    "a layout": (
        lambda: ParallelLayout(sequence_parallel="yes"),  # type: ignore[arg-type]
        ["sequence_parallel='yes': must be True or False or None; nearest valid: None, True, False"],
    ),
    "a model": (
        llama(num_layers="3", init_std=NAN, norm_epsilon=-1, moe_layers=3, rope_scaling={"factor": 0}, activation=None),
        [
            "moe_layers=3: must be a list; nearest valid: ()",
            f"num_layers='3': {WHOLE}; nearest valid: 3, 1",
            "norm_epsilon=-1: must be a finite number of at least 0.0; nearest valid: 0.0, 1e-05",
            "activation=None: must be text; nearest valid: gelu",
            "init_std=nan: must be a finite number of at least 0.0; nearest valid: 0.02, 0.0",
            "rope_scaling.factor=0: must be a finite number above 0; nearest valid: 8.0",
        ],
    ),
    "fields of other programs": (
        llama(num_hidden_layers=3, seq_length=8),
        [
            "num_hidden_layers=3: no such field of TransformerConfig; nearest valid: num_layers",
            "seq_length=8: no such field of TransformerConfig; nearest valid: max_position_embeddings",
        ],
    ),
    "fields that are missing": (
        llama(config={"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}),
        ["vocab_size=None: TransformerConfig needs it", "max_position_embeddings=None: TransformerConfig needs it"],
    ),
    "training": (
        llama(lr="x", betas=(0.9,), warmup_steps=-1, lr_schedule="cosin"),
        [
            "lr='x': must be a finite number of at least 0.0; nearest valid: 0.0003, 0.0",
            "warmup_steps=-1: must be a whole number of at least 0; nearest valid: 0",
            "lr_schedule='cosin': unknown; nearest valid: cosine",
            "betas=(0.9,): must be a list of two, of at least 0 and less than 1; nearest valid: (0.9, 0.95)",
        ],
    ),
    "a schedule": (
        llama(lr=1e-3, min_lr=1.0, warmup_steps=5, decay_steps=5, lr_schedule="cosine"),
        [
            "min_lr=1.0: must lie between 0 and max_lr=0.001",
            "decay_steps=5: the decay must end after the warm-up, 5; the warm-up counts as part of it",
        ],
    ),
    "a schedule with a tail": (
        llama(lr_schedule="wsd"),
        ["tail_steps=0: the tail of a wsd schedule takes between 1 and decay - warmup = 1"],
    ),
    "data": (
        data(
            seq_length=0, batch_size="4", val_samples=-1, split="1,x", data_path=[-1, "a"], tokenizer_type="Nulltoken"
        ),
        [
            "data_path=[-1, 'a']: every weight must be a positive number, and so their sum: leave out what is "
            "not to be read",
            f"seq_length=0: {WHOLE}; nearest valid: 1",
            f"batch_size='4': {WHOLE}; nearest valid: 4, 1",
            "split='1,x': must be one to three numbers, none negative and not all zero: training, validation, test; "
            "nearest valid: 969,30,1, 98,2,0, 1,0,0",
            "val_samples=-1: must be a whole number of at least 0 or None; nearest valid: 0, None",
            "tokenizer_type='Nulltoken': unknown; nearest valid: NullTokenizer",
        ],
    ),
    "names of other programs for data": (
        data(valid_data_path="b", micro_batch_size=1),
        [
            "valid_data_path='b': no such argument of MegatronDataModule; nearest valid: val_data_path",
            "micro_batch_size=1: no such argument of MegatronDataModule: it is an argument of the strategy",
        ],
    ),
    "data without its arguments": (
        lambda: MegatronDataModule(batch_size=2),  # type: ignore[call-arg]
        ["data_path=None: MegatronDataModule needs it", "seq_length=None: MegatronDataModule needs it"],
    ),
    "precision": (
        lambda: MegatronPrecision(16),  # type: ignore[arg-type]
        ["precision=16: must be text; nearest valid: 32-true"],
    ),
    "a loss scale": (
        lambda: DynamicLossScale(scale=NAN, hysteresis=1.5),  # type: ignore[arg-type]
        [
            "scale=nan: must be a finite number above 0.0; nearest valid: 4294967296.0",
            f"hysteresis=1.5: {WHOLE}; nearest valid: 1, 2",
        ],
    ),
    "callbacks": (
        lambda: (problems_of(Throughput, 0), KillSwitch(path=3)),  # type: ignore[arg-type]
        ["path=3: must be text or a PathLike or None; nearest valid: None"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_arguments_are_told_at_once(fault: str) -> None:
    build, expected = FAULTS[fault]
    with pytest.raises(ConfigError) as caught:
        build()
    assert [str(problem) for problem in caught.value.problems] == expected


QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize("backend", ["bogus", "nccl"])
def test_a_backend_that_the_devices_do_not_have_is_refused_with_the_trainer(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"process_group_backend='{backend}': no backend .* cpu; nearest valid: gloo"):
        Trainer(strategy=MegatronStrategy(process_group_backend=backend), **QUIET)
    for good in ("gloo", "cpu:gloo,cuda:nccl"):
        Trainer(strategy=MegatronStrategy(process_group_backend=good), **QUIET)


@pytest.mark.parametrize("batches", [0, -1, 1.5])
@pytest.mark.parametrize("clip", [-1, NAN])
def test_what_lightning_lets_pass_of_the_trainers_arguments_is_refused_before_launch(batches: Any, clip: float) -> None:
    chosen = MegatronStrategy()
    trainer = Trainer(strategy=chosen, accumulate_grad_batches=batches, gradient_clip_val=clip, **QUIET)
    with pytest.raises(ConfigError) as caught:
        chosen.check(LlamaModule("llama-tiny"), trainer=trainer)
    assert [problem.argument for problem in caught.value.problems] == ["accumulate_grad_batches", "gradient_clip_val"]


def test_files_and_shares_are_looked_at_before_launch(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(30), [30])
    (tmp_path / "broken.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "broken.bin").touch()
    paths = [0.5, f"{tmp_path}/a", 0.3, f"{tmp_path}/broken", 0.2, f"{tmp_path}/none"]
    found = MegatronDataModule(paths, seq_length=8).data_problems()
    assert [problem.argument for problem in found] == ["data_path"] * 2
    assert "broken.idx: truncated: 7 bytes" in str(found[0])
    assert "none.idx and " in str(found[1])
    (share,) = MegatronDataModule(tmp_path / "a", seq_length=8, split="1,1,1", test_samples=4).data_problems()
    assert str(share).startswith("test_samples=4: no token of ")
    assert MegatronDataModule(tmp_path / "a", seq_length=8, split="1,1,1").data_problems() == []


def test_an_unknown_compiler_is_refused_before_launch() -> None:
    chosen = MegatronStrategy(compile="inducter")
    Trainer(strategy=chosen, **QUIET)
    with pytest.raises(ConfigError, match=r"compile='inducter': no backend of torch.compile; nearest valid: inductor"):
        chosen.check(LlamaModule("llama-tiny"))


def test_checked_arguments_keep_their_signature() -> None:
    """Annotations are resolved, as LightningCLI does."""
    names = list(inspect.signature(MegatronStrategy).parameters)
    assert names[:2] == ["tp", "pp"]
    assert inspect.signature(MegatronDataModule.__init__).parameters["seq_length"].annotation == "int"


class Thing:
    @checked(at=above(timedelta(0)), size=at_least(2))
    def __init__(self, path: str | Path, *rest: int, size: int = 3, at: timedelta | None = None, **more: Any) -> None:
        self.given = path, rest, size, at, more


def test_arguments_arrive_as_they_were_given() -> None:
    assert Thing("a", 1, 2, size=4, more=5).given == ("a", (1, 2), 4, None, {"more": 5})
    assert Thing(Path("a")).given == (Path("a"), (), 3, None, {})
    with pytest.raises(ConfigError, match=r"at=datetime\.timedelta"):
        Thing("a", at=timedelta(-1))
    with pytest.raises(TypeError, match="too many"):
        MegatronPrecision("32-true", None, None)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [None, 3, "x", object()])
def test_anything_fits_where_any_is_said(value: Any) -> None:
    assert not argument_problems({"one": value, "several": [value]}, {"one": Any, "several": list[Any]}, {}, {})


def test_lists_do_for_tuples_and_mappings_for_scalings() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 8}
    config = TransformerConfig(**sizes, moe_layers=[0, 1], rope_scaling={"factor": 2})  # type: ignore[arg-type]
    assert config.moe_layers == (0, 1)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 2


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"])
def test_a_kind_of_parallelism_by_its_long_name_leads_to_the_short_one(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        MegatronStrategy(**{name: 2})  # type: ignore[arg-type]
    (problem,) = error.value.problems
    assert problem.nearest == (f"{name[0]}p",)

"""Every fault of a layout, a model or a batch that can be known before training, with the text a user reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_megatron import KillSwitch, MegatronDataModule, MegatronStrategy
from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset

LLAMA_8B = preset("llama3.1-8b")  # 32 layers and heads, 8 groups, ffn 14336, 131072 positions, vocabulary 128256


def check(layout: ParallelLayout, world_size: int | None = None, model: Any = None, **batch: Any) -> Callable[[], None]:
    return lambda: layout.validate(world_size, model, BatchShape(**batch) if batch else None)


def tiny(**fields: Any) -> Callable[[], TransformerConfig]:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    return lambda: TransformerConfig(**sizes | {"max_position_embeddings": 32} | fields)


def on_tp(size: int, layer: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: layer(*args, ParallelMesh(ParallelLayout(tp=size).resolve(size)), **kwargs)


TP4 = ParallelLayout(tp=4)
SIZE = "a size must be a whole number of at least 1; nearest valid: 1"
BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    # --- layouts in themselves
    "size zero": (lambda: ParallelLayout(tp=0), [f"tp=0: {SIZE}"]),
    "size of a wrong type": (lambda: ParallelLayout(dp="2"), [f"dp='2': {SIZE}"]),  # type: ignore[arg-type]
    "size true": (lambda: ParallelLayout(pp=True), [f"pp=True: {SIZE}"]),
    "several sizes": (
        lambda: ParallelLayout(tp=-1, cp=0, etp=0),
        [f"tp=-1: {SIZE}", f"cp=0: {SIZE}", f"etp=0: {SIZE}"],
    ),
    "sequence parallel without tp": (
        lambda: ParallelLayout(sequence_parallel=True),
        [
            "sequence_parallel=True: sequence parallelism shards over tensor-parallel ranks and tp=1 has none: "
            "raise tp, or leave it out; nearest valid: False, None"
        ],
    ),
    "chunks without a pipeline": (
        lambda: ParallelLayout(vpp=2),
        ["vpp=2: interleaved chunks need a pipeline, and pp=1 has none: raise pp, or leave vpp out; nearest valid: 1"],
    ),
    # --- layouts and the number of processes
    "world does not divide": (
        check(ParallelLayout(tp=3), 8),
        [
            "tp=3: tp x pp x cp = 3 x 1 x 1 = 3 does not divide the world size 8 (devices x num_nodes); "
            "nearest valid: 2, 4, 1"
        ],
    ),
    "world does not divide, two sizes could mend it": (
        check(ParallelLayout(tp=2, pp=8), 8),
        [
            "tp=2: tp x pp x cp = 2 x 8 x 1 = 16 is more than the world size 8 (devices x num_nodes): "
            "try devices=16; nearest valid: 1",
            "pp=8: tp x pp x cp = 2 x 8 x 1 = 16 is more than the world size 8 (devices x num_nodes): "
            "try devices=16; nearest valid: 4, 2, 1",
        ],
    ),
    "world does not divide, no single size can mend it": (
        check(ParallelLayout(tp=3, pp=5), 8),
        [
            "tp x pp='3 x 5': tp x pp x cp = 3 x 5 x 1 = 15 is more than the world size 8 (devices x num_nodes): "
            "try devices=15; nearest valid: 2 x 4, 4 x 2, 1 x 4"
        ],
    ),
    "more than there is, as where devices are not given": (
        check(ParallelLayout(tp=2), 1),
        [
            "tp=2: tp x pp x cp = 2 x 1 x 1 = 2 is more than the world size 1 (devices x num_nodes): try devices=2; "
            "nearest valid: 1"
        ],
    ),
    "dp is not what remains": (
        check(ParallelLayout(tp=2, dp=3), 8),
        ["dp=3: tp x pp x cp = 2 x 1 x 1 = 2 leaves 4 of the world size 8 for data parallelism; nearest valid: 4"],
    ),
    "experts do not fold over the ranks": (
        check(ParallelLayout(tp=2, ep=3), 8),
        ["ep=3: ep x etp = 3 x 2 does not divide dp x cp x tp = 4 x 1 x 2; nearest valid: 2, 4, 1"],
    ),
    "expert tensor parallelism does not fold over the ranks": (
        check(ParallelLayout(tp=2, ep=2, etp=3), 8),
        ["etp=3: ep x etp = 2 x 3 does not divide dp x cp x tp = 4 x 1 x 2; nearest valid: 2, 4, 1"],
    ),
    # --- layouts and a model
    "fewer query groups than ranks": (
        check(ParallelLayout(tp=16), None, LLAMA_8B),
        ["tp=16: 8 query groups (key/value heads) do not split over 16 ranks; nearest valid: 8, 4, 2"],
    ),
    "heads, groups and features do not split": (
        check(ParallelLayout(tp=3), None, LLAMA_8B),
        [
            "tp=3: 32 attention heads do not split over 3 ranks; nearest valid: 2, 4, 1",
            "tp=3: 14336 feed-forward features (ffn_hidden_size) do not split over 3 ranks; nearest valid: 2, 4, 1",
            "tp=3: 8 query groups (key/value heads) do not split over 3 ranks; nearest valid: 2, 4, 1",
        ],
    ),
    "nearest sizes suit heads, groups and features at once": (
        check(ParallelLayout(tp=5), None, tiny(num_attention_heads=12, hidden_size=48, ffn_hidden_size=200)()),
        ["tp=5: 12 attention heads do not split over 5 ranks; nearest valid: 4, 2, 1"],
    ),
    "layers do not split": (
        check(ParallelLayout(pp=3), None, LLAMA_8B),
        ["pp=3: 32 layers (num_layers) do not split over pp x vpp = 3 x 1 stages; nearest valid: 2, 4, 1"],
    ),
    "chunks do not split": (
        check(ParallelLayout(pp=4, vpp=3), None, LLAMA_8B),
        ["vpp=3: 32 layers (num_layers) do not split over pp x vpp = 4 x 3 stages; nearest valid: 2, 4, 1"],
    ),
    "unknown way to share a context, and a size": (
        lambda: ParallelLayout(cp=0, cp_comm_type="allgather"),
        [f"cp=0: {SIZE}", "cp_comm_type='allgather': unknown; nearest valid: all_gather"],
    ),
    "heads left by tp do not split over cp": (
        check(ParallelLayout(tp=4, cp=3, cp_comm_type="a2a"), 12, LLAMA_8B),
        ["cp=3: cp_comm_type='a2a' splits heads, and 8 a rank (32 over tp=4) do not divide; nearest valid: 2, 4, 1"],
    ),
    "attention dropout on a ring": (
        check(ParallelLayout(cp=2), 2, LLAMA_8B.replace(attention_dropout=0.1)),
        [
            "cp_comm_type='p2p': attention on a ring cannot drop weights (attention_dropout=0.1): it merges "
            "sums over all of them; nearest valid: a2a, all_gather"
        ],
    ),
    "experts without a mixture": (
        check(ParallelLayout(ep=2), None, LLAMA_8B),
        ["ep=2: the model has no experts to share; nearest valid: 1"],
    ),
    # --- batches
    "batch does not split into micro-batches": (
        check(TP4, batch_size=12, micro_batch_size=5),
        ["micro_batch_size=5: a batch of 12 samples does not split into micro-batches of 5; nearest valid: 4, 6, 3"],
    ),
    "empty micro-batch": (
        check(TP4, batch_size=12, micro_batch_size=0),
        ["micro_batch_size=0: must be a whole number of at least 1 or None; nearest valid: 1, None"],
    ),
    "sequence does not split over tp": (
        check(TP4, seq_length=1023),
        ["seq_length=1023: sequence parallelism splits every sequence over tp=4 ranks; nearest valid: 1024, 1020"],
    ),
    "sequence shorter than tp": (
        check(TP4, seq_length=3),
        ["seq_length=3: sequence parallelism splits every sequence over tp=4 ranks; nearest valid: 4"],
    ),
    "sequence does not split over cp": (
        check(ParallelLayout(cp=2), seq_length=1022),
        ["seq_length=1022: context parallelism cuts every sequence into 2 x cp = 4 pieces; nearest valid: 1020, 1024"],
    ),
    "sequence does not split over cp and tp": (
        check(ParallelLayout(tp=2, cp=2), seq_length=1020),
        [
            "seq_length=1020: context and sequence parallelism cut every sequence into 2 x cp x tp = 8 pieces; "
            "nearest valid: 1016, 1024"
        ],
    ),
    "sequence longer than positions": (
        check(TP4, model=LLAMA_8B, seq_length=262144),
        ["seq_length=262144: longer than the model's max_position_embeddings=131072; nearest valid: 131072"],
    ),
    "vocabulary smaller than the tokenizer's": (
        check(TP4, model=LLAMA_8B, vocab_size=128257),
        ["vocab_size=128256: the tokenizer has 128257 tokens, more than the model; nearest valid: 128257"],
    ),
    "global batch is not the product": (
        check(ParallelLayout(tp=2), 8, batch_size=4, global_batch_size=64, accumulate_grad_batches=2),
        ["global_batch_size=64: batch_size x dp x accumulate_grad_batches = 4 x 4 x 2 = 32; nearest valid: 32"],
    ),
    "everything at once": (
        check(ParallelLayout(tp=16, ep=2), 24, LLAMA_8B, batch_size=3, micro_batch_size=2, seq_length=262145),
        [
            "tp=16: tp x pp x cp = 16 x 1 x 1 = 16 does not divide the world size 24 (devices x num_nodes); "
            "nearest valid: 12, 8, 24",
            "tp=16: 8 query groups (key/value heads) do not split over 16 ranks; nearest valid: 8, 4, 2",
            "ep=2: the model has no experts to share; nearest valid: 1",
            "micro_batch_size=2: a batch of 3 samples does not split into micro-batches of 2; nearest valid: 1, 3",
            "seq_length=262145: sequence parallelism splits every sequence over tp=16 ranks; "
            "nearest valid: 262144, 262160",
            "seq_length=262145: longer than the model's max_position_embeddings=131072; nearest valid: 131072",
        ],
    ),
    # --- models
    "unknown preset": (
        lambda: preset("lama3.1-8b"),
        ["config='lama3.1-8b': unknown preset; nearest valid: llama3.1-8b, llama3.1-70b, llama3.1-405b"],
    ),
    "unknown field": (
        lambda: LLAMA_8B.replace(num_layer=4),
        ["num_layer=4: no such field of TransformerConfig; nearest valid: num_layers, mtp_num_layers, moe_layers"],
    ),
    "unknown names": (
        tiny(activation="swigul", norm="layer_norm", position_embedding="rotary"),
        [
            "norm='layer_norm': unknown; nearest valid: layernorm, rmsnorm",
            "activation='swigul': unknown; nearest valid: swiglu, swiglu_clamped",
            "position_embedding='rotary': unknown; nearest valid: learned, rope, alibi, none",
        ],
    ),
    "dropout out of range": (
        tiny(hidden_dropout=1.0, attention_dropout=-0.1, label_smoothing=float("nan")),
        [
            "hidden_dropout=1.0: must be a finite number of at least 0.0 and less than 1.0; nearest valid: 0.0",
            "attention_dropout=-0.1: must be a finite number of at least 0.0 and less than 1.0; nearest valid: 0.0",
            "label_smoothing=nan: must be a finite number of at least 0.0 and less than 1.0; nearest valid: 0.0",
        ],
    ),
    "sizes and names of a model at once": (
        tiny(num_layers=0, hidden_size=64.0, activation="gelu_tan"),
        [
            "num_layers=0: must be a whole number of at least 1; nearest valid: 1",
            "hidden_size=64.0: must be a whole number of at least 1; nearest valid: 64, 1",
            "activation='gelu_tan': unknown; nearest valid: gelu_tanh, geglu_tanh, gelu",
        ],
    ),
    "heads do not divide the hidden size": (
        tiny(num_attention_heads=5, num_query_groups=5),
        [
            "num_attention_heads=5: hidden_size=64 does not split over the heads, and head_dim is not given; "
            "nearest valid: 4, 2, 8"
        ],
    ),
    "unequal groups": (
        tiny(num_query_groups=3),
        ["num_query_groups=3: num_attention_heads=4 does not split into groups of equal size; nearest valid: 2, 4, 1"],
    ),
    "odd head of rotary embedding": (
        tiny(head_dim=15, position_embedding="rope"),
        ["head_dim=15: rotary embedding rotates pairs of features; nearest valid: 14, 16"],
    ),
    "unknown field of rope scaling": (
        tiny(position_embedding="rope", rope_scaling={"factor": 8.0, "low_freq": 1.0}),
        ["rope_scaling['low_freq']=1.0: no such field; nearest valid: low_freq_factor"],
    ),
    # --- layers in a user's own module
    "output features do not split": (
        on_tp(4, ColumnParallelLinear, 8, 18),
        ["tp=4: out_features=18 does not split over tp=4 ranks; nearest valid: 3, 2, 6"],
    ),
    "output blocks do not split": (
        on_tp(4, ColumnParallelLinear, 8, 12, blocks=2),
        ["tp=4: out_features=12 in 2 blocks does not split over tp=4 ranks; nearest valid: 3, 2, 6"],
    ),
    "output does not split into blocks": (
        on_tp(1, ColumnParallelLinear, 8, 13, blocks=2),
        ["out_features=13: does not split into blocks=2 matrices; nearest valid: 12, 14"],
    ),
    "query groups do not split, built by hand": (
        lambda: GPTModel(tiny(num_query_groups=2)(), ParallelMesh(TP4.resolve(4))),
        ["tp=4: 2 query groups (key/value heads) do not split over 4 ranks; nearest valid: 2, 1"],
    ),
    "heads do not split over cp, built by hand": (
        lambda: GPTModel(tiny()(), ParallelMesh(ParallelLayout(cp=3, cp_comm_type="a2a").resolve(3))),
        ["cp=3: cp_comm_type='a2a' splits heads, and 4 a rank (4 over tp=1) do not divide; nearest valid: 2, 4, 1"],
    ),
    "decoding with caches over cp": (
        lambda: GPTModel(tiny()(), ParallelMesh(ParallelLayout(cp=2).resolve(2)))(
            torch.zeros(1, 4, dtype=torch.long), caches=[KVCache(), KVCache()]
        ),
        ["cp=2: decoding with caches needs every token on every rank: load the checkpoint with cp=1; nearest valid: 1"],
    ),
    "no such signal": (
        lambda: KillSwitch(signals=["SIGTERMS"]),
        ["signals='SIGTERMS': no signal; nearest valid: SIGTERM, SIGVTALRM, SIGTSTP"],
    ),
    "a seed below zero": (
        lambda: MegatronDataModule("nowhere", seq_length=8, seed=-1),
        ["seed=-1: must be a whole number of at least 0; nearest valid: 0, 1234"],
    ),
    "what may differ, as text": (
        lambda: MegatronStrategy(may_differ="code.*"),
        ["may_differ='code.*': must be a list or None; nearest valid: None"],
    ),
    "input features do not split": (
        on_tp(4, RowParallelLinear, 6, 8),
        ["tp=4: in_features=6 does not split over tp=4 ranks; nearest valid: 3, 2, 6"],
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_every_fault_is_told_with_its_numbers_and_the_nearest_valid_values(fault):
    build, expected = BAD[fault]
    with pytest.raises(ConfigError) as caught:
        build()
    assert [str(problem) for problem in caught.value.problems] == expected


def test_the_message_lists_all_problems():
    with pytest.raises(ConfigError) as caught:
        ParallelLayout(tp=0, pp=0)
    assert str(caught.value) == f"2 problems in the configuration:\n  - tp=0: {SIZE}\n  - pp=0: {SIZE}"


def test_a_configuration_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)

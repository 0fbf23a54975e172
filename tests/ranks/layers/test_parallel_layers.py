"""Every layer on 1, 2 and 4 ranks, with and without sequence parallelism, against plain torch on whole tensors.

Tolerance: fp32, and the sums of a matrix product are split over ranks, so results differ by a few roundings of the
largest term: 1e-5 of the largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import local_shard
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.activation import activation
from lightning_megatron.ops.attention import attention_reference
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.rope import rope_reference
from lightning_megatron.params import named_specs, spec_registry
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

S, B, H, FFN, VOCAB = 8, 2, 12, 24, 37
HEADS, GROUPS, D = 8, 4, 6

Params = dict[str, Tensor]
Slicing = Callable[[Tensor, Axis], Tensor]


def whole(x: Tensor, tp: Axis) -> Tensor:
    return x


def by_sequence(x: Tensor, tp: Axis) -> Tensor:
    return local_shard(x, tp)


def by_feature(x: Tensor, tp: Axis) -> Tensor:
    return local_shard(x, tp, -1)


def by_feature_of_each_block(x: Tensor, tp: Axis) -> Tensor:
    return local_shard(x.unflatten(-1, (2, -1)), tp, -1).flatten(-2)


class UsersMLP(nn.Module):
    """Module as a user would write it: parallel layers between ordinary ones."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up = ColumnParallelLinear(H, FFN, mesh)
        self.down = RowParallelLinear(FFN, H, mesh)
        self.out = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x + self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Attention(SelfAttention):
    """Attention with rotary embedding of positions 0, 1, ..."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, RotaryEmbedding(D).first(S, x.device, x.dtype))


@dataclass(frozen=True)
class Case:
    """A layer, the same in plain torch, and which slice of the whole input and output a rank sees."""

    build: Callable[[ParallelMesh, bool], nn.Module]
    plain: Callable[[Params, Tensor], Tensor]
    input: Slicing = whole
    output: Slicing = whole
    shape: tuple[int, ...] = (S, B, H)
    sums_over_tp: tuple[str, ...] = ()


def plain_linear(p: Params, x: Tensor) -> Tensor:
    return F.linear(x, p["weight"].flatten(0, -2), p["bias"].flatten())


def plain_users_mlp(p: Params, x: Tensor) -> Tensor:
    normed = F.layer_norm(x, (H,), p["norm.weight"], p["norm.bias"])
    up = F.gelu(F.linear(normed, p["up.weight"], p["up.bias"]))
    return F.linear(x + F.linear(up, p["down.weight"], p["down.bias"]), p["out.weight"], p["out.bias"])


def plain_swiglu_mlp(p: Params, x: Tensor) -> Tensor:
    (gate, up), (gate_bias, up_bias) = p["fc1.weight"], p["fc1.bias"]
    hidden = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    return F.linear(hidden, p["fc2.weight"], p["fc2.bias"])


def plain_attention(p: Params, x: Tensor) -> Tensor:
    rows = F.linear(x, p["qkv.weight"], p["qkv.bias"]).view(S, B, GROUPS, HEADS // GROUPS + 2, D)
    q, k, v = rows[..., :-2, :].reshape(S, B, HEADS, D), rows[..., -2, :], rows[..., -1, :]
    angles = RotaryEmbedding(D).first(S, x.device, x.dtype)
    out = attention_reference(rope_reference(q, *angles), rope_reference(k, *angles), v, AttentionCall(causal=True))
    return F.linear(out.flatten(2), p["out.weight"], p["out.bias"])


def mlp(mesh: ParallelMesh, sp: bool) -> nn.Module:
    stds = {"init_std": 0.3, "output_init_std": 0.3}
    return MLP(H, FFN, mesh, activation=activation("swiglu"), bias=True, sequence_parallel=sp, **stds)


def attention(mesh: ParallelMesh, sp: bool) -> nn.Module:
    config = TransformerConfig(1, H, HEADS, VOCAB, S, num_query_groups=GROUPS, head_dim=D, init_std=0.3)
    return Attention(config, mesh, sequence_parallel=sp)


def column(mesh: ParallelMesh, sp: bool) -> nn.Module:
    return ColumnParallelLinear(H, FFN, mesh, sequence_parallel=sp)


def row(mesh: ParallelMesh, sp: bool) -> nn.Module:
    return RowParallelLinear(FFN, H, mesh, sequence_parallel=sp)


def embedding(mesh: ParallelMesh, sp: bool) -> nn.Module:
    return VocabParallelEmbedding(VOCAB, H, mesh, multiple=4, sequence_parallel=sp)


WITHOUT_SP = {
    "column": Case(column, plain_linear, output=by_feature),
    "column of two blocks": Case(
        lambda mesh, sp: ColumnParallelLinear(H, FFN, mesh, blocks=2, sequence_parallel=sp),
        plain_linear,
        output=by_feature_of_each_block,
    ),
    "column, gathered": Case(
        lambda mesh, sp: ColumnParallelLinear(H, FFN, mesh, gather_output=True, sequence_parallel=sp), plain_linear
    ),
    "column of two blocks, gathered": Case(
        lambda mesh, sp: ColumnParallelLinear(H, FFN, mesh, blocks=2, gather_output=True, sequence_parallel=sp),
        plain_linear,
    ),
    "row": Case(row, plain_linear, input=by_feature, shape=(S, B, FFN), sums_over_tp=("bias",)),
    "row, input split": Case(
        lambda mesh, sp: RowParallelLinear(FFN, H, mesh, split_input=True, sequence_parallel=sp),
        plain_linear,
        shape=(S, B, FFN),
        sums_over_tp=("bias",),
    ),
    "layer norm": Case(
        lambda mesh, sp: LayerNorm(H, mesh, sequence_parallel=sp),
        lambda p, x: F.layer_norm(x, (H,), p["weight"], p["bias"]),
        sums_over_tp=("weight", "bias"),
    ),
    "rms norm": Case(
        lambda mesh, sp: RMSNorm(H, mesh, sequence_parallel=sp),
        lambda p, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p["weight"],
        sums_over_tp=("weight",),
    ),
    "mlp": Case(mlp, plain_swiglu_mlp, sums_over_tp=("fc2.bias",)),
    "attention": Case(attention, plain_attention, sums_over_tp=("out.bias",)),
}
USERS = {"a user's own": Case(lambda mesh, sp: UsersMLP(mesh), plain_users_mlp)}


def under_sequence_parallelism(name: str, case: Case) -> Case:
    """Values that are whole without sequence parallelism are shards with it, except between column and row."""
    enters_whole = name.startswith("row")
    leaves_whole = name.startswith("column")
    return replace(
        case, input=case.input if enters_whole else by_sequence, output=case.output if leaves_whole else by_sequence
    )


WITH_SP = {name: under_sequence_parallelism(name, case) for name, case in WITHOUT_SP.items()}


def check_case(case: Case, mesh: ParallelMesh, sp: bool) -> dict[str, str]:
    """Differences from plain torch: output, gradient of the input, gradient of each parameter."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(case.shape, generator=generator, requires_grad=True)
    layer = case.build(mesh, sp)
    params = {
        name: torch.randn(spec.global_shape, generator=generator).mul_(0.3).requires_grad_()
        for name, _, spec in named_specs(layer)
    }
    expected = case.plain(params, x)
    upstream = torch.randn(expected.shape, generator=generator)
    expected.backward(upstream)

    load_whole(layer, params, mesh)
    local = case.input(x.detach(), mesh.tp).clone().requires_grad_()
    out = layer(local)
    out.backward(case.output(upstream, mesh.tp))

    reference = {name: p.grad for name, p in params.items() if p.grad is not None}
    ours = whole_gradients(layer, mesh)
    assert local.grad is not None
    assert x.grad is not None
    wrong = differences(
        {"output": out, "input gradient": local.grad, **ours},
        {"output": case.output(expected, mesh.tp), "input gradient": case.input(x.grad, mesh.tp), **reference},
    )
    # The gradients of whole parameters that saw only a shard of the sequence, and no others, need the sum over tp.
    needs_sum = {name for name, spec in spec_registry(layer).items() if spec.grad_sum_over_tp}
    sharded = sp and mesh.tp.size > 1
    if needs_sum != (set(case.sums_over_tp) if sharded else set()):
        wrong["specs"] = f"summed over tp: {needs_sum}"
    unsummed = differences(whole_gradients(layer, mesh, sum_over_tp=False), reference)
    if set(unsummed) != needs_sum:
        wrong["without the sum"] = f"wrong are {sorted(unsummed)}, not {sorted(needs_sum)}"
    return wrong


def check_embedding(mesh: ParallelMesh, sp: bool) -> dict[str, str]:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCAB, (S, B), generator=generator)
    weight = torch.randn(VOCAB, H, generator=generator, requires_grad=True)
    upstream = torch.randn(S, B, H, generator=generator)
    expected = F.embedding(tokens, weight)
    expected.backward(upstream)
    layer = embedding(mesh, sp)
    load_whole(layer, {"weight": weight}, mesh)
    output = by_sequence if sp else whole
    out = layer(tokens)
    out.backward(output(upstream, mesh.tp))
    assert weight.grad is not None
    return differences(
        {"output": out, **whole_gradients(layer, mesh)},
        {"output": output(expected, mesh.tp), "weight": weight.grad},
    )


def check_all(tp: int, sp: bool) -> dict[str, dict[str, str]]:
    torch.manual_seed(0)
    mesh = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    cases = WITH_SP if sp else WITHOUT_SP | USERS
    wrong = {name: check_case(case, mesh, sp) for name, case in cases.items()}
    wrong["embedding"] = check_embedding(mesh, sp)
    return {name: faults for name, faults in wrong.items() if faults}


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)])
def test_layers_equal_plain_torch(ranks, tp, sp):
    assert ranks(tp, check_all, tp, sp) == [{}] * tp


def count_bias_additions(tp: int) -> float:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    layer = RowParallelLinear(4, 2, mesh)
    assert layer.bias is not None
    nn.init.ones_(layer.bias)
    return float(layer(torch.zeros(1, 4 // tp))[0, 0])


def test_a_row_parallel_bias_is_added_once(ranks):
    assert ranks(4, count_bias_additions, 4) == [1.0] * 4

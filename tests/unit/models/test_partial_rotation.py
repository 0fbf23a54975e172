"""A rotary embedding of a part of each head: numbers, memory, and faults of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh

S, B, HEADS, D = 6, 2, 4, 8


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(1, HEADS * D, HEADS, 64, 32, position_embedding="rope", **fields)


def attention(turned: int) -> tuple[SelfAttention, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = config(rope_head_dim=turned, qk_norm=True, norm="rmsnorm", num_query_groups=2)
    part = SelfAttention(shape, ParallelMesh(ParallelLayout().resolve(1)), sequence_parallel=False)
    return part, RotaryEmbedding(shape.rotary_dim).first(S, torch.device("cpu"), torch.float32)


def by_hand(x: Tensor, turned: int) -> Tensor:
    """The first features rotated as complex numbers, of pairs half of them apart."""
    half = turned // 2
    angles = torch.arange(S).float()[:, None] * 10000.0 ** (-torch.arange(half).float() / half)
    whole = torch.complex(x[..., :half], x[..., half:turned]) * torch.exp(1j * angles)[:, None, None, :]
    return torch.cat((whole.real, whole.imag, x[..., turned:]), dim=-1)


@pytest.mark.parametrize("turned", [2, 4, 6, 8])
def test_the_first_features_are_rotated_and_the_others_pass(turned: int) -> None:
    part, rotary = attention(turned)
    x = torch.randn(S, B, HEADS, D)
    torch.testing.assert_close(part._rotated(x, *rotary), by_hand(x, turned))


def test_all_features_are_those_of_0() -> None:
    x = torch.randn(S, B, HEADS * D)
    found = []
    for turned in (0, D):
        part, rotary = attention(turned)
        found.append(part(x, rotary))
    assert torch.equal(*found)


def test_what_the_backward_needs_keeps_no_fused_product_alive() -> None:
    """Of queries, keys and values, four heads and two groups, nothing is kept that is as large as all of them."""
    part, rotary = attention(4)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    x = torch.randn(S, B, HEADS * D)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        part(x, rotary)
    weights = {param.untyped_storage().data_ptr() for param in part.parameters()}
    fused = S * B * (HEADS + 2 * 2) * D * x.element_size()
    sizes = [each.untyped_storage().nbytes() for each in kept if each.untyped_storage().data_ptr() not in weights]
    assert sizes
    assert max(sizes) < fused


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"rope_head_dim": 5}, r"rope_head_dim=5: the rotary embedding rotates pairs .*; nearest valid: 4$"),
        ({"rope_head_dim": 10}, r"rope_head_dim=10: is more than head_dim=8"),
        ({"rope_head_dim": 4, "position_embedding": "learned"}, r"rope_head_dim=4: .*'learned' rotates no features"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as raised:
        TransformerConfig(1, HEADS * D, HEADS, 64, 32, **{"position_embedding": "rope"} | fields)
    assert len(raised.value.problems) == 1


def test_heads_of_an_odd_size_may_rotate_a_part() -> None:
    assert config(head_dim=7, rope_head_dim=4).rotary_dim == 4

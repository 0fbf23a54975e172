"""Multi-head latent attention: its cache, its two forms, its factor, and the faults of its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.config.rope_scaling import YarnScaling
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset

LATENTS: dict[str, Any] = {"kv_lora_rank": 12, "q_lora_rank": 20, "head_dim": 10, "rope_head_dim": 4, "v_head_dim": 7}
SIZES: dict[str, Any] = {"position_embedding": "rope", "norm": "rmsnorm", "init_std": 0.2, "vocab_multiple": 1}


def config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(3, 32, 8, 61, 64, **SIZES | LATENTS | changes)


def model(**changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(config(**changes)).eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("rank", [20, 0])
def test_the_cache_holds_latents_and_one_key_for_all_heads(rank: int) -> None:
    """As DeepSeek-V2's paper counts in its table 1: C + R numbers a token and layer, in place of 2 N D."""
    ours, batch, length = model(q_lora_rank=rank), 2, 9
    caches = [KVCache() for _ in ours.layers]
    ours(tokens(batch, length), caches=caches)
    for _ in range(4):
        ours(tokens(batch, 1), caches=caches)
    assert [cache.held for cache in caches] == [length + 4] * 3
    c = ours.config
    numbers = 3 * batch * (length + 4) * (c.kv_lora_rank + c.rope_head_dim)
    assert sum(cache.nbytes for cache in caches) == 4 * numbers

    usual = GPTModel(config(kv_lora_rank=0, q_lora_rank=0, rope_head_dim=0, v_head_dim=0)).eval()
    caches = [KVCache() for _ in usual.layers]
    usual(tokens(batch, length + 4), caches=caches)
    assert sum(cache.nbytes for cache in caches) == 4 * 3 * batch * (length + 4) * 2 * 8 * 10


def test_the_cache_of_deepseek_v3_is_57_times_smaller_than_that_of_its_heads() -> None:
    c = preset("deepseek-v3")
    latents, heads = c.kv_lora_rank + c.rotary_dim, c.num_attention_heads * (c.head_dim + c.value_dim)
    assert latents == 576
    assert heads / latents == pytest.approx(71.1, abs=0.1)
    assert 2 * c.num_attention_heads * 128 / latents == pytest.approx(56.9, abs=0.1)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": 0}, {"attention_scale": 0.5}, {"rope_scaling": YarnScaling(4.0, 8, mscale_all_dim=0.7)}],
)
@pytest.mark.parametrize("step", [1, 3])
def test_decoding_with_absorbed_matrices_equals_the_whole_forward(changes: dict[str, Any], step: int) -> None:
    ours = model(**changes)
    text = tokens(2, 13)
    expected = ours(text)
    caches = [KVCache() for _ in ours.layers]
    ours(text[:, :4], caches=caches)
    for first in range(4, 13, step):
        last = ours(text[:, first : first + step], caches=caches)[:, -1]
        assert torch.allclose(last, expected[:, first + step - 1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without() -> None:
    ours = model()
    text = tokens(2, 3)
    for _ in range(10):
        text = torch.cat((text, ours(text)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(ours, tokens(2, 3), 10, temperature=0.0), text)


def test_yarns_factor_is_on_the_scores_and_squared() -> None:
    """``m^2 / sqrt(D)`` with ``m = 0.1 mscale_all_dim ln(factor) + 1``; cosines have the ratio of both weights."""
    c = preset("deepseek-v3")
    assert c.query_factor == pytest.approx(1.3688879454**2)
    assert c.rope_scaling is not None
    assert c.rope_scaling.table_factor == 1.0
    assert config().query_factor == 1.0
    usual = {"kv_lora_rank": 0, "q_lora_rank": 0, "rope_head_dim": 0, "v_head_dim": 0}
    assert config(rope_scaling=YarnScaling(4.0, 8, mscale_all_dim=0.7), **usual).query_factor == 1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_lora_rank": 0}, r"q_lora_rank=20: needs latents: give kv_lora_rank"),
        ({"rope_head_dim": 0}, r"rope_head_dim=0: the rotary embedding rotates pairs"),
        ({"rope_head_dim": 5}, r"rope_head_dim=5: the rotary embedding rotates pairs"),
        ({"rope_head_dim": 10}, r"rope_head_dim=10: is a part of head_dim=10"),
        ({"num_query_groups": 4}, r"num_query_groups=4: with latents \(kv_lora_rank\) every query head"),
        ({"position_embedding": "alibi"}, r"position_embedding='alibi': with latents \(kv_lora_rank\) a part"),
        ({"qk_norm": True}, r"qk_norm=True: latents \(kv_lora_rank=12\) do not support it"),
        ({"attention_sinks": True}, r"attention_sinks=True: latents"),
        ({"v_head_dim": -1}, r"v_head_dim=-1"),
        (
            {"mtp_num_layers": 1, "embedding_norm": True},
            r"mtp_num_layers=1: the last stage embeds tokens by their table",
        ),
    ],
)
def test_faults_are_told_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**changes)


def test_sizes_that_are_replaced_leave_the_heads_as_they_are() -> None:
    small = preset("deepseek-v3").replace(hidden_size=64, num_attention_heads=4, num_layers=5)
    assert (small.head_dim, small.value_dim, small.num_query_groups, small.moe_layers) == (192, 128, 4, (3, 4))

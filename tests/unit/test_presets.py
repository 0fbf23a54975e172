"""Sizes of the published models, from the formula and from the real modules on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers import padded_vocab_size
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import PRESETS, preset
from lightning_megatron.params import spec_registry

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt3-1.7b": 1_652_230_656,
    "gpt3-3.6b": 3_562_168_320,
    "gpt3-7.5b": 7_467_786_240,
    "gpt3-18.4b": 18_449_756_160,
    "gpt3-39.1b": 39_096_041_472,
    "gpt3-76.1b": 76_050_739_200,
    "gpt3-145.6b": 145_622_261_760,
    "gpt3-310.1b": 310_130_540_544,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
}


def on_meta(config: TransformerConfig, tp: int = 1, rank: int = 0) -> GPTModel:
    with torch.device("meta"):
        return GPTModel(config, ParallelMesh(ParallelLayout(tp=tp).resolve(tp), rank))


def elements(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def global_elements(model: nn.Module) -> int:
    """Elements of the whole model, padding left out, by what its layers declare."""
    return sum(torch.Size(spec.global_shape).numel() for spec in spec_registry(model).values())


@pytest.mark.parametrize("name", PARAMETERS)
def test_exact_parameter_counts(name):
    config = preset(name)
    assert config.num_parameters() == PARAMETERS[name]
    model = on_meta(config)
    assert global_elements(model) == PARAMETERS[name]
    if config.vocab_size % config.vocab_multiple == 0:
        assert elements(model) == PARAMETERS[name]


def test_every_preset_builds_and_counts_its_parameters():
    for name, config in PRESETS.items():
        small = config.replace(num_layers=2)
        assert global_elements(on_meta(small)) == small.num_parameters(), name


def test_every_rank_of_gpt3_7_5b_on_tp_8_holds_the_same_number_of_elements():
    config = preset("gpt3-7.5b")
    for rank in range(8):
        model = on_meta(config, tp=8, rank=rank)
        assert elements(model) == 941_594_624
        assert global_elements(model) == PARAMETERS["gpt3-7.5b"]


def test_building_on_meta_leaves_the_random_stream_where_building_for_real_would():
    config = TransformerConfig(2, 8, 2, 16, 8)
    torch.manual_seed(1)
    GPTModel(config)
    expected = torch.rand(())
    torch.manual_seed(1)
    on_meta(config)
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize(("tp", "padded"), [(1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200)])
def test_the_vocabulary_of_gpt2_is_padded_to_a_multiple_of_128_tp(tp, padded):
    assert padded_vocab_size(50_257, tp) == padded
    model = on_meta(preset("gpt2").replace(num_attention_heads=16, num_layers=1), tp=tp)
    assert model.embedding is not None
    assert model.embedding.word.weight.shape[0] * tp == padded


FLOPS = {
    "mixtral": preset("mixtral-tiny").replace(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, vocab_size=256, moe_layers=(1,), moe_router_topk=3
    ),
    "mixtral, shared": preset("mixtral-tiny").replace(
        num_layers=1, hidden_size=64, ffn_hidden_size=96, vocab_size=256, moe_shared_expert_ffn_hidden_size=40
    ),
    "mixtral, many experts": preset("mixtral-tiny").replace(
        num_layers=1, hidden_size=64, ffn_hidden_size=32, vocab_size=64, num_experts=64
    ),
    "gpt": TransformerConfig(2, 64, 4, 256, 64),
    "llama": preset("llama-tiny").replace(num_layers=2, hidden_size=64, ffn_hidden_size=176, vocab_size=256),
    "llama, long, wide heads": preset("llama-tiny").replace(
        num_layers=1, hidden_size=64, ffn_hidden_size=176, vocab_size=256, head_dim=32
    ),
}


def test_active_parameters_of_mixtral():
    assert preset("mixtral-8x7b").num_parameters(active=True) == 12_879_138_816
    assert preset("llama2-7b").num_parameters(active=True) == preset("llama2-7b").num_parameters()


def flops_of_addmm(out: torch.Size, a: torch.Size, b: torch.Size, **kwargs: object) -> int:
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("name", FLOPS)
def test_flops_per_token_are_what_torch_counts(name):
    """Torch counts the full square of attention, the formula its causal half (S q for S positions, forward: 2 S q)."""
    config, seq, batch = FLOPS[name], 64, 2
    model = GPTModel(config)
    tokens = torch.randint(config.vocab_size, (batch, seq))
    # The counter does not know the in-place product that the loss adds its weight gradient with. And attention's
    # composite kernel shows its products one by one, where fused ones repeat some in their backward pass.
    with (
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flops_of_addmm}) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(tokens, tokens).backward()
    queries = config.num_attention_heads * config.head_dim
    masked_half = 6 * config.num_layers * queries * seq
    assert counter.get_total_flops() / (batch * seq) == pytest.approx(
        config.flops_per_token(seq) + masked_half, rel=0.01
    )


def test_flops_of_a_gpt3_are_megatrons():
    """The formula of https://arxiv.org/abs/2104.04473 without recompute (72 for its 96) and with whole attention."""
    config, seq = preset("gpt3-145.6b"), 2048
    layers, hidden, vocab = config.num_layers, config.hidden_size, config.vocab_size
    paper = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    whole_attention = config.flops_per_token(seq) + 6 * layers * hidden * seq
    assert whole_attention == pytest.approx(paper, rel=1e-12)

"""Layers of Qwen3-Next apart from transformers: caches, refusals, counts, bf16."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from lightning_megatron import GPTModule, LlamaModule, LoRA
from lightning_megatron.adapters.targets import adapted_layers
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES
from lightning_megatron.families.qwen3_next import Qwen3NextConfig
from lightning_megatron.layers.parts import part_problems
from lightning_megatron.layers.recurrence.gated_delta_net import GatedDeltaNet
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes, weight_shapes
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.tools.cli.main import main
from tests.families import TINY, our_config, random_model, tokens_of


def tiny(**changes: Any) -> Qwen3NextConfig:
    config = our_config(TINY["qwen3_next"], **changes)
    assert isinstance(config, Qwen3NextConfig)
    return config


def model() -> GPTModel:
    return random_model(tiny()).eval()


def mixer() -> GatedDeltaNet:
    found = model().layers["0"].attention
    assert isinstance(found, GatedDeltaNet)
    return found


@pytest.mark.parametrize("padding", [0, 1, 3, 5])
def test_a_cache_leaves_out_padding_at_the_end_of_a_call(padding: int) -> None:
    """The next token's output is that without padding, also behind a call that was all padding."""
    net, x = mixer(), torch.randn(9, 2, 32)
    padded = x.clone()
    padded[8 - padding : 8] = 7.0
    expected = torch.cat((padded[: 8 - padding], x[8:]))
    with torch.no_grad():
        cache = net.new_cache()
        net(padded[:3], cache=cache)
        cache.truncate(3)
        net(padded[3:8], cache=cache)
        cache.truncate(8 - padding)
        assert cache.length == 8 - padding
        torch.testing.assert_close(net(x[8:], cache=cache)[0], net(expected)[-1], rtol=1e-4, atol=1e-5)


def test_a_cache_refuses_to_forget_tokens_of_earlier_calls_and_does_not_grow() -> None:
    net, sizes = mixer(), []
    cache = net.new_cache()
    assert (cache.length, cache.nbytes) == (0, 0)
    with torch.no_grad():
        for length in (4, 1, 1):
            net(torch.randn(length, 2, 32), cache=cache)
            cache.truncate(cache.length)
            sizes.append(cache.nbytes)
    with pytest.raises(ConfigError, match=r"length=3.*only the last 0 of 6 tokens"):
        cache.truncate(3)
    assert len({*sizes}) == 1


def test_context_parallelism_and_a_tp_that_does_not_split_the_heads_are_refused_by_name() -> None:
    found = part_problems(tiny(), ParallelLayout(cp=2, tp=8))
    assert [(each.argument, each.value) for each in found] == [("cp", 2), ("tp", 8)]
    assert part_problems(tiny(), ParallelLayout(tp=4)) == []
    assert part_problems(tiny(delta_layers=()), ParallelLayout(cp=2)) == []


def test_packed_documents_and_masks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="key_mask='given'"):
        mixer()(torch.randn(8, 1, 32), key_mask=torch.ones(1, 8, dtype=torch.bool))
    module = GPTModule(tiny())
    module.model = model()
    batch = {
        "tokens": tokens_of(1, 8),
        "labels": tokens_of(1, 8, seed=2),
        "segment_ids": torch.tensor([[1] * 4 + [2] * 4]),
    }
    with pytest.raises(ConfigError, match=r"documents='given'.*GatedDeltaNet would mix tokens of different documents"):
        module.loss(batch)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"delta_layers": (0, 4)}, r"delta_layers=\[4\]: layers are numbered 0 to 3"),
        ({"delta_key_heads": 3}, "delta_key_heads=3.*nearest.*4"),
        ({"rope_head_dim": 10}, "rope_head_dim=10: is more than head_dim=8"),
        ({"rope_head_dim": 3}, "rotates pairs"),
        ({"kv_lora_rank": 8, "rope_head_dim": 2, "qk_norm": False, "num_query_groups": 8}, "kv_lora_rank=8"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"delta_conv_size": 0}, "delta_conv_size=0"),
    ],
)
def test_fields_that_cannot_be_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny(**change)


def test_with_fewer_layers_those_that_are_left_keep_their_kind() -> None:
    assert tiny().delta_layers == (0, 1, 2)
    assert tiny().replace(num_layers=2, moe_layers=(0,)).delta_layers == (0, 1)


@pytest.mark.parametrize(
    "config", [tiny(), tiny(add_qkv_bias=True, add_attention_out_bias=True), preset("qwen3-next-80b-a3b")]
)
def test_counted_parameters_are_those_of_the_layers(config: Qwen3NextConfig) -> None:
    assert config.num_parameters() == sum(map(prod, parameter_shapes(config).values()))


def test_flops_are_six_times_the_matrices_that_a_token_meets_and_the_products() -> None:
    """A longer sequence costs more in the layers with attention alone."""
    config = preset("qwen3-next-80b-a3b")
    assert isinstance(config, Qwen3NextConfig)
    growth = config.flops_per_token(4096) - config.flops_per_token(2048)
    assert growth == 6 * 12 * config.num_attention_heads * 2 * config.head_dim * 1024
    recurrence = 36 * 3 * 32 * 128 * 128
    norms = 48 * 2 * 2048 + 2048 + 36 * (2 * 32 + 128) + 12 * 2 * 256
    tables = config.vocab_size * config.hidden_size
    unused = 48 * (512 - 10) * 3 * 2048 * 512
    assert config.flops_per_token(0) == 6 * (config.num_parameters() - norms - tables - unused + recurrence)


def test_plans_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "8", "--device", "h100", "--seq-length", "4096", "--global-batch-size", "8")
    assert main(["plan", "--model", "qwen3-next-80b-a3b", *arguments]) != 0
    assert "a Qwen3NextConfig: there are no formulas for the memory and time of its layers" in capsys.readouterr().err


def test_a_module_of_decoders_takes_it_and_predicts_no_memory_for_it() -> None:
    assert LlamaModule(tiny()).trained_model is None
    assert GPTModule("qwen3-next-tiny").trained_model is None
    assert GPTModule("llama-tiny").trained_model is not None


def test_a_model_in_bf16_learns() -> None:
    net, tokens = random_model(tiny()).bfloat16(), tokens_of(4, 24)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=2e-3), []
    for _ in range(12):
        loss = net(tokens, labels=tokens.roll(-1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_an_adapter_of_all_linear_layers_has_parts_for_queries_with_gates_and_none_for_the_convolution() -> None:
    config = tiny()
    plan = adapted_layers(FAMILIES["qwen3_next"], config, LoRA(), weight_shapes(config))
    widths = {layer.name: [(part.name, part.width) for part in layer.parts] for layer in plan}
    assert widths["layers.3.attention.qkv"] == [("q_proj", 32), ("k_proj", 8), ("v_proj", 8)]
    assert {"layers.0.attention.qkvz", "layers.0.attention.ba", "layers.0.attention.projection"} <= widths.keys()
    assert not [name for name in widths if "conv" in name or "a_log" in name]

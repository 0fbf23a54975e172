"""Sizes of the published models, from the formula and from the real modules on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertModel
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.layers import padded_vocab_size
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import PRESETS, preset
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.ops.registry import Ops
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
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-13b": 12_855_592_960,
    "bloom-176b": 176_247_271_424,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    # Of Qwen: the totals that the files' own headers add up to, tied output layers counted once.
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    # Of T5: the totals of the published files, the table that both stacks share counted once.
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    # Of Mistral and Gemma: the totals of the files, which Hugging Face shows beside each model and Keras' models of the
    # same weights repeat; of Gemma 3 without the image encoder (416,866,032) and the norm and projection of its 1152
    # features.
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (1 + 2560),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (1 + 3840),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (1 + 5376),
    # Of DeepSeek: the totals of the files, of V3 without the module for a further token and the copies beside it.
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 680_571_043_840 + 3_918_786_560 - 2 * 129_280 * 7168 - 11_610_067_968,
    # Of GLM: the totals of the files without the module for a further token, the copies beside it, and the experts'
    # biases, which are no parameters here.
    "glm4.5-air": 110_468_824_832 - 2 * 151_552 * 4096 - 2_375_059_456 - 46 * 128,
    "glm4.5": 358_337_791_296 - 2 * 151_552 * 5120 - 3_988_069_632 - 90 * 160,
    # The totals that Hugging Face and Ollama show; 20.91 and 116.83 B in https://arxiv.org/abs/2508.10925, table 1.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def on_meta(config: TransformerConfig, tp: int = 1, rank: int = 0) -> StagedModel:
    with torch.device("meta"):
        mesh = ParallelMesh(ParallelLayout(tp=tp).resolve(tp), rank)
        models: dict[type, Callable[..., StagedModel]] = {BertConfig: BertModel, T5Config: T5Model}
        return models.get(type(config), GPTModel)(config, mesh)


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
        small = config.replace(num_layers=4 if config.moe_layers else 2)  # of DeepSeek's the first ones have no experts
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
    "gpt-oss": preset("gpt-oss-tiny").replace(num_layers=1, hidden_size=64, ffn_hidden_size=96, vocab_size=256),
    "gpt": TransformerConfig(2, 64, 4, 256, 64),
    "windows": TransformerConfig(3, 64, 4, 256, 64, sliding_window=10, sliding_window_layers=(0, 2)),
    "llama": preset("llama-tiny").replace(num_layers=2, hidden_size=64, ffn_hidden_size=176, vocab_size=256),
    "llama, long, wide heads": preset("llama-tiny").replace(
        num_layers=1, hidden_size=64, ffn_hidden_size=176, vocab_size=256, head_dim=32
    ),
    "latents": preset("deepseek-v2-tiny").replace(num_layers=2, hidden_size=64, vocab_size=256, v_head_dim=40),
    "latents, further tokens": preset("deepseek-v3-tiny").replace(
        num_layers=2, hidden_size=64, vocab_size=256, mtp_num_layers=2
    ),
}


def test_active_parameters_of_mixtral():
    assert preset("mixtral-8x7b").num_parameters(active=True) == 12_879_138_816
    assert preset("llama2-7b").num_parameters(active=True) == preset("llama2-7b").num_parameters()


def test_active_parameters_of_qwen3_30b_a3b_are_3_3_billion() -> None:
    """The model card's number, which counts the whole router: 120 rows a layer more."""
    config = preset("qwen3-30b-a3b")
    assert config.num_parameters(active=True) + config.num_layers * 120 * config.hidden_size == 3_353_032_704


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_of_gpt_oss_are_those_of_its_model_card(name: str, billions: float) -> None:
    """Table 1 counts the whole router and the output layer, and not the embedding."""
    config = preset(name)
    others = config.num_experts - config.moe_router_topk
    routers = config.num_layers * others * (config.hidden_size + 1)
    active = config.num_parameters(active=True) + routers - config.vocab_size * config.hidden_size
    assert round(active / 1e9, 2) == billions


def test_deepseek_v3_has_671_billion_parameters_of_which_a_token_meets_37() -> None:
    """The model card's numbers: 36.6 without the embedding, with all rows of the routers."""
    config = preset("deepseek-v3")
    assert config.num_parameters() == 671_026_404_352
    routers = config.num_expert_layers * (256 - 8) * 7168
    embedding = 129_280 * 7168
    assert config.num_parameters(active=True) + routers == 37_552_282_624
    assert config.num_parameters(active=True) + routers - embedding == pytest.approx(36.6e9, rel=1e-3)
    further = config.replace(mtp_num_layers=1)
    assert further.num_parameters() - config.num_parameters() == 11_610_067_968
    assert global_elements(on_meta(further)) == further.num_parameters()


@pytest.mark.parametrize(("name", "active"), [("glm4.5", 32), ("glm4.5-air", 12)])
def test_active_parameters_of_glm_are_those_of_its_report(name: str, active: int) -> None:
    """Billions, with the module for a further token and all rows of the routers, and without the tables of words."""
    config = preset(name).replace(mtp_num_layers=1)
    tables = 2 * config.vocab_size * config.hidden_size
    routers = config.num_expert_layers * (config.num_experts - config.moe_router_topk) * config.hidden_size
    assert (config.num_parameters(active=True) + routers - tables) // 10**9 == active
    assert global_elements(on_meta(config)) == config.num_parameters()
    if name == "glm4.5":
        assert (config.num_parameters() - tables) // 10**9 == 355


def flops_of_addmm(out: torch.Size, a: torch.Size, b: torch.Size, **kwargs: object) -> int:
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize("name", FLOPS)
def test_flops_per_token_are_what_torch_counts(name):
    """Torch counts the full square of attention, the formula what the mask shows (causal: half)."""
    config, seq, batch = FLOPS[name], 64, 2
    # Attention's reference computes whole squares, and none of its products twice.
    model = GPTModel(config, ops=Ops("cpu", "attention=off"))
    tokens = torch.randint(config.vocab_size, (batch, seq))
    # The counter does not know the in-place product that the loss adds its weight gradient with.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flops_of_addmm}) as counter:
        model(tokens, tokens).backward()
    heads = config.num_attention_heads * (config.head_dim + config.value_dim)
    masked = 6 * (config.num_layers + config.mtp_num_layers) * heads * (seq - config.mean_seen(seq))
    assert counter.get_total_flops() / (batch * seq) == pytest.approx(config.flops_per_token(seq) + masked, rel=0.01)


def test_flops_of_a_gpt3_are_megatrons():
    """The formula of https://arxiv.org/abs/2104.04473 without recompute (72 for its 96) and with whole attention."""
    config, seq = preset("gpt3-145.6b"), 2048
    layers, hidden, vocab = config.num_layers, config.hidden_size, config.vocab_size
    paper = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    whole_attention = config.flops_per_token(seq) + 6 * layers * hidden * seq
    assert whole_attention == pytest.approx(paper, rel=1e-12)

"""Implementations that are chosen on CUDA, held against a table: no device is needed to ask for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

from lightning_megatron.device import adds_products
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.ops.adamw import adamw_torch
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.grouped_linear import grouped_in_place, grouped_product
from lightning_megatron.ops.norm import layer_norm, rms_norm_torch
from lightning_megatron.ops.registry import SELECTABLE, Ops, choices_of
from lightning_megatron.ops.rope import rope_torch

CUDA = {
    "attention": "torch's kernel",
    "rms_norm": "torch's kernel",
    "layer_norm": "torch's kernel",
    "rope": "few passes",
    "mixture_of_experts": "reference",
    "grouped_linear": "torch's grouped_mm" if hasattr(F, "grouped_mm") else "a product a group",
    "linear_fp8": "reference",
    "adamw": "torch's fused AdamW",
}


def test_choices_on_cuda_are_those_of_the_table() -> None:
    ops = Ops("cuda")
    found = {name: each.choose("cuda", ops.mode(name)).implementation for name, each in SELECTABLE.items()}
    assert found == CUDA


def test_functions_on_cuda_are_torchs_kernels() -> None:
    ops = Ops("cuda")
    assert ops.choose("attention").implementation == "torch's kernel"
    assert ops.choose("rms_norm").run is rms_norm_torch
    assert ops.choose("layer_norm").run is layer_norm
    assert ops.choose("rope").run is rope_torch
    assert ops.choose("adamw").run is adamw_torch
    for name in ("attention", "rms_norm", "layer_norm", "adamw"):
        assert Ops("cuda", {name: "require"}).problems() == []
    for name in ("rope", "mixture_of_experts", "linear_fp8"):
        assert [problem.value for problem in Ops("cuda", {name: "require"}).problems()] == [f"{name}=require"]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has it from 2.10 on")
def test_experts_in_bf16_multiply_all_groups_in_one_kernel_and_others_group_by_group() -> None:
    choice = Ops("cuda").choose("grouped_linear")
    assert choice.run.preferred is grouped_product
    assert choice.run.otherwise is grouped_in_place
    x, weight = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    assert choice.run.unsupported(x, weight, [2, 2]) is None
    assert choice.run.unsupported(x.float(), weight.float(), [2, 2]) == "the kernel is for bf16"
    assert choice.run.unsupported(x[:0], weight, [0, 0]) == "no tokens"
    assert choice.run.unsupported(x[:, :12], weight[..., :12], [2, 2]) == "rows are no multiples of 16 bytes"


def test_attention_on_cuda_gives_torch_what_its_flash_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash takes the causal flag and no mask, rows of a head side by side, and grouped heads without copies."""
    seen = []

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> torch.Tensor:
        seen.append(given)
        assert q.shape == (2, 8, 16, 64)  # [B, N, S, D]
        assert k.shape == v.shape == (2, 4, 16, 64)
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    q, k = torch.zeros(16, 2, 8, 64, dtype=torch.float16), torch.zeros(16, 2, 4, 64, dtype=torch.float16)
    Ops("cuda").choose("attention").run(q, k, k, AttentionCall(causal=True))
    assert seen == [{"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": True}]


def test_every_module_of_a_model_has_the_choice_of_the_table() -> None:
    with torch.device("meta"):
        model: nn.Module = GPTModel(configuration("mixtral-tiny", num_layers=1), ops=Ops("cuda"))
    found = {each["op"]: each["chosen"] for choices in choices_of(model).values() for each in choices}
    assert found == {name: chosen for name, chosen in CUDA.items() if name in found}
    assert {"attention", "rms_norm", "rope", "grouped_linear"} <= found.keys()


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("hpu", False), ("cuda", True)])
def test_one_kernel_adds_a_narrow_product_to_a_wide_sum_on_cuda_since_torch_2_8(device: str, expected: bool) -> None:
    assert adds_products(device) is (expected and Version(torch.__version__) >= Version("2.8"))

"""Experts in fp8, against the products of linear layers in fp8, one expert at a time, and against fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import load, local_tensors, model_state, save
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.fp8_grouped import grouped_linear_fp8
from lightning_megatron.layers.fp8_linear import Fp8Gemms, Fp8Steps, multiply_in_fp8, use_fp8
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.ops.fp8 import LINEAR_FP8, REFERENCE_KERNELS, Fp8Recipe
from lightning_megatron.ops.implementation import Op, OpChoice
from lightning_megatron.ops.registry import Ops, choices_of
from lightning_megatron.params import spec_registry
from lightning_megatron.testing.parity import assert_same

COUNTS = (3, 0, 16, 5)
CONFIG = TransformerConfig(
    4, 32, 2, 61, 16, ffn_hidden_size=32, add_bias_linear=False, activation="swiglu", norm="rmsnorm",
    position_embedding="rope", vocab_multiple=1, init_std=0.2, num_experts=4, moe_router_topk=2,
)  # fmt: skip


def gemms(**options: Any) -> Fp8Gemms:
    recipe = Fp8Recipe(stochastic_rounding=False, **options)
    return Fp8Gemms(REFERENCE_KERNELS, recipe, LINEAR_FP8.choose("cpu"), multiple=1)


def product(x: Tensor, weight: Tensor, counts: Sequence[int], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = grouped_linear_fp8(x, weight, counts, gemms())
    return out.detach(), *torch.autograd.grad(out, (x, weight), dy)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(*shape, dtype=dtype) for shape in ((24, 32), (4, 48, 32), (24, 48)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_product_of_a_linear_layer_with_the_same_scales(dtype: torch.dtype) -> None:
    """Scales are powers of two, so another one changes no number that is not at an end of the format."""
    x, weight, dy = data(dtype)
    out, dx, dw = product(x, weight, COUNTS, dy)
    start = 0
    for group, rows in enumerate(COUNTS):
        here = slice(start, start + rows)
        start += rows
        if not rows:
            assert not dw[group].any()
            continue
        own, own_x, own_weight = product(x[here], weight[group : group + 1], [rows], dy[here])
        torch.testing.assert_close(out[here], own, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dx[here], own_x, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dw[group], own_weight[0], rtol=1e-2, atol=1e-2)


def test_products_and_gradients_are_near_fp32() -> None:
    x, weight, dy = data()
    found = product(x, weight, COUNTS, dy)
    x.requires_grad_()
    weight.requires_grad_()
    plain = torch.cat([rows @ w.t() for rows, w in zip(x.split(COUNTS), weight, strict=True)])
    right = plain.detach(), *torch.autograd.grad(plain, (x, weight), dy)
    for ours, theirs in zip(found, right, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert 1e-3 < error < 0.1  # E5M2 has two bits: at most 1/8 an element


def test_a_checkpoint_loads_into_a_run_with_and_without_fp8(tmp_path: Path) -> None:
    mesh = ParallelMesh.single()
    for before, after in ((True, True), (True, False), (False, True)):
        layers = []
        for seed, fp8 in ((1, before), (2, after)):
            torch.manual_seed(seed)
            layers.append(MoELayer(CONFIG, mesh, sequence_parallel=False))
            for linear in layers[-1].experts.grouped_linears().values() if fp8 else ():
                products = multiply_in_fp8(linear, REFERENCE_KERNELS, Fp8Recipe(), LINEAR_FP8.choose("cpu"))
                products.amax_history.fill_(float(seed))
        first, second = (torch.nn.ModuleDict({"experts_of": layer}) for layer in layers)
        states = [model_state(local_tensors(model), spec_registry(model), mesh) for model in (first, second)]
        path = tmp_path / f"{before}-{after}.ckpt"
        save(path, states[0], {}, mesh)
        load(path, states[1], mesh)
        assert_same(dict(second.named_parameters()), dict(first.named_parameters()), rtol=0)
        if before and after:
            assert_same(dict(second.state_dict()), dict(first.state_dict()), rtol=0)


class WithKernels(Ops):
    def choose(self, op: str | Op[Any], unless: str | None = None) -> OpChoice[Any]:
        choice = super().choose(op, unless)
        return replace(choice, run=REFERENCE_KERNELS) if choice.op == "linear_fp8" else choice


def losses(recipe: Fp8Recipe | None, **options: Any) -> tuple[list[float], Mapping[str, Any]]:
    torch.manual_seed(3)
    config = CONFIG.replace(**options)
    model = GPTModel(config)
    if recipe is not None:
        ops = WithKernels("cpu", "linear_fp8=auto", recipe)
        blocks = {int(number): block for number, block in model.layers.items()}
        model.fp8 = use_fp8(blocks, config.num_layers, ops, ParallelMesh.single())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        if model.fp8 is not None:
            model.fp8.after_optimizer_step()
        found.append(loss.item())
    return found, choices_of(model)


WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dynamic": {"moe_dynamic": True},
    "padded": {"moe_capacity_factor": 2.0, "moe_pad_to_capacity": True},
    "shared": {"moe_shared_expert_ffn_hidden_size": 32},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_trains_in_fp8_near_fp32_and_says_where(way: str) -> None:
    recipe = Fp8Recipe(first_layers=1, last_layers=1, stochastic_rounding=False)
    found, choices = losses(recipe, **WAYS[way])
    plain, _ = losses(None, **WAYS[way])
    assert found == pytest.approx(plain, rel=0.03)  # experts that are nearly tied may be chosen otherwise
    assert found != plain
    of_experts = {name: chosen for name, chosen in choices.items() if name.endswith("experts")}
    in_fp8 = {
        name.split(".")[1]: [c["why"] for c in chosen if c["op"] == "linear_fp8"] for name, chosen in of_experts.items()
    }
    assert len(in_fp8) == 4
    assert all("excludes the first" in why for layer in ("0", "3") for why in in_fp8[layer])
    assert all("excludes" not in why for layer in ("1", "2") for why in in_fp8[layer])


def test_an_excluded_product_stays_as_it_is() -> None:
    layer = MoELayer(CONFIG, ParallelMesh.single(), sequence_parallel=False)
    fc1 = layer.experts.grouped_linears()["fc1"]
    multiply_in_fp8(fc1, REFERENCE_KERNELS, Fp8Recipe(), LINEAR_FP8.choose("cpu"), multiple=1)
    assert list(layer.experts.products) == ["fc1"]
    steps = Fp8Steps([fc1], ParallelMesh.single())
    layer(torch.randn(8, 2, 32))[0].sum().backward()
    steps.after_optimizer_step()
    assert bool((steps.gemms[0].amax_history[0] > 0).all())

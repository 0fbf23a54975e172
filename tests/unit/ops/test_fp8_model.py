"""fp8 in a model: its coverage, its losses, refusals and checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import tiny_llama

from lightning_megatron import MegatronStrategy, ParallelLayout
from lightning_megatron.checkpoint import load, local_tensors, model_state, save
from lightning_megatron.checkpoint.loading import open_checkpoint
from lightning_megatron.checkpoint.tensors.keys import Key
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.fp8_linear import Fp8Gemms, Fp8Steps, multiply_in_fp8, use_fp8
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.fp8 import LINEAR_FP8, REFERENCE_KERNELS, Fp8Recipe
from lightning_megatron.ops.registry import Ops, choices_of
from lightning_megatron.params import spec_registry
from lightning_megatron.testing.parity import assert_same

TINY = tiny_llama(num_layers=4)


def in_fp8(model: GPTModel, recipe: Fp8Recipe) -> GPTModel:
    """As on a device that has the kernels."""
    selection, found = LINEAR_FP8.choose("cpu"), []
    for number, block in model.layers.items():
        for name, module in block.named_modules():
            linear = name.rpartition(".")[2]
            if linear in recipe.linears and recipe.excuse(linear, int(number), len(model.layers)) is None:
                multiply_in_fp8(module, REFERENCE_KERNELS, recipe, selection)
                found.append(module)
    model.fp8 = Fp8Steps(found, ParallelMesh.single())
    return model


def losses(model: GPTModel, steps: int = 30) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        if model.fp8 is not None:
            model.fp8.after_optimizer_step()
        found.append(loss.item())
    return found


def test_a_model_learns_in_fp8_as_it_does_without():
    torch.manual_seed(2)
    model = GPTModel(TINY)
    twin = in_fp8(copy.deepcopy(model), Fp8Recipe(first_layers=0, last_layers=0))
    assert sum(isinstance(m, Fp8Gemms) for m in twin.modules()) == 16
    plain, ours = losses(model), losses(twin)
    assert ours != plain
    assert ours == pytest.approx(plain, rel=0.05)
    assert ours[-1] < 0.7 * ours[0]


class WithKernels(Ops):
    """A device that has them."""

    def choose(self, op, unless=None):
        choice = super().choose(op, unless)
        return replace(choice, run=REFERENCE_KERNELS) if choice.op == "linear_fp8" else choice


def test_the_first_and_last_layers_and_odd_sizes_stay_as_they_are():
    ops = WithKernels("cpu", "linear_fp8=auto", Fp8Recipe(linears=("fc1", "fc2", "qkv")))
    model = GPTModel(TINY.replace(ffn_hidden_size=56))
    model.fp8 = use_fp8({int(n): block for n, block in model.layers.items()}, 4, ops, ParallelMesh.single())
    chosen = {name: c["why"] for name, found in choices_of(model).items() for c in found if c["op"] == "linear_fp8"}
    assert len(chosen) == 16
    assert "first 1 and last 1" in chosen["layers.0.mlp.fc1"]
    assert "first 1 and last 1" in chosen["layers.3.attention.qkv"]
    assert "only fc1, fc2, qkv" in chosen["layers.1.attention.out"]
    assert chosen["layers.1.mlp.fc2"] == "56 features, no multiple of 16"
    fp8 = {name.removesuffix(".products") for name, m in model.named_modules() if isinstance(m, Fp8Gemms)}
    assert fp8 == {f"layers.{i}.{part}" for i in (1, 2) for part in ("attention.qkv", "mlp.fc1")}
    # Checkpoints may lack the state of fp8, and of nothing else: the grammar of keys knows it by name.
    calibration = {name for name in model.state_dict() if Key("model", name).is_calibration}
    assert calibration == model.state_dict().keys() - dict(model.named_parameters()).keys()
    assert len(calibration) > 0


def test_where_there_is_no_fp8_auto_says_so_and_require_is_refused():
    model = GPTModel(TINY, ops=Ops("cpu", "linear_fp8=auto"))
    (choice,) = choices_of(model)["layers.1.mlp.fc1"]
    assert (choice["op"], choice["chosen"], choice["why"]) == (
        "linear_fp8",
        "reference",
        "there is nothing else for cpu",
    )
    with pytest.raises(ConfigError, match=r"linear_fp8=require.*no implementation of it for cpu"):
        GPTModel(TINY, ops=Ops("cpu", "linear_fp8=require"))
    assert GPTModel(TINY, ops=Ops("cpu")).fp8 is None


def test_what_fp8_is_not_for_is_refused():
    ops = Ops("hpu", "linear_fp8=auto")
    experts = TINY.replace(num_experts=4)
    assert ops.model_problems(ParallelLayout().resolve(1), experts, torch.bfloat16) == []
    (context_problem,) = ops.model_problems(ParallelLayout(cp=2).resolve(2), TINY)
    assert "cp=2" in context_problem.reason
    (dtype_problem,) = ops.model_problems(ParallelLayout().resolve(1), TINY, torch.float16)
    assert "bf16-mixed" in dtype_problem.reason
    assert ops.model_problems(ParallelLayout().resolve(1), TINY, torch.bfloat16) == []
    assert Ops("hpu").model_problems(ParallelLayout(cp=2).resolve(2), experts, torch.float16) == []
    with pytest.raises(ConfigError) as caught:
        MegatronStrategy(fp8=Fp8Recipe(("fc3",), amax_history_len=0, amax_compute="mean", margin=-1))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_with_scales_is_loaded_without_and_the_other_way_round(before, after, tmp_path):
    models = []
    for seed, fp8 in ((1, before), (2, after)):
        torch.manual_seed(seed)
        model = GPTModel(TINY)
        models.append(in_fp8(model, Fp8Recipe(stochastic_rounding=False)) if fp8 else model)
    first, second = models
    losses(first, 2)
    mesh = ParallelMesh.single()
    states = [model_state(local_tensors(model), spec_registry(model), mesh) for model in models]
    save(tmp_path / "a.ckpt", states[0], {}, mesh)
    load(tmp_path / "a.ckpt", states[1], mesh)
    found, right = ({n: p.detach() for n, p in model.named_parameters()} for model in (second, first))
    assert_same(found, right, rtol=0)
    if before and after:
        assert_same(dict(second.state_dict()), dict(first.state_dict()), rtol=0)
        assert losses(second, 2) == losses(first, 2)
    assert not any("products" in key for key in open_checkpoint(tmp_path / "a.ckpt").tensors())


def test_scales_that_an_earlier_version_saved_are_left_out(tmp_path):
    first, second = (in_fp8(GPTModel(TINY), Fp8Recipe(stochastic_rounding=False)) for _ in range(2))
    losses(first, 2)
    mesh = ParallelMesh.single()
    tensors = local_tensors(first)
    gemms = [name.removesuffix("amax_history") for name in tensors if name.endswith("products.amax_history")]
    assert gemms
    tensors |= {f"{name}scale": torch.full((3,), 2.0) for name in gemms}
    save(tmp_path / "a.ckpt", model_state(tensors, spec_registry(first), mesh), {}, mesh)
    loaded = load(tmp_path / "a.ckpt", model_state(local_tensors(second), spec_registry(second), mesh), mesh)
    assert loaded.unexpected == ()
    assert_same(dict(second.state_dict()), dict(first.state_dict()), rtol=0)
    assert losses(second, 2) == losses(first, 2), "the scales follow from the histories"

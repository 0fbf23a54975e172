"""fp8 products: numbers against what the formats are, scales against their formula, coverage and refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron import MegatronStrategy, ParallelLayout
from lightning_megatron.checkpoint import load, local_tensors, model_state, save
from lightning_megatron.checkpoint.keys import Key
from lightning_megatron.checkpoint.load import open_checkpoint
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.fp8_linear import Fp8Gemms, Fp8Steps, multiply_in_fp8, use_fp8
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.fp8 import REFERENCE_KERNELS, Fp8Recipe, cast_reference, choose_fp8_kernels, scale_for
from lightning_megatron.ops.registry import Ops, choices_of
from lightning_megatron.params import spec_registry
from lightning_megatron.testing.parity import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY = tiny_llama(num_layers=4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind: type[nn.Module] = ColumnParallelLinear, **recipe: object) -> tuple[nn.Module, Fp8Gemms, Fp8Steps]:
    torch.manual_seed(1)
    linear = kind(32, 48, bias=True)
    nn.init.normal_(linear.bias)
    products = multiply_in_fp8(linear, REFERENCE_KERNELS, Fp8Recipe(**recipe), choose_fp8_kernels("cpu")[1])
    return linear, products, Fp8Steps([products], ParallelMesh.single())


def in_fp32(linear: nn.Module) -> nn.Module:
    plain = ColumnParallelLinear(32, 48)
    plain.load_state_dict({name: value for name, value in linear.state_dict().items() if "." not in name})
    return plain


def rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """A tensor after rounding to fp8, in fp64."""
    largest = 240.0 if dtype is E4M3 else 57344.0
    return (x.double() * scale).clamp(-largest, largest).to(dtype).double() / scale


def own_scale(x: Tensor, dtype: torch.dtype) -> float:
    return 2.0 ** math.floor(math.log2((240.0 if dtype is E4M3 else 57344.0) / x.abs().max().item()))


def test_formats_round_to_three_and_two_bits_and_end_where_they_end():
    one = torch.ones(())
    x = torch.tensor([1.06, 1.07, 0.3, -1000.0, 240.0, 0.0])
    # E4M3 next to 1: steps of 1/8; next to 0.3: 1/32.
    assert cast_reference(x, one, E4M3).float().tolist() == [1.0, 1.125, 0.3125, -240.0, 240.0, 0.0]
    assert cast_reference(torch.tensor([1.1, 1.2, 1e6]), one, E5M2).float().tolist() == [1.0, 1.25, 57344.0]


@pytest.mark.parametrize(
    ("amax", "margin", "scale"),
    [
        (1.0, 0, 128.0),
        (240.0, 0, 1.0),
        (240.1, 0, 0.5),
        (3.0, 0, 64.0),
        (3.0, 2, 16.0),
        (0.0, 0, 1.0),
        (math.inf, 0, 1),
    ],
)
def test_scales_by_hand(amax: float, margin: int, scale: float):
    assert scale_for(torch.tensor(amax), 240.0, margin).item() == scale


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_multiplies_what_the_formats_leave(kind):
    linear, *_ = layer(kind)
    x, dy = random(8, 2, 32, seed=2).requires_grad_(), random(8, 2, 48, seed=3) * 1e-6
    out = linear(x)
    out.backward(dy)
    x8, w8 = rounded(x, E4M3, own_scale(x, E4M3)), rounded(linear.weight, E4M3, own_scale(linear.weight, E4M3))
    dy8 = rounded(dy, E5M2, own_scale(dy, E5M2))
    flat_x, flat_dy = x8.flatten(0, 1), dy8.flatten(0, 1)
    ours = {"out": out.detach(), "dx": x.grad, "dw": linear.weight.grad, "db": linear.bias.grad}
    right = {
        "out": x8 @ w8.t() + linear.bias.double(),
        "dx": dy8 @ w8,
        "dw": flat_dy.t() @ flat_x,
        "db": dy.double().sum((0, 1)),
    }
    assert_same(ours, {name: value.detach().float() for name, value in right.items()}, rtol=1e-5)


def test_fp8_is_near_the_real_product():
    linear, *_ = layer()
    x, plain = random(8, 2, 32, seed=2), in_fp32(linear)
    error = (linear(x) - plain(x)).norm() / plain(x).norm()
    assert 0.001 < error < 2**-4  # each factor is off by 2^-4 at most, and errors have either sign


def test_the_next_step_uses_what_was_seen():
    linear, products, steps = layer(amax_history_len=2)
    x = random(16, 32, seed=2)
    for growth, history in [(1.0, [1.0]), (4.0, [4.0, 1.0]), (0.5, [0.5, 4.0]), (0.25, [0.25, 0.5])]:
        for part in (growth * x, 0.5 * growth * x):  # two micro-batches
            linear(part.requires_grad_()).sum().backward()
        assert products.scale.numel() == 3
        steps.after_optimizer_step()
        seen = products.amax_history[: len(history), 0]
        assert_same({"seen": seen}, {"seen": torch.tensor(history) * x.abs().max()}, rtol=1e-6)
        amax = max(history) * x.abs().max().item()
        assert products.scale[0].item() == 2.0 ** math.floor(math.log2(240.0 / amax))
        assert products.scale[2].item() == 2.0 ** math.floor(math.log2(57344.0))  # gradients of a sum are 1


def test_what_grows_beyond_its_scale_is_cut_and_a_margin_leaves_room():
    x = random(16, 32, seed=2)
    for margin, is_cut in ((0, True), (3, False)):
        linear, products, steps = layer(margin=margin)
        linear(x.requires_grad_()).sum().backward()
        steps.after_optimizer_step()
        _, (scale, _) = products.forward(4.0 * x, linear.weight, None)
        largest = cast_reference(4.0 * x, scale, E4M3).float().abs().max().item()
        assert (largest == 240.0) == is_cut


def test_the_most_recent_step_alone_and_infinities():
    linear, products, steps = layer(amax_compute="most_recent")
    x = random(16, 32, seed=2)
    for factor in (1.0, 0.25):
        linear((factor * x).requires_grad_()).sum().backward()
        steps.after_optimizer_step()
    assert products.scale[0].item() == own_scale(0.25 * x, E4M3)
    linear(x.requires_grad_()).backward(torch.full((16, 48), math.inf))
    steps.after_optimizer_step()
    assert products.amax_history[0].tolist() == [x.abs().max().item(), linear.weight.abs().max().item(), 0.0]


def test_evaluation_leaves_scales_alone_and_they_ride_in_the_state():
    linear, products, steps = layer()
    x = random(16, 32, seed=2)
    linear(x.requires_grad_()).sum().backward()
    steps.after_optimizer_step()
    before = copy.deepcopy(linear.state_dict())
    assert set(before) == {"weight", "bias", "products.amax_history", "products.scale"}
    linear.eval()(100 * x)
    linear.train()
    steps.after_optimizer_step()
    assert products.amax_history[0].sum() == 0
    twin, *_ = layer()
    twin.load_state_dict(before)
    linear.load_state_dict(before)
    assert torch.equal(twin(3 * x), linear(3 * x))


def test_a_number_of_tokens_that_does_not_fit_is_multiplied_as_it_is():
    linear, *_ = layer()
    x = random(15, 32, seed=2)
    assert_same({"out": linear(x)}, {"out": in_fp32(linear)(x)})
    linear(x.requires_grad_()).sum().backward()
    assert linear.product_choice.fallbacks == {"15 tokens, no multiple of 16": "reference"}


def gradients_after_a_step(linear: nn.Module, steps: Fp8Steps, how: str) -> dict[str, Tensor]:
    x = torch.empty(0)
    for seed in (2, 3):
        linear.zero_grad()
        x = random(16, 32, seed=seed).requires_grad_()
        forward = torch.compile(linear, backend="aot_eager", fullgraph=True) if how == "compiled" else linear
        out = checkpoint(forward, x, use_reentrant=False) if how == "recomputed" else forward(x)
        if how == "put off":
            with linear.weight_grads.deferring() as pending:
                out.backward(random(16, 48, seed=seed))
            assert linear.weight.grad is None
            pending.flush()
        else:
            out.backward(random(16, 48, seed=seed))
        steps.after_optimizer_step()
    return {"dx": x.grad, "dw": linear.weight.grad, "db": linear.bias.grad, "scale": steps._gemms[0].scale}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("how", ["recomputed", "put off", "compiled"])
def test_recomputed_put_off_and_compiled_gradients_are_the_same(kind, how):
    linear, _, steps = layer(kind)
    right = gradients_after_a_step(linear, steps, "at once")
    linear, _, steps = layer(kind)
    linear.weight_grads.enabled = how == "put off"
    assert_same(gradients_after_a_step(linear, steps, how), right, rtol=0)


def in_fp8(model: GPTModel, recipe: Fp8Recipe) -> GPTModel:
    """As on a device that has the kernels."""
    selection, found = choose_fp8_kernels("cpu")[1], []
    for number, block in model.layers.items():
        for name, module in block.named_modules():
            linear = name.rpartition(".")[2]
            if linear in recipe.linears and recipe.excuse(linear, int(number), len(model.layers)) is None:
                found.append(multiply_in_fp8(module, REFERENCE_KERNELS, recipe, selection))
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

    def choose_fp8(self):
        return REFERENCE_KERNELS, super().choose_fp8()[1]


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
    (experts_problem,) = ops.model_problems(ParallelLayout().resolve(1), experts)
    assert "experts" in experts_problem.reason
    (context_problem,) = ops.model_problems(ParallelLayout(cp=2).resolve(2), TINY)
    assert "cp=2" in context_problem.reason
    assert Ops("hpu").model_problems(ParallelLayout(cp=2).resolve(2), experts) == []
    with pytest.raises(ConfigError) as caught:
        MegatronStrategy(fp8=Fp8Recipe(("fc3",), amax_history_len=0, amax_compute="mean", margin=-1))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_with_scales_is_loaded_without_and_the_other_way_round(before, after, tmp_path):
    models = []
    for seed, fp8 in ((1, before), (2, after)):
        torch.manual_seed(seed)
        model = GPTModel(TINY)
        models.append(in_fp8(model, Fp8Recipe()) if fp8 else model)
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
    assert not any("products" in key for key in open_checkpoint(tmp_path / "a.ckpt")[1])

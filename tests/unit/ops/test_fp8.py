"""fp8 products: numbers against what the formats are, scales against their formula."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.device import Fp8Arithmetic, arithmetic, fp8_arithmetic
from lightning_megatron.layers import fp8_linear
from lightning_megatron.layers.fp8_linear import Fp8Gemms, Fp8Steps, multiply_in_fp8
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.fp8 import (
    LINEAR_FP8,
    REFERENCE_KERNELS,
    Fp8Kernels,
    Fp8Recipe,
    cast_reference,
    reference_kernels,
    round_at_random,
    scale_for,
)
from lightning_megatron.testing.parity import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GAUDI2, GAUDI3 = Fp8Arithmetic(), Fp8Arithmetic(448.0, True)
TINY = tiny_llama(num_layers=4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(
    kind: type[nn.Module] = ColumnParallelLinear, kernels: Fp8Kernels = REFERENCE_KERNELS, **recipe: object
) -> tuple[nn.Module, Fp8Gemms, Fp8Steps]:
    torch.manual_seed(1)
    linear = kind(32, 48, bias=True)
    nn.init.normal_(linear.bias)
    options = {"stochastic_rounding": False, **recipe}
    products = multiply_in_fp8(linear, kernels, Fp8Recipe(**options), LINEAR_FP8.choose("cpu"))
    return linear, products, Fp8Steps([linear], ParallelMesh.single())


def in_fp32(linear: nn.Module) -> nn.Module:
    plain = ColumnParallelLinear(32, 48)
    plain.load_state_dict({name: value for name, value in linear.state_dict().items() if "." not in name})
    return plain


def rounded(x: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """A tensor after rounding to fp8 with a scale of its own, in fp64."""
    scale = own_scale(x, largest)
    return (x.double() * scale).clamp(-largest, largest).to(dtype).double() / scale


def own_scale(x: Tensor, largest: float = 240.0) -> float:
    return 2.0 ** math.floor(math.log2(largest / x.abs().max().item()))


def test_formats_round_to_three_and_two_bits_and_end_where_they_end():
    one = torch.ones(())
    x = torch.tensor([1.06, 1.07, 0.3, -1000.0, 240.0, 0.0])
    # E4M3 next to 1: steps of 1/8; next to 0.3: 1/32.
    values, amax = cast_reference(x, one, E4M3)
    assert values.float().tolist() == [1.0, 1.125, 0.3125, -240.0, 240.0, 0.0]
    assert amax.item() == 1000.0
    assert cast_reference(x, one, E4M3, largest_e4m3=448.0)[0].float().tolist()[3] == -448.0
    assert cast_reference(torch.tensor([1.1, 1.2, 1e6]), one, E5M2)[0].float().tolist() == [1.0, 1.25, 57344.0]


def test_the_formats_are_facts_of_the_card(monkeypatch):
    for name, right in {"GAUDI2": GAUDI2, "GAUDI3": GAUDI3, "GAUDI2D": GAUDI2, "unknown": GAUDI2}.items():
        monkeypatch.setattr(arithmetic, "device_name", lambda device, name=name: name)
        assert fp8_arithmetic(torch.device("hpu")) == right


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_rounding_at_random_goes_to_neighbours_and_keeps_the_mean(dtype):
    torch.manual_seed(3)
    largest = 240.0 if dtype is E4M3 else 57344.0
    for value in (0.3, -1.07, 2.0**-9 * 0.3, 2.0**-16 * 0.3, 200.7, 0.0, largest, -largest):
        x = torch.full((20_000,), value)
        found = round_at_random(x, dtype).float()
        near = x[:1].to(dtype).float().item()
        around = found.unique().tolist()
        assert len(around) <= 2
        assert near in around or around == [0.0]
        step = max(around) - min(around)
        assert found.mean().item() == pytest.approx(value, abs=0.02 * step + 1e-12)
        assert step > 0 or value == near


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


@pytest.mark.parametrize("card", [GAUDI2, GAUDI3], ids=["GAUDI2", "GAUDI3"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_multiplies_what_the_formats_leave(kind, card):
    linear, *_ = layer(kind, reference_kernels(card))
    x, dy = random(8, 2, 32, seed=2).requires_grad_(), random(8, 2, 48, seed=3) * 1e-6
    out = linear(x)
    out.backward(dy)
    x8, w8 = (rounded(each, E4M3, card.largest_e4m3) for each in (x, linear.weight))
    dy8 = rounded(dy, E5M2, 57344.0)
    # In backward, Gaudi 2 has both operands in E5M2, each with a scale of its own.
    x_back, w_back = (x8, w8) if card is GAUDI3 else (rounded(each, E5M2, 57344.0) for each in (x, linear.weight))
    flat_x, flat_dy = x_back.flatten(0, 1), dy8.flatten(0, 1)
    ours = {"out": out.detach(), "dx": x.grad, "dw": linear.weight.grad, "db": linear.bias.grad}
    right = {
        "out": x8 @ w8.t() + linear.bias.double(),
        "dx": dy8 @ w_back,
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
        assert products.scale.numel() == 5
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
        largest = cast_reference(4.0 * x, products.scale[0], E4M3)[0].float().abs().max().item()
        assert (largest == 240.0) == is_cut


def test_magnitudes_of_a_skipped_step_do_not_count():
    """Against a layer without that step."""
    found = []
    for skips in (True, False):
        linear, products, steps = layer()
        if skips:
            (100 * linear(100 * random(16, 32, seed=3))).sum().backward()
            steps.forget_step()
        linear(random(16, 32, seed=2)).sum().backward()
        steps.after_optimizer_step()
        found.append({"scales": products.scale, "history": products.amax_history})
    assert_same(*found, rtol=0)


def test_the_most_recent_step_alone_and_infinities():
    linear, products, steps = layer(amax_compute="most_recent")
    x = random(16, 32, seed=2)
    for factor in (1.0, 0.25):
        linear((factor * x).requires_grad_()).sum().backward()
        steps.after_optimizer_step()
    assert products.scale[0].item() == own_scale(0.25 * x)
    assert products.scale[3].item() == own_scale(0.25 * x, 57344.0)
    linear(x.requires_grad_()).backward(torch.full((16, 48), math.inf))
    steps.after_optimizer_step()
    assert products.amax_history[0].tolist() == [x.abs().max().item(), linear.weight.abs().max().item(), 0.0]


def test_evaluation_leaves_scales_alone_and_they_ride_in_the_state():
    linear, products, steps = layer()
    x = random(16, 32, seed=2)
    linear(x.requires_grad_()).sum().backward()
    steps.after_optimizer_step()
    before = copy.deepcopy(linear.state_dict())
    assert set(before) == {"weight", "bias", "products.amax_history"}
    linear.eval()(100 * x)
    linear.train()
    steps.after_optimizer_step()
    assert products.amax_history[0].sum() == 0
    twin, _, twin_steps = layer()
    twin.load_state_dict(before)
    linear.load_state_dict(before)
    twin_steps.refresh()
    steps.refresh()
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
    return {"dx": x.grad, "dw": linear.weight.grad, "db": linear.bias.grad, "scale": steps.gemms[0].scale}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("how", ["recomputed", "put off", "compiled"])
def test_recomputed_put_off_and_compiled_gradients_are_the_same(kind, how):
    linear, _, steps = layer(kind)
    right = gradients_after_a_step(linear, steps, "at once")
    linear, _, steps = layer(kind)
    linear.weight_grads.enabled = how == "put off"
    assert_same(gradients_after_a_step(linear, steps, how), right, rtol=0)


class Counting:
    """Kernels that count casts and note the formats of products."""

    def __init__(self, card: Fp8Arithmetic) -> None:
        self.own, self.casts, self.formats = reference_kernels(card), [], []
        self.kernels = Fp8Kernels(self.cast, self.cast_both, self.product, card)

    def cast(self, x: Tensor, scale: Tensor, dtype: torch.dtype, stochastic: bool) -> tuple[Tensor, Tensor]:
        self.casts.append(("weight" if x.shape == (48, 32) else "other", dtype, stochastic))
        return self.own.cast(x, scale, dtype, stochastic)

    def cast_both(self, x: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        self.casts.append(("weight", "both", False))
        return self.own.cast_both(x, *scales)

    def product(self, a: Tensor, b: Tensor, *rest: object) -> Tensor:
        self.formats.append((a.dtype, b.dtype))
        return self.own.product(a, b, *rest)

    def of_weights(self) -> int:
        found = sum(name == "weight" for name, *_ in self.casts)
        self.casts.clear()
        return found


@pytest.mark.parametrize("card", [GAUDI2, GAUDI3], ids=["GAUDI2", "GAUDI3"])
def test_the_operands_of_a_product_have_the_formats_that_the_card_multiplies(card):
    counting = Counting(card)
    linear, *_ = layer(kernels=counting.kernels, stochastic_rounding=True)
    linear(random(16, 32).requires_grad_()).sum().backward()
    partner = E5M2 if card is GAUDI2 else E4M3
    assert counting.formats == [(E4M3, E4M3), (E5M2, partner), (E5M2, partner)]
    rounded_at_random = {dtype for _, dtype, stochastic in counting.casts if stochastic}
    assert rounded_at_random == {E5M2}
    assert sum(stochastic for *_, stochastic in counting.casts) == 1  # the gradient, and nothing else


def batch_of(linear: nn.Module, steps: Fp8Steps, how: str = "", first: bool = True, seeds=(2, 3, 4)) -> Tensor:
    """Forward and backward of some micro-batches in the order of a pipeline: all forwards first."""
    steps.begin_batch(first)
    outs = []
    for seed in seeds:
        steps.refresh()
        x = random(16, 32, seed=seed).requires_grad_()
        outs.append(checkpoint(linear, x, use_reentrant=False) if how == "recomputed" else linear(x))
    for out in outs:
        out.square().sum().backward()
    return torch.stack([out.detach() for out in outs])


def taken_step(linear: nn.Module, steps: Fp8Steps, how: str) -> dict[str, Tensor]:
    outs = batch_of(linear, steps, how)
    found = {"outs": outs, "dw": linear.weight.grad.clone(), "scales": linear.products.scale.clone()}
    with torch.no_grad():
        linear.weight.sub_(0.001 * linear.weight.grad)
    linear.zero_grad()
    steps.after_optimizer_step()
    assert linear.products.kept_weight is None
    return found


@pytest.mark.parametrize("card", [GAUDI2, GAUDI3], ids=["GAUDI2", "GAUDI3"])
@pytest.mark.parametrize("how", ["", "recomputed"])
def test_a_weight_is_cast_once_in_a_step_with_the_numbers_of_casting_it_each_time(card, how):
    counting = Counting(card)
    linear, _, steps = layer(kernels=counting.kernels)
    other, _, other_steps = layer(kernels=reference_kernels(card), keep_weights=False)
    found, pairs = [], ((linear, steps), (other, other_steps))
    for _ in range(5):
        kept, anew = (taken_step(each, its_steps, how) for each, its_steps in pairs)
        assert_same(kept, anew, rtol=0)
        found.append(counting.of_weights())
    assert found[-2:] == [1, 1]  # before there is a history, weights are not kept


def test_a_weight_that_was_written_is_cast_again():
    counting = Counting(GAUDI2)
    linear, _, steps = layer(kernels=counting.kernels)
    for _ in range(3):
        batch_of(linear, steps)
        steps.after_optimizer_step()
    counting.casts.clear()
    batch_of(linear, steps)
    assert counting.of_weights() == 1
    batch_of(linear, steps, first=False)  # the next of the batches that are accumulated
    assert counting.of_weights() == 0

    def write_in_place() -> None:
        with torch.no_grad():
            linear.weight.mul_(0.5)

    def write_elsewhere() -> None:
        linear.weight.data = 0.5 * linear.weight.data

    def load() -> None:
        linear.load_state_dict({name: 2 * value for name, value in linear.state_dict().items()})

    for write in (write_in_place, write_elsewhere, load):
        write()
        outs = batch_of(linear, steps, first=False)
        assert counting.of_weights() == 1
        plain = in_fp32(linear)(random(16, 32, seed=2))
        assert (outs[0] - plain).norm() < 0.1 * plain.norm()
    linear.weight.data.mul_(0.5)  # leaves no trace: the strategy begins anew where that may have happened
    batch_of(linear, steps, first=True)
    assert counting.of_weights() == 1
    steps.forget_step()
    batch_of(linear.eval(), steps)
    assert linear.products.kept_weight is None, "in evaluation nothing is kept"


def test_with_a_history_the_largest_magnitudes_come_from_the_casts(monkeypatch):
    passes = []
    original = fp8_linear.largest_magnitude
    monkeypatch.setattr(fp8_linear, "largest_magnitude", lambda x: passes.append(x) or original(x))
    linear, products, steps = layer()
    found = []
    for _ in range(4):
        batch_of(linear, steps)
        steps.after_optimizer_step()
        found.append(len(passes))
        passes.clear()
    assert found[0] > 0
    assert found[-1] == 0  # the host learns of the history one step later, without waiting for the device
    assert products.amax_history[0, 1].item() == linear.weight.abs().max().item()


def test_ranks_exchange_the_largest_magnitudes_of_all_layers_at_once(monkeypatch):
    exchanged = []
    monkeypatch.setattr(fp8_linear, "all_reduce_max", lambda x, axis: exchanged.append(x.shape) or x)
    layers = [layer()[0] for _ in range(3)]
    Fp8Steps(layers, ParallelMesh.single()).after_optimizer_step()
    assert exchanged == [(3, 3), (3, 3)]  # over tp, and over dp and cp: layers, and input, weight, gradient


def test_fp16_is_multiplied_as_it_is():
    linear, *_ = layer()
    out = linear.half()(random(16, 32).half())
    assert out.dtype == torch.float16
    assert linear.product_choice.fallbacks == {"torch.float16": "reference"}

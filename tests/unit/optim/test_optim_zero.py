from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.edits import _copy_unequal
from lightning_megatron.optim.clip import local_norm
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.core.update_scope import ELEMENTWISE
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs

BF16 = torch.bfloat16


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, reduce_late: Sequence[str] = (), **options: Any
) -> ShardedOptimizer:
    config = DistributedOptimizerConfig(**options)
    return ShardedOptimizer(optimizer, named_specs(model), ParallelMesh.single(), config, reduce_late)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()


@pytest.mark.parametrize(("main_dtype", "moves"), [(torch.float32, True), (None, False)])
def test_small_updates_move_only_parameters_with_main_values(main_dtype: torch.dtype | None, moves: bool) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=BF16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    zero = wrap(model, optimizer, main_dtype=main_dtype)
    for _ in range(1000):
        zero.zero_grads()
        model(torch.ones(1, 1, dtype=BF16)).sum().backward()
        zero.finish_grad_sync()
        optimizer.step()
        zero.start_param_gather()
    assert model.weight.item() == (pytest.approx(0.99, abs=2**-8) if moves else 1.0)
    assert (model.weight.item() < 1.0) is moves
    assert zero.main_params[0][0].item() == (pytest.approx(0.99, abs=3e-5) if moves else 1.0)


def test_elements_written_through_data_reach_main_values_and_no_others_change() -> None:
    torch.manual_seed(0)
    model = nn.Linear(700, 800, bias=False, dtype=BF16)  # several blocks of comparison
    zero = wrap(model, torch.optim.SGD(model.parameters()), main_dtype=torch.float32)
    zero.compare_values = True
    main = zero.main_params[0].detach()
    main.view(-1)[:] *= 1 + 2**-12  # bits that bf16 does not hold, and that it rounds away
    expected = main.clone()
    written = {0: 3.0, 300_000: torch.nan, 559_999: -5.0}
    for place, value in written.items():
        model.weight.data.view(-1)[place] = expected[place] = value
    zero.copy_written_values()
    kept = expected.to(BF16) == model.weight.detach().view(-1)
    expected = torch.where(kept, expected, model.weight.detach().view(-1).float())
    torch.testing.assert_close(main[: len(expected)], expected, rtol=0, atol=0, equal_nan=True)
    assert 0.5 < kept.float().mean() < 1


class Largest(TorchDispatchMode):
    """Elements of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(("device", "block"), [("cpu", 1 << 18), ("meta", 1 << 24)])
def test_values_are_compared_in_blocks_on_accelerators_too(device: str, block: int) -> None:
    """A comparison at once takes up to 9 bytes more for each parameter of a bucket."""
    values, kept = (torch.zeros(2 * block + 3, dtype=dtype, device=device) for dtype in (BF16, torch.float32))
    with Largest() as seen:
        _copy_unequal(values, kept)
    assert seen.elements == block


@pytest.mark.parametrize("alias", [True, False])
def test_gradients_of_bf16_parameters_add_up_in_fp32(alias: bool) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=BF16)
    zero = wrap(model, torch.optim.SGD(model.parameters()), alias_grads=alias)
    for value in (256.0, 1.0, 1.0, 1.0):  # in bf16, 256 + 1 is 256
        model(torch.full((1, 1), value, dtype=BF16)).sum().backward()
    assert zero.main_grad("weight").dtype == torch.float32
    assert zero.main_grad("weight").item() == 259.0
    assert (model.weight.grad is None) is not alias


class OldParameter(nn.Parameter):
    """A parameter of a torch before 2.10, which has no ``grad_dtype``."""

    @property
    def grad_dtype(self) -> torch.dtype:  # type: ignore[override]
        raise AttributeError("grad_dtype")


def test_before_torch_2_10_too_gradients_are_views_that_add_up_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=BF16)
    model.weight = OldParameter(model.weight.detach())
    assert not hasattr(model.weight, "grad_dtype")
    zero = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), alias_grads=True)
    values, version = model.weight.detach().clone(), model.weight._version
    for value in (256.0, 1.0, 1.0, 1.0):
        model(torch.full((1, 1), value, dtype=BF16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 259.0
    assert torch.equal(model.weight, values)
    assert model.weight._version == version
    model.weight.grad.mul_(2)
    assert zero.main_grad("weight").item() == 518.0
    model.weight.grad = None
    zero.finish_grad_sync()
    assert zero.main_params[0].grad is None


def test_gradients_are_views_and_survive_what_users_do_to_them() -> None:
    model, plain = net(), net()
    zero = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zero.zero_grads()
    buffer = zero.buffers[0].grads
    for both in (model, plain):
        backward(both, 0)
        both.zero_grad()  # drops what was accumulated, in torch and here
        backward(both, 1)
        both[0].weight.grad = both[0].weight.grad * 2
        backward(both, 2)
        both[2].bias.grad = None
    zero.finish_grad_sync()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["2.bias"]
    held = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert held == [buffer.data_ptr()] * 3
    for (name, _), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            torch.testing.assert_close(zero.main_grad(name), reference.grad)


@pytest.mark.parametrize("clears_itself", [True, False])
def test_a_norm_of_nan_is_gone_with_its_gradients(clears_itself: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    zero = wrap(model, optimizer)
    norms = []
    for step in range(3):
        zero.zero_grads() if clears_itself else optimizer.zero_grad()
        zero.continue_accumulation()
        backward(model)
        if step == 1:
            model[0].weight.grad.fill_(float("nan"))
        zero.finish_grad_sync()
        norms.append(float(zero.clip_by_norm(1.0)))
    assert norms[1] != norms[1]
    assert norms[2] == norms[0]


def test_a_step_whose_gradients_the_user_dropped_changes_nothing() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    zero = wrap(model, optimizer)
    backward(model)
    zero.finish_grad_sync()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    assert float(zero.clip_by_norm(1.0)) == 0.0
    optimizer.step()
    zero.start_param_gather()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_main_values_share_memory_with_parameters_of_their_dtype() -> None:
    model = net()
    zero = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert zero.state_bytes == 0
    assert zero.main_params[0].data_ptr() == zero.buffers[0].params.data_ptr()


def test_weights_loaded_from_elsewhere_reach_the_main_values() -> None:
    model = net(BF16)
    zero = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    zero.refresh_main()
    main = {shard.name: shard.main for shard in zero.param_shards()}
    assert (main["0.weight"] == 0.5).all()
    main["0.weight"].fill_(0.25)
    zero.refresh_params()
    assert (model[0].weight == 0.25).all()


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_state_is_allocated_as_the_optimizer_would(kind: type[torch.optim.Optimizer]) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    states = []
    for allocate in (True, False):
        model = net()
        optimizer = kind(model.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]
        zero = wrap(model, optimizer)
        if allocate:
            before = [p.detach().clone() for p in model.parameters()]
            zero.init_state()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            if kind not in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adamax):
                backward(model)
                zero.finish_grad_sync()
                optimizer.step()
        else:
            backward(model)
            zero.finish_grad_sync()
            optimizer.step()
        states.append((zero.param_shards(), [p.detach().clone() for p in model.parameters()]))
    (allocated, weights), (real, expected) = states
    for mine, true in zip(allocated, real, strict=True):
        assert (mine.name, mine.spec, mine.start, mine.end) == (true.name, true.spec, true.start, true.end)
        assert {n: (v.shape, v.dtype) for n, v in mine.state.items()} == {
            n: (v.shape, v.dtype) for n, v in true.state.items()
        }
        assert set(mine.shared) == set(true.shared)
    if kind not in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adamax):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))  # as if it had been fresh


def test_unknown_state_and_shards_are_named() -> None:
    model = net()
    zero = wrap(model, torch.optim.AdamW(model.parameters()))
    zero.init_state()
    shard = zero.param_shards()[0]
    with pytest.raises(KeyError, match="momentum"):
        zero.load_shard_state(shard, state={"momentum": torch.zeros(shard.end - shard.start)})
    with pytest.raises(KeyError, match="no shard elsewhere"):
        zero.load_shard_state(replace(shard, name="elsewhere"))


def test_group_names_follow_the_users_groups() -> None:
    model = net()
    groups = [{"params": [model[2].bias, model[0].bias]}, {"params": [model[0].weight]}, {"params": []}]
    zero = wrap(model, torch.optim.SGD(groups, lr=0.1))
    assert zero.group_names() == [["2.bias", "0.bias"], ["0.weight"], []]
    assert model[2].weight.grad is None  # in no group: left alone


class RowWise(torch.optim.Optimizer):
    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]


class MyAdam(torch.optim.Adam):
    pass


def test_subclasses_of_element_wise_optimizers_are_welcome() -> None:
    model = net()
    assert wrap(model, MyAdam(model.parameters())).main_params


class Fills(RowWise):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        params = self.param_groups[0]["params"]
        self.seen = [(tuple(p.shape), p.dtype) for p in params]
        params[1].fill_(0.5)


def test_an_optimizer_of_whole_parameters_sees_their_shapes_on_one_rank() -> None:
    model = net(BF16)
    optimizer = Fills([model[2].bias, model[0].weight])
    zero = wrap(model, optimizer)
    assert zero.group_names() == [["2.bias", "0.weight"]]
    optimizer.step()
    assert optimizer.seen == [((2,), torch.float32), ((9, 6), torch.float32)]
    assert optimizer.param_groups[0]["params"] == [model[2].bias, model[0].weight]
    assert (model[0].weight == 0.5).all()


def test_lbfgs_is_refused_with_advice() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"LBFGS.*runs its closure several times a step.*AdamW"):
        wrap(model, torch.optim.LBFGS(model.parameters()))


def test_faulty_groups_are_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].bias, nn.Parameter(torch.ones(7))]})
    with pytest.raises(ConfigError) as error:
        wrap(model, optimizer)
    assert [problem.argument for problem in error.value.problems] == ["param_groups[1]"] * 2
    assert "'0.bias', which param_groups[0] holds too" in str(error.value)
    assert "shape (7,) that is not in the model" in str(error.value)


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    model = net()
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        optimizer = kind(model.parameters())
        backward(model)
        optimizer.step()
        with pytest.raises(ConfigError, match="has already taken steps"):
            wrap(model, optimizer)


def test_meta_parameters_and_unknown_names_are_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match="'weight', which is on the meta device"):
        wrap(model, torch.optim.SGD(model.parameters()))
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"reduce_late=.*'head'"):
        wrap(model, torch.optim.SGD(model.parameters()), reduce_late=["head"])


def test_norm_of_a_long_vector_is_exact_to_fp32() -> None:
    x = torch.randn(64 * 200_000, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(x, dtype=torch.float64).item()
    assert local_norm(x).item() == pytest.approx(exact, rel=3e-7)
    assert local_norm(torch.ones(65)).item() == pytest.approx(65**0.5)
    assert local_norm(torch.full((128,), 2.0, dtype=BF16)).dtype == torch.float32

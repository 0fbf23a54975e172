"""Weight gradients that layers add to the flat buffers themselves, held against autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.lightning.compat._private import has_hooks
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.accumulate import add_, add_product_, add_rows_
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs
from lightning_megatron.weight_grad_store import BLOCK, GradPlace
from tests.tiny import tiny_llama

LENGTH, VOCAB = 12, 64
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "experts": {"num_experts": 4, "moe_router_topk": 2},
    "experts that drop": {"num_experts": 4, "moe_router_topk": 2, "moe_capacity_factor": 1.0},
    "gpt": {"add_bias_linear": True, "norm": "layernorm", "activation": "gelu", "position_embedding": "learned"},
}


class Case:
    """A model on flat buffers whose layers add gradients themselves, or do not."""

    def __init__(self, adds: bool, dtype: torch.dtype = torch.float32, recompute: Any = None, **fields: Any) -> None:
        torch.manual_seed(0)
        mesh = ParallelMesh.single()
        config = tiny_llama(vocab_size=VOCAB, **fields)
        self.model = GPTModel(config, mesh, recompute=RecomputePlan(recompute)).to(dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.zero = ShardedOptimizer(optimizer, named_specs(self.model), mesh, DistributedOptimizerConfig())
        self.store, self.found = mesh.weight_grads, set[int]()
        if adds:
            self.store.set_places(self._find)

    def _find(self, param: Tensor) -> GradPlace | None:
        place = None if has_hooks(param) else self.zero.places()[id(param)]()
        if place is not None:
            self.found.add(id(param))
        return place

    def loss(self, seed: int) -> Tensor:
        tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        loss: Tensor = self.model(tokens[:, :-1], labels=tokens[:, 1:])
        return loss

    def backward(self, seed: int) -> None:
        loss = self.loss(seed)
        with self.store.accumulating():
            loss.backward()

    def grads(self) -> Tensor:
        self.zero.finish_grad_sync()
        return torch.cat([buffer.grads for buffer in self.zero.buffers])


def both(dtype: torch.dtype = torch.float32, **how: Any) -> tuple[Case, Case]:
    return Case(True, dtype, **how), Case(False, dtype, **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_sums_over_micro_batches_are_those_of_autograd(kind: str, dtype: torch.dtype, recompute: str | None) -> None:
    cases = both(dtype, recompute=recompute, **KINDS[kind])
    for case in cases:
        for _ in range(2):  # what the first step left in the buffers is overwritten
            case.zero.zero_grads()
            for seed in range(3):
                case.backward(seed)
            case.grads()
    ours, autograds = (case.grads() for case in cases)
    added = {name for name, param in cases[0].model.named_parameters() if id(param) in cases[0].found}
    assert {name for name in added if "weight" not in name} == {
        name for name, _ in cases[0].model.named_parameters() if name.endswith((".fc1", ".fc2"))
    }
    assert len(added) >= 8
    torch.testing.assert_close(
        ours, autograds, rtol=0, atol=(1e-6 if dtype == torch.float32 else 2e-2) * autograds.abs().max()
    )


def test_hooks_of_a_parameter_see_its_gradient() -> None:
    seen: list[float] = []
    for case in both():
        weight = case.model.layers["0"].mlp.fc1.weight
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(lambda param: seen.append(float(param.grad.norm())))
        for seed in range(2):
            case.backward(seed)
        seen.append(float(case.grads().norm()))
    assert seen[:3] == pytest.approx(seen[3:], rel=1e-6)


def test_one_hook_of_the_user_is_told_from_that_of_the_bucket_and_runs_before_it() -> None:
    case = Case(True)
    weight, seen = case.model.layers["0"].mlp.fc1.weight, list[Tensor]()
    assert not has_hooks(weight)
    handle = weight.register_post_accumulate_grad_hook(seen.append)
    assert has_hooks(weight)
    case.zero.hook_last(has_hooks)
    hooks: dict[int, Any] = weight._post_accumulate_grad_hooks
    assert len(hooks) == 2
    next(iter(hooks.values()))(weight)
    assert len(seen) == 1, "the user's hook is the first"
    handle.remove()
    assert not has_hooks(weight)


def test_a_backward_that_is_differentiated_again_leaves_the_buffers_to_autograd() -> None:
    """Against the gradients of autograd; an addition that autograd records would tie the buffers to the graph."""
    cases = both(**KINDS["gpt"])
    for case in cases:
        with case.store.accumulating():
            case.loss(0).backward(create_graph=True)
        assert not any(buffer.grads.requires_grad for buffer in case.zero.buffers)
    assert not cases[0].found
    torch.testing.assert_close(*(case.grads() for case in cases), rtol=0, atol=0)


def test_gradients_that_a_caller_asks_for_are_returned() -> None:
    case = Case(True)
    case.backward(0)
    before = case.zero.main_grad("embedding.word.weight").clone()
    params = list(case.model.parameters())
    asked = torch.autograd.grad(case.loss(1), params)
    assert torch.equal(case.zero.main_grad("embedding.word.weight"), before)
    case.zero.zero_grads()
    case.backward(1)
    for param, grad in zip(params, asked, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-5, atol=1e-7)


def test_gradients_mean_to_the_user_what_they_mean_in_torch() -> None:
    cases = both()
    for case in cases:
        first, second = (case.model.layers["0"].mlp.fc1.weight, case.model.layers["0"].mlp.fc2.weight)
        assert first.grad is None
        case.backward(0)
        assert first.grad is not None
        first.grad = None  # discards
        second.grad = second.grad * 3
        case.backward(1)
    torch.testing.assert_close(*(case.grads() for case in cases), rtol=1e-5, atol=1e-7)


def test_frozen_parameters_get_no_gradient() -> None:
    case = Case(True)
    frozen = case.model.layers["0"].mlp.fc1.weight
    frozen.requires_grad_(False)
    case.backward(0)
    assert frozen.grad is None
    assert case.model.layers["0"].mlp.fc2.weight.grad is not None


def test_copies_of_a_store_know_no_places() -> None:
    import copy

    case = Case(True)
    assert case.store.has_places
    assert not copy.deepcopy(case.store).has_places


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_ignore_what_a_new_place_holds(is_new: bool, dtype: torch.dtype) -> None:
    def place() -> GradPlace:
        return GradPlace(torch.full((2, 3, 4), float("nan") if is_new else 1.0), is_new)

    base = 0.0 if is_new else 1.0
    value, scale = torch.randn(2, 3, 4).to(dtype), torch.tensor(0.3)
    a, b = torch.randn(6, 5).to(dtype), torch.randn(5, 4).to(dtype)
    rows = torch.tensor([1, 0, 1])
    for done, wanted in (
        ((p := place(), add_(p, value))[0], value.float()),
        ((p := place(), add_(p, value, scale))[0], value.float() * scale),
        ((p := place(), add_product_(p, a, b))[0], (a.float() @ b.float()).view(2, 3, 4)),
    ):
        torch.testing.assert_close(done.grad, base + wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=3e-2)
    flat = GradPlace(torch.full((2, 4), float("nan") if is_new else 1.0), is_new)
    add_rows_(flat, rows, torch.ones(3, 4, dtype=dtype))
    assert torch.equal(flat.grad, base + torch.tensor([[1.0], [2.0]]).expand(2, 4))


class Additions(TorchDispatchMode):
    """Number of additions into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "add" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "number"), [("cpu", 3), ("meta", 1)])
def test_only_processors_with_caches_add_in_blocks(device: str, number: int) -> None:
    """A kernel of each block is what an accelerator would pay for."""
    place = GradPlace(torch.zeros(3 * BLOCK, device=device), False)
    with Additions() as seen:
        add_(place, torch.ones(3 * BLOCK, dtype=torch.bfloat16, device=device))
    assert seen.number == number


class Products(TorchDispatchMode):
    """Dtypes of the operands of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_without_bf16_arithmetic_multiplies_in_fp32_for_any_sum(
    is_new: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_megatron.ops.matmul.multiplies_bf16", lambda device: False)
    a, b = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    place = GradPlace(torch.full((32, 48), float("nan") if is_new else 1.0, dtype=dtype), is_new)
    with Products() as products:
        add_product_(place, a, b)
    assert products.dtypes == {torch.float32}
    wanted = (a.double() @ b.double() + (0.0 if is_new else 1.0)).to(dtype)
    torch.testing.assert_close(place.grad, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)

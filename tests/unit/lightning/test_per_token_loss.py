"""Sums over tokens become one mean: the arithmetic, on one replica."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron.lightning.step.per_token_loss import TokenCounter
from lightning_megatron.lightning.step.stage_work import TrainingWork
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs
from lightning_megatron.stage import StageBoundary


def window() -> TokenCounter:
    return TokenCounter(ParallelMesh.single().dp, Returns())


def counted(loss: float, tokens: Any) -> dict[str, Any]:
    return {"loss": torch.tensor(loss), "num_tokens": tokens}


@pytest.mark.parametrize("tokens", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), torch.tensor(3, dtype=torch.int32)])
def test_a_batch_shows_its_mean_and_keeps_what_else_it_has(tokens: Any) -> None:
    shown = window().normalize(counted(6.0, tokens) | {"name": "x"})
    assert shown == {"loss": torch.tensor(2.0), "num_tokens": torch.tensor(3.0), "name": "x"}


def test_the_gradient_of_the_shown_loss_is_the_sums() -> None:
    weight = torch.tensor(0.3, requires_grad=True)
    shown = window().normalize({"loss": 0.1 * weight, "num_tokens": 7})["loss"]
    assert shown.item() == pytest.approx(0.03 / 7, rel=1e-6)
    shown.backward()
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(0.1)


def test_the_factor_is_of_all_batches_of_a_window_and_forgotten_after_it() -> None:
    tokens = window()
    assert tokens.gradient_factor(1) is None
    for n in (1, 5, 2):
        tokens.normalize(counted(1.0, n))
    factor = tokens.gradient_factor(3)
    assert factor is not None
    assert factor.item() == pytest.approx(3 / 8)  # each loss was divided by 3
    tokens.restart()
    tokens.normalize(counted(1.0, 4))
    factor = tokens.gradient_factor(1)
    assert factor is not None
    assert factor.item() == 0.25


def test_no_tokens_at_all_are_zero_and_no_nan() -> None:
    tokens = window()
    assert tokens.normalize(counted(0.0, 0))["loss"].item() == 0.0
    factor = tokens.gradient_factor(2)
    assert factor is not None
    assert factor.item() == 0.0
    tokens.normalize(counted(6.0, 4))  # an accumulated batch that has some
    factor = tokens.gradient_factor(2)
    assert factor is not None
    assert factor.item() == 0.5


@pytest.mark.parametrize("output", [None, torch.tensor(2.0), {"loss": torch.tensor(2.0), "else": 1}])
def test_a_loss_that_is_a_mean_passes_untouched(output: Any) -> None:
    tokens = window()
    assert tokens.normalize(output) is output
    assert tokens.gradient_factor(4) is None


@pytest.mark.parametrize("first", [True, False])
def test_batches_of_one_window_that_differ_are_refused(first: bool) -> None:
    outputs = [counted(1.0, 2), torch.tensor(1.0)]
    tokens = window()
    tokens.normalize(outputs[not first])
    tokens.normalize(None)  # skipped: says nothing
    with pytest.raises(MisconfigurationException, match="for some of the batches or micro-batches of one optimizer"):
        tokens.normalize(outputs[first])
    tokens.restart()
    tokens.normalize(outputs[first])


def test_a_number_for_each_sample_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"must be one number; got shape \(2,\)"):
        window().normalize(counted(1.0, torch.tensor([1, 2])))


# Micro-batches


class Returns(LightningModule):
    """Its ``training_step`` returns what the batch holds."""

    sums_over_tokens = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def work(outputs: list[Any], scale: float = 1.0) -> tuple[TrainingWork, list[Tensor | None]]:
    pieces = [(output, 1 / len(outputs)) for output in outputs]
    found = TrainingWork(Returns(), pieces, (0,), StageBoundary(1), scale)
    return found, [found.forward(0, i, None) for i in range(len(outputs))]


def test_sums_of_micro_batches_are_added_up_and_means_are_weighted() -> None:
    sums, differentiated = work([counted(1.0, 1), None, counted(5.0, torch.tensor(3))], scale=8.0)
    assert differentiated == [8.0, None, 40.0]
    assert sums.totals == [6.0, 4.0]
    assert sums.output(sums.totals, sums.extras) == {"loss": 6.0, "num_tokens": 4.0}
    means, differentiated = work([torch.tensor(1.0), torch.tensor(5.0)], scale=8.0)
    assert differentiated == [4.0, 20.0]
    assert means.totals == [3.0]
    assert means.output(means.totals, means.extras) == 3.0


def test_entries_besides_are_joined() -> None:
    found, _ = work([counted(1.0, 1) | {"x": torch.ones(2)}, counted(5.0, 3) | {"x": torch.zeros(1)}])
    output = found.output(found.totals, found.extras)
    assert output.keys() == {"loss", "num_tokens", "x"}
    assert output["x"].tolist() == [1, 1, 0]


def test_a_stage_that_ran_no_whole_step_learns_loss_and_tokens() -> None:
    found, _ = work([])
    assert found.totals == []
    assert found.output([], None) is None
    assert found.output([torch.tensor(6.0)], None) == 6.0
    assert found.output([torch.tensor(6.0), torch.tensor(4.0)], None) == {"loss": 6.0, "num_tokens": 4.0}


@pytest.mark.parametrize("outputs", [[counted(1.0, 1), torch.tensor(1.0)], [{"loss": torch.ones(())}, counted(1.0, 1)]])
def test_micro_batches_that_differ_are_refused(outputs: list[Any]) -> None:
    with pytest.raises(MisconfigurationException, match="for some of the batches or micro-batches of one optimizer"):
        work(outputs)


def test_experts_in_a_pipeline_are_refused() -> None:
    class WithExperts(Returns):
        model_shape = SimpleNamespace(num_experts=4)

    def step(num_stages: int) -> None:
        pieces = [(counted(1.0, 2), 1.0)]
        last = TrainingWork(WithExperts(), pieces, (0,), StageBoundary(num_stages), 1.0)
        last.forward(num_stages - 1, 0, None)

    step(1)
    with pytest.raises(MisconfigurationException, match="does not go with experts in a pipeline"):
        step(2)


# Gradients


def test_the_optimizer_scales_the_gradient_once_and_forgets_the_factor() -> None:
    model = nn.Linear(3, 1)
    zero = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_specs(model), ParallelMesh.single())

    def gradient(factor: Tensor | None) -> Tensor:
        zero.zero_grads()
        assert zero.grad_factor is None
        zero.grad_factor = factor
        zero.declare_last()
        model(torch.ones(2, 3)).sum().backward()
        zero.finish_grad_sync()
        return torch.cat([grad.flatten() for main in zero.main_params if (grad := main.grad) is not None]).clone()

    whole = gradient(None)
    assert whole.max().item() == 2.0
    assert torch.equal(gradient(torch.tensor(0.25)), whole / 4)
    assert torch.equal(gradient(None), whole)
    zero.close()


def test_uneven_micro_batches_have_the_gradient_of_the_whole_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(4, 6, 3, generator=generator), torch.rand(4, 6, generator=generator) < 0.4
    mask[2] = False
    layer = nn.Linear(3, 1, bias=False)

    def sums(x: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
        return {"loss": (layer(x).squeeze(-1).square() * mask).sum(), "num_tokens": mask.sum()}

    whole = sums(x, mask)
    (expected,) = torch.autograd.grad(whole["loss"] / whole["num_tokens"], [layer.weight])
    tokens, gradient = window(), torch.zeros_like(expected)
    for rows in ([0, 1], [2, 3]):  # two accumulated batches of two micro-batches each
        found, losses = work([sums(x[i : i + 1], mask[i : i + 1]) for i in rows], scale=1 / 2)
        for loss in losses:
            assert loss is not None
            gradient += torch.autograd.grad(loss, [layer.weight])[0]
        tokens.normalize(found.output(found.totals, found.extras))
    factor = tokens.gradient_factor(2)
    assert factor is not None
    torch.testing.assert_close(gradient * factor, expected, rtol=1e-6, atol=0)

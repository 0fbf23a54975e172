"""Cross entropy over a shared vocabulary against torch's on the whole one.

The vocabulary of 37 is cut into 2 slices of 20 and 17 tokens, or into 4: two of 16, one of 5, one of only padding.
Tolerance: everything on logits is fp32, so losses and gradients agree to 1e-5 of the largest element; where logits or
weights are bf16 the inputs are the same bf16 numbers, but gradients are rounded to bf16 (2^-9) up to 8 times (2^-6).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers.cross_entropy import linear_cross_entropy, linear_token_losses
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.params import ParamSpec, ShardRanks
from lightning_megatron.testing.parity import differences, local_slice, whole

VOCAB, H, S, B = 37, 12, 5, 3
ROWS = {1: 37, 2: 20, 4: 16}  # of a slice, padding included
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def labels_with_holes(generator: torch.Generator) -> Tensor:
    labels = torch.randint(VOCAB, (S, B), generator=generator)
    labels[0, 0], labels[1, 1], labels[2, 0] = -100, VOCAB - 1, -100
    return labels


def check_linear(
    mesh: ParallelMesh,
    smoothing: float,
    dtype: torch.dtype,
    chunk_bytes: int,
    *,
    weighed_later: bool,
    softcap: float = 0.0,
) -> dict[str, str]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(S, B, H, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, H, generator=generator).to(dtype)
    labels, mask = labels_with_holes(generator), torch.rand(S, B, generator=generator)
    mask[labels == -100] = 0.0
    x, w = hidden.float().clone().requires_grad_(), weight.float().clone().requires_grad_()
    logits = F.linear(x.to(dtype), w.to(dtype)).float().flatten(0, 1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    each = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
    expected = (each * mask.flatten()).sum() / 3
    expected.backward()

    spec = ParamSpec((VOCAB, H), tp_dim=0)
    rows = local_slice(weight, spec, (ROWS[mesh.tp.size], H), mesh.shard_ranks).requires_grad_()
    ours = hidden.clone().requires_grad_()
    how: Any = {"label_smoothing": smoothing, "softcap": softcap, "chunk_bytes": chunk_bytes}
    if weighed_later:
        losses = linear_token_losses(ours, rows, labels, mesh.tp, VOCAB, **how)
        assert not losses[labels == -100].any()
        loss = (losses * mask).sum()
    else:
        loss = linear_cross_entropy(ours, rows, labels, mask, mesh.tp, VOCAB, **how)
    (loss / 3).backward()
    assert loss.dtype == torch.float32
    assert ours.grad is not None
    assert rows.grad is not None
    assert x.grad is not None
    assert w.grad is not None
    assert ours.grad.dtype == rows.grad.dtype == dtype
    assert not rows.grad[spec.local_box(tuple(rows.shape), mesh.shard_ranks).sizes[0] :].any()  # padding
    partial = torch.stack([ours.grad.float()])
    summed = torch.stack(gather(partial, mesh)).sum(0)[0]  # the gradient of hidden is this rank's part of a sum
    wrong = differences({"loss": loss / 3}, {"loss": expected}, rtol=1e-5)
    return wrong | differences(
        {"hidden": summed, "weight": whole(rows.grad, spec, mesh)},
        {"hidden": x.grad, "weight": w.grad},
        rtol=TOLERANCE[dtype],
    )


def gather(x: Tensor, mesh: ParallelMesh) -> list[Tensor]:
    spec = ParamSpec((mesh.tp.size * x.shape[0], *x.shape[1:]), tp_dim=0)
    return list(whole(x, spec, mesh).split(x.shape[0]))


def check_all(tp: int) -> dict[str, dict[str, str]]:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu"))
    wrong: dict[Any, dict[str, str]] = {}
    one_token, few_tokens, everything = 1, 3 * 4 * 20, 1 << 30
    for smoothing, dtype in product((0.0, 0.1, 0.9), TOLERANCE):
        for chunk in (one_token, few_tokens, everything):
            for later in (False, True):
                for cap in (0.0, 2.0):
                    how: Any = {"weighed_later": later, "softcap": cap}
                    wrong[smoothing, dtype, chunk, later, cap] = check_linear(mesh, smoothing, dtype, chunk, **how)
    return {str(case): faults for case, faults in wrong.items() if faults}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_losses_and_gradients_equal_those_of_one_process(ranks, tp):
    assert ranks(tp, check_all, tp) == [{}] * tp


def losses_of_extreme_logits(tp: int) -> list[float]:
    """Logits of +-1e4 would overflow without the shared maximum; one slice is far below another."""
    axis = ParallelMesh.create(ParallelLayout(tp=tp), torch.device("cpu")).tp
    logits = torch.tensor([[1e4, 9999.0, -1e4, -1e4], [-1e4, -1e4, -1e4, -1e4]])
    rows = local_slice(logits.t(), ParamSpec((4, 2), tp_dim=0), (4 // tp, 2), ShardRanks(tp=axis.rank))
    losses = linear_token_losses(torch.eye(2)[None], rows, torch.tensor([[1, 3]]), axis, 4)
    return losses.flatten().tolist()


def test_extreme_logits_do_not_overflow(ranks):
    for losses in ranks(2, losses_of_extreme_logits, 2):
        assert losses == pytest.approx([1.3132617, 1.3862944])


def test_all_tokens_ignored_is_a_loss_of_zero_with_zero_gradients():
    hidden, weight = torch.randn(S, B, H, requires_grad=True), torch.randn(VOCAB, H, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((S, B), -100), torch.zeros(S, B), Axis("tp"), VOCAB)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_without_gradients_only_the_loss_is_made():
    hidden, weight = torch.randn(S, B, H), torch.randn(VOCAB, H, requires_grad=True)
    arguments = torch.ones(S, B, dtype=torch.int64), torch.ones(S, B), Axis("tp"), VOCAB
    with torch.no_grad():
        quiet = linear_cross_entropy(hidden, weight, *arguments)
    loud = linear_cross_entropy(hidden, weight, *arguments)
    assert not quiet.requires_grad
    assert torch.equal(quiet, loud)


def test_a_second_backward_is_refused_rather_than_wrong():
    hidden, weight = torch.randn(S, B, H, requires_grad=True), torch.randn(VOCAB, H)
    loss = linear_cross_entropy(
        hidden, weight, torch.ones(S, B, dtype=torch.int64), torch.ones(S, B), Axis("tp"), VOCAB
    )
    loss.backward(torch.tensor(2.0), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def gradients_of_mean(dtype: torch.dtype, scale: float, chunk_bytes: int = 1 << 30) -> tuple[Tensor, Tensor]:
    """Gradients of ``scale x`` a mean over 2048 tokens, divided by the scale again."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocab, width = 2048, 1000, 32
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(vocab, width, generator=generator)).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.full((tokens,), 1 / tokens)
    loss = linear_cross_entropy(hidden, weight, labels, weights, Axis("tp"), vocab, chunk_bytes=chunk_bytes)
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad.double() / scale, weight.grad.double() / scale


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("scale", [2.0**12, 2.0**16, 2.0**18])
def test_fp16_gradients_do_not_underflow_before_the_loss_scale_reaches_them(scale):
    """They are made in the forward pass: 1/2048 of a probability of 1e-3 is no fp16 number."""
    for ours, reference in zip(
        gradients_of_mean(torch.float16, scale), gradients_of_mean(torch.float32, 1.0), strict=True
    ):
        assert relative_error(ours, reference) < 5e-4


def test_bf16_gradients_are_scaled_in_fp32():
    """A mean over 3 micro-batches: 1/3 rounded to bf16 first would make every gradient 0.2 % too large."""
    third, _ = gradients_of_mean(torch.bfloat16, 1 / 3)
    unscaled, _ = gradients_of_mean(torch.bfloat16, 1.0)
    slope = float((third * unscaled).sum() / unscaled.square().sum())
    assert slope == pytest.approx(1.0, abs=1e-4)


def test_small_chunks_do_not_wear_out_a_bf16_weight_gradient():
    """Every chunk rounds the sum once more; with 2048 chunks of one token that would be 1 % instead of 0.2 %."""
    _, reference = gradients_of_mean(torch.float32, 1.0)
    _, one_chunk = gradients_of_mean(torch.bfloat16, 1.0)
    _, tiny_chunks = gradients_of_mean(torch.bfloat16, 1.0, chunk_bytes=1)
    assert relative_error(one_chunk, reference) < 0.002
    assert relative_error(tiny_chunks, reference) < 0.004

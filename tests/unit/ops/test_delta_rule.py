"""The gated delta rule in chunks against the plain recurrence: outputs, states, gradients, states carried on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.ops.recurrence.delta_rule import causal_convolution, gated_delta_rule, unit_length

NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token."""
    out = []
    for i in range(len(q)):
        state = g[i].exp()[..., None, None] * state
        read = torch.einsum("bnd,bndv->bnv", k[i], state)
        state = state + torch.einsum("bnd,bnv->bndv", k[i], beta[i].unsqueeze(-1) * (v[i] - read))
        out.append(torch.einsum("bnd,bndv->bnv", q[i], state))
    return torch.stack(out), state


def inputs(length: int, dtype: torch.dtype = torch.float64, fastest: float = 3.0) -> list[Tensor]:
    """Arguments of the rule, for 2 samples of 3 heads."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(length, 2, 3, size, dtype=dtype) for size in (4, 4, 5))
    g, beta = -fastest * torch.rand(length, 2, 3, dtype=dtype), torch.rand(length, 2, 3, dtype=dtype)
    given = [q, torch.nn.functional.normalize(k, dim=-1), v, g, beta, torch.randn(2, 3, 4, 5, dtype=dtype)]
    return [each.requires_grad_() for each in given]


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (7, 1), (7, 3), (64, 64), (70, 64), (130, 16)])
def test_chunks_equal_the_recurrence(length: int, chunk: int) -> None:
    """Outputs, last state and all gradients, at lengths that chunks divide and do not divide."""
    ours, plain = inputs(length), inputs(length)
    found, expected = gated_delta_rule(*ours, chunk=chunk), recurrence(*plain)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    weights = [torch.randn_like(each) for each in expected]
    for results in (found, expected):
        sum((each * weight).sum() for each, weight in zip(results, weights, strict=True)).backward()  # type: ignore[union-attr]
    for name, one, other in zip(NAMES, ours, plain, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-7, atol=1e-9), name  # type: ignore[arg-type]


def test_gradients_equal_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda *given: gated_delta_rule(*given, chunk=3), tuple(inputs(5)))


def test_a_fast_decay_in_fp32_neither_overflows_nor_loses_the_gradient() -> None:
    """Differences of sums of decays reach hundreds above the diagonal, where ``exp`` would be infinite."""
    given = inputs(64, torch.float32, fastest=40.0)
    out, _ = gated_delta_rule(*given)
    exact = recurrence(*(each.double() for each in given))[0]
    # A sum of decays up to 64 x 20 has an error of 1e-4 in fp32, which exp makes a relative one.
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-4)
    out.sum().backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in given)


def test_a_sequence_in_parts_equals_the_whole() -> None:
    *steps, state = inputs(20)
    whole, last = gated_delta_rule(*(*steps, state), chunk=8)
    first, between = gated_delta_rule(*[*(each[:13] for each in steps), state], chunk=8)
    rest, end = gated_delta_rule(*[*(each[13:] for each in steps), between], chunk=8)
    torch.testing.assert_close(torch.cat((first, rest)), whole)
    torch.testing.assert_close(end, last)


def test_results_have_the_dtype_of_the_values_and_states_are_fp32() -> None:
    out, state = gated_delta_rule(*(each.bfloat16() for each in inputs(9)[:5]))
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_the_convolution_sees_no_later_token_and_can_be_continued() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 2, 3), torch.randn(3, 1, 4)
    whole, _ = causal_convolution(x, weight)
    expected = sum(torch.cat((torch.zeros(j, 2, 3), x[: 9 - j])) * weight[:, 0, 3 - j] for j in range(4))
    torch.testing.assert_close(whole, torch.nn.functional.silu(torch.as_tensor(expected)))
    first, seen = causal_convolution(x[:5], weight)
    rest, _ = causal_convolution(x[5:], weight, seen[5:])
    torch.testing.assert_close(torch.cat((first, rest)), whole)


def test_vectors_of_unit_length() -> None:
    x = torch.randn(4, 7).bfloat16()
    torch.testing.assert_close(unit_length(x), torch.nn.functional.normalize(x.float(), dim=-1), rtol=1e-5, atol=1e-6)

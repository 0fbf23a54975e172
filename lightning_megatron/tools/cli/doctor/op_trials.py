"""Ops against their references: forward and gradients, in bf16 and fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.ops.activation import swiglu
from lightning_megatron.ops.adamw import adamw_reference
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.fp8 import E4M3, E5M2, MULTIPLE, Fp8Kernels, largest_magnitude, scale_for
from lightning_megatron.ops.implementation import REFERENCE, Function
from lightning_megatron.ops.registry import OPS, SELECTABLE, Ops

HIDDEN, HEADS, GROUPS, HEAD = 4096, 32, 8, 128
"""Sizes of LLaMA 3.1 8B."""
EXPERTS, EXPERT_HIDDEN, EXPERT_WIDTH = 8, 512, 256
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LENGTH = 0.05
"""Largest relative difference between the lengths of two vectors whose cosine is compared."""


@dataclass(frozen=True)
class _Case:
    """Inputs of an op and the bound of its results.

    Attributes:
        shapes: function of the number of tokens that returns the shapes of inputs with gradients.
        call: function of an implementation and the inputs.
        least: smallest cosine between a result and the reference's.
    """

    shapes: Callable[[int], list[tuple[int, ...]]]
    call: Callable[..., Tensor]
    least: float


def _attention(op: Function, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = op(q, k, v, AttentionCall(causal=True))
    return out


def _rope(op: Function, x: Tensor) -> Tensor:
    half = torch.arange(HEAD // 2) / (HEAD // 2)
    angles = torch.arange(x.shape[0])[:, None] * 10000.0 ** -torch.cat((half, half))  # [S, D]
    cos, sin = (function(angles)[:, None, None].to(x.device, x.dtype) for function in (torch.cos, torch.sin))
    out: Tensor = op(x, cos, sin)
    return out


def _experts(op: Function, x: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    first = torch.arange(x.shape[0]) % EXPERTS
    ids = torch.stack((first, (first + 3) % EXPERTS), -1).to(x.device)
    out: Tensor = op(x, ids, weights.float(), fc1, fc2, swiglu, 0)
    return out


def _groups(op: Function, x: Tensor, weight: Tensor) -> Tensor:
    third = x.shape[0] // 3
    out: Tensor = op(x, weight, [third, 0, x.shape[0] - third])
    return out


_CASES = {
    "attention": _Case(lambda s: [(s, 1, HEADS, HEAD), (s, 1, GROUPS, HEAD), (s, 1, GROUPS, HEAD)], _attention, 0.99),
    "rms_norm": _Case(lambda s: [(s, 1, HIDDEN), (HIDDEN,)], lambda op, x, w: op(x, w, 1e-5), 0.999),
    "layer_norm": _Case(lambda s: [(s, 1, HIDDEN), (HIDDEN,), (HIDDEN,)], lambda op, x, w, b: op(x, w, b, 1e-5), 0.999),
    "rope": _Case(lambda s: [(s, 1, HEADS, HEAD)], _rope, 0.999),
    "mixture_of_experts": _Case(
        lambda s: [
            (s, EXPERT_HIDDEN),
            (s, 2),
            (EXPERTS, 2, EXPERT_WIDTH, EXPERT_HIDDEN),
            (EXPERTS, EXPERT_HIDDEN, EXPERT_WIDTH),
        ],
        _experts,
        0.99,
    ),
    "grouped_linear": _Case(lambda s: [(s, EXPERT_HIDDEN), (3, EXPERT_WIDTH, EXPERT_HIDDEN)], _groups, 0.99),
}
_UPDATES = 0.999
"""Smallest cosine between the updates of two AdamW."""
_PRODUCTS = 0.99
"""Smallest cosine between products in fp8 and in fp32; E5M2 keeps two bits of a number."""
_ONE_BY_ONE = {"adamw": ("fp32",), "linear_fp8": tuple(TYPES)}
"""Dtypes of the ops that are no functions of tensors, and have trials of their own."""


def op_trials(device: str) -> Iterator[str]:
    """Names of all trials on a type of device: op, variant and type of its numbers."""
    for op in (*_CASES, *_ONE_BY_ONE):
        able = {each.variant for each in SELECTABLE[op].implementations if each.device in (device, None)}
        for mode in ("auto", *(variant for variant in SELECTABLE[op].variants if variant in able)):
            name = op if mode == "auto" else f"{op}={mode}"
            yield from (f"{name} {dtype}" for dtype in _ONE_BY_ONE.get(op, TYPES))


def try_op(name: str, device: torch.device, tokens: int) -> tuple[str, str, bool]:
    """Compare an op with its reference, which a CPU computes in fp32.

    Returns:
        The implementation and the smallest cosine; the fault; True if the fault is harmful.
    """
    op, _, dtype = name.partition(" ")
    op, _, mode = op.partition("=")
    ops = Ops(device.type, {op: mode or "auto"})
    choice = ops.choose(op)
    if choice.implementation == REFERENCE:
        return f"the reference: {choice.why}", "", False
    if op == "adamw":
        found, least = {"updates": (_updates(choice.run, device), _updates(adamw_reference, _CPU))}, _UPDATES
    elif op == "linear_fp8":
        found, least = _products(choice.run, device, TYPES[dtype], tokens), _PRODUCTS
    else:
        case = _CASES[op]
        right = _results(case, OPS[op].reference, _CPU, torch.float32, tokens)
        ours = _results(case, choice.run, device, TYPES[dtype], tokens)
        found, least = {result: (ours[result], right[result]) for result in right}, case.least
    faults = [fault for result, pair in found.items() for fault in _differences(result, *pair, least)]
    cosine = min(_cosine(*pair) for pair in found.values())
    if not faults and choice.fallbacks:
        elsewhere = "; ".join(f"{reason}: computed by {other}" for reason, other in choice.fallbacks.items())
        return f"{choice.implementation}, cosine {cosine:.5f}", elsewhere, False
    return f"{choice.implementation}, cosine {cosine:.5f}", "; ".join(faults), True


_CPU = torch.device("cpu")


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers that bf16 can represent; the matrices of layers are scaled down."""
    scale = shape[-1] ** -0.5 if len(shape) >= 3 and shape[0] <= EXPERTS else 1.0
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def _results(case: _Case, op: Function, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """Output and gradients, on the host in fp32."""
    inputs = [_random(shape, seed).to(device, dtype).requires_grad_() for seed, shape in enumerate(case.shapes(tokens))]
    out = case.call(op, *inputs)
    out.backward(_random(tuple(out.shape), 99).to(device, dtype))
    grads = {f"gradient {n}": x.grad for n, x in enumerate(inputs) if x.grad is not None}
    return {name: value.detach().cpu().float() for name, value in {"output": out, **grads}.items()}


def _updates(optimizer: Any, device: torch.device) -> Tensor:
    """Change of a parameter in three steps."""
    start = _random((64, HIDDEN), 0).float()
    parameter = nn.Parameter(start.clone().to(device))
    steps = optimizer([{"params": [parameter], "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for seed in (1, 2, 3):
        parameter.grad = _random((64, HIDDEN), seed).to(device, torch.float32)
        steps.step()
    return parameter.detach().cpu() - start


def _products(
    kernels: Fp8Kernels, device: torch.device, dtype: torch.dtype, tokens: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """The three products of a linear layer in fp8, each with that in fp32, on the host."""
    rows = max(tokens // MULTIPLE, 1) * MULTIPLE
    x, weight, grad = _random((rows, HIDDEN), 0), _random((EXPERT_WIDTH, HIDDEN), 1), _random((rows, EXPERT_WIDTH), 2)

    def cast(values: Tensor, number_format: torch.dtype) -> tuple[Tensor, Tensor]:
        values = values.to(device, dtype)
        scale = scale_for(largest_magnitude(values), kernels.largest(number_format))
        return kernels.cast(values, scale, number_format, False)[0], scale

    backward = kernels.backward_format
    operands = {  # [n, k], [k, m] and their formats
        "output": (x, weight.t(), E4M3, E4M3),
        "gradient of the input": (grad, weight, E5M2, backward),
        "gradient of the weight": (grad.t(), x, E5M2, backward),
    }
    found = {}
    for name, (a, b, format_a, format_b) in operands.items():
        (narrow_a, scale_a), (narrow_b, scale_b) = cast(a, format_a), cast(b, format_b)
        out = kernels.product(narrow_a, narrow_b, scale_a, scale_b, None, dtype)
        found[name] = out.cpu().float(), a.float() @ b.float()
    return found


def _cosine(x: Tensor, y: Tensor) -> float:
    x, y = x.flatten().double(), y.flatten().double()
    return float(x @ y / (x.norm() * y.norm()))


def _differences(name: str, ours: Tensor, right: Tensor, least: float) -> Iterator[str]:
    """Faults of one result."""
    if not bool(ours.isfinite().all()):
        yield f"{name} has NaN or infinity"
        return
    cosine = _cosine(ours, right)
    if not cosine >= least:
        yield f"{name}: cosine to the reference {cosine:.4f}, must be at least {least}"
    length = float(ours.double().norm() / right.double().norm())
    if abs(length - 1) > LENGTH:
        yield f"{name}: {length:.3f} times as long as the reference's"

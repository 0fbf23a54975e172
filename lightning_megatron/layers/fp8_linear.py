"""Matrix products of linear layers in fp8, and their scales.

Collectives, sequence parallelism and the order of gradients stay with the layer: only its three products are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear, use_gemms
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.fp8 import LARGEST, LINEARS, MULTIPLE, Fp8Kernels, Fp8Recipe, scale_for
from lightning_megatron.ops.implementation import REFERENCE, Selection
from lightning_megatron.ops.matmul import PLAIN_GEMMS
from lightning_megatron.ops.registry import Ops

_FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
_INPUT, _WEIGHT, _GRADIENT = range(3)


class Cast(NamedTuple):
    """A tensor in fp8, ``[n, k]``, with its scale and the shape and dtype it had."""

    values: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype


class Fp8Gemms(nn.Module):
    """Matrix products of one linear layer in fp8, with delayed scaling.

    A tensor without a history is scaled by its own largest element.

    Args:
        kernels: fp8 kernels of the device.
        recipe: rule for the scales.
        selection: selection of this layer; notes calls whose number of tokens does not fit.
        device: device of the buffers.

    Attributes:
        amax_history: ``[steps, 3]``, the newest first: largest magnitude of input, weight and gradient, over all ranks.
        scale: ``[3]``, computed from the history; 0 without one.
        seen_forward: ``[2]``, largest magnitudes of input and weight on this rank since the last step.
        seen_backward: ``[1]``, largest magnitude of the gradient. A buffer of its own, because ``torch.compile`` allows
            buffers that the forward writes, and buffers that the backward writes, but none that both write.
    """

    amax_history: Tensor
    scale: Tensor
    seen_forward: Tensor
    seen_backward: Tensor

    def __init__(
        self, kernels: Fp8Kernels, recipe: Fp8Recipe, selection: Selection, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.kernels, self.recipe = kernels, recipe
        self._noted = selection.fallbacks
        # Kept in the dtype of parameters: powers of two are exact in all of them.
        self.register_buffer("amax_history", torch.zeros(recipe.amax_history_len, 3, device=device))
        self.register_buffer("scale", torch.zeros(3, device=device))
        self.register_buffer("seen_forward", torch.zeros(2, device=device), persistent=False)
        self.register_buffer("seen_backward", torch.zeros(1, device=device), persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x W^T + b``, ``[..., in] -> [..., out]``, and the scales of ``x`` and ``W`` for the backward."""
        if not self._fits(x):
            return PLAIN_GEMMS.forward(x, weight, bias)
        scales = self._scale(x, _INPUT), self._scale(weight, _WEIGHT)
        a, b = self._cast(x, scales[_INPUT], _INPUT), self._cast(weight, scales[_WEIGHT], _WEIGHT)
        flat_bias = None if bias is None else bias.flatten()
        out = self.kernels.product(a.values, b.values.t(), a.scale, b.scale, flat_bias, x.dtype)
        return out.view(*x.shape[:-1], -1), scales

    def gradient(self, dy: Tensor) -> Cast | Tensor:
        """Output gradient in the form that both products of the backward take."""
        return self._cast(dy, self._scale(dy, _GRADIENT), _GRADIENT) if self._fits(dy) else PLAIN_GEMMS.gradient(dy)

    def input_gradient(self, dy: Cast | Tensor, weight: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy W``."""
        if isinstance(dy, Tensor):
            return PLAIN_GEMMS.input_gradient(dy, weight, kept)
        b = self._cast(weight, kept[_WEIGHT], _WEIGHT)
        return self.kernels.product(dy.values, b.values, dy.scale, b.scale, None, dy.dtype).view(*dy.shape[:-1], -1)

    def weight_gradient(self, dy: Cast | Tensor, x: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy^T x``, ``[out, in]``."""
        if isinstance(dy, Tensor):
            return PLAIN_GEMMS.weight_gradient(dy, x, kept)
        b = self._cast(x, kept[_INPUT], _INPUT)
        return self.kernels.product(dy.values.t(), b.values, dy.scale, b.scale, None, dy.dtype)

    def _fits(self, x: Tensor) -> bool:
        tokens = x.shape[:-1].numel()
        if tokens and tokens % MULTIPLE == 0:
            return True
        self._noted.setdefault(f"{tokens} tokens, no multiple of {MULTIPLE}", REFERENCE)
        return False

    def _cast(self, x: Tensor, scale: Tensor, which: int) -> Cast:
        return Cast(self.kernels.cast(x.flatten(0, -2), scale, _FORMATS[which]), scale, x.shape, x.dtype)

    def _scale(self, x: Tensor, which: int) -> Tensor:
        """Factor for a tensor; in training its largest magnitude is noted."""
        largest = torch.linalg.vector_norm(x, float("inf")).float()
        if self.training:
            seen = self.seen_backward[0] if which == _GRADIENT else self.seen_forward[which]
            seen.copy_(torch.maximum(seen, largest))
        delayed, own = self.scale[which].float(), scale_for(largest, LARGEST[_FORMATS[which]], self.recipe.margin)
        return torch.where(delayed > 0, delayed, own)

    def take_seen(self) -> Tensor:
        """``[3]``: largest magnitudes since the last call."""
        seen = torch.cat((self.seen_forward, self.seen_backward)).float()
        self.seen_forward.zero_()
        self.seen_backward.zero_()
        return seen

    def begin_step(self, seen: Tensor) -> None:
        """Set the scales for the next step.

        Args:
            seen: ``[3]`` largest magnitudes of the last step, over all ranks.
        """
        usable = torch.where(seen.isfinite(), seen, torch.zeros_like(seen))
        self.amax_history.copy_(torch.cat((usable[None].to(self.amax_history.dtype), self.amax_history[:-1])))
        history = self.amax_history.float()
        amax = history.amax(0) if self.recipe.amax_compute == "max" else history[0]
        largest = torch.tensor([LARGEST[dtype] for dtype in _FORMATS], device=amax.device)
        self.scale.copy_(torch.where(amax > 0, scale_for(amax, largest, self.recipe.margin), torch.zeros_like(amax)))

    def extra_repr(self) -> str:
        """Recipe of the scales."""
        return repr(self.recipe)


class Fp8Steps(nn.Module):
    """Exchange of the largest magnitudes between ranks that hold the same layers, once a step for all layers.

    So scales are equal on all ranks in every layout, and a checkpoint holds them once.

    Args:
        gemms: fp8 products of the layers on this rank.
        mesh: mesh of the ranks.
    """

    def __init__(self, gemms: Sequence[Fp8Gemms], mesh: ParallelMesh) -> None:
        super().__init__()
        self._gemms, self._axes = tuple(gemms), (mesh.tp, mesh.dp_cp)

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Compute the scales of the next step."""
        seen = torch.stack([gemms.take_seen() for gemms in self._gemms])  # [layers, 3]
        for axis in self._axes:
            seen = all_reduce_max(seen, axis)
        for gemms, own in zip(self._gemms, seen, strict=True):
            gemms.begin_step(own)

    def forget_step(self) -> None:
        """Keep the scales after a step that was not taken."""
        for gemms in self._gemms:
            gemms.take_seen()


def use_fp8(blocks: Mapping[int, nn.Module], num_layers: int, ops: Ops, mesh: ParallelMesh) -> Fp8Steps | None:
    """Switch linear layers to fp8 as ``ops`` says; ``None`` if no layer is switched.

    Args:
        blocks: blocks of this rank, by global number.
        num_layers: number of layers of the whole model.
        ops: ops with the mode of ``linear_fp8`` and the recipe.
        mesh: mesh of the ranks.

    Raises:
        ConfigError: where fp8 is required and the device has none.
    """
    if ops.mode("linear_fp8") == "off":
        return None
    kernels, selection = ops.choose_fp8()
    found = []
    for number, block in blocks.items():
        for name, linear in _linears(block):
            excuse = selection.why if kernels is None else ops.fp8.excuse(name, number, num_layers) or _odd(linear)
            if kernels is None or excuse is not None:
                use_gemms(linear, PLAIN_GEMMS, Selection("linear_fp8", REFERENCE, str(excuse)))
            else:
                found.append(multiply_in_fp8(linear, kernels, ops.fp8, selection))
    return Fp8Steps(found, mesh) if found else None


def multiply_in_fp8(
    linear: ColumnParallelLinear | RowParallelLinear, kernels: Fp8Kernels, recipe: Fp8Recipe, selection: Selection
) -> Fp8Gemms:
    """Switch one layer to fp8; the caller passes the result to :class:`Fp8Steps`."""
    own = Selection(selection.op, selection.implementation, selection.why)
    gemms = Fp8Gemms(kernels, recipe, own, linear.weight.device)
    use_gemms(linear, gemms, own)
    return gemms


def _linears(block: nn.Module) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    for name, module in block.named_modules():
        last = name.rpartition(".")[2]
        if last in LINEARS and isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield last, module


def _odd(linear: ColumnParallelLinear | RowParallelLinear) -> str | None:
    sizes = linear.weight.shape[:-1].numel(), linear.weight.shape[-1]
    odd = [size for size in sizes if size % MULTIPLE]
    return f"{odd[0]} features, no multiple of {MULTIPLE}" if odd else None

"""Matrix products of linear layers in fp8, and their scales.

Collectives, sequence parallelism and the order of gradients stay with the layer: only its three products are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear, use_gemms
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.fp8 import (
    DTYPES,
    E4M3,
    E5M2,
    LINEAR_FP8,
    LINEARS,
    MULTIPLE,
    Fp8Kernels,
    Fp8Recipe,
    largest_magnitude,
    scale_for,
)
from lightning_megatron.ops.implementation import REFERENCE, OpChoice
from lightning_megatron.ops.matmul import PLAIN_GEMMS, HasGemms
from lightning_megatron.ops.registry import Ops

_INPUT, _WEIGHT, _GRADIENT, _INPUT_BACKWARD, _WEIGHT_BACKWARD = range(5)
_TENSOR = (_INPUT, _WEIGHT, _GRADIENT, _INPUT, _WEIGHT)
"""The tensor to which each of the five scales belongs."""


class Cast(NamedTuple):
    """A tensor in fp8, ``[n, k]``, with its scale and the shape and dtype it had."""

    values: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype


class WeightInFp8(NamedTuple):
    """A weight ``[out, in]`` cast to the formats of forward and backward, with their scales."""

    forward: Tensor
    forward_scale: Tensor
    backward: Tensor
    backward_scale: Tensor


class Fp8Gemms(nn.Module):
    """Matrix products of one linear layer in fp8, with delayed scaling.

    A tensor without a history is scaled by its own largest element, which costs a pass over it.

    In a graph of ``torch.compile`` that pass always runs, and weights are cast in each forward and backward. A graph
    that depended on the state of a run would be traced again in later steps, when parameters have gradients; in mixed
    precision these have another dtype than the parameters, and tracing fails on them.

    Args:
        kernels: fp8 kernels of the device.
        recipe: rule for the scales.
        selection: selection of this layer; its ``fallbacks`` record calls that the kernels do not support.
        device: device of the buffers.
        multiple: number of which the rows of an input must be a multiple.

    Attributes:
        amax_history: ``[steps, 3]``, the newest first: largest magnitude of input, weight and gradient, over all ranks.
        scale: ``[5]``, computed from the history: of input, weight and gradient, and of input and weight in the format
            that they have in backward; 0 before there is a history.
        has_history: three flags, of input, weight and gradient: True where the host knows that there is a history. The
            host learns it some steps late, so that it never waits for the device; results do not depend on it.
        seen_forward: ``[2]``, largest magnitudes of input and weight on this rank since the last step.
        seen_backward: ``[1]``, largest magnitude of the gradient. A separate buffer, because ``torch.compile`` does not
            allow a buffer that both forward and backward write.
        keeps_weight: True while the weight may be kept from one forward to the next.
        kept_weight: the weight in fp8, or ``None``.
    """

    amax_history: Tensor
    scale: Tensor
    seen_forward: Tensor
    seen_backward: Tensor

    def __init__(
        self,
        kernels: Fp8Kernels,
        recipe: Fp8Recipe,
        choice: OpChoice[Any],
        device: torch.device | str | None = None,
        multiple: int = MULTIPLE,
    ) -> None:
        super().__init__()
        self.kernels, self.recipe, self._multiple = kernels, recipe, multiple
        self._noted = choice.fallbacks
        self._backward_format = kernels.backward_format
        formats = (E4M3, E4M3, E5M2, self._backward_format, self._backward_format)
        self.largest = tuple(kernels.largest(dtype) for dtype in formats)
        self.has_history = (False, False, False)
        self.keeps_weight = False
        self.kept_weight: WeightInFp8 | None = None
        # Kept in the dtype of parameters: powers of two are exact in all of them.
        self.register_buffer("amax_history", torch.zeros(recipe.amax_history_len, 3, device=device))
        # Not saved: scales depend on the card's formats, and follow from the history.
        self.register_buffer("scale", torch.zeros(5, device=device), persistent=False)
        self.register_buffer("seen_forward", torch.zeros(2, device=device), persistent=False)
        self.register_buffer("seen_backward", torch.zeros(1, device=device), persistent=False)

    def prepare(self, weight: Tensor) -> None:
        """Cast the weight to fp8 once for all products until the optimizer steps, if it may be kept."""
        if torch.compiler.is_compiling():
            return  # see the class
        if not (self.keeps_weight and self.training and self.has_history[_WEIGHT]) or self.kept_weight is not None:
            return
        if weight.dtype not in DTYPES:
            return
        flat = weight.detach().flatten(0, -2)
        scale, backward_scale = self._scales(flat, _WEIGHT, _WEIGHT_BACKWARD)
        if self._backward_format == E4M3:
            values, amax = self.kernels.cast(flat, scale, E4M3, False)
            backward = values
        else:
            backward, values, amax = self.kernels.cast_both(flat, backward_scale, scale)
        self._note(amax, _WEIGHT)
        self.kept_weight = WeightInFp8(values, scale, backward, backward_scale)

    def operands(self, x: Tensor, weight: Tensor) -> tuple[Cast, Tensor, Tensor, tuple[Tensor, ...]]:
        """``x`` and ``W`` in fp8, the scale of ``W``, and what backward needs beside ``x`` and ``W``.

        These are the scales of ``x`` and ``W`` in backward's format, and ``W`` in it if the weight is kept.
        """
        x_scale, x_backward_scale = self._scales(x, _INPUT, _INPUT_BACKWARD)
        a = self._cast(x, x_scale, E4M3, _INPUT)
        kept: tuple[Tensor, ...]
        if not torch.compiler.is_compiling() and self.kept_weight is not None:
            b, b_scale, b_backward, b_backward_scale = self.kept_weight
            kept = x_backward_scale, b_backward_scale, b_backward
        else:
            b_scale, b_backward_scale = self._scales(weight, _WEIGHT, _WEIGHT_BACKWARD)
            b = self._cast(weight, b_scale, E4M3, _WEIGHT).values
            kept = x_backward_scale, b_backward_scale
        return a, b, b_scale, kept

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x W^T + b``, ``[..., in] -> [..., out]``, and what :meth:`operands` gives backward."""
        if not self._fits(x):
            return PLAIN_GEMMS.forward(x, weight, bias)
        a, b, b_scale, kept = self.operands(x, weight)
        flat_bias = None if bias is None else bias.flatten()
        out = self.kernels.product(a.values, b.t(), a.scale, b_scale, flat_bias, x.dtype)
        return out.view(*x.shape[:-1], -1), kept

    def gradient(self, dy: Tensor) -> Cast | Tensor:
        """Output gradient in the form that both products of the backward take."""
        if not self._fits(dy):
            return PLAIN_GEMMS.gradient(dy)
        (scale,) = self._scales(dy, _GRADIENT)
        return self._cast(dy, scale, E5M2, _GRADIENT, self.recipe.stochastic_rounding)

    def input_gradient(self, dy: Cast | Tensor, weight: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy W``."""
        if isinstance(dy, Tensor):
            return PLAIN_GEMMS.input_gradient(dy, weight, kept)
        b, scale = self.backward_weight(weight, kept)
        return self.kernels.product(dy.values, b, dy.scale, scale, None, dy.dtype).view(*dy.shape[:-1], -1)

    def weight_gradient(self, dy: Cast | Tensor, x: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """``dy^T x``, ``[out, in]``."""
        if isinstance(dy, Tensor):
            return PLAIN_GEMMS.weight_gradient(dy, x, kept)
        b = self.backward_input(x, kept)
        return self.kernels.product(dy.values.t(), b.values, dy.scale, b.scale, None, dy.dtype)

    def backward_weight(self, weight: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The weight in backward's format, and its scale."""
        scale = kept[_WEIGHT]
        return kept[2] if len(kept) > 2 else self._cast(weight, scale, self._backward_format).values, scale

    def backward_input(self, x: Tensor, kept: Sequence[Tensor]) -> Cast:
        """The input in backward's format."""
        return self._cast(x, kept[_INPUT], self._backward_format)

    def _fits(self, x: Tensor) -> bool:
        tokens = x.shape[:-1].numel()
        if tokens and tokens % self._multiple == 0 and x.dtype in DTYPES:
            return True
        reason = f"{tokens} tokens, no multiple of {self._multiple}" if x.dtype in DTYPES else f"{x.dtype}"
        self._noted.setdefault(reason, REFERENCE)
        return False

    def _cast(
        self, x: Tensor, scale: Tensor, dtype: torch.dtype, seen: int | None = None, stochastic: bool = False
    ) -> Cast:
        """Cast a tensor to fp8; in training, record its largest magnitude for the tensor with index ``seen``."""
        values, amax = self.kernels.cast(x.flatten(0, -2), scale, dtype, stochastic)
        if seen is not None:
            self._note(amax, seen)
        return Cast(values, scale, x.shape, x.dtype)

    def _note(self, amax: Tensor, which: int) -> None:
        if self.training:
            seen = self.seen_backward[0] if which == _GRADIENT else self.seen_forward[which]
            seen.copy_(torch.maximum(seen, amax))

    def _scales(self, x: Tensor, *which: int) -> list[Tensor]:
        """Scales of a tensor for one or two formats."""
        delayed = [self.scale[index].float() for index in which]
        if not torch.compiler.is_compiling() and self.has_history[_TENSOR[which[0]]]:
            return delayed
        amax, margin = largest_magnitude(x), self.recipe.margin
        own = [scale_for(amax, self.largest[index], margin) for index in which]
        return [torch.where(scale > 0, scale, other) for scale, other in zip(delayed, own, strict=True)]

    def take_seen(self) -> Tensor:
        """Return the largest magnitudes since the last call, ``[3]``, and reset them."""
        seen = torch.cat((self.seen_forward, self.seen_backward)).float()
        self.seen_forward.zero_()
        self.seen_backward.zero_()
        return seen

    def drop_weight(self, keeps: bool = False) -> None:
        """Drop the weight in fp8; with ``keeps`` the next one may be kept."""
        self.kept_weight, self.keeps_weight = None, keeps and self.recipe.keep_weights

    def extra_repr(self) -> str:
        """Recipe of the scales."""
        return repr(self.recipe)


class Fp8Steps(nn.Module):
    """Scales of the fp8 layers on this rank, and their weights in fp8, from one optimizer step to the next.

    Ranks that hold the same layers exchange largest magnitudes once per step, for all layers together. So scales are
    equal on all ranks in every layout, and a checkpoint holds their history once.
    """

    def __init__(self, linears: Sequence[HasGemms], mesh: ParallelMesh) -> None:
        super().__init__()
        self._linears, self._axes = tuple(linears), (mesh.tp, mesh.dp_cp)
        self._weights: list[tuple[int, int]] = []
        self._histories: list[tuple[Tensor, int]] = []
        self._history_read: Callable[[], list[int]] | None = None

    def __getstate__(self) -> dict[str, object]:
        """State for ``copy`` and ``pickle``, without the function that finishes a running copy to the host."""
        return {**self.__dict__, "_history_read": None}

    @property
    def gemms(self) -> list[Fp8Gemms]:
        """The fp8 products of the layers."""
        return [linear.products for linear in self._linears if isinstance(linear.products, Fp8Gemms)]

    def begin_batch(self, first: bool) -> None:
        """Allow weights to be kept in fp8 from now on, until :meth:`release`.

        Args:
            first: True if the weights may have changed since the batch before.
        """
        for gemms in self.gemms:
            if first or not gemms.keeps_weight:
                gemms.drop_weight(keeps=True)

    def release(self) -> None:
        """Drop the weights in fp8: they are about to change, or no forward follows."""
        for gemms in self.gemms:
            gemms.drop_weight()

    @torch.compiler.disable  # it reads versions of tensors
    @torch.no_grad()
    def refresh(self) -> None:
        """Before a forward: update scales if histories were loaded, and drop fp8 weights if weights were written."""
        now = [_state(linear.weight) for linear in self._linears]
        if now != self._weights:
            self._weights = now
            for gemms in self.gemms:
                gemms.kept_weight = None
        histories = [(gemms.amax_history, _state(gemms.amax_history)[1]) for gemms in self.gemms]
        pairs = zip(histories, self._histories, strict=False)
        if not self._histories or any(a is not b or v != w for (a, v), (b, w) in pairs):
            self._set_scales()

    @torch.no_grad()
    def after_optimizer_step(self) -> None:
        """Compute the scales of the next step."""
        self.release()
        gemms = self.gemms
        if self._history_read is not None:  # started in an earlier step, so the copy is complete
            flags = iter(self._history_read())
            for each in gemms:
                each.has_history = bool(next(flags)), bool(next(flags)), bool(next(flags))
            self._history_read = None
        seen = torch.stack([each.take_seen() for each in gemms])  # [layers, 3]
        for axis in self._axes:
            seen = all_reduce_max(seen, axis)
        usable = torch.where(seen.isfinite(), seen, torch.zeros_like(seen))
        for each, own in zip(gemms, usable, strict=True):
            history = each.amax_history
            history.copy_(torch.cat((own[None].to(history.dtype), history[:-1])))
        self._set_scales()

    def forget_step(self) -> None:
        """Discard the magnitudes of a skipped step; the scales stay."""
        self.release()
        for gemms in self.gemms:
            gemms.take_seen()

    def _set_scales(self) -> None:
        """Compute all scales from the histories; a tensor that has none keeps its scale."""
        gemms = self.gemms
        recipe = gemms[0].recipe
        history = torch.stack([each.amax_history for each in gemms]).float()  # [layers, steps, 3]
        amax = history.amax(1) if recipe.amax_compute == "max" else history[:, 0]
        amax = torch.cat((amax, amax[:, :2]), 1)  # [layers, 5]
        before = torch.stack([each.scale for each in gemms]).float()
        largest = torch.tensor(gemms[0].largest, device=amax.device)
        scales = torch.where(amax > 0, scale_for(amax, largest, recipe.margin), before)
        for each, own in zip(gemms, scales, strict=True):
            each.scale.copy_(own)
        self._histories = [(each.amax_history, _state(each.amax_history)[1]) for each in gemms]
        if not all(all(each.has_history) for each in gemms):
            # Reading it at once would wait for the device.
            self._history_read = devices.begin_read((scales[:, :3] > 0).int().flatten())


def _state(x: Tensor) -> tuple[int, int]:
    """Address and version of a tensor; every write changes one of them, except an in-place write through ``.data``."""
    return x.data_ptr(), 0 if x.is_inference() else x._version


def use_fp8(blocks: Mapping[int, nn.Module], num_layers: int, ops: Ops, mesh: ParallelMesh) -> Fp8Steps | None:
    """Switch linear layers of this rank's blocks, by global number, to fp8; ``None`` if no layer is switched.

    ``ops`` has the mode of ``linear_fp8`` and the recipe.

    Raises:
        ConfigError: where fp8 is required and the device has none.
    """
    if ops.mode("linear_fp8") == "off":
        return None
    choice = ops.choose(LINEAR_FP8)
    kernels: Fp8Kernels | None = choice.run
    found = []
    for number, block in blocks.items():
        for name, linear, multiple in block_linears(block):
            excuse = choice.why if kernels is None else ops.fp8.excuse(name, number, num_layers) or _odd(linear)
            if kernels is None or excuse is not None:
                use_gemms(linear, PLAIN_GEMMS, OpChoice("linear_fp8", REFERENCE, str(excuse), None))
            else:
                multiply_in_fp8(linear, kernels, ops.fp8, choice, multiple)
                found.append(linear)
    return Fp8Steps(found, mesh) if found else None


def multiply_in_fp8(
    linear: HasGemms, kernels: Fp8Kernels, recipe: Fp8Recipe, choice: OpChoice[Any], multiple: int = MULTIPLE
) -> Fp8Gemms:
    """Switch one layer to fp8; the caller passes the result to :class:`Fp8Steps`."""
    own = replace(choice, fallbacks={})
    gemms = Fp8Gemms(kernels, recipe, own, linear.weight.device, multiple)
    use_gemms(linear, gemms, own)
    return gemms


@runtime_checkable
class HasGroupedLinears(Protocol):
    """A module that multiplies groups of rows by weights of their own, such as experts."""

    def grouped_linears(self) -> Mapping[str, HasGemms]:
        """Its products, by names of ``LINEARS``."""
        ...


def block_linears(block: nn.Module) -> Iterator[tuple[str, HasGemms, int]]:
    """Name, layer, and the number of which its rows must be a multiple; groups of rows have any length."""
    for name, module in block.named_modules():
        last = name.rpartition(".")[2]
        if last in LINEARS and isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield last, module, MULTIPLE
        elif isinstance(module, HasGroupedLinears):
            yield from ((own, layer, 1) for own, layer in module.grouped_linears().items())


def _odd(linear: HasGemms) -> str | None:
    sizes = linear.weight.shape[:-1].numel(), linear.weight.shape[-1]
    odd = [size for size in sizes if size % MULTIPLE]
    return f"{odd[0]} features, no multiple of {MULTIPLE}" if odd else None

"""Warnings of settings with which a module is correct but slow on the devices of the job."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_megatron.config.counts import GATED
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.context_parallel.attention import CONTEXT_ATTENTION
from lightning_megatron.device import CPU, CUDA, DeviceKind
from lightning_megatron.layers.attention import HeadAttention
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.ops.flash.flash_attention import flash_lacks
from lightning_megatron.ops.implementation import REFERENCE


def warn_of_slow(module: nn.Module, kind: DeviceKind, compiles: bool = False) -> None:
    """Warn of settings that slow a module down on devices of this kind.

    These are graphs that gain nothing, attention without a kernel of the device, and experts whose rows change in
    number on devices that compile each shape.

    Settings are not changed: a run must give the same numbers, and the same checkpoints, on every kind of device.
    """
    if compiles:
        warn_of_graphs_without_gain(module, kind)
    warn_of_slow_attention(module, kind)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    if not kind.compiles_shapes or not layers:
        return
    reasons = (_changing_rows(layer, kind) for layer in layers)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        rank_zero_warn(
            f"{reason}: every layer waits for the device to know it, and each new number is compiled for on {kind.type}"
        )


def warn_of_graphs_without_gain(module: nn.Module, kind: DeviceKind) -> None:
    """Warn of a compiled model that was measured to be no faster than eager on such devices."""
    shape = getattr(module, "model_shape", None)
    if kind is CPU and isinstance(shape, TransformerConfig) and shape.activation not in GATED:
        rank_zero_warn(
            f"compile: blocks with {shape.activation} are about as fast without graphs on a CPU (0.96 to 1.00 of it,"
            " benchmarks/compile_cpu_202611.md): most of their time are matrix products, which graphs leave as they"
            " are; without it the first step waits for no compiler"
        )


def warn_of_slow_attention(module: nn.Module, kind: DeviceKind) -> None:
    """Warn of attention that no kernel of such devices computes."""
    layers = (part for part in module.modules() if isinstance(part, HeadAttention))
    slow = next((found for found in (_slow_attention(layer, kind) for layer in layers) if found is not None), None)
    if slow is not None:
        rank_zero_warn(
            f"attention is computed block by block in fp32, far slower than by a kernel of {kind.type}: {slow}"
        )


def _slow_attention(layer: HeadAttention, kind: DeviceKind) -> str | None:
    """The setting because of which no kernel of the device computes a layer's attention, and what to set instead."""
    rule, in_parts = layer.rule, layer.context.size > 1 and layer.share_context is not CONTEXT_ATTENTION["a2a"]
    is_plain = rule.is_plain(rule.window + 1)
    if kind is CPU or (is_plain and not in_parts):
        return None
    fields = {f"attention_softcap={rule.softcap:g}": rule.softcap, "position_embedding='alibi'": rule.slopes}
    told = next((field for field, value in fields.items() if value), None)
    if told is not None:
        return f"{told}, for which there is none; only a model without it takes the kernel"
    if kind is CUDA:
        dtype = next(layer.parameters()).dtype
        lacking = flash_lacks(dtype, 8, 8, layer.causal, rule)
        return None if lacking is None else f"{lacking}; with precision='bf16-mixed' the flash kernel takes it"
    return "cp_comm_type='a2a' takes the kernel" if in_parts and is_plain else f"{rule}, for which there is none"


def _changing_rows(layer: MoELayer, kind: DeviceKind) -> str | None:
    """The setting because of which the routing decides shapes of a layer, and what to set instead."""
    config = layer.config
    if layer.gathers:
        used = layer.experts.mixture
        if used.implementation != REFERENCE:
            return None
        return (
            f"mixture_of_experts: without the operator for {kind.type} ({used.why}) the number of rows of an expert"
            " changes with each step; capacity bins (moe_token_dispatcher='alltoall', moe_capacity_bins=10) fix it"
        )
    if layer.bins is not None or config.moe_pad_to_capacity:
        return None
    given = f"moe_capacity_factor={config.moe_capacity_factor} without padding" if config.moe_capacity_factor else ""
    return (
        f"moe_token_dispatcher='alltoall' {given or 'without capacities'}: the number of rows that are sent to an"
        " expert changes with each step; moe_capacity_bins=10 pads to one of a few numbers and drops nothing,"
        " moe_capacity_factor with moe_pad_to_capacity=True drops what is beyond, and moe_dynamic=True gathers all"
        " tokens"
    )

"""Memory of core attention, by its implementation and its context parallelism."""

from __future__ import annotations

from typing import NamedTuple

from lightning_megatron.tools.planning.memory.shapes import Shapes

SMALL_BLOCK, LARGE_BLOCK = 4 << 20, 256 << 20
"""Bytes of the scores of a block on a CPU, and the most on an accelerator (``ops/blockwise_attention.py``)."""


class Core(NamedTuple):
    """Bytes of core attention.

    Attributes:
        kept: bytes kept for backward besides queries, keys and values; the output is included.
        replaces: True if gathered or exchanged tensors are kept in place of the inputs.
        forward: most bytes of its forward.
        backward: most bytes of its backward besides what is kept.
        output: bytes of its output, the input of the output projection.
    """

    kept: int
    replaces: bool
    forward: int
    backward: int
    output: int


def core_of(x: Shapes) -> Core:
    """Core attention of a job."""
    if x.layout.cp == 1:
        if x.attention == "reference":
            return _reference(x)
        return _blocks(x) if x.config.blockwise_share(x.seq_length) else _flash(x)
    return {"p2p": _ring, "all_gather": _gathered, "a2a": _exchanged}[x.layout.cp_comm_type](x)


def _flash(x: Shapes) -> Core:
    """A fused kernel keeps its output and one number for each query and head.

    If it takes values of the keys' size only, it keeps padded ones and a padded output instead.
    """
    grads = x.queries + x.keys + x.values
    if x.values == x.keys or not x.kernels.pads_values:
        return Core(x.outputs + x.log_sums, False, x.outputs + x.log_sums, grads, x.outputs)
    kernel = x.keys + x.queries + x.log_sums
    more = x.keys - x.values + x.queries - x.outputs
    return Core(kernel - x.values + x.outputs, False, kernel, grads + more, x.outputs)


def _reference(x: Shapes) -> Core:
    """Plain torch keeps attention weights in fp32 and in the values' dtype, and keys and values for every head."""
    weights = x.scores * (4 + x.item) if x.item < 4 else x.scores * 4
    repeated = x.queries + x.outputs if x.keys < x.queries else 0
    mask = x.seq_length * x.seq_length
    kept = weights + repeated + mask + x.outputs
    return Core(kept, False, kept + 8 * x.scores, 12 * x.scores + 3 * x.queries, x.outputs)


def _wide(x: Shapes, size: int) -> int:
    """Bytes of a tensor's fp32 copy."""
    return size * 4 // x.item


def _score_blocks(x: Shapes) -> int:
    """Bytes of a block's scores and their copies; where a flash kernel computes the parts, its workspace instead."""
    rules = (x.config.score_rule(number) for number in x.config.attention_kinds(x.config.num_layers))
    by_flash = x.kernels.flash_in_parts and x.item < 4 and not any(rule.softcap or rule.slopes for rule in rules)
    large = SMALL_BLOCK if by_flash or not x.kernels.large_blocks else LARGE_BLOCK
    return 3 * min(large, max(SMALL_BLOCK, 4 * x.scores))


def _blocks(x: Shapes) -> Core:
    """Attention that no fused kernel supports is computed block by block, in fp32."""
    pair, both = x.keys + x.values, x.queries + x.outputs
    forward = x.outputs + _wide(x, pair + both) + _score_blocks(x)
    backward = x.queries + pair + _wide(x, 2 * pair + x.queries + both) + _score_blocks(x)
    return Core(x.outputs + x.log_sums, False, forward, backward, x.outputs)


def _ring(x: Shapes) -> Core:
    """Keys and values go around the ring while attention is computed block by block, in fp32."""
    pair, both = x.keys + x.values, x.queries + x.outputs
    forward = 2 * pair + _wide(x, pair + both) + _score_blocks(x)
    backward = pair + _wide(x, 4 * pair + both + x.keys) + _score_blocks(x)
    return Core(x.outputs + x.log_sums, False, forward, backward, x.outputs)


def _gathered(x: Shapes) -> Core:
    """Keys and values of the whole sequence are gathered; a rank's two chunks of queries attend in turn."""
    pair = (x.keys + x.values) * x.layout.cp
    kept = pair + x.queries + x.outputs + x.log_sums
    forward = pair + x.queries // 2 + _wide(x, pair + pair // 2 + x.queries) + _score_blocks(x)
    backward = _wide(x, 2 * pair + pair // 2 + x.queries + x.queries // 2) + _score_blocks(x)
    return Core(kept, True, forward, backward, x.outputs)


def _exchanged(x: Shapes) -> Core:
    """An all-to-all exchanges heads for tokens; the kernel keeps the exchanged tensors."""
    pack = x.queries + x.exchanged_keys + x.exchanged_values
    if x.config.blockwise_share(x.seq_length):
        blocks = _blocks(x)
        kept = pack + 2 * x.outputs + x.log_sums
        return Core(kept, True, 2 * pack + blocks.forward, 2 * pack + blocks.backward, x.outputs)
    kept = pack + x.outputs + _flash(x).kept
    return Core(kept, True, 4 * pack, 3 * pack + x.queries, x.outputs)

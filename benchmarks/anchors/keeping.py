"""Tensors that other programs keep in memory and this library does not, as data.

Each fact comes from the program's source code at the time of the published run, or from the recipe that the publication
names; none is fitted. A program without an entry (Megatron-LM with its fused kernels) keeps the same as this library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keeping:
    """Tensors and bytes of a program.

    Attributes:
        rank: pipeline rank whose memory the program logs: ``"first"``, ``"last"``, or the ``"worst"``.
        gathers: True if a column-parallel layer keeps its gathered input, not this rank's shard.
        gates: True if a gated activation keeps its activated half besides the product.
        logit_bytes: bytes for each logit of a micro-batch while the loss is computed: copies in two formats, and the
            softmax.
        params: bytes of a parameter.
        grads: bytes of an accumulated gradient.
        buckets: bytes of a parameter in the buckets of torch's DDP, which is used without a distributed optimizer.
        operand: bytes of a value of an input that a linear layer keeps: 1 where it is kept in fp8.
        inputs: True if every stage but the first holds its last input, and the input's gradient, until the next one.
        reserved: True if the published figure is what torch's allocator had reserved, more than its tensors needed.
    """

    rank: str = "worst"
    gathers: bool = False
    gates: bool = False
    logit_bytes: float = 6.0
    params: float = 2.0
    grads: float = 4.0
    buckets: float = 0.0
    operand: float = 2.0
    inputs: bool = False
    reserved: bool = False


MEGATRON_CI = Keeping(rank="last", inputs=True)
"""The last rank writes the log; logits are held in 16 bits and as softmax in fp32; a stage holds its input tensor."""
FUSED_LOSS = 4.0
"""Additional bytes for each logit with Megatron-LM's fused loss: another copy in fp32."""
NANOTRON = Keeping(rank="first", gates=True, logit_bytes=8.0, buckets=2.0, reserved=True)
"""Rank 0 writes the table; logits in fp32 and as softmax; gradients are accumulated in fp32 beside DDP's 16-bit
buckets. Its layers gather their inputs again: the file of the benchmark (commit 67c5ebb6 of huggingface/nanotron,
``examples/config_tiny_llama_bench.yaml``) leaves ``tp_recompute_allgather`` at its default.

The published figure is reserved memory. The table has columns for allocated and reserved memory, written after step 3,
and ``log_memory`` of the same commit resets both peaks after the backwards of each of the first five steps. From there
on only the optimizer runs, so that the allocated column is the state, a quarter to seven tenths of what is published.
The allocator returns nothing in between, so that the reserved column still includes the backwards.
"""
BRIDGE_FP8 = Keeping(params=1.0, grads=2.0, operand=1.0, inputs=True)
"""Recipes with current scaling: parameters in fp8 without a transposed copy, gradients in 16 bits."""

KEEPING = {"megatron-ci": MEGATRON_CI, "nanotron": NANOTRON, "nemo/fp8": BRIDGE_FP8}

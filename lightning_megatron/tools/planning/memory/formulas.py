"""The formulas of activations and temporaries as text, for ``terms`` of an estimate."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_megatron.tools.planning.memory.ends import EMBEDDING, LOGITS
from lightning_megatron.tools.planning.memory.half import ATTENTION, EXPERTS, MLP, RESIDUAL, ROUTER
from lightning_megatron.tools.planning.memory.shapes import Shapes
from lightning_megatron.tools.planning.memory.stage import DEFERRED, ROTARY, WORKING

PIPELINE = "pipeline buffers"
COMMUNICATION = "communication buffers"
BATCH = "batch and tables"
FP8 = "weights in fp8"


def activation_formulas(x: Shapes) -> Mapping[str, str]:
    """Formula of each cause, with the bytes of its tensors.

    Letters: ``a`` bytes of a value, ``s`` tokens of this rank's part of the sequence, ``b`` samples, ``h`` hidden size,
    ``n`` rows that the experts of this rank compute, ``V`` rows of the vocabulary here, ``F`` features between the two
    products here.
    """
    residual, shard = f"{x.residual:,} bytes", " / tp" if x.is_sharded else ""
    heads = x.queries + 2 * x.keys
    inner = x.inner(x.config.ffn_hidden_size)
    each = "for each micro-batch in flight"
    rows = x.expert_rows if x.config.num_experts else 0
    return {
        RESIDUAL: f"a s b h{shard} = {residual} for the input of half a layer, or of a recomputed group, {each}",
        ATTENTION: f"{residual} after the norm, queries, keys and values {heads:,}, attention's output {x.queries:,} "
        f"and what its kernel keeps, a layer, {each}",
        MLP: f"{residual} after the norm, fc1's output {x.gates} x a s b F = {x.gates * inner:,}, fc2's input "
        f"{inner:,}, a layer, {each}",
        ROUTER: f"fp32 input 4 s b h{shard}, probabilities and choices, a layer, {each}",
        EXPERTS: f"n = {rows:,} rows: input a n h, fc1's output {x.gates} a n F, fc2's input a n F, and the results, "
        f"a layer, {each}",
        EMBEDDING: f"ids of other ranks' tokens, masks of dropout, {each}",
        LOGITS: f"gradients of the loss, made in the forward: a s b h = {x.whole:,} and a V h = "
        f"{x.item * x.vocabulary:,}, {each}",
        WORKING: "largest sum of temporaries of the action that runs: gradients of activations, a weight's gradient "
        f"and its copy in the buffer's dtype, gathered sequences, logits of {x.logits_chunk:,} tokens at a time",
        PIPELINE: f"a s b h{shard} = {residual} for each message that has arrived or is being sent",
        DEFERRED: "inputs and output gradients of linear layers whose weight gradients are computed later",
        COMMUNICATION: "copies of gradients in the dtype in which they are sent, and sums over pipeline stages",
        BATCH: "16 bytes for each token of a batch; cosines and sines of the positions",
        FP8: "1 byte for forward and 1 for backward of each weight that is multiplied in fp8, from the first forward "
        "of a step to the optimizer",
        ROTARY: f"angles of this rank's own positions, {each}",
    }

"""Work of layers in FLOPs, bytes and kernels, and its time on a device.

A kernel's time is the sum of two: its FLOPs over the rate of a large product, and the bytes it reads and writes over
the rate of the memory. The sum, and not the larger of the two, makes small and thin products slower than large ones
without a constant for it. Matrix products of the backward are twice those of the forward. Those of fused attention are
2.5 times: five products for two, since the scores are computed again (https://arxiv.org/abs/2205.14135, algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.experts import gathers_tokens
from lightning_megatron.tools.planning.time.sizes import Sizes
from lightning_megatron.tools.planning.time.software import Software

ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward of fused attention over those of its forward."""
KERNEL_GAP = 3e-6
"""Seconds in which an accelerator fills and empties for one kernel."""


@dataclass(frozen=True)
class Work:
    """Work of some kernels on one rank.

    Attributes:
        matmul: FLOPs of matrix products.
        attention: FLOPs of fused attention.
        bytes: bytes read and written in the memory, by all kernels.
        kernels: number of kernels.
        stalls: kernels before which the device has nothing to do, since the host has waited for a number from it.
        narrow: FLOPs of ``matmul`` that run in the linear layers' format (fp8, if that is on).
    """

    matmul: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    stalls: float = 0.0
    narrow: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
            self.stalls + other.stalls,
            self.narrow + other.narrow,
        )

    def times(self, factor: float) -> Work:
        """The work repeated."""
        return Work(
            self.matmul * factor,
            self.attention * factor,
            self.bytes * factor,
            self.kernels * factor,
            self.stalls * factor,
            self.narrow * factor,
        )

    def seconds(self, device: DeviceSpec, sizes: Sizes) -> float:
        """Time of the work; on an asynchronous device the longer of the device's time and the host's."""
        wide, narrow = device.constants(sizes.dtype), device.constants(sizes.matmul_dtype)
        busy = (
            self.narrow / (device.peak(sizes.matmul_dtype) * narrow.matmul)
            + (self.matmul - self.narrow) / (device.peak(sizes.dtype) * wide.matmul)
            + self.attention / (device.peak(sizes.dtype) * wide.attention)
            + self.bytes / (device.memory_bandwidth * wide.memory)
        )
        host = self.kernels * device.kernel_seconds
        if not device.asynchronous:
            return busy + host
        busy += self.kernels * KERNEL_GAP + self.stalls * device.kernel_seconds
        return max(busy, host)


@dataclass(frozen=True)
class Pass:
    """Work of a part of the model in one micro-batch.

    Attributes:
        forward: work of the forward.
        backward: work of the backward, recomputation left out.
    """

    forward: Work
    backward: Work

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)


NOTHING = Pass(Work(), Work())


def linear_work(sizes: Sizes, software: Software, rows: float, k: float, n: float, matrices: float = 1) -> Pass:
    """``[rows, k] x [k, n]``, ``matrices`` of them, forward and backward, with the sum of the weight's gradient.

    Args:
        sizes: sizes of the rank.
        software: properties of the kernels.
        rows: rows of all matrices together.
        k: features of the input.
        n: features of the output.
        matrices: number of weights over which the rows are split.
    """
    flops = 2.0 * rows * k * n
    values = rows * (k + n) + matrices * k * n
    moved = values * sizes.value_bytes
    if sizes.job.fp8:  # every operand is read once more and written in one byte
        moved += (rows * k + matrices * k * n) * 3.0
    # The gradient is written in the products' format, read, and added to the sum in the buffers.
    summed = matrices * k * n * (2 * sizes.grad_bytes + (0 if software.fused_sum else 2 * sizes.value_bytes))
    adds = matrices * k * n / software.sum_block if _adds_in_blocks(sizes, software) else 0.0
    forward = Work(matmul=flops, bytes=moved, narrow=flops)
    return Pass(forward, Work(matmul=2 * flops, bytes=2 * moved + summed, kernels=adds, narrow=2 * flops))


def _adds_in_blocks(sizes: Sizes, software: Software) -> bool:
    """True if a kernel adds each block of a weight's gradient: not fused, and into a sum of another dtype."""
    return software.sum_block > 0 and not software.fused_sum and sizes.grad_bytes != sizes.value_bytes


def elementwise(sizes: Sizes, software: Software, values: float) -> Pass:
    """Kernels that read and write ``values`` values in a forward, and about twice as many in a backward."""
    moved = values * sizes.value_bytes * software.passes
    return Pass(Work(bytes=moved), Work(bytes=2 * moved))


def core_attention_work(sizes: Sizes, software: Software) -> Pass:
    """``softmax(q k^T) v`` under the causal mask, and its rotary embedding."""
    job, config = sizes.job, sizes.config
    scores = config.mean_seen(job.seq_length) * sizes.tokens  # of one head
    flops = 2.0 * scores * (sizes.head_features + sizes.output_features)
    read = sizes.head_features + sizes.group_features + sizes.value_features
    values = sizes.tokens * (read + sizes.output_features)
    forward = Work(attention=flops, bytes=values * sizes.value_bytes)
    backward = Work(attention=ATTENTION_BACKWARD * flops, bytes=3 * values * sizes.value_bytes)
    fused = Pass(forward, backward)
    on_ring = sizes.layout.cp > 1 and sizes.layout.cp_comm_type == "p2p" and not software.fused_ring
    # Scores are written and read by the product, the mask and softmax, and the second product, half of them masked.
    heads = config.num_attention_heads / sizes.layout.tp
    if job.attention == "flash" and not on_ring:
        by_blocks = config.blockwise_share(job.seq_length)
        return fused + elementwise(sizes, software, by_blocks * scores * heads * 6) if by_blocks else fused
    return fused + elementwise(sizes, software, (1 if on_ring else 2) * scores * heads * 6)


def attention_layer(sizes: Sizes, software: Software) -> Pass:
    """A layer's attention without :func:`core_attention_work`: norm, projections, rotation and the residual sum."""
    config, h, q, g = sizes.config, sizes.config.hidden_size, sizes.head_features, sizes.group_features
    normed = sizes.norm_passes * sizes.rows * h
    if config.has_latents:
        return _from_latents(sizes, software) + elementwise(sizes, software, normed)
    projections = linear_work(sizes, software, sizes.tokens, h, q + 2 * g) + linear_work(
        sizes, software, sizes.tokens, q, h
    )
    rotated = 2 * sizes.tokens * (q + g) if config.position_embedding == "rope" else 0
    heads = 4 * sizes.tokens * (q + g) * config.qk_norm  # copied, read and written
    return projections + elementwise(sizes, software, normed + rotated + heads)


def _from_latents(sizes: Sizes, software: Software) -> Pass:
    """Matrices to the latents of this rank's tokens, their norms, those to the heads, and rotation of a part."""
    config, rows, tokens = sizes.config, sizes.rows, sizes.tokens
    h, latent, turned = config.hidden_size, config.kv_lora_rank, config.rotary_dim
    heads = config.num_attention_heads / sizes.layout.tp
    unturned = config.head_dim - turned
    made = linear_work(sizes, software, rows, h, latent + turned)
    made += linear_work(sizes, software, tokens, latent, heads * (unturned + config.value_dim))
    if config.q_lora_rank:
        made += linear_work(sizes, software, rows, h, config.q_lora_rank)
    made += linear_work(sizes, software, tokens, config.q_lora_rank or h, sizes.head_features)
    made = _wide(made) + linear_work(sizes, software, tokens, sizes.output_features, h)
    normed = 4 * rows * (config.q_lora_rank + latent)
    # The turned part is read and written, then queries, keys and values are put together.
    together = 2 * tokens * (turned * (heads + 1) + sizes.head_features + sizes.group_features + sizes.value_features)
    return made + elementwise(sizes, software, normed + together)


def feed_forward(sizes: Sizes, software: Software, features: int, parts: int) -> Pass:
    """Two linear layers with the activation between them."""
    inner, h = features / parts, sizes.config.hidden_size
    up = linear_work(sizes, software, sizes.tokens, h, sizes.gates * inner)
    down = linear_work(sizes, software, sizes.tokens, inner, h)
    return up + down + elementwise(sizes, software, sizes.tokens * inner * (sizes.gates + 1))


def experts(sizes: Sizes, software: Software) -> Pass:
    """Router, permutation, and the experts of a rank with the tokens that they get."""
    config, layout = sizes.config, sizes.layout
    h, etp = config.hidden_size, layout.expert_tensor_parallel_size
    inner, local = config.expert_ffn_hidden_size / etp, config.num_experts / layout.ep
    visits = sizes.expert_rows
    up = linear_work(sizes, software, visits, h, sizes.gates * inner, local)
    down = linear_work(sizes, software, visits, inner, h, local)
    router = Work(matmul=2.0 * sizes.rows * h * config.num_experts, bytes=sizes.rows * h * sizes.value_bytes)
    active = elementwise(sizes, software, visits * inner * (sizes.gates + 1))
    # Rows are copied in the order of ranks, then of experts, and back, and summed; gradients go the same way once.
    copies = Work(bytes=8 * visits * h * sizes.value_bytes * software.passes)
    moved = active + Pass(copies, copies)
    # Without a capacity the host must know how many rows each expert gets before it can start their products.
    waits = layout.ep > 1 and not config.moe_pad_to_capacity and not gathers_tokens(config)
    count = software.expert_kernels + software.kernels_per_expert * local
    started = Work(kernels=count, stalls=count * waits)
    made = up + down + moved + Pass(router, router.times(2)) + Pass(started, started.times(2))
    shared = config.moe_shared_expert_ffn_hidden_size
    return made + feed_forward(sizes, software, shared, layout.tp) if shared else made


def embedding(sizes: Sizes, software: Software) -> Pass:
    """Rows of the table, read and summed, and a norm's; the backward adds them to the table's gradient."""
    rows = sizes.tokens + (sizes.rows if sizes.config.embedding_norm else 0)
    return elementwise(sizes, software, 2 * rows * sizes.config.hidden_size)


def joined_tokens(sizes: Sizes, software: Software) -> Pass:
    """Norms of hidden states and of further tokens, both side by side, and their projection."""
    h, rows = sizes.config.hidden_size, sizes.rows
    return _wide(linear_work(sizes, software, rows, 2 * h, h)) + elementwise(sizes, software, 8 * rows * h)


def output_layer(sizes: Sizes, software: Software) -> Pass:
    """Last norm, projection to the vocabulary, and cross entropy in fp32 over this rank's slice of it."""
    h, v, rows = sizes.config.hidden_size, sizes.vocab_rows, sizes.tokens
    made = linear_work(sizes, software, rows, h, v)
    # Each chunk but one reads the weight twice more, and reads and writes its gradient once more.
    chunks = software.loss_chunks if software.loss_in_forward and sizes.value_bytes == 2 else 1
    again = Work(bytes=(chunks - 1) * 4.0 * h * v * sizes.value_bytes, kernels=20.0 * chunks)
    whole = _wide(made) + _loss(sizes, software) + elementwise(sizes, software, 2 * sizes.rows * h)
    if not software.loss_in_forward:
        return whole
    return Pass(whole.forward + whole.backward + again, Work())


def _loss(sizes: Sizes, software: Software) -> Pass:
    """Cross entropy: logits are read and written for the maximum, exponentials, their sum, and the gradient."""
    logits, size = sizes.tokens * sizes.vocab_rows, sizes.value_bytes
    if software.fused_loss:  # read twice and written, then read and written for the factor of the loss
        return Pass(Work(bytes=logits * 3 * size), Work(bytes=logits * 2 * size))
    return Pass(Work(bytes=logits * (20.0 + 2 * size)), Work(bytes=logits * (12.0 + size)))


def _wide(made: Pass) -> Pass:
    """The pass without fp8."""
    return Pass(replace(made.forward, narrow=0.0), replace(made.backward, narrow=0.0))


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer by parts that may be recomputed.

    Attributes:
        core: core attention.
        attention: the rest of attention, with its norm.
        feed_forward: feed-forward layer or experts, with its norm.
    """

    core: Pass
    attention: Pass
    feed_forward: Pass

    @property
    def forward(self) -> Work:
        """Work of the forward."""
        return self.core.forward + self.attention.forward + self.feed_forward.forward

    @property
    def backward(self) -> Work:
        """Work of the backward."""
        return self.core.backward + self.attention.backward + self.feed_forward.backward

    def again(self, sizes: Sizes, has_experts: bool) -> Work:
        """Work of the parts that the backward recomputes; recomputed whole layers are not counted here."""
        plan = sizes.job.recompute
        done = Work()
        if plan.wraps("attention"):
            done += self.core.forward + self.attention.forward
        elif plan.wraps("core_attn"):
            done += self.core.forward
        if plan.wraps("mlp") or (has_experts and plan.wraps("moe")):
            done += self.feed_forward.forward
        return done


def layer_work(sizes: Sizes, software: Software, has_experts: bool) -> LayerWork:
    """Work of a layer, with or without experts."""
    inside = (
        experts(sizes, software)
        if has_experts
        else feed_forward(sizes, software, sizes.config.ffn_hidden_size, sizes.layout.tp)
    )
    launches = Pass(Work(kernels=software.kernels), Work(kernels=2 * software.kernels))
    norm_and_sum = elementwise(sizes, software, sizes.norm_passes * sizes.rows * sizes.config.hidden_size)
    return LayerWork(
        core_attention_work(sizes, software),
        attention_layer(sizes, software) + launches,
        inside + norm_and_sum,
    )

"""Time of collectives on the links that a group of ranks uses, and the part that no computation hides.

A ring moves ``(n - 1) / n`` of a tensor in ``n - 1`` messages (https://arxiv.org/abs/1909.09756 for the counts). Ranks
are numbered tp - cp - ep - dp - pp, tp fastest. A group with ``r`` members in each node sends ``1 / r`` of what leaves
the node through each member's own network card, so that its rate is the smaller of the fast link and ``r`` cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.experts import gathers_tokens
from lightning_megatron.tools.planning.time.compute import LayerWork, Work
from lightning_megatron.tools.planning.time.sizes import Sizes
from lightning_megatron.tools.planning.time.software import Software


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: number of ranks.
        stride: distance of one rank from the next.
    """

    size: int
    stride: int

    def in_a_node(self, device: DeviceSpec) -> int:
        """Members in one node."""
        return max(1, min(self.size, device.devices_per_node // self.stride))

    def rate(self, device: DeviceSpec) -> float:
        """Bytes a second of a ring."""
        members = self.in_a_node(device)
        within = device.within_node.bandwidth * device.link_efficiency
        if members == self.size:
            return within
        between = device.between_nodes.bandwidth * device.link_efficiency
        return between if members == 1 else min(within, members * between)

    def latency(self, device: DeviceSpec) -> float:
        """Seconds of all messages of a ring; a tree's depth bounds those between nodes."""
        members = self.in_a_node(device)
        nodes = self.size // members
        steps = min(nodes - 1, 2 * nodes.bit_length())
        return (members - 1) * device.within_node.latency + steps * device.between_nodes.latency

    def gather(self, device: DeviceSpec, bytes_: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter of, a tensor of ``bytes_`` bytes."""
        if self.size == 1:
            return 0.0
        return bytes_ * (self.size - 1) / self.size / self.rate(device) + self.latency(device)

    def all_to_all(self, device: DeviceSpec, bytes_: float) -> float:
        """Seconds in which a rank sends ``bytes_`` in equal parts to all; both kinds of links work in parallel."""
        if self.size == 1:
            return 0.0
        members = self.in_a_node(device)
        near = bytes_ * (members - 1) / self.size / (device.within_node.bandwidth * device.link_efficiency)
        far = bytes_ * (self.size - members) / self.size / (device.between_nodes.bandwidth * device.link_efficiency)
        return max(near, far) + (device.between_nodes if far else device.within_node).latency

    def neighbour(self, device: DeviceSpec, bytes_: float) -> float:
        """Seconds of a message to the next rank, the slowest of all pairs."""
        link = device.within_node if self.in_a_node(device) == self.size else device.between_nodes
        return bytes_ / (link.bandwidth * device.link_efficiency) + link.latency


@dataclass(frozen=True)
class Groups:
    """Groups of one rank.

    Attributes:
        sizes: sizes of the rank.
    """

    sizes: Sizes

    @property
    def tp(self) -> Group:
        """Ranks of tensor parallelism."""
        return Group(self.sizes.layout.tp, 1)

    @property
    def cp(self) -> Group:
        """Ranks of context parallelism."""
        return Group(self.sizes.layout.cp, self.sizes.layout.tp)

    @property
    def experts(self) -> Group:
        """Ranks that hold all experts: etp x ep."""
        return Group(self.sizes.layout.ep * self.sizes.layout.expert_tensor_parallel_size, 1)

    @property
    def dp(self) -> Group:
        """Ranks that sum gradients of dense parameters: dp x cp."""
        return Group(self.sizes.layout.data_parallel_size * self.sizes.layout.cp, self.sizes.layout.tp)

    @property
    def edp(self) -> Group:
        """Ranks that sum gradients of experts."""
        return Group(self.sizes.layout.expert_data_parallel_size, self.experts.size)

    @property
    def pp(self) -> Group:
        """Ranks of a pipeline."""
        layout = self.sizes.layout
        return Group(layout.pp, layout.tp * layout.cp * layout.data_parallel_size)


@dataclass(frozen=True)
class Exposed:
    """Communication of a part of the model in one micro-batch that no computation hides, in seconds.

    Attributes:
        forward: seconds of the forward, by axis: tp, cp, ep.
        backward: seconds of the backward, by axis.
    """

    forward: dict[str, float]
    backward: dict[str, float]


def layer_communication(
    sizes: Sizes, device: DeviceSpec, software: Software, work: LayerWork, has_experts: bool
) -> Exposed:
    """Exposed communication of one layer."""
    parts = {
        "tp": tensor_parallel(sizes, device, software, work, has_experts),
        "cp": context_parallel(sizes, device, work),
        "ep": expert_parallel(sizes, device) if has_experts else (0.0, 0.0),
    }
    return Exposed({axis: each[0] for axis, each in parts.items()}, {axis: each[1] for axis, each in parts.items()})


def repeated_communication(sizes: Sizes, exposed: Exposed, has_experts: bool) -> float:
    """Seconds of a layer's communication that the backward repeats for recomputed parts of the layer.

    A recomputed part gathers its input again over tp, and keys and values over cp; recomputation ends with the last
    tensor that the backward needs, which is before the part's output is scattered. Tokens go to their experts and back
    once more, since the routing weights multiply the returned results.

    Args:
        sizes: sizes of the rank.
        exposed: exposed communication of the layer.
        has_experts: True for a layer with experts.
    """
    plan, gather = sizes.job.recompute, exposed.forward["tp"] / (2 * _pairs(sizes, has_experts))
    again = gather + exposed.forward["cp"] if plan.wraps("attention") else 0.0
    if has_experts and (plan.wraps("moe") or plan.wraps("mlp")):
        return again + exposed.forward["ep"]
    return again + gather if plan.wraps("mlp") else again


def _pairs(sizes: Sizes, has_experts: bool) -> int:
    """Parts of a layer that tensor parallelism cuts: attention, and a feed-forward layer that all tokens visit."""
    return 1 if has_experts and not sizes.config.moe_shared_expert_ffn_hidden_size else 2


def tensor_parallel(
    sizes: Sizes, device: DeviceSpec, software: Software, work: LayerWork, has_experts: bool
) -> tuple[float, float]:
    """Seconds of forward and backward.

    A column-parallel layer gathers its input, a row-parallel one scatters its output (without sequence parallelism the
    latter sums it). In the backward the gather of the row-parallel layer's output gradient overlaps with nothing; the
    second gather of the input overlaps with one product, and the scatter of the input's gradient with another.
    """
    group = Groups(sizes).tp
    if group.size == 1:
        return 0.0, 0.0
    token = sizes.tokens * sizes.value_bytes
    one = group.gather(device, token * sizes.config.hidden_size)
    latents = group.gather(device, token * sizes.attention_inputs)  # what attention gathers, if it makes latents first
    pairs = _pairs(sizes, has_experts)
    beside = _product_seconds(work, sizes, device) / pairs
    left, own = (max(0.0, each - beside) if device.asynchronous else each for each in (one, latents))
    shown = 1.0 - software.tp_overlap
    forward, backward = 2 * pairs * one + latents - one, 2 * ((pairs - 1) * left + own)
    if sizes.layout.uses_sequence_parallel:
        backward += pairs * one
    elif sizes.config.has_latents:
        forward = 2 * pairs * one
    return forward * shown, backward * shown


def _product_seconds(work: LayerWork, sizes: Sizes, device: DeviceSpec) -> float:
    """Seconds of one of the two products of a backward, of all column-parallel layers."""
    flops = (work.attention.forward.matmul + work.feed_forward.forward.matmul) * 0.6
    return Work(matmul=flops, narrow=flops).seconds(device, sizes)


def context_parallel(sizes: Sizes, device: DeviceSpec, work: LayerWork) -> tuple[float, float]:
    """Seconds of forward and backward, by the kind of communication."""
    group, kind = Groups(sizes).cp, sizes.layout.cp_comm_type
    if group.size == 1:
        return 0.0, 0.0
    kv = sizes.tokens * (sizes.group_features + sizes.value_features) * sizes.value_bytes  # keys and values of a rank
    if kind == "all_gather":
        one = group.gather(device, kv * group.size)
        return one, 2 * one  # gathered again, and their gradients scattered
    if kind == "a2a":
        both = sizes.head_features + sizes.group_features + sizes.value_features + sizes.output_features
        moved = sizes.tokens * both * sizes.value_bytes
        one = group.all_to_all(device, moved) + group.latency(device)
        return one, one
    steps, message = group.size - 1, group.neighbour(device, kv)
    if not device.asynchronous:
        return steps * message, 2 * steps * message
    forward = work.core.forward.seconds(device, sizes) / group.size
    backward = work.core.backward.seconds(device, sizes) / group.size
    # The last message of the gradients overlaps with nothing.
    return steps * max(0.0, message - forward), steps * max(0.0, 2 * message - backward) + message


def expert_parallel(sizes: Sizes, device: DeviceSpec) -> tuple[float, float]:
    """Seconds of forward and backward: tokens to their experts and back, and the same way for gradients."""
    group, config = Groups(sizes).experts, sizes.config
    if group.size == 1:
        return 0.0, 0.0
    row = config.hidden_size * sizes.value_bytes
    if gathers_tokens(config):
        both = 2 * group.gather(device, sizes.rows * group.size * row)
        return both, both
    both = 2 * group.all_to_all(device, sizes.expert_rows * row)
    return both, both


def message_seconds(sizes: Sizes, device: DeviceSpec) -> float:
    """Seconds in which an activation goes from one pipeline rank to the next."""
    if sizes.layout.pp == 1:
        return 0.0
    return Groups(sizes).pp.neighbour(device, sizes.rows * sizes.config.hidden_size * sizes.value_bytes)

"""Memory of an anchor, predicted for its program, and for this library with the same job.

State: parameters, gradients, 12 bytes of main parameter and Adam's states, the last over dp with the distributed
optimizer. Activations of a layer: https://arxiv.org/abs/2205.05198, section 4, in 16-bit values, with what
``keeping.py`` says of the program. The constant is CUDA's workspace as torch's allocator sees it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from anchors.keeping import FUSED_LOSS, KEEPING, Keeping
from anchors.programs import PROGRAMS
from anchors.rows import Anchor
from anchors.timing import is_fsdp
from lightning_megatron.pipeline.action import Action
from lightning_megatron.pipeline.schedule import build_schedule
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.parameters import rank_sizes
from lightning_megatron.tools.planning.memory.peak import memory_of
from lightning_megatron.tools.planning.memory.shapes import Kernels
from lightning_megatron.tools.planning.memory.steps import shown_micro_batches
from lightning_megatron.tools.planning.time.optimizer import expert_layers
from lightning_megatron.tools.planning.time.sizes import Sizes

GROUPED = Kernels(fuses_experts=True)
"""Megatron-LM's kernels: Transformer Engine's grouped layers add the experts' gradients to the buffer."""
OURS = Kernels(flash_in_parts=True)
"""Our kernels on the rows' cards: torch's flash kernel computes the parts of a ring."""
WORKSPACE = 0.1e9
"""Bytes that are in use beside tensors of the model."""


def why_not(anchor: Anchor) -> str:
    """Reason why a row's memory is not predicted; empty if it is."""
    if is_fsdp(anchor, PROGRAMS[anchor.program]):
        return "parameters are cut over data-parallel ranks (FSDP), which this library does not have"
    if anchor.program == "torchtitan":
        return "what its modules keep without FSDP is not described"
    lost = re.search(r"([\d., and]+) ran out of memory", anchor.row.get("notes") or "")
    if lost and str(anchor.row["measured"]["memory_gb"]) in re.findall(r"\d+\.\d+", lost[1]):
        return "the run ran out of memory: its figure is not a peak"
    return ""


def keeping_of(anchor: Anchor) -> Keeping | None:
    """Tensors that the row's program keeps; ``None`` if they are those of this library."""
    found = KEEPING.get(f"{anchor.program}/{anchor.dtype}") or KEEPING.get(anchor.program)
    if found and "cross-entropy-loss-fusion" in (anchor.row.get("notes") or ""):
        return replace(found, logit_bytes=found.logit_bytes + FUSED_LOSS)
    return found


def predicted_peak(anchor: Anchor) -> float:
    """Predicted peak bytes of the row's program, on the rank that it logs."""
    keeping = keeping_of(anchor)
    if keeping is None:
        return _peak(anchor, GROUPED)
    return max(Rank(anchor, keeping, rank).peak for rank in _ranks(anchor, keeping)) + WORKSPACE


def predicted_after_step(anchor: Anchor) -> float:
    """Predicted bytes after a step: state, inputs that stages still hold, and the workspace."""
    keeping = keeping_of(anchor)
    if keeping is None:
        return our_after_step(anchor)
    return max(Rank(anchor, keeping, rank).after_step for rank in _ranks(anchor, keeping)) + WORKSPACE


def is_reserved(anchor: Anchor) -> bool:
    """True if the row's figure is memory that an allocator had reserved: an upper bound of the bytes of tensors."""
    keeping = keeping_of(anchor)
    return keeping is not None and keeping.reserved


def state_of(anchor: Anchor) -> float:
    """Bytes of parameters, gradients and optimizer of the rank that the row's program logs."""
    keeping = keeping_of(anchor) or Keeping()
    return max(Rank(anchor, keeping, rank).state for rank in _ranks(anchor, keeping))


def batches(anchor: Anchor) -> int:
    """Bytes that Megatron-LM's last rank loads for a step: for each micro-batch a mask, labels and a loss mask.

    The mask has a byte for each pair of tokens of a sample, labels have 8 for each token, and the loss mask 4. Some of
    its runs hold them from one step to the next, others of the same job do not.
    """
    job = anchor.job
    return job.num_micro_batches * job.micro_batch_size * job.seq_length * (job.seq_length + 8 + 4)


def our_peak(anchor: Anchor) -> float:
    """Peak bytes that our library would need for the row's job, and the workspace."""
    return _peak(anchor, OURS)


def _peak(anchor: Anchor, kernels: Kernels) -> float:
    ranks = _ranks(anchor, keeping_of(anchor))
    return max(memory_of(anchor.job, rank, kernels).peak for rank in ranks) + WORKSPACE


def our_after_step(anchor: Anchor) -> float:
    """Bytes after a step of our library, and the workspace."""
    return max(memory_of(anchor.job, rank).after_step for rank in _ranks(anchor, keeping_of(anchor))) + WORKSPACE


def _ranks(anchor: Anchor, keeping: Keeping | None) -> set[int]:
    """Pipeline ranks that the source's figure may be of: one end, or both."""
    last = anchor.job.layout.pp - 1
    return {"first": {0}, "last": {last}, "worst": {0, last}}["worst" if keeping is None else keeping.rank]


class Rank:
    """Memory of one pipeline rank.

    Args:
        anchor: a published point.
        keeping: what its program keeps.
        rank: pipeline rank.
    """

    def __init__(self, anchor: Anchor, keeping: Keeping, rank: int) -> None:
        self._job, self._keeping, self._rank = anchor.job, keeping, rank
        self._sizes = Sizes(anchor.job)
        self._held = [stage for stage in anchor.job.stages if stage.rank == rank]

    @property
    def state(self) -> float:
        """Bytes of parameters, gradients and optimizer."""
        job, layout, k = self._job, self._job.layout, self._keeping
        dense, experts = rank_sizes(self._sizes.config, self._sizes.layout, tuple(self._held))
        replicas, of_experts = layout.data_parallel_size * layout.cp, layout.expert_data_parallel_size
        shares = job.distributed_optimizer
        buckets = 0.0 if shares or replicas == 1 else k.buckets
        whole = k.params + k.grads + buckets
        return dense * (whole + 12 / (replicas if shares else 1)) + experts * (
            whole + 12 / (of_experts if shares else 1)
        )

    @property
    def _stream(self) -> float:
        """Bytes of the residual stream on this rank."""
        return 2.0 * self._sizes.rows * self._job.config.hidden_size

    @property
    def after_step(self) -> float:
        """Bytes from one step to the next."""
        received = sum(not stage.has_embedding for stage in self._held) if self._keeping.inputs else 0
        return self.state + 2 * received * self._stream

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment: the state, activations in flight, and those that the loss or a layer makes."""
        kept = {stage.stage: self._kept(stage) for stage in self._held}
        working = {stage.stage: self._working(stage) for stage in self._held}
        held = fullest = 0.0
        for action in self._actions:
            if action.kind == "F":
                held += kept[action.stage]
            fullest = max(fullest, held + working[action.stage])
            if action.kind in "BW":
                held -= kept[action.stage]
        return self.state + fullest

    @property
    def _actions(self) -> Sequence[Action]:
        """Actions of the rank, for as many micro-batches as a schedule has before it repeats itself."""
        job, layout = self._job, self._job.layout
        count = shown_micro_batches(job.schedule_name, layout.pp, layout.vpp, job.num_micro_batches)
        return build_schedule(None if layout.pp == 1 else job.schedule, layout.pp, layout.vpp, count)[self._rank]

    def _working(self, stage: StageLayers) -> float:
        """Bytes of the loss, or of a recomputed layer."""
        loss = self._sizes.tokens * self._sizes.vocab_rows * self._keeping.logit_bytes if stage.has_loss else 0.0
        if self._job.recompute.granularity != "full":
            return loss
        with_experts = expert_layers(self._sizes, stage)
        return max(loss, self._layer(bool(with_experts)))

    def _kept(self, stage: StageLayers) -> float:
        """Bytes of a stage for one micro-batch."""
        with_experts, count = expert_layers(self._sizes, stage), len(stage.layers)
        mask = self._stream / 2 if self._job.config.hidden_dropout and stage.has_embedding else 0.0
        ends = mask + (2 * self._stream if stage.has_loss else 0.0)
        if self._job.recompute.granularity == "full":
            return ends + count * self._stream
        dense = (count - with_experts) * self._layer(False)
        return ends + dense + (with_experts * self._layer(True) if with_experts else 0.0)

    def _layer(self, has_experts: bool) -> float:
        """Bytes that a layer keeps."""
        plan, stream, k = self._job.recompute, self._stream, self._keeping
        tp = self._job.layout.tp if self._job.layout.uses_sequence_parallel and k.gathers else 1
        normed = stream * tp * k.operand / 2
        masks = stream if self._job.config.hidden_dropout else 0.0  # a byte for each value of both halves
        return 2 * stream + 2 * normed + masks + self._core(plan.wraps("core_attn")) + self._inner(has_experts)

    def _core(self, again: bool) -> float:
        """Bytes of queries, keys, values, the attention's output, and the scores if they are kept."""
        sizes, job = self._sizes, self._job
        given = 2.0 * sizes.tokens * (sizes.head_features + 2 * sizes.group_features)
        out = self._keeping.operand * sizes.tokens * sizes.head_features
        heads = job.config.num_attention_heads / job.layout.tp
        if again:
            return given + out
        if job.attention == "flash":
            return given + out + 4 * sizes.tokens * heads
        # Softmax, its dropout's result and mask; without dropout the softmax alone.
        each = 5.0 if job.config.hidden_dropout else 2.0
        return given + out + each * sizes.tokens * heads * job.seq_length

    def _inner(self, has_experts: bool) -> float:
        """Bytes between the two products of a feed-forward layer, or of experts with their rows."""
        sizes, job, k = self._sizes, self._job, self._keeping
        config, layout, plan = job.config, job.layout, job.recompute
        between = 2.0 * (sizes.gates + (k.gates and sizes.gates == 2)) + k.operand
        if not has_experts:
            return 0.0 if plan.wraps("mlp") else sizes.tokens * config.ffn_hidden_size / layout.tp * between
        if plan.wraps("moe"):
            return 0.0
        etp = layout.expert_tensor_parallel_size
        visits = sizes.rows * config.moe_router_topk * etp
        return visits * (2 * k.operand * config.hidden_size + config.expert_ffn_hidden_size / etp * between)

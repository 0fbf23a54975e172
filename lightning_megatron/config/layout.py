"""Parallel layouts, and their checks against a job, a model and its batches.

Everything here is a frozen dataclass that checks itself, without processes and without torch. A check does not stop at
the first fault: it returns every :class:`Problem` that it finds, and one :class:`ConfigError` shows them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol, runtime_checkable

from lightning_megatron.arguments import Rules, argument_problems, at_least
from lightning_megatron.errors import (
    Problem,
    divisors,
    is_whole,
    multiples_around,
    nearest_names,
    nearest_to,
    raise_if_any,
)

BATCH_RULES: Rules = {"micro_batch_size": at_least(1)}
"""Rules for arguments about batches, also those of the strategy."""
_BATCH_HINTS = {"micro_batch_size": int | None}

CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
"""Kinds of attention over context-parallel ranks; ``context_parallel.attention`` has a function for each."""


class ModelShape(Protocol):
    """Sizes of a model that a layout is checked against; ``TransformerConfig`` has them."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_query_groups(self) -> int: ...  # noqa: D102
    @property
    def ffn_hidden_size(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_position_embeddings(self) -> int: ...  # noqa: D102
    @property
    def attention_dropout(self) -> float: ...  # noqa: D102
    @property
    def num_experts(self) -> int: ...  # noqa: D102
    @property
    def expert_ffn_hidden_size(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class BatchShape:
    """Sizes of the batches that a run feeds.

    Attributes:
        batch_size: samples that one data-parallel replica gets in one batch of its DataLoader.
        micro_batch_size: samples of one forward; ``None`` means the whole batch.
        seq_length: tokens of one sample, ``None`` if unknown.
        vocab_size: one more than the largest token id, ``None`` if unknown.
        global_batch_size: ``batch_size x dp x accumulate_grad_batches`` that the user expects, ``None`` if not given.
        accumulate_grad_batches: batches that Lightning accumulates before one optimizer step.
    """

    batch_size: int | None = None
    micro_batch_size: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    global_batch_size: int | None = None
    accumulate_grad_batches: int = 1


@runtime_checkable
class HasModelShape(Protocol):
    """A module that knows the shape of its model."""

    @property
    def model_shape(self) -> ModelShape | None:
        """The model's shape, ``None`` if unknown."""
        ...


@runtime_checkable
class HasBatchShape(Protocol):
    """A data module that knows the sizes of its batches."""

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of its batches."""
        ...


@dataclass(frozen=True)
class ParallelLayout:
    """Number of ranks in each kind of parallelism.

    Attributes:
        tp: tensor parallel: ranks that share every large matrix (https://arxiv.org/abs/1909.08053).
        pp: pipeline parallel: ranks that share the list of layers (https://arxiv.org/abs/2104.04473).
        cp: context parallel: ranks that share one sequence.
        ep: expert parallel: ranks that share the experts of a layer; a part of dp x cp x tp.
        etp: expert tensor parallel: ranks that share one expert. ``None`` means ``tp``.
        dp: data parallel replicas. ``None`` means all ranks that the other sizes leave.
        vpp: model chunks a pipeline rank holds (interleaved schedules).
        sequence_parallel: True to shard norms and dropout over the sequence inside tp
            (https://arxiv.org/abs/2205.05198). ``None`` means ``tp > 1``.
        cp_comm_type: communication of context-parallel attention: ``"p2p"`` (keys and values in a ring),
            ``"all_gather"`` (of keys and values) or ``"a2a"`` (all-to-all, heads for tokens).
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    vpp: int = 1
    sequence_parallel: bool | None = None
    cp_comm_type: str = "p2p"

    def __post_init__(self) -> None:
        raise_if_any(self._own_problems())

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and of one sequence: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def is_whole(self) -> bool:
        """True if every rank holds the whole model, as under DDP."""
        return self.tp == self.pp == self.cp == self.ep == self.expert_tensor_parallel_size == 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job; only a resolved layout has one."""
        return self.model_parallel_size * self.data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """``dp`` of a resolved layout."""
        if self.dp is None:
            raise ValueError("dp is open until the layout is resolved: call resolve(world_size)")
        return self.dp

    @property
    def expert_tensor_parallel_size(self) -> int:
        """``etp``, or ``tp`` if it is not given."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_data_parallel_size(self) -> int:
        """Replicas of one expert shard in a resolved layout."""
        return self.data_parallel_size * self.cp * self.tp // (self.ep * self.expert_tensor_parallel_size)

    @property
    def uses_sequence_parallel(self) -> bool:
        """``sequence_parallel`` with its default filled in."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def sequence_multiple(self) -> int:
        """Divisor of the sequence length (which is padded to it if needed): every rank gets an equal part.

        There are two chunks for each context-parallel rank, and sequence parallelism splits each of them over tp.
        """
        chunks = 2 * self.cp if self.cp > 1 else 1
        return chunks * self.tp if self.uses_sequence_parallel else chunks

    def resolve(self, world_size: int) -> ParallelLayout:
        """Fill in ``dp`` and the defaults for a job of ``world_size`` ranks.

        Raises:
            ConfigError: if the sizes do not multiply to the world size.
        """
        raise_if_any(self.problems(world_size=world_size))
        return replace(
            self,
            dp=world_size // self.model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            sequence_parallel=self.uses_sequence_parallel,
        )

    def validate(
        self, world_size: int | None = None, model: ModelShape | None = None, batch: BatchShape | None = None
    ) -> None:
        """Raise one :class:`ConfigError` with everything that :meth:`problems` finds."""
        raise_if_any(self.problems(world_size, model, batch))

    def problems(
        self, world_size: int | None = None, model: ModelShape | None = None, batch: BatchShape | None = None
    ) -> list[Problem]:
        """Every fault of this layout for a job, a model and a batch, as far as they are given."""
        found: list[Problem] = []
        if world_size is not None:
            found += self._world_problems(world_size)
        if model is not None:
            found += self._model_problems(model)
        if batch is not None:
            found += self._batch_problems(batch, world_size)
        if batch is not None and model is not None:
            found += _feeding_problems(batch, model)
        return found

    def _own_problems(self) -> list[Problem]:
        sizes = {n: getattr(self, n) for n in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp")}
        found = [
            Problem(name, size, "a size must be a whole number of at least 1", (1,))
            for name, size in sizes.items()
            if size is not None and not is_whole(size, at_least=1)
        ]
        if not isinstance(self.sequence_parallel, bool | None):
            reason, near = "must be True or False or None", (None, True, False)
            found.append(Problem("sequence_parallel", self.sequence_parallel, reason, near))
        if self.cp_comm_type not in CP_COMM_TYPES:
            near = nearest_names(str(self.cp_comm_type), CP_COMM_TYPES)
            found.append(Problem("cp_comm_type", self.cp_comm_type, "unknown", near))
        if found:
            return found
        if self.sequence_parallel and self.tp == 1:
            reason = (
                "sequence parallelism shards over tensor-parallel ranks and tp=1 has none: raise tp, or leave it out"
            )
            found.append(Problem("sequence_parallel", True, reason, (False, None)))
        if self.vpp > 1 and self.pp == 1:
            reason = "interleaved chunks need a pipeline, and pp=1 has none: raise pp, or leave vpp out"
            found.append(Problem("vpp", self.vpp, reason, (1,)))
        return found

    def _world_problems(self, world_size: int) -> list[Problem]:
        shared = self.model_parallel_size
        sizes = f"tp x pp x cp = {self.tp} x {self.pp} x {self.cp} = {shared}"
        if world_size % shared:
            reason = f"{sizes} does not divide the world size {world_size} (devices x num_nodes)"
            if shared > world_size:
                reason = f"{sizes} is more than the world size {world_size} (devices x num_nodes): try devices={shared}"
            return _indivisible({"tp": self.tp, "pp": self.pp, "cp": self.cp}, world_size, reason)
        found: list[Problem] = []
        dp = world_size // shared
        if self.dp is not None and self.dp != dp:
            reason = f"{sizes} leaves {dp} of the world size {world_size} for data parallelism"
            found.append(Problem("dp", self.dp, reason, (dp,)))
        ranks, etp = dp * self.cp * self.tp, self.expert_tensor_parallel_size
        if ranks % (self.ep * etp):
            reason = f"ep x etp = {self.ep} x {etp} does not divide dp x cp x tp = {dp} x {self.cp} x {self.tp}"
            found += _indivisible({"ep": self.ep, "etp": etp}, ranks, reason)
        return found

    def _model_problems(self, model: ModelShape) -> list[Problem]:
        found: list[Problem] = []
        heads, groups, features = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
        shared = {heads: "attention heads", features: "feed-forward features (ffn_hidden_size)"}
        if groups != heads:
            # A group is never copied to several ranks: a replicated key/value weight would need its own gradient sum.
            shared[groups] = "query groups (key/value heads)"
        valid = nearest_to(self.tp, divisors(math.gcd(*shared)))
        found += [
            Problem("tp", self.tp, f"{total} {what} do not split over {self.tp} ranks", valid)
            for total, what in shared.items()
            if total % self.tp
        ]
        if model.num_layers % (self.pp * self.vpp):
            stages = f"pp x vpp = {self.pp} x {self.vpp} stages"
            reason = f"{model.num_layers} layers (num_layers) do not split over {stages}"
            found += _indivisible({"pp": self.pp, "vpp": self.vpp}, model.num_layers, reason)
        return found + self.context_problems(heads, model.attention_dropout) + self._expert_problems(model)

    def context_problems(self, heads: int, dropout: float) -> list[Problem]:
        """Reasons why context-parallel ranks cannot share attention of ``heads`` query heads (over all tp ranks)."""
        found: list[Problem] = []
        if self.cp == 1:
            return found
        if self.cp_comm_type == "p2p" and dropout:
            reason = (
                f"attention on a ring cannot drop weights (attention_dropout={dropout}): it merges sums over"
                " all of them"
            )
            found.append(Problem("cp_comm_type", "p2p", reason, ("a2a", "all_gather")))
        if self.cp_comm_type == "a2a" and heads % self.tp == 0 and heads // self.tp % self.cp:
            local = heads // self.tp
            reason = f"cp_comm_type='a2a' splits heads, and {local} a rank ({heads} over tp={self.tp}) do not divide"
            found.append(Problem("cp", self.cp, reason, nearest_to(self.cp, divisors(local))))
        return found

    def _expert_problems(self, model: ModelShape) -> list[Problem]:
        if not model.num_experts:
            return [Problem("ep", self.ep, "the model has no experts to share", (1,))] if self.ep > 1 else []
        etp = self.expert_tensor_parallel_size
        shares = {
            "ep": (self.ep, model.num_experts, "experts"),
            "etp": (etp, model.expert_ffn_hidden_size, "features of an expert"),
        }
        found = [
            Problem(name, size, f"{total} {what} do not split over {size} ranks", nearest_to(size, divisors(total)))
            for name, (size, total, what) in shares.items()
            if total % size
        ]
        if self.tp > 1 and not self.uses_sequence_parallel:
            reason = "with experts and tp > 1 each rank must hold tokens of its own: leave it out"
            found.append(Problem("sequence_parallel", False, reason, (True, None)))
        return found

    def _batch_problems(self, batch: BatchShape, world_size: int | None) -> list[Problem]:
        found: list[Problem] = []
        size, micro, seq = batch.batch_size, batch.micro_batch_size, batch.seq_length
        too_small = argument_problems(
            {"micro_batch_size": micro}, _BATCH_HINTS, BATCH_RULES, {"micro_batch_size": None}
        )
        found += too_small
        if not too_small and size is not None and micro is not None and size % micro:
            reason = f"a batch of {size} samples does not split into micro-batches of {micro}"
            found.append(Problem("micro_batch_size", micro, reason, nearest_to(micro, divisors(size))))
        if seq is not None and seq % self.sequence_multiple:
            found.append(Problem("seq_length", seq, self._why_cut(), multiples_around(seq, self.sequence_multiple)))
        dp = self.dp if self.dp is not None else None if world_size is None else world_size // self.model_parallel_size
        if batch.global_batch_size is not None and size is not None and dp:
            real = size * dp * batch.accumulate_grad_batches
            if real != batch.global_batch_size:
                reason = f"batch_size x dp x accumulate_grad_batches = {size} x {dp} x {batch.accumulate_grad_batches}"
                found.append(Problem("global_batch_size", batch.global_batch_size, f"{reason} = {real}", (real,)))
        return found

    def _why_cut(self) -> str:
        """Reason why sequences must split into :attr:`sequence_multiple` parts."""
        if self.cp == 1:
            return f"sequence parallelism splits every sequence over tp={self.tp} ranks"
        pieces = f"{self.sequence_multiple} pieces"
        if not self.uses_sequence_parallel:
            return f"context parallelism cuts every sequence into 2 x cp = {pieces}"
        return f"context and sequence parallelism cut every sequence into 2 x cp x tp = {pieces}"


def _indivisible(sizes: dict[str, int], total: int, reason: str) -> list[Problem]:
    """Problems of sizes whose product does not divide ``total``.

    Returns:
        One problem for each size whose change alone is enough; if there is none, one with the nearest combinations.
    """
    sizes = {name: size for name, size in sizes.items() if size > 1}
    product_of_all = math.prod(sizes.values())
    found = []
    for name, size in sizes.items():
        others = product_of_all // size
        if total % others == 0:
            found.append(Problem(name, size, reason, nearest_to(size, divisors(total // others))))
    if found:
        return found
    choices = [c for c in product(divisors(total), repeat=len(sizes)) if total % math.prod(c) == 0]
    # Distance by ratio, not by difference: 8 is as far from 4 as 2 is from 1.
    choices.sort(key=lambda c: (round(sum(abs(math.log(a / b)) for a, b in zip(c, sizes.values(), strict=True)), 6), c))
    nearest = tuple(" x ".join(map(str, c)) for c in choices[:3])
    return [Problem(" x ".join(sizes), " x ".join(map(str, sizes.values())), reason, nearest)]


def _feeding_problems(batch: BatchShape, model: ModelShape) -> list[Problem]:
    """Faults of batches for a model."""
    found = []
    longest, vocab = model.max_position_embeddings, model.vocab_size
    if batch.seq_length is not None and batch.seq_length > longest:
        reason = f"longer than the model's max_position_embeddings={longest}"
        found.append(Problem("seq_length", batch.seq_length, reason, (longest,)))
    if batch.vocab_size is not None and batch.vocab_size > vocab:
        reason = f"the tokenizer has {batch.vocab_size} tokens, more than the model"
        found.append(Problem("vocab_size", vocab, reason, (batch.vocab_size,)))
    return found

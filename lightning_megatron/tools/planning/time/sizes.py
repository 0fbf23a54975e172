"""Sizes of one rank's part of a job that several formulas of time need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_megatron.config.counts import GATED, padded_vocab_size
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.experts import expert_rows
from lightning_megatron.tools.planning.core.job import PlannedJob


@dataclass(frozen=True)
class Sizes:
    """Numbers of one rank and one micro-batch.

    Attributes:
        job: the job.
    """

    job: PlannedJob

    @property
    def config(self) -> TransformerConfig:
        """Shape of the model."""
        return self.job.config

    def layers_of(self, stage: StageLayers) -> tuple[int, ...]:
        """Layers of a stage; a module for a further token has a block like the last one."""
        further = self.config.mtp_num_layers if stage.has_loss else 0
        return (*stage.layers, *(self.config.num_layers - 1,) * further)

    @property
    def layout(self) -> ParallelLayout:
        """Resolved layout."""
        return self.job.layout

    @cached_property
    def tokens(self) -> int:
        """Tokens ``T`` of a micro-batch on a context-parallel rank: rows of its matrix products."""
        return self.job.seq_length * self.job.micro_batch_size // self.layout.cp

    @cached_property
    def rows(self) -> float:
        """Tokens that a rank holds outside its tensor-parallel layers: ``T / tp`` under sequence parallelism."""
        return self.tokens / self.layout.tp if self.layout.uses_sequence_parallel else self.tokens

    @cached_property
    def expert_rows(self) -> int:
        """Rows that a rank's experts compute for one micro-batch; each rank also sends this number."""
        return expert_rows(self.config, self.layout, int(self.rows), self.job.expert_imbalance)

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of an activation and of a parameter."""
        return self.job.item_bytes.params

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of a gradient in the buffers."""
        return self.job.item_bytes.grads

    @cached_property
    def matmul_dtype(self) -> str:
        """Number format of the linear layers' products."""
        return "fp8" if self.job.fp8 else self.dtype

    @cached_property
    def dtype(self) -> str:
        """Number format of everything else."""
        return "fp32" if self.value_bytes == 4 else "bf16"

    @cached_property
    def gates(self) -> int:
        """Number of up-projections of a feed-forward layer: 2 if it is gated."""
        return 2 if self.config.activation in GATED else 1

    @cached_property
    def norm_passes(self) -> int:
        """Reads and writes of the residual stream by the norms of half a layer, and the sum behind it."""
        return 7 if self.config.post_norms else 5

    @cached_property
    def head_features(self) -> float:
        """Query features of a rank."""
        return self.config.num_attention_heads * self.config.head_dim / self.layout.tp

    @cached_property
    def group_features(self) -> float:
        """Key features of a rank."""
        return self.config.num_query_groups * self.config.head_dim / self.layout.tp

    @cached_property
    def value_features(self) -> float:
        """Value features of a rank."""
        return self.config.num_query_groups * self.config.value_dim / self.layout.tp

    @cached_property
    def output_features(self) -> float:
        """Features of the attention output of a rank."""
        return self.config.num_attention_heads * self.config.value_dim / self.layout.tp

    @cached_property
    def attention_inputs(self) -> int:
        """Features that attention's column-parallel layers gather: of the residual stream, or of its latents."""
        config = self.config
        if not config.has_latents:
            return config.hidden_size
        return (config.q_lora_rank or config.hidden_size) + config.kv_lora_rank + config.rotary_dim

    @cached_property
    def vocab_rows(self) -> float:
        """Rows of the embedding on a rank, with padding."""
        return padded_vocab_size(self.config.vocab_size, self.layout.tp, self.config.vocab_multiple) / self.layout.tp

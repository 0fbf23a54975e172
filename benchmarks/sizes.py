"""Models, rows and jobs of the comparison, and the memory that a row needs on a card, by arithmetic.

A row is a model, a precision and a layout: ``llama-tiny/bf16/tp2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers.protocol import Job

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.models.presets import preset


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
        config: shape of the model.
        seq: tokens of a sample.
        micro_batch: samples of a micro-batch.
        micro_batches: micro-batches of a step, over all replicas.
    """

    config: TransformerConfig
    seq: int = 512
    micro_batch: int = 2
    micro_batches: int = 4


def _experts_of_1b(layers: int) -> TransformerConfig:
    """LLaMA 3.2 1B with 8 experts in each feed-forward layer, two for each token: 6.9 G parameters in 16 layers."""
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02}
    return preset("llama3.2-1b").replace(num_layers=layers, rope_scaling=None, **experts)


SIZES = {
    "mixtral-tiny": Size(preset("mixtral-tiny"), 256),
    "llama-tiny-8k": Size(preset("llama-tiny").replace(max_position_embeddings=8192), 8192, 1, 1),
    "llama3.2-1b": Size(preset("llama3.2-1b"), 8192, 1, 8),
    "llama3.1-8b": Size(preset("llama3.1-8b"), 8192, 1, 8),
    "llama3.1-8b-8layers": Size(preset("llama3.1-8b").replace(num_layers=8), 4096, 1, 8),
    "mixtral-8x1b": Size(_experts_of_1b(16), 4096, 1, 8),
    "mixtral-8x1b-4layers": Size(_experts_of_1b(4), 4096, 1, 8),
}
"""Models that are not presets, or whose batch differs from the defaults of :class:`Size`."""

SHORT = ("llama-tiny/fp32/single", "llama-tiny/bf16/single")
CPU_ROWS = (
    *(f"llama-tiny/{p}/single" for p in ("bf16", "fp32")),
    *(f"llama-tiny/{p}/{layout}" for p in ("bf16", "fp32") for layout in ("dp2", "tp2", "pp2")),
    *(f"gpt-tiny/{p}/single" for p in ("bf16", "fp32")),
    *(f"mixtral-tiny/{p}/{layout}" for layout in ("single", "ep2") for p in ("bf16", "fp32")),
    "llama-tiny-8k/bf16/cp2",
)
ONE_CARD = (
    "llama3.2-1b/bf16/single",
    "llama3.1-8b-8layers/bf16/single",  # all 32 layers need 145 GB
    "mixtral-8x1b-4layers/bf16/single",  # all 16 layers need 124 GB
)
EIGHT_CARDS = (
    "llama3.2-1b/bf16/dp8",
    "llama3.1-8b/bf16/tp8",
    "llama3.1-8b/bf16/tp4dp2",
    "llama3.1-8b/bf16/tp2pp4",
    "mixtral-8x1b/bf16/ep8",
)
GROUPS = {
    "short": SHORT,
    "all": CPU_ROWS,
    "gpu": (*ONE_CARD, *EIGHT_CARDS),
    "gpu1": ONE_CARD,
    "gpu8": EIGHT_CARDS,
}
"""Names of groups of rows."""


def size_of(model: str) -> Size:
    """Size of a model in ``SIZES``, or of a preset."""
    return SIZES[model] if model in SIZES else Size(preset(model))


def rows_of(names: list[str]) -> list[str]:
    """Rows in the order of their names, where names of groups stand for several; each row once."""
    return list(dict.fromkeys(row for name in names for row in GROUPS.get(name, (name,))))


def job_of_row(row: str, weights: Path, accelerator: str, *, steps: int = 1, compiled: bool = False) -> Job:
    """The training of a row.

    Args:
        row: model, precision and layout.
        weights: Hugging Face directory of the initial weights.
        accelerator: torch's device type.
        steps: optimizer steps of a round.
        compiled: True to run models through ``torch.compile``.
    """
    parts = row.split("/")
    if len(parts) != 3 or parts[1] not in ("fp32", "bf16"):
        known = ", ".join((*GROUPS, *CPU_ROWS))
        raise SystemExit(f"row {row!r}: is no model/precision/layout such as llama-tiny/bf16/tp2; known: {known}")
    model, precision, layout = parts
    size = size_of(model)
    job = Job(
        str(weights),
        precision,
        layout,
        size.seq,
        size.micro_batch,
        size.micro_batches,
        steps,
        accelerator,
        compiled,
    )
    if layout != "single" and not job.axes:
        raise SystemExit(f"row {row!r}: {layout!r} is no layout; such are single, dp2, tp2, pp2, cp2, ep2, tp4dp2")
    return job


@dataclass(frozen=True)
class CardMemory:
    """Bytes on one card in bf16-mixed, by arithmetic; measured peaks are in the tables.

    Attributes:
        parameters: parameters of the busiest rank in bf16, two bytes each.
        gradients: their gradients in fp32.
        optimizer: main parameters and two moments in fp32, divided by the ranks that shard them.
        activations: values kept for backward, without recomputation.
        loss: one chunk of logits in fp32, with its gradient.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss: float

    @property
    def gb(self) -> float:
        """Sum, in 10^9 bytes."""
        return (self.parameters + self.gradients + self.optimizer + self.activations + self.loss) / 1e9


LOSS_ROWS = 1024
"""Rows of logits that exist at a time, at most."""


def card_memory(row: str) -> CardMemory:
    """Memory of ours on one card for a row in bf16-mixed.

    Layers are divided by tp and pp, experts by ep; optimizer state by dp, that of experts by dp/ep. Activations of a
    layer and token, in 16 bits: input and output of two norms, q, k, v and the output of attention, and three times the
    width of the feed-forward layer, which a token with k experts has k times. The first of p stages keeps those of p
    micro-batches.
    """
    size, c = size_of(row.split("/")[0]), size_of(row.split("/")[0]).config
    axes = job_of_row(row, Path(), "cuda").axes
    tp, pp, ep, cp = (axes.get(name, 1) for name in ("tp", "pp", "ep", "cp"))
    replicas = axes.get("dp", 1) * ep
    hidden, ffn = c.hidden_size, c.ffn_hidden_size or 4 * c.hidden_size
    keys = (c.num_query_groups or c.num_attention_heads) * (hidden // c.num_attention_heads)
    experts, top = c.num_experts or 1, c.moe_router_topk if c.num_experts else 1
    layers = -(-c.num_layers // pp)
    ends = c.vocab_size * hidden * (1 if c.tie_embeddings or pp > 1 else 2)
    feed_forward = layers * experts * 3 * hidden * ffn / (tp * ep)
    dense = (layers * (2 * hidden + 2 * keys) * hidden + ends) / tp
    if not c.num_experts:
        dense, feed_forward = dense + feed_forward, 0.0
    own = dense + feed_forward
    a_token = 2 * (6 * hidden + 2 * keys + top * 3 * ffn + (2 * top * hidden if c.num_experts else 0))
    tokens = size.seq * size.micro_batch * min(pp, size.micro_batches)
    return CardMemory(
        parameters=2 * own,
        gradients=4 * own,
        optimizer=12 * (dense / replicas + feed_forward / (replicas / ep)),
        activations=a_token * layers * tokens / (tp * cp),
        loss=2 * 4 * LOSS_ROWS * c.vocab_size / tp,
    )

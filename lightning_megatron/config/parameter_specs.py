"""Names and specs of a transformer's parameters, from its configuration alone.

The model need not be built: conversions of checkpoints and comparisons of configurations ask here. Letters: ``V``
vocabulary, ``P`` positions, ``H`` features, ``N`` heads, ``G`` query groups, ``D`` features of a head, ``F`` features
inside the feed-forward layer, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_megatron.config.transformer import GATED, TransformerConfig
from lightning_megatron.params import ParamSpec

NamedSpec = tuple[str, ParamSpec]


def parameter_specs(config: TransformerConfig) -> dict[str, ParamSpec]:
    """Specs by global name, equal to those that the layers of the built model declare without sequence parallelism."""
    vocabulary = ParamSpec((config.vocab_size, config.hidden_size), tp_dim=0)  # [V, H]
    found = {"embedding.word.weight": vocabulary}
    if config.position_embedding == "learned":
        found["embedding.position"] = ParamSpec((config.max_position_embeddings, config.hidden_size))  # [P, H]
    dense = dict(_block(config, has_experts=False))
    sparse = dict(_block(config, has_experts=True)) if config.num_experts else {}
    for number in range(config.num_layers):
        block = sparse if config.has_experts(number) else dense
        found |= {f"layers.{number}.{name}": spec for name, spec in block.items()}
    found |= dict(_norm(config, "head.norm"))
    if not config.tie_embeddings:
        found["head.weight"] = vocabulary
    return found


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of whole parameters, without padding, by global name."""
    return {name: spec.global_shape for name, spec in parameter_specs(config).items()}


def _block(config: TransformerConfig, *, has_experts: bool) -> Iterator[NamedSpec]:
    h, heads, groups, bias = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        config.add_bias_linear,
    )
    yield from _norm(config, "attention_norm")
    yield from _column("attention.qkv", ((heads + 2 * groups) * config.head_dim,), h, bias)  # [(N + 2 G) D, H]
    yield from _row("attention.out", h, heads * config.head_dim, bias)  # [H, N D]
    yield from _norm(config, "mlp_norm")
    if has_experts:
        yield from _experts(config)
    else:
        yield from _mlp(config, "mlp", config.ffn_hidden_size, bias)


def _experts(config: TransformerConfig) -> Iterator[NamedSpec]:
    count, features, h = config.num_experts, config.expert_ffn_hidden_size, config.hidden_size
    gates = _gates(config)
    yield "mlp.router.weight", ParamSpec((count, h))  # [E, H]
    # [E, F, H], or [E, 2, F, H] of gates and ups, to [E, H, F]
    yield "mlp.experts.fc1", ParamSpec((count, *gates, features, h), tp_dim=1 + len(gates), ep_dim=0)
    yield "mlp.experts.fc2", ParamSpec((count, h, features), tp_dim=2, ep_dim=0)
    if config.moe_shared_expert_ffn_hidden_size:
        yield from _mlp(config, "mlp.shared", config.moe_shared_expert_ffn_hidden_size, bias=False)


def _mlp(config: TransformerConfig, name: str, features: int, bias: bool) -> Iterator[NamedSpec]:
    yield from _column(f"{name}.fc1", (*_gates(config), features), config.hidden_size, bias)  # [F, H] or [2, F, H]
    yield from _row(f"{name}.fc2", config.hidden_size, features, bias)  # [H, F]


def _norm(config: TransformerConfig, name: str) -> Iterator[NamedSpec]:
    for kind in ("weight",) if config.norm == "rmsnorm" else ("weight", "bias"):
        yield f"{name}.{kind}", ParamSpec((config.hidden_size,), decay=False)


def _column(name: str, outputs: tuple[int, ...], inputs: int, bias: bool) -> Iterator[NamedSpec]:
    cut = len(outputs) - 1
    yield f"{name}.weight", ParamSpec((*outputs, inputs), tp_dim=cut)
    if bias:
        yield f"{name}.bias", ParamSpec(outputs, tp_dim=cut, decay=False)


def _row(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[NamedSpec]:
    yield f"{name}.weight", ParamSpec((outputs, inputs), tp_dim=1)
    if bias:
        yield f"{name}.bias", ParamSpec((outputs,), decay=False)


def _gates(config: TransformerConfig) -> tuple[int, ...]:
    return (2,) if config.activation in GATED else ()

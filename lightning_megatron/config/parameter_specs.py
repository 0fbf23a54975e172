"""Names and specs of a transformer's parameters, from its configuration alone.

The model need not be built: conversions of checkpoints and comparisons of configurations ask here. Letters: ``V``
vocabulary, ``P`` positions, ``H`` features, ``N`` heads, ``G`` query groups, ``D`` features of a head, ``F`` features
inside the feed-forward layer, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import singledispatch

from lightning_megatron.config.bert import BertConfig
from lightning_megatron.config.t5 import T5Config
from lightning_megatron.config.transformer import GATED, TransformerConfig
from lightning_megatron.params import ParamSpec

NamedSpec = tuple[str, ParamSpec]


@singledispatch
def parameter_specs(config: TransformerConfig) -> dict[str, ParamSpec]:
    """Specs by global name, equal to those that the layers of the built model declare without sequence parallelism.

    A subclass of the configuration, whose model has other parts, has a function of its own.
    """
    vocabulary = ParamSpec((config.vocab_size, config.hidden_size), tp_dim=0)  # [V, H]
    found = {"embedding.word.weight": vocabulary}
    if config.position_embedding == "learned":
        found["embedding.position"] = ParamSpec((config.max_position_embeddings, config.hidden_size))  # [P, H]
    if config.embedding_norm:
        found |= dict(_norm(config, "embedding.norm"))
    dense = dict(_block(config, has_experts=False))
    sparse = dict(_block(config, has_experts=True)) if config.num_experts else {}
    for number in range(config.num_layers):
        block = sparse if config.has_experts(number) else dense
        found |= {f"layers.{number}.{name}": spec for name, spec in block.items()}
    found |= dict(_norm(config, "head.norm"))
    if not config.tie_embeddings:
        found["head.weight"] = vocabulary
    for depth in range(config.mtp_num_layers):
        block = sparse if config.has_experts(config.num_layers - 1) else dense
        found |= {f"mtp.{depth}.{name}": spec for name, spec in _next_token_module(config, block).items()}
    return found


@parameter_specs.register
def _(config: BertConfig) -> dict[str, ParamSpec]:
    h = config.hidden_size
    vocabulary = ParamSpec((config.vocab_size, h), tp_dim=0)  # [V, H]
    found = {"embedding.word.weight": vocabulary}
    found["embedding.position"] = ParamSpec((config.max_position_embeddings, h))  # [P, H]
    if config.num_token_types:
        found["embedding.token_type"] = ParamSpec((config.num_token_types, h))  # [T, H]
    found |= dict(_norm(config, "embedding.norm" if config.norms_after else "head.encoder_norm"))
    block = dict(_block(config, has_experts=False))
    for number in range(config.num_layers):
        found |= {f"layers.{number}.{name}": spec for name, spec in block.items()}
    found |= {"head.transform.weight": ParamSpec((h, h)), "head.transform.bias": ParamSpec((h,), decay=False)}
    found |= dict(_norm(config, "head.norm"))
    found["head.bias"] = ParamSpec((config.vocab_size,), tp_dim=0, decay=False)
    if not config.tie_embeddings:
        found["head.weight"] = vocabulary
    if config.next_sentence:
        for name, outputs in (("pooler", h), ("next_sentence", 2)):
            found[f"head.{name}.weight"] = ParamSpec((outputs, h))
            found[f"head.{name}.bias"] = ParamSpec((outputs,), decay=False)
    return found


@parameter_specs.register
def _(config: T5Config) -> dict[str, ParamSpec]:
    h, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    table = ParamSpec((config.num_attention_heads, config.relative_buckets), tp_dim=0)  # [N, classes of distances]
    vocabulary = ParamSpec((config.vocab_size, h), tp_dim=0)  # [V, H]
    found = {"embedding.word.weight": vocabulary, "encoder_bias.weight": table, "decoder_bias.weight": table}
    found |= dict(_norm(config, "encoder_end.norm")) | dict(_norm(config, "head.norm"))
    encoder = dict(_block(config, has_experts=False))
    decoder = encoder | dict(_norm(config, "cross_norm"))
    decoder |= dict(_column("cross.query", (inner,), h, config.add_bias_linear))  # [N D, H]
    decoder |= dict(_column("cross.key_value", (2 * inner,), h, config.add_bias_linear))  # [N 2 D, H]
    decoder |= dict(_row("cross.out", h, inner, config.add_bias_linear))  # [H, N D]
    for block, stack in ((encoder, "encoder"), (decoder, "decoder")):
        for number in config.stacks[stack]:
            found |= {f"layers.{number}.{name}": spec for name, spec in block.items()}
    if not config.tie_embeddings:
        found["head.weight"] = vocabulary
    return found


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of whole parameters, without padding, by global name."""
    return {name: spec.global_shape for name, spec in parameter_specs(config).items()}


def weight_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all that files of weights hold: parameters, and the biases of experts, which no gradient changes."""
    found = parameter_shapes(config)
    if config.has_expert_bias:
        routers = [name.removesuffix("weight") for name in found if name.endswith("mlp.router.weight")]
        found |= {f"{router}expert_bias": (config.num_experts,) for router in routers}
    return found


def _block(config: TransformerConfig, *, has_experts: bool) -> Iterator[NamedSpec]:
    h, heads, groups, bias = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_query_groups,
        config.add_bias_linear,
    )
    yield from _norm(config, "attention_norm")
    if config.has_latents:
        yield from _latents(config)
    else:
        fused = (heads + 2 * groups) * config.head_dim
        yield from _column("attention.qkv", (fused,), h, config.has_qkv_bias)  # [(N + 2 G) D, H]
    yield from _row("attention.out", h, heads * config.value_dim, config.has_attention_out_bias)  # [H, N D]
    if config.qk_norm:
        yield from _norm(config, "attention.q_norm", config.head_dim)
        yield from _norm(config, "attention.k_norm", config.head_dim)
    if config.attention_sinks:
        yield "attention.sinks", ParamSpec((heads,), tp_dim=0, decay=False)  # [N]
    if config.post_norms:
        yield from _norm(config, "attention_post_norm")
    yield from _norm(config, "mlp_norm")
    if has_experts:
        yield from _experts(config)
    else:
        yield from _mlp(config, "mlp", config.ffn_hidden_size, bias)
    if config.post_norms:
        yield from _norm(config, "mlp_post_norm")


def _next_token_module(config: TransformerConfig, block: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """A module that predicts a further token, with a block like the model's last one."""
    h = config.hidden_size
    found = dict(_norm(config, "token_norm")) | dict(_norm(config, "hidden_norm"))
    found["projection.weight"] = ParamSpec((h, 2 * h))
    return found | {f"block.{name}": spec for name, spec in block.items()} | dict(_norm(config, "norm"))


def _latents(config: TransformerConfig) -> Iterator[NamedSpec]:
    """Matrices to and from latents: of ``Q`` features for queries and ``C`` for keys, of which ``R`` are turned."""
    h, heads, latent, bias = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.has_qkv_bias
    if config.q_lora_rank:
        yield from _whole("attention.q_down", config.q_lora_rank, h, bias)  # [Q, H]
        yield from _norm(config, "attention.q_norm", config.q_lora_rank)
        yield from _column("attention.q_up", (heads * config.head_dim,), config.q_lora_rank, bias=False)  # [N D, Q]
    else:
        yield from _column("attention.q", (heads * config.head_dim,), h, bias=False)  # [N D, H]
    yield from _whole("attention.kv_down", latent + config.rotary_dim, h, bias)  # [C + R, H]
    yield from _norm(config, "attention.kv_norm", latent)
    features = config.head_dim - config.rotary_dim + config.value_dim
    yield from _column("attention.kv_up", (heads * features,), latent, bias=False)  # [N (D - R + V), C]


def _experts(config: TransformerConfig) -> Iterator[NamedSpec]:
    count, features, h = config.num_experts, config.expert_ffn_hidden_size, config.hidden_size
    gates = _gates(config)
    yield "mlp.router.weight", ParamSpec((count, h))  # [E, H]
    # [E, F, H], or [E, 2, F, H] of gates and ups, to [E, H, F]
    yield "mlp.experts.fc1", ParamSpec((count, *gates, features, h), tp_dim=1 + len(gates), ep_dim=0)
    yield "mlp.experts.fc2", ParamSpec((count, h, features), tp_dim=2, ep_dim=0)
    if config.moe_linear_bias:
        yield "mlp.router.bias", ParamSpec((count,), decay=False)
        yield "mlp.experts.fc1_bias", ParamSpec((count, *gates, features), tp_dim=1 + len(gates), ep_dim=0, decay=False)
        yield "mlp.experts.fc2_bias", ParamSpec((count, h), tp_dim=1, ep_dim=0, decay=False)
    if config.moe_shared_expert_ffn_hidden_size:
        yield from _mlp(config, "mlp.shared", config.moe_shared_expert_ffn_hidden_size, bias=False)


def _mlp(config: TransformerConfig, name: str, features: int, bias: bool) -> Iterator[NamedSpec]:
    yield from _column(f"{name}.fc1", (*_gates(config), features), config.hidden_size, bias)  # [F, H] or [2, F, H]
    yield from _row(f"{name}.fc2", config.hidden_size, features, bias)  # [H, F]


def _norm(config: TransformerConfig, name: str, size: int = 0) -> Iterator[NamedSpec]:
    for kind in ("weight",) if config.norm == "rmsnorm" else ("weight", "bias"):
        yield f"{name}.{kind}", ParamSpec((size or config.hidden_size,), decay=False)


def _column(name: str, outputs: tuple[int, ...], inputs: int, bias: bool) -> Iterator[NamedSpec]:
    cut = len(outputs) - 1
    yield f"{name}.weight", ParamSpec((*outputs, inputs), tp_dim=cut)
    if bias:
        yield f"{name}.bias", ParamSpec(outputs, tp_dim=cut, decay=False)


def _row(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[NamedSpec]:
    yield f"{name}.weight", ParamSpec((outputs, inputs), tp_dim=1)
    if bias:
        yield f"{name}.bias", ParamSpec((outputs,), decay=False)


def _whole(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[NamedSpec]:
    yield f"{name}.weight", ParamSpec((outputs, inputs))
    if bias:
        yield f"{name}.bias", ParamSpec((outputs,), decay=False)


def _gates(config: TransformerConfig) -> tuple[int, ...]:
    return (2,) if config.activation in GATED else ()

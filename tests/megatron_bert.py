"""A tiny Megatron-LM BERT as a model of transformers, and its files as Megatron wrote them before megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.encoders.bert.config import BertConfig

HEADS, HIDDEN, LAYERS, VOCAB, PADDED, POSITIONS = 4, 24, 4, 29, 32, 16
CONFIG = BertConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    vocab_size=VOCAB,
    vocab_multiple=8,
    max_position_embeddings=POSITIONS,
    norm_position="before",
    norm_epsilon=1e-5,
)


def hf_model(**changes: Any) -> Any:
    """A tiny model with all parameters drawn at random, biases too."""
    import transformers

    torch.manual_seed(5)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    sizes |= {"intermediate_size": 4 * HIDDEN, "max_position_embeddings": POSITIONS, "layer_norm_eps": 1e-5}
    model = transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**sizes | changes)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn_like(param))
    return model


def in_order(kinds: list[Tensor], version: float, tp: int, rank: int) -> Tensor:
    """Queries, keys and values as a rank of this version stores them."""
    by_head = torch.stack([x.unflatten(0, (HEADS, -1)) for x in kinds]).chunk(tp, dim=1)[rank]  # [3, N/tp, D, ...]
    if version == 0:
        return by_head.flatten(0, 2)
    if version == 1:
        return by_head.movedim(0, 2).flatten(0, 2)
    return by_head.transpose(0, 1).flatten(0, 2)


def pair(
    name: str, module: Any, weight: Callable[[Tensor], Tensor] = lambda x: x, rows: bool = False
) -> dict[str, Any]:
    """Weight and bias of a module; a bias is cut where rows are."""
    return {f"{name}.weight": weight(module.weight), f"{name}.bias": (weight if rows else lambda x: x)(module.bias)}


def layer_of(model: Any, number: int, version: float, tp: int, rank: int) -> dict[str, Tensor]:
    """A layer as ``transformer.layers.N`` held it."""
    block = model.bert.encoder.layer[number]
    kinds = [getattr(block.attention.self, name) for name in ("query", "key", "value")]
    qkv = {kind: in_order([getattr(x, kind) for x in kinds], version, tp, rank) for kind in ("weight", "bias")}
    return {
        **pair("input_layernorm", block.attention.ln),
        **{f"attention.query_key_value.{kind}": x for kind, x in qkv.items()},
        **pair("attention.dense", block.attention.output.dense, lambda x: x.chunk(tp, 1)[rank]),
        **pair("post_attention_layernorm", block.ln),
        **pair("mlp.dense_h_to_4h", block.intermediate.dense, lambda x: x.chunk(tp)[rank], rows=True),
        **pair("mlp.dense_4h_to_h", block.output.dense, lambda x: x.chunk(tp, 1)[rank]),
    }


def padded(x: Tensor) -> Tensor:
    """A tensor of the vocabulary with the rows that Megatron adds, which nothing may read."""
    return torch.cat([x, torch.full((PADDED - VOCAB, *x.shape[1:]), 7.0)])


def write(
    folder: Path, model: Any, version: float | None, *, tp: int = 1, pp: int = 1, newer: bool = False, **more: Any
) -> None:
    """Files as they were written then.

    Args:
        newer: True for the last spelling before megatron-core: ``encoder`` with ``self_attention``, and norms.
        **more: further entries of each file.
    """
    inner, heads = model.bert, model.cls
    vocabulary, bias = padded(inner.embeddings.word_embeddings.weight), padded(heads.predictions.bias)
    per_stage = LAYERS // pp
    for t in range(tp):
        for p in range(pp):
            stack: dict[str, Tensor] = {}
            for local in range(per_stage):
                layer = layer_of(model, p * per_stage + local, version or 0, tp, t)
                stack |= {f"layers.{local}.{name}": x for name, x in layer.items()}
            words = {"weight": vocabulary.chunk(tp)[t]}
            language_model: dict[str, Any] = {}
            whole: dict[str, Any] = {"language_model": language_model}
            if p == 0:
                language_model["embedding"] = {
                    "word_embeddings": words,
                    "position_embeddings": {"weight": inner.embeddings.position_embeddings.weight},
                    "tokentype_embeddings": {"weight": inner.embeddings.token_type_embeddings.weight},
                }
            if p == pp - 1:
                stack |= pair("final_layernorm", inner.encoder.ln)
                transform, norm = heads.predictions.transform, "norm" if newer else "layernorm"
                language_model["pooler"] = pair("dense", inner.pooler.dense)
                whole["lm_head"] = {
                    "bias": bias.chunk(tp)[t],
                    **pair("dense", transform.dense),
                    **pair(norm, transform.LayerNorm),
                }
                whole["binary_head"] = {kind: getattr(heads.seq_relationship, kind) for kind in ("weight", "bias")}
                if pp > 1:
                    whole["word_embeddings_for_head"] = words
            if newer:
                stack = {name.replace(".attention.", ".self_attention."): x for name, x in stack.items()}
            language_model["encoder" if newer else "transformer"] = {name: x.clone() for name, x in stack.items()}
            content = {"model": whole, "iteration": 7, **more}
            if version is not None:
                content["checkpoint_version"] = version
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            (folder / name).mkdir(parents=True)
            torch.save(content, folder / name / "model_optim_rng.pt")

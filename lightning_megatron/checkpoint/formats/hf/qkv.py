"""The part of a configuration that Hugging Face's families share, and what all of them rearrange and refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.config_reader import Fields
from lightning_megatron.errors import ConfigError, Problem, divisors, nearest_to


class HFShape(Protocol):
    """What the rules must know of a model; ``TransformerConfig`` is one."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_query_groups(self) -> int: ...  # noqa: D102
    @property
    def add_bias_linear(self) -> bool: ...  # noqa: D102
    @property
    def tie_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def num_experts(self) -> int: ...  # noqa: D102


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """``[N D, ...]``, ``[G D, ...]`` twice, to rows ``[q.., k, v]`` of each query group, end to end.

    Raises:
        ConfigError: if the rows do not split over the groups.
    """
    if q.shape[0] % groups or k.shape[0] % groups or k.shape != v.shape:
        reason = f"queries of {q.shape[0]} rows, keys of {k.shape[0]} and values of {v.shape[0]} do not form groups"
        raise ConfigError([Problem("num_query_groups", groups, reason)])
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def split_qkv(fused: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`fuse_qkv`."""
    queries = heads // groups
    head_dim = fused.shape[0] // (heads + 2 * groups)
    q, k, v = fused.unflatten(0, (groups, -1)).split([queries * head_dim, head_dim, head_dim], dim=1)
    return q.flatten(0, 1).contiguous(), k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()


def refuse_uneven_heads(fields: Fields, config: Mapping[str, Any], model: str) -> None:
    """Note a ``hidden_size`` that does not split over the heads: ours may have it, by ``head_dim``, and theirs not."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads:
        reason = f"{model} takes only what divides hidden_size={hidden}, also where head_dim is given"
        fields.refuse("num_attention_heads", heads, reason, nearest_to(heads, divisors(hidden)))

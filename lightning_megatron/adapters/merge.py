"""Merge an adapter into the frozen weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_megatron.adapters.low_rank import Matrices, Rows
from lightning_megatron.adapters.targets import EMBEDDING, AdaptedLayer


@torch.no_grad()
def merged_weight(weight: Tensor, layer: AdaptedLayer, parts: Mapping[str, Matrices], scale: float) -> Tensor:
    """The full weight with an adapter, given by its whole parts, merged into it; in fp32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = Rows(layer.groups, {part.name: part.width for part in layer.parts})
    if layer.name == EMBEDDING:
        (part,) = parts.values()
        turned = part._replace(a=part.a.t())
        return _merged(weight.to(wide).t(), turned, scale).t().contiguous()
    if layer.is_of_experts:
        delta = {name: torch.bmm(part.b.to(wide), part.a.to(wide)) * scale for name, part in parts.items()}
        return weight.to(wide) + rows.fused(delta, 1).view_as(weight)
    flat = weight.to(wide).flatten(0, -2)
    found = {part.name: rows.of_part(part.name, flat) for part in layer.parts}
    found |= {name: _merged(found[name], part, scale) for name, part in parts.items()}
    return rows.fused(found, 0).view_as(weight)


def _merged(weight: Tensor, part: Matrices, scale: float) -> Tensor:
    """Merged weight ``[out, in]`` of one part."""
    whole = weight + part.b.to(weight.dtype) @ part.a.to(weight.dtype) * scale
    if part.magnitude is None:
        return whole
    return whole * (part.magnitude.to(weight.dtype) / torch.linalg.vector_norm(whole, dim=1)).unsqueeze(1)

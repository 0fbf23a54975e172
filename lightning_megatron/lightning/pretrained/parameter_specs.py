"""Names and specs of a transformer's weights, from its configuration alone.

Conversions of checkpoints and comparisons of configurations use these. They are read from the layers of a model that is
built on the meta device, where it has shapes and no values.
"""

from __future__ import annotations

from functools import lru_cache
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import first_family
from lightning_megatron.params import ParamSpec, named_weights


class _Declared(NamedTuple):
    """A weight of a model.

    Attributes:
        name: global name.
        spec: its spec in a model without sequence parallelism.
        has_gradient: False for a buffer that other programs store as a weight (the biases of experts).
    """

    name: str
    spec: ParamSpec
    has_gradient: bool


def parameter_specs(config: TransformerConfig) -> dict[str, ParamSpec]:
    """Specs of parameters by global name, as the layers declare them without sequence parallelism."""
    return {each.name: each.spec for each in _declared(config) if each.has_gradient}


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of whole parameters, without padding, by global name."""
    return {name: spec.global_shape for name, spec in parameter_specs(config).items()}


def weight_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of everything in files of weights: parameters, and the biases of experts, which have no gradients."""
    return {each.name: each.spec.global_shape for each in _declared(config)}


@lru_cache(maxsize=16)
def _declared(config: TransformerConfig) -> tuple[_Declared, ...]:
    kind = resolve_name(first_family(config).model)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = kind(config)
    return tuple(
        _Declared(name, spec, isinstance(weight, torch.nn.Parameter)) for name, weight, spec in named_weights(model)
    )

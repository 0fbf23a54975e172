"""Names and specs of a transformer's weights, from its configuration alone.

Conversions of checkpoints and comparisons of configurations use these. They are read from the layers of a model that is
built on the meta device, where it has shapes and no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertModel
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.params import ParamSpec, named_weights

_MODELS: Mapping[type[TransformerConfig], type[StagedModel]] = {BertConfig: BertModel, T5Config: T5Model}
"""Classes of models by the class of their configurations; any other configuration is a decoder's."""


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
    kind = next((model for of, model in _MODELS.items() if isinstance(config, of)), GPTModel)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = kind(config)
    return tuple(
        _Declared(name, spec, isinstance(weight, torch.nn.Parameter)) for name, weight, spec in named_weights(model)
    )

"""Every field of every family's models, changed: the export is refused, or comes back as the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from lightning_megatron.config.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES, family_for
from lightning_megatron.lightning.pretrained.config_check import differing_fields

WORDS = ("layernorm", "rmsnorm", "gelu", "gelu_tanh", "relu", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "rope")
WORDS += ("learned", "alibi", "none", "softmax", "sigmoid", "before", "after")
SCALINGS = (None, LinearScaling(2.0), DynamicScaling(2.0, 64), Llama3Scaling(2.0), YarnScaling(2.0, 64))


def other_values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value * 2, value // 2
    if isinstance(value, float):
        return value * 2 + 0.25, 0.0
    if isinstance(value, str):
        return WORDS
    return ((), (0,), (1, 2)) if isinstance(value, tuple) else SCALINGS


def changed(config: TransformerConfig) -> Iterator[tuple[str, TransformerConfig]]:
    """Configurations that differ in one field, which is named."""
    for field in fields(config):
        for value in other_values(getattr(config, field.name)):
            try:
                other = replace(config, **{field.name: value})
            except (ConfigError, TypeError):  # no model is like that
                continue
            if other != config:
                yield field.name, other


def spelled_out(config: TransformerConfig) -> TransformerConfig:
    """The same model where 0 stands for the base of all layers, and for all features of a head."""
    config = replace(config, rope_head_dim=config.rope_head_dim % config.head_dim)
    local = config.rope_local_theta or config.rope_theta
    return replace(config, rope_local_theta=local) if config.sliding_window else config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_is_written_or_refused(name: str) -> None:
    family, written = FAMILIES[name], 0
    for field, config in changed(next(iter(family.presets.values()))()):
        try:
            contents = family.config_to_hf(config)
        except ConfigError:
            continue
        back = family.config_of(contents)
        assert differing_fields(spelled_out(config), spelled_out(back)) == {}, field
        written += 1
    assert written > 20


@dataclass(frozen=True, kw_only=True)
class Wider(TransformerConfig):
    """A model with a part that no family knows."""

    new_part: float = 0.0


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.config_class is TransformerConfig])
def test_a_field_that_a_family_does_not_name_is_refused_unless_it_has_its_default(name: str) -> None:
    config = next(iter(FAMILIES[name].presets.values()))()
    wider = Wider(**{field.name: getattr(config, field.name) for field in fields(config)})
    family = replace(FAMILIES[name], config_class=Wider)
    assert family.config_to_hf(wider) == FAMILIES[name].config_to_hf(config)
    with pytest.raises(ConfigError, match=rf"new_part=0\.5: not what {family.architecture} computes; .*0\.0"):
        family.config_to_hf(replace(wider, new_part=0.5))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_written_as_its_own_family_though_others_are_asked_first(name: str) -> None:
    config = next(iter(FAMILIES[name].presets.values()))()
    assert family_for(config)[0] is FAMILIES[name]


def test_a_mistral_without_a_window_is_a_llama_unless_it_began_as_one() -> None:
    config = FAMILIES["mistral"].presets["mistral-7b-v0.3"]()
    assert family_for(config)[0] is FAMILIES["llama"]
    assert family_for(config, source="mistral")[0] is FAMILIES["mistral"]

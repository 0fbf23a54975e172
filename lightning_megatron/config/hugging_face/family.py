"""A model family as data: its Hugging Face configuration both ways, its tensors, its presets; torch is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_megatron.config.hugging_face.passive import is_passive
from lightning_megatron.config.hugging_face.tensors import Tensors
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.training_fields import is_of_training
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem

Recipe = Callable[[], TransformerConfig]


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture, and the models of ours that compute the same.

    Attributes:
        model_type: word that names it in ``config.json``.
        architecture: name of the model's class in transformers.
        from_hf: function of a reader of ``config.json`` that gives fields of ``TransformerConfig``.
        to_hf: function of a reader of those fields that gives entries of ``config.json``, without names.
        tensors: tensors of both sides.
        presets: recipes of published shapes by name.
        module: class of the LightningModule that trains it, as ``module:name``.
        model: class of the model that the module holds, as ``module:name``.
        default_preset: preset that the module uses if none is given; empty if the module belongs to another family.
        defaults: defaults of the architecture in place of those that ``from_hf`` assumes.
        passive: entries of ``config.json`` that do not affect what the model computes.
        stack_keys: entries of ``config.json`` that count the layers of a further stack, by its name in our tensors.
        config_class: class of our configurations.
        megatron: the ``MegatronFamily`` that reads checkpoints of Megatron-LM, as ``module:name``; empty for a decoder.
        recipes: folder of its training recipes, ``None`` for none; the name of the one for a CPU ends in ``-tiny``.
        data_paths: arguments that are paths, by the name of a data module that only this family has.
    """

    model_type: str
    architecture: str
    from_hf: Callable[[ConfigReader], dict[str, Any]]
    to_hf: Callable[[ConfigReader], dict[str, Any]]
    tensors: Tensors
    presets: Mapping[str, Recipe] = field(default_factory=dict)
    module: str = "lightning_megatron:GPTModule"
    model: str = "lightning_megatron.models.gpt:GPTModel"
    default_preset: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    passive: frozenset[str] = frozenset()
    stack_keys: Mapping[str, str] = field(default_factory=dict)
    config_class: type[TransformerConfig] = TransformerConfig
    megatron: str = ""
    recipes: Path | None = None
    data_paths: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def module_name(self) -> str:
        """Name of the module's class."""
        return self.module.rpartition(":")[2]

    def config_from_hf(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``TransformerConfig`` from the contents of ``config.json``.

        Raises:
            ConfigError: naming every entry that our model cannot reproduce, and every one that is not known.
        """
        reader = ConfigReader({**self.defaults, **contents})
        found = self.from_hf(reader)
        for name in contents:
            if not reader.has_read(name) and name not in self.passive and not is_passive(name, contents[name]):
                reason = f"no known entry of {self.architecture}: remove it if the model computes the same without it"
                reader.refuse(name, contents[name], reason)
        reader.finish()
        return found

    def config_of(self, contents: Mapping[str, Any]) -> TransformerConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ConfigError: naming every entry that our model cannot reproduce.
        """
        return self.config_class(**self.config_from_hf(contents))

    def config_to_hf(self, config: TransformerConfig) -> dict[str, Any]:
        """Contents of ``config.json`` for a model of ours.

        Fields of training (dropout of the residual stream, label smoothing, vocabulary padding) have no place there.

        Raises:
            ConfigError: naming every field with a value that the architecture cannot compute.
        """
        if type(config) is not self.config_class:
            given, reason = type(config).__name__, f"{self.architecture} needs another class"
            raise ConfigError([Problem("config", given, reason, (self.config_class.__name__,))])
        reader = ConfigReader(asdict(config), "configuration")
        written = self.to_hf(reader)
        for each in fields(config):
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            if not reader.has_read(each.name) and not is_of_training(each.name, config):
                reader.expect(each.name, None, (usual,), f"not what {self.architecture} computes")
        reader.finish()
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        # transformers' defaults are ids of another vocabulary.
        return {**names, **written, "bos_token_id": None, "eos_token_id": None}

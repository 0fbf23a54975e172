"""Shape of a model by a preset's name, or from the ``config.json`` of a Hugging Face model; torch is not needed."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.families import family_of
from lightning_megatron.files.small import read_object
from lightning_megatron.models.presets import PRESETS


def model_of(given: str) -> TransformerConfig:
    """The shape of a model.

    Args:
        given: name of a preset, a Hugging Face directory, or the path of its ``config.json``.

    Raises:
        ConfigError: for an unknown name, or every value of the file that our model cannot reproduce.
    """
    if given in PRESETS:
        return decoder("--model", PRESETS[given], given)
    path = Path(given)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        reason = "neither a preset nor a Hugging Face model's directory or config.json"
        raise ConfigError([Problem("--model", given, reason, nearest_names(given, list(PRESETS)))])
    try:
        contents = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("--model", given, f"cannot be read: {error}")]) from None
    return decoder("--model", family_of(contents).config_of(contents), given)


def decoder(argument: str, config: TransformerConfig, given: str | None = None) -> TransformerConfig:
    """The shape, if it is a decoder's.

    Args:
        argument: name of the argument that gave it.
        config: shape of any model.
        given: value of the argument; ``None`` for the name of the shape's class.

    Raises:
        ConfigError: for another model.
    """
    if type(config) is not TransformerConfig:
        kind = type(config).__name__
        reason = f"a {kind}: there are no formulas for the memory and time of its layers"
        raise ConfigError([Problem(argument, given or kind, reason)])
    return config

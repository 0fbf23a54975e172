"""The kind of a transformer layer, and numbers of layers, as data."""

from __future__ import annotations

from typing import NamedTuple


class LayerSpec(NamedTuple):
    """The two parts of a layer, by name, so that a configuration is read without torch.

    A class outside of this package is a part like any other. A family subclasses :class:`TransformerConfig`, and names
    its part in ``layer_spec``.

    Attributes:
        mixer: class that mixes the tokens of a sequence, as ``module:name``; a subclass of ``layers.parts.Mixer``.
        feed_forward: class that transforms each token, as ``module:name``; a subclass of ``layers.parts.FeedForward``.
        window: number of tokens that a token sees in this layer, itself included; 0 for all.
    """

    mixer: str
    feed_forward: str
    window: int = 0


def below(layers: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of a list of layers that a model of ``layers`` layers has, or its last layer if there are none."""
    return tuple(number for number in numbers if number < layers) or (layers - 1,) * bool(numbers)

"""Angles of the rotary position embedding, and its frequencies under the rules of ``config/rope_scaling.py``.

Operations run in the order of Hugging Face's: at position 100,000 the last bit of a frequency is worth 0.01 radians.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_megatron.config.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)


class RotaryEmbedding(nn.Module):
    """Cosines and sines for :func:`lightning_megatron.ops.rope.rope`; holds no parameters.

    Args:
        head_dim: ``D``, even.
        theta: base of the frequencies.
        scaling: rule that lowers frequencies for long contexts, or ``None``.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self._cache: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def forward(
        self, positions: Tensor, dtype: torch.dtype, everywhere: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at ``positions``.

        Args:
            positions: ``[S]`` or ``[S, B]``.
            dtype: dtype of the result; the angles are computed in fp32.
            everywhere: positions of all ranks, or the end of consecutive ones, which dynamic scaling needs; ``None``
                for ``positions``.

        Returns:
            Two tensors ``[S, 1 or B, 1, D]``.
        """
        length = positions if everywhere is None else everywhere
        if isinstance(self.scaling, DynamicScaling) and not isinstance(length, int):
            length = length.max() + 1
        speeds = frequencies(self.head_dim, self.theta, self.scaling, length, positions.device)
        angles = positions.float().unsqueeze(-1) * speeds
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles[:, None, None, :] if positions.ndim == 1 else angles[:, :, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and (factor := self.scaling.table_factor) != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(dtype), sin.to(dtype)

    def first(
        self, count: int, device: torch.device, dtype: torch.dtype, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions ``0 .. count-1``, cached; ``length`` is ``count`` without padding."""
        length = count if length is None or not isinstance(self.scaling, DynamicScaling) else length
        key = (count, length, device, dtype)
        if self._cache is None or self._cache[0] != key:
            # Created outside of inference mode, so that training can use a table that validation has created.
            with torch.inference_mode(False), torch.no_grad():
                self._cache = key, self(torch.arange(count, device=device), dtype, length)
        return self._cache[1]


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, length: int | Tensor, device: torch.device
) -> Tensor:
    """Angle per position of each pair of features, fp32 ``[D/2]``.

    Args:
        head_dim: ``D``.
        theta: base of the frequencies.
        scaling: rule that lowers them for long contexts, or ``None``.
        length: length of the sequences; only dynamic scaling uses it.
        device: device of the result.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    if isinstance(scaling, DynamicScaling):
        return _dynamic(exponents, head_dim, theta, scaling, torch.as_tensor(length, device=device))
    periods = theta**exponents
    if isinstance(scaling, LinearScaling):
        return 1.0 / periods / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(1.0 / periods, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(periods, head_dim, theta, scaling)
    return 1.0 / periods


def _dynamic(exponents: Tensor, head_dim: int, theta: float, rule: DynamicScaling, length: Tensor) -> Tensor:
    known = rule.original_max_position_embeddings
    growth = rule.factor * length / known - (rule.factor - 1)
    grown = theta * growth.clamp(min=1.0) ** (head_dim / (head_dim - 2))
    return 1.0 / torch.where(length > known, grown, theta) ** exponents


def _llama3(plain: Tensor, rule: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    turns = rule.original_max_position_embeddings / wavelength
    keep = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / rule.factor + keep * plain


def _yarn(periods: Tensor, head_dim: int, theta: float, rule: YarnScaling) -> Tensor:
    def feature(turns: float) -> float:
        """Index of the feature pair that makes ``turns`` full turns within the length of the pretraining."""
        return (head_dim * math.log(rule.original_max_position_embeddings / (turns * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    first, last = feature(rule.beta_fast), feature(rule.beta_slow)
    if rule.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0.0
    places = torch.arange(head_dim // 2, dtype=torch.float32, device=periods.device)
    keep = 1 - ((places - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rule.factor * periods) * (1 - keep) + 1.0 / periods * keep

"""Angles of the rotary position embedding, with LLaMA 3's stretching of low frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from lightning_megatron.arguments import above, field_problems
from lightning_megatron.config import Problem


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's rule: frequencies of long wavelength are slowed down, short ones kept, and those between blended.

    Source: the published LLaMA 3.1 configuration (``rope_type: llama3``).

    Attributes:
        factor: how much low frequencies are slowed.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are slowed fully.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` are kept.
        original_max_position_embeddings: context length of the pretraining that the model grew out of.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        found = field_problems(self, dict.fromkeys((field.name for field in fields(self)), above(0)))
        if not found and self.high_freq_factor <= self.low_freq_factor:
            reason = f"must be above low_freq_factor={self.low_freq_factor}"
            found.append(Problem("high_freq_factor", self.high_freq_factor, reason, (4 * self.low_freq_factor,)))
        return [replace(problem, argument=f"rope_scaling.{problem.argument}") for problem in found]

    def apply(self, frequencies: Tensor) -> Tensor:
        """Scaled frequencies, ``[D/2]``."""
        wavelength = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelength
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequencies * keep + frequencies / self.factor * (1 - keep)


class RotaryEmbedding(nn.Module):
    """Cosines and sines for :func:`lightning_megatron.ops.rope.rope`; holds no parameters.

    Args:
        head_dim: ``D``, even.
        theta: base of the frequencies.
        scaling: LLaMA 3's rule, or ``None``.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self._cache: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def frequencies(self, device: torch.device) -> Tensor:
        """Angle per position of each pair, fp32 ``[D/2]``."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=device).float() / self.head_dim
        frequencies = 1.0 / (self.theta**exponents)
        return frequencies if self.scaling is None else self.scaling.apply(frequencies)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at ``positions``.

        Args:
            positions: ``[S]`` or ``[S, B]``.
            dtype: of the result; the angles themselves are fp32.

        Returns:
            Two tensors ``[S, 1 or B, 1, D]``.
        """
        angles = positions.float().unsqueeze(-1) * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles[:, None, None, :] if positions.ndim == 1 else angles[:, :, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def first(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions ``0 .. length-1``; kept from one call to the next."""
        key = (length, device, dtype)
        if self._cache is None or self._cache[0] != key:
            # Made outside inference mode, so that a table first used in validation can serve training.
            with torch.inference_mode(False), torch.no_grad():
                self._cache = key, self(torch.arange(length, device=device), dtype)
        return self._cache[1]

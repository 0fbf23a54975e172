"""Angles of the rotary position embedding, with LLaMA 3's scaling of low frequencies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.config.transformer import RopeScaling


class RotaryEmbedding(nn.Module):
    """Cosines and sines for :func:`lightning_megatron.ops.rope.rope`; holds no parameters.

    Args:
        head_dim: ``D``, even.
        theta: base of the frequencies.
        scaling: LLaMA 3's scaling, or ``None``.
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
            dtype: dtype of the result; the angles are computed in fp32.

        Returns:
            Two tensors ``[S, 1 or B, 1, D]``.
        """
        angles = positions.float().unsqueeze(-1) * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles[:, None, None, :] if positions.ndim == 1 else angles[:, :, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def first(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions ``0 .. length-1``, cached."""
        key = (length, device, dtype)
        if self._cache is None or self._cache[0] != key:
            # Created outside inference mode, so that training can use a table that validation has created.
            with torch.inference_mode(False), torch.no_grad():
                self._cache = key, self(torch.arange(length, device=device), dtype)
        return self._cache[1]

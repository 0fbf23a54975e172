"""Search for NaN and infinity in tensors, without waiting for the device.

A sum with a non-finite element is not finite, and needs no memory of the tensor's size. Elements so large that their
sum overflows count as infinite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

NameT = TypeVar("NameT")


def first_bad_row(flat: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """1 if all rows are finite, else 0; and the index of the first bad row, if there is one.

    Args:
        flat: ``[n]``; a last row may be shorter.
        row: number of elements of a row.
    """
    end = flat.numel() // row * row
    rows = [part for part in (flat.detach()[:end].view(-1, row), flat.detach()[end:].view(1, -1)) if part.numel()]
    sums = [torch.linalg.vector_norm(part, 1, 1, dtype=_wide(flat)) for part in rows]  # of magnitudes: one comparison
    least, index = ((sums[0] if len(sums) == 1 else torch.cat(sums)) < float("inf")).to(torch.int32).min(0)
    return least, index


def is_finite(x: Tensor) -> Tensor:
    """True if no element is NaN or infinite: a scalar on the tensor's device."""
    return x.detach().sum(dtype=_wide(x)).isfinite()


def not_finite(named: Iterable[tuple[NameT, Tensor]]) -> list[NameT]:
    """Names of tensors with a NaN or an infinity; waits for each device once."""
    known = [(name, x) for name, x in named if x.is_floating_point() and x.numel()]
    if not known:
        return []
    answers: dict[torch.device, list[Tensor]] = {}
    for _, x in known:
        answers.setdefault(x.device, []).append(is_finite(x))
    fine = {device: iter(torch.stack(found).tolist()) for device, found in answers.items()}
    # A sum that is not finite may have overflowed: then each element is checked.
    return [name for name, x in known if not next(fine[x.device]) and not bool(x.detach().isfinite().all())]


def amount(x: Tensor) -> str:
    """The number of bad elements, as text for an error."""
    bad = x.numel() - int(x.detach().isfinite().sum())
    return f"{bad} of {x.numel()} elements are NaN or infinite"


def _wide(x: Tensor) -> torch.dtype:
    """Dtype to sum in, with the range of fp32. bf16 has that range, and its sum is ten times as fast on a CPU."""
    return torch.float32 if x.dtype.itemsize == 1 or x.dtype == torch.float16 else x.dtype

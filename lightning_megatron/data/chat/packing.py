"""Best-fit packing: which documents stand together in a row of a given length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.int64], capacity: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack documents into rows, the longest first, each into the fullest row that has space for it.

    Documents of one length are taken in an order drawn from the seed, so that neighbours in a file do not share a row.
    The result depends on the arguments alone. Each document takes a few operations on whole numbers of ``capacity``
    bits: about a second for a million of them.

    Args:
        lengths: ``[n]`` tokens of each document, 1 to ``capacity``.
        capacity: tokens of a row.
        seed: seed of that order.

    Returns:
        (numbers of the documents int64 ``[n]``, row after row; ends of the rows in them int64 ``[rows]``).
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their free tokens
    free = 0  # bit r is set where some row has space for exactly r tokens
    for number in order.tolist():
        length = int(lengths[number])
        enough = free >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                free ^= 1 << space
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        space -= length
        if space:
            with_space[space].append(row)
            free |= 1 << space
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.array([number for row in rows for number in row], np.int64), ends

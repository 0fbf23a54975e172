"""The generator ``std::mt19937_64`` of C++, which Megatron-LM shuffles samples of sentences with.

NumPy has the one of 32 bits alone. Sixty-four bits: Nishimura, Tables of 64-bit Mersenne Twisters, 2000
(https://doi.org/10.1145/369534.369540).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SIZE, _MIDDLE = 312, 156
_UPPER = np.uint64(0xFFFFFFFF80000000)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_GROWTH, _WORD = 6364136223846793005, (1 << 64) - 1


def draw_64_bits(seed: int, count: int) -> NDArray[np.uint64]:
    """The first ``count`` numbers of a generator with a seed."""
    state = np.empty(_SIZE, np.uint64)
    value = seed & _WORD
    for place in range(_SIZE):
        state[place] = value
        value = (_GROWTH * (value ^ (value >> 62)) + place + 1) & _WORD
    blocks = []
    for _ in range(-(-count // _SIZE)):
        state = _next(state)
        blocks.append(_tempered(state))
    return np.concatenate(blocks)[:count] if blocks else np.empty(0, np.uint64)


def _next(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The next state; each number depends on three earlier ones, so that whole blocks are computed at once."""
    following = np.append(state[1:], np.uint64(0))
    found = np.empty_like(state)
    for begin, end in ((0, _MIDDLE), (_MIDDLE, _SIZE - 1), (_SIZE - 1, _SIZE)):
        if end == _SIZE:
            following[-1] = found[0]
        mixed = (state[begin:end] & _UPPER) | (following[begin:end] & ~_UPPER)
        ahead = state[_MIDDLE:] if begin == 0 else found[begin - _MIDDLE : end - _MIDDLE]
        found[begin:end] = ahead ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), _TWIST, np.uint64(0))
    return found


def _tempered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    drawn = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    drawn ^= (drawn << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    drawn ^= (drawn << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return drawn ^ (drawn >> np.uint64(43))

"""Rule by which attention scores are made from queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ScoreRule:
    """Differences of a layer's attention scores from ``q k^T / sqrt(D)``, in the order in which they apply.

    Attributes:
        scale: factor of the products; 0 for ``1 / sqrt(D)``.
        softcap: bound ``c`` of the scores, ``c tanh(score / c)``; 0 for none.
        window: number of keys that a query sees, its own included; 0 for all that precede it.
        has_sinks: True if each head has a sink: a score of its own that takes attention weight, but has no value.
        slopes: ALiBi's slopes, one per query head, by which its scores fall with each token between key and query,
            under a causal mask; empty for none.
    """

    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    has_sinks: bool = False
    slopes: tuple[float, ...] = ()

    def is_plain(self, keys: int) -> bool:
        """True if there is no difference for ``keys`` keys; a window that holds all of them makes none."""
        return not (self.scale or self.softcap or self.has_sinks or self.slopes or 0 < self.window < keys)

    @property
    def by_distance(self) -> bool:
        """True if a score depends on the distance between query and key."""
        return self.window > 0 or bool(self.slopes)

    def factor(self, head_dim: int) -> float:
        """Factor of the products of queries and keys with ``head_dim`` features."""
        return float(self.scale or head_dim**-0.5)

    def of_heads(self, part: int, parts: int) -> ScoreRule:
        """The rule for share ``part`` of ``parts`` equal shares of the query heads."""
        count = len(self.slopes) // parts
        return replace(self, slopes=self.slopes[part * count : (part + 1) * count]) if self.slopes else self

    def __str__(self) -> str:
        named = {"scores times": self.scale, "scores capped at": self.softcap, "a window of": self.window}
        told = [f"{name} {value:g}" for name, value in named.items() if value]
        return ", ".join(told + ["sinks"] * self.has_sinks + ["ALiBi"] * bool(self.slopes))


PLAIN = ScoreRule()
"""Scaled dot products."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slope of each of a model's heads (ALiBi, https://arxiv.org/abs/2108.12409).

    A head's score of a query and a key gets ``-slope (query - key)`` added, in place of position embeddings.

    For ``n`` heads, a power of two, they are ``2^(-8 i / n)`` for ``i = 1 .. n``. For other numbers the first ones are
    those of the largest power of two below ``n``, and the rest are every other slope of twice that power.
    """
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    between = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return (*first, *between)

"""Random continuations on the replicas of a layout, with logits that are equal for all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.models.generate import Sampling
from lightning_megatron.tools.evaluation.continuing import continuations


class Even:
    """A model without layers."""

    def new_caches(self) -> list[object]:
        return []

    def __call__(self, tokens: Tensor, caches: object) -> Tensor:
        return torch.zeros(*tokens.shape, 1000)


def drawn(replica: int, seed: int | None) -> list[int]:
    """Tokens that the ranks of one replica choose for a prompt."""

    def run(step: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"result": step(SimpleNamespace(model=Even()), batch)}

    mesh = SimpleNamespace(layout=SimpleNamespace(pp=1, cp=1), dp=SimpleNamespace(rank=replica))
    ranks: Any = SimpleNamespace(mesh=mesh, rows=1, run=run)
    (found,) = continuations(ranks, [[1, 2]], 8, Sampling(seed=seed), lambda _: False)
    return found


def test_replicas_draw_other_tokens_and_the_ranks_of_one_the_same() -> None:
    for seed in (None, 5):
        assert drawn(0, seed) == drawn(0, seed)
        assert len({tuple(drawn(replica, seed)) for replica in range(4)}) == 4
    assert drawn(0, 5) != drawn(0, 6)

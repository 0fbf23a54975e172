"""Distance of a training from a tie between experts.

Other layouts round otherwise, and where two experts are all but equal a token may go to the other one: the numbers of a
comparison mean something only where no token comes near. A test chooses its seed so, and asserts it.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron.device import CPU
from lightning_megatron.moe.router import Router
from lightning_megatron.testing.trainer import kind_in_tests


class NearestTie(Callback):
    """Callback that measures the routers' choices in a training on one rank.

    Attributes:
        margin: least difference of any token between the ranking of the last chosen expert and of the next one, or of
            groups where they are chosen first; infinite without experts.
    """

    def __init__(self) -> None:
        self.margin = float("inf")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch every router."""
        for module in pl_module.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(self._measure)

    def check(self, least: float, what: str) -> None:
        """Assert that no token came nearer; on CPUs alone, where the seeds were chosen."""
        near = f"{what} needs another seed: a token is {self.margin:.1e} from a tie"
        assert self.margin > least or kind_in_tests() is not CPU, near

    @torch.no_grad()
    def _measure(self, router: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(router, Router)
        c, x = router.config, args[0]
        ranking = nn.functional.linear(x.float(), router.weight.float(), router.bias)
        if c.moe_router_score == "sigmoid":
            ranking = ranking.sigmoid() + (router.expert_bias if c.has_expert_bias else 0.0)
        if c.moe_router_num_groups:
            groups = ranking.unflatten(-1, (c.moe_router_num_groups, -1))
            worth = groups.topk(2 if c.moe_router_score == "sigmoid" else 1, dim=-1).values.sum(-1)
            self._gap(worth, c.moe_router_group_topk)
            outside = torch.ones_like(worth, dtype=torch.bool)
            outside.scatter_(-1, worth.topk(c.moe_router_group_topk, dim=-1).indices, False)
            ranking = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
        self._gap(ranking, c.moe_router_topk)

    def _gap(self, ranking: Tensor, chosen: int) -> None:
        if chosen < ranking.shape[-1]:
            best = ranking.topk(chosen + 1, dim=-1).values
            self.margin = min(self.margin, float((best[..., -2] - best[..., -1]).min()))

"""Router: the choice of experts for each token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.config.capacity import expert_capacity
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.moe.aux_loss import count_tokens, load_balancing_loss, z_loss
from lightning_megatron.moe.capacity import drop_overflow
from lightning_megatron.moe.first_runs import FirstRuns
from lightning_megatron.moe.load_stats import ExpertLoad
from lightning_megatron.moe.tokens import RoutedTokens
from lightning_megatron.params import ParamSpec


class Routing(NamedTuple):
    """Experts of this rank's tokens.

    Attributes:
        experts: ``[T, k]`` ids over all ranks; ``num_experts`` for a dropped choice.
        weights: ``[T, k]`` fp32, weights of the experts' outputs.
        aux_loss: scalar, auxiliary loss; ``None`` outside training, or without such losses.
    """

    experts: Tensor
    weights: Tensor
    aux_loss: Tensor | None


class Router(nn.Module):
    """Choice of ``k`` of ``E`` experts for each token, in fp32 for any dtype of the model.

    Weights of the chosen experts are the softmax over them (Mixtral, https://arxiv.org/abs/2401.04088), the softmax
    over all, or sigmoids (DeepSeek-V3, https://arxiv.org/abs/2412.19437). With groups of experts, a token chooses only
    among the experts of its best groups.

    Args:
        hidden_size: features ``H`` of a token.
        mesh: mesh of the ranks; those of its tp and cp axes share the tokens of a sequence.
        sequence_parallel: True if the input is a sequence shard.
        init_std: standard deviation of the initial weight.

    Attributes:
        load: statistics of the router's load.
        runs: forwards that a backward may repeat.
    """

    expert_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        init_std: float,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self._shape = (config.num_experts, hidden_size)
        self._grad_sum = sequence_parallel and mesh.tp.size > 1
        self.weight = nn.Parameter(torch.empty(self._shape))
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)
        self.bias: nn.Parameter | None = None
        if config.moe_linear_bias:
            self.bias = nn.Parameter(torch.zeros(config.num_experts))
        self.load, self.runs = ExpertLoad(config.num_experts), FirstRuns(mesh.rng)
        if config.has_expert_bias:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weight and biases are whole on every rank; under SP gradients are partial sums."""
        found = {
            "weight": ParamSpec(self._shape, grad_sum_over_tp=self._grad_sum),
            "bias": ParamSpec(self._shape[:1], grad_sum_over_tp=self._grad_sum, decay=False),
        }
        return found | ({"expert_bias": ParamSpec(self._shape[:1], decay=False)} if self.config.has_expert_bias else {})

    def forward(self, x: Tensor, tokens: RoutedTokens | None = None) -> Routing:
        """Route tokens ``[S, B, H]``.

        Args:
            x: tokens.
            tokens: those that are no padding; ``None`` for all.
        """
        c, learns = self.config, self.training and torch.is_grad_enabled()
        if self.training and c.moe_input_jitter_eps:
            with self.mesh.rng.tensor_parallel():
                x = x * torch.empty_like(x).uniform_(1 - c.moe_input_jitter_eps, 1 + c.moe_input_jitter_eps)
        logits = F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        experts, weights, probs = self._choose(logits)
        aux: Tensor | None = None
        if learns:
            aux = self._aux_loss(logits, probs, experts, tokens)
        elif self.training and (c.has_balance_loss or c.moe_z_loss_coeff):
            aux = logits.new_zeros(())  # no gradients yet, but a reentrant checkpoint gives its outputs some later
        if tokens is not None:
            experts = experts.masked_fill(~tokens.present.unsqueeze(-1), c.num_experts)
        experts, weights = experts.flatten(0, 1), weights.flatten(0, 1)
        if c.moe_capacity_factor:
            capacity = expert_capacity(experts.shape[0], c.moe_router_topk, c.num_experts, c.moe_capacity_factor)
            priority = weights.detach() if c.moe_token_drop_policy == "probs" else None
            experts = drop_overflow(experts, c.num_experts, capacity, priority)
        return Routing(experts, weights, aux)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts and weights ``[S, B, k]``, and probabilities ``[S, B, E]`` over all experts for the losses."""
        c = self.config
        if c.moe_router_score == "sigmoid":
            scores = logits.sigmoid()
            ranking = (scores + self.expert_bias if c.has_expert_bias else scores).detach()
            experts = self._in_best_groups(ranking).topk(c.moe_router_topk, dim=-1).indices
            weights = scores.gather(-1, experts)
            if c.moe_router_normalize and c.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            probs = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            probs = logits.softmax(-1)
            ranking = self._in_best_groups(probs if c.moe_router_pre_softmax else logits)
            top, experts = ranking.topk(c.moe_router_topk, dim=-1)
            weights = top if c.moe_router_pre_softmax else top.softmax(-1)
        return experts, weights * c.moe_router_scaling_factor, probs

    def _in_best_groups(self, ranking: Tensor) -> Tensor:
        """``[S, B, E]``, minus infinity for experts outside of the groups whose best experts add up to the most."""
        c = self.config
        if not c.moe_router_num_groups:
            return ranking
        groups = ranking.unflatten(-1, (c.moe_router_num_groups, -1))  # [S, B, G, E/G]
        worth = groups.detach().topk(c.experts_in_group_score, dim=-1).values.sum(-1)
        outside = torch.ones_like(worth, dtype=torch.bool)
        outside.scatter_(-1, worth.topk(c.moe_router_group_topk, dim=-1).indices, False)
        return groups.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)

    def _aux_loss(self, logits: Tensor, probs: Tensor, experts: Tensor, tokens: RoutedTokens | None) -> Tensor | None:
        """Auxiliary loss of a forward, with its statistics added to the load."""
        c, mesh = self.config, self.mesh
        _, counted, lengths = RoutedTokens.whole(logits, mesh.tp.size * mesh.cp.size) if tokens is None else tokens
        experts = experts.masked_fill(~counted.unsqueeze(-1), c.num_experts)
        counts = count_tokens(experts.flatten(0, 1), c.num_experts)
        terms: dict[str, Tensor] = {}
        if c.has_balance_loss:
            balance = self._balance(probs * counted.unsqueeze(-1), experts, counts, lengths)
            terms["load_balancing_loss"] = c.moe_aux_loss_coeff * balance
        if c.moe_z_loss_coeff:
            terms["z_loss"] = c.moe_z_loss_coeff * z_loss(logits, lengths.sum(), counted)
        if self.runs.counts:
            self.load.add(counts, terms, trains=self.weight.requires_grad)
        # Gradients are summed over tp and averaged over dp and cp: a sum over cp must be multiplied by cp.
        return torch.stack(list(terms.values())).sum() * mesh.cp.size if terms else None

    def _balance(self, probs: Tensor, experts: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
        c, mesh = self.config, self.mesh
        if c.moe_load_balancing == "seq_aux_loss":
            by_sequence = self._sum(count_tokens(experts.transpose(0, 1), c.num_experts), mesh.tp, mesh.cp)  # [B, E]
            return load_balancing_loss(probs.transpose(0, 1), by_sequence, lengths, c.moe_router_topk)
        if c.moe_load_balancing == "aux_loss":
            shared = self._sum(counts, mesh.tp, mesh.cp)
            return load_balancing_loss(probs.flatten(0, 1), shared, lengths.sum(), c.moe_router_topk)
        # The mean over the batch's micro-batches so far, of the counts of all replicas. T is its number of tokens.
        mean = self.runs.once(lambda: self.load.batch.mean_with(self._sum(counts, mesh.tp, mesh.dp_cp)))
        of_all = mean.sum() / c.moe_router_topk
        return load_balancing_loss(probs.flatten(0, 1), mean, of_all, c.moe_router_topk) * mesh.dp.size

    @staticmethod
    def _sum(counts: Tensor, *axes: Axis) -> Tensor:
        """Sum over axes, one after the other: a group of all their ranks would take memory for a few numbers."""
        return reduce(all_reduce, axes, counts)

    def after_optimizer_step(self) -> None:
        """Update the expert bias by the load of the finished step, and start a new batch."""
        self.load.batch.reset()
        if not self.config.moe_expert_bias_update_rate:
            return
        counts = self._sum(self.load.step.take(self.weight.device), self.mesh.tp, self.mesh.dp_cp)
        if counts.any():
            missing = counts.float().mean() - counts.float()
            self.expert_bias += self.config.moe_expert_bias_update_rate * missing.sign()

    def forget_step(self) -> None:
        """Discard the load of a skipped step."""
        self.load.batch.reset()
        self.load.step.take(self.weight.device)

"""Which experts a token visits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.aux_loss import count_tokens, load_balancing_loss, z_loss
from lightning_megatron.moe.capacity import drop_overflow, expert_capacity
from lightning_megatron.moe.load_stats import ExpertLoad
from lightning_megatron.params import ParamSpec


class Routing(NamedTuple):
    """Where the tokens of this rank go.

    Attributes:
        experts: ``[T, k]`` ids over all ranks; ``num_experts`` where a choice was dropped.
        weights: ``[T, k]`` fp32, what each expert's output counts.
        aux_loss: scalar to minimize besides the loss of the model; ``None`` outside training, or without such losses.
    """

    experts: Tensor
    weights: Tensor
    aux_loss: Tensor | None


class Router(nn.Module):
    """Chooses ``k`` of ``E`` experts for each token, in fp32 whatever the dtype of the model.

    Weights of the chosen are the softmax over them (Mixtral, https://arxiv.org/abs/2401.04088), the softmax over all,
    or sigmoids (DeepSeek-V3, https://arxiv.org/abs/2412.19437).

    Args:
        hidden_size: features ``H`` of a token.
        config: of the mixture.
        mesh: the ranks; tokens of a sequence are shared by those of its tp and cp axes.
        sequence_parallel: the input is a sequence shard.
        init_std: standard deviation of the initial weight.
        dtype: of the weight.
        device: of the weight.

    Attributes:
        load: what the router has seen since somebody looked.
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self._shape = (config.num_experts, hidden_size)
        self._grad_sum = sequence_parallel and mesh.tp.size > 1
        self.weight = nn.Parameter(torch.empty(self._shape, dtype=dtype, device=device))
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)
        self.load = ExpertLoad(config.num_experts)
        if config.moe_expert_bias_update_rate:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32, device=device))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Whole on every rank, which sees only a shard of the sequence."""
        return {"weight": ParamSpec(self._shape, grad_sum_over_tp=self._grad_sum)}

    def forward(self, x: Tensor) -> Routing:
        """Route tokens ``[S, B, H]``."""
        c, learns = self.config, self.training and torch.is_grad_enabled()
        if learns and c.moe_input_jitter_eps:
            with self.mesh.rng.tensor_parallel():
                x = x * torch.empty_like(x).uniform_(1 - c.moe_input_jitter_eps, 1 + c.moe_input_jitter_eps)
        logits = F.linear(x.float(), self.weight.float())
        experts, weights, probs = self._choose(logits)
        aux = self._aux_loss(logits, probs, experts) if learns else None
        if learns and not self.mesh.rng.replaying:
            self.load.add(count_tokens(experts.flatten(0, 1), c.num_experts))
        experts, weights = experts.flatten(0, 1), weights.flatten(0, 1)
        if c.moe_capacity_factor:
            capacity = expert_capacity(experts.shape[0], c.moe_router_topk, c.num_experts, c.moe_capacity_factor)
            priority = weights.detach() if c.moe_token_drop_policy == "probs" else None
            experts = drop_overflow(experts, c.num_experts, capacity, priority)
        return Routing(experts, weights, aux)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts and weights ``[S, B, k]``, and probabilities ``[S, B, E]`` over all experts for the balance."""
        c = self.config
        if c.moe_router_score == "sigmoid":
            scores = logits.sigmoid()
            ranking = scores + self.expert_bias if c.moe_expert_bias_update_rate else scores
            experts = ranking.detach().topk(c.moe_router_topk, dim=-1).indices
            weights = scores.gather(-1, experts)
            if c.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            probs = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            probs = logits.softmax(-1)
            top, experts = (probs if c.moe_router_pre_softmax else logits).topk(c.moe_router_topk, dim=-1)
            weights = top if c.moe_router_pre_softmax else top.softmax(-1)
        return experts, weights * c.moe_router_scaling_factor, probs

    def _aux_loss(self, logits: Tensor, probs: Tensor, experts: Tensor) -> Tensor | None:
        c, mesh = self.config, self.mesh
        tokens = logits.shape[0] * logits.shape[1] * mesh.tp_cp.size
        terms: dict[str, Tensor] = {}
        if c.moe_aux_loss_coeff and c.moe_load_balancing != "none":
            terms["load_balancing_loss"] = c.moe_aux_loss_coeff * self._balance(probs, experts, tokens)
        if c.moe_z_loss_coeff:
            terms["z_loss"] = c.moe_z_loss_coeff * z_loss(logits, tokens)
        if not terms:
            return None
        if not mesh.rng.replaying:
            self.load.add_losses(terms)
        # Gradients are summed over tp and averaged over dp and cp: what is a sum over cp must count cp times.
        return torch.stack(list(terms.values())).sum() * mesh.cp.size

    def _balance(self, probs: Tensor, experts: Tensor, tokens: int) -> Tensor:
        c, mesh = self.config, self.mesh
        if c.moe_load_balancing == "seq_aux_loss":
            by_sequence = experts.transpose(0, 1)  # [B, S, k]
            counts = all_reduce(count_tokens(by_sequence, c.num_experts), mesh.tp_cp)
            length = probs.shape[0] * mesh.tp_cp.size
            return load_balancing_loss(probs.transpose(0, 1), counts, length, c.moe_router_topk)
        counts = count_tokens(experts.flatten(0, 1), c.num_experts)
        if c.moe_load_balancing == "aux_loss":
            counts = all_reduce(counts, mesh.tp_cp)
            return load_balancing_loss(probs.flatten(0, 1), counts, tokens, c.moe_router_topk)
        # Counts of all replicas and of the batch so far, as a mean over its micro-batches: T is that of one of them.
        if mesh.rng.replaying:
            mean = self.load.recalled_mean()
        else:
            mean = self.load.mean_of_batch(all_reduce(all_reduce(counts, mesh.tp_cp), mesh.dp))
        replicas = mesh.dp.size
        return load_balancing_loss(probs.flatten(0, 1), mean, tokens * replicas, c.moe_router_topk) * replicas

    def after_optimizer_step(self) -> None:
        """Move the bias by the load of the step that is over, and begin a new batch."""
        self.load.end_batch()
        if not self.config.moe_expert_bias_update_rate:
            return
        counts = self.load.take_step(self.weight.device)
        for axis in (self.mesh.tp_cp, self.mesh.dp):
            counts = all_reduce(counts, axis)
        if counts.any():
            missing = counts.float().mean() - counts.float()
            self.expert_bias += self.config.moe_expert_bias_update_rate * missing.sign()

    def forget_step(self) -> None:
        """The load of a step that was not taken moves nothing."""
        self.load.end_batch()
        self.load.take_step(self.weight.device)

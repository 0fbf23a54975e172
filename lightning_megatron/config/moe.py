"""Configuration of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.arguments import OneOf, Rules, above, at_least, within
from lightning_megatron.config.layer_spec import below
from lightning_megatron.errors import Problem, divisors, nearest_to

SCORES = ("softmax", "sigmoid")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
DISPATCHERS = ("alltoall", "allgather")
DROP_POLICIES = ("probs", "position")

MOE_RULES: Rules = {
    "num_experts": at_least(0),
    "moe_ffn_hidden_size": at_least(0),
    "moe_router_topk": at_least(1),
    "moe_router_score": OneOf(SCORES),
    "moe_load_balancing": OneOf(BALANCING),
    "moe_aux_loss_coeff": at_least(0.0),
    "moe_z_loss_coeff": at_least(0.0),
    "moe_input_jitter_eps": within(0.0, 1.0),
    "moe_router_num_groups": at_least(0),
    "moe_router_group_topk": at_least(0),
    "moe_router_group_score_topk": at_least(0),
    "moe_expert_bias_update_rate": at_least(0.0),
    "moe_shared_expert_ffn_hidden_size": at_least(0),
    "moe_token_dispatcher": OneOf(DISPATCHERS),
    "moe_capacity_factor": at_least(0.0),
    "moe_token_drop_policy": OneOf(DROP_POLICIES),
    "moe_capacity_bins": at_least(0),
    "moe_capacity_bins_base": above(0.0, 1.5),
    "moe_capacity_bins_alignment": at_least(1),
    "moe_capacity_bins_interval": at_least(0),
    "moe_capacity_bins_max_overhead": at_least(0.0),
}
"""Rules for single fields, in addition to their types."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The experts of a transformer; a model without any has ``num_experts=0``.

    Attributes:
        num_experts: experts ``E`` of a layer over all ranks.
        moe_layers: numbers of the layers that have experts; empty for all.
        moe_ffn_hidden_size: features inside one expert; 0 means ``ffn_hidden_size``.
        moe_linear_bias: True if both layers of each expert, and the router, have biases (gpt-oss).
        moe_router_topk: experts ``k`` that a token visits.
        moe_router_score: function from logits to weights: ``"softmax"`` or ``"sigmoid"`` (DeepSeek-V3).
        moe_router_pre_softmax: True for softmax over all experts before the choice, so that the chosen weights do not
            sum to 1; the default, as in Mixtral, is softmax over the chosen experts.
        moe_router_normalize: False for weights that are the sigmoids of the chosen experts, not divided by their sum.
        moe_router_scaling_factor: factor of the weights.
        moe_router_num_groups: groups of equal size into which experts are split, of which a token visits only some; 0
            for none.
        moe_router_group_topk: groups that a token visits.
        moe_router_group_score_topk: best experts of a group that add up to its score, by which groups are chosen; 0 for
            one, or with sigmoid scores two (DeepSeek-V2 and V3, https://arxiv.org/abs/2412.19437).
        moe_load_balancing: loss that evens out the load: over a micro-batch (``"aux_loss"``), over each sequence
            (``"seq_aux_loss"``), over the whole batch so far (``"global_aux_loss"``), or ``"none"``.
        moe_aux_loss_coeff: weight of that loss.
        moe_z_loss_coeff: weight of the loss that keeps router logits small (https://arxiv.org/abs/2202.08906).
        moe_input_jitter_eps: width of uniform noise: the router's input is multiplied by ``1 - eps .. 1 + eps``.
        moe_expert_bias: True for a bias of each expert that affects which experts are chosen, but not their weights; it
            needs sigmoid scores. It is 0 until it is loaded or updated.
        moe_expert_bias_update_rate: step by which that bias is changed in favour of experts with few tokens, after each
            optimizer step (https://arxiv.org/abs/2408.15664). A rate implies the bias; 0 leaves it as it is.
        moe_shared_expert_ffn_hidden_size: features inside an expert that every token visits; 0 for none.
        moe_token_dispatcher: ``"alltoall"`` sends tokens to their experts' ranks, ``"allgather"`` all tokens to all.
        moe_capacity_factor: factor of an expert's capacity, ``ceil(T k / E x factor)`` of a rank's tokens; it drops
            the others. 0 drops none.
        moe_token_drop_policy: tokens that stay: those of the highest weight (``"probs"``), or the first
            (``"position"``).
        moe_pad_to_capacity: True to pad every expert to its capacity, so that shapes never change.
        moe_capacity_bins: number of capacities; each layer pads to the smallest that drops nothing. 0 for none.
        moe_capacity_bins_base: ratio of a bin to the one before.
        moe_capacity_bins_alignment: divisor of all capacities.
        moe_capacity_bins_interval: optimizer steps between adjustments of the bins to their use; 0 for none.
        moe_capacity_bins_max_overhead: share of padding up to which bins are not adjusted.
        moe_dynamic: True to gather tokens, and to route and compute by one operator; on Gaudi a fused one.
    """

    num_experts: int = 0
    moe_layers: tuple[int, ...] = field(default=())
    moe_ffn_hidden_size: int = 0
    moe_linear_bias: bool = False
    moe_router_topk: int = 2
    moe_router_score: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_normalize: bool = True
    moe_router_scaling_factor: float = 1.0
    moe_router_num_groups: int = 0
    moe_router_group_topk: int = 0
    moe_router_group_score_topk: int = 0
    moe_load_balancing: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_input_jitter_eps: float = 0.0
    moe_expert_bias: bool = False
    moe_expert_bias_update_rate: float = 0.0
    moe_shared_expert_ffn_hidden_size: int = 0
    moe_token_dispatcher: str = "alltoall"
    moe_capacity_factor: float = 0.0
    moe_token_drop_policy: str = "probs"
    moe_pad_to_capacity: bool = False
    moe_capacity_bins: int = 0
    moe_capacity_bins_base: float = 1.5
    moe_capacity_bins_alignment: int = 64
    moe_capacity_bins_interval: int = 300
    moe_capacity_bins_max_overhead: float = 0.0
    moe_dynamic: bool = False

    def has_experts(self, layer: int) -> bool:
        """True if the layer of that number has experts in place of one feed-forward layer."""
        return self.num_experts > 0 and (not self.moe_layers or layer in self.moe_layers)

    def feed_forward(self, layer: int) -> str:
        """Class of the feed-forward part of the layer of that number, as ``module:name``."""
        kind = "moe.layer:MoELayer" if self.has_experts(layer) else "layers.mlp:DenseFeedForward"
        return f"lightning_megatron.{kind}"

    @property
    def experts_in_group_score(self) -> int:
        """Best experts of a group that add up to its score."""
        return self.moe_router_group_score_topk or (2 if self.moe_router_score == "sigmoid" else 1)

    @property
    def has_balance_loss(self) -> bool:
        """True if a loss evens out the load."""
        return self.moe_aux_loss_coeff > 0 and self.moe_load_balancing != "none"

    @property
    def has_expert_bias(self) -> bool:
        """True if a bias affects which experts are chosen."""
        return self.moe_expert_bias or self.moe_expert_bias_update_rate > 0

    def small_experts(self, ep: int, layers: int, features: int) -> dict[str, Any]:
        """Fields of few experts; none where there are no experts.

        No choice is dropped: a capacity applies to a rank's tokens, so the dropped choices would depend on the layout.

        Args:
            ep: ranks that share the experts.
            layers: number of layers of the small model.
            features: features inside an expert.
        """
        if not self.num_experts:
            return {}
        return {
            "num_experts": 2 * ep,
            "moe_router_topk": min(2, self.moe_router_topk),
            "moe_layers": below(layers, self.moe_layers),
            "moe_router_num_groups": 0,
            "moe_router_group_topk": 0,
            "moe_router_group_score_topk": 0,
            "moe_ffn_hidden_size": features if self.moe_ffn_hidden_size else 0,
            "moe_shared_expert_ffn_hidden_size": features if self.moe_shared_expert_ffn_hidden_size else 0,
            "moe_input_jitter_eps": 0.0,
            "moe_capacity_factor": 0.0,
            "moe_capacity_bins": 0,
            "moe_pad_to_capacity": False,
        }

    def moe_problems(self) -> list[Problem]:
        """Faults of fields that must fit together."""
        found: list[Problem] = []
        if not self.num_experts:
            return found
        k, experts = self.moe_router_topk, self.num_experts
        if k > experts:
            found.append(Problem("moe_router_topk", k, f"more than num_experts={experts}", (experts,)))
        if k == 1 and self.moe_router_score == "softmax" and not self.moe_router_pre_softmax:
            reason = "softmax over one chosen expert is always 1, and the router would not learn"
            found.append(Problem("moe_router_pre_softmax", False, reason, (True,)))
        if self.has_expert_bias and self.moe_router_score != "sigmoid":
            reason = "the expert bias needs scores that do not depend on each other"
            found.append(Problem("moe_router_score", self.moe_router_score, reason, ("sigmoid",)))
        if not self.moe_router_normalize and self.moe_router_score != "sigmoid":
            reason = "for softmax over all experts, not divided by the sum of the chosen, set moe_router_pre_softmax"
            found.append(Problem("moe_router_normalize", False, reason, (True,)))
        return found + self._group_problems() + self._capacity_problems()

    def _unknown_moe_layers(self, num_layers: int) -> list[Problem]:
        """Numbers in ``moe_layers`` of layers that the model does not have."""
        beyond = [number for number in self.moe_layers if not 0 <= number < num_layers]
        return [Problem("moe_layers", beyond, f"layers are numbered 0 to {num_layers - 1}")] if beyond else []

    def _group_problems(self) -> list[Problem]:
        """Faults of groups of experts."""
        found: list[Problem] = []
        groups, chosen, experts = self.moe_router_num_groups, self.moe_router_group_topk, self.num_experts
        if not groups:
            reason = "there are no groups to choose from: give moe_router_num_groups"
            names = ("moe_router_group_topk", "moe_router_group_score_topk")
            return [Problem(name, value, reason, (0,)) for name in names if (value := getattr(self, name))]
        if experts % groups:
            reason = f"num_experts={experts} does not split into groups of equal size"
            return [Problem("moe_router_num_groups", groups, reason, nearest_to(groups, divisors(experts)))]
        size = experts // groups
        if (best := self.moe_router_group_score_topk) > size:
            reason = f"a group has {size} experts, of which the best are summed"
            found.append(Problem("moe_router_group_score_topk", best, reason, (size,)))
        elif self.experts_in_group_score > size:
            reason = "a group's score sums its two best experts, and it has one"
            found.append(Problem("moe_router_num_groups", groups, reason, nearest_to(groups, divisors(experts)[:-1])))
        least = -(-self.moe_router_topk // size)
        if not least <= chosen <= groups:
            reason = f"a token visits {self.moe_router_topk} experts of {groups} groups with {size} each"
            found.append(Problem("moe_router_group_topk", chosen, reason, nearest_to(chosen, (least, groups))))
        return found

    def _capacity_problems(self) -> list[Problem]:
        """Faults of options for the load that exclude each other."""
        found = []
        bins, factor, dynamic = self.moe_capacity_bins, self.moe_capacity_factor, self.moe_dynamic
        if bins and factor:
            reason = f"capacity bins drop nothing, and moe_capacity_factor={factor} does: choose one"
            found.append(Problem("moe_capacity_bins", bins, reason, (0,)))
        if dynamic and bins:
            found.append(Problem("moe_capacity_bins", bins, "moe_dynamic takes all tokens without padding", (0,)))
        if dynamic and factor:
            found.append(Problem("moe_capacity_factor", factor, "moe_dynamic takes all tokens and drops none", (0,)))
        if self.moe_pad_to_capacity and not factor and not bins:
            reason = "there is no capacity to pad to without moe_capacity_factor or moe_capacity_bins"
            found.append(Problem("moe_pad_to_capacity", True, reason, (False,)))
        gathers = self.moe_token_dispatcher == "allgather"
        for name, value in (("moe_capacity_bins", bins), ("moe_pad_to_capacity", self.moe_pad_to_capacity)):
            if gathers and value:
                reason = f"{name}={value} fixes what is sent to each expert, and allgather sends all to all"
                found.append(Problem("moe_token_dispatcher", "allgather", reason, ("alltoall",)))
        if bins == 1:
            reason = "a single bin always pads to the worst case"
            found.append(Problem("moe_capacity_bins", 1, reason, nearest_to(1, (0, 2))))
        return found

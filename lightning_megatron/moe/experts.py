"""Experts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.activation import activation_of
from lightning_megatron.ops.grouped_linear import FindSum, add_group_bias, batched_linear
from lightning_megatron.ops.mixture_of_experts import ExpertBiases, visit_experts
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec


class RoutedExperts(nn.Module):
    """Feed-forward layers in two tensors: ``fc2(activation(fc1(x)))`` for each expert.

    An expert-parallel rank holds whole experts; with expert tensor parallelism it holds a slice of the inner features
    of each, and its output is a partial sum. The bias of ``fc2`` is sharded by output features, and each rank adds only
    its shard, so that the sum contains the bias once.

    Attributes:
        lora: adapters of the experts; ``None`` without.

    Raises:
        ConfigError: if experts or features do not split over the ranks.
    """

    def __init__(self, config: TransformerConfig, mesh: ParallelMesh, *, ops: Ops = ANY_DEVICE) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_ffn_hidden_size
        ep, etp = mesh.ep.size, mesh.etp.size
        raise_if_any(
            Problem(name, size, f"{total} {what} do not split over {size} ranks", nearest_to(size, divisors(total)))
            for name, size, total, what in (
                ("ep", ep, num_experts, "experts"),
                ("etp", etp, inner, "features"),
                ("etp", etp, hidden if config.moe_linear_bias else 0, "features of the experts' biases"),
            )
            if total % size
        )
        here = num_experts // ep
        activation = activation_of(config)
        gates = (2,) if activation.parts == 2 else ()
        self.first, self.etp_rank = mesh.ep.rank * here, mesh.etp.rank
        self.activation = activation.run
        self.weight_grads = mesh.weight_grads
        self.lora: nn.Module | None = None
        self.grouped_linear, self.mixture = ops.choose("grouped_linear"), ops.choose("mixture_of_experts")
        self._shapes = {"fc1": (num_experts, *gates, inner, hidden), "fc2": (num_experts, hidden, inner)}
        self.fc1 = nn.Parameter(torch.empty(here, *gates, inner // etp, hidden))
        self.fc2 = nn.Parameter(torch.empty(here, hidden, inner // etp))
        for name, std in (("fc1", config.init_std), ("fc2", config.output_init_std)):
            normal_(getattr(self, name), self.param_specs()[name], mesh.shard_ranks, std)
        self.fc1_bias: nn.Parameter | None = None
        self.fc2_bias: nn.Parameter | None = None
        if config.moe_linear_bias:
            self.fc1_bias = nn.Parameter(torch.zeros(here, *gates, inner // etp))
            self.fc2_bias = nn.Parameter(torch.zeros(here, hidden // etp))

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """All are cut by experts; weights and the first bias along the inner features, the second along the outer."""
        cut = len(self._shapes["fc1"]) - 2
        return {
            "fc1": ParamSpec(self._shapes["fc1"], tp_dim=cut, ep_dim=0),
            "fc2": ParamSpec(self._shapes["fc2"], tp_dim=2, ep_dim=0),
            "fc1_bias": ParamSpec(self._shapes["fc1"][:-1], tp_dim=cut, ep_dim=0, decay=False),
            "fc2_bias": ParamSpec(self._shapes["fc2"][:-1], tp_dim=1, ep_dim=0, decay=False),
        }

    def _biases(self) -> ExpertBiases | None:
        """Biases of this rank's experts; the second is zero in the features that other etp ranks hold."""
        if self.fc1_bias is None or self.fc2_bias is None:
            return None
        features = self.fc2_bias.shape[1]
        before = self.etp_rank * features
        after = self.fc2.shape[1] - before - features
        return ExpertBiases(self.fc1_bias.flatten(1), F.pad(self.fc2_bias, (before, after)))

    def _sum_of(self, weight: nn.Parameter) -> FindSum | None:
        """Function that finds the sum of a weight's gradients; ``None`` where autograd adds them."""
        return partial(self.weight_grads.place_of, weight) if self.weight_grads.takes_gradients else None

    def grouped(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[n, H] -> [n, H]``, rows sorted by expert; an expert may have none."""
        biases = self._biases()
        inner: Tensor = self.grouped_linear.run(x, self.fc1.flatten(1, -2), counts, self._sum_of(self.fc1))
        if self.lora is not None:
            inner = self.lora("inner", x, inner, counts, self.grouped_linear.run)
        if biases is not None:
            inner = add_group_bias(inner, biases.fc1, counts)
        active = self.activation(inner)
        out: Tensor = self.grouped_linear.run(active, self.fc2, counts, self._sum_of(self.fc2))
        if self.lora is not None:
            out = self.lora("outer", active, out, counts, self.grouped_linear.run)
        return out if biases is None else add_group_bias(out, biases.fc2, counts)

    def batched(self, x: Tensor) -> Tensor:
        """``[E/ep, n, H] -> [E/ep, n, H]``, the same number of rows for each expert."""
        if self.lora is not None or self.weight_grads.takes_gradients:
            experts, rows, _ = x.shape
            return self.grouped(x.flatten(0, 1), [rows] * experts).unflatten(0, (experts, rows))
        biases = self._biases()
        inner = batched_linear(x, self.fc1.flatten(1, -2))
        if biases is not None:
            inner = inner + biases.fc1.unsqueeze(1)
        out = batched_linear(self.activation(inner), self.fc2)
        return out if biases is None else out + biases.fc2.unsqueeze(1)

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """``[T, H] -> [T, H]``: weighted sum of the outputs of a token's experts ``[T, k]`` that are on this rank."""
        if self.lora is not None or self.weight_grads.takes_gradients:
            return visit_experts(x, experts, weights, self.grouped, self.first, len(self.fc2))
        out: Tensor = self.mixture.run(
            x, experts, weights, self.fc1, self.fc2, self.activation, self.first, self._biases()
        )
        return out

    def extra_repr(self) -> str:
        """Global sizes."""
        return f"experts={self._shapes['fc2'][0]}, here from {self.first}, ffn={self._shapes['fc2'][2]}"

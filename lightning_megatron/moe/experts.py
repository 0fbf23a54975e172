"""Experts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.config.transformer import GATED
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.activation import ACTIVATIONS
from lightning_megatron.ops.grouped_linear import batched_linear
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec


class RoutedExperts(nn.Module):
    """Feed-forward layers without biases in two tensors: ``fc2(activation(fc1(x)))`` for each expert.

    An expert-parallel rank holds whole experts; with expert tensor parallelism it holds a slice of the inner features
    of each, and its output is a partial sum.

    Args:
        num_experts: number of experts ``E`` over all ranks.
        hidden_size: features ``H``.
        ffn_hidden_size: features ``F`` inside one expert.
        mesh: mesh of the ranks.
        activation: name in ``ACTIVATIONS``.
        init_std: standard deviation of ``fc1``'s initial weights.
        output_init_std: standard deviation of ``fc2``'s initial weights.
        ops: implementations of the ops.

    Raises:
        ConfigError: if experts or features do not split over the ranks.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        mesh: ParallelMesh,
        *,
        activation: str,
        init_std: float,
        output_init_std: float,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        ep, etp = mesh.ep.size, mesh.etp.size
        raise_if_any(
            Problem(name, size, f"{total} {what} do not split over {size} ranks", nearest_to(size, divisors(total)))
            for name, size, total, what in (
                ("ep", ep, num_experts, "experts"),
                ("etp", etp, ffn_hidden_size, "features"),
            )
            if total % size
        )
        here, features = num_experts // ep, ffn_hidden_size // etp
        gates = (2,) if activation in GATED else ()
        self.first = mesh.ep.rank * here
        self.activation = ACTIVATIONS[activation]
        self.grouped_linear, self.mixture = ops.choose("grouped_linear"), ops.choose("mixture_of_experts")
        self._shapes = {
            "fc1": (num_experts, *gates, ffn_hidden_size, hidden_size),
            "fc2": (num_experts, hidden_size, ffn_hidden_size),
        }
        self.fc1 = nn.Parameter(torch.empty(here, *gates, features, hidden_size))
        self.fc2 = nn.Parameter(torch.empty(here, hidden_size, features))
        for name, std in (("fc1", init_std), ("fc2", output_init_std)):
            normal_(getattr(self, name), self.param_specs()[name], mesh.shard_ranks, std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Weights are cut by experts, and along the inner features."""
        dims = {"fc1": len(self._shapes["fc1"]) - 2, "fc2": 2}
        return {name: ParamSpec(shape, tp_dim=dims[name], ep_dim=0) for name, shape in self._shapes.items()}

    def grouped(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[n, H] -> [n, H]``, rows sorted by expert; an expert may have none."""
        inner = self.activation(self.grouped_linear.run(x, self.fc1.flatten(1, -2), counts))
        out: Tensor = self.grouped_linear.run(inner, self.fc2, counts)
        return out

    def batched(self, x: Tensor) -> Tensor:
        """``[E/ep, n, H] -> [E/ep, n, H]``, the same number of rows for each expert."""
        inner = self.activation(batched_linear(x, self.fc1.flatten(1, -2)))
        return batched_linear(inner, self.fc2)

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """``[T, H] -> [T, H]``: weighted sum of the outputs of a token's experts ``[T, k]`` that are on this rank."""
        out: Tensor = self.mixture.run(x, experts, weights, self.fc1, self.fc2, self.activation, self.first)
        return out

    def extra_repr(self) -> str:
        """Global sizes."""
        return f"experts={self._shapes['fc2'][0]}, here from {self.first}, ffn={self._shapes['fc2'][2]}"

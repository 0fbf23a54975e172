"""Experts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.layers.fp8_grouped import grouped_linear_fp8
from lightning_megatron.layers.fp8_linear import Fp8Gemms
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.activation import activation_of
from lightning_megatron.ops.grouped_linear import FindSum, add_group_bias, batched_linear
from lightning_megatron.ops.implementation import OpChoice
from lightning_megatron.ops.matmul import PLAIN_GEMMS, LinearGemms
from lightning_megatron.ops.mixture_of_experts import ExpertBiases, visit_experts
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec


class ExpertLinear:
    """One of the two products of all experts of a rank, as a layer whose GEMMs can be replaced.

    Args:
        experts: the experts.
        name: ``"fc1"`` or ``"fc2"``.
    """

    def __init__(self, experts: RoutedExperts, name: str) -> None:
        self._experts, self._name = experts, name

    @property
    def weight(self) -> Tensor:
        """``[E/ep, ..., out, in]``."""
        weight: Tensor = getattr(self._experts, self._name)
        return weight

    @property
    def products(self) -> LinearGemms:
        """Products in fp8, or those in the dtype of the weight."""
        own: dict[str, Any] = dict(self._experts.products.items())
        gemms: LinearGemms = own.get(self._name, PLAIN_GEMMS)
        return gemms

    @products.setter
    def products(self, gemms: LinearGemms) -> None:
        if isinstance(gemms, Fp8Gemms):
            self._experts.products[self._name] = gemms

    @property
    def product_choice(self) -> OpChoice[Any] | None:
        """Choice of the products, for the op report."""
        choice: OpChoice[Any] | None = getattr(self._experts, f"{self._name}_choice", None)
        return choice

    @product_choice.setter
    def product_choice(self, choice: OpChoice[Any]) -> None:
        setattr(self._experts, f"{self._name}_choice", choice)


class RoutedExperts(nn.Module):
    """Feed-forward layers in two tensors: ``fc2(activation(fc1(x)))`` for each expert.

    An expert-parallel rank holds whole experts; with expert tensor parallelism it holds a slice of the inner features
    of each, and its output is a partial sum. The bias of ``fc2`` is sharded by output features, and each rank adds only
    its shard, so that the sum contains the bias once.

    Attributes:
        lora: adapters of the experts; ``None`` without.
        products: products in fp8, by the name of the weight.

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
        self.products = nn.ModuleDict()
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

    def grouped_linears(self) -> Mapping[str, ExpertLinear]:
        """Its two products, which fp8 replaces."""
        return {name: ExpertLinear(self, name) for name in ("fc1", "fc2")}

    def _product(self, weight: str, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of each expert times its ``fc1`` or ``fc2``."""
        of_all = getattr(self, weight)
        rows = of_all.flatten(1, -2)
        if weight in self.products and x.shape[0]:
            return grouped_linear_fp8(x, rows, counts, self.products[weight])  # type: ignore[arg-type]
        out: Tensor = self.grouped_linear.run(x, rows, counts, self._sum_of(of_all))
        return out

    def grouped(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[n, H] -> [n, H]``, rows sorted by expert; an expert may have none."""
        biases = self._biases()
        inner = self._product("fc1", x, counts)
        if self.lora is not None:
            inner = self.lora("inner", x, inner, counts, self.grouped_linear.run)
        if biases is not None:
            inner = add_group_bias(inner, biases.fc1, counts)
        active = self.activation(inner)
        out = self._product("fc2", active, counts)
        if self.lora is not None:
            out = self.lora("outer", active, out, counts, self.grouped_linear.run)
        return out if biases is None else add_group_bias(out, biases.fc2, counts)

    @property
    def _by_groups(self) -> bool:
        """True if all products go through :meth:`grouped`."""
        return self.lora is not None or self.weight_grads.takes_gradients or bool(self.products)

    def batched(self, x: Tensor) -> Tensor:
        """``[E/ep, n, H] -> [E/ep, n, H]``, the same number of rows for each expert."""
        if self._by_groups:
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
        if self._by_groups:
            return visit_experts(x, experts, weights, self.grouped, self.first, len(self.fc2))
        out: Tensor = self.mixture.run(
            x, experts, weights, self.fc1, self.fc2, self.activation, self.first, self._biases()
        )
        return out

    def extra_repr(self) -> str:
        """Global sizes."""
        return f"experts={self._shapes['fc2'][0]}, here from {self.first}, ffn={self._shapes['fc2'][2]}"

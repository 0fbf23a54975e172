"""Feed-forward layer of experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.config.capacity import expert_capacity
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.parts import FeedForward
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.aux_loss import count_tokens
from lightning_megatron.moe.capacity_bins import CapacityBins
from lightning_megatron.moe.dispatch import ExpertGrid, allgather, alltoall, padded_alltoall
from lightning_megatron.moe.experts import RoutedExperts
from lightning_megatron.moe.router import Router
from lightning_megatron.moe.tokens import RoutedTokens
from lightning_megatron.ops.activation import activation_of
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.recompute import recomputed


class MoELayer(FeedForward):
    """Router, dispatch, experts; ``output, aux_loss = layer(x)``.

    Where the host reads the number of tokens of each expert, ``torch.compile`` leaves dispatch and experts out of its
    graphs: reading breaks a graph, and every new number would compile another.

    Args:
        config: shape of the model and its experts.
        sequence_parallel: True if input and output are sequence shards; required with ``tp > 1``, since each token is
            routed once.
        recompute: plan of activation recomputation; with ``"moe"`` only tokens and routing are kept, and the backward
            computes the experts again.

    Raises:
        ConfigError: if experts or features do not split over the ranks, or tp ranks hold the same tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        if mesh.tp.size > 1 and not sequence_parallel:
            reason = "with experts and tp > 1 each rank must hold tokens of its own: leave sequence_parallel out"
            raise_if_any([Problem("sequence_parallel", sequence_parallel, reason, (True, None))])
        self.config, self.rng, self.recompute = config, mesh.rng, recompute.wraps("moe")
        self.grid = ExpertGrid(config.num_experts, mesh)
        hidden_size, init_std = config.hidden_size, config.init_std
        self.router = Router(hidden_size, config, mesh, sequence_parallel=sequence_parallel, init_std=init_std)
        self.experts = RoutedExperts(config, mesh, ops=ops)
        self.bins = CapacityBins(config, mesh) if config.moe_capacity_bins else None
        if self.gathers:
            self._reads_counts = not self.experts.mixture.candidates  # a device's operator does not read counts
        else:
            self._reads_counts = self.bins is not None or not config.moe_pad_to_capacity
        self.shared: MLP | None = None
        if config.moe_shared_expert_ffn_hidden_size:
            self.shared = MLP(
                hidden_size,
                config.moe_shared_expert_ffn_hidden_size,
                mesh,
                activation=activation_of(config),
                bias=False,
                sequence_parallel=sequence_parallel,
                init_std=init_std,
                output_init_std=config.output_init_std,
            )

    @property
    def gathers(self) -> bool:
        """True if every rank gets all tokens, and False if each token is sent to the ranks of its experts."""
        return self.config.moe_dynamic or self.config.moe_token_dispatcher == "allgather"

    def forward(self, x: Tensor, routed: RoutedTokens | None = None) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H] -> [S, B, H]``, and the auxiliary loss (``None`` if there is none).

        Args:
            x: tokens, or this rank's shard of them.
            routed: tokens that are no padding, which visits no routed expert; ``None`` for all.
        """
        with nullcontext() if torch.compiler.is_compiling() else self.run_context():
            return self._forward(x, routed)

    def run_context(self) -> AbstractContextManager[None]:
        """Context in which the router knows the first run of a forward from its repetition in the backward."""
        return self.router.runs.forward(torch.is_grad_enabled()) if self.training else nullcontext()

    def _forward(self, x: Tensor, routed: RoutedTokens | None) -> tuple[Tensor, Tensor | None]:
        experts, weights, aux_loss = self.router(x, routed)
        reads_counts = self._reads_counts or len(self.experts.products) > 0
        out = (self._compute_outside_of_graphs if reads_counts else self._compute)(x, experts, weights)
        return out if self.shared is None else out + self.shared(x), aux_loss

    def _compute(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """``[S, B, H]`` of the experts with ids ``[T, k]``, weighted by ``[T, k]``."""
        run = self._dispatch(experts, x.shape[0] * x.shape[1])
        tokens = x.flatten(0, 1)  # [T, H]
        if self.recompute and self.training and torch.is_grad_enabled():
            out = recomputed(run, tokens, experts, weights, rng=self.rng)
        else:
            out = run(tokens, experts, weights)
        return out.view_as(x)

    @torch.compiler.disable
    def _compute_outside_of_graphs(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return self._compute(x, experts, weights)

    def _dispatch(self, experts: Tensor, tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Function of tokens, ids and weights that runs the dispatcher for this routing."""
        c = self.config
        if self.gathers:
            return partial(allgather, compute=self.experts.routed, axis=self.grid.axis)
        if self.bins is not None:
            counts = count_tokens(experts, c.num_experts)
            capacity = self.bins.choose(counts, tokens, repeats=not self.router.runs.counts)
        elif c.moe_pad_to_capacity:
            capacity = expert_capacity(tokens, c.moe_router_topk, c.num_experts, c.moe_capacity_factor)
        else:
            return partial(alltoall, compute=self.experts, grid=self.grid)
        return partial(padded_alltoall, compute=self.experts, grid=self.grid, capacity=capacity)

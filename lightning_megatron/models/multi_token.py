"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2).

Modules after the last layer predict further tokens, one after another: module ``k`` takes the hidden states of its
predecessor and the tokens ``k`` places later, and predicts the tokens one place after those. All share the model's
embedding and output layer. Their losses train the model to plan ahead; generation does not use them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.documents import Documents
from lightning_megatron.layers.norm import model_norm
from lightning_megatron.layers.whole_linear import WholeLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.transformer import Block
from lightning_megatron.moe.tokens import RoutedTokens
from lightning_megatron.ops.registry import ANY_DEVICE, Ops


class NextTokenModule(nn.Module):
    """Hidden states that predict one token further: two norms, a projection, a block like the last one, a norm.

    Arguments as of :class:`Block`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        h = config.hidden_size
        norm = partial(model_norm, config, h, mesh, sequence_parallel, ops)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.projection = WholeLinear(
            2 * h, h, mesh, sequence_parallel=sequence_parallel, init_std=config.init_std, bias=False
        )
        self.block = Block(
            config,
            mesh,
            layer=config.num_layers - 1,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            ops=ops,
        )
        self.norm = norm()

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        documents: Documents | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """``[S, B, H], [S, B, H] -> [S, B, H]``, or shards of them.

        Args:
            hidden: hidden states after the norm of the model, or of the module before this one.
            embedded: embedded tokens, shifted by ``k`` places for module ``k``.
            rotary: cosines and sines of the positions.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
            routed: tokens that routers send to experts, and count; ``None`` for all.

        Returns:
            Hidden states after this module's norm, and the losses of its experts.
        """
        both = torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        out, aux_loss = self.block(self.projection(both), rotary, documents=documents, routed=routed)
        return self.norm(out), [] if aux_loss is None else [aux_loss]


def later(x: Tensor, places: int, fill: float, documents: Documents | None = None) -> Tensor:
    """``[B, S] -> [B, S]``: shift by ``places`` to the left, with ``fill`` after the end of a sequence or document."""
    moved = F.pad(x[:, places:], (0, min(places, x.shape[1])), value=fill)
    return moved if documents is None else moved.masked_fill(~documents.together(places).to(x.device), fill)

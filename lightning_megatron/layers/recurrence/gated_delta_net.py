"""Mixers of Qwen3-Next: the gated delta net, and attention with a gate on its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.documents import Documents
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any
from lightning_megatron.families.qwen3_next import Qwen3NextConfig
from lightning_megatron.layers.attention import KVCache, SelfAttention
from lightning_megatron.layers.init import normal_, uniform_
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.parts import Mixer
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.recurrence.delta_rule import causal_convolution, gated_delta_rule, unit_length
from lightning_megatron.ops.registry import ANY_DEVICE, Ops
from lightning_megatron.params import ParamSpec
from lightning_megatron.recompute import run_part

_SLOWEST, _FASTEST = 0.01, 16.0
"""Bounds of the initial speed of decay."""


class DeltaCache:
    """State of a gated delta net after the tokens decoded so far, and the tokens of the last call.

    These serve to leave out padding at their end, which a state cannot forget.
    """

    def __init__(self) -> None:
        self.length = 0
        self.window: Tensor | None = None
        self.state: Tensor | None = None
        self._earlier: Tensor | None = None
        self._inputs: Tensor | None = None
        self._steps: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of the state and of the convolution's last inputs."""
        return sum(each.nbytes for each in (self.window, self.state) if each is not None)

    def extend(self, inputs: Tensor, steps: tuple[Tensor, ...], state: Tensor) -> None:
        """Take over the result of a call.

        Args:
            inputs: inputs of the convolution with those before them, ``[K - 1 + S, B, C]``.
            steps: tokens' arguments of ``gated_delta_rule``, each ``[S, ...]``.
            state: state after the last token.
        """
        taken = len(steps[0])
        self._earlier, self._inputs, self._steps = self.state, inputs, steps
        self.window, self.state, self.length = inputs[taken:], state, self.length + taken

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens; only tokens of the last call can be left out.

        Raises:
            ConfigError: for a length that leaves out others.
        """
        taken = len(self._steps[0]) if self._steps else 0
        kept = length - (self.length - taken)
        if not 0 <= kept <= taken:
            reason = f"the state of a gated delta net can leave out only the last {taken} of {self.length} tokens"
            raise_if_any([Problem("length", length, reason, (self.length,))])
        if self._inputs is None:
            return
        if kept < taken:
            self.state = self._earlier
            if kept:
                q, k, v, log_decay, beta = (each[:kept] for each in self._steps)
                self.state = gated_delta_rule(q, k, v, log_decay, beta, self._earlier)[1]
        # A copy: a view would keep all inputs.
        self.window, self.length = self._inputs[kept : len(self._inputs) - taken + kept].clone(), length
        self._earlier, self._inputs, self._steps = None, None, ()


class GatedDeltaNet(Mixer):
    """The gated delta rule with a short convolution before it, and a gated norm after it.

    Each key head serves ``r`` value heads. Both input matrices are fused by key head: ``qkvz`` has rows
    ``[q, k, v x r, z x r]`` (``z`` gates the output), ``ba`` has rows ``[beta x r, decay x r]``, and the convolution's
    features are ``[q, k, v x r]``. A tensor-parallel rank holds whole key heads, so its shards are plain slices.

    Arguments as of every part.
    """

    takes_documents = False

    def __init__(
        self,
        config: Qwen3NextConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        causal: bool = True,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__()
        assert causal, "a recurrence sees no later token"
        keys, values = config.delta_key_heads, config.delta_value_heads
        self.key_dim, self.value_dim, self.num_values = config.delta_key_dim, config.delta_value_dim, values
        self.values_per_key = values // keys
        self.rng, self.recompute, self._communicates = mesh.rng, recompute, mesh.tp.size > 1
        hidden, stds = config.hidden_size, config.init_stds
        how: dict[str, Any] = {"bias": False, "sequence_parallel": sequence_parallel}
        self.qkvz = ColumnParallelLinear(hidden, keys * sum(self._rows), mesh, init_std=stds.qkv, **how)
        self.ba = ColumnParallelLinear(hidden, 2 * values, mesh, init_std=stds.qkv, **how)
        self.conv_shape = (keys * sum(self._rows[:3]), 1, config.delta_conv_size)
        ranks, specs = mesh.shard_ranks, self.param_specs()
        self.conv = nn.Parameter(torch.empty(self.conv_shape[0] // mesh.tp.size, *self.conv_shape[1:]))
        self.a_log = nn.Parameter(torch.empty(values // mesh.tp.size))
        self.dt_bias = nn.Parameter(torch.ones(values // mesh.tp.size))
        normal_(self.conv, specs["conv"], ranks, config.init_std)
        uniform_(self.a_log, specs["a_log"], ranks, 1.0)
        with torch.no_grad():
            share = (self.a_log + 1) / 2
            self.a_log.copy_((_SLOWEST + share * (_FASTEST - _SLOWEST)).log())
        # Each rank norms its own heads, so the gradient of the weight is summed over tp.
        self.norm = RMSNorm(self.value_dim, mesh, eps=config.norm_epsilon, sequence_parallel=True, ops=ops)
        self.projection = RowParallelLinear(values * self.value_dim, hidden, mesh, init_std=stds.out, **how)

    @classmethod
    def layout_problems(cls, config: Any, layout: ParallelLayout) -> list[Problem]:
        """Context parallelism, and tensor-parallel ranks over which the key heads do not split."""
        found, heads = [], config.delta_key_heads
        if layout.cp > 1:
            reason = "the state of a gated delta net passes through the whole sequence: raise tp or pp"
            found.append(Problem("cp", layout.cp, reason, (1,)))
        if heads % layout.tp:
            reason = f"delta_key_heads={heads} do not split over {layout.tp} ranks"
            found.append(Problem("tp", layout.tp, reason, nearest_to(layout.tp, divisors(heads))))
        return found

    @property
    def _rows(self) -> tuple[int, int, int, int]:
        """Rows of queries, keys, values and gates for one key head."""
        values = self.values_per_key * self.value_dim
        return self.key_dim, self.key_dim, values, values

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Each rank holds the parameters of its heads."""
        vector = ParamSpec((self.num_values,), tp_dim=0, decay=False)
        return {"conv": ParamSpec(self.conv_shape, tp_dim=0), "a_log": vector, "dt_bias": vector}

    def is_pure(self, module: str) -> bool:
        """True if nothing is communicated; no part draws random numbers."""
        return module == "core_attn" or not self._communicates

    def new_cache(self) -> DeltaCache:
        """An empty cache for decoding."""
        return DeltaCache()

    def forward(
        self,
        x: Tensor,
        rotary: object = None,
        cache: DeltaCache | None = None,
        key_mask: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it; there are no positions, masks or documents.

        Raises:
            ConfigError: for masks or documents.
        """
        given = {"key_mask": key_mask, "documents": documents}
        reason = "a gated delta net would mix tokens that must not see each other"
        raise_if_any([Problem(name, "given", reason, (None,)) for name, each in given.items() if each is not None])
        heads = self.qkvz(x).unflatten(-1, (-1, sum(self._rows)))  # [S, B, G/tp, ...]
        qkv, z = heads.split((sum(self._rows[:3]), self._rows[3]), dim=-1)
        inputs = qkv.flatten(2), self.ba(x), self.conv, self.a_log, self.dt_bias, cache
        core = run_part(self.recompute, "core_attn", self._core, *inputs, rng=self.rng, is_pure=True)
        normed = self.norm(core)  # [S, B, N/tp, V]
        gates = F.silu(z.unflatten(-1, (self.values_per_key, -1)).flatten(2, 3).float())
        return self.projection((normed * gates).to(x.dtype).flatten(2))

    def _core(
        self, qkv: Tensor, ba: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, cache: DeltaCache | None
    ) -> Tensor:
        """``[S, B, N/tp, V]`` of the recurrence."""
        mixed, inputs = causal_convolution(qkv, conv, None if cache is None else cache.window)
        q, k, v = mixed.unflatten(-1, (-1, sum(self._rows[:3]))).split(self._rows[:3], dim=-1)
        repeats = self.values_per_key
        q, k = (unit_length(each).repeat_interleave(repeats, dim=2) for each in (q, k))
        b, a = ba.unflatten(-1, (-1, 2, repeats)).transpose(2, 3).flatten(3).unbind(2)
        log_decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
        steps = q * self.key_dim**-0.5, k, v.unflatten(-1, (repeats, -1)).flatten(2, 3), log_decay, b.sigmoid()
        out, state = gated_delta_rule(*steps, None if cache is None else cache.state)
        if cache is not None:
            cache.extend(inputs, steps, state)
        return out


class GatedAttention(SelfAttention):
    """Grouped-query attention with a gate on the output of each head, and rotary angles for the first features.

    The rows of a group are ``[query, gate]`` of each head, then its key, its value. Arguments as of
    :class:`SelfAttention`.
    """

    query_parts = 2

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it; arguments as of :class:`SelfAttention`."""
        heads = 2 * self.heads_per_group
        groups = self.qkv(x).unflatten(-1, (-1, heads + 2, self.head_dim))  # [S, B, G/tp, 2 N/G + 2, D]
        both, k, v = (part.flatten(2, 3) for part in groups.split((heads, 1, 1), dim=3))
        q, gate = both.unflatten(2, (-1, 2)).unbind(3)  # [S, B, N/tp, D]
        # Copies, as in SelfAttention: views would keep all of `groups`.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = self._rotated(q, *rotary), self._rotated(k, *rotary)
        first = 0
        if cache is not None:
            first = cache.held
            k, v = cache.extend(k, v)
        core = self.attend(q, k, v, first, key_mask, bias, documents)
        return self.out((core * gate.sigmoid()).flatten(2, 3))

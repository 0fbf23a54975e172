"""Plan of activation recomputation, as data; the code that follows it is in ``lightning_megatron.recompute``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.config.layout import ModelShape, ParallelLayout
from lightning_megatron.errors import Problem, is_whole, nearest_names, raise_if_any

Granularity = str | Sequence[str] | None

RecomputeMethod = Literal["uniform", "block"]

MODULES = ("core_attn", "attention", "mlp", "moe")
METHODS = get_args(RecomputeMethod)


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers that are run as one.

    Attributes:
        layers: global numbers of the layers.
        recomputed: True if only the input of the first one is kept.
    """

    layers: tuple[int, ...]
    recomputed: bool


@dataclass(frozen=True)
class RecomputePlan:
    """Plan of activation recomputation (https://arxiv.org/abs/2205.05198, section 5).

    Attributes:
        granularity: parts that are recomputed: ``None``; ``"full"`` for whole layers; ``"selective"`` for core
            attention, which takes much memory and little time; or some of ``MODULES``: ``"core_attn"`` (softmax(q k^T)
            v), ``"attention"`` and ``"mlp"`` (each with its norm), ``"moe"`` (the experts).
        method: rule for ``"full"``: ``"uniform"`` cuts each stage's layers into groups and keeps the input of every
            group, ``"block"`` recomputes some layers of each stage, one by one, and keeps the activations of the
            others.
        num_layers: number for ``"full"``: layers of a group, or recomputed layers of each stage.
        shard_saved: True, for ``"full"``, if tensor-parallel ranks that hold the same input keep a shard of it each.

    Raises:
        ConfigError: with every fault of the fields.
    """

    granularity: Granularity = None
    method: RecomputeMethod = "uniform"
    num_layers: int = 1
    shard_saved: bool = False

    def __post_init__(self) -> None:
        raise_if_any(recompute_problems(self.granularity, self.method, self.num_layers, self.shard_saved))
        if not isinstance(self.granularity, str | None):
            object.__setattr__(self, "granularity", tuple(self.granularity))

    def wraps(self, module: str) -> bool:
        """True if this part of a layer, one of ``MODULES``, is recomputed by itself."""
        chosen = self._modules()
        inside_another = module == "core_attn" and "attention" in chosen
        return module in chosen and not inside_another

    def groups(self, layers: Sequence[int]) -> list[LayerGroup]:
        """Groups of the layers of one stage, in order."""
        size = self.num_layers
        if self.granularity != "full":
            return [LayerGroup(tuple(layers), False)]
        if self.method == "block":
            return [LayerGroup((number,), i < size) for i, number in enumerate(layers)]
        return [LayerGroup(tuple(layers[i : i + size]), True) for i in range(0, len(layers), size)]

    def problems(self, layout: ParallelLayout, model: ModelShape | None = None) -> list[Problem]:
        """Conflicts with a layout and, if it is known, a model."""
        found = recompute_problems(self.granularity, self.method, self.num_layers, self.shard_saved, layout)
        if model is not None and self.wraps("moe") and not model.num_experts:
            found.append(Problem("recompute", "moe", "the model has no experts to recompute", ("mlp",)))
        return found

    def _modules(self) -> tuple[str, ...]:
        if self.granularity is None or self.granularity == "full":
            return ()
        if self.granularity == "selective":
            return ("core_attn",)
        return (self.granularity,) if isinstance(self.granularity, str) else tuple(self.granularity)


def recompute_problems(
    granularity: Granularity, method: str, num_layers: int, shard_saved: bool, layout: ParallelLayout | None = None
) -> list[Problem]:
    """Faults of a plan's fields and, if it is known, conflicts with a layout, by the strategy's argument names."""
    found = granularity_problems(granularity)
    if method not in METHODS:
        found.append(Problem("recompute_method", method, "unknown", nearest_names(str(method), METHODS)))
    if not is_whole(num_layers, at_least=1):
        found.append(Problem("recompute_num_layers", num_layers, "must be a whole number of at least 1", (1,)))
    if granularity != "full" and not found:
        given = {
            "recompute_method": (method, "uniform"),
            "recompute_num_layers": (num_layers, 1),
            "recompute_shard_saved": (shard_saved, False),
        }
        reason = f"is about whole layers, and recompute={granularity!r} is not: set recompute='full', or leave it out"
        found += [Problem(name, value, reason, (unset,)) for name, (value, unset) in given.items() if value != unset]
    if not shard_saved or layout is None:
        return found
    if layout.tp == 1:
        reason = "what is kept would be cut over tensor-parallel ranks and tp=1 has none: raise tp, or leave it out"
        found.append(Problem("recompute_shard_saved", True, reason, (False,)))
    elif layout.uses_sequence_parallel:
        reason = "under sequence parallelism what is kept is a shard already: leave it out"
        found.append(Problem("recompute_shard_saved", True, reason, (False,)))
    return found


def granularity_problems(granularity: Granularity) -> list[Problem]:
    """Faults of ``recompute``: unknown names, or names that do not go together."""
    words = ("selective", "full")
    if granularity is None:
        return []
    if isinstance(granularity, str) or not isinstance(granularity, Sequence):
        known = (*words, *MODULES)
        if granularity in known:
            return []
        return [Problem("recompute", granularity, "unknown", nearest_names(str(granularity), known))]
    if not granularity:
        return [Problem("recompute", list(granularity), "names no part of a layer: leave it out", (None,))]
    found = []
    for name in granularity:
        if name in words:
            found.append(Problem("recompute", name, "stands alone, not in a list", MODULES))
        elif name not in MODULES:
            found.append(Problem("recompute", name, "no part of a layer", nearest_names(str(name), MODULES)))
    return found


NO_RECOMPUTE = RecomputePlan()

"""Graphs of ``torch.compile`` in a run: the batches that may compile new ones, and log lines about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatron import device as devices
from lightning_megatron.lightning.compat._private import CompilerCounts, Recompilation, compiler_counts, recompilations

_LONGEST_REASON = 100
_LONGEST_CAUSE = 300
_TRAINING = "training"
_NOT_COMPILED = nullcontext()


class BlockGraphs:
    """Limits and reports the graphs that ``torch.compile`` makes in one run.

    On a device that compiles for fixed shapes, which takes minutes, only these batches may compile: the first one of
    training and of each evaluation loader, and every batch whose shapes have occurred before. Another batch, such as
    the shorter last one of an epoch, uses an existing graph if one fits, and else runs eagerly.
    """

    def __init__(self, compiles: bool = False, device: torch.device | None = None) -> None:
        self._compiles = compiles
        self._is_selective = compiles and device is not None and devices.compiles_fixed_shapes(device)
        self._seen: Counter[object] = Counter()
        self._begin = compiler_counts() if self._compiles else CompilerCounts()
        self._graphs = self._begin.graphs
        self._known = {again.number for again in recompilations()} if self._compiles else set()
        self._told: set[str] = set()

    def batch(self, stage: str, batch: Any, *rest: Any) -> AbstractContextManager[None]:
        """Context in which a batch runs.

        The graphs are reported before the second batch of training. Each cause of a recompilation is logged once, after
        the batch that triggered it.

        Args:
            stage: ``"training"``, or the name of an evaluation's step.
            batch: batch, on any device.
            *rest: further arguments of the step; in an evaluation the last one is the loader's index.
        """
        return self._batch(stage, batch, *rest) if self._compiles else _NOT_COMPILED

    @contextmanager
    def _batch(self, stage: str, batch: Any, *rest: Any) -> Iterator[None]:
        if self._seen[_TRAINING] == 1 and stage == _TRAINING:
            self.report()
        loader = stage if stage == _TRAINING or len(rest) < 2 else (stage, rest[-1])
        if self._is_selective:
            may_compile = self._may_compile(loader, batch)
        else:
            may_compile, self._seen[loader] = True, self._seen[loader] + 1
        with nullcontext() if may_compile else torch.compiler.set_stance("eager_on_recompile"):
            yield
        self._tell_recompilations(stage)

    def _may_compile(self, loader: object, batch: Any) -> bool:
        shapes: list[torch.Size] = []
        apply_to_collection(batch, Tensor, lambda tensor: shapes.append(tensor.shape))
        here = loader, tuple(shapes)
        may_compile = not self._seen[loader] or bool(self._seen[here])
        self._seen.update((loader, here))
        return may_compile

    def _tell_recompilations(self, stage: str) -> None:
        before, self._graphs = self._graphs, compiler_counts().graphs
        if self._graphs == before:
            return
        for again in recompilations():
            line = recompilation_line(again)
            if again.number not in self._known and line not in self._told:
                self._told.add(line)
                rank_zero_info(f"{line} (seen in {stage})")
            self._known.add(again.number)

    def report(self) -> None:
        """Log on rank 0 the number of graphs since the run began, and the reasons for graph breaks."""
        if self._compiles:
            rank_zero_info(graph_line(compiler_counts().since(self._begin)))


def graph_line(found: CompilerCounts) -> str:
    """Log line with the numbers of graphs and breaks; equal blocks share graphs, so each kind of block counts once."""
    breaks = sum(found.breaks.values())
    line = f"torch.compile: {found.graphs} graphs and {breaks} breaks so far; equal blocks share their graphs"
    if not breaks:
        return line
    reasons = Counter({_short(reason): 0 for reason in found.breaks})
    for reason, number in found.breaks.items():
        reasons[_short(reason)] += number
    return f"{line} ({'; '.join(f'{number} x {reason}' for reason, number in reasons.most_common(4))})"


def recompilation_line(again: Recompilation) -> str:
    """Log line about the recompilation of a function."""
    reason = again.reason.partition(": ")[2] or again.reason  # after the index of the graph
    cause = " ".join(reason.split())[:_LONGEST_CAUSE]
    return f"torch.compile: a new graph of {again.function!r}, since no earlier one fits: {cause}"


def _short(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = lines[0] if lines else "no reason given"
    explained = next((line for line in lines[1:] if line.startswith("Explanation:")), "")
    return f"{text} {explained}".strip()[:_LONGEST_REASON]

"""Graphs of ``torch.compile`` in a run: batches that may make new ones, and lines about them in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


class BlockGraphs:
    """Graphs of one run.

    Where a graph is made for fixed shapes, and takes minutes, not every batch may cause one: the first batch of
    training and of each evaluation loader does, and every batch whose shapes have come before. A batch of new shapes,
    such as the rest of an epoch, runs without a graph, unless one fits.

    Args:
        compiles: True if ``torch.compile`` is used.
        device: device of this process.
    """

    def __init__(self, compiles: bool = False, device: torch.device | None = None) -> None:
        self._compiles = compiles
        self._is_selective = compiles and device is not None and devices.compiles_fixed_shapes(device)
        self._seen: Counter[object] = Counter()
        self._begin = compiler_counts() if self._compiles else CompilerCounts()
        self._graphs = self._begin.graphs
        self._known = {again.number for again in recompilations()} if self._compiles else set()
        self._told: set[str] = set()

    @contextmanager
    def batch(self, stage: str, batch: Any, *rest: Any) -> Iterator[None]:
        """Context in which a batch is run.

        Before the second batch of training the log gets its line about graphs. What was compiled again is logged after
        the batch that caused it, each cause once.

        Args:
            stage: ``"training"``, or the name of an evaluation's step.
            batch: batch, on any device.
            *rest: further arguments of the step; the last is the number of the loader, in an evaluation.
        """
        if self._seen[_TRAINING] == 1 and stage == _TRAINING:
            self.report()
        loader = stage if stage == _TRAINING or len(rest) < 2 else (stage, rest[-1])
        if self._is_selective:
            may_compile = self._may_compile(loader, batch)
        else:
            may_compile, self._seen[loader] = True, self._seen[loader] + 1
        with nullcontext() if may_compile else torch.compiler.set_stance("eager_on_recompile"):
            yield
        if self._compiles:
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
        """Log on rank 0 the graphs since the run began, and the reasons for breaks."""
        if self._compiles:
            rank_zero_info(graph_line(compiler_counts().since(self._begin)))


def graph_line(found: CompilerCounts) -> str:
    """One line about graphs; equal blocks share theirs, so that the numbers are those of one block of each kind."""
    breaks = sum(found.breaks.values())
    line = f"torch.compile: {found.graphs} graphs and {breaks} breaks so far; equal blocks share their graphs"
    if not breaks:
        return line
    reasons = Counter({_short(reason): 0 for reason in found.breaks})
    for reason, number in found.breaks.items():
        reasons[_short(reason)] += number
    return f"{line} ({'; '.join(f'{number} x {reason}' for reason, number in reasons.most_common(4))})"


def recompilation_line(again: Recompilation) -> str:
    """One line about a new graph of a function that had one."""
    reason = again.reason.partition(": ")[2] or again.reason  # behind the number of the graph
    cause = " ".join(reason.split())[:_LONGEST_CAUSE]
    return f"torch.compile: a new graph of {again.function!r}, since no earlier one fits: {cause}"


def _short(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = lines[0] if lines else "no reason given"
    explained = next((line for line in lines[1:] if line.startswith("Explanation:")), "")
    return f"{text} {explained}".strip()[:_LONGEST_REASON]

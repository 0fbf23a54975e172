"""The result of a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_megatron.tools.rehearsal.context import Traffic


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a job in numbers.

    Bytes are those of tensors: without what an allocator keeps in reserve, and without the device's own workspace.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        coordinates: position of the rank on each axis of several ranks, and its size.
        layers: layers of the rank's stages.
        micro_batches: forwards of a step that were rehearsed.
        peak: most bytes at any moment of the steps.
        peak_without_pieces: most bytes without the pieces that a CPU's reduce-scatter receives from every rank, and a
            device's does not.
        moment: name of the moment of ``peak``.
        by_cause: bytes at that moment, by cause.
        after_step: bytes between two steps.
        after_step_by_cause: those bytes by cause.
        setup_peak: most bytes while the model and its optimizer are created.
        traffic: collectives and messages of the last step, by axis and kind.
        flops: floating-point operations of the last step (matrix products and attention, recomputation too).
        kernels: number of operations of the last step by name.
        notes: differences between the rehearsal and the run.
    """

    rank: int
    world_size: int
    coordinates: Mapping[str, tuple[int, int]]
    layers: tuple[int, ...]
    micro_batches: int
    peak: int
    peak_without_pieces: int
    moment: str
    by_cause: Mapping[str, int]
    after_step: int
    after_step_by_cause: Mapping[str, int]
    setup_peak: int
    traffic: Mapping[str, Mapping[str, Traffic]]
    flops: int
    kernels: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())

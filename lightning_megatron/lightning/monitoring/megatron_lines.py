"""Lines of Megatron-LM's log, to the character, from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

_WIDTH = 48
"""Column at which the values of arguments begin, dots included."""


@dataclass(frozen=True)
class Iteration:
    """Numbers of one line, of the iterations since the line before.

    Attributes:
        number: number of the last iteration, from 1.
        total: number of iterations of the training.
        consumed: samples consumed since training began.
        milliseconds: time of one iteration.
        learning_rate: learning rate after the iteration.
        global_batch: samples of the last iteration.
        losses: mean of each loss over the iterations that were not skipped; without one, no loss is printed.
        loss_scale: loss scale after the iteration, 1.0 without one.
        grad_norm: norm of the last gradient; ``None`` if its step was skipped.
        skipped: number of iterations that were skipped.
        nans: number of iterations whose loss was not finite.
        teraflops: 10^12 operations a second on each device; ``None`` to leave them out.
    """

    number: int
    total: int
    consumed: int
    milliseconds: float
    learning_rate: float
    global_batch: int
    losses: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    grad_norm: float | None = None
    skipped: int = 0
    nans: int = 0
    teraflops: float | None = None


def iteration_line(at: Iteration) -> str:
    """The line of an iteration."""
    parts = [
        f" iteration {at.number:8d}/{at.total:8d}",
        f" consumed samples: {at.consumed:12d}",
        f" elapsed time per iteration (ms): {at.milliseconds:.1f}",
    ]
    if at.teraflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {at.teraflops:.1f}")
    parts += [f" learning rate: {at.learning_rate:.3E}", f" global batch size: {at.global_batch:5d}"]
    parts += [f" {name}: {value:.6E}" for name, value in at.losses.items()]
    parts.append(f" loss scale: {at.loss_scale:.1f}")
    if at.grad_norm is not None:
        parts.append(f" grad norm: {at.grad_norm:.3f}")
    parts.append(f" number of skipped iterations: {at.skipped:3d}")
    parts.append(f" number of nan iterations: {at.nans:3d}")
    return " |".join(parts) + " |"


def scalars(at: Iteration) -> dict[str, float]:
    """The numbers of a line under the names of Megatron-LM's TensorBoard."""
    found: dict[str, float] = {
        "learning-rate": at.learning_rate,
        "batch-size": at.global_batch,
        "loss-scale": at.loss_scale,
        "iteration-time": at.milliseconds / 1e3,
        **at.losses,
    }
    if at.grad_norm is not None:
        found["grad-norm"] = at.grad_norm
    if at.teraflops is not None:
        found["throughput"] = at.teraflops
    return {name: value for name, value in found.items() if math.isfinite(value)}


def argument_lines(arguments: Mapping[str, object]) -> list[str]:
    """Arguments and values, in the order of their names, between two headings."""
    rows = [f"  {name} {'.' * (_WIDTH - len(name))} {value}" for name, value in arguments.items()]
    begin = "------------------------ arguments ------------------------"
    end = "-------------------- end of arguments ---------------------"
    return [begin, *sorted(rows, key=str.lower), end]


def batch_line(micro_batches: int, final: int, ramp: Sequence[int] | None) -> str:
    """The line about micro-batches, or about the ramp of the global batch.

    Args:
        micro_batches: micro-batches of a step of one replica.
        final: global batch after the ramp.
        ramp: first global batch, increment, and samples of the ramp.
    """
    if ramp is None:
        return f"setting number of micro-batches to constant {micro_batches}"
    return (
        f"will use batch size rampup starting from global batch size {ramp[0]} to global batch size {final} with batch"
        f" size increments {ramp[1]} over {ramp[2]} samples."
    )


def vocabulary_line(size: int, padded: int) -> str:
    """The line about the rows that a vocabulary is padded with."""
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parallel_lines(sizes: Mapping[str, int], seed: int | None) -> list[str]:
    """Lines about ranks and seeds.

    Args:
        sizes: number of ranks by name: ``tensor``, ``pipeline`` and others.
        seed: seed of the run, if it has one.
    """
    lines = ["> initializing torch distributed ..."]
    lines += [f"> initialized {name} model parallel with size {size}" for name, size in sizes.items()]
    return lines if seed is None else [*lines, f"> setting random seeds to {seed} ..."]


def started_lines(seconds: float, now: datetime) -> list[str]:
    """Lines about the time that the start took."""
    return [
        f"time to initialize megatron (seconds): {seconds:.3f}",
        f"[after megatron is initialized] datetime: {now:%Y-%m-%d %H:%M:%S} ",
    ]


def parameter_line(tp_rank: int, pp_rank: int, count: int) -> str:
    """The line about the parameters of a rank."""
    return f" > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {count}"


def target_lines(train: int, validation: int, test: int) -> list[str]:
    """Lines about the least number of samples to draw from each data set."""
    return [
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        f"    train:      {train}",
        f"    validation: {validation}",
        f"    test:       {test}",
    ]


def evaluated_samples(iterations: int, interval: int, batches: int, global_batch: int) -> tuple[int, int]:
    """Samples of all validations of a training, and of one test.

    Args:
        iterations: iterations of the training.
        interval: iterations between two validations.
        batches: global batches of one validation.
        global_batch: samples of a global batch.
    """
    once = batches * global_batch
    return (iterations // interval + 1) * once, once

"""Telemetry of experts: the load of every expert over all ranks, and the auxiliary losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_megatron.arguments import at_least, checked
from lightning_megatron.comm.collectives import all_reduce, all_reduce_max
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import how_to_install
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.router import Router

LOSSES = ("load_balancing_loss", "z_loss")
Counts = Mapping[int, Sequence[int]]
"""Tokens of each expert, by number of the layer."""


class ExpertTelemetry(Callback):
    """Counts of the tokens that chose each expert, as a table, a heat map and numbers, once per window of steps.

    Counts cover all ranks and all micro-batches of the window, before tokens are dropped: a row of the table sums to
    sequence length (without padding) x ``moe_router_topk`` x global batch x steps. Logged: ``load_balancing_loss`` and
    ``z_loss`` (each times its coefficient, one mean over the layers of all stages and all micro-batches) and
    ``expert_imbalance`` (tokens of the fullest expert divided by an even share, of the worst layer).

    Args:
        every_n_steps: optimizer steps of a window.
        table: True to print the table.
        directory: directory for heat maps in PNG; ``None`` for none. A TensorBoard logger gets them too. Without
            matplotlib there are no heat maps, and one warning.

    Attributes:
        counts: tokens of each expert in the last window, by number of the layer.
    """

    reads_parameters = False

    @checked(every_n_steps=at_least(1))
    def __init__(self, every_n_steps: int = 50, table: bool = True, directory: str | Path | None = None) -> None:
        self._every, self._table = every_n_steps, table
        self._directory = None if directory is None else Path(directory)
        self._seen = 0
        self._draws = True
        self.counts: dict[int, list[int]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the first window."""
        self._seen = trainer.global_step
        for _, router in _routers(pl_module):
            router.load.take(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a window, log and show the load of all ranks."""
        if trainer.global_step == self._seen or trainer.global_step % self._every:
            return
        self._seen = trainer.global_step
        strategy = trainer.strategy
        mesh = strategy.mesh if isinstance(strategy, MegatronStrategy) else ParallelMesh.single(pl_module.device)
        counts, losses = gathered_load(pl_module, mesh)
        if not counts:
            return
        self.counts = counts
        worst = max(imbalance(row) for row in counts.values())
        pl_module.log_dict(losses | {"expert_imbalance": worst}, on_step=True, on_epoch=False)
        if trainer.is_global_zero:
            self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if self._table:
            steps = f"steps {step - self._every + 1} to {step}"
            rank_zero_info(f"tokens that chose each expert, {steps}\n{text_table(self.counts)}")
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not self._draws or (self._directory is None and not boards):
            return
        try:
            figure = heat_map(self.counts, f"step {step}")
        except ImportError as error:
            self._draws = False
            rank_zero_warn(f"{type(self).__name__} goes on without heat maps: {error}")
            return
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(self._directory / f"experts-step{step:08d}.png", dpi=120)
        for board in boards:
            board.experiment.add_figure("tokens_per_expert", figure, step)


def _routers(module: LightningModule) -> Iterator[tuple[int, Router]]:
    """Routers on this rank, with the numbers of their layers; those of multi-token prediction follow the last layer."""
    shape = getattr(module, "model_shape", None)
    layers = shape.num_layers if isinstance(shape, TransformerConfig) else 0
    for position, (name, router) in enumerate((n, m) for n, m in module.named_modules() if isinstance(m, Router)):
        found = re.search(r"(layers|mtp)\.(\d+)\.", name)
        number = position if found is None else int(found.group(2)) + (layers if found.group(1) == "mtp" else 0)
        yield number, router


def gathered_load(module: LightningModule, mesh: ParallelMesh) -> tuple[dict[int, list[int]], dict[str, float]]:
    """Load of the routers of all ranks since the last call; all ranks call this together.

    Returns:
        Tokens of each expert by layer, and the mean of each loss over layers and micro-batches.
    """
    device, own = module.device, list(_routers(module))
    sizes = torch.tensor(
        [max((n + 1 for n, _ in own), default=0), max((r.load.num_experts for _, r in own), default=0)], device=device
    )
    layers, experts = all_reduce_max(sizes, mesh.world).tolist()
    if not layers:
        return {}, {}
    table = torch.zeros(layers, experts + 1, dtype=torch.int64, device=device)
    values = torch.zeros(layers, len(LOSSES), dtype=torch.float32, device=device)
    for number, router in own:
        counts, losses, forwards = router.load.take(device)
        table[number, : len(counts)] = counts
        table[number, -1] = forwards
        for column, name in enumerate(LOSSES):
            values[number, column] = losses.get(name, 0.0)
    table, values = all_reduce(table, mesh.world), all_reduce(values, mesh.world)
    found = {n: row[:-1].tolist() for n, row in enumerate(table) if row[-1]}
    return found, _means(values, table[:, -1], mesh)


def _means(values: Tensor, forwards: Tensor, mesh: ParallelMesh) -> dict[str, float]:
    """Mean of each loss over layers and micro-batches; a micro-batch's loss is the sum over its tp x cp ranks."""
    has = forwards > 0
    means = (values[has] * mesh.tp.size * mesh.cp.size / forwards[has].unsqueeze(1)).mean(0)
    return {name: float(mean) for name, mean in zip(LOSSES, means, strict=True) if mean}


def imbalance(counts: Sequence[int]) -> float:
    """Tokens of the fullest expert divided by an even share; 1 if all experts have equally many."""
    return max(counts) * len(counts) / total if (total := sum(counts)) else 1.0


def text_table(counts: Counts) -> str:
    """Table with one row per layer: tokens of each expert, their sum, and their imbalance."""
    experts = max(len(row) for row in counts.values())
    header = ["layer", *(str(e) for e in range(experts)), "tokens", "max/mean"]
    rows = [
        [str(layer), *(str(n) for n in row), str(sum(row)), f"{imbalance(row):.2f}"] for layer, row in counts.items()
    ]
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *rows)]
    return "\n".join(lines)


def heat_map(counts: Counts, title: str = "") -> Any:
    """A matplotlib figure: layers from top to bottom, experts from left to right, coloured by load over an even share.

    Raises:
        ImportError: if matplotlib is missing, with the command that installs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {how_to_install('plot')}") from error
    shares = [[n * len(row) / (sum(row) or 1) for n in row] for row in counts.values()]
    figure = Figure(figsize=(max(4.0, 0.5 * len(shares[0]) + 2), max(2.5, 0.28 * len(shares) + 1.2)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(counts)), [str(layer) for layer in counts])
    axes.set_title(title)
    figure.colorbar(image, label="tokens / even share")
    figure.tight_layout()
    return figure

"""Callback that records a training in numbers that do not depend on the layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.files.writing import writing
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.tools.parity.difference import Output


@dataclass(frozen=True)
class Sums:
    """Sums over all values that a layer has returned in a step on one rank.

    Attributes:
        squares: sum of squares.
        signed: sum of the values with random signs.
        count: number of values.
        signs: name of the random signs; sums with other signs cannot be compared.
    """

    squares: float = 0.0
    signed: float = 0.0
    count: int = 0
    signs: str = ""

    def __add__(self, other: Sums) -> Sums:
        """The sums over both; the second one names the signs."""
        squares, signed = self.squares + other.squares, self.signed + other.signed
        return Sums(squares, signed, self.count + other.count, other.signs)


class ParityRecord(Callback):
    """Writes each step's loss, norm of the gradient, norms of parameters' gradients and of layers' outputs to a file.

    The layers of a :class:`GPTModule` are its embedding and blocks; those of any other module, all submodules that
    return a tensor. Every value is read on the host at once: this is for comparisons, not for long runs.

    Args:
        file: JSON file that rank 0 writes at the end.
    """

    reads_parameters = False

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._steps: list[dict[str, Any]] = []
        self._sums: dict[str, Sums] = {}
        self._losses: list[float] = []
        self._pending: dict[str, Any] | None = None
        self._handles: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register hooks on the outputs of layers.

        Raises:
            TypeError: for another strategy.
        """
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise TypeError(f"ParityRecord needs MegatronStrategy, not {type(trainer.strategy).__name__}")
        for name, layer in _layers(pl_module):
            self._watch(name, layer, trainer.strategy.mesh)

    def _watch(self, name: str, layer: nn.Module, mesh: ParallelMesh) -> None:
        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) and output else output
            is_watched = isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 0
            if is_watched and module.training and not mesh.rng.replaying:
                new = _sums_of(found.detach().double(), mesh.dp.size)
                self._sums[name] = self._sums.get(name, Sums()) + new

        self._handles.append(layer.register_forward_hook(add))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Record outputs and gradient norms, before gradients are cleared."""
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        gradients = {name: float(norm) for name, norm in strategy.grad_norms().items()}
        sums, self._sums = all_gather_object(strategy.mesh, (tuple(strategy.mesh.tp.ranks), self._sums)), {}
        outputs = outputs_of(sums)
        names = sorted(outputs, key=_place) if isinstance(pl_module, GPTModule) else outputs  # stages hold some each
        self._pending = {
            "grad_norm": math.sqrt(math.fsum(norm**2 for norm in gradients.values())),
            "outputs": {name: asdict(outputs[name]) for name in names},
            "gradients": gradients,
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a batch; after the last batch of a step, append the step."""
        logged = trainer.callback_metrics.get("train_loss")
        self._losses.append(float(_loss_of(outputs, trainer.strategy.reduce) if logged is None else logged))
        if self._pending is not None:
            self._steps.append({"loss": math.fsum(self._losses) / len(self._losses), **self._pending})
            self._pending, self._losses = None, []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._write()

    @rank_zero_only
    def _write(self) -> None:
        part = self._file.with_name(f"{self._file.name}.part")
        with writing(part):
            part.write_text(json.dumps(self._steps, indent=1))
            part.replace(self._file)


def _loss_of(outputs: Any, reduce: Callable[[Any], Any]) -> float:
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    return float("nan") if loss is None else float(reduce(torch.as_tensor(loss).detach()))


def _layers(module: LightningModule) -> Iterator[tuple[str, nn.Module]]:
    """The layers to record, by name."""
    if not isinstance(module, GPTModule):
        yield from ((name, layer) for name, layer in module.named_modules() if name)
    elif (model := module.model) is not None:
        if model.embedding is not None:
            yield "embedding", model.embedding
        yield from ((f"layers.{number}", layer) for number, layer in model.layers.items())
        yield from ((f"mtp.{number}", layer) for number, layer in model.mtp.named_children())


def _place(name: str) -> tuple[int, int]:
    """Position of a layer in the forward of a :class:`GPTModule`, as a sort key."""
    kind, _, number = name.partition(".")
    return ("embedding", "layers", "mtp").index(kind), int(number or 0)


def _sums_of(output: Tensor, replicas: int) -> Sums:
    """Sums over all values of ``[..., H]``; a small change in any direction changes the signed one at first order.

    In a vector or matrix the last dimension may be the samples, whose positions depend on the number of replicas.
    """
    draw = torch.Generator().manual_seed(output.shape[-1])
    signs = torch.randint(2, output.shape[-1:], generator=draw).mul_(2).sub_(1).to(output)
    name = f"{output.shape[-1]}" if output.dim() > 2 else f"{output.shape[-1]} on {replicas}"
    return Sums(float(output.square().sum()), float((output * signs).sum()), output.numel(), name)


def outputs_of(ranks: Sequence[tuple[tuple[int, ...], Mapping[str, Sums]]]) -> dict[str, Output]:
    """Each layer's output over all ranks, in the order of the forward.

    Args:
        ranks: tensor-parallel group and layers of every rank.
    """
    names = {name: None for _, layers in ranks for name in layers}
    return {name: _output([(group, layers[name]) for group, layers in ranks if name in layers]) for name in names}


def _output(parts: Sequence[tuple[tuple[int, ...], Sums]]) -> Output:
    squares, signed = (sum(getattr(sums, field) for _, sums in parts) for field in ("squares", "signed"))
    count, (group, last) = sum(sums.count for _, sums in parts), parts[-1]
    rms = math.sqrt(squares / count) if count else 0.0
    means: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for ranks, sums in parts:
        size = max(1, sums.count)
        means.setdefault(ranks, []).append((math.sqrt(sums.squares / size), sums.signed / math.sqrt(size)))
    spread = max(max(column) - min(column) for rows in means.values() for column in zip(*rows, strict=True))
    return Output(rms, signed / max(1, count), count, len(group), spread, last.signs)

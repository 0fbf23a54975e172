"""Size of a model of which each rank holds a part: the first line of a run's output, and Lightning's summary."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary, ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from torch import nn

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.layout import HasBatchShape, ParallelLayout
from lightning_megatron.lightning._private import summary_options, training_data
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_specs


@runtime_checkable
class CountsFlops(Protocol):
    """A model configuration that knows its FLOPs; ``TransformerConfig`` is one."""

    def flops_per_token(self, seq_length: int) -> float:
        """FLOPs of forward and backward for one token."""
        ...


@runtime_checkable
class CountsBatchFlops(Protocol):
    """A module whose batches have more than one length; ``T5Module`` is one."""

    def batch_flops(self, batch: Any) -> float:
        """FLOPs of forward and backward for a batch."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """Parameters of a model over all ranks, each once and without padding.

    Attributes:
        sizes: number of elements, by global name.
        trained: names of parameters that require gradients.
        on_a_rank: largest number of elements on one rank, including padding.
    """

    sizes: Mapping[str, int]
    trained: frozenset[str]
    on_a_rank: int

    @classmethod
    def of(cls, module: nn.Module, mesh: ParallelMesh) -> WholeModel:
        """Count a model; all ranks call this."""
        sizes, trained = {}, set()
        for name, param, spec in named_specs(module):
            if spec.tied_with is None or spec.tied_with == name:
                sizes[name] = _product(spec.global_shape)
                trained |= {name} if param.requires_grad else set()
        held = sum(param.numel() for param in module.parameters())
        if mesh.pp.size > 1:  # the stages of one pipeline make up one model
            is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
            stages = all_gather_object(mesh, (sizes, trained, held) if is_source else ({}, set(), 0))
            sizes = {name: size for stage in stages for name, size in stage[0].items()}
            trained, held = set().union(*(stage[1] for stage in stages)), max(stage[2] for stage in stages)
        return cls(sizes, frozenset(trained), held)

    @property
    def total(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes.values())

    @property
    def trainable(self) -> int:
        """Number of elements of the parameters that require gradients."""
        return sum(self.sizes[name] for name in self.trained)

    def below(self, module: str) -> int:
        """Number of elements of the parameters of one module."""
        return sum(size for name, size in self.sizes.items() if name.startswith(f"{module}."))


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found


def introduce(trainer: Trainer, module: LightningModule, mesh: ParallelMesh) -> None:
    """Print the size of the whole model, and make Lightning's callbacks use it; all ranks call this."""
    model, layout = WholeModel.of(module, mesh), mesh.layout
    fits = trainer.state.fn == TrainerFn.FITTING
    cuts = layout.model_parallel_size > 1 or layout.ep > 1
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if cuts or isinstance(getattr(module, "config", None), CountsFlops):
        show_whole_model(callbacks, model)
    if mesh.is_distributed:
        batch_size = batch_size_of(trainer) if fits else None
        line = start_line(layout, model, batch_size, trainer.accumulate_grad_batches)
        rank_zero_info(f"{type(trainer.strategy).__name__}: {line}")
    if layout.model_parallel_size > 1 and any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
        rank_zero_warn(
            f"ThroughputMonitor counts the samples of each rank, and {layout.model_parallel_size} ranks read the same:"
            " take lightning_megatron.Throughput, or divide by that"
        )


def start_line(layout: ParallelLayout, model: WholeModel, batch_size: int | None, accumulated: int) -> str:
    """Describe the layout of a run, the size of its model and its global batch in one line.

    Args:
        layout: layout of all ranks.
        model: parameters of all ranks.
        batch_size: samples of one batch of a replica's loader; ``None`` if unknown.
        accumulated: batches of one optimizer step.
    """
    parts = [
        f"{layout_text(layout)}, {_short(model.total)} parameters",
        f"{'up to ' if layout.pp > 1 else ''}{_short(model.on_a_rank)} a rank",
    ]
    if batch_size is not None:
        factors = batch_size, layout.data_parallel_size, accumulated
        text = " x ".join(map(str, factors))
        parts.append(f"global batch {_product(factors)} = {text} (batch, dp, accumulated)")
    return ", ".join(parts)


def layout_text(layout: ParallelLayout) -> str:
    """Describe a resolved layout: ``tp 2 x pp 2 x dp 4, ep 2, sequence parallel``."""
    axes = [f"{name} {size}" for name in ("tp", "pp", "cp") if (size := getattr(layout, name)) > 1]
    notes = [" x ".join([*axes, f"dp {layout.data_parallel_size}"])]
    notes += [f"{name} {size}" for name in ("ep", "vpp") if (size := getattr(layout, name)) > 1]
    if layout.etp not in (None, layout.tp):
        notes.append(f"etp {layout.etp}")
    return ", ".join([*notes, "sequence parallel"] if layout.uses_sequence_parallel else notes)


def batch_size_of(trainer: Trainer) -> int | None:
    """Samples of one batch of the training loader, if known."""
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, HasBatchShape):
        return data.batch_shape.batch_size
    size = getattr(training_data(trainer), "batch_size", None)
    return size if isinstance(size, int) else None


def _short(count: int) -> str:
    return get_human_readable_count(count).strip()


class WholeModelSummary(ModelSummary):
    """Lightning's summary, with the parameters of the whole model beside those of a rank.

    "FLOPs" are those of one sample's forward pass, if the model's configuration knows them and there is no
    ``example_input_array``.

    Args:
        model: parameters of all ranks.
        max_depth: see Lightning's ``ModelSummary``.
        **summarize_kwargs: see Lightning's ``ModelSummary``.
    """

    def __init__(self, model: WholeModel, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth, **summarize_kwargs)
        self._model, self._depth, self._options = model, max_depth, summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary."""
        if not self._depth:
            return
        with warnings.catch_warnings():  # it does not know the size of a parameter in mixed precisions; we do
            warnings.filterwarnings("ignore", "Precision .* is not supported by the model summary")
            found = Summary(pl_module, max_depth=self._depth)
        if not trainer.is_global_zero:
            return
        model, held = self._model, found.total_parameters
        of_example = pl_module.example_input_array is not None
        flops = getattr(found, "total_flops", 0) if of_example else _forward_flops(trainer, pl_module)
        whole = [model.below(name) for name in found.layer_names]
        megabytes = sum(param.numel() * param.element_size() for param in pl_module.parameters()) / 1e6
        columns = [
            (" ", [str(number) for number in range(len(whole))]),
            ("Name", found.layer_names),
            ("Type", found.layer_types),
            ("Params", [get_human_readable_count(size) for size in whole]),
            ("Params per Device", [get_human_readable_count(size) for size in found.param_nums]),
            ("Mode", ["train" if training else "eval" for training in found.training_modes]),
        ]
        more: dict[str, Any] = {}
        if "total_flops" in inspect.signature(self.summarize).parameters:  # not in the first versions of Lightning 2.5
            counts = [sum(found.flop_counts[name].values()) for name in found.layer_names]
            columns.append(("FLOPs", [get_human_readable_count(count) if count else "?" for count in counts]))
            more["total_flops"] = flops
        if (rest := model.total - sum(whole)) > 0:
            shown = {"Name": "other params", "Type": "n/a", "Params": get_human_readable_count(rest)}
            for name, cells in columns:
                cells.append(shown.get(name, " "))
        self.summarize(
            columns,
            model.total,
            model.trainable,
            megabytes * model.total / max(held, 1),
            found.total_training_modes,
            **more,
            **self._options,
        )


class RichWholeModelSummary(WholeModelSummary, RichModelSummary):
    """The summary as a table of ``rich``."""


def show_whole_model(callbacks: list[Callback], model: WholeModel) -> None:
    """Replace Lightning's own summary, which counts the parameters of one rank; a user's subclass stays."""
    for place, callback in enumerate(callbacks):
        if isinstance(callback, ModelSummary) and type(callback) in _OURS:
            depth, options = summary_options(callback)
            callbacks[place] = _OURS[type(callback)](model, depth, **options)


_OURS: Mapping[type[Callback], type[WholeModelSummary]] = {
    ModelSummary: WholeModelSummary,
    WholeModelSummary: WholeModelSummary,  # of the fit before
    RichModelSummary: RichWholeModelSummary,
    RichWholeModelSummary: RichWholeModelSummary,
}


def _forward_flops(trainer: Trainer, module: LightningModule) -> int:
    """FLOPs of one sample with the length of the data's samples, else the model's maximum; 0 if not known."""
    config, data = getattr(module, "config", None), getattr(trainer, "datamodule", None)
    if not isinstance(config, CountsFlops):
        return 0
    of_data = data.batch_shape.seq_length if isinstance(data, HasBatchShape) else None
    length = getattr(config, "max_position_embeddings", 0) if of_data is None else of_data
    return int(config.flops_per_token(length) * length / 3)

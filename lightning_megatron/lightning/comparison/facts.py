"""Settings of a rank on which other ranks must agree.

On some of them all ranks must agree; on others only ranks that read the same samples, or that hold the same layers.
Settings that may differ from rank to rank are left out: places (devices, hosts, output directories), callbacks that
only display, and the data of replicas, which a user may have divided by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_megatron.config.layout import HasModelShape, ParallelLayout
from lightning_megatron.errors import problems_of
from lightning_megatron.lightning.build.placement import placement_of
from lightning_megatron.lightning.comparison.code import code_facts
from lightning_megatron.lightning.comparison.values import NOTHING, Facts, constructor_values, flat
from lightning_megatron.mesh import coordinate, dense_grid
from lightning_megatron.params import named_specs

_TRAINER = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "fast_dev_run", "overfit_batches", "num_nodes"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps"),
    *("reload_dataloaders_every_n_epochs", "barebones"),
)
_PLACES = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_DISPLAYS = ("ProgressBar", "ModelSummary", "DeviceStatsMonitor", "LearningRateMonitor")
_OF_ONE_RANK = re.compile(r"(^|[._])(rank|devices?|pid|host|hostname|node|port|address|verbose)$")
_FILES = re.compile(r"(^|[._])(\w*dir|\w*path|root|folder|files?|cache)(\.\d+)*$")
_VARIABLES = (
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("PT_HPU_LAZY_MODE", "PT_HPU_ENABLE_LAZY_COLLECTIVES", "PT_HPU_GPU_MIGRATION", "PT_ENABLE_INT64_SUPPORT"),
)
_NAMED_PATHS = ("last", "best", "hpc", "registry")
_OUR_VARIABLES = "LIGHTNING_MEGATRON_"


@runtime_checkable
class SaysWhatItReads(Protocol):
    """A data module that divides its samples over replicas itself, so that all ranks must have the same one."""

    def facts(self) -> Mapping[str, Any]:
        """Everything that its samples depend on, except paths."""
        ...


@dataclass
class Statement:
    """Facts of one rank.

    Attributes:
        shared: facts on which all ranks must agree.
        within: facts on which only a set of ranks must agree, by the name of the set (``"replica 0"``).
    """

    shared: Facts = field(default_factory=dict)
    within: dict[str, Facts] = field(default_factory=dict)


def start_statement(
    settings: Mapping[str, Any],
    layout: ParallelLayout,
    rank: int,
    world_size: int,
    module: LightningModule | None,
    objects: Sequence[object] = (),
) -> Statement:
    """Facts of a run that are known before its ranks communicate; a module is attached to its Trainer by now."""
    strategy = {name: value for name, value in settings.items() if name not in _PLACES}
    shared = dict(flat("strategy", strategy))
    local: Facts = {}
    if module is not None:
        attached = getattr(module.trainer, "datamodule", None)
        data = next((item for item in objects if isinstance(item, LightningDataModule)), attached)
        path = next((os.fspath(item) for item in objects if isinstance(item, str | os.PathLike)), None)
        shared |= {"trainer.resumes_from": path if path in (None, *_NAMED_PATHS) else "a path"}
        shared |= _trainer_facts(module.trainer) | _module_facts(module)
        if isinstance(data, SaysWhatItReads):
            shared |= dict(flat("data", {"class": type(data), **data.facts()}))
        elif data is not None:
            local = dict(flat("data", data)) | dict(flat("data", dict(getattr(data, "hparams", {}))))
        shared |= code_facts(module, data)
    shared |= _environment_facts()
    files = {name: value for name, value in shared.items() if _FILES.search(name)}
    shared = {name: value for name, value in shared.items() if name not in files}
    return Statement(_without_places(shared), {_replica(layout, rank, world_size): _without_places(local | files)})


def optimizer_statement(
    module: nn.Module, optimizers: Iterable[Optimizer], schedulers: Iterable[Any], stage: int
) -> Statement:
    """Facts at the start of training: global shapes of the model's parameters, optimizers and their settings."""
    shared: Facts = {}
    held: Facts = {
        f"model.{name}": f"{list(spec.global_shape)} {param.dtype}{'' if param.requires_grad else ', frozen'}"
        for name, param, spec in named_specs(module)
    }
    for number, optimizer in enumerate(optimizers):
        shared |= dict(flat(f"optimizers.{number}", {"class": type(optimizer), "defaults": optimizer.defaults}))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        held |= dict(flat(f"optimizers.{number}.param_groups", groups))
    for number, config in enumerate(schedulers):
        known = {"class": type(config.scheduler), "interval": config.interval, "frequency": config.frequency}
        shared |= dict(flat(f"schedulers.{number}", known | {"monitor": config.monitor}))
        held |= dict(flat(f"schedulers.{number}", config.scheduler))
    return Statement(_without_places(shared), {f"stage {stage}": _without_places(held)})


def loader_statement(loader: Any, stage: str, replica: int, *, may_be_empty: bool) -> Statement:
    """Facts of a loader, on which ranks that read the same samples must agree.

    Args:
        loader: any object that Lightning accepts as a loader.
        stage: stage of the Trainer: ``"val"``, ``"test"``, ...
        replica: replica of this rank.
        may_be_empty: True if some ranks may have no batches while others have.
    """
    length, samples = sized_len(loader), sized_len(getattr(loader, "dataset", None))
    shared: Facts = {"trainer.stage": stage} | ({} if may_be_empty else {f"{stage}_dataloader.is_empty": length == 0})
    held = {"length": length, "samples": samples, "batch_size": getattr(loader, "batch_size", None)}
    return Statement(shared, {f"replica {replica}": dict(flat(f"{stage}_dataloader", held))})


def _replica(layout: ParallelLayout, rank: int, world_size: int) -> str:
    if problems_of(layout.resolve, world_size):
        return "a layout that cannot be"
    layout = layout.resolve(world_size)
    return f"replica {coordinate(dense_grid(layout), rank)['dp']} of {layout}"


def _trainer_facts(trainer: Trainer) -> Facts:
    facts = dict(flat("trainer", {name: getattr(trainer, name, None) for name in _TRAINER}))
    facts["trainer.function"] = str(trainer.state.fn)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    compared = [callback for callback in callbacks if _takes_part(callback)]
    facts["trainer.callbacks"] = str(sorted(type(callback).__name__ for callback in compared))
    seen: dict[str, int] = {}
    for callback in compared:
        name = type(callback).__name__
        seen[name] = seen.get(name, -1) + 1
        told = flat(f"trainer.callbacks.{name}" + (f".{seen[name]}" if seen[name] else ""), callback)
        facts |= {key: value for key, value in told if not _FILES.search(key)}  # rank 0 decides where files go
    return facts


def _takes_part(callback: Callback) -> bool:
    """True for callbacks of Lightning and of this package that change a run; others may only print on one rank."""
    ancestry = [kind for kind in type(callback).__mro__ if kind is not Callback]
    known = any(f"{kind.__module__}.".startswith(("lightning.", "lightning_megatron.")) for kind in ancestry)
    return known and not any(kind.__name__ in _DISPLAYS for kind in ancestry)


def _module_facts(module: LightningModule) -> Facts:
    shape = module.model_shape if isinstance(module, HasModelShape) else None
    facts = {} if shape is None else dict(flat("config", shape))
    facts |= dict(
        flat("module", {"class": type(module), **constructor_values(module), "hparams": dict(module.hparams)})
    )
    if placement_of(module) is None:  # no Trainer has sharded it yet
        facts |= {f"module.{name}": _shape_of(param) for name, param in module.named_parameters()}
    return facts


def _shape_of(param: nn.Parameter) -> str:
    return "lazy" if is_lazy(param) else f"{list(param.shape)} {param.dtype}"


def _environment_facts() -> Facts:
    ours = [name for name in os.environ if name.startswith(_OUR_VARIABLES)]
    facts: Facts = {f"environment.{name}": os.environ.get(name, NOTHING) for name in (*_VARIABLES, *ours)}
    facts["torch.default_dtype"] = str(torch.get_default_dtype())
    facts["torch.float32_matmul_precision"] = torch.get_float32_matmul_precision()
    facts["torch.deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    return facts


def _without_places(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if not _OF_ONE_RANK.search(name)}

"""Lightning features that this strategy does not support, each with the alternative."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_megatron import device as devices
from lightning_megatron.arguments import Rules, argument_problems, at_least
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import Problem, nearest_names

# Names of classes among the callback's bases: not every supported Lightning has all of these classes.
_OF_WHOLE_MODELS: Mapping[str, tuple[str, str]] = {
    "ModelPruning": ("prunes whole tensors", "chooses tensors"),
    "StochasticWeightAveraging": ("averages whole models", "copies the module"),
}
"""Work of a callback on whole models, and its first step, which comes before ``configure_model``."""

_FINDER = (
    "it tries batches until one does not fit, with data parallelism alone (tp=pp=cp=ep=1) and without micro_batch_size:"
    " inside a layer, ranks that have memory left would wait for the one that has not. Ask `lightning-megatron plan`"
    " for a batch size"
)
_FINDER_OF_ONE_DEVICE = "it takes one device: give MegatronBatchSizeFinder, with the same arguments, for several"
_ALONE = "use data parallelism alone (tp=pp=cp=ep=1)"


@runtime_checkable
class ChecksJob(Protocol):
    """A callback that checks, before a process is started, the job that it is part of."""

    def job_problems(self, callbacks: Sequence[Callback], modules: Sequence[LightningModule]) -> list[Problem]:
        """Faults of the Trainer's other callbacks, and of the module if it is known."""
        ...


def callback_problems(
    callbacks: Sequence[Callback],
    layout: ParallelLayout,
    micro_batch_size: int | None,
    modules: Sequence[LightningModule],
) -> list[Problem]:
    """Callbacks that cannot work under a layout or with micro-batches, or with the user's module if it is known."""
    found = []
    for callback in callbacks:
        ancestry = {base.__name__ for base in type(callback).__mro__}
        for known in _OF_WHOLE_MODELS.keys() & ancestry:
            found += _whole_model_problems(type(callback).__name__, *_OF_WHOLE_MODELS[known], layout, modules)
        if "BatchSizeFinder" in ancestry:
            found += _finder_problems(type(callback).__name__, layout, micro_batch_size, ancestry)
        if isinstance(callback, ChecksJob):
            found += callback.job_problems(callbacks, modules)
    return found


_TRAINER_RULES: Rules = {"accumulate_grad_batches": at_least(1), "gradient_clip_val": at_least(0.0)}


def trainer_problems(trainer: Trainer) -> list[Problem]:
    """Arguments of the Trainer that Lightning does not check, and that would divide by zero or do nothing."""
    values = {name: getattr(trainer, name) for name in _TRAINER_RULES}
    hints = {"accumulate_grad_batches": int, "gradient_clip_val": float | None}
    return argument_problems(values, hints, _TRAINER_RULES, {"accumulate_grad_batches": 1, "gradient_clip_val": None})


def _finder_problems(
    name: str, layout: ParallelLayout, micro_batch_size: int | None, ancestry: Set[str]
) -> list[Problem]:
    if not layout.is_whole or micro_batch_size is not None:
        return [Problem("callbacks", name, _FINDER)]
    if layout.dp in (None, 1) or "MegatronBatchSizeFinder" in ancestry:
        return []
    return [Problem("callbacks", name, _FINDER_OF_ONE_DEVICE)]


def _whole_model_problems(
    name: str, does: str, begins: str, layout: ParallelLayout, modules: Sequence[LightningModule]
) -> list[Problem]:
    if not layout.is_whole:
        return [Problem("callbacks", name, f"it {does}, and here ranks hold parts: {_ALONE}")]
    if any(is_overridden("configure_model", module) for module in modules):
        before = "before configure_model has built the model: build it in __init__, or leave it out"
        return [Problem("callbacks", name, f"it {begins} {before}")]
    return []


def plugin_problems(
    checkpoint_io: CheckpointIO, layer_sync: LayerSync | None, layout: ParallelLayout, device: torch.device
) -> list[Problem]:
    """Plugins and flags of the Trainer that this strategy does not support."""
    found = []
    if type(checkpoint_io) is not TorchCheckpointIO:  # TorchCheckpointIO is Lightning's default, and is never called
        found.append(checkpoint_io_problem("plugins", checkpoint_io))
    if layer_sync is not None and not layout.is_whole:
        reason = (
            f"ranks of a model do not hold the same batch norms: {_ALONE}, or a norm over features (LayerNorm, RMSNorm)"
        )
        found.append(Problem("sync_batchnorm", True, reason, (False,)))
    elif isinstance(layer_sync, TorchSyncBatchNorm) and not devices.kind_of(device).supports_sync_batchnorm:
        reason = f"torch's SyncBatchNorm does not compute on {device.type}, under DDP neither"
        found.append(Problem("sync_batchnorm", True, reason, (False,)))
    return found


def compile_problems(objects: Iterable[object], device: torch.device, backend: str | None) -> list[Problem]:
    """Modules without a list of parts to compile, unknown backends or tools, and devices that compile by themselves.

    Args:
        objects: objects handed to the Trainer.
        device: device of this process.
        backend: backend of ``torch.compile``.
    """
    if devices.is_lazy(device):
        return [Problem("compile", True, "PT_HPU_LAZY_MODE=1 is set, and lazy mode compiles by itself", (False,))]
    reason = "the module has no method compile_blocks(backend): give it one, or compile in its configure_model"
    modules = (item for item in objects if isinstance(item, LightningModule))
    found = [Problem("compile", True, reason, (False,)) for m in modules if not hasattr(m, "compile_blocks")]
    known = [*torch.compiler.list_backends(exclude_tags=()), devices.compile_backend(device)]
    if backend is not None and backend not in known:
        found.append(Problem("compile", backend, "no backend of torch.compile", nearest_names(backend, known)))
    elif backend is not None and (missing := devices.compiler_lacks(device, backend)) is not None:
        found.append(Problem("compile", backend, f"on {device.type} it needs {missing}", (False,)))
    return found


def checkpoint_io_problem(argument: str, checkpoint_io: CheckpointIO) -> Problem:
    """The fault of a plugin that writes checkpoints.

    Args:
        argument: name of the argument that it was given as.
        checkpoint_io: the plugin.
    """
    advice = "leave it out"
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        advice = "to save in the background set async_save=True of the strategy"
    reason = f"checkpoints are sharded directories that all ranks write together: {advice}"
    return Problem(argument, type(checkpoint_io).__name__, reason)


def module_problems(module: LightningModule, layout: ParallelLayout, trainer: Trainer | None) -> list[Problem]:
    """Features of a module that cannot work; Lightning itself refuses a module compiled as a whole."""
    return _context_problems(module, layout.cp) + _pipeline_problems(module, layout.pp, trainer)


def _context_problems(module: LightningModule, cp: int) -> list[Problem]:
    """The fault of a module that does not split sequences: attention would silently take whole ones for shards."""
    if cp == 1 or getattr(module, "splits_context", False):
        return []
    reason = (
        f"{type(module).__name__} does not say that each rank takes its part of a sequence: build it like GPTModel,"
        " which calls split_context, and set splits_context = True, or use cp=1"
    )
    return [Problem("cp", cp, reason, (1,))]


def _pipeline_problems(module: LightningModule, pp: int, trainer: Trainer | None) -> list[Problem]:
    if pp == 1:
        return []
    found = []
    if not hasattr(module, "hidden_shape"):
        reason = (
            f"{type(module).__name__} has no method hidden_shape(batch), and pipeline stages must know the shape of"
            " what they receive: build it like GPTModule, which builds what strategy.stages() says, or use pp=1"
        )
        found.append(Problem("pp", pp, reason, (1,)))
    fits = trainer is None or trainer.state.fn == TrainerFn.FITTING
    if fits and not module.automatic_optimization:
        reason = "a pipeline runs forward and backward of all micro-batches itself: leave it True, or use pp=1"
        found.append(Problem("automatic_optimization", False, reason, (True,)))
    return found

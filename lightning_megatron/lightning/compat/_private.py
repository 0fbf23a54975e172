"""The table of every private name of another library that this package touches, and functions that hide most of them.

``tests/trainer/strategy/test_private.py`` reads the table. It fails if a name has vanished from its library, or if the
package touches a private name that the table lacks.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.comm.rendezvous import Store

__all__ = [
    "CompilerCounts",
    "Launcher",
    "MockOptimizer",
    "Recompilation",
    "SubprocessScriptLauncher",
    "TunerExit",
    "agree_to_validate",
    "asks_for_upload",
    "checkpoint_folder",
    "compiler_counts",
    "default_store",
    "drop_signal_broadcast",
    "has_hooks",
    "injects_samplers",
    "logs_graph",
    "mark_updated",
    "recompilations",
    "set_shown_value",
    "shown_value",
    "steps_between_saves",
    "summary_depth",
    "trainer_argument",
    "trainer_of",
    "training_data",
    "with_other_path",
]

CHECKED: Mapping[str, Sequence[str]] = {
    "lightning": ("2.5.0.post0", "2.5.5", "2.6.6"),
    "torchmetrics": ("1.9.0",),
    "torch": ("2.13.0",),
    "python": ("3.10", "3.11"),
}
"""Versions of each library in which the names below were found."""


@dataclass(frozen=True)
class PrivateName:
    """A name that its library may change without notice.

    Attributes:
        name: attribute, function or module.
        owner: dotted path of the class or module that has it, which begins with its library.
        users: modules of this package that touch it, as paths below the package.
        reason: purpose of its use.
    """

    name: str
    owner: str
    users: tuple[str, ...]
    reason: str


_HERE = "lightning/compat/_private.py"
_REHEARSAL = "tools/rehearsal/torch_private.py"
_STRATEGY = "lightning.pytorch.strategies.Strategy"
_PARALLEL = "lightning.pytorch.strategies.ParallelStrategy"
_MODULE = "lightning.pytorch.LightningModule"
_TRAINING_LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_METRIC = "torchmetrics.Metric"
_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector"

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    # The strategy, which Lightning's connector fills and reads by these names
    PrivateName("_accelerator", _STRATEGY, ("lightning/strategy/megatron.py",), "an accelerator given to a strategy"),
    PrivateName("_precision_plugin", _STRATEGY, ("lightning/strategy/hooks.py",), "a precision that comes with one"),
    PrivateName("_launcher", _STRATEGY, ("lightning/strategy/megatron.py",), "attribute behind `strategy.launcher`"),
    PrivateName("_configure_launcher", _STRATEGY, ("lightning/strategy/megatron.py",), "hook that makes the launcher"),
    PrivateName(
        "_layer_sync", _PARALLEL, ("lightning/strategy/start.py", "lightning/strategy/hooks.py"), "sync_batchnorm=True"
    ),
    # The launcher
    PrivateName("_Launcher", f"{_LAUNCHERS}.launcher", (_HERE,), "base class of launchers"),
    PrivateName("_SubprocessScriptLauncher", f"{_LAUNCHERS}.subprocess_script", (_HERE,), "base class of ours"),
    PrivateName(
        "_call_children_scripts",
        f"{_LAUNCHERS}.subprocess_script._SubprocessScriptLauncher",
        ("lightning/launch/launcher.py",),
        "hook that starts the processes",
    ),
    # The Trainer, modules, callbacks, loggers
    PrivateName("_accelerator_connector", "lightning.pytorch.Trainer", (_HERE,), "use_distributed_sampler"),
    PrivateName("_check_config_and_set_final_flags", _CONNECTOR, (), "reads `strategy._accelerator`"),
    PrivateName("_val_check_time_interval", _TRAINING_LOOP, (_HERE,), "val_check_interval as a time, from 2.6 on"),
    PrivateName("_last_val_time", _TRAINING_LOOP, (_HERE,), "the clock of each rank for it, from 2.6 on"),
    PrivateName("_broadcast_sigterm_tensor", _TRAINING_LOOP, (_HERE,), "a wait for the device, from 2.6 on"),
    PrivateName("_data_source", "lightning.pytorch.loops.fit_loop._FitLoop", (_HERE,), "loaders that fit was given"),
    PrivateName(
        "_trainer",
        _MODULE,
        (_HERE, "lightning/modules/base_module.py", "lightning/modules/decoder.py"),
        "the Trainer, or None",
    ),
    PrivateName("_fabric", _MODULE, ("lightning/modules/base_module.py",), "modules that Fabric runs"),
    PrivateName(
        "_after_closure",
        "lightning.pytorch.plugins.Precision",
        ("lightning/step/precision.py",),
        "hooks and clipping between backward and step",
    ),
    PrivateName("_MockOptimizer", "lightning.pytorch.core.optimizer", (_HERE,), "configure_optimizers returned None"),
    PrivateName("_every_n_train_steps", "lightning.pytorch.callbacks.ModelCheckpoint", (_HERE,), "its argument"),
    PrivateName(
        "_ModelCheckpoint__resolve_ckpt_dir", "lightning.pytorch.callbacks.ModelCheckpoint", (_HERE,), "its folder"
    ),
    PrivateName("_max_depth", "lightning.pytorch.callbacks.ModelSummary", (_HERE,), "its argument"),
    PrivateName("_log_model", "lightning.pytorch.loggers.WandbLogger", (_HERE,), "loggers that upload"),
    PrivateName("_log_graph", "lightning.pytorch.loggers.TensorBoardLogger", (_HERE,), "its argument"),
    PrivateName(
        "_TunerExitException", "lightning.pytorch.utilities.exceptions", (_HERE,), "the end of a run that only tunes"
    ),
    # Metrics
    PrivateName("_forward_cache", _METRIC, (_HERE,), "the value of a step that a metric shows"),
    PrivateName("_update_count", _METRIC, (_HERE,), "no warning of a metric that another stage has updated"),
    # torch and Python
    PrivateName("_get_default_store", "torch.distributed.distributed_c10d", (_HERE,), "the ranks' store"),
    PrivateName(
        "_version",
        "torch.Tensor",
        (
            "checkpoint/background/host_copy.py",
            "layers/fp8_linear.py",
            "lightning/step/optimizers.py",
            "lightning/strategy/checkpoints.py",
            "optim/buffers/slot.py",
            "optim/buffers/edits.py",
            "optim/buffers/kept_values.py",
        ),
        "weights and optimizer state that a script has written between steps",
    ),
    PrivateName("_linear_pointwise", "torch.ops.mkldnn", ("ops/cpu/onednn.py",), "fp32 products by oneDNN"),
    PrivateName(
        "_softmax_backward_data",
        "torch.ops.aten",
        ("ops/cpu/attention_blocks.py",),
        "a softmax backward in one pass",
    ),
    *(
        PrivateName(name, "torch.ops.aten", ("ops/flash/flash_attention.py",), "flash with its log-sum-exp and windows")
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    ),
    PrivateName("_index_put_impl_", "torch.ops.aten", ("ops/accumulate.py",), "rows added in one order, with no wait"),
    PrivateName("_backward_hooks", "torch.Tensor", (_HERE,), "hooks on a parameter"),
    PrivateName("_post_accumulate_grad_hooks", "torch.Tensor", (_HERE,), "hooks on a parameter"),
    PrivateName(
        "_schema",
        "torch.ops.aten.relu.default",
        ("ops/mixture_of_experts.py", _REHEARSAL),
        "arguments of an operator",
    ),
    PrivateName("_C", "torch", ("rng.py",), "the module that says if a backward is running"),
    PrivateName("_current_graph_task_id", "torch._C", ("rng.py",), "a forward inside of a backward"),
    PrivateName("_python_dispatch", "torch.utils", ("testing/activations.py", _REHEARSAL), "TorchDispatchMode"),
    PrivateName("_subclasses", "torch", (_REHEARSAL,), "fake tensors"),
    PrivateName("_internal", "torch.testing", (_REHEARSAL,), "process groups that send nothing"),
    PrivateName("_local_scalar_dense", "torch.ops.aten", (_REHEARSAL,), "the operator behind `tensor.item()`"),
    PrivateName(
        "_StorageInfo",
        "torch.distributed.checkpoint.filesystem",
        ("checkpoint/dcp/box_writer.py",),
        "place of an item, as dcp.load looks for it",
    ),
    PrivateName("_dynamo", "torch", (_HERE,), "graphs, breaks and recompilations of torch.compile"),
    PrivateName("_is_protocol", "typing.Protocol", ("arguments.py",), "annotations that are protocols"),
    PrivateName("_value2member_map_", "enum.Enum", ("recorder/reading.py",), "known numbers of an Enum"),
)
"""All private names. Where ``users`` is empty, Lightning calls this package from there, and a test covers it."""


def trainer_argument(argument: str) -> Any:
    """An argument of the Trainer that is being constructed; ``None`` if none is being constructed."""
    # Read off the stack, since Lightning has no public way: its connector reads a strategy's accelerator, does not tell
    # it the user's choice, raises if there are both, and does not record if "cpu" was named by the user or by "auto".
    # The choices of "auto" are fixed in Lightning: AcceleratorRegistry cannot add to them.
    constructor = inspect.unwrap(Trainer.__init__).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not constructor:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(argument)


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The Trainer of a module; ``None`` for a module without one, where ``module.trainer`` raises."""
    return None if module is None else module._trainer


def injects_samplers(module: LightningModule | None) -> bool:
    """True if the Trainer of a module may replace samplers: its ``use_distributed_sampler``."""
    return module is not None and module.trainer._accelerator_connector.use_distributed_sampler


def drop_signal_broadcast(trainer: Trainer) -> None:
    """Keep Lightning from broadcasting rank 0's flag of a SIGTERM before each batch: every host waits for it."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    pass


def steps_between_saves(callback: ModelCheckpoint) -> int:
    """The ``every_n_train_steps`` of a callback; 0 for none."""
    return callback._every_n_train_steps


def checkpoint_folder(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """The folder of a callback: its ``dirpath``, or the one that the Trainer's logger gives."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def with_other_path(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> inspect.BoundArguments:
    """The arguments of the function that ``fit`` launches, with the path of its checkpoint changed."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    bound.arguments["ckpt_path"] = change(bound.arguments["ckpt_path"])
    return bound


def training_data(trainer: Trainer) -> Any:
    """The training data that ``fit`` was given: loaders, or the module or data module that makes them."""
    return trainer.fit_loop._data_source.instance


def agree_to_validate(trainer: Trainer, since: float) -> float:
    """Let rank 0's clock alone decide on a validation, if ``val_check_interval`` is a time; all ranks call this.

    Lightning subtracts ``_last_val_time`` from each rank's clock after each batch: -inf means now, inf means not yet.

    Args:
        trainer: Trainer that is fitting.
        since: result of this function for the previous batch.

    Returns:
        Start of the training, or end of the last validation.
    """
    interval = getattr(trainer, "_val_check_time_interval", None)
    if interval is not None:
        last: float = trainer._last_val_time  # type: ignore[attr-defined]
        since = last if math.isfinite(last) else since
        is_due = trainer.strategy.broadcast(time.monotonic() - since >= interval)
        trainer._last_val_time = -math.inf if is_due else math.inf  # type: ignore[attr-defined]
    return since


def asks_for_upload(logger: Any) -> bool:
    """True if a logger was made with ``log_model=True`` or ``"all"``; Lightning's loggers share this attribute."""
    return getattr(logger, "_log_model", False) in (True, "all")


def logs_graph(logger: Any) -> bool:
    """True if a logger was made with ``log_graph=True``."""
    return bool(getattr(logger, "_log_graph", False))


def summary_depth(callback: ModelSummary) -> int:
    """The argument ``max_depth`` of a model summary."""
    return callback._max_depth


def shown_value(metric: Metric) -> Any:
    """The value that ``metric(...)`` last returned, which Lightning shows for a step."""
    return metric._forward_cache


def set_shown_value(metric: Metric, value: Tensor | None) -> None:
    """Set the value that Lightning shows for a step of a metric; ``None`` for no value."""
    metric._forward_cache = value  # type: ignore[assignment]  # torchmetrics declares None


def mark_updated(metric: Metric) -> None:
    """Count one update of a metric without a sample, so that ``compute`` does not warn."""
    metric._update_count += 1


@dataclass(frozen=True)
class CompilerCounts:
    """Counts of ``torch.compile`` in this process.

    Attributes:
        graphs: graphs that it has made.
        breaks: number of graph breaks by reason.
    """

    graphs: int = 0
    breaks: Mapping[str, int] = field(default_factory=dict)

    def since(self, before: CompilerCounts) -> CompilerCounts:
        """The counts that were added after an earlier count."""
        breaks = {reason: number - before.breaks.get(reason, 0) for reason, number in self.breaks.items()}
        return CompilerCounts(self.graphs - before.graphs, {why: number for why, number in breaks.items() if number})


def compiler_counts() -> CompilerCounts:
    """Counts since the process began, or since they were last cleared."""
    counters = torch._dynamo.utils.counters
    return CompilerCounts(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


@dataclass(frozen=True)
class Recompilation:
    """A function that ``torch.compile`` has compiled once more.

    Attributes:
        number: torch's id of the compilation, such as ``"3/1"``, and its start time.
        function: name of the function.
        reason: the first check of an earlier graph that did not hold, in torch's words.
    """

    number: str
    function: str
    reason: str


def recompilations() -> list[Recompilation]:
    """The newest recompilations of this process; torch keeps its newest 64 compilations, also after this call."""
    found = torch._dynamo.utils.get_compilation_metrics()
    return [
        Recompilation(f"{each.compile_id} {getattr(each, 'start_time', None)}", str(each.co_name), reason)
        for each in found
        if (reason := _reason(each))
    ]


def _reason(metrics: Any) -> str | None:
    """Reason for which torch has compiled a function again; ``None`` for the first time."""
    if hasattr(metrics, "recompile_reason"):
        reason: str | None = metrics.recompile_reason
        return reason
    # The second number of an id counts the graphs of a function.
    is_first = metrics.co_name is None or metrics.compile_id.endswith("/0")
    return None if is_first else f"torch {torch.__version__} does not say why"


def has_hooks(param: Tensor) -> bool:
    """True if a parameter has a hook on its gradient besides the one of its bucket."""
    # A hook that is removed leaves an empty dictionary behind.
    return bool(param._backward_hooks) or len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) > 1


def default_store() -> Store:
    """Rendezvous store of the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store

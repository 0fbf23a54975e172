"""Start of a run: checks, comparisons of ranks, process groups, and the strategy's own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_megatron import device as devices
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.lightning.build.placement import Placement, placement_of, store_placement
from lightning_megatron.lightning.comparison.compare import RankComparison
from lightning_megatron.lightning.comparison.facts import (
    Statement,
    loader_statement,
    optimizer_statement,
    start_statement,
)
from lightning_megatron.lightning.comparison.places import PlaceProbe, places_of
from lightning_megatron.lightning.compat.skipped_hooks import skip, skip_missing
from lightning_megatron.lightning.environments.agreement import rank_problems
from lightning_megatron.lightning.monitoring.example_input import ExampleInput
from lightning_megatron.lightning.monitoring.hook_marks import HookMarks
from lightning_megatron.lightning.monitoring.late_bar import LateBar
from lightning_megatron.lightning.step.metric_sync import MetricWatch
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.lightning.step.watchers import averages_parameters
from lightning_megatron.lightning.stopping.worker_signals import let_workers_outlive_signals
from lightning_megatron.lightning.strategy.checkpoints import RunCheckpoints
from lightning_megatron.lightning.strategy.kill_switch import BeforeNextStep, KillSwitch
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.lightning.strategy.recording import ActionRecord
from lightning_megatron.lightning.strategy.trained_parameters import (
    AfterAverages,
    BeforeAverages,
    HookGradients,
    TrainedParameters,
)
from lightning_megatron.lightning.streams import EvaluationWatch, TrainingWatch
from lightning_megatron.lightning.streams.evaluation import may_stay_away
from lightning_megatron.lightning.validation.accelerators import accelerator_problems
from lightning_megatron.lightning.validation.features import compile_problems, plugin_problems
from lightning_megatron.lightning.validation.job import Job, backend_problems, document_problems, job_problems
from lightning_megatron.lightning.validation.memory import MemoryForecast, MemoryLimit, limit_of
from lightning_megatron.lightning.validation.nodes import node_problems
from lightning_megatron.optim.shown_main_values import ShownMainValues
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.stage import StageBoundary

ORDER: tuple[type[Callback], ...] = (
    *(BeforeNextStep, TrainingWatch, EvaluationWatch, HookGradients, MetricWatch, LateBar, ExampleInput),
    *(Callback, KillSwitch, Checkpoint, HookMarks),
)
"""Order of callbacks during a run: ``Callback`` stands for the user's, ``Checkpoint`` for those that save."""


class RankStart:
    """Steps of starting a run, each of which all ranks take together.

    Differences between ranks in settings, models, data or code are found before the first step: every ``compare``
    raises a ``ConfigError`` on all ranks, with every difference.

    Attributes:
        before: placement of the model by an earlier Trainer; ``None`` without one.
        forecast: forecast of the run's memory, since :meth:`check`.
    """

    def __init__(
        self,
        ranks: JobRanks,
        record: ActionRecord,
        params: TrainedParameters,
        checkpoints: RunCheckpoints,
    ) -> None:
        self._ranks, self._job, self._record, self._params = ranks, ranks.job, record, params
        self._checkpoints, self._folders = checkpoints, checkpoints.folders
        self._comparison: RankComparison | None = None
        self._knows_restoring, self._is_placed = False, True
        self.before: Placement | None = None
        self.forecast = MemoryForecast()

    # Checks, before any process is started

    def environment_problems(self) -> list[Problem]:
        """Faults of the ranks, devices and plugins that the Trainer has chosen."""
        ranks, own, layout = self._ranks, self._ranks.strategy, self._job.layout
        assert own.parallel_devices is not None
        device = own.parallel_devices[0]
        found = rank_problems(own.cluster_environment, ranks.num_nodes, ranks.num_local)
        found += layout.problems(world_size=ranks.num_nodes * ranks.num_local)
        found += plugin_problems(own.checkpoint_io, own._layer_sync, layout, device)
        found += ranks.ops.problems() + backend_problems(self._job.process_group_backend, device)
        found += accelerator_problems(device)
        found += node_problems(layout, ranks.num_nodes, ranks.num_local, device)
        return found + MegatronPrecision.of(own.precision_plugin).problems(devices.kind_of(device), layout)

    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Raise every fault that is known before training, see ``MegatronStrategy.check``, and predict memory."""
        ranks, own, layout = self._ranks, self._ranks.strategy, self._job.layout
        found = self.environment_problems()
        layout = layout if found else layout.resolve(ranks.num_nodes * ranks.num_local)
        if self._job.compile:
            found += compile_problems(objects, own.root_device, ranks.compile_backend)
        found += document_problems(objects, own.root_device)
        dtype = MegatronPrecision.of(own.precision_plugin).mode.params
        opened = [self._checkpoints.open_once(item) for item in objects]
        job = Job(self._job, layout, ranks.ops, dtype, opened, trainer, self._memory_limit())
        raise_if_any(found + job_problems(job))
        self.forecast = job.forecast

    def _memory_limit(self) -> MemoryLimit:
        """Memory that tensors of a rank may take, as far as this process can know it."""
        device = self._ranks.strategy.root_device
        size = devices.memory_of_device(device, is_taken=self._ranks.device_is_taken)
        is_known = size is not None or device.type == devices.CPU.type
        return limit_of(self._job, size, devices.device_name(device) if is_known else "")

    # Comparisons

    def compare(self, trainer: Trainer | None, *objects: object) -> None:
        """Compare settings, then folders, through the store: groups need the layout, which may differ, too."""
        ranks, own = self._ranks, self._ranks.strategy
        if ranks.num_nodes * ranks.num_local == 1:
            return
        if own.lightning_module is not None and trainer is not None:
            own.lightning_module.trainer = trainer  # Lightning's next step
        ranks.take_device()
        store, place = self._record.meet(ranks.meet), (own.global_rank, own.world_size)
        if store is not None:
            self._record.begin_run(store)
            self._knows_restoring, may_differ = False, self._job.may_differ or ()
            self._comparison = RankComparison(store, *place, may_differ)
            given = self._job.arguments, self._job.layout, *place, own.lightning_module, objects
            self._compare(start_statement(*given))
            PlaceProbe(store, *place, may_differ).compare(places_of(trainer, objects))

    def compare_once(self) -> None:
        """Compare settings, unless a launcher has called :meth:`compare`."""
        if self._comparison is None:
            self.compare(None)

    def compare_optimizers(self, configure: Callable[[], None]) -> None:
        """Let the user configure optimizers, then compare them, and the model, which is built by now.

        Raises:
            ConfigError: on all ranks, if a pipeline stage trains no parameter, and torch makes no optimizer for it.
        """
        own, mesh, fault = self._ranks.strategy, self._ranks.mesh, ""
        try:
            configure()
        except ValueError as error:
            trains = any(param.requires_grad for param in self._ranks.module.parameters())
            if isinstance(error, ConfigError) or mesh.pp.size == 1 or trains:
                raise
            fault = str(error)
        if self._comparison is None:
            return
        if mesh.pp.size > 1:
            groups = [group["params"] for optimizer in own.optimizers for group in optimizer.param_groups]
            stages = all_gather_object(mesh, (mesh.pp.rank, fault, bool(groups) and not any(groups)))
            raise_if_any(_untrained_problems(sorted(set(stages))))
        self._compare(optimizer_statement(self._ranks.module, own.optimizers, own.lr_scheduler_configs, mesh.pp.rank))

    def compare_loader(self, dataloader: object) -> None:
        """Compare length, samples and batch size of a loader, before Lightning asks all ranks for its length."""
        module = self._ranks.strategy.lightning_module
        if self._comparison is not None and module is not None:
            mesh = self._ranks.mesh
            stage = module.trainer.state.stage
            given = "val" if stage is None else stage.dataloader_prefix or "val"
            may_be_empty = may_stay_away(module.trainer, mesh.layout)
            self._compare(loader_statement(dataloader, given, mesh.dp.rank, may_be_empty=may_be_empty))

    def compare_restoring(self, restores: bool) -> None:
        """Compare, once a run, if ranks load a checkpoint; called with False after the time for loading."""
        if self._comparison is not None and not self._knows_restoring:
            self._knows_restoring = True
            self._compare(Statement({"trainer.ckpt_path": "a checkpoint" if restores else None}))

    def _compare(self, statement: Statement) -> None:
        assert self._comparison is not None
        Call(self._ranks.recorder.main, Kind.RENDEZVOUS, "world", 0).run(self._comparison.compare, statement)

    # Process groups

    def find_last(self, trainer: Trainer, ckpt_path: Any) -> Any:
        """The path that a fit resumes from, see :meth:`SaveFolders.find_last`, or ``ckpt_path`` itself."""
        if not self._folders.begin_fit(trainer, ckpt_path):
            return ckpt_path
        self._ranks.module.trainer = trainer  # Lightning's next step
        self.connect()
        return self._folders.find_last(trainer, ckpt_path)

    def connect(self) -> None:
        """Create the process groups unless they exist, or reuse an earlier Trainer's with this layout and device."""
        ranks = self._ranks
        if not ranks.is_connected:
            ranks.take_device()
            self.before = before = placement_of(ranks.strategy.lightning_module)
            if before is not None and before.can_reuse_mesh(ranks.layout, ranks.strategy.root_device):
                ranks.mesh = before.mesh
                ranks.register_end()
            else:
                ranks.mesh = self._record.connect(ranks.create_mesh)
            ranks.connect_groups()
            ranks.agree_on_seed()
        ranks.draw_alike()
        self._is_placed = False

    def place(self, boundary: StageBoundary | None) -> bool:
        """Take over the model from the previous run, in the first call of a run; True for that call."""
        is_first, self._is_placed = not self._is_placed, True
        if is_first:
            module, accelerator = self._ranks.module, self._ranks.strategy.accelerator
            assert accelerator is not None
            store_placement(module, Placement(self._ranks.mesh, boundary), self.before)
            accelerator.setup(module.trainer)
            precision = self._ranks.strategy.precision_plugin
            assert isinstance(precision, MegatronPrecision)
            precision.device = self._ranks.strategy.root_device
            self._params.release()
            self._checkpoints.open(module.trainer)
        return is_first

    def end_run(self) -> None:
        """Let the next run compare again."""
        self._comparison = None


class OwnCallbacks:
    """Callbacks that the strategy adds to the Trainer's, and all kill switches, including the user's."""

    def __init__(self, save_on_signal: bool, layout: ParallelLayout) -> None:
        self._save_on_signal, self._layout = save_on_signal, layout
        self._trainer: Trainer | None = None
        self._added: list[Callback] = []

    @property
    def _present(self) -> list[Callback]:
        present: list[Callback] = [] if self._trainer is None else self._trainer.callbacks  # type: ignore[attr-defined]
        return present

    @property
    def _switches(self) -> list[KillSwitch]:
        return [callback for callback in self._present if isinstance(callback, KillSwitch)]

    def begin(self, trainer: Trainer | None) -> None:
        """Begin a run; with ``save_on_signal``, add a ``KillSwitch`` if there is none."""
        self._trainer = trainer
        if self._save_on_signal and not self._switches:
            self.add(switch := KillSwitch(always_save=False))
            skip(switch, "on_train_batch_start")  # BeforeNextStep has done it
        self.add(*map(BeforeNextStep, self._switches), ExampleInput(self._layout))

    def add(self, *callbacks: Callback) -> None:
        """Insert callbacks into those of the Trainer, in :data:`ORDER`; no action without a Trainer."""
        if self._trainer is None:
            return
        present = self._present
        for callback in callbacks:
            skip_missing(callback)
            self._added.append(callback)
            place = self._place(callback)
            later = (number for number, other in enumerate(present) if self._place(other) > place)
            present.insert(next(later, len(present)), callback)

    def surround_averages(self, params: TrainedParameters) -> None:
        """Put a callback before and one behind each that averages parameters."""
        present, shown = self._present, ShownMainValues()
        for number in reversed([n for n, callback in enumerate(present) if averages_parameters(callback)]):
            before, after = BeforeAverages(params, shown), AfterAverages(shown)
            skip_missing(before)
            skip_missing(after)
            present[number : number + 1] = before, present[number], after
            self._added += before, after

    def listen(self) -> None:
        """Replace the signal handlers that Lightning has just set."""
        for switch in self._switches:
            assert self._trainer is not None
            switch.listen(self._trainer)

    def protect_workers(self, dataloader: object) -> None:
        """Let workers outlive signals that go to all processes of a job."""
        if self._switches:
            let_workers_outlive_signals(dataloader)

    def end(self) -> None:
        """Restore Lightning's signal handlers, which Lightning itself removes next, and remove the added callbacks."""
        for switch in self._switches:
            switch.give_back()
        self._present[:] = [callback for callback in self._present if not self._is_own(callback)]
        self._trainer, self._added = None, []

    def _is_own(self, callback: Callback) -> bool:
        """True for a callback that was added here; by identity, as a user's callback may define ``==``."""
        return any(callback is own for own in self._added)

    def _place(self, callback: Callback) -> int:
        if type(callback) in ORDER and self._is_own(callback):
            return ORDER.index(type(callback))
        return ORDER.index(Checkpoint if isinstance(callback, Checkpoint) else Callback)


def _untrained_problems(stages: Sequence[tuple[int, str, bool]]) -> list[Problem]:
    """Faults of stages without trained parameters: number of each stage, its error, and if all its groups are empty."""
    reason = (
        "no parameter of this stage needs a gradient, and torch makes no optimizer of none. Give it a group, which may"
        " be empty: AdamW([{'params': [param for param in self.parameters() if param.requires_grad]}])"
    )
    found = [
        Problem("configure_optimizers", f"{fault} (pipeline stage {n})", reason) for n, fault, _ in stages if fault
    ]
    if all(is_empty for *_, is_empty in stages):
        found.append(Problem("configure_optimizers", "empty groups", "no parameter on any pipeline stage is trained"))
    return found

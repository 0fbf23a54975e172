"""Base class of this package's modules: a transformer by its configuration, its training, and its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron import device as devices
from lightning_megatron.arguments import Rule, at_least, checked
from lightning_megatron.checkpoint.formats.hf.settings import read_settings
from lightning_megatron.config.layout import ModelShape
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.families import module_of
from lightning_megatron.layers.init import weights_follow
from lightning_megatron.lightning import pretrained
from lightning_megatron.lightning.build.placement import Placement, carry_over
from lightning_megatron.lightning.build.unbuilt import Outline
from lightning_megatron.lightning.compat._private import trainer_of
from lightning_megatron.lightning.modules.adapted import AdaptedModule, AdaptersLike
from lightning_megatron.lightning.modules.schedules import ModuleSchedules, samples_of_last_step
from lightning_megatron.lightning.modules.text_batch import tokens_of
from lightning_megatron.lightning.modules.token_mean import LossReduction
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.strategy.trained_parameters import is_fitting
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.presets import configuration
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.ops.adamw import ADAMW, MakeAdamW, beyond_fused_adamw
from lightning_megatron.ops.implementation import OpChoice
from lightning_megatron.ops.registry import Ops
from lightning_megatron.optim.lr_schedule import LRStyle, MegatronLR, TailStyle, WDStyle

if TYPE_CHECKING:
    from typing_extensions import Self

ConfigLike = str | TransformerConfig | Mapping[str, Any]
TransformerModuleT = TypeVar("TransformerModuleT", bound="TransformerModule")
TWO_BETAS = Rule("of two, of at least 0 and less than 1", lambda b: len(b) == 2 and all(0 <= x < 1 for x in b))


class TransformerModule(AdaptedModule):
    """A transformer with its training; subclasses define the model and the loss.

    Logged: ``train_loss``, ``val_loss``, ``test_loss``, ``grad_norm``, ``lr``.

    Attributes:
        default_config: name of the preset that is used without ``config``.
        config_class: class of the configuration; those of families that name this module are accepted too.
        logged: names logged besides losses; a subclass may leave ``"lr"`` or ``"grad_norm"`` out.
        hf_settings: settings besides the model in the Hugging Face directory of the weights (special tokens,
            generation); checkpoints keep them, and exports write them again.
        counts_tokens: True if the family can take the mean of the losses over tokens.
        shown_late: the metric that the Megatron strategy shows in the progress bar. On an accelerator it is that of the
            step before: no step waits for it, as it would with Lightning's ``prog_bar=True``.
        extra_batch_keys: further keys of batches, which a subclass's own steps use. Other keys with a value per token
            are refused, since they would be ignored silently.
        reads_parameters: False, since the hooks of this class read neither parameters nor gradients of a step.

    Args:
        config: name of a preset, a ``TransformerConfig``, or its fields as a mapping.
        lr: highest learning rate.
        min_lr: learning rate at the end of the decay; ``None`` means a tenth of ``lr``.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: step at which ``min_lr`` is reached; ``None`` means the Trainer's last step.
        lr_schedule: shape of the decay; ``"wsd"`` stays at ``lr`` until a tail, which ends with the decay.
        weight_decay: weight decay of matrices; norms and biases are not decayed.
        betas: AdamW's (beta1, beta2).
        eps: AdamW's epsilon.
        init_lr: learning rate at the start of the warm-up.
        tail_steps: optimizer steps of the tail of ``"wsd"``.
        tail_style: shape of that tail.
        warmup_samples: length of the warm-up in samples. Where any length is given in samples, the schedules count
            samples: a larger batch moves them further, and a step skipped for an overflow does not move them.
        decay_samples: samples after which ``min_lr`` is reached; ``None`` means all that the Trainer reads.
        tail_samples: length of the tail in samples.
        start_weight_decay: weight decay at the start, from which it grows to ``weight_decay`` during the whole
            training; ``None`` for ``weight_decay``.
        weight_decay_schedule: shape of that growth.
        loss_reduction: ``"sample"`` for the mean of micro-batches' means, weighted by their samples; ``"token"`` for
            the mean over all tokens of a step that count, however it is cut into micro-batches, replicas and
            accumulated batches. ``None`` takes that of the data module if it names one, as ``ChatDataModule`` does
            with ``"token"``, and else ``"sample"``.
        lora: adapter to train in place of the model, or several by name, of which the first is trained; the model is
            frozen. ``None`` to train the model.
        **overrides: fields of the configuration to change, e.g. ``num_layers=4``.

    Raises:
        ConfigError: for an unknown preset or field, or sizes that cannot work.
    """

    default_config: str
    config_class: type[TransformerConfig] = TransformerConfig
    counts_tokens = reads_parameters = False
    shown_late = "train_loss"
    extra_batch_keys: Collection[str] = ()
    logged: Collection[str] = ("lr", "grad_norm")
    _outline: Outline | None = None

    @checked(
        lr=at_least(0.0),
        min_lr=at_least(0.0),
        warmup_steps=at_least(0),
        decay_steps=at_least(1),
        weight_decay=at_least(0.0),
        betas=TWO_BETAS,
        eps=at_least(0.0),
        init_lr=at_least(0.0),
        tail_steps=at_least(1),
        warmup_samples=at_least(1),
        decay_samples=at_least(1),
        tail_samples=at_least(1),
        start_weight_decay=at_least(0.0),
    )
    def __init__(
        self,
        config: ConfigLike | None = None,
        lr: float = 3e-4,
        min_lr: float | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        lr_schedule: LRStyle = "constant",
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        init_lr: float = 0.0,
        tail_steps: int | None = None,
        tail_style: TailStyle = "exponential",
        warmup_samples: int | None = None,
        decay_samples: int | None = None,
        tail_samples: int | None = None,
        start_weight_decay: float | None = None,
        weight_decay_schedule: WDStyle = "constant",
        loss_reduction: LossReduction | None = None,
        lora: AdaptersLike = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.config = configuration(self.default_config if config is None else config, **overrides)
        if type(self.config) is not self.config_class and not isinstance(self, module_of(self.config)):
            given, reason = type(self.config).__name__, f"describes another model: {type(self).__name__} takes"
            raise ConfigError([Problem("config", given, reason, (self.config_class.__name__, self.default_config))])
        self._take_adapters(lora)
        lengths = {
            "warmup_steps": warmup_steps,
            "decay_steps": decay_steps,
            "tail_steps": tail_steps,
            "warmup_samples": warmup_samples,
            "decay_samples": decay_samples,
            "tail_samples": tail_samples,
        }
        self.schedules = ModuleSchedules(
            lr,
            lr / 10 if min_lr is None else min_lr,
            init_lr,
            lr_schedule,
            tail_style,
            {name: length for name, length in lengths.items() if length},
            weight_decay,
            weight_decay if start_weight_decay is None else start_weight_decay,
            weight_decay_schedule,
        )
        found = self.schedules.problems()
        if loss_reduction == "token" and not self.counts_tokens:
            reason = f"the loss of a {type(self).__name__} is no single mean over tokens"
            found.append(Problem("loss_reduction", loss_reduction, reason, ("sample",)))
        raise_if_any(found)
        self._loss_reduction = loss_reduction
        self.lr, self.min_lr = lr, self.schedules.min_lr
        self.warmup_steps, self.decay_steps, self.lr_schedule = warmup_steps, decay_steps, lr_schedule
        self.weight_decay, self.betas, self.eps = weight_decay, (betas[0], betas[1]), eps
        # Plain containers only: checkpoints with these hyper-parameters load without running code, hparams.yaml too.
        fields = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.config).items()}
        self.save_hyperparameters(
            {
                "config": fields,
                "lr": lr,
                "min_lr": min_lr,
                "lr_schedule": lr_schedule,
                "weight_decay": weight_decay,
                "betas": list(betas),
                "eps": eps,
                "init_lr": init_lr,
                "tail_style": tail_style,
                **lengths,
                "start_weight_decay": start_weight_decay,
                "weight_decay_schedule": weight_decay_schedule,
                "loss_reduction": loss_reduction,
                **self._adapter_arguments,
            }
        )
        self.hf_settings: Mapping[str, Any] = {}
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = self.build_model(Placement(ParallelMesh.single()))
            self._attach_adapters(model, ParallelMesh.single())
        self._outline = Outline(model)
        self.model: StagedModel | None = model
        self.register_state_dict_pre_hook(_build_first)
        self.register_load_state_dict_pre_hook(_build_first)

    @property
    def loss_reduction(self) -> LossReduction:
        """Kind of mean of the loss: over samples or over tokens."""
        return self._loss_reduction or "sample"

    @classmethod
    def from_hf(
        cls: type[TransformerModuleT], path: str | os.PathLike[str], *, weights: bool = True, **arguments: Any
    ) -> TransformerModuleT:
        """A module with the configuration of a Hugging Face directory, and its weights.

        Args:
            path: directory of a known family that this class trains.
            weights: True to call :meth:`load_hf` too.
            **arguments: arguments of the class: learning rate and so on, and fields of the configuration to change.

        Raises:
            CheckpointError: if there is no such directory, or its files are at fault.
            ConfigError: for a model that this package cannot reproduce, or fields that do not fit its weights.
        """
        module = cls(pretrained.checked_hf_config(path) if weights else pretrained.hf_config(path), **arguments)
        module.hf_settings = read_settings(path)
        if weights:
            module.load_hf(path)
        return module

    def load_hf(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a Hugging Face directory, in any layout.

        If the model is not built yet, the weights are loaded when it is: a call before ``trainer.fit`` loads into the
        layout of the Trainer. The configuration is checked at once. Where there are several ranks and the model is
        built, all of them must call this.

        Args:
            path: directory to load.

        Raises:
            CheckpointError: naming files and tensors at fault.
            ConfigError: naming every difference of the configurations that changes what the model computes.
        """
        raise_if_any(pretrained.hf_problems(path, self.config))
        self.hf_settings = read_settings(path)
        self.load_weights(path)

    @property
    def model_shape(self) -> ModelShape:
        """Configuration of the model."""
        return self.config

    def configure_model(self) -> None:
        """Build this rank's part of the model, or rebuild it with its present weights for another Trainer's layout.

        The order is build, fp8, adapters, weights, compile; then the strategy's ``setup``: cast, move and buffers.
        """
        model, before, now = self.model, self._megatron_placement, self._placement()
        if model is not None and (before is None or before.is_valid_for(now)):
            return
        strategy = self.megatron_strategy
        loads_all = model is None and self._is_loaded_whole(strategy)
        with nullcontext() if strategy is None else strategy.precision_plugin.params_dtype():
            with weights_follow() if loads_all else nullcontext():
                self.model = self.build_model(now)  # and fp8
            self._attach_adapters(self.model, now.mesh)
        if self._outline is not None:
            self._outline.give(self.model, every_dtype=trainer_of(self) is None)
        if model is not None and before is not None:
            carry_over(self, model, before, self.model, now)
        self._megatron_placement = now
        if now.compile_backend is not None:
            self.compile_blocks(now.compile_backend)

    def _is_loaded_whole(self, strategy: MegatronStrategy | None) -> bool:
        """True if a file will replace every weight of the new model, or the run ends with the names that it lacks."""
        if self._weights is not None:
            return self._weights.strict
        restores = strategy is not None and is_fitting(self) and strategy.checkpoints.folders.restores
        return restores and self.strict_loading and not self.lora

    def build_model(self, placement: Placement) -> StagedModel:
        """This rank's part of the model.

        ``__init__`` calls it first, on the meta device and for one rank.

        Args:
            placement: mesh, stages, and what else a model is built with.
        """
        raise NotImplementedError

    def _placement(self) -> Placement:
        """Placement for which the model is to be built."""
        strategy, here = self.megatron_strategy, self._megatron_placement
        if strategy is None:
            return here if here is not None and here.mesh.layout.is_whole else Placement(ParallelMesh.single())
        parts = strategy.stages(self.config.num_layers, self.config.loss_cost)
        stands = self.mesh, strategy.boundary, None if parts is None else tuple(parts)
        return Placement(*stands, strategy.recompute, strategy.ops, strategy.compile_backend)

    def compile_blocks(self, backend: str) -> None:
        """Run each block through ``torch.compile``, on Gaudi also the embedding, and the head with its loss.

        On CUDA the passes over logits are compiled too.

        Layers that a subclass adds are not compiled. Names of parameters, checkpoints and hooks do not change.

        Args:
            backend: backend of ``torch.compile``.
        """
        model, strategy = self._built(), self.megatron_strategy
        device = self.device if strategy is None else strategy.root_device
        parts: list[nn.Module | None] = list(model.layers.values())
        if devices.compiles_ends(device):
            parts += [model.embedding, model.head]
        if devices.compiles_softmax(device) and model.head is not None:
            model.head.loss_backend = backend
        dynamic = False if devices.compiles_fixed_shapes(device) else None
        for part in parts:
            if part is not None:
                part.compile(backend=backend, dynamic=dynamic)

    def hidden_shape(self, batch: Any) -> tuple[int, ...]:
        """``[S, B, H]``, or this rank's shard of it."""
        return self._built().hidden_shape(tokens_of(batch))

    def _built(self) -> StagedModel:
        if self._has_outline:
            self.configure_model()
            assert self.model is not None
            self.model.to(self.device)
        assert self.model is not None
        return self.model

    @property
    def _has_outline(self) -> bool:
        return self._outline is not None and self.model is self._outline.model

    @contextmanager
    def _building(self) -> Iterator[None]:
        outline = self.model if self._has_outline else None
        if outline is not None:
            self.model = None  # so that a subclass's configure_model sees that nothing is built yet
        try:
            yield
        finally:
            if self.model is None:
                self.model = outline

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Build the model, then apply a function to it and all its parts."""
        self._built()
        return super().apply(fn)

    def unbuilt_copy(self) -> Self:
        """A copy that takes no memory if this module takes none; each may draw other weights when it is built."""
        copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(super().__getstate__(), {id(self): copied}))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Build the model first, since copies and pickles hold its weights."""
        self._built()
        return {**super().__getstate__(), "_outline": None}

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        """Loss of one micro-batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=self.megatron_strategy is None, sync_dist=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss``."""
        self._log_evaluation_loss("val_loss", batch, dataloader_idx, prog_bar=True)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss``."""
        self._log_evaluation_loss("test_loss", batch, dataloader_idx)

    def _log_evaluation_loss(self, name: str, batch: Mapping[str, Tensor], dataloader_idx: int, **options: Any) -> None:
        """Log the loss of a batch of an evaluation, with further options of ``log``."""
        self.log(name, self.loss(batch), sync_dist=True, **options)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the learning rate of this step."""
        if "lr" in self.logged:
            # Lightning copies a number to the device, which the host waits for.
            self.log("lr", torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float32))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as configured in the Trainer, and log the gradient's norm before clipping."""
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        strategy = self.megatron_strategy
        if strategy is not None and "grad_norm" in self.logged:
            self.log("grad_norm", strategy.grad_norm())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over two groups, with warm-up and decay of the learning rate."""
        self.adamw = self._choose_adamw()
        groups = self.decay_groups(self.weight_decay)
        optimizer = self.adamw.run(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        if self.schedules.changes_nothing:
            return optimizer
        # The rate may have been changed since, as Lightning's LearningRateFinder does.
        scheduler = replace(self.schedules, max_lr=self.lr, min_lr=self.min_lr).scheduler(optimizer, self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def counts_samples(self) -> bool:
        """True if the schedules count samples."""
        return self.schedules.counts_samples

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance the schedules, by samples if they count samples."""
        if isinstance(scheduler, MegatronLR) and self.counts_samples:
            scheduler.step(units=samples_of_last_step(self.trainer))
        else:
            super().lr_scheduler_step(scheduler, metric)

    def _choose_adamw(self) -> OpChoice[MakeAdamW]:
        strategy = self.megatron_strategy
        if strategy is None:
            return Ops(self.device.type).choose(ADAMW)
        mode = strategy.precision_plugin.mode
        return strategy.ops.choose(ADAMW, beyond_fused_adamw(mode.main or mode.params, self.device.type))


def _build_first(module: TransformerModule, *_: Any) -> None:
    """Hook of ``state_dict`` and ``load_state_dict``, also of a module around this one."""
    module._built()

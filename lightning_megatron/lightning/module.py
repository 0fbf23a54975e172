"""LightningModules for language models; every method may be overridden."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.arguments import Rule, at_least, checked
from lightning_megatron.checkpoint.formats.hf.settings import read_settings
from lightning_megatron.config.layout import ModelShape
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, DataError, Problem, raise_if_any
from lightning_megatron.lightning.base_module import MegatronModule
from lightning_megatron.lightning.placement import Placement, carry_over
from lightning_megatron.lightning.pretrained.hugging_face import checked_hf_config, hf_config, hf_problems
from lightning_megatron.lightning.text_batch import (
    check_keys,
    id_fault,
    labels_repeat_tokens,
    nan_where_unknown,
    without_faults,
)
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.ops.adamw import beyond_fused_adamw
from lightning_megatron.ops.implementation import OpChoice
from lightning_megatron.ops.registry import Ops
from lightning_megatron.optim.lr_schedule import LRSchedule, LRStyle, MegatronLR, schedule_problems
from lightning_megatron.stage import BackwardScale

ConfigLike = str | TransformerConfig | Mapping[str, Any]
GPTModuleT = TypeVar("GPTModuleT", bound="GPTModule")
TWO_BETAS = Rule("of two, of at least 0 and less than 1", lambda b: len(b) == 2 and all(0 <= x < 1 for x in b))


class GPTModule(MegatronModule):
    """A decoder-only language model with its training.

    A batch is a dict of ``tokens`` and ``labels`` ``[B, S]``, and, if wanted, ``loss_mask`` and ``position_ids``
    ``[B, S]``. Labels are the tokens that follow (``labels[:, i]`` is ``tokens[:, i + 1]``: nothing is shifted here),
    or -100 for no loss. Logged: ``train_loss``, ``val_loss``, ``test_loss``, ``grad_norm``, ``lr``.

    Attributes:
        logged: names logged besides losses; a subclass may leave ``"lr"`` or ``"grad_norm"`` out.
        hf_settings: settings besides the model in the Hugging Face directory of the weights (special tokens,
            generation); checkpoints keep them, and exports write them again.
        extra_batch_keys: further keys of batches, which a subclass's own steps use. Other keys with a value per token
            are refused, since they would be ignored silently.

    Args:
        config: name of a preset, a ``TransformerConfig``, or its fields as a mapping.
        lr: highest learning rate.
        min_lr: learning rate at the end of the decay; ``None`` means a tenth of ``lr``.
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: step at which ``min_lr`` is reached; ``None`` means the Trainer's last step.
        lr_schedule: shape of the decay.
        weight_decay: weight decay of matrices; norms and biases are not decayed.
        betas: AdamW's (beta1, beta2).
        eps: AdamW's epsilon.
        **overrides: fields of the configuration to change, e.g. ``num_layers=4``.

    Raises:
        ConfigError: for an unknown preset or field, or sizes that cannot work.
    """

    default_config = "gpt2"
    extra_batch_keys: Collection[str] = ()
    logged: Collection[str] = ("lr", "grad_norm")
    splits_context = True

    @checked(
        lr=at_least(0.0),
        min_lr=at_least(0.0),
        warmup_steps=at_least(0),
        decay_steps=at_least(1),
        weight_decay=at_least(0.0),
        betas=TWO_BETAS,
        eps=at_least(0.0),
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
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.config = configuration(self.default_config if config is None else config, **overrides)
        raise_if_any(schedule_problems(lr, min_lr, warmup_steps, decay_steps, lr_schedule))
        self.lr, self.min_lr = lr, lr / 10 if min_lr is None else min_lr
        self.warmup_steps, self.decay_steps, self.lr_schedule = warmup_steps, decay_steps, lr_schedule
        self.weight_decay, self.betas, self.eps = weight_decay, (betas[0], betas[1]), eps
        # Plain containers only: checkpoints with these hyper-parameters load without running code.
        self.save_hyperparameters(
            {
                "config": asdict(self.config),
                "lr": lr,
                "min_lr": min_lr,
                "warmup_steps": warmup_steps,
                "decay_steps": decay_steps,
                "lr_schedule": lr_schedule,
                "weight_decay": weight_decay,
                "betas": list(betas),
                "eps": eps,
            }
        )
        self.model: GPTModel | None = None
        self.hf_settings: Mapping[str, Any] = {}
        self._has_seen_labels = False

    @classmethod
    def from_hf(
        cls: type[GPTModuleT], path: str | os.PathLike[str], *, weights: bool = True, **arguments: Any
    ) -> GPTModuleT:
        """A module with the configuration of a Hugging Face directory, and its weights.

        Args:
            path: directory of LLaMA 2/3.x, GPT-2 or Mixtral.
            weights: True to call :meth:`load_hf` too.
            **arguments: arguments of the class: learning rate and so on, and fields of the configuration to change.

        Raises:
            CheckpointError: if there is no such directory, or its files are at fault.
            ConfigError: for a model that this package cannot reproduce, or fields that do not fit its weights.
        """
        module = cls(checked_hf_config(path) if weights else hf_config(path), **arguments)
        module.hf_settings = read_settings(path)
        if weights:
            module.load_hf(path)
        return module

    def load_hf(self, path: str | os.PathLike[str]) -> None:
        """Take the weights of a Hugging Face directory, in any layout.

        If the model is not built yet, the weights are loaded when it is: a call before ``trainer.fit`` loads into the
        layout of the Trainer. The configuration is checked at once. Where there are several ranks and the model is
        built, all of them must call this.

        Args:
            path: directory to load.

        Raises:
            CheckpointError: naming files and tensors at fault.
            ConfigError: naming every difference of the configurations that changes what the model computes.
        """
        raise_if_any(hf_problems(path, self.config))
        self.hf_settings = read_settings(path)
        self.load_weights(path)

    @property
    def model_shape(self) -> ModelShape:
        """Configuration of the model."""
        return self.config

    def configure_model(self) -> None:
        """Build this rank's part of the model; for another Trainer's layout anew, with its present weights.

        The order is build, fp8, weights, compile; then the strategy's ``setup`` casts, moves, and makes flat buffers.
        """
        model, before, now = self.model, self._megatron_placement, self._placement()
        if model is not None and (before is None or before.serves(now)):
            return
        self.model = GPTModel(self.config, now.mesh, now.parts, now.boundary, now.recompute, now.ops)  # and fp8
        if model is not None and before is not None:
            carry_over(self, model, before, self.model, now)
        self._megatron_placement = now
        if now.compile_backend is not None:
            self.compile_blocks(now.compile_backend)

    def _placement(self) -> Placement:
        """Placement for which the model is to be built."""
        strategy, here = self.megatron_strategy, self._megatron_placement
        if strategy is None:
            return here if here is not None and here.is_whole else Placement(ParallelMesh.single())
        parts = strategy.stages(self.config.num_layers)
        stands = self.mesh, strategy.boundary, None if parts is None else tuple(parts)
        return Placement(*stands, strategy.recompute, strategy.ops, strategy.compile_backend)

    def compile_blocks(self, backend: str) -> None:
        """Run each block through ``torch.compile``; embedding, head and what a subclass adds stay as they are.

        Names of parameters, checkpoints and hooks do not change.

        Args:
            backend: backend of ``torch.compile``.
        """
        for block in self._built().layers.values():
            block.compile(backend=backend)

    def hidden_shape(self, batch: Any) -> tuple[int, ...]:
        """``[S, B, H]``, or this rank's shard of it."""
        return self._built().hidden_shape(batch["tokens"] if isinstance(batch, Mapping) else batch)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of tokens ``[B, S]``, vocabulary padding stripped."""
        if (fault := self.batch_fault({"tokens": tokens, "position_ids": position_ids})) is not None:
            raise DataError(fault)
        logits: Tensor = self._built()(tokens, position_ids=position_ids)
        return logits

    def loss(self, batch: Mapping[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Mean loss over the tokens of a batch that its ``loss_mask`` keeps; 0 if it keeps none.

        Args:
            batch: batch as described in the class.
            hidden: result of :meth:`hidden` for this batch; ``None`` runs the model.

        Raises:
            ConfigError: for keys that the model does not use.
            DataError: for unknown ids in a batch on the host; on a device the loss is NaN.
        """
        self._check(batch)
        labels, mask = batch["labels"], batch.get("loss_mask")
        if hidden is not None:
            loss = self._built().mean_loss(hidden, labels, mask)
        else:
            loss = self._built()(batch["tokens"], labels=labels, loss_mask=mask, position_ids=batch.get("position_ids"))
        return nan_where_unknown(loss, batch, self.config.vocab_size)

    def hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Hidden states ``[B, S, H]`` after the final norm, whole on every rank, for heads and losses of your own.

        All ranks of a replica get the same states and must compute the same from them; then gradients are those of one
        process, and your own parameters stay equal on all ranks. In a pipeline the step ends here on all stages but the
        last. For the language model's loss of the same forward, pass the states to :meth:`loss` or
        :meth:`token_losses`.

        Args:
            batch: batch as described in the class; labels are not needed.

        Raises:
            ConfigError: for keys that the model does not use.
            DataError: for unknown ids in a batch on the host; on a device the result is NaN.
        """
        self._check(batch)
        hidden = self._built().hidden(batch["tokens"], batch.get("position_ids"), self._backward_scale())
        return nan_where_unknown(hidden, batch, self.config.vocab_size)

    def token_losses(self, batch: Mapping[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Losses of all tokens ``[B, S]``, fp32, before the ``loss_mask``; 0 where the label is -100.

        Whole on every rank; in a pipeline the step ends here on all stages but the last. The mean of :meth:`loss` costs
        less, since it knows the weight of each token.

        Args:
            batch: batch as described in the class.
            hidden: result of :meth:`hidden` for this batch; ``None`` runs the model.
        """
        hidden = self.hidden(batch) if hidden is None else hidden
        losses = self._built().token_losses(hidden, batch["labels"])
        return nan_where_unknown(losses, batch, self.config.vocab_size)

    def _backward_scale(self) -> BackwardScale:
        strategy = self.megatron_strategy
        if strategy is not None:
            return strategy.engine.backward_scale
        if self.training and self.config.num_experts and self._trainer is not None:
            reason = "the losses that balance experts need to know what it multiplies the loss with: use 'megatron'"
            raise ConfigError([Problem("strategy", type(self.trainer.strategy).__name__, reason)])
        return BackwardScale()

    # Batches

    def batch_fault(self, batch: Any) -> str | None:
        """Fault of the ids of a batch on the host; warns once if the labels repeat the tokens."""
        if not self._has_seen_labels and isinstance(batch, Mapping) and "labels" in batch:
            self._has_seen_labels = True
            if labels_repeat_tokens(batch):
                rank_zero_warn(
                    "batch['labels'] equals batch['tokens']: labels are not shifted here, so the model learns to repeat"
                    " its input. Give the tokens that follow: labels[:, i] = tokens[:, i + 1]"
                )
        return id_fault(batch, self.config.vocab_size, self._learned_positions)

    def without_faults(self, batch: Any) -> Any:
        """Batch with known ids only, for a step that is discarded."""
        return without_faults(batch, self.config.vocab_size, self._learned_positions)

    @property
    def _learned_positions(self) -> int | None:
        learned = self.config.position_embedding == "learned"
        return self.config.max_position_embeddings if learned else None

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        check_keys(batch, self.extra_batch_keys)
        if (fault := self.batch_fault(batch)) is not None:
            raise DataError(fault)

    def _built(self) -> GPTModel:
        if self.model is None:
            self.configure_model()
            assert self.model is not None
            self.model.to(self.device, self.dtype)
        return self.model

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss``."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss``."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logits ``[B, S, V]``."""
        if not isinstance(batch, Mapping):
            return self(batch)
        self._check(batch)
        return self(batch["tokens"], batch.get("position_ids"))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the learning rate of this step."""
        if "lr" in self.logged:
            self.log("lr", float(optimizer.param_groups[0]["lr"]))

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
        optimizer: Optimizer = self.adamw.run(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        if self.lr_schedule == "constant" and not self.warmup_steps:
            return optimizer
        decay = 0
        if self.lr_schedule != "constant":
            decay = self.decay_steps or int(self.trainer.estimated_stepping_batches)
        schedule = LRSchedule(self.lr, self.min_lr, warmup=self.warmup_steps, decay=decay, style=self.lr_schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": MegatronLR(optimizer, schedule), "interval": "step"},
        }

    def _choose_adamw(self) -> OpChoice:
        strategy = self.megatron_strategy
        if strategy is None:
            return Ops(self.device.type).choose("adamw")
        mode = strategy.precision_plugin.mode
        return strategy.ops.choose("adamw", unless=beyond_fused_adamw(mode.main or mode.params, self.device.type))


class LlamaModule(GPTModule):
    """LLaMA: a :class:`GPTModule` whose default configuration is ``llama3.1-8b``."""

    default_config = "llama3.1-8b"


class MixtralModule(GPTModule):
    """Mixtral: a :class:`GPTModule` whose default configuration is ``mixtral-8x7b``.

    The auxiliary losses of experts are differentiated with the loss of the model, and are no part of ``train_loss``.
    """

    default_config = "mixtral-8x7b"

"""LightningModules for language models; every method may be overridden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.documents import Documents, device_problem
from lightning_megatron.errors import ConfigError, DataError, Problem, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.lightning.modules import documents as packed
from lightning_megatron.lightning.modules.text_batch import (
    check_keys,
    distance_fault,
    id_fault,
    labels_repeat_tokens,
    nan_where_unknown,
    without_faults,
)
from lightning_megatron.lightning.modules.token_mean import LossReduction, TokenMean
from lightning_megatron.lightning.modules.transformer import TransformerModule
from lightning_megatron.lightning.step.per_token_loss import FURTHER_SUMS
from lightning_megatron.lightning.validation.memory import TrainedModel
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel, kept_tokens
from lightning_megatron.models.stages import token_weights
from lightning_megatron.stage import BackwardScale


class GPTModule(TransformerModule):
    """A decoder-only language model with its training.

    A batch is a dict of ``tokens`` and ``labels`` ``[B, S]``, and, if wanted, ``loss_mask`` and ``position_ids``
    ``[B, S]``. Labels are the tokens that follow (``labels[:, i]`` is ``tokens[:, i + 1]``: nothing is shifted here),
    or -100 for no loss. If a sequence holds several documents, ``segment_ids`` ``[B, S]`` (an id for each, 0 for
    padding) or ``cu_seqlens`` ``[B, n + 1]`` (their bounds, 0 to S) keep them apart. Arguments, and what is logged, are
    those of :class:`TransformerModule`.
    """

    default_config = "gpt2"
    splits_context = True
    counts_tokens = True
    takes_adapters = True
    model: GPTModel | None
    _has_seen_labels = False

    @property
    def trained_model(self) -> TrainedModel | None:
        """Model for which memory is predicted; ``None`` with adapters, other kinds of layers, or another model."""
        own = type(self)
        builds = own.configure_model is not GPTModule.configure_model
        if builds or self.lora or type(self.config) is not TransformerConfig:
            return None
        is_adam = own.configure_optimizers is GPTModule.configure_optimizers
        return TrainedModel(self.config, 2 if is_adam else None)

    def build_model(self, placement: Placement) -> GPTModel:
        """This rank's part of the model."""
        here = placement
        return GPTModel(self.config, here.mesh, here.parts, here.boundary, here.recompute, here.ops)

    def _built(self) -> GPTModel:
        return cast(GPTModel, super()._built())

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of tokens ``[B, S]``, vocabulary padding stripped; other arguments as in a batch."""
        batch = {"tokens": tokens, "position_ids": position_ids, "segment_ids": segment_ids}
        if (fault := self.batch_fault(batch)) is not None:
            raise DataError(fault)
        logits: Tensor = self._built()(tokens, position_ids=position_ids, documents=self._documents(batch))
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
        documents = self._documents(batch)
        labels, mask = _labels(batch, documents), batch.get("loss_mask")
        if hidden is not None:
            loss = self._built().mean_loss(hidden, labels, mask)
        else:
            given = {"labels": labels, "loss_mask": mask, "position_ids": batch.get("position_ids")}
            per_token = self.loss_reduction == "token"
            loss = self._built()(batch["tokens"], **given, documents=documents, per_token=per_token)
        return nan_where_unknown(loss, batch, self.config.vocab_size)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        """Loss of one micro-batch; logs the losses of multi-token prediction as ``mtp_1_loss`` and so on.

        With ``loss_reduction="token"`` it is the sum of the losses, with the number of tokens.
        """
        tokens, model = self.num_tokens(batch), self._built()
        if tokens is None:
            output = super().training_step(batch, batch_idx)
            for places, further in enumerate(model.mtp_losses, 1):
                self.log(f"mtp_{places}_loss", further, sync_dist=True)
            return output
        output = {"loss": self.loss(batch) * tokens, "num_tokens": tokens}
        if model.mtp:
            means = zip(model.mtp_losses, model.mtp_tokens, strict=True)
            output[FURTHER_SUMS] = torch.stack([torch.stack((mean * count, count)) for mean, count in means])
        return output

    @property
    def loss_reduction(self) -> LossReduction:
        """Kind of mean of the loss: the constructor's argument, else that of the run's data module."""
        if self._loss_reduction is None and self._trainer is not None:
            named: LossReduction = getattr(getattr(self.trainer, "datamodule", None), "loss_reduction", "sample")
            return named
        return super().loss_reduction

    def num_tokens(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Number of tokens that count in the loss of a batch, weighted; ``None`` for a mean over samples.

        Raises:
            ConfigError: with another strategy, which would train on the sum.
        """
        if self.loss_reduction != "token":
            return None
        if self._trainer is not None and self.megatron_strategy is None:
            reason = f"{type(self.trainer.strategy).__name__} does not know the tokens of a step: use 'megatron'"
            raise ConfigError([Problem("loss_reduction", self.loss_reduction, reason, ("sample",))])
        return self._kept_tokens(batch)

    def _kept_tokens(self, batch: Mapping[str, Tensor]) -> Tensor:
        return token_weights(_labels(batch, self._documents(batch)), batch.get("loss_mask")).sum()

    def log_mean_over_tokens(self, loss: Tensor, further: Sequence[Tensor] = ()) -> None:
        """Log means over the tokens of all replicas, if this module's loss is such a mean.

        Args:
            loss: the loss, as ``train_loss``.
            further: losses of multi-token prediction, as ``mtp_1_loss`` and so on.
        """
        if self.loss_reduction == "token":
            self.log("train_loss", loss, prog_bar=self.megatron_strategy is None)
            for places, mean in enumerate(further, 1):
                self.log(f"mtp_{places}_loss", mean)

    def _log_evaluation_loss(self, name: str, batch: Mapping[str, Tensor], dataloader_idx: int, **options: Any) -> None:
        """Log the loss of a batch; with ``loss_reduction="token"`` the mean over all tokens of an evaluation."""
        if self.loss_reduction != "token":
            super()._log_evaluation_loss(name, batch, dataloader_idx, **options)
            return
        key = f"{name}_{dataloader_idx}"
        # Made before the model runs: pipeline stages whose step ends inside the model log the metric too.
        mean = self._token_mean(key)
        mean.update(self.loss(batch), self._kept_tokens(batch))
        self.log(name, mean, metric_attribute=f"_token_means.{key}", **options)

    def _token_mean(self, key: str) -> TokenMean:
        if not hasattr(self, "_token_means"):
            self._token_means = nn.ModuleDict()
        if key not in self._token_means:
            self._token_means[key] = TokenMean().to(self.device)
            if self.megatron_strategy is not None:
                self.megatron_strategy.engine.watch(self)
        return cast(TokenMean, self._token_means[key])

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
        given = batch["tokens"], batch.get("position_ids"), self._backward_scale(), self._documents(batch)
        kept = kept_tokens(batch["tokens"], batch.get("labels"), batch.get("loss_mask"))
        hidden = self._built().hidden(*given, kept)
        return nan_where_unknown(hidden, batch, self.config.vocab_size)

    def token_losses(self, batch: Mapping[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Losses of all tokens ``[B, S]``, fp32, before the ``loss_mask``; 0 for padding and labels of -100.

        Whole on every rank; in a pipeline the step ends here on all stages but the last. The mean of :meth:`loss` costs
        less, since it knows the weight of each token.

        Args:
            batch: batch as described in the class.
            hidden: result of :meth:`hidden` for this batch; ``None`` runs the model.
        """
        hidden = self.hidden(batch) if hidden is None else hidden
        losses = self._built().token_losses(hidden, _labels(batch, self._documents(batch)))
        return nan_where_unknown(losses, batch, self.config.vocab_size)

    def generate(
        self, tokens: Tensor, max_new_tokens: int, *, segment_ids: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Prompts ``[B, S]`` and their continuations, ``[B, S + n]``, of a model without a pipeline.

        Args:
            tokens: prompts.
            max_new_tokens: tokens to add at most.
            segment_ids: documents of the prompts, as in a batch: each prompt's last one is continued and sees no other.
            **options: further arguments of :func:`~lightning_megatron.models.generate.generate`: ``temperature``,
                ``top_k``, ``top_p``, ``stop``, ``seed``.

        Raises:
            ConfigError: for arguments out of range, or more tokens than the model has positions.
        """
        batch = {"tokens": tokens, "segment_ids": segment_ids}
        if (fault := packed.document_fault(batch)) is not None:
            raise DataError(fault)
        return generate(self._built(), tokens, max_new_tokens, documents=packed.documents_of(batch), **options)

    def _backward_scale(self) -> BackwardScale:
        strategy = self.megatron_strategy
        if strategy is not None:
            return strategy.engine.backward_scale
        if self.training and self.config.num_experts and self._trainer is not None:
            reason = "auxiliary losses of experts need the factor that it scales the loss with: use 'megatron'"
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
        fault = id_fault(batch, self.config.vocab_size, self._learned_positions) or packed.document_fault(batch)
        if fault is None and self.config.position_embedding == "alibi":
            return distance_fault(batch)
        return fault

    def without_faults(self, batch: Any) -> Any:
        """Batch with known ids only, for a step that is discarded."""
        known = without_faults(batch, self.config.vocab_size, self._learned_positions)
        return known if packed.document_fault(batch) is None else packed.without_documents(known)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch with bounds of documents as segment ids, so that it can be cut into micro-batches."""
        return packed.with_segments(super().on_before_batch_transfer(batch, dataloader_idx))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on the device; segment ids stay on the host, which reads them."""
        if not packed.says_documents(batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        moved = super().transfer_batch_to_device(packed.without_documents(batch), device, dataloader_idx)
        return {**moved, **{key: batch[key] for key in packed.KEYS if key in batch}}

    @property
    def _learned_positions(self) -> int | None:
        learned = self.config.position_embedding == "learned"
        return self.config.max_position_embeddings if learned else None

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        check_keys(batch, (*self.extra_batch_keys, "cu_seqlens"))
        if (fault := self.batch_fault(batch)) is not None:
            raise DataError(fault)

    def _documents(self, batch: Mapping[str, Any]) -> Documents | None:
        """Documents of a batch, ``None`` for sequences of one each."""
        found = packed.documents_of(batch)
        if found is None or (found.is_one_each and not self.config.num_experts):
            return None
        key = next(key for key in packed.KEYS if batch.get(key) is not None)
        raise_if_any(problem for problem in (device_problem(key, self.device),) if problem is not None)
        return found

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logits ``[B, S, V]``."""
        if not isinstance(batch, Mapping):
            return self(batch)
        self._check(batch)
        logits: Tensor = self._built()(
            batch["tokens"], position_ids=batch.get("position_ids"), documents=self._documents(batch)
        )
        return logits


def _labels(batch: Mapping[str, Tensor], documents: Documents | None) -> Tensor:
    """Labels of a batch; padding has none."""
    labels = batch["labels"]
    if documents is None or not documents.has_padding:
        return labels
    return labels.masked_fill(~documents.tokens().to(labels.device, non_blocking=True), IGNORE_INDEX)


class BloomModule(GPTModule):
    """BLOOM: a :class:`GPTModule` whose default configuration is ``bloom-560m``."""

    default_config = "bloom-560m"


class LlamaModule(GPTModule):
    """LLaMA: a :class:`GPTModule` whose default configuration is ``llama3.1-8b``."""

    default_config = "llama3.1-8b"


class MixtralModule(GPTModule):
    """Mixtral: a :class:`GPTModule` whose default configuration is ``mixtral-8x7b``.

    The auxiliary losses of experts are differentiated with the loss of the model, and are no part of ``train_loss``.
    """

    default_config = "mixtral-8x7b"

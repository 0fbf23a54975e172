"""LightningModule for BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertInputs, BertLogits, BertLosses, BertModel
from lightning_megatron.errors import DataError
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.lightning.modules.documents import OF_DECODERS
from lightning_megatron.lightning.modules.text_batch import check_keys, id_fault, nan_where_unknown, without_faults
from lightning_megatron.lightning.modules.transformer import TransformerModule

USED = ("tokens", "labels", "loss_mask", "padding_mask", "token_types", "position_ids")
_ELSEWHERE = {
    "input_ids": "tokens stand under 'tokens'",
    "attention_mask": "tokens that are no padding are marked under 'padding_mask'",
    "token_type_ids": "the segment of each token stands under 'token_types'",
    "next_sentence_label": "1 for a second segment that does not follow the first stands under 'is_random'",
    "inputs_embeds": "the model begins with token ids",
    **OF_DECODERS,
}


class BertModule(TransformerModule):
    """BERT with its training: masked tokens, and whether a second segment follows the first.

    A batch is a dict of ``tokens`` and ``labels`` ``[B, S]`` (the ids that masked tokens had, -100 elsewhere), and, if
    wanted, ``loss_mask``, ``padding_mask`` (1 for tokens, 0 for padding), ``token_types`` and ``position_ids``, all
    ``[B, S]``, and ``is_random`` ``[B]`` (1 where the second segment does not follow the first).
    :class:`~lightning_megatron.encoders.bert.dataset.BertDataset` has such samples. Arguments are those of
    :class:`TransformerModule`. The loss is the sum of both heads' means; they are logged apart, too:
    ``train_token_loss`` and ``train_next_sentence_loss``.
    """

    default_config = "bert-base"
    config_class = BertConfig
    splits_context = True
    config: BertConfig
    model: BertModel | None

    def build_model(self, placement: Placement) -> BertModel:
        """This rank's part of the model."""
        here = placement
        return BertModel(self.config, here.mesh, here.parts, here.boundary, here.recompute, here.ops)

    def _built(self) -> BertModel:
        return cast(BertModel, super()._built())

    def forward(
        self,
        tokens: Tensor,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> BertLogits:
        """Logits of both heads for tokens ``[B, S]``, vocabulary padding stripped."""
        ids = {"tokens": tokens, "token_types": token_types, "position_ids": position_ids}
        if (fault := self.batch_fault(ids)) is not None:
            raise DataError(fault)
        logits: BertLogits = self._built()(BertInputs(tokens, token_types, padding_mask, position_ids))
        return logits

    def pooled(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Pooled features ``[B, H]`` of the first token, whole on every rank, for heads and losses of your own.

        All ranks of a replica get the same features and must compute the same from them; then gradients are those of
        one process. In a pipeline the step ends here on all stages but the last.

        Args:
            batch: batch as described in the class; labels are not needed.

        Raises:
            ConfigError: for keys that the model does not use, or a model without a pooler.
            DataError: for unknown ids in a batch on the host; on a device the result is NaN.
        """
        self._check(batch)
        return nan_where_unknown(self._built().pooled(_inputs(batch)), batch, self.config.vocab_size)

    def losses(self, batch: Mapping[str, Tensor]) -> BertLosses:
        """Mean losses of both heads.

        Raises:
            ConfigError: for keys that the model does not use.
            DataError: for unknown ids in a batch on the host; on a device the losses are NaN.
        """
        self._check(batch)
        labels, mask, answers = batch["labels"], batch.get("loss_mask"), batch.get("is_random")
        found = self._built().losses(_inputs(batch), labels, mask, None if answers is None else answers.long())
        return BertLosses(nan_where_unknown(found.tokens, batch, self.config.vocab_size), found.next_sentence)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the losses of both heads."""
        return self.losses(batch).total

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        return self._logged_loss("train", batch)

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss`` and its parts."""
        self._logged_loss("val", batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss`` and its parts."""
        self._logged_loss("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> BertLogits:
        """Logits of both heads."""
        if not isinstance(batch, Mapping):
            return self(batch)
        self._check(batch)
        return self(*_inputs(batch))

    def batch_fault(self, batch: Any) -> str | None:
        """Fault of the ids of a batch on the host."""
        return id_fault(batch, self.config.vocab_size, self.config.max_position_embeddings, self._more_ids)

    def without_faults(self, batch: Any) -> Any:
        """Batch with known ids only, for a step that is discarded."""
        return without_faults(batch, self.config.vocab_size, self.config.max_position_embeddings, self._more_ids)

    @property
    def _more_ids(self) -> dict[str, int]:
        return {"token_types": self.config.num_token_types} if self.config.num_token_types else {}

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        check_keys(batch, self.extra_batch_keys, USED, _ELSEWHERE)
        if (fault := self.batch_fault(batch)) is not None:
            raise DataError(fault)

    def _logged_loss(self, kind: str, batch: Mapping[str, Tensor]) -> Tensor:
        losses = self.losses(batch)
        is_late = kind == "train" and self.megatron_strategy is not None
        self.log(f"{kind}_loss", losses.total, prog_bar=not is_late, sync_dist=True)
        if losses.next_sentence is not None:
            self.log(f"{kind}_token_loss", losses.tokens, sync_dist=True)
            self.log(f"{kind}_next_sentence_loss", losses.next_sentence, sync_dist=True)
        return losses.total


def _inputs(batch: Mapping[str, Tensor]) -> BertInputs:
    return BertInputs(batch["tokens"], *(batch.get(name) for name in BertInputs._fields[1:]))

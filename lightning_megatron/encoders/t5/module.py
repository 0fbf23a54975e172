"""LightningModule for T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from lightning_megatron.encoders.t5.answer import answer
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Inputs, T5Model
from lightning_megatron.errors import DataError, raise_if_any
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.lightning.modules.documents import OF_DECODERS
from lightning_megatron.lightning.modules.text_batch import id_fault, key_problems, nan_where_unknown, without_faults
from lightning_megatron.lightning.modules.transformer import TransformerModule

_OF_ENCODER = ("tokens", "padding_mask")
_OF_DECODER = ("decoder_tokens", "labels", "loss_mask")
_ELSEWHERE = {
    "input_ids": "tokens of the encoder stand under 'tokens'",
    "attention_mask": "tokens of the encoder that are no padding are marked under 'padding_mask'",
    "decoder_input_ids": "tokens of the decoder, which begin with its start token, stand under 'decoder_tokens'",
    "decoder_attention_mask": "padding of the decoder comes last, where no token sees it; its labels are -100",
    "position_ids": "the model knows distances of tokens alone",
    "inputs_embeds": "the model begins with token ids",
    **OF_DECODERS,
    "decoder_inputs_embeds": "the model begins with token ids",
}


class T5Module(TransformerModule):
    """T5 with its training: an encoder reads a text, and a decoder that attends to it writes another.

    A batch is a dict of ``tokens`` ``[B, S]`` for the encoder, ``decoder_tokens`` and ``labels`` ``[B, T]`` for the
    decoder (``labels[:, i]`` is ``decoder_tokens[:, i + 1]``: nothing is shifted here; -100 has no loss), and, if
    wanted, ``padding_mask`` ``[B, S]`` (1 for tokens, 0 for padding) and ``loss_mask`` ``[B, T]``.
    :class:`~lightning_megatron.encoders.t5.dataset.T5Dataset` has such samples. Arguments, and what is logged, are
    those of :class:`TransformerModule`.
    """

    default_config = "t5-base"
    config_class = T5Config
    splits_context = True  # so that its configuration, which gives the reason, is what refuses cp > 1
    config: T5Config
    model: T5Model | None

    def build_model(self, placement: Placement) -> T5Model:
        """This rank's part of the model."""
        here = placement
        return T5Model(self.config, here.mesh, here.parts, here.boundary, here.recompute, here.ops)

    def _built(self) -> T5Model:
        return cast(T5Model, super()._built())

    def hidden_shape(self, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
        """``[S + T, B, H]``, the streams of both stacks, or this rank's shards of them."""
        encoder, batch_size, features = super().hidden_shape(batch["tokens"])
        return encoder + super().hidden_shape(batch["decoder_tokens"])[0], batch_size, features

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, V]`` of the decoder, vocabulary padding stripped."""
        ids = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        if (fault := self.batch_fault(ids)) is not None:
            raise DataError(fault)
        logits: Tensor = self._built()(T5Inputs(tokens, decoder_tokens, padding_mask))
        return logits

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss over the decoder's tokens that the ``loss_mask`` keeps; 0 if it keeps none.

        Raises:
            ConfigError: for keys that the model does not use.
            DataError: for unknown ids in a batch on the host; on a device the loss is NaN.
        """
        self._check(batch)
        loss = self._built()(_inputs(batch), batch["labels"], batch.get("loss_mask"))
        return nan_where_unknown(loss, batch, self.config.vocab_size, self._more_ids)

    def generate(self, tokens: Tensor, max_new_tokens: int, *, start: int = 0, **options: Any) -> Tensor:
        """Texts ``[B, 1 + n]`` that the decoder writes for the encoder's texts, of a model without a pipeline.

        Args:
            tokens: texts for the encoder, ``[B, S]``.
            max_new_tokens: tokens to write at most.
            start: token that begins the decoder's text; T5's is its padding, 0.
            **options: further arguments of :func:`~lightning_megatron.encoders.t5.answer.answer`: ``padding_mask``,
                ``temperature``, ``top_k``, ``top_p``, ``stop``, ``seed``.

        Raises:
            ConfigError: for arguments out of range.
            DataError: for unknown ids.
        """
        if (fault := self.batch_fault({"tokens": tokens})) is not None:
            raise DataError(fault)
        return answer(self._built(), tokens, max_new_tokens, start=start, **options)

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Logits ``[B, T, V]``."""
        self._check(batch)
        return self(*_inputs(batch))

    def batch_fault(self, batch: Any) -> str | None:
        """Fault of the ids of a batch on the host."""
        return id_fault(batch, self.config.vocab_size, more=self._more_ids)

    def without_faults(self, batch: Any) -> Any:
        """Batch with known ids only, for a step that is discarded."""
        return without_faults(batch, self.config.vocab_size, more=self._more_ids)

    def batch_flops(self, batch: Mapping[str, Tensor]) -> float:
        """FLOPs of forward and backward for a batch, by the lengths of both stacks."""
        samples, length = batch["tokens"].shape
        return samples * length * self.config.flops_per_token(length, batch["decoder_tokens"].shape[1])

    @property
    def _more_ids(self) -> dict[str, int]:
        return {"decoder_tokens": self.config.vocab_size}

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        own = self.extra_batch_keys
        found = key_problems(batch, (*own, *_OF_DECODER), _OF_ENCODER, _ELSEWHERE)
        found += key_problems(batch, (*batch, *_OF_ENCODER), _OF_DECODER, {})
        raise_if_any(found)
        if (fault := self.batch_fault(batch)) is not None:
            raise DataError(fault)


def _inputs(batch: Mapping[str, Tensor]) -> T5Inputs:
    return T5Inputs(batch["tokens"], batch["decoder_tokens"], batch.get("padding_mask"))

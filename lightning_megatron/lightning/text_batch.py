"""Checks of a language model's batches: their keys, and the ids in them.

Faults of a batch on the host are named. A batch on a device cannot be read without a synchronization: there the loss of
ids outside the vocabulary is NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX

USED = ("tokens", "labels", "loss_mask", "position_ids")

_ACROSS = (
    "attention is causal over the whole sample, across documents and padding: take the key out where that is meant"
)
_MEANT_FOR_THE_MODEL: Mapping[str, str] = {
    "attention_mask": f"{_ACROSS} (padding: at the end, with a loss_mask of 0; documents: no reset_attention_mask)",
    **dict.fromkeys(
        ("cu_seqlens", "segment_ids", "max_seqlen", "packed_seq_params", "document_ids", "token_type_ids"), _ACROSS
    ),
    "input_ids": "tokens stand under 'tokens', and the tokens that follow them under 'labels'",
    "inputs_embeds": "the model begins with token ids",
    "labels_mask": "what each token weighs in the loss stands under 'loss_mask'",
    "label_mask": "what each token weighs in the loss stands under 'loss_mask'",
    "loss_weights": "what each token weighs in the loss stands under 'loss_mask'",
}


def check_keys(batch: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuse keys that would be ignored silently, and shapes that torch would broadcast.

    Values with one number a sample, and values that are no tensors, cannot describe tokens and are allowed.

    Args:
        batch: batch that is given to the model.
        own: further keys that the caller uses.

    Raises:
        ConfigError: naming every key at fault.
    """
    found = []
    for key in batch.keys() - USED:
        if key in _MEANT_FOR_THE_MODEL:
            found.append(Problem(f"batch[{key!r}]", "given", _MEANT_FOR_THE_MODEL[key]))
        elif key not in own and isinstance(batch[key], Tensor) and batch[key].ndim > 1:
            reason = (
                "the model would pass over it: take it out before the batch is given to the model, or name it in the"
                " module's extra_batch_keys, if your own step uses it"
            )
            found.append(Problem(f"batch[{key!r}]", list(batch[key].shape), reason, USED))
    if "tokens" not in batch:
        found.append(Problem("batch", sorted(batch), "has no 'tokens'", USED))
    else:
        shape = tuple(batch["tokens"].shape)
        for key in ("labels", "loss_mask", "position_ids"):
            if batch.get(key) is not None and tuple(batch[key].shape) != shape:
                reason = f"has not the shape of 'tokens', {list(shape)}"
                found.append(Problem(f"batch[{key!r}]", list(batch[key].shape), reason))
    raise_if_any(sorted(found, key=lambda problem: problem.argument))


def id_fault(batch: Any, vocab_size: int, positions: int | None = None) -> str | None:
    """Describe the first id on the host that is outside its range; ``None`` if there is none.

    Args:
        batch: any batch; only mappings of tensors on the host are checked.
        vocab_size: true size of the vocabulary.
        positions: number of learned positions; ``None`` for any.
    """
    for key, ids, end in _ids(batch, vocab_size, positions):
        if not ids.is_cpu or not ids.numel():
            continue
        low, high = (int(x) for x in ids.aminmax())
        if low >= 0 and high < end:
            continue
        outside = _outside(key, ids, end)
        if outside.any():
            place = outside.nonzero()[0].tolist()
            what = f"max_position_embeddings={end}" if key == "position_ids" else f"vocab_size={end}"
            ignored = f", or {IGNORE_INDEX} for no loss" if key == "labels" else ""
            return (
                f"batch[{key!r}]{place} is {int(ids[tuple(place)])}: {what}, so ids are 0 to {end - 1}{ignored}; the"
                " data was made with another tokenizer, or the configuration is of another model"
            )
    return None


def without_faults(batch: Any, vocab_size: int, positions: int | None = None) -> Any:
    """Replace every id that :func:`id_fault` finds by one that the model can compute with."""
    repaired = {
        key: ids.masked_fill(_outside(key, ids, end), IGNORE_INDEX if key == "labels" else 0)
        for key, ids, end in _ids(batch, vocab_size, positions)
    }
    return {**batch, **repaired} if repaired else batch


def nan_where_unknown(out: Tensor, batch: Mapping[str, Any], vocab_size: int) -> Tensor:
    """``out``, or NaN without a gradient if ids on a device are out of range; needs no synchronization."""
    on_device = [_outside(key, ids, end) for key, ids, end in _ids(batch, vocab_size, None) if not ids.is_cpu]
    for outside in on_device:
        out = out.masked_fill(outside.any(), float("nan"))
    return out


def labels_repeat_tokens(batch: Any) -> bool:
    """True if labels are the tokens themselves, not the following ones: a model would learn to repeat its input."""
    if not isinstance(batch, Mapping) or not {"tokens", "labels"} <= batch.keys():
        return False
    tokens, labels = batch["tokens"], batch["labels"]
    if not (isinstance(tokens, Tensor) and isinstance(labels, Tensor) and tokens.is_cpu and labels.is_cpu):
        return False
    if tokens.shape != labels.shape or tokens.ndim != 2:
        return False
    kept = labels != IGNORE_INDEX
    repeats = bool(kept.any()) and bool(((labels == tokens) | ~kept).all())
    follows = bool(((labels[:, :-1] == tokens[:, 1:]) | ~kept[:, :-1]).all())  # one token again and again is both
    return repeats and not follows


def _ids(batch: Any, vocab_size: int, positions: int | None) -> list[tuple[str, Tensor, int]]:
    if not isinstance(batch, Mapping):
        return []
    ends = {"tokens": vocab_size, "labels": vocab_size, "position_ids": positions}
    found = ((key, batch.get(key), end) for key, end in ends.items() if end is not None)
    return [(key, ids, end) for key, ids, end in found if isinstance(ids, Tensor) and not ids.is_floating_point()]


def _outside(key: str, ids: Tensor, end: int) -> Tensor:
    outside = (ids < 0) | (ids >= end)
    return outside & (ids != IGNORE_INDEX) if key == "labels" else outside

"""Checks of a language model's batches: their keys, and the ids in them.

Faults of a batch on the host are named. A batch on a device cannot be read without a synchronization: there the loss of
ids outside the vocabulary is NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import DataError, Problem, raise_if_any
from lightning_megatron.layers.cross_entropy import IGNORE_INDEX

USED = ("tokens", "labels", "loss_mask", "position_ids", "segment_ids")

_DOCUMENTS = "documents of a sequence stand under 'segment_ids' [B, S] (0 for padding) or 'cu_seqlens' [B, n + 1]"
_OF_OTHER_PROGRAMS = (
    "max_seqlen",
    "packed_seq_params",
    "document_ids",
    "sequence_ids",
    "seq_idx",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)
_MEANT_FOR_THE_MODEL: Mapping[str, str] = {
    "attention_mask": f"no mask is ever made, attention is causal: {_DOCUMENTS}; padding may also come last, unmarked",
    **dict.fromkeys(_OF_OTHER_PROGRAMS, _DOCUMENTS),
    "token_type_ids": "the model knows no types of tokens",
    "input_ids": "tokens stand under 'tokens', and the tokens that follow them under 'labels'",
    "inputs_embeds": "the model begins with token ids",
    "labels_mask": "what each token weighs in the loss stands under 'loss_mask'",
    "label_mask": "what each token weighs in the loss stands under 'loss_mask'",
    "loss_weights": "what each token weighs in the loss stands under 'loss_mask'",
}


def tokens_of(batch: Any) -> Tensor:
    """Tokens ``[B, S]`` of a batch: itself, its entry ``"tokens"``, or any of its integers if all have one such shape.

    Raises:
        DataError: if the batch says no such shape.
    """
    if isinstance(batch, Mapping) and USED[0] in batch:
        batch = batch[USED[0]]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    found = [v for v in parts if isinstance(v, Tensor) and v.ndim == 2 and not v.is_floating_point()]
    if len({value.shape for value in found}) != 1:
        raise DataError(
            f"a pipeline stage must know the shape of the tokens, and a {type(batch).__name__} with integers [B, S] of "
            f"{len({value.shape for value in found})} shapes does not say it: give batches as a dict with {USED[0]!r} "
            "[B, S], or override hidden_shape(batch) in the module"
        )
    return found[0]


def check_keys(
    batch: Mapping[str, Any],
    own: Collection[str] = (),
    used: Sequence[str] = USED,
    elsewhere: Mapping[str, str] = _MEANT_FOR_THE_MODEL,
) -> None:
    """Refuse keys that would be ignored silently, and shapes that torch would broadcast.

    Values with one number a sample, and values that are no tensors, cannot describe tokens and are allowed.

    Args:
        batch: batch that is given to the model.
        own: further keys that the caller uses.
        used: keys of the model, each with a value per token; the first one must be there.
        elsewhere: advice for keys that other programs' models use.

    Raises:
        ConfigError: naming every key at fault.
    """
    raise_if_any(sorted(key_problems(batch, own, used, elsewhere), key=lambda problem: problem.argument))


def key_problems(
    batch: Mapping[str, Any], own: Collection[str], used: Sequence[str], elsewhere: Mapping[str, str]
) -> list[Problem]:
    """Faults of keys and shapes; arguments as of :func:`check_keys`, and the first key of ``used`` must be there."""
    found, first = [], used[0]
    for key in batch.keys() - set(used):
        if key in elsewhere:
            found.append(Problem(f"batch[{key!r}]", "given", elsewhere[key]))
        elif key not in own and isinstance(batch[key], Tensor) and _may_describe_tokens(batch[key], batch.get(first)):
            reason = (
                "the model would pass over it: take it out before the batch is given to the model, or name it in the"
                " module's extra_batch_keys, if your own step uses it"
            )
            found.append(Problem(f"batch[{key!r}]", list(batch[key].shape), reason, tuple(used)))
    if first not in batch:
        found.append(Problem("batch", sorted(batch), f"has no {first!r}", tuple(used)))
    else:
        shape = tuple(batch[first].shape)
        for key in used:
            if batch.get(key) is not None and tuple(batch[key].shape) != shape:
                reason = f"has not the shape of {first!r}, {list(shape)}"
                found.append(Problem(f"batch[{key!r}]", list(batch[key].shape), reason))
    return found


def _may_describe_tokens(value: Tensor, tokens: Any) -> bool:
    """True unless the value has exactly one number per sample."""
    return value.ndim > 1 or (value.ndim == 1 and isinstance(tokens, Tensor) and len(value) != len(tokens))


def id_fault(
    batch: Any, vocab_size: int, positions: int | None = None, more: Mapping[str, int] | None = None
) -> str | None:
    """Describe the first id on the host that is outside its range; ``None`` if there is none.

    Args:
        batch: any batch; only mappings of tensors on the host are checked.
        vocab_size: true size of the vocabulary.
        positions: number of learned positions; ``None`` for any.
        more: further keys, and the ends of their ranges.
    """
    for key, ids, end in _ids(batch, vocab_size, positions, more):
        if not ids.is_cpu or not ids.numel():
            continue
        low, high = (int(x) for x in ids.aminmax())
        if low >= 0 and high < end:
            continue
        outside = _outside(key, ids, end)
        if outside.any():
            place = outside.nonzero()[0].tolist()
            ranges = {"position_ids": "max_position_embeddings", **dict.fromkeys(more or (), f"number of {key}")}
            what = f"{ranges.get(key, 'vocab_size')}={end}"
            ignored = f", or {IGNORE_INDEX} for no loss" if key == "labels" else ""
            return (
                f"batch[{key!r}]{place} is {int(ids[tuple(place)])}: {what}, so ids are 0 to {end - 1}{ignored}; the"
                " data was made with another tokenizer, or the configuration is of another model"
            )
    return None


def distance_fault(batch: Any) -> str | None:
    """Describe positions on the host that do not count up, which a model of distances cannot use; ``None`` if none.

    Args:
        batch: any batch; only mappings of tensors on the host are checked.
    """
    ids = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or not ids.is_cpu or ids.ndim != 2:
        return None
    jumps, segments = ids.diff(dim=1) != 1, batch.get("segment_ids")
    if isinstance(segments, Tensor) and segments.is_cpu and segments.shape == ids.shape:
        jumps &= (segments.diff(dim=1) == 0) & (segments[:, 1:] != 0)  # only inside of a document do distances count
    if not bool(jumps.any()):
        return None
    row, column = jumps.nonzero()[0].tolist()
    before, after = ids[row, column : column + 2].tolist()
    return (
        f"batch['position_ids'][{row}, {column + 1}] is {after} and follows {before}: ALiBi weighs the distance of two"
        " tokens in the sample, so positions must count up: leave position_ids or reset_position_ids out"
    )


def without_faults(
    batch: Any, vocab_size: int, positions: int | None = None, more: Mapping[str, int] | None = None
) -> Any:
    """Replace every id that :func:`id_fault` finds by one that the model can compute with."""
    repaired = {
        key: ids.masked_fill(_outside(key, ids, end), IGNORE_INDEX if key == "labels" else 0)
        for key, ids, end in _ids(batch, vocab_size, positions, more)
    }
    return {**batch, **repaired} if repaired else batch


def nan_where_unknown(
    out: Tensor, batch: Mapping[str, Any], vocab_size: int, more: Mapping[str, int] | None = None
) -> Tensor:
    """``out``, or NaN without a gradient if ids on a device are out of range; needs no synchronization.

    Args:
        out: loss or hidden states.
        batch: batch that it was computed from.
        vocab_size: true size of the vocabulary.
        more: further keys, and the ends of their ranges.
    """
    on_device = [_outside(key, ids, end) for key, ids, end in _ids(batch, vocab_size, None, more) if not ids.is_cpu]
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


def _ids(
    batch: Any, vocab_size: int, positions: int | None, more: Mapping[str, int] | None = None
) -> list[tuple[str, Tensor, int]]:
    if not isinstance(batch, Mapping):
        return []
    ends = {"tokens": vocab_size, "labels": vocab_size, "position_ids": positions, **(more or {})}
    found = ((key, batch.get(key), end) for key, end in ends.items() if end is not None)
    return [(key, ids, end) for key, ids, end in found if isinstance(ids, Tensor) and not ids.is_floating_point()]


def _outside(key: str, ids: Tensor, end: int) -> Tensor:
    outside = (ids < 0) | (ids >= end)
    return outside & (ids != IGNORE_INDEX) if key == "labels" else outside

"""Samples of a fixed length for a model that predicts the next token."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.cache import cached_arrays, default_cache_dir, mapped_files
from lightning_megatron.data.gpt_index import EpochPlan, GPTIndex, build_gpt_index, plan_epochs
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.errors import DataError, Problem, raise_if_any

NO_PAD = -1
"""Padding if the tokenizer has no token for it; it is in no file and reaches no model."""
_NAMES = ("document_index", "sample_index", "shuffle_index")


class GPTDataset(Dataset[dict[str, Tensor]]):
    """Documents cut into samples of ``seq_length`` tokens, in Megatron-LM's order.

    An item is a dict of ``tokens``, ``labels`` (the tokens that follow them), ``position_ids``, all int64
    ``[seq_length]``, and ``loss_mask``, float32 ``[seq_length]``. Item ``None`` is padding: a real sample whose loss
    mask is all zero. A data set may be longer than ``num_samples``: whole epochs are cut.

    Args:
        dataset: token files.
        sequences: numbers of the sequences to read, ``[n]``; ``None`` means all.
        seq_length: tokens of a sample.
        num_samples: least number of samples, documents are repeated as needed; ``None`` means one epoch.
        seed: seed of the order of documents and samples.
        split_name: ``train``, ``valid`` or ``test``, used in the cache and in messages.
        add_extra_token: read one token more than ``seq_length``, so that the last one has a label.
        drop_last_partial: leave out the end of the documents if it does not fill a sample; ``False`` pads it.
        pad_id: padding token of the tokenizer. Ignored if it equals ``eod_id``, since then it also occurs in data.
        eod_id: end-of-document token of the tokenizer; the three options below need it.
        eod_mask_loss: leave positions out of the loss at which the *input* is the end of a document.
        reset_position_ids: count positions from 0 after each end of a document. As in Megatron-LM, attention still
            crosses it, unless ``reset_attention_mask`` is given too.
        reset_attention_mask: add ``segment_ids``, int64 ``[seq_length]``: documents are numbered from 1, padding is 0,
            and models keep attention inside of each. Megatron-LM's mask ``[seq_length, seq_length]`` says the same.
        cache_dir: directory of the index arrays; ``None`` means ``cache/GPTDataset_indices`` beside the files, or
            memory if that cannot be written.

    Raises:
        ConfigError: if an argument cannot work.
        DataError: if there are no tokens to read or ``cache_dir`` cannot be written.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: NDArray[Any] | None = None,
        *,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split_name: str = "train",
        add_extra_token: bool = True,
        drop_last_partial: bool = True,
        pad_id: int | None = None,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        needs_eod = {
            "eod_mask_loss": eod_mask_loss,
            "reset_position_ids": reset_position_ids,
            "reset_attention_mask": reset_attention_mask,
        }
        problems = [Problem(n, True, "needs eod_id") for n, on in needs_eod.items() if on and eod_id is None]
        if seq_length < 1:
            problems.append(Problem("seq_length", seq_length, "a sample has at least 1 token", (1,)))
        if num_samples is not None and num_samples < 0:
            problems.append(Problem("num_samples", num_samples, "cannot be negative", (0, None)))
        raise_if_any(problems)
        if dataset.dtype.kind not in "iu":
            raise DataError.at(dataset.prefix, f"its tokens are {dataset.dtype.name}, which no ids are")

        self.dataset = dataset
        self.seq_length = seq_length
        self.split_name = split_name
        self._may_be_negative = dataset.dtype.kind != "u"
        self._extra = int(add_extra_token)
        self._pad = NO_PAD if pad_id is None or pad_id == eod_id else pad_id
        self._eod = eod_id
        self._eod_mask_loss = eod_mask_loss
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask

        chosen = np.arange(len(dataset), dtype=np.int32) if sequences is None else np.asarray(sequences, np.int32)
        tokens = int(dataset.sequence_lengths[chosen].sum(dtype=np.int64))
        if not tokens:
            fault = f"the {split_name} part has no tokens ({len(chosen)} of {len(dataset)} sequences)"
            raise DataError.at(dataset.prefix, fault, do="give it a larger share of the split, or more data")
        plan = plan_epochs(
            tokens, num_samples, seq_length, extra_token=add_extra_token, drop_last_partial=drop_last_partial
        )
        self._index = self._cached_index(chosen, plan, seed, cache_dir)
        self._mapped = mapped_files(vars(self._index).values())

    @property
    def index(self) -> GPTIndex:
        """Order of documents and samples."""
        return self._index

    def __len__(self) -> int:
        return len(self._index.shuffle)

    def __getitem__(self, item: int | None) -> dict[str, Tensor]:
        """Sample ``item``, or the padding sample for ``None``.

        Raises:
            IndexError: if there is no such sample.
            DataError: if the files or their index cache have been changed during the run.
        """
        if item is not None and not -len(self) <= item < len(self):
            raise IndexError(f"{self.dataset.prefix}: {len(self)} {self.split_name} samples, there is no number {item}")
        read, filled = self._read(0 if item is None else item)
        text = torch.from_numpy(read)
        if self._extra:
            tokens, labels = text[:-1].clone(), text[1:].clone()
        else:
            tokens, labels = text, text.roll(-1)
            labels[-1] = self._pad
        sample = {"tokens": tokens, "labels": labels}
        sample["loss_mask"] = self._loss_mask(tokens, labels) * (item is not None)
        sample |= self._document_bounds(tokens, filled)
        # The embedding has no row for the padding; the loss mask is 0 there.
        tokens[tokens == self._pad] = 0
        labels[labels == self._pad] = 0
        return sample

    def _read(self, item: int) -> tuple[NDArray[np.int64], int]:
        """Tokens of a sample, and how many of them are no padding."""
        try:
            self._mapped.check()
            return self._filled_tokens(item)
        except DataError:
            raise
        except (IndexError, ValueError, TypeError, OverflowError) as error:
            fault = f"{self.split_name} sample {item} cannot be read ({error})"
            do = "the files or their index cache were changed under the run: start again, without the cache"
            raise DataError.at(self.dataset.prefix, fault, do=do) from error

    def _filled_tokens(self, item: int) -> tuple[NDArray[np.int64], int]:
        """Tokens of a sample and the extra one, padded at the end, ``[seq_length + extra]``; and their number."""
        number = int(self._index.shuffle[item])
        (first, start), (last, end) = self._index.samples[number].tolist(), self._index.samples[number + 1].tolist()
        documents = self._index.documents[first : last + 1].tolist()
        text = np.full(self.seq_length + self._extra, self._pad, np.int64)
        filled = 0
        for position, document in enumerate(documents):
            offset = start if position == 0 else 0
            length = end + self._extra - offset if position == last - first else None
            part = self.dataset.get(document, offset, length)
            if self._may_be_negative and len(part) and part.min() < 0:
                raise ValueError(f"sequence {document} holds the token {part.min()}")
            text[filled : filled + len(part)] = part
            filled += len(part)
        if filled < len(text) and number + 2 < len(self._index.samples):  # only the last sample may need padding
            raise ValueError(f"its index leads to {filled} of {len(text)} tokens")
        return text, filled

    def _loss_mask(self, tokens: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != self._pad).float()
        if self._eod_mask_loss:
            mask[tokens == self._eod] = 0.0
        return mask

    def _document_bounds(self, tokens: Tensor, filled: int) -> dict[str, Tensor]:
        """``position_ids``, and ``segment_ids`` if wanted."""
        positions = torch.arange(self.seq_length)
        if not (self._reset_position_ids or self._reset_attention_mask):
            return {"position_ids": positions}
        after_eod = torch.zeros(self.seq_length, dtype=torch.bool)
        after_eod[1:] = tokens[:-1] == self._eod
        result = {"position_ids": positions}
        if self._reset_position_ids:
            result["position_ids"] = positions - torch.where(after_eod, positions, 0).cummax(0).values
        if self._reset_attention_mask:
            result["segment_ids"] = torch.where(positions < filled, after_eod.cumsum(0) + 1, 0)
        return result

    def _cached_index(
        self, sequences: NDArray[np.int32], plan: EpochPlan, seed: int, cache_dir: str | Path | None
    ) -> GPTIndex:
        lengths = self.dataset.sequence_lengths
        # No path: the arrays depend on the lengths only, and data that is moved keeps its cache.
        description = {
            "class": "GPTDataset",
            "split": self.split_name,
            "sequences": len(sequences),
            "sequences_crc32": zlib.crc32(np.ascontiguousarray(sequences).data),
            "lengths_crc32": zlib.crc32(np.ascontiguousarray(lengths).data),
            "epochs": plan.epochs,
            "samples": plan.samples,
            "separate_after": plan.separate_after,
            "seq_length": self.seq_length,
            "extra_token": self._extra,
            "seed": seed,
        }

        def build() -> dict[str, NDArray[Any]]:
            index = build_gpt_index(
                lengths, sequences, plan, seq_length=self.seq_length, seed=seed, extra_token=bool(self._extra)
            )
            return dict(zip(_NAMES, (index.documents, index.samples, index.shuffle), strict=True))

        kind, beside = f"GPTDataset-{self.split_name}", default_cache_dir(self.dataset.prefix)
        arrays = cached_arrays(cache_dir, beside, kind, _NAMES, description, build)
        return GPTIndex(*(arrays[name] for name in _NAMES))

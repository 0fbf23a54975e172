"""Document, sample and shuffle index of a GPT data set, which define the tokens of each sample.

The orders are those of Megatron-LM's GPT data set, number for number, so a run continues on the same data whichever of
the two tools it was started with. Documents are shuffled and laid end to end; sample ``k`` is the ``seq_length`` tokens
from token ``k * seq_length`` on (and one more, the last label); samples are shuffled. All is computed from prefix sums:
there is no loop over samples or documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from lightning_megatron.data.cache import picklable, unpickled

_SEPARATE_BELOW = 0.80
"""A last epoch that gives less than this part of its samples is kept apart, or its few samples would favour some
documents over the whole run."""

_BLOCK = 1 << 16


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs over the documents; the last one may be shuffled separately.

    Attributes:
        epochs: passes over the documents.
        samples: number of samples in them.
        separate_after: samples before the last epoch if that is shuffled separately, else ``None``.
    """

    epochs: int
    samples: int
    separate_after: int | None


@dataclass(frozen=True)
class GPTIndex:
    """Arrays that define the samples.

    Attributes:
        documents: ``[epochs * sequences]`` int32, sequence numbers in reading order.
        samples: ``[n + 1, 2]``, where sample ``k`` starts: (position in ``documents``, token in that sequence); row
            ``k + 1`` is where it ends.
        shuffle: ``[n]``, item ``i`` of the data set is sample ``shuffle[i]``.
    """

    documents: NDArray[np.int32]
    samples: NDArray[Any]
    shuffle: NDArray[Any]

    def __getstate__(self) -> dict[str, object]:
        return {name: picklable(array) for name, array in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, array in state.items():
            object.__setattr__(self, name, unpickled(array))


def plan_epochs(
    tokens: int, num_samples: int | None, seq_length: int, *, extra_token: bool = True, drop_last_partial: bool = True
) -> EpochPlan:
    """Plan the epochs of ``tokens`` tokens that give at least ``num_samples`` samples.

    Args:
        tokens: tokens of one epoch, at least 1.
        num_samples: number of samples; ``None`` means one epoch.
        seq_length: tokens of a sample.
        extra_token: True if a sample has one more token, the label of its last one.
        drop_last_partial: leave out the tokens at the end that do not fill a sample.
    """
    extra = int(extra_token)
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + extra) // tokens))
    usable = epochs * tokens - extra
    # Megatron divides in float32 where it keeps the last part, and is off above 2^24 tokens. This is exact.
    samples = max(0, usable // seq_length if drop_last_partial else -(-usable // seq_length))
    if epochs == 1 or num_samples is None:
        return EpochPlan(epochs, samples, None)
    before_last = ((epochs - 1) * tokens - extra) // seq_length
    per_epoch = (tokens - extra) // seq_length
    separate = num_samples - before_last < int(_SEPARATE_BELOW * per_epoch)
    return EpochPlan(epochs, samples, before_last if separate else None)


def document_order(sequences: NDArray[np.int32], plan: EpochPlan, rng: RandomState) -> NDArray[np.int32]:
    """Sequence numbers of all epochs in reading order, ``[epochs * len(sequences)]`` int32.

    Epochs are shuffled together; one that is kept apart is shuffled by itself.
    """
    together = plan.epochs if plan.separate_after is None else plan.epochs - 1
    order = np.tile(sequences.astype(np.int32), together)
    rng.shuffle(order)
    if together == plan.epochs:
        return order
    last = sequences.astype(np.int32)
    rng.shuffle(last)
    return np.concatenate([order, last])


def sample_bounds(
    lengths: NDArray[Any],
    samples: int,
    seq_length: int,
    *,
    order: NDArray[np.int32] | None = None,
    extra_token: bool = True,
    dtype: type = np.int32,
) -> NDArray[Any]:
    """Start and end of each sample in sequences that are laid end to end.

    Sample ``k`` needs the tokens up to ``(k + 1) * seq_length`` (and the extra one), so it ends in the first sequence
    whose end is not before that token; the number of that sequence is the number of sequences that end earlier. A
    cumulative sum counts these for all samples at once: the end of a sequence (less the extra token), divided by
    ``seq_length``, is the number of samples that are complete by then.

    Args:
        lengths: ``[s]`` tokens of each sequence.
        samples: number of samples; the last may be longer than the rest.
        seq_length: tokens of a sample.
        order: ``[m]`` numbers of the sequences in reading order; ``None`` means all of them as they are.
        extra_token: True if a sample reads one more token, which the next sample reads again.
        dtype: type of the result.

    Returns:
        ``[samples + 1, 2]``: (sequence position, token in it).
    """
    extra, count = int(extra_token), len(lengths) if order is None else len(order)
    bounds: NDArray[Any] = np.zeros((samples + 1, 2), dtype)
    done, end = 0, 0  # samples with an end so far, and tokens so far
    for start in range(0, count, _BLOCK):  # in blocks, which fit into a processor's cache
        block = slice(start, min(start + _BLOCK, count))
        sizes = lengths[block] if order is None else lengths.take(order[block])
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += end
        reached = (ends - extra) // seq_length  # samples that are complete by then
        last = min(samples, int(reached[-1]))
        if last > done:
            reached -= done
            if reached[0] < 0 or reached[-1] > last - done:
                np.clip(reached, 0, last - done, out=reached)
            position = np.cumsum(np.bincount(reached, minlength=last - done + 1)[:-1])
            token = np.arange(done + 1, last + 1, dtype=np.int64) * seq_length
            token -= ends.take(position)
            token += sizes.take(position)
            bounds[done + 1 : last + 1, 0] = position
            bounds[done + 1 : last + 1, 0] += dtype(start)
            bounds[done + 1 : last + 1, 1] = token
            done = last
        end = int(ends[-1])
    if done < samples:  # the remaining tokens, fewer than a sample needs
        last_sequence = count - 1 if order is None else int(order[-1])
        bounds[done + 1 :, 0] = count - 1
        bounds[done + 1 :, 1] = int(lengths[last_sequence]) - extra
    return bounds


def sample_order(samples: int, separate_after: int | None, rng: RandomState) -> NDArray[Any]:
    """Permutation of the samples, ``[samples]`` uint32 (int64 if they are too many).

    Samples of a last epoch that is kept apart stay behind all others.
    """
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    order = np.arange(samples, dtype=dtype)
    if separate_after is None:
        rng.shuffle(order)
        return order
    first, last = order[:separate_after].copy(), order[separate_after:].copy()
    rng.shuffle(first)
    rng.shuffle(last)
    return np.concatenate([first, last])


def build_gpt_index(
    sequence_lengths: NDArray[np.int32],
    sequences: NDArray[np.int32],
    plan: EpochPlan,
    *,
    seq_length: int,
    seed: int,
    extra_token: bool = True,
) -> GPTIndex:
    """Build the arrays of a plan, all drawn from one random stream.

    Args:
        sequence_lengths: ``[S]`` tokens of every sequence of the file.
        sequences: numbers of the sequences of this split.
        plan: plan of :func:`plan_epochs` for the tokens of this split.
        seq_length: tokens of a sample.
        seed: seed of the stream; equal for every split and file, as in Megatron.
        extra_token: True if a sample has one more token.
    """
    rng = RandomState(seed)
    documents = document_order(sequences, plan, rng)
    largest = max(len(documents), int(sequence_lengths.max(initial=0)))
    dtype = np.int64 if largest > np.iinfo(np.int32).max else np.int32
    bounds = sample_bounds(
        sequence_lengths, plan.samples, seq_length, order=documents, extra_token=extra_token, dtype=dtype
    )
    return GPTIndex(documents, bounds, sample_order(plan.samples, plan.separate_after, rng))

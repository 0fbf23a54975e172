"""What a user may say of the documents in a batch, what it means, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from packing import VOCAB, B, S, batch_of, module_of

from lightning_megatron import BertModule, GPTModule, T5Module
from lightning_megatron.config.rope_scaling import DynamicScaling
from lightning_megatron.documents import device_problem, segments_of_bounds
from lightning_megatron.errors import ConfigError, DataError

SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 2, 2, 2, 2, 2]])
BOUNDS = torch.tensor([[0, 3, 8, 12], [0, 7, 12, 12]])


def test_bounds_say_what_segments_say() -> None:
    module = module_of()
    by_segments = module.loss(batch_of(segment_ids=SEGMENTS))
    assert torch.equal(module.loss(batch_of(cu_seqlens=BOUNDS)), by_segments)
    assert torch.equal(module.loss(batch_of(cu_seqlens=BOUNDS.int())), by_segments)
    assert not torch.equal(module.loss(batch_of()), by_segments)
    alone = {key: value[:1] for key, value in batch_of().items()}
    one = module.loss(alone | {"cu_seqlens": BOUNDS[0]})
    assert torch.equal(one, module.loss(alone | {"segment_ids": SEGMENTS[:1]}))
    assert segments_of_bounds(torch.tensor([0, 3, 3, 5]), 5).tolist() == [[1, 1, 1, 3, 3]]


def test_every_method_keeps_documents_apart() -> None:
    module, batch = module_of(), batch_of(segment_ids=SEGMENTS)
    hidden = module.hidden(batch)
    losses = module.token_losses(batch, hidden)
    torch.testing.assert_close(losses.mean(), module.loss(batch))
    torch.testing.assert_close(module.loss(batch, hidden), module.loss(batch))
    logits = module.predict_step(batch, 0)
    torch.testing.assert_close(module(batch["tokens"], segment_ids=SEGMENTS), logits)
    changed = batch["tokens"].clone()
    changed[0, 1] += 1
    changed[0, 1] %= VOCAB
    torch.testing.assert_close(module(changed, segment_ids=SEGMENTS)[0, 3:], logits[0, 3:], rtol=0, atol=0)
    assert not torch.equal(module(changed)[0, 3:], module(batch["tokens"])[0, 3:])


def test_padding_has_no_loss_whatever_its_labels_and_weights_are() -> None:
    module, segments = module_of(), SEGMENTS.clone()
    segments[0, 8:] = 0
    batch = batch_of(segment_ids=segments)
    expected = module.loss(batch | {"loss_mask": (segments != 0).float()})
    assert torch.equal(module.loss(batch), expected)
    assert not module.token_losses(batch)[0, 8:].any()
    nothing = module.loss(batch_of(segment_ids=torch.zeros_like(segments)))
    nothing.backward()
    assert nothing == 0
    assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


def test_positions_begin_anew_unless_they_are_given() -> None:
    module = module_of(GPTModule, "gpt-tiny")
    again = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(7), *range(5)]])
    by_default = module.loss(batch_of(segment_ids=SEGMENTS))
    assert torch.equal(module.loss(batch_of(segment_ids=SEGMENTS, position_ids=again)), by_default)
    through = torch.arange(S).expand(B, S)
    assert not torch.equal(module.loss(batch_of(segment_ids=SEGMENTS, position_ids=through)), by_default)


def test_learned_positions_need_to_reach_to_the_end_of_a_document_only() -> None:
    module = module_of(GPTModule, "gpt-tiny", max_position_embeddings=7)
    module.loss(batch_of(segment_ids=SEGMENTS))
    longer = torch.tensor([[1] * 8 + [2] * 4] * 2)
    with pytest.raises(ConfigError, match=re.escape("seq_length=8: longer than max_position_embeddings=7")):
        module.loss(batch_of(segment_ids=longer))


def test_angles_that_depend_on_the_length_of_a_sequence_are_refused_where_they_would_differ() -> None:
    module = module_of(rope_scaling=DynamicScaling(2.0, 7))
    module.loss(batch_of(segment_ids=SEGMENTS))
    with pytest.raises(ConfigError, match="longest document=8: dynamic scaling needs slower angles"):
        module.loss(batch_of(segment_ids=torch.tensor([[1] * 8 + [2] * 4] * 2)))


def test_alibi_counts_distances_inside_of_a_document() -> None:
    module = module_of(GPTModule, "bloom-560m", position_embedding="alibi")
    again = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(7), *range(5)]])
    module.loss(batch_of(segment_ids=SEGMENTS, position_ids=again))
    again[0, 4] = 7
    with pytest.raises(DataError, match=re.escape("batch['position_ids'][0, 4] is 7 and follows 0: ALiBi")):
        module.loss(batch_of(segment_ids=SEGMENTS, position_ids=again))


def test_segments_stay_on_the_host_and_bounds_become_segments() -> None:
    module = module_of()
    batch = module.on_before_batch_transfer(batch_of(cu_seqlens=BOUNDS), 0)
    assert batch.keys() == {"tokens", "labels", "segment_ids"}
    moved = module.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["tokens"].is_meta
    assert moved["segment_ids"] is batch["segment_ids"]
    plain = batch_of()
    assert module.on_before_batch_transfer(plain, 0) is plain


def test_devices_that_make_a_graph_for_every_shape_are_refused() -> None:
    assert device_problem("segment_ids", torch.device("cpu")) is None
    text = str(ConfigError([p for p in (device_problem("segment_ids", torch.device("hpu")),) if p is not None]))
    assert "batch['segment_ids']='given': FusedSDPA takes no document bounds" in text


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "again": (
        {"segment_ids": torch.tensor([[1] * 4 + [2] * 4 + [1] * 4, [1] * 12])},
        "batch['segment_ids'][0, 8] is 1, and document 1 began at 0 and has ended since",
    ),
    "again after padding": (
        {"segment_ids": torch.tensor([[1] * 12, [0, 0, 3, 3, 0, 3, 3, 3, 4, 4, 4, 4]])},
        "batch['segment_ids'][1, 5] is 3, and document 3 began at 2 and has ended since",
    ),
    "negative": (
        {"segment_ids": torch.tensor([[1] * 12, [1] * 10 + [-1] * 2])},
        "batch['segment_ids'][1, 10] is -1: documents have ids from 1, and padding 0",
    ),
    "floats": ({"segment_ids": torch.ones(B, S)}, "batch['segment_ids'] is torch.float32: it must be a tensor of int"),
    "list": ({"cu_seqlens": [[0, 12], [0, 12]]}, "batch['cu_seqlens'] is list: it must be a tensor of integers"),
    "both": (
        {"segment_ids": SEGMENTS, "cu_seqlens": BOUNDS},
        "batch has both 'segment_ids' and 'cu_seqlens': they say the same",
    ),
    "rows of bounds": ({"cu_seqlens": BOUNDS[:1]}, "batch['cu_seqlens'] has shape [1, 4]: it must be [2, n + 1]"),
    "flat bounds": (
        {"cu_seqlens": torch.tensor([0, 12, 24])},
        "batch['cu_seqlens'] has shape [3]: it must be [2, n + 1] (or [n + 1] for a single sequence)",
    ),
    "no bounds": ({"cu_seqlens": torch.zeros(B, 1, dtype=torch.int64)}, "batch['cu_seqlens'] has shape [2, 1]"),
    "first bound": (
        {"cu_seqlens": torch.tensor([[1, 3, 12], [0, 7, 12]])},
        "batch['cu_seqlens'][0] begins with 1: the first document begins at 0",
    ),
    "falling bounds": (
        {"cu_seqlens": torch.tensor([[0, 3, 12, 12], [0, 7, 5, 12]])},
        "batch['cu_seqlens'][1] falls from 7 to 5: ends of documents must not decrease",
    ),
    "last bound": (
        {"cu_seqlens": torch.tensor([[0, 3, 12], [0, 7, 10]])},
        "batch['cu_seqlens'][1] ends at 10, and the sequence has 12 tokens: the last document ends with it",
    ),
    "bound beyond": ({"cu_seqlens": torch.tensor([[0, 12], [0, 13]])}, "batch['cu_seqlens'][1] ends at 13, and the"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_documents_that_cannot_be_are_named(name: str) -> None:
    keys, text = FAULTS[name]
    module, batch = module_of(), batch_of(**keys)
    for call in (module.loss, module.hidden, module.token_losses, lambda b: module.predict_step(b, 0)):
        with pytest.raises(DataError, match=re.escape(text)):
            call(batch)
    fault = module.batch_fault(batch)
    assert fault is not None
    assert fault.startswith(text)
    module.loss(module.without_faults(batch))  # a step that is discarded


def test_segments_of_another_shape_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"batch\['segment_ids'\]=\[2, 11\]: has not the shape of 'tokens', \[2, 12\]"
    ):
        module_of().loss(batch_of(segment_ids=SEGMENTS[:, 1:]))
    with pytest.raises(DataError, match=re.escape("batch['segment_ids'] has shape [2, 11], and 'tokens' [2, 12]")):
        module_of()(batch_of()["tokens"], segment_ids=SEGMENTS[:, 1:])


@pytest.mark.parametrize("key", ["max_seqlen", "packed_seq_params", "document_ids", "cu_seq_lens_q", "seq_idx"])
def test_other_programs_words_for_documents_are_refused(key: str) -> None:
    text = "documents of a sequence stand under 'segment_ids' [B, S] (0 for padding) or 'cu_seqlens' [B, n + 1]"
    with pytest.raises(ConfigError, match=re.escape(f"batch['{key}']='given': {text}")):
        module_of().loss(batch_of(**{key: torch.tensor([0, 3, S])}))


def test_a_list_of_numbers_that_is_not_one_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\['starts'\]=\[3\]: the model would pass over it"):
        module_of().loss(batch_of(starts=torch.tensor([0, 3, 7])))
    module_of().loss(batch_of(number=torch.tensor([0, 3])))


def test_encoders_refuse_documents_by_name() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40}
    bert, t5 = BertModule("bert-base", **sizes), T5Module("t5-base", **sizes, ffn_hidden_size=16, head_dim=8)
    for key in ("segment_ids", "cu_seqlens"):
        text = re.escape(f"batch['{key}']='given': documents of a sequence are kept apart by decoders alone")
        with pytest.raises(ConfigError, match=text):
            bert.loss({"tokens": tokens, "labels": tokens, key: tokens})
        with pytest.raises(ConfigError, match=text):
            t5.loss({"tokens": tokens, "decoder_tokens": tokens, "labels": tokens, key: tokens})

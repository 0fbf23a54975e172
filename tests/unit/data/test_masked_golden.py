"""Samples of BERT and T5 against those that NVIDIA's megatron-core 0.16.1 made from one seed (see golden/README.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data import IndexedDataset
from lightning_megatron.encoders.bert.dataset import BertDataset
from lightning_megatron.encoders.sentences.masking import MaskingRule, Vocabulary
from lightning_megatron.encoders.sentences.mersenne_twister import draw_64_bits
from lightning_megatron.encoders.t5.dataset import SpanVocabulary, T5Dataset
from tests.unit.data.golden.masked_cases import BERT, PIECES, SAMPLES, SENTINELS, SPECIAL, T5, Case

GOLDEN = Path(__file__).parent / "golden"
CONTINUES = np.array([piece.startswith("##") for piece in PIECES])
CLS, SEP, MASK, PAD = (SPECIAL[name] for name in ("cls", "sep", "mask", "pad"))
WORDS = Vocabulary(np.arange(len(PIECES)), CLS, SEP, MASK, PAD, CONTINUES)
GAPS = SpanVocabulary(tuple(SENTINELS), SPECIAL["bos"], SPECIAL["eos"], PAD, CONTINUES)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "masked.npz") as file:
        return dict(file)


def arguments(case: Case, cache: Path, *, geometric: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length, documents, seed, options = case
    rule = MaskingRule(
        options.get("masking_probability", 0.15),
        options.get("masking_max_ngram", 3),
        options.get("masking_do_full_word", True),
        0.2 if options.get("masking_use_geometric_distribution", geometric) else 0.0,
    )
    return (IndexedDataset(GOLDEN / "sentences"), np.arange(*documents)), {
        "seq_length": length,
        "num_samples": SAMPLES,
        "seed": seed,
        "masking": rule,
        "short_probability": options.get("short_sequence_probability", 0.1),
        "cache_dir": cache,
    }


def assert_equal(ours: list[dict[str, torch.Tensor]], name: str, theirs: np.ndarray) -> None:
    for number, (own, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert own[name].tolist() == expected.tolist(), f"{name} of sample {number}"


@pytest.mark.parametrize("name", BERT)
def test_samples_of_bert_are_megatrons(name: str, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    given, options = arguments(BERT[name], tmp_path, geometric=False)
    data = BertDataset(*given, vocabulary=WORDS, **options)
    theirs = {key.rsplit("/", 1)[1]: value for key, value in golden.items() if key.startswith(f"bert/{name}/")}
    assert data.index.tolist() == theirs["index"][:SAMPLES].tolist()
    items = [data[number] for number in range(len(data))]
    assert_equal(items, "tokens", theirs["text"])
    assert_equal(items, "token_types", theirs["types"])
    # There a masked token in whose place chance has put [PAD] counts as padding; it has a loss nevertheless.
    assert_equal(items, "padding_mask", theirs["padding_mask"] | theirs["loss_mask"])
    assert_equal(items, "labels", np.where(theirs["loss_mask"] == 1, theirs["labels"], -100))
    assert_equal(items, "is_random", theirs["is_random"])
    assert theirs["is_random"].any()
    assert theirs["truncated"].any()


@pytest.mark.parametrize("name", T5)
def test_samples_of_t5_are_megatrons(name: str, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    given, options = arguments(T5[name], tmp_path, geometric=True)
    decoder = T5[name][3]["sequence_length_decoder"]
    data = T5Dataset(*given, vocabulary=GAPS, decoder_seq_length=decoder, **options)
    theirs = {key.rsplit("/", 1)[1]: value for key, value in golden.items() if key.startswith(f"t5/{name}/")}
    assert data.index.tolist() == theirs["index"][:SAMPLES].tolist()
    items = [data[number] for number in range(len(data))]
    assert_equal(items, "tokens", theirs["text_enc"])
    assert_equal(items, "padding_mask", theirs["enc_mask"])
    assert_equal(items, "decoder_tokens", theirs["text_dec"])
    assert_equal(items, "labels", np.where(theirs["loss_mask"] == 1, theirs["labels"], -100))


def test_the_order_is_drawn_as_in_cpp() -> None:
    """The 10,000th number of a default `std::mt19937_64`, by the C++ standard (26.6.6 [rand.predef])."""
    assert draw_64_bits(5489, 10_000)[-1] == 9981545732273789042
    assert draw_64_bits(1, 0).size == 0

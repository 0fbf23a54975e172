"""Tiny random models of every family against transformers: logits, losses, gradients, generation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.families import FAMILIES
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from tests.families import TINY, hf_files, hf_model, our_config, our_model, our_tensors, tokens_of
from tests.foreign import to_foreign, weight_map

pytest.importorskip("transformers")

LOGITS, GRADIENTS = 1e-5, 1e-4


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@cache
def pair(family: str) -> tuple[Any, GPTModel, dict[str, Tensor]]:
    theirs = hf_model(TINY[family])
    files = hf_files(theirs)
    return theirs, our_model(TINY[family], files), files


def test_every_family_is_tested() -> None:
    decoders = {name for name, family in FAMILIES.items() if family.model == Family.model}
    assert TINY.keys() == decoders
    assert FAMILIES.keys() - decoders == {"bert", "t5"}, "encoders have tests of their own"


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(("batch", "length"), [(2, 16), (3, 1), (1, 7), (2, 23), (1, 1)])
def test_logits_and_losses(family: str, batch: int, length: int) -> None:
    theirs, ours, _ = pair(family)
    tokens = tokens_of(batch, length)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert deviation(ours(tokens), expected) < LOGITS
        if length > 1:
            labels = tokens.roll(-1, dims=1)
            labels[:, -1] = -100
            loss = float(theirs(tokens, labels=tokens).loss)
            assert float(ours(tokens, labels=labels)) == pytest.approx(loss, rel=LOGITS)


@pytest.mark.parametrize("family", [family for family in TINY if family != "bloom"])  # distances alone, on both sides
def test_logits_at_positions_of_their_own(family: str) -> None:
    theirs, ours, _ = pair(family)
    tokens = tokens_of(2, 9)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 5))
    with torch.no_grad():
        assert deviation(ours(tokens, position_ids=positions), theirs(tokens, position_ids=positions).logits) < LOGITS


@pytest.mark.parametrize("family", TINY)
def test_gradients_of_all_parameters(family: str) -> None:
    theirs, ours, _ = pair(family)
    tokens = tokens_of(3, 17)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    theirs.zero_grad()
    theirs(tokens, labels=tokens).loss.backward()
    values = {name: param.detach().clone() for name, param in theirs.named_parameters()}
    with torch.no_grad():  # gradients go through the same files as weights
        for param in theirs.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        expected = our_tensors(TINY[family], hf_files(theirs))
        for name, param in theirs.named_parameters():
            param.copy_(values[name])
    ours.zero_grad()
    ours(tokens, labels=labels).backward()
    found = {name: param.grad for name, param in ours.named_parameters()}
    # The bias of an expert is a weight in files, and has no gradient.
    assert found.keys() == {name for name in expected if not name.endswith("expert_bias")}
    wrong = {}
    for name, gradient in found.items():
        assert gradient is not None, name
        if not deviation(gradient[: expected[name].shape[0]], expected[name]) < GRADIENTS:
            wrong[name] = deviation(gradient[: expected[name].shape[0]], expected[name])
    assert wrong == {}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5)])
def test_greedy_generation_token_by_token(family: str, batch: int, length: int) -> None:
    theirs, ours, _ = pair(family)
    prompt = tokens_of(batch, length, seed=4)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    expected = theirs.generate(prompt, **options)
    assert expected.shape[1] == length + 20
    assert torch.equal(generate(ours, prompt, 20, temperature=0.0), expected)


@pytest.mark.parametrize("family", TINY)
def test_files_survive_the_way_there_and_back_bit_for_bit(family: str) -> None:
    files = pair(family)[2]
    rules = weight_map(FAMILIES[family], our_config(TINY[family]))
    back = to_foreign(rules, our_tensors(TINY[family], files))
    tied = {name for rule in rules.rules for name in rule.repeats}  # files hold them once
    assert back.keys() == files.keys() - tied
    assert all(torch.equal(back[name], files[name]) for name in back)

"""BLOOM against transformers: logits, losses, gradients of all parameters, and text token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.registry import Ops, choices_of
from lightning_megatron.params import ShardRanks
from tests.foreign import to_native, weight_map
from tests.whole_weights import load_full

transformers = pytest.importorskip("transformers")

BLOOM = FAMILIES["bloom"]
HEADS = (6, 8)
BATCHES = [(1, 1), (1, 12), (2, 7), (3, 33)]
VOCABULARY = 37


@cache
def reference(heads: int) -> Any:
    torch.manual_seed(heads)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8 * heads, "n_layer": 3, "n_head": heads}
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).eval()
    for param in model.parameters():  # biases and norms too, or a swap of two would not show
        torch.nn.init.normal_(param, std=0.3)
    return model


def foreign(tensors: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Tensors of transformers' model by our names."""
    return to_native(weight_map(BLOOM, config), tensors, parameter_shapes(config))


def ours(heads: int, ops: str | None = None) -> GPTModel:
    theirs = reference(heads)
    config = TransformerConfig(**BLOOM.config_from_hf(theirs.config.to_dict()), vocab_multiple=1)
    model = GPTModel(config, ops=Ops("cpu", ops)).eval()
    load_full(model, foreign(dict(theirs.state_dict()), config), ShardRanks())
    return model


def tokens_of(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("ops", [None, "attention=off"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("batch", "length"), BATCHES)
def test_logits_equal_transformers(heads: int, batch: int, length: int, ops: str | None) -> None:
    tokens = tokens_of(batch, length)
    with torch.no_grad():
        expected, found = reference(heads)(tokens).logits, ours(heads, ops)(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("batch", "length"), BATCHES[1:])
def test_the_loss_and_the_gradients_of_all_parameters_equal_transformers(heads: int, batch: int, length: int) -> None:
    theirs, model, tokens = reference(heads), ours(heads), tokens_of(batch, length)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    theirs.zero_grad()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    loss = model(tokens, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = foreign({name: param.grad for name, param in theirs.named_parameters()}, model.config)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    found = {name: param.grad for name, param in model.named_parameters()}
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        mine = found[name]
        assert mine is not None, name
        assert (mine - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-5 * largest, name


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 7)])
def test_greedy_text_equals_transformers_token_by_token(heads: int, batch: int, length: int) -> None:
    tokens = tokens_of(batch, length)
    limits = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = reference(heads).generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **limits)
    assert torch.equal(generate(ours(heads), tokens, 20, temperature=0.0), expected)


def test_what_the_fused_attention_cannot_do_is_one_line_of_the_report() -> None:
    model = ours(8)
    model(tokens_of(2, 7))
    attention = [chosen for each in choices_of(model).values() for chosen in each if chosen["op"] == "attention"]
    assert [chosen["fallbacks"] for chosen in attention] == [{"ALiBi": "block by block"}] * 3


def test_the_norm_stands_behind_the_token_embedding() -> None:
    config = TransformerConfig(2, 16, 2, 11, 8, position_embedding="alibi", embedding_norm=True)
    assert [name for name, _ in GPTModel(config).named_parameters() if name.startswith("embedding")] == [
        "embedding.word.weight",
        "embedding.norm.weight",
        "embedding.norm.bias",
    ]

"""BERT against transformers' ``BertForPreTraining``: logits and losses of both heads, and all gradients.

Tolerance: fp32 with sums in another order, 1e-5 of the largest element of each tensor; gradients 1e-4.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron import ConfigError
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertInputs, BertModel
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.models.presets import preset
from lightning_megatron.testing.parity import differences
from tests.foreign import to_native, weight_map

VOCAB, B = 61, 3


def hf_model(**changes: Any) -> Any:
    """A tiny model with all parameters drawn at random, biases too."""
    from transformers import BertConfig as HFConfig
    from transformers import BertForPreTraining

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 24, "initializer_range": 0.3}
    model = BertForPreTraining(
        HFConfig(**sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | changes)
    )
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param), alpha=0.2)
    return model.eval()


def ours(model: Any, entries: dict[str, Any] | None = None) -> BertModel:
    """The same model with the same weights, from the entries of its configuration."""
    family = FAMILIES["bert"]
    config = family.config_of(entries or model.config.to_dict()).replace(vocab_multiple=4)
    assert isinstance(config, BertConfig)
    found = BertModel(config)
    full = to_native(weight_map(family, config), model.state_dict(), parameter_shapes(config))
    with torch.no_grad():
        for name, param in found.named_parameters():
            value = full.pop(name)
            param.zero_()[tuple(map(slice, value.shape))] = value
    assert not full
    return found


def batch(length: int, *, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, VOCAB, (B, length), generator=generator)
    labels = torch.randint(VOCAB, (B, length), generator=generator)
    labels[torch.rand(B, length, generator=generator) > 0.4] = -100
    types = torch.randint(2, (B, length), generator=generator)
    found = {"tokens": tokens, "labels": labels, "types": types, "answers": torch.tensor([0, 1, 1])}
    if padded:
        mask = torch.ones(B, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        mask[1, -1] = 0
        labels[mask == 0] = -100
        found |= {"mask": mask, "tokens": tokens * mask}
    labels[2, 0] = 7
    return found


MODELS: dict[str, dict[str, Any]] = {
    "as published": {},
    "relu, three token types": {"hidden_act": "relu", "type_vocab_size": 3},
    "tanh gelu, coarse epsilon": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_equal_those_of_transformers(name: str) -> None:
    theirs = hf_model(**MODELS[name])
    mine = ours(theirs)
    rules = weight_map(FAMILIES["bert"], mine.config)
    for length, padded, rows in (
        (24, True, B),
        (17, True, B),
        (17, False, B),
        (9, False, 1),
        (5, True, B),
        (1, False, B),
    ):
        given = {key: value[-rows:] for key, value in batch(length, padded=padded).items()}
        inputs = BertInputs(given["tokens"], given["types"], given.get("mask"))
        mine.zero_grad()
        theirs.zero_grad()
        expected = theirs(
            input_ids=inputs.tokens,
            attention_mask=inputs.padding_mask,
            token_type_ids=inputs.token_types,
            labels=given["labels"],
            next_sentence_label=given["answers"],
        )
        losses, logits = mine.losses(inputs, given["labels"], None, given["answers"]), mine(inputs)
        is_text = torch.ones(rows, length) if inputs.padding_mask is None else inputs.padding_mask
        seen = is_text.bool()
        found = {"loss": losses.total, "tokens": logits.tokens[seen], "next": logits.next_sentence}
        right = {"loss": expected.loss, "tokens": expected.prediction_logits[seen]}
        right["next"] = expected.seq_relationship_logits
        found |= {"loss of tokens": losses.tokens, "loss of next": losses.next_sentence}
        right["loss of tokens"] = F.cross_entropy(expected.prediction_logits.flatten(0, 1), given["labels"].flatten())
        right["loss of next"] = F.cross_entropy(expected.seq_relationship_logits, given["answers"])
        assert not differences(found, right, rtol=1e-5), (length, padded)
        losses.total.backward()
        expected.loss.backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()}
        shapes = parameter_shapes(mine.config)
        own = {name: p.grad[tuple(map(slice, shapes[name]))] for name, p in mine.named_parameters()}  # type: ignore[index]
        assert not differences(own, to_native(rules, grads, shapes), rtol=1e-4, atol=1e-5), (length, padded)


def test_a_sample_that_is_padding_alone_has_no_loss_and_no_nan() -> None:
    model = BertModel(BertConfig(1, 16, 2, VOCAB, 8))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.tensor([[1] * 8, [0] * 8])
    losses = model.losses(BertInputs(tokens, None, mask), torch.full((2, 8), -100), None, torch.tensor([-100, -100]))
    losses.total.backward()
    assert losses.total.item() == 0
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert not any(grad.any() for grad in grads)


def test_padding_changes_nothing_of_the_text() -> None:
    model = BertModel(BertConfig(2, 16, 2, VOCAB, 16, init_std=0.3))
    text = torch.randint(1, VOCAB, (2, 9))
    padded = torch.nn.functional.pad(text, (0, 7), value=3)
    mask = torch.nn.functional.pad(torch.ones(2, 9), (0, 7))
    alone, among = model(BertInputs(text)), model(BertInputs(padded, None, mask))
    torch.testing.assert_close(alone.tokens, among.tokens[:, :9], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone.next_sentence, among.next_sentence, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, None), (0.1, None), (0.1, "full"), (0.1, "selective")])
def test_norms_before_and_dropout_train(dropout: float, recompute: Any) -> None:
    """Megatron-LM's BERT: the last block's output is normed, the embedding is not."""
    from lightning_megatron.config.recompute_plan import RecomputePlan

    config = BertConfig(2, 16, 2, VOCAB, 16, norm_position="before", hidden_dropout=dropout, attention_dropout=dropout)
    model = BertModel(config, recompute=RecomputePlan(recompute))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        **parameter_shapes(config.replace(vocab_size=128)),
    }
    given = batch(11, padded=True)
    losses = model.losses(BertInputs(given["tokens"], given["types"], given["mask"]), given["labels"])
    losses.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


MUTATIONS: dict[str, list[Any]] = {
    "vocab_size": [VOCAB + 3],
    "hidden_size": [16, 64],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [1, 2, 8],
    "intermediate_size": [20],
    "hidden_act": ["gelu_new", "relu", "silu", "gelu_pytorch_tanh", "quick_gelu"],
    "max_position_embeddings": [20, 40],
    "type_vocab_size": [3, 5],
    "layer_norm_eps": [0.5],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "tie_word_embeddings": [False],
    "chunk_size_feed_forward": [4],
    "position_embedding_type": ["relative_key"],
    "is_encoder_decoder": [True],
    "no_such_entry": [1],
}
"""Values to try of entries that may change the logits; all others are given another value, and must not."""


def test_no_entry_of_the_configuration_is_ignored() -> None:
    from transformers import BertConfig as HFConfig
    from transformers import BertForPreTraining

    base = hf_model()
    entries = base.config.to_dict()
    others = {
        name: [not v if isinstance(v, bool) else (v or 0) + (0.25 if isinstance(v, float) else 1)]
        for name, v in entries.items()
        if name not in MUTATIONS and (v is None or isinstance(v, (bool, int, float)))
    }
    seen = Counter[str]()
    inputs = BertInputs(torch.randint(1, VOCAB, (2, 16), generator=torch.Generator().manual_seed(5)))
    for name, value in ((name, value) for name, values in (MUTATIONS | others).items() for value in values):
        changed = entries | {name: value}
        try:
            FAMILIES["bert"].config_of(changed)
        except ConfigError as refusal:
            seen["refused" if name in str(refusal) else f"{name}={value} without its name"] += 1
            continue
        torch.manual_seed(3)
        theirs = BertForPreTraining(HFConfig(**changed)).eval()
        with torch.no_grad():
            found, right = ours(theirs, changed).eval()(inputs), theirs(input_ids=inputs.tokens, return_dict=True)
        assert not differences(
            {"tokens": found.tokens, "next": found.next_sentence},  # type: ignore[dict-item]
            {"tokens": right.prediction_logits, "next": right.seq_relationship_logits},
        ), (name, value)
        seen["equal"] += 1
    assert seen.keys() == {"equal", "refused"}
    assert seen["refused"] >= 7
    assert seen["equal"] >= 20


@pytest.mark.parametrize(("name", "total"), [("bert-base", 110_106_428), ("bert-large", 336_226_108)])
def test_numbers_of_parameters_are_those_of_transformers(name: str, total: int) -> None:
    """The published checkpoints' configurations (bert-base-uncased, bert-large-uncased), built on meta."""
    from transformers import BertConfig as HFConfig
    from transformers import BertForPreTraining

    config = preset(name)
    assert config.num_parameters() == total
    sizes = {"hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers}
    sizes |= {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.ffn_hidden_size}
    with torch.device("meta"):
        theirs = BertForPreTraining(HFConfig(vocab_size=config.vocab_size, **sizes))
        built = BertModel(config.replace(vocab_multiple=1))
    assert sum(p.numel() for p in theirs.parameters()) == total
    assert sum(p.numel() for p in built.parameters()) == total
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) == total


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_position": "aftr"}, "norm_position.*after"),
        ({"position_embedding": "rope"}, "position_embedding='rope'.*learned"),
        ({"activation": "swiglu"}, "no gate"),
        ({"num_experts": 2, "add_bias_linear": False}, "num_experts=2.*not what BERT computes"),
        ({"num_token_types": -1}, "num_token_types"),
        ({"type_vocab_size": 3}, "no such field of BertConfig"),
    ],
)
def test_fields_that_cannot_work_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        preset("bert-tiny").replace(**change)

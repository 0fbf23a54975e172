"""A decoder on one process: decoding, sampling, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.partition import LayerSplit

VOCAB = 23
GPT = TransformerConfig(2, 16, 4, VOCAB, 12, init_std=0.3)
LLAMA = preset("llama-tiny").replace(
    num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, vocab_size=VOCAB,
    max_position_embeddings=12, init_std=0.3,
)  # fmt: skip
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(params=[GPT, LLAMA], ids=["gpt", "llama"])
def model(request: pytest.FixtureRequest) -> GPTModel:
    torch.manual_seed(1)
    return GPTModel(request.param)


class Scripted(GPTModel):
    """A model that answers every step with the same logits."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__(TransformerConfig(1, 4, 1, len(logits), 600))
        self.logits = torch.tensor(logits)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.logits.expand(tokens.shape[0], 1, -1)


def sampled(probabilities: list[float], **how: Any) -> set[int]:
    """Tokens that come up in 500 draws."""
    model = Scripted(torch.tensor(probabilities).log().tolist())
    return set(generate(model, torch.zeros(1, 1, dtype=torch.int64), 500, seed=1, **how)[0, 1:].tolist())


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {0}),  # the likeliest token always is a candidate
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),  # 0.4 is not enough, so the next one is taken too
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.56}, {0}),  # of the two, the first has 4/7 of the probability
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.05}, {0, 1}),
    ],
)
def test_which_tokens_can_be_sampled(how, expected):
    assert sampled([0.4, 0.3, 0.2, 0.1], **how) == expected


def test_tokens_come_as_often_as_they_are_likely():
    model = Scripted(torch.tensor([0.5, 0.3, 0.2]).log().tolist())
    drawn = generate(model, torch.zeros(40, 1, dtype=torch.int64), 250, seed=3)[:, 1:]
    frequencies = torch.bincount(drawn.flatten()) / drawn.numel()
    assert frequencies.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.015)  # 3 standard deviations of 10,000 draws


def test_greedy_decoding_takes_the_likeliest_token_of_the_whole_text_each_time(model):
    expected = PROMPTS
    for _ in range(9):
        expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, PROMPTS, 9, temperature=0.0), expected)


def test_seeds_decide_samples_and_no_seed_draws_one(model):
    one, again, other = (generate(model, PROMPTS, 9, seed=s, temperature=2.0) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.manual_seed(5)
    first, second = (generate(model, PROMPTS, 9, temperature=2.0) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(generate(model, PROMPTS, 9, temperature=2.0), first)


def test_a_stop_token_is_kept_repeated_and_ends_the_batch():
    model = Scripted([0.0, 5.0, 0.0])
    assert generate(model, torch.tensor([[0], [2]]), 9, temperature=0.0, stop=1).tolist() == [[0, 1], [2, 1]]
    mixed = generate(Scripted([1.0, 1.0, 1.0]), torch.zeros(8, 1, dtype=torch.int64), 200, seed=1, stop=1)
    for row in mixed[:, 1:].tolist():
        assert set(row[row.index(1) :]) == {1}
    assert mixed[:, -1].eq(1).all()
    assert mixed.shape[1] < 200


def test_generation_leaves_the_model_in_its_mode_and_uses_no_dropout():
    torch.manual_seed(1)
    model = GPTModel(GPT.replace(hidden_dropout=0.5, attention_dropout=0.5))
    one, two = (generate(model, PROMPTS, 9, temperature=0.0) for _ in range(2))
    assert torch.equal(one, two)
    assert model.training
    assert not generate(model.eval(), PROMPTS, 2).requires_grad
    assert not model.training


BAD_CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing to add": ({"max_new_tokens": 0}, ["max_new_tokens=0: must be at least 1; nearest valid: 1"]),
    "too much to add": (
        {"max_new_tokens": 10},
        [
            "max_new_tokens=10: with a prompt of 3 tokens this is longer than max_position_embeddings=12; "
            "nearest valid: 9"
        ],
    ),
    "several": (
        {"max_new_tokens": 1, "temperature": -1.0, "top_k": 0, "top_p": 1.5},
        [
            "temperature=-1.0: must not be negative; nearest valid: 0.0",
            "top_k=0: must be at least 1; nearest valid: 1, None",
            "top_p=1.5: must be above 0 and at most 1; nearest valid: 1.0, None",
        ],
    ),
}


@pytest.mark.parametrize("fault", BAD_CALLS)
def test_bad_arguments_of_generation_are_told_at_once(model, fault):
    how, expected = BAD_CALLS[fault]
    with pytest.raises(ConfigError) as caught:
        generate(model, PROMPTS, **how)
    assert [str(problem) for problem in caught.value.problems] == expected


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ConfigError, match="a prompt has at least one token"):
        generate(model, PROMPTS[:, :0], 1)


def test_learned_positions_refuse_a_longer_sequence_by_name():
    with pytest.raises(ConfigError, match="seq_length=13: longer than max_position_embeddings=12"):
        GPTModel(GPT)(torch.zeros(1, 13, dtype=torch.int64))


def test_the_loss_is_the_mean_over_tokens_that_count(model):
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :3] = -100
    mask = torch.ones(2, 8)
    mask[1, 4:] = 0.0
    each = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    kept = (mask.flatten() * (labels.flatten() != -100)).bool()
    assert model(tokens, labels, mask).item() == pytest.approx(each[kept].mean().item(), rel=1e-5)
    assert model(tokens, labels).item() == pytest.approx(each[labels.flatten() != -100].mean().item(), rel=1e-5)


def test_a_later_token_changes_nothing_before_it(model):
    tokens = torch.randint(VOCAB, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_copy_of_a_model_is_a_model_of_its_own(model):
    twin = copy.deepcopy(model)
    assert torch.equal(twin(PROMPTS), model(PROMPTS))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(PROMPTS), model(PROMPTS))


def test_names_of_parameters_carry_the_global_number_of_their_layer():
    second_half = LayerSplit().stages(4, 2)[1]
    part = GPTModel(LLAMA.replace(num_layers=4), parts=[second_half])
    names = {name.split(".")[1] for name, _ in part.named_parameters() if name.startswith("layers.")}
    assert names == {"2", "3"}
    assert part.embedding is None
    assert part.head is not None

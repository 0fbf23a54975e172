"""Perplexity and cloze tests of a checkpoint, in layouts of all kinds, are those of transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, load_module
from lightning_megatron.data import build_tokenizer
from lightning_megatron.models.generate import Sampling
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.evaluation.continuing import continuations
from lightning_megatron.tools.evaluation.corpora import Reader
from lightning_megatron.tools.evaluation.perplexity import Cloze, Perplexity, cloze, perplexity
from lightning_megatron.tools.evaluation.ranks import Ranks, on_ranks
from tests.evaluated import POSITIONS, VOCABULARY, Home, log_probabilities, loss_sum, make_home

transformers = pytest.importorskip("transformers")

STRIDE = 12
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {},
    "dp2 ep2": {"ep": 2},
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "etp": 1},
}
LARGER: dict[str, dict[str, int]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "pp2 dp2 ep2": {"pp": 2, "ep": 2},
    "tp2 dp2 ep4 etp1": {"tp": 2, "ep": 4, "etp": 1},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make_home(tmp_path_factory.mktemp("evaluation"), ("gpt2", "mixtral"))


def evaluation(home: Home, ranks: Ranks) -> list[Any]:
    """Everything that is compared, as one piece of work."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(home.hf("gpt2")))
    found: list[Any] = []
    for reader, path in (
        (Reader(), home.documents),
        (Reader(begins=True), home.documents),
        (Reader("wikitext"), home.wiki),
        (Reader("lambada"), home.passages),
        (Reader("lambada", strict=True), home.passages),
    ):
        texts = reader.read(path, tokenizer, ranks.config.vocab_size)
        if reader.format == "lambada":
            found.append(cloze(ranks, texts, POSITIONS))
        else:
            found.append(perplexity(ranks, texts, POSITIONS, STRIDE))
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]]
    found.append(continuations(ranks, prompts, 6, Sampling(0.0), lambda ids: len(ids) == 5))
    return found


def in_layouts(home: Home, kind: str, layouts: Sequence[dict[str, int]], precision: str = "32-true") -> list[Any]:
    """In a worker: the results of each layout; ``None`` on ranks that are not the first."""
    found = []
    for layout in layouts:
        trainer = quiet_trainer(MegatronStrategy(**layout, micro_batch_size=3), precision=precision)
        found.append(on_ranks(trainer, home.checkpoint(kind), partial(evaluation, home)))
    return found


@pytest.fixture(scope="module")
def expected(home: Home) -> Callable[[str], list[Any]]:
    """What transformers' models give."""
    kept: dict[str, list[Any]] = {}

    def of(kind: str) -> list[Any]:
        if kind not in kept:
            kept[kind] = by_transformers(home, home.model(kind))
        return kept[kind]

    return of


def by_transformers(home: Home, model: Any) -> list[Any]:
    found: list[Any] = []
    texts = home.texts
    size = sum(len(text.encode()) for text in texts)
    for begins in (False, True):
        sums = [loss_sum(model, [0] * begins + home.encode(text), POSITIONS, STRIDE) for text in texts]
        words = sum(len(text.split()) - 1 + begins for text in texts)
        found.append(Perplexity(len(texts), sum(n for _, n in sums), sum(x for x, _ in sums), words, size))
    wiki = home.wiki.read_text()
    plain = f"\n= {texts[0]} =\n\n{texts[1]}, {texts[3]}-{texts[2]} ({texts[4]}).\n"
    total, count = loss_sum(model, home.encode(plain), POSITIONS, STRIDE)
    found.append(Perplexity(1, count, total, len(wiki.strip().split(" ")) - 1, len(wiki.encode())))
    passages = [json.loads(line)["text"] for line in home.passages.read_text().splitlines()]
    for strict in (False, True):
        correct, total = 0, 0.0
        for passage in passages:
            *before, last = passage.split(" ")
            ids = home.encode(passage)
            end = home.encode(f" {last}") if strict else ids[-1:]
            tokens = ((home.encode(" ".join(before)) + end) if strict else ids)[-POSITIONS - 1 :]
            rows = log_probabilities(model, tokens[:-1])[-len(end) :]
            correct += bool((rows.argmax(-1) == torch.tensor(end)).all())
            total -= float(rows.gather(1, torch.tensor(end)[:, None]).sum())
        found.append(Cloze(len(passages), correct, total))
    texts_of_prompts = []
    for prompt in ([1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]):
        tokens = list(prompt)
        for _ in range(5):
            tokens.append(int(log_probabilities(model, tokens)[-1].argmax()))
        texts_of_prompts.append(tokens[len(prompt) :])
    return [*found, texts_of_prompts]


def assert_equal(found: list[Any], right: list[Any], what: str) -> None:
    for mine, theirs in zip(found[:-1], right[:-1], strict=True):
        for name, value in vars(theirs).items():
            assert getattr(mine, name) == pytest.approx(value, rel=1e-5), (what, type(mine).__name__, name)
    assert found[-1] == right[-1], what


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_one_process_gives_the_numbers_of_transformers(home: Home, expected: Callable[[str], list[Any]], kind: str):
    (found,) = in_layouts(home, kind, [{}])
    right = expected(kind)
    assert_equal(found, right, kind)
    documents = right[0]
    assert documents.tokens == sum(len(home.encode(text)) - 1 for text in home.texts), "each token once"
    assert found[0].perplexity == pytest.approx(float(torch.tensor(documents.loss, dtype=torch.double).exp()))


def of_kind(layouts: dict[str, dict[str, int]], kind: str) -> dict[str, dict[str, int]]:
    return {name: layout for name, layout in layouts.items() if kind == "mixtral" or "ep" not in layout}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_every_layout_gives_them(ranks, home: Home, expected: Callable[[str], list[Any]], kind: str):
    layouts = of_kind(LAYOUTS, kind)
    first, second = ranks(2, in_layouts, home, kind, list(layouts.values()))
    assert second == [None] * len(layouts)
    for name, found in zip(layouts, first, strict=True):
        assert_equal(found, expected(kind), f"{kind} in {name}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_every_larger_layout_gives_them(ranks, home: Home, expected: Callable[[str], list[Any]], kind: str):
    layouts = of_kind(LARGER, kind)
    first, *_ = ranks(4, in_layouts, home, kind, list(layouts.values()))
    for name, found in zip(layouts, first, strict=True):
        assert_equal(found, expected(kind), f"{kind} in {name}")


def test_a_hugging_face_directory_will_do(home: Home, expected: Callable[[str], list[Any]]):
    found = on_ranks(quiet_trainer(MegatronStrategy(micro_batch_size=3)), home.hf("gpt2"), partial(evaluation, home))
    assert found is not None
    assert_equal(found, expected("gpt2"), "a Hugging Face directory")


def test_labels_are_not_smoothed(home: Home, tmp_path: Path, expected: Callable[[str], list[Any]]):
    module = load_module(home.checkpoint("gpt2"), label_smoothing=0.3)
    trainer = quiet_trainer(MegatronStrategy())
    batch = {"tokens": torch.arange(8), "labels": torch.arange(1, 9)}
    (smoothed,) = trainer.validate(module, DataLoader([batch]), verbose=False)
    trainer.save_checkpoint(tmp_path / "smoothed.ckpt")
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=3))
    found = on_ranks(trainer, tmp_path / "smoothed.ckpt", partial(evaluation, home))
    assert found is not None
    assert_equal(found, expected("gpt2"), "trained with smoothed labels")
    with torch.no_grad():
        plain = load_module(home.checkpoint("gpt2")).loss({name: x[None] for name, x in batch.items()})
    assert smoothed["val_loss"] != pytest.approx(float(plain), rel=1e-4), "it would show"


def test_a_token_that_the_model_does_not_know_is_named_by_its_line(home: Home, tmp_path: Path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(home.hf("gpt2")))
    known = max(home.encode(home.texts[0]))
    with pytest.raises(
        ValueError, match=rf"documents\.jsonl, line 2: .*makes token \d+ of it, and the model knows {known + 1}"
    ):
        list(Reader().read(home.documents, tokenizer, known + 1))
    assert len(list(Reader().read(home.documents, tokenizer, VOCABULARY))) == len(home.texts)

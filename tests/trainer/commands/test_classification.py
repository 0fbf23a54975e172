"""``examples/classify_pairs.py``: a head on BERT's pooled features trains as transformers' model does, in any layout.

Both begin with the same weights, which our side converts from Megatron's files, and see the same batches. Tolerance:
fp32 with sums in another order, 1e-5 of each loss.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import BertModule, ConfigError, MegatronStrategy
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.megatron_bert import CONFIG, POSITIONS, VOCAB, hf_model, write

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "classify_pairs.py"
STEPS, BATCH, TESTED, CLASSES = 6, 8, 22, 3
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Found:
    """Losses of the steps, and loss and accuracy of a test."""

    losses: list[float]
    test_loss: float
    accuracy: float


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = POSITIONS - number % 6
        tokens = torch.randint(1, VOCAB, (POSITIONS,), generator=generator)  # transformers trains no padding, 0
        found.append(
            {
                "tokens": tokens,
                "token_types": (torch.arange(POSITIONS) >= length // 2).long(),
                "padding_mask": (torch.arange(POSITIONS) < length).long(),
                "label": tokens[0] % CLASSES,
            }
        )
    return found


def to_train(dp: int = 1, replica: int = 0) -> DataLoader[Any]:
    """A replica's share in a fixed order: Lightning would shuffle what it shares among several."""
    data: Any = samples(BATCH, 1) * STEPS
    sampler = DistributedSampler(data, dp, replica, shuffle=False)
    return DataLoader(data, batch_size=BATCH // dp, sampler=sampler)


def to_test(batch_size: int) -> DataLoader[Any]:
    return DataLoader(samples(TESTED, 2), batch_size=batch_size)  # type: ignore[arg-type]


def head() -> torch.nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Linear(CONFIG.hidden_size, CLASSES)


def in_layout(path: str, dp: int = 1, **layout: Any) -> Found:
    """The example's module, trained and tested from a checkpoint without its head."""
    module = runpy.run_path(str(EXAMPLE))["Classifier"].load_from_checkpoint(path, strict=False, **ADAM)
    module.configure_model()
    module.classifier.load_state_dict(head().state_dict())
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2, **layout), max_epochs=1, logger=recorder)
    trainer.fit(module, to_train(dp, trainer.global_rank % dp))
    (values,) = trainer.test(module, to_test(BATCH // dp), verbose=False)
    return Found(recorder.series("train_loss"), values["test_loss"], values["test_accuracy"])


def with_transformers(pretrained: Any) -> Found:
    """The same by a plain loop over transformers' model."""
    import transformers

    config = pretrained.config
    config.num_labels = CLASSES
    model = transformers.MegatronBertForSequenceClassification(config)
    model.bert.load_state_dict(pretrained.bert.state_dict())
    model.classifier.load_state_dict(head().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

    def run(batch: dict[str, Tensor]) -> Any:
        given = batch["tokens"], batch["padding_mask"], batch["token_types"]
        return model(*given, labels=batch["label"])

    losses = []
    for batch in to_train():
        loss = run(batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (whole,) = to_test(TESTED)
    with torch.no_grad():
        output = run(whole)
    right = output.logits.argmax(-1) == whole["label"]
    return Found(losses, output.loss.item(), right.float().mean().item())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    """A checkpoint of weights from Megatron's files, and what transformers makes of the same weights."""
    pytest.importorskip("transformers")
    folder, model = tmp_path_factory.mktemp("classification"), hf_model(**NO_DROPOUT)
    write(folder / "release", model, 2.0)
    config = CONFIG.replace(hidden_dropout=0.0, attention_dropout=0.0)
    megatron_to_checkpoint(folder / "release", folder / "a.ckpt", config=config)
    return str(folder / "a.ckpt"), with_transformers(model)


def assert_equal(found: Found, right: Found) -> None:
    assert found.losses == pytest.approx(right.losses, rel=1e-5)
    assert found.test_loss == pytest.approx(right.test_loss, rel=1e-5)
    assert found.accuracy == pytest.approx(right.accuracy, abs=1e-6)


def test_losses_and_accuracy_are_those_of_transformers(expected: tuple[str, Found]) -> None:
    path, right = expected
    assert len(right.losses) == STEPS
    assert right.losses[0] > 1.3 * right.losses[-1], "it learns"
    assert 0 < right.accuracy < 1
    assert_equal(in_layout(path), right)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {"cp": 2}, {"dp": 2}])
def test_layouts_equal_one_process(expected: tuple[str, Found], ranks: Any, layout: dict[str, Any]) -> None:
    path, right = expected
    for found in ranks(2, in_layout, path, **layout):
        assert_equal(found, right)


@pytest.mark.slow
def test_the_example_learns_its_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert main([]) > 0.95, "guessing gives 0.5"


@pytest.mark.slow
def test_the_example_trains_a_checkpoint_on_files(
    expected: tuple[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word pieces of a vocabulary file, sentences and pairs."""
    monkeypatch.chdir(tmp_path)
    words = ["red", "blue", "##s", "and"]
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
    Path("train.tsv").write_text("0\tRed and red\n1\tblues\tblue\n" * 60)
    Path("test.tsv").write_text("1\tblues\tblue\n\n0\tRed and red\n")
    main = runpy.run_path(str(EXAMPLE))["main"]
    files = ["--weights", expected[0], "--vocab-file", "vocab.txt", "--train", "train.tsv", "--test", "test.tsv"]
    assert main([*files, "--classes", "2"]) == 1.0
    with pytest.raises(SystemExit):
        main([*files[:4], "--train", "train.tsv"])


def test_a_model_without_a_pooler_is_refused() -> None:
    module = BertModule(CONFIG, next_sentence=False, num_layers=1)
    with pytest.raises(ConfigError, match=r"next_sentence=False.*no pooler.*nearest valid: True"):
        module.pooled({"tokens": torch.zeros(1, 4, dtype=torch.long)})

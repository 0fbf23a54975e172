"""``examples/dpo.py`` in layouts against the formula of the paper, written out with transformers and PEFT."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

pytest.importorskip("peft")
pytest.importorskip("transformers")

from transformers import AutoTokenizer

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer
from tests.chats import write_lines
from tests.families import VOCABULARY
from tests.lora import DORA, LLAMA, MIXTRAL, Case, Kind, Run, keep_gates_apart, make, peft_model, run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS, BATCH, LENGTH, SEED, BETA, CLIP = 8, 4, 12, 3, 0.4, 0.1
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
BOUND = 1e-5 if kind_in_tests() is CPU else 1e-4
KINDS = {"lora": LLAMA, "dora": DORA, "experts": MIXTRAL}
QUICK = [("lora", run()), ("lora", run(tp=2)), ("lora", run(dp=2))]
SLOW = [
    ("lora", run(micro_batch=4, options=(("recompute", "full"),))),
    ("lora", run(tp=2, dp=2, options=(("sequence_parallel", False),), micro_batch=1)),
    ("lora", run(dp=2, options=(("distributed_optimizer", False),))),
    ("lora", run(cp=2)),
    ("lora", run(cp=2, tp=2, options=(("cp_comm_type", "a2a"),))),
    ("dora", run(tp=2, micro_batch=1)),
    ("experts", run()),
    ("experts", run(dp=2, options=(("ep", 2),), micro_batch=1)),
    ("experts", run(tp=2, options=(("ep", 2), ("etp", 1)))),
]


def samples() -> list[dict[str, Tensor]]:
    """Pairs with a common prompt, and answers of different lengths."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for number in range(STEPS * BATCH):
        text = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        prompt = 2 + number % 4
        text[1, :prompt] = text[0, :prompt]
        labels = text[:, 1:].clone()
        labels[:, : prompt - 1] = -100
        for row in labels:
            row[LENGTH - int(torch.randint(4, (), generator=generator)) :] = -100
        found.append({"tokens": text[:, :-1].clone(), "labels": labels})
    return found


def train(case: Case, each: Run) -> dict[str, list[float]]:
    """Values of each step by name."""
    seed_everything(SEED, verbose=False)
    layout = {axis: size for axis, size in each.layout if axis != "dp"}
    strategy = MegatronStrategy(micro_batch_size=each.micro_batch, bucket_size=3000, **layout, **dict(each.options))
    module_class = runpy.run_path(str(EXAMPLES / "dpo.py"))["DPO"]
    module = module_class.load_from_checkpoint(case.first, beta=BETA, vocab_multiple=4, **ADAM)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=CLIP, logger=recorder)
    loader = DataLoader(samples(), batch_size=BATCH // each.sizes.get("dp", 1), shuffle=True)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    return {name: recorder.series(name) for name in ("train_loss", "train_margin", "train_accuracy", "grad_norm")}


def log_likelihoods(model: Any, rows: dict[str, Tensor]) -> Tensor:
    log_probs = model(input_ids=rows["tokens"]).logits.log_softmax(-1)
    counts = rows["labels"] != -100
    return (log_probs.gather(2, rows["labels"].clamp(min=0)[..., None])[..., 0] * counts).sum(1)


def by_peft(case: Case) -> dict[str, list[float]]:
    """The same by the formula: -log sigmoid(beta (log pi(y_w)/ref(y_w) - log pi(y_l)/ref(y_l)))."""
    model = peft_model(case, case.peft, trains=True).train()
    keep_gates_apart(model, case.kind.lora.rank)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)
    found: dict[str, list[float]] = {"train_loss": [], "train_margin": [], "train_accuracy": [], "grad_norm": []}
    data = samples()
    order = list(DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=SEED))  # type: ignore[arg-type]
    for step in range(STEPS):
        batch = torch.utils.data.default_collate([data[i] for i in order[step * BATCH : (step + 1) * BATCH]])
        rows = {key: value.flatten(0, 1) for key, value in batch.items()}
        with torch.no_grad(), model.disable_adapter():
            reference = log_likelihoods(model, rows)
        ratios = (log_likelihoods(model, rows) - reference).view(BATCH, 2)
        margins = BETA * (ratios[:, 0] - ratios[:, 1])
        loss = F.binary_cross_entropy_with_logits(margins, torch.ones(BATCH))
        optimizer.zero_grad()
        loss.backward()
        found["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        found["train_loss"].append(loss.item())
        found["train_margin"].append(margins.mean().item())
        found["train_accuracy"].append((margins > 0).float().mean().item())
    assert min(found["grad_norm"]) > CLIP, "clipping is meant to happen"
    return found


@cache
def given(kind: Kind, folder: Path) -> tuple[Case, dict[str, list[float]]]:
    case = make(kind, folder)
    return case, by_peft(case)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("preferences")
    return lambda name: given(KINDS[name], folder / name)


@pytest.mark.parametrize(
    ("name", "each"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_steps_are_those_of_the_formula(ranks: Any, cases: Any, name: str, each: Run) -> None:
    if name == "experts" and kind_in_tests() is not CPU:
        pytest.skip("a Gaudi's operators round otherwise, and one token of these goes to another expert")
    case, right = cases(name)
    for found in ranks(each.world_size, train, case, each):
        for key, values in right.items():
            # What margins are differences of is larger than they are.
            assert found[key] == pytest.approx(values, rel=BOUND, abs=BOUND if key == "train_margin" else 0.0), key


def test_what_is_chosen_gains_and_the_reference_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "make_chats.py"))["main"](tmp_path)
    chats = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()][::3]
    polite = [
        {"prompt": chat["prompt"], "chosen": f"Sure! {chat['completion']}", "rejected": chat["completion"]}
        for chat in chats
    ]
    write_lines(Path("polite.jsonl"), polite)
    example = runpy.run_path(str(EXAMPLES / "dpo.py"))
    example["main"](["--hf", "chat-base", "--pairs", "polite.jsonl", "--lr", "3e-3", "--beta", "0.5", "--out", "out"])
    assert "the chosen answer gained more in 100% of the held-out pairs" in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained("chat-base")
    pairs = example["Pairs"]("polite.jsonl", tokenizer, 64)
    answers = [[tokenizer.decode(row[row >= 0]) for row in pair["labels"]] for pair in (pairs[0], pairs[1])]
    assert answers == [[f"{pair[key]}<|im_end|>" for key in ("chosen", "rejected")] for pair in polite[:2]]
    module = example["DPO"].load_from_checkpoint("out/last.ckpt")
    assert module.beta == 0.5
    with torch.no_grad():
        tuned = module.rewards({key: value[None] for key, value in pairs[0].items()})
        assert tuned[0, 0] - tuned[0, 1] > 1
        with module.adapter_off():
            reference = module.token_losses(pairs[0])
        assert torch.equal(reference, LlamaModule.from_hf("chat-base").token_losses(pairs[0]))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a", "chosen": "b"}', "pairs.jsonl, line 2: has no text under 'rejected'"),
        ('{"prompt": ["a"], "chosen": "b", "rejected": "c"}', "line 2: has no text under 'prompt'"),
        ("[]", "line 2: has no text under 'prompt'"),
        ('{"prompt": ', "line 2: not JSON"),
    ],
)
def test_a_broken_pair_is_named(tmp_path: Path, line: str, text: str) -> None:
    whole = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    (tmp_path / "pairs.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(text)):
        runpy.run_path(str(EXAMPLES / "dpo.py"))["Pairs"](tmp_path / "pairs.jsonl", None, 8)


def in_a_pipeline(case: Case) -> None:
    train(case, run(pp=2))


def test_a_step_with_and_without_the_adapter_is_refused_in_a_pipeline(ranks: Any, cases: Any) -> None:
    case, _ = cases("lora")
    with pytest.raises(Exception, match=r"pipeline stages, which run once in a step: .*, or use pp=1"):
        ranks(2, in_a_pipeline, case)

"""lm-eval's tasks in layouts of all kinds: every answer is that of lm-eval's own adapter of transformers.

Skipped where lm-eval is not installed (`pip install '.[eval]'`). Tasks and data are made here, and
nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import build_tokenizer
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.evaluation.ranks import Ranks, on_ranks
from tests.evaluated import POSITIONS, Home, make_home

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

TASKS = {
    "tiny_choice": """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_cloze": """
task: tiny_cloze
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "tiny_text": """
task: tiny_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_answer": """
task: tiny_answer
output_type: generate_until
doc_to_text: "a {{question}}"
doc_to_target: "{{choices[1]}}"
generation_kwargs: {until: ["a", "\\n"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
TWO = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "dp2": {}}
FOUR = {"tp2 pp2": {"tp": 2, "pp": 2}, "pp2 dp2": {"pp": 2}, "tp2 dp2": {"tp": 2}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("lm_eval")
    home = make_home(folder, ("gpt2",))
    texts = home.texts
    records = [
        {"question": question, "choices": choices, "answer": n % 2, "long": texts[n]}
        for n, (question, choices) in enumerate(
            [
                (texts[0], ["ab", "a cd e"]),
                (texts[3], ["fgh abc", "b"]),
                (texts[4], ["d", "ee ff"]),  # longer than the model can see
                (texts[5] + " ", ["g g", "hab c"]),  # ends in a blank
                ("", ["ab c", "de"]),
            ]
        )
    ]
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(task + DATA.format(file=file))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "hub" / "datasets")
        yield home


def answers(home: Home, model: Any) -> dict[str, Any]:
    """All answers to all requests, and the metrics."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(home.folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    return {name: ([sample["resps"] for sample in found["samples"][name]], found["results"][name]) for name in TASKS}


def work(home: Home, ranks: Ranks) -> dict[str, Any]:
    from lightning_megatron.tools.evaluation.harness import MegatronLM

    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(home.hf("gpt2")))
    return answers(home, MegatronLM(ranks, tokenizer, POSITIONS))


def in_layouts(home: Home, layouts: Sequence[dict[str, int]]) -> list[Any]:
    """In a worker: the answers in each layout; ``None`` on ranks that are not the first."""
    return [
        on_ranks(
            quiet_trainer(MegatronStrategy(**layout, micro_batch_size=3)), home.checkpoint("gpt2"), partial(work, home)
        )
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def expected(home: Home) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    folder = str(home.hf("gpt2"))
    return answers(home, HFLM(folder, tokenizer=folder, device="cpu", dtype="float32", batch_size=3))


def assert_close(found: Any, right: Any, where: str) -> None:
    if isinstance(right, dict):
        assert found.keys() == right.keys(), where
        for key in right:
            assert_close(found[key], right[key], f"{where}, {key}")
    elif isinstance(right, list | tuple):
        assert len(found) == len(right), where
        for number, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            assert_close(mine, theirs, f"{where}, {number}")
    elif isinstance(right, float):
        assert found == pytest.approx(right, rel=1e-5, abs=1e-6), where
    else:
        assert found == right, where


def test_one_process_answers_as_transformers_does(home: Home, expected: dict[str, Any]):
    (found,) = in_layouts(home, [{}])
    assert_close(found, expected, "one process")
    generated = [text for ((text,),) in expected["tiny_answer"][0]]
    assert len(set(generated)) > 2, generated


@pytest.mark.slow
def test_every_layout_answers_as_transformers_does(ranks, home: Home, expected: dict[str, Any]):
    first, second = ranks(2, in_layouts, home, list(TWO.values()))
    assert second == [None] * len(TWO)
    for name, found in zip(TWO, first, strict=True):
        assert_close(found, expected, name)


@pytest.mark.exhaustive
def test_every_larger_layout_answers_as_transformers_does(ranks, home: Home, expected: dict[str, Any]):
    first, *_ = ranks(4, in_layouts, home, list(FOUR.values()))
    for name, found in zip(FOUR, first, strict=True):
        assert_close(found, expected, name)


@pytest.mark.slow
def test_the_command(home: Home, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    from lightning_megatron.tools.cli.main import main

    words = ["evaluate", "--checkpoint", str(home.checkpoint("gpt2")), "--device", "cpu", "--json"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(home.hf("gpt2"))]
    words += ["--lm-eval-path", str(home.folder / "tasks")]
    assert main([*words, "--lm-eval", "tiny_choice, tiny_text"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index('{\n "files"') :])["tasks"]
    for name in ("tiny_choice", "tiny_text"):
        right = {key: value for key, value in expected[name][1].items() if "stderr" not in key}
        assert_close({key: found[name][key] for key in right}, right, name)
    assert main([*words, "--lm-eval", "tiny_choise"]) == 2
    assert "--lm-eval='tiny_choise': lm-eval has no such task; nearest valid: tiny_choice" in capsys.readouterr().err


def test_requests_that_cannot_be_answered(home: Home):
    def refused(ranks: Ranks) -> list[str]:
        from lightning_megatron.tools.evaluation.harness import MegatronLM

        lm = MegatronLM(ranks, build_tokenizer("HuggingFaceTokenizer", str(home.hf("gpt2"))), POSITIONS)
        bare = SimpleNamespace(encode=lambda text: [1], bos=None, eod=None)
        texts = []
        for call in (
            lambda: lm._loglikelihood_tokens([(("a", "long"), [1], [2] * 33)]),
            lambda: lm._continued(["a"], {"until": ["x"], "max_gen_toks": 32}),
            lambda: MegatronLM(ranks, bare, POSITIONS),
        ):
            with pytest.raises(ConfigError) as raised:
                call()
            texts.append(str(raised.value))
        return texts

    texts = on_ranks(quiet_trainer(MegatronStrategy(micro_batch_size=3)), home.checkpoint("gpt2"), refused)
    assert texts is not None
    assert "continuation='long': has 33 tokens, and 1 to 32 can be predicted" in texts[0]
    assert "max_gen_toks=32: the model sees 32 tokens at once, and none is left for the context" in texts[1]
    assert "has no token that begins or ends a text, which lm-eval puts before the first one" in texts[2]

"""The driver of the comparison: rows, memory by arithmetic, and tables made of rounds; it trains nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patience import PATIENCE

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CARD = 80e9 / 1e9


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver's module; its neighbours are imported from its folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench

    return bench


def test_rows_for_cards_fit_into_80_gb_and_those_that_were_cut_would_not(bench: ModuleType) -> None:
    sizes: Any = sys.modules["sizes"]
    for row in sizes.GROUPS["gpu"]:
        assert sizes.card_memory(row).gb < 0.8 * CARD, row
    for row in ("llama3.1-8b/bf16/single", "mixtral-8x1b/bf16/single"):
        assert sizes.card_memory(row).gb > CARD, row


def test_memory_by_arithmetic_agrees_with_the_one_peak_that_was_measured(bench: ModuleType) -> None:
    """LLaMA 3.2 1B on an H100, 2,048 tokens: 25,172 MB (benchmarks/peers_llama3.2-1b_h100_202611.md)."""
    sizes: Any = sys.modules["sizes"]
    memory = sizes.card_memory("llama3.2-1b/bf16/single")
    of_2048_tokens = memory.gb - memory.activations / 1e9 * 3 / 4
    assert of_2048_tokens == pytest.approx(25172 * 2**20 / 1e9, rel=0.1)


def test_the_page_about_gpus_has_the_memory_of_each_row(bench: ModuleType) -> None:
    sizes: Any = sys.modules["sizes"]
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text()
    for row in sizes.GROUPS["gpu"]:
        assert f"{sizes.card_memory(row).gb:.0f} GB" in page, row


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_every_row_has_ours_and_at_least_one_contestant_or_says_who_is_left_out(
    bench: ModuleType, accelerator: str
) -> None:
    sizes: Any = sys.modules["sizes"]
    for row in sizes.GROUPS["all" if accelerator == "cpu" else "gpu"]:
        job = sizes.job_of_row(row, Path("weights"), accelerator)
        entries, left_out = bench.entries_of(row, job, Path("envs"), None, ())
        names = [entry.name for entry in entries]
        assert names[0] == "ours"
        assert len(names) > 1 or row == "mixtral-8x1b/bf16/ep8", row
        told = [text.partition(":")[0] for text in left_out]
        assert sorted({*names, *told} & bench.PEERS.keys()) == sorted(bench.PEERS)


def test_a_row_with_a_wrong_name_is_told_before_anything_runs(bench: ModuleType, tmp_path: Path) -> None:
    for row, told in (("llama-tiny/bf16", "is no model/precision/layout"), ("llama-tiny/bf16/both", "is no layout")):
        with pytest.raises(SystemExit, match=told):
            bench.main(["--rows", row, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="3 micro-batches are not divisible by 2 replicas"):
        bench.main(["--rows", "llama-tiny/bf16/dp2", "--micro-batches", "3", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


FAKE = """
import json, sys
name, slow = sys.argv[1], float(sys.argv[2])
for number, line in enumerate(sys.stdin):
    if name == "dies" and number == 2:
        sys.exit("no memory left")
    loss = 9.0 if name == "other" else 10.0
    figures = {"wall": slow, "cpu": 2 * slow, "peak_mb": 100 * slow, "loss": loss, "tokens": 1000}
    print("ROUND " + json.dumps(figures), flush=True)
"""


def contest(bench: ModuleType, *names: str) -> Any:
    sizes, contestant = sys.modules["sizes"], sys.modules["contestant"]
    job = sizes.job_of_row("llama-tiny/fp32/single", Path("weights"), "cpu")
    entries = [
        bench.Entry(n, lambda n=n, i=i: contestant.Contestant(n, [sys.executable, "-c", FAKE, n, str(i + 1)], {}))
        for i, n in enumerate(names)
    ]
    return bench.compare("llama-tiny/fp32/single", job, entries, rounds=3, limit=60)


def test_a_peer_that_dies_is_a_line_and_the_others_go_on(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: Any = sys.modules["results"]
    monkeypatch.setattr(bench, "matmul_gflops", lambda *_: 100.0)
    found = contest(bench, "ours", "dies", "other")
    assert [len(rounds) for rounds in found.rounds.values()] == [4, 2, 4]
    assert "no memory left" in found.faults[0]
    assert found.ratio("other", "wall") == 3.0
    file = tmp_path / "rounds.jsonl"
    file.write_text("\n".join([json.dumps({"kind": "run"}), *results.lines_of(found)]))
    _, (read,) = results.read(file)
    assert results.table([read]) == results.table([found])
    table = results.table([read])
    assert "| llama-tiny/fp32/single | other | 333 | 167 |" in table
    assert "- dies: ended with exit code 1: no memory left (llama-tiny/fp32/single)" in table
    assert "other: loss of round 0 is 9.00000, that of ours 10.00000: another training" in table


def test_without_ours_there_are_figures_and_no_ratios(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    results: Any = sys.modules["results"]
    monkeypatch.setattr(bench, "matmul_gflops", lambda *_: 100.0)
    found = contest(bench, "other", "another")
    assert found.ratio("other", "wall") is None
    assert results.table([found]).count("| - | - |") == 2


def test_the_checkout_that_was_named_is_imported_not_the_working_directory(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contestant = sys.modules["contestant"]
    for name in ("here", "named"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which_one.py").write_text(
            f"input(); print('ROUND [\"{name}\"]', flush=True); input()"  # a report, then it waits
        )
    monkeypatch.chdir(tmp_path / "here")
    started = contestant.Contestant(
        "ours", [sys.executable, "-m", "which_one"], {"PYTHONPATH": str(tmp_path / "named")}
    )
    try:
        started.run(seconds=PATIENCE)
        assert started.rounds == [["named"]]
    finally:
        started.stop()

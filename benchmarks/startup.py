"""Time from ``python train.py`` to the first step, by phases: wall seconds, and CPU seconds of rank 0 and of the job.

Run: ``python benchmarks/startup.py [--against OTHER_TREE] [--rounds 3] [--launchers single lightning torchrun]``.
``OTHER_TREE`` is a checkout of another commit; the two trees then start in turns. ``--imports`` lists our modules by
the time of their own import (``python -X importtime``), and ``--commands`` times commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
MARKS = "STARTUP_MARKS"
BEGUN = "STARTUP_BEGUN"
COMMANDS = (
    *("--help", "schedule --pp 4 --micro-batches 8", "verify nothere", "doctor", "ops --device cpu"),
    *(f"{name} --help" for name in ("fit", "train-tokenizer", "preprocess", "generate", "convert", "verify", "why")),
    *(f"{name} --help" for name in ("doctor", "ops", "schedule")),
    "plan --model llama3.1-405b --devices 1024 --seq-length 8192 --global-batch-size 2048 --device h100",
    "plan --model llama3.1-70b --devices 64 --seq-length 8192 --global-batch-size 512 --device h100",
)
LAUNCHERS = ("single", "lightning", "torchrun")


def train(devices: int) -> None:
    """The job that is timed: a small LLaMA takes two steps; rank 0 writes its marks to a file."""
    marks: list[tuple[str, float, float]] = []

    def mark(name: str) -> None:
        marks.append((name, time.time() - float(os.environ[BEGUN]), time.process_time()))

    mark("interpreter")
    import torch  # noqa: F401

    mark("import torch")
    import lightning.pytorch as pl

    mark("import lightning")
    from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy

    mark("import lightning_megatron")

    class Marks(pl.Callback):
        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            mark("check, spawn, meet")  # ranks have compared, groups exist

        def on_fit_start(self, *_: Any) -> None:
            mark("model and optimizer")

        def on_sanity_check_start(self, *_: Any) -> None:
            mark("first loaders")

        def on_train_start(self, *_: Any) -> None:
            mark("sanity check, loaders")

        def on_train_batch_start(self, *_: Any) -> None:
            mark("first batch")

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            mark("first step" if trainer.global_step == 1 else "second step")

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            Path(f"{os.environ[MARKS]}.{trainer.global_rank}").write_text(json.dumps(marks))

    module = LlamaModule("llama-tiny", num_layers=2, hidden_size=128, ffn_hidden_size=256, vocab_size=1024)
    data = MegatronDataModule("corpus", seq_length=64, batch_size=2, split="80,20,0")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(tp=devices),
        max_steps=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Marks()],
    )
    mark("objects")
    trainer.fit(module, data)


def write_corpus(folder: Path) -> None:
    """Token files of random words."""
    import numpy as np

    from lightning_megatron.data.indexed_writer import IndexedDatasetWriter

    words = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus") as writer:
        for _ in range(200):
            writer.add_document(words.integers(0, 1000, 300), [300])


def job_of(launcher: str) -> list[str]:
    """Words that start the job."""
    if launcher == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(HERE),
            "job",
            "2",
        ]
    return [sys.executable, str(HERE), "job", "1" if launcher == "single" else "2"]


def environment_of(tree: Path, **more: str) -> dict[str, str]:
    """Environment in which a tree's package is imported."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"} | more


def cpu_of(
    words: Sequence[str], folder: Path, environment: dict[str, str], succeeds: bool = True
) -> tuple[float, float]:
    """Wall and CPU seconds of a process and its children, which must succeed unless a failure is wanted."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and succeeds:
        raise SystemExit(done.stderr[-4000:])
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(launcher: str, tree: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """One start: wall and CPU seconds by phase, and of the whole job, its end too."""
    marks = folder / "marks"
    environment = environment_of(tree, **{MARKS: str(marks), BEGUN: str(time.time())})
    whole = cpu_of(job_of(launcher), folder, environment)
    found, before = {}, (0.0, 0.0)
    for name, wall, cpu in json.loads(Path(f"{marks}.0").read_text()):
        found[name] = (wall - before[0], cpu - before[1])
        before = wall, cpu
        if name == "first step":
            found["to the first step"] = wall, cpu
    if launcher == "lightning":  # rank 0 waits for rank 1, which begins when it is spawned
        spawned, *_, objects, met = json.loads(Path(f"{marks}.1").read_text())[:6]
        found["rank 1 is spawned at"] = spawned[1], 0.0
        found["rank 1 has its objects at"] = objects[1], objects[2]
        found["rank 1 has met rank 0 at"] = met[1], met[2]
    return found | {"whole job": whole}


def show_starts(launchers: Sequence[str], trees: Sequence[Path], rounds: int) -> None:
    """Time starts of all trees in turns, and print medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        for launcher in launchers:
            runs: dict[Path, list[dict[str, tuple[float, float]]]] = {tree: [] for tree in trees}
            for _ in range(rounds):
                for tree in trees:
                    runs[tree].append(start(launcher, tree, folder))
            print(f"\n{launcher}: wall (CPU) seconds, medians of {rounds}" + "".join(f"\n  {t}" for t in trees))
            for phase in runs[trees[0]][0]:
                cells = []
                for tree in trees:
                    times = [run[phase] for run in runs[tree] if phase in run]
                    wall, cpu = (median(column) for column in zip(*times, strict=True))
                    cells.append(f"{wall:7.2f} ({cpu:6.2f})")
                print(f"{phase:<26}", *cells)


def show_imports(trees: Sequence[Path], rounds: int) -> None:
    """Seconds that packages take to import, and our modules with the most."""
    names = "MegatronStrategy, LlamaModule, MegatronDataModule"
    code = f"import torch, lightning.pytorch; from lightning_megatron import {names}"
    for tree in trees:
        sums: dict[str, list[float]] = {}
        for _ in range(rounds):
            run = [sys.executable, "-X", "importtime", "-c", code]
            done = subprocess.run(run, env=environment_of(tree), capture_output=True, text=True, check=True)
            found: dict[str, float] = {}
            for own, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", done.stderr, re.MULTILINE):
                package = module.split(".")[0]
                for key in {package, module} if package == "lightning_megatron" else {package}:
                    found[key] = found.get(key, 0.0) + int(own) / 1e6
            for key, seconds in found.items():
                sums.setdefault(key, []).append(seconds)
        print(f"\n{tree}")
        listed = sorted(sums, key=lambda key: -median(sums[key]))
        for key in [key for key in listed if "." not in key][:12] + [key for key in listed if "." in key][:25]:
            print(f"{median(sums[key]):8.3f} s  {key}")


def show_commands(trees: Sequence[Path], rounds: int) -> None:
    """Wall and CPU seconds of each command, trees in turns, medians."""
    folder = Path(tempfile.gettempdir())  # not a tree: "-m" would import from there
    print("wall (CPU) seconds" + "".join(f"\n  {tree}" for tree in trees))
    for command in COMMANDS:
        words = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *command.split()]
        times: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
        for _ in range(rounds):
            for tree in trees:
                times[tree].append(cpu_of(words, folder, environment_of(tree), succeeds=False))
        cells = [tuple(median(column) for column in zip(*times[tree], strict=True)) for tree in trees]
        print(f"{command:<34}", *(f"{wall:7.2f} ({cpu:6.2f})" for wall, cpu in cells))


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, action="append", default=[], help="checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--imports", action="store_true", help="list imports instead")
    parser.add_argument("--commands", action="store_true", help="time commands instead")
    given = parser.parse_args()
    trees = [*(path.resolve() for path in given.against), HERE.parents[1]]
    if given.imports:
        show_imports(trees, given.rounds)
    elif given.commands:
        show_commands(trees, given.rounds)
    else:
        show_starts(given.launchers, trees, given.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(int(sys.argv[2]))
    else:
        main()

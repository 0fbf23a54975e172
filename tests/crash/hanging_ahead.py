"""Jobs whose hosts run ahead of their collectives, as with NCCL: their numbers, and whom they blame for a hang.

One rank of eight hangs in its loader, in a callback or in a collective, dies, or raises; or another is aborted, as by
NCCL's watchdog, because of a hang. ``tests/running_ahead.py`` has the backend. Each layout also trains, saves and goes
on, with the losses of ordinary CPU ranks, up to the order of sums.

Run: ``python tests/crash/hanging_ahead.py [--ranks 8] [--rounds 2] [--only tp/loader]``; it ends with a count.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.recorder.diagnosis import diagnose
from lightning_megatron.recorder.reading import read_run, runs_below
from lightning_megatron.testing.ports import free_port
from lightning_megatron.testing.trainer import Recorder
from lightning_megatron.testing.workers import PRELOAD
from tests.running_ahead import running_ahead

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batch_size": 1},
    "cp": {"cp": 2},
    "ep": {"ep": 2},
    "tp-pp": {"tp": 2, "pp": 2, "micro_batch_size": 1},
}
KINDS = "loader", "callback", "collective", "abort", "kill", "raise"
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 32}
SIZES |= {"head_dim": 8, "vocab_multiple": 2, "ffn_hidden_size": 24}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
PATIENCE = 240.0


@dataclass(frozen=True)
class Case:
    """One job; without a kind nothing happens to it."""

    layout: str
    kind: str = ""
    victim: int = 0
    ranks: int = 8
    timeout: float = 15.0
    ahead: bool = True

    def __str__(self) -> str:
        return f"{self.layout}/{self.kind or 'trains'}/rank {self.victim}{'' if self.ahead else '/blocking'}"


class Blow:
    """Strikes once, on one rank, in the third step."""

    def __init__(self, case: Case, rank: int, mark: Path) -> None:
        self.case, self.mark, self.is_due = case, mark, rank == case.victim

    def __call__(self, place: str) -> None:
        places = {"loader": "loader", "collective": "callback", "abort": "loader"}
        if not self.is_due or not self.case.kind or place != places.get(self.case.kind, "callback"):
            return
        self.is_due = False
        self.mark.write_text(str(time.time()))
        if self.case.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case.kind == "raise":
            raise ArithmeticError("no luck")
        elif self.case.kind == "collective":
            for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single"):
                if hasattr(dist, name):
                    setattr(dist, name, _sleep)
        else:
            _sleep()


def _sleep(*args: Any, **kwargs: Any) -> None:
    while True:
        time.sleep(0.1)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, blow: Blow) -> None:
        self.tokens = torch.randint(32, (192, 9), generator=torch.Generator().manual_seed(2))
        self.blow, self.read = blow, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += 1
        if self.read > 4:
            self.blow("loader")
        return {"tokens": self.tokens[index][:-1], "labels": self.tokens[index][1:]}


class Model(GPTModule):
    """Is struck in a hook of the third batch."""

    blow: Blow

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.blow("callback")


def abort_soon(mark: Path, timeout: float) -> None:
    """End this process as NCCL's watchdog does, when another rank has been hanging for long."""
    while not mark.exists():
        time.sleep(0.1)
    time.sleep(timeout * 0.8)
    os.abort()


def work(case: Case, rank: int, port: int, folder: Path, steps: int) -> None:
    """Life of one rank, as torchrun would start it."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "NODE_RANK": 0, "RANK": rank}
    os.environ.update({name: str(value) for name, value in {**here, "WORLD_SIZE": case.ranks}.items()})
    torch.set_num_threads(1)
    mark = folder / "struck"
    if case.kind == "abort" and rank == (case.victim + 1) % case.ranks:
        threading.Thread(target=abort_soon, args=(mark, case.timeout), daemon=True).start()
    blow = Blow(case, rank, mark)
    seed_everything(7, verbose=False)
    log = Recorder()
    with running_ahead() if case.ahead else nullcontext():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=case.ranks,
            strategy=MegatronStrategy(**LAYOUTS[case.layout], timeout=timedelta(seconds=case.timeout)),
            max_steps=steps,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=-1, save_last="link")],
            logger=log,
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        preset, more = ("mixtral-tiny", EXPERTS) if case.layout == "ep" else ("llama-tiny", {})
        module = Model(preset, lr=1e-2, **SIZES, **more)
        module.blow = blow
        trainer.fit(module, DataLoader(Rows(blow), 2), ckpt_path="last" if steps > 4 else None)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.writelines(f"{float(loss).hex()}\n" for loss in log.series("train_loss"))
    os._exit(0)  # leaving a gloo group may hang


def start(case: Case, folder: Path, steps: int = 4) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "omegaconf", "fsspec.implementations.local", "lightning_megatron.data"])
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(case, rank, port, folder, steps), daemon=True) for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    return processes


def said(folder: Path) -> str:
    """End of what each rank has printed."""
    return "\n".join(f"--- {path.name} ---\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("output-*")))


def joined(processes: list[BaseProcess], folder: Path) -> None:
    """Wait for the end of all.

    Raises:
        AssertionError: if one does not end.
    """
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        assert process.exitcode is not None, f"{process.name} is still there:\n{said(folder)}"


def hangs(case: Case, folder: Path) -> None:
    """One job that somebody strikes.

    Raises:
        AssertionError: if it does not end, or blames another rank.
    """
    processes = start(case, folder)
    try:
        if case.kind == "abort":  # the watchdog of the others is not to end the victim before its time
            processes[(case.victim + 1) % case.ranks].join(PATIENCE)
        joined(processes, folder)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    assert (folder / "struck").exists(), said(folder)
    whole = "".join(path.read_text() for path in folder.glob("output-*"))
    blamed = re.findall(r"First to blame: rank (\d+)", whole)
    assert blamed[:1] == [str(case.victim)], f"blamed {blamed}\n{said(folder)}"
    afterwards = diagnose(read_run(runs_below(folder)[0], live=False))
    assert afterwards.culprits[:1] == (case.victim,), afterwards


def trains(case: Case, folder: Path) -> None:
    """Train, save and go on, with the losses of ranks whose host blocks.

    Raises:
        AssertionError: if a loss differs by more than another order of sums explains: gloo's own reduce-scatter adds up
            in a ring, as a device's does.
    """
    found = []
    for ahead in (True, False):
        own = folder / str(ahead)
        for steps in (4, 6):
            processes = start(replace(case, ahead=ahead, timeout=PATIENCE), own, steps)
            joined(processes, own)
            assert {process.exitcode for process in processes} == {0}, said(own)
        found.append([float.fromhex(word) for word in (own / "losses").read_text().split()])
    assert len(found[0]) == 6, found
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-5, atol=0.0)


def cases(ranks: int, rounds: int) -> Iterator[Case]:
    """All of them; victims take turns."""
    for turn in range(rounds):
        for n, layout in enumerate(LAYOUTS):
            for k, kind in enumerate(KINDS):
                yield Case(layout, kind, (n + k + 3 * turn) % ranks, ranks)
    yield from (Case(layout, ranks=ranks) for layout in LAYOUTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name matches this expression")
    options = parser.parse_args()
    chosen = [case for case in cases(options.ranks, options.rounds) if re.search(options.only, str(case))]
    right = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(chosen):
            begun = time.monotonic()
            try:
                (hangs if case.kind else trains)(case, Path(scratch) / str(number))
                right += 1
                print(f"| {case} | {time.monotonic() - begun:.1f} s |", flush=True)
            except AssertionError as error:
                print(f"| {case} | WRONG |\n{error}", flush=True)
    print(f"{right} of {len(chosen)} as they should be")
    raise SystemExit(right < len(chosen))


if __name__ == "__main__":
    main()

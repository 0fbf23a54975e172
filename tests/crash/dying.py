"""Lets one rank of a training job die, stop, raise or hang in every phase of a run; the others must say who, and end.

A trial is a job of two real processes. At one place of the run one of them kills itself, stops itself, raises, or
sleeps for ever in a user's hook; or it is but slow, and nothing may come of it. Every survivor must end within the
timeout of collectives and five seconds, name the rank, and the lowest of them must print what that rank was doing.

Run: ``python tests/crash/dying.py [--timeout 8] [--only save/stop]``; it ends with a table of all cases.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from jobs import PATIENCE, SIZES
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.checkpoint import SaveGuard, saving
from lightning_megatron.checkpoint.select.verify import written_faults
from lightning_megatron.recorder.diagnosis import diagnose
from lightning_megatron.recorder.reading import read_run, runs_below
from lightning_megatron.testing.ports import free_port
from lightning_megatron.testing.workers import PRELOAD

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2, "micro_batch_size": 1}, "dp2": {}}
PHASES = {
    "rendezvous": "has not come",
    "setup": "set-up|start|broadcast|barrier|load|data",
    "first step": "training step|forward",
    "data": "waiting for data|training step",
    "forward": "training step|forward",
    "backward": "backward",
    "reduction": "backward|optimizer step",
    "optimizer": "optimizer step",
    "validation": "validation step",
    "save": "save",
    "background": "writing in the background",
    "load": "load",
    "barrier": "training step|hooks|waiting for data|after",
}
"""Phases, and what the table says of a rank that is struck there."""
KINDS = {
    "die": "dead: (killed by SIGKILL|gone)",
    "stop": "stopped",
    "raise": "raised ArithmeticError: no luck",
    "hang": "running",
}
"""Kinds of strikes, with their words in the table; ``slow`` is no fault."""
OVER = 5.0
"""Seconds over the timeout."""


@dataclass(frozen=True)
class Case:
    """One trial.

    Attributes:
        phase: a key of ``PHASES``.
        kind: a key of ``KINDS``, or ``slow``.
        layout: a key of ``LAYOUTS``.
        victim: the rank that is struck.
        timeout: seconds, of collectives; where they are more than ``PATIENCE``, the job must end by an event.
    """

    phase: str
    kind: str
    layout: str
    victim: int
    timeout: float = 8.0

    def __str__(self) -> str:
        return f"{self.phase}/{self.kind}/{self.layout}/rank {self.victim}"


class Blow:
    """Strikes once, on one rank, and says when."""

    def __init__(self, case: Case, rank: int, mark: Path) -> None:
        self.case, self.mark = case, mark
        self.is_due = rank == case.victim

    def __call__(self, phase: str) -> None:
        if not self.is_due or phase != self.case.phase:
            return
        self.is_due = False
        self.mark.write_text(str(time.time()))
        if self.case.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.case.kind == "raise":
            raise ArithmeticError("no luck")
        elif self.case.kind == "slow":
            time.sleep(self.case.timeout / 2)
        else:
            while True:
                time.sleep(0.1)


class Struck(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blow: Blow) -> torch.Tensor:
        ctx.blow = blow
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.blow("backward")
        return grad, None


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, blow: Blow, rank: int, apart: bool) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(32, (64, 9), generator=generator)[rank if apart else 0 :: 2]
        self.blow = blow

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 8:
            self.blow("data")
        return {"tokens": self.tokens[index][:-1], "labels": self.tokens[index][1:]}


class Model(GPTModule):
    """Is struck in its hooks, from the third batch on."""

    blow: Blow

    def configure_model(self) -> None:
        super().configure_model()
        self.blow("setup")
        block = next(iter(self._built().layers.values()))
        block.register_forward_hook(self._on_forward)

    def _on_forward(self, module: Any, args: Any, out: Any) -> Any:
        if self.trainer.global_step < 2 or not self.training:
            return out
        self.blow("forward")
        return (Struck.apply(out[0], self.blow), *out[1:])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.blow("first step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step >= 2:
            self.blow("reduction")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step >= 2:
            self.blow("optimizer")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 3:
            self.blow("barrier")
            self.trainer.strategy.barrier()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.blow("validation")
        return super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.blow("save")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.blow("load")


def work(case: Case, rank: int, port: int, folder: Path, ckpt_path: str | None) -> None:
    """Life of one rank, as torchrun or Slurm would start it."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in here.items()})
    torch.set_num_threads(1)
    blow = Blow(case, rank, folder / "struck")
    seed_everything(7, verbose=False)
    strategy = MegatronStrategy(
        **LAYOUTS[case.layout], timeout=timedelta(seconds=case.timeout), async_save=case.phase == "background"
    )
    if case.phase == "background":
        strategy.save_guard = SaveGuard()
        _strike_while_files_are_checked(blow)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=6,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=4, save_top_k=-1)],
        val_check_interval=4,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Model("llama-tiny", lr=1e-2, **SIZES)
    module.blow = blow
    blow("rendezvous")
    rows = Rows(blow, rank, case.layout == "dp2")
    trainer.fit(module, DataLoader(rows, 2), DataLoader(Rows(blow, rank, False), 2), ckpt_path=ckpt_path)
    os._exit(0)  # leaving a gloo group may hang


def _strike_while_files_are_checked(blow: Blow) -> None:
    """Let the blow fall in the thread that writes a checkpoint."""

    def struck(directory: Path, mesh: Any) -> Any:
        blow("background")
        return written_faults(directory, mesh)

    saving.written_faults = struck


def start(case: Case, folder: Path, ckpt_path: str | None = None) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "omegaconf", "fsspec.implementations.local", "lightning_megatron.data"])
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(case, rank, port, folder, ckpt_path), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def checkpoint_of(layout: str, folder: Path) -> str:
    """A checkpoint to load, made by a run that nothing happens to."""
    saved = folder / f"whole-{layout}" / "saved"
    if not saved.exists():
        case = Case("none", "slow", layout, 0, 60.0)
        for process in start(case, saved.parent):
            process.join(PATIENCE)
            assert process.exitcode == 0, (saved.parent / "output-0").read_text()[-3000:]
    return str(next(saved.glob("*.ckpt")))


def trial(case: Case, folder: Path) -> float:
    """One job; seconds from the blow until all survivors have ended.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    ckpt_path = checkpoint_of(case.layout, folder) if case.phase == "load" else None
    own = folder / re.sub(r"\W+", "-", str(case))
    processes = start(case, own, ckpt_path)
    try:
        return _outcome(case, own, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _outcome(case: Case, folder: Path, processes: list[BaseProcess]) -> float:
    survivor, victim = processes[1 - case.victim], processes[case.victim]
    mark, begun = folder / "struck", time.time()
    while not (mark.exists() and mark.read_text()):
        assert time.time() - begun < PATIENCE, "nothing happened"
        assert all(process.is_alive() for process in processes), said(folder)
        time.sleep(0.05)
    struck = float(mark.read_text())
    if case.kind == "slow":
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, said(folder)
        assert "to blame" not in said(folder), said(folder)
        assert not (folder / ".actions").exists()
        return time.time() - struck
    hangs_in_a_run = case.kind == "hang" and case.phase != "rendezvous"
    ending = [survivor, *([victim] if case.kind == "raise" or hangs_in_a_run else [])]
    for process in ending:
        process.join(max(0.0, struck + min(case.timeout + OVER, PATIENCE) - time.time()))
        assert not process.is_alive(), f"rank {processes.index(process)} is still there:\n{said(folder)}"
        assert process.exitcode not in (0, None), said(folder)
    took = time.time() - struck
    text = (folder / f"output-{1 - case.victim}").read_text()
    if case.phase == "background" and case.kind == "raise":  # no peer is lost: all ranks hear of it
        assert f"rank {case.victim}: ArithmeticError: no luck" in text, said(folder)
        return took
    blamed = re.search(rf"First to blame: rank {case.victim} (.*)", text)
    assert blamed, said(folder)
    rows = [line for line in text.splitlines() if re.match(rf"{case.victim}\s", line)]
    row = blamed[0] if case.kind == "raise" and not rows else rows[0]  # an error is told without the table
    if case.phase != "rendezvous":
        assert re.search(KINDS[case.kind], row), row
    assert re.search(PHASES[case.phase], row), row
    afterwards = diagnose(read_run(runs_below(folder)[0], live=False))
    assert afterwards.culprits[:1] == (case.victim,), afterwards
    return took


def said(folder: Path) -> str:
    """Output of both ranks."""
    return "\n".join(f"--- rank {rank} ---\n{(folder / f'output-{rank}').read_text()[-5000:]}" for rank in range(2))


def cases(timeout: float = 8.0) -> Iterator[Case]:
    """All of them; layouts and victims take turns."""
    layouts = list(LAYOUTS)
    for n, phase in enumerate(PHASES):
        for k, kind in enumerate(KINDS):
            yield Case(phase, kind, layouts[(n + k) % len(layouts)], (n + k) // 3 % 2, timeout)
    for n, phase in enumerate(("setup", "forward", "validation", "save", "data")):
        yield Case(phase, "slow", layouts[n % len(layouts)], n % 2, timeout)


def run(chosen: list[Case], scratch: Path, tell: Callable[[str], None] = print) -> dict[Case, str]:
    """All trials, one after another; what is wrong, by case."""
    wrong = {}
    for case in chosen:
        try:
            tell(f"| {case} | {trial(case, scratch):.1f} s |")
        except AssertionError as error:
            wrong[case] = str(error)
            tell(f"| {case} | WRONG |\n{error}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--timeout", type=float, default=8.0, help="of collectives, in seconds")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    chosen = [case for case in cases(options.timeout) if options.only in str(case)]
    with tempfile.TemporaryDirectory() as scratch:
        wrong = run(chosen, Path(scratch))
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} as they should be")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

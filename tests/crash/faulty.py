"""A training job in which one rank does wrong: at a step, at a place, in one of many ways."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from jobs import Job, Log
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.data import MegatronSampler, ResumableDataLoader

STEPS, EVERY, BATCH, WORDS = 12, 4, 4, 64
VALIDATION = 5
TIMEOUT = 10.0  # seconds, of a job's collectives where nothing else is said
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2, "micro_batch_size": 2}),
    "cp2": (2, {"cp": 2, "cp_comm_type": "all_gather"}),
    "dp3": (3, {}),
    "tp2 x dp2": (4, {"tp": 2}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 2}),
    "pp2 x dp2": (4, {"pp": 2, "micro_batch_size": 2}),
}
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": WORDS}
SIZES |= {"ffn_hidden_size": 64, "head_dim": 16, "vocab_multiple": 2}
PLACES = ("start", "data", "forward", "backward", "optimizer", "save", "validation")
FULL = 32 << 10  # bytes that a file may have on a disk that is full


@dataclass(frozen=True)
class Fault:
    """One wrong deed.

    Attributes:
        deed: a key of ``DEEDS``, or of those that data, loss or gradients undergo; "" for none.
        rank: the culprit.
        step: step of training.
        place: one of ``PLACES``.
        seconds: duration of a sleep.
    """

    deed: str = ""
    rank: int = 0
    step: int = 0
    place: str = "forward"
    seconds: float = 0.0


@dataclass(frozen=True)
class FaultyJob(Job):
    """A training run, a fault in it.

    Attributes:
        fault: what goes wrong.
        by_torchrun: True as if ``torchrun`` had started the ranks: its store outlives them; else rank 0 has the store.
        port: port of the store.
        callbacks: on top of the job's own.
        strategy: options of the strategy.
        differing: options of the module on the culprit alone.
        workers: workers of the DataLoader.
        steps: steps of training.
        timeout: seconds, of collectives.
    """

    fault: Fault = field(default_factory=Fault)
    by_torchrun: bool = True
    port: int = 0
    callbacks: tuple[Callback, ...] = ()
    strategy: tuple[tuple[str, Any], ...] = ()
    differing: tuple[tuple[str, Any], ...] = ()
    workers: int = 0
    steps: int = STEPS
    timeout: float = TIMEOUT

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def mark(self) -> Path:
        """File that appears just before the fault; its time is when."""
        return self.folder.with_suffix(".none" if self.resumes else ".fault")


def _sleep_for_ever(fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _raise(fault: Fault) -> None:
    raise ValueError(f"planted in {fault.place}")


def _fill_disk(fault: Fault) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))


DEEDS: dict[str, Callable[[Fault], None]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _sleep_for_ever,
    "nap": lambda fault: time.sleep(fault.seconds),
    "slow": lambda fault: time.sleep(fault.seconds),
    "raise": _raise,
    "leave": lambda fault: os._exit(7),
    "full disk": _fill_disk,
}


class Culprit:
    """Does the deed when its time has come.

    Args:
        fault: fault of the job.
        mark: made just before.
        rank: who asks.
    """

    def __init__(self, fault: Fault, mark: Path, rank: int) -> None:
        self._fault, self._mark, self._is_me = fault, mark, rank == fault.rank

    def is_due(self, place: str, step: int, deed: str | None = None) -> bool:
        """True at the place and the step of the fault; from that step on if it lasts."""
        fault = self._fault
        if not self._is_me or not fault.deed or place != fault.place or (deed is not None and deed != fault.deed):
            return False
        return step >= fault.step if fault.deed in ("slow", "full disk") else step == fault.step

    def act(self, place: str, step: int) -> None:
        """Do it, if it is due and something to be done; others ask :meth:`is_due`."""
        if self._fault.deed in DEEDS and self.is_due(place, step):
            self.note()
            DEEDS[self._fault.deed](self._fault)

    def note(self) -> None:
        """Leave the mark."""
        if not self._mark.exists():
            self._mark.touch()


class Module(GPTModule):
    """A language model that may do wrong in a step."""

    culprit: Culprit

    def configure_model(self) -> None:
        self.culprit.act("start", 0)
        super().configure_model()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        step, culprit = self.trainer.global_step, self.culprit
        culprit.act("forward", step)
        if culprit.is_due("forward", step, "nan parameter"):
            culprit.note()
            self.trainer.strategy.finish_param_gather()  # or what is on its way would mend it
            self._some_weight().data.view(-1)[3] = float("nan")
        loss = super().training_step(batch, batch_idx)
        if culprit.is_due("forward", step, "nan loss"):
            culprit.note()
            loss = loss * float("nan")
        if culprit.is_due("forward", step, "spike"):
            culprit.note()
            loss = loss * 30.0
        return loss

    def on_train_start(self) -> None:
        self._some_weight().register_hook(self._in_backward)

    def _some_weight(self) -> torch.nn.Parameter:
        # Not the embedding: a row of a word that no sample has does not matter.
        return next(p for name, p in self.named_parameters() if "layers" in name and p.dim() > 1)

    def _in_backward(self, grad: torch.Tensor) -> torch.Tensor:
        step = self.trainer.global_step
        self.culprit.act("backward", step)
        if self.culprit.is_due("backward", step, "nan gradient"):
            self.culprit.note()
            grad = grad.clone()
            grad.view(-1)[5] = float("nan")
        return grad


class Between(Callback):
    """Does wrong where no module is asked."""

    def __init__(self, culprit: Culprit) -> None:
        self._culprit = culprit

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self._culprit.act("optimizer", trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self._culprit.act("save", trainer.global_step)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._culprit.act("validation", trainer.global_step)


class Rows(Dataset[Any]):
    """Numbers that count up, which is soon learnt."""

    def __init__(self, culprit: Culprit, steps: int, samples_of_step: int) -> None:
        self._culprit, self._steps, self._of_step = culprit, steps, samples_of_step

    def __len__(self) -> int:
        return self._steps * self._of_step

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._culprit.act("data", index // self._of_step)
        row = (torch.arange(9) + index * 7) % WORDS
        return {"tokens": row[:-1], "labels": row[1:]}


class Data(LightningDataModule):
    """Each replica reads its rows."""

    def __init__(self, culprit: Culprit, job: FaultyJob) -> None:
        super().__init__()
        self._culprit, self._job = culprit, job

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        dp = {"dp_rank": strategy.data_parallel_rank, "dp_size": strategy.data_parallel_size}  # type: ignore[attr-defined]
        rows = Rows(self._culprit, self._job.steps, BATCH * dp["dp_size"])
        batches = MegatronSampler(len(rows), batch_size=BATCH, **dp)
        forked = {"num_workers": self._job.workers, "multiprocessing_context": "fork"} if self._job.workers else {}
        return ResumableDataLoader(rows, batch_sampler=batches, **forked)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(Culprit(Fault(), self._job.mark, 0), 2 * BATCH, 1), batch_size=BATCH)


def work(job: FaultyJob, rank: int, store: str) -> None:
    """One rank of a job; ends as a script of a user's ends."""
    os.setpgid(0, 0)  # so that what it leaves behind can be found
    output = os.open(job.output(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.dump_traceback_later(job.timeout + 15)  # of a rank that does not end
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "LOCAL_RANK": str(rank)}
    if job.by_torchrun:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks), "GROUP_RANK": "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": str(job.ranks), "TORCHELASTIC_RUN_ID": "chaos"}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    train(job, rank)


def train(job: FaultyJob, rank: int) -> None:
    """Train as a script of a user's would."""
    seed_everything(7, verbose=False)
    culprit = Culprit(job.fault, job.mark, rank)
    saver = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last="link")
    trainer = Trainer(
        strategy=MegatronStrategy(
            **LAYOUTS[job.layout][1] | dict(job.strategy),
            async_save=job.in_background,
            timeout=timedelta(seconds=job.timeout),
        ),
        accelerator="cpu",
        devices=job.ranks,
        max_steps=job.steps,
        logger=Log(job.log),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=VALIDATION,
        limit_val_batches=2,
        use_distributed_sampler=False,
        default_root_dir=job.folder.parent,
        callbacks=[saver, Between(culprit), *job.callbacks],
    )
    different = dict(job.differing) if rank == job.fault.rank else {}
    options = SIZES | {"lr": 1e-2, "hidden_dropout": 0.1, "attention_dropout": 0.1} | different
    module = Module("llama-tiny", **options)
    module.culprit = culprit
    trainer.fit(module, datamodule=Data(culprit, job), ckpt_path="last" if job.resumes else None)

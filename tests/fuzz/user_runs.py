"""Runs a program of ``user_programs.py`` under stock Lightning, or under ours in a layout; records are plain data."""

from __future__ import annotations

import logging
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from user_batches import MICRO_BATCH, loaders
from user_callbacks import callbacks_of, seen_by
from user_grammar import Program
from user_modules import FailedError, module_of

from lightning_megatron import ConfigError, MegatronStrategy, read_checkpoint
from lightning_megatron.data import DataError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

EPOCHS, SAVED_EVERY = 2, 4
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    **{"one": {}, "dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}},
    **{"mb2": {"micro_batch_size": MICRO_BATCH}, "dp2+mb2": {"micro_batch_size": MICRO_BATCH}},
}
RANKS = {"dp2": 2, "tp2": 2, "pp2": 2, "dp2+mb2": 2}
SOME_UNUSED = ("loop=manual-two", "net=t5", "net=bert", "late-group", "temperature")
REFUSALS = (ConfigError, DataError)


@dataclass(frozen=True)
class Outcome:
    """One rank's end of a program.

    Attributes:
        record: observations by subject; those before an error too.
        error: ``"refused"``, ``"refused late"`` or ``"failed"``, and the text of the error; empty without one.
        stopped: true if it was interrupted; some programs end before that.
    """

    record: Mapping[str, Any]
    error: tuple[str, ...] = ()
    stopped: bool = False


class LastPlaces(Callback):
    """Moves each trained weight by at most one unit in the last place before each batch, up or down at random.

    What then differs at the end differs as much between two orders of the same sums.
    """

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for param in pl_module.parameters():
                if param.requires_grad and param.is_floating_point():
                    up = torch.rand(param.shape, generator=self.random) < 0.5
                    param.copy_(torch.nextafter(param, torch.where(up, torch.inf, -torch.inf).to(param.dtype)))


class _Run:
    """A program in one folder: fits, evaluates, and keeps a record."""

    def __init__(self, program: Program, folder: Path, ours: bool, moved: int | None, halves: bool) -> None:
        self.program, self.folder, self.ours, self.moved, self.halves = program, folder, ours, moved, halves
        self.record: dict[str, Any] = {"logged": {}, "callbacks": {}}
        self.stopped = False

    def strategy(self, layout: str) -> Any:
        """Ours with all its defaults, or Lightning's for as many replicas."""
        if self.ours:
            return MegatronStrategy(**LAYOUTS[layout])
        if layout.startswith("dp2"):
            return DDPStrategy(find_unused_parameters=self.program.has_any(SOME_UNUSED))
        return SingleDeviceStrategy(torch.device("cpu"))

    def fit(self, layout: str, *, stops: bool = False, ckpt_path: str | Path | None = None) -> None:
        """Fit, evaluate, and add to the record.

        Args:
            layout: its layout.
            stops: true if it is to be interrupted.
            ckpt_path: checkpoint to go on from.
        """
        program, folder = self.program, self.folder
        seed_everything(program.seed, verbose=False)
        module, (rows, held_out) = module_of(program, halves=self.halves), loaders(program)
        callbacks, recorder = callbacks_of(program, folder), Recorder()
        callbacks += [LastPlaces(self.moved)] if self.moved is not None else []
        if program["stop"] != "none":
            saves = {"every_n_train_steps": SAVED_EVERY, "save_top_k": -1, "save_last": True}
            callbacks.append(ModelCheckpoint(folder / "saved", "{step}", **saves))
            module.stop_file = str(folder / "stop") if stops else None
        options: dict[str, Any] = {"max_epochs": EPOCHS, "logger": recorder, "default_root_dir": folder}
        options |= {"accumulate_grad_batches": int(program["accumulate"]), "callbacks": callbacks}
        if program["clip"] in ("norm", "value"):
            options |= {"gradient_clip_val": 0.1, "gradient_clip_algorithm": program["clip"]}
        if "val-often" in program:
            options["val_check_interval"] = 2
        held_out = held_out if program.has_any(("val", "test", "predict")) else None
        options["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        validated = [held_out, held_out] if "two-val" in program else held_out
        trainer = quiet_trainer(self.strategy(layout), precision=program["precision"], **options)
        try:
            trainer.fit(module, rows, validated if "val" in program else None, ckpt_path=ckpt_path)
        except (FailedError, SystemExit):
            if not stops:
                raise
            self.stopped = True
        finally:
            self._add(trainer, module, recorder, callbacks)
        if self.stopped:
            return
        self._ends(trainer)
        if "test" in program:
            trainer.test(module, held_out, verbose=False)
            self._add(trainer, module, recorder, callbacks)
        if "predict" in program:
            self.record["predictions"] = _joined(trainer.predict(module, held_out))

    def _add(self, trainer: Trainer, module: Any, recorder: Recorder, callbacks: list[Any]) -> None:
        for subject, found in module.notes.plain().items():
            self.record.setdefault(subject, {}).update(found)
        for row in recorder.rows:
            step = int(row["step"])
            self.record["logged"].update({f"{name} at {step}": value for name, value in row.items() if name != "step"})
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.record["callback_metrics"] = self.record.get("callback_metrics", {}) | metrics
        self.record["callbacks"] |= seen_by(callbacks)
        self.record["steps"] = trainer.global_step

    def part(self, part: str) -> None:
        """Run the program up to its stop (``"first"``), from there on (``"second"``), or without one (``"whole"``)."""
        if part != "second":
            with handlers_kept():
                self.fit(self.program.layout, stops=part == "first")
            return
        if dist.is_initialized():
            dist.barrier()
        last = self.folder / "saved" / "last.ckpt"
        by_path = self.program.seed % 2 and last.exists()
        self.fit(self.program.layout, ckpt_path=last if by_path else "last")

    def _ends(self, trainer: Trainer) -> None:
        """Add what is there at the end: the checkpoint with its tensors."""
        path = self.folder / "end.ckpt"
        trainer.save_checkpoint(path)
        if "loads-back" in self.program and trainer.is_global_zero:
            module_of(self.program).load_state_dict(checkpoint_of(path)["state_dict"])
        if self.program["stop"] != "none" and trainer.is_global_zero:
            last = sorted((self.folder / "saved").glob("last*"))
            self.record["last"] = {each.name: checkpoint_of(each)["global_step"] for each in last}
        module = trainer.lightning_module
        if trainer.is_global_zero:
            self.record["checkpoint"] = contents(path, module, trainer)
        self.record["buffers in memory"] = {name: value.clone() for name, value in module.named_buffers()}
        if "plain" in self.program.words or "hugging-face" in self.program.words:
            self.record["weights in memory"] = {
                name: value.detach().clone() for name, value in module.named_parameters()
            }


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of signals."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def checkpoint_of(path: Path) -> dict[str, Any]:
    """Lightning's dictionary, of a directory or a file."""
    found: dict[str, Any] = read_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=False)
    return found


def contents(path: Path, module: LightningModule, trainer: Trainer) -> dict[str, Any]:
    """What matters in a checkpoint, under the same names for both strategies."""
    found = checkpoint_of(path)
    kept = {name: found.get(name) for name in ("epoch", "global_step", "lr_schedulers", "own", "hyper_parameters")}
    kept["state_dict"] = dict(found["state_dict"])
    kept["callbacks"] = {name: state for name, state in found["callbacks"].items() if "Checkpoint" not in name}
    if path.is_dir():  # which has tied weights once
        twins = {
            id(value): name for name, value in module.state_dict(keep_vars=True).items() if name in kept["state_dict"]
        }
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) in twins:
                kept["state_dict"][name] = kept["state_dict"][twins[id(value)]]
    kept["progress"] = found["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"]
    names = {id(param): name for name, param in module.named_parameters()}
    if path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, f"{folder}/whole.pt")
            whole = torch.load(f"{folder}/whole.pt", weights_only=False)
        states = [whole[name]["state"] for name in sorted(whole) if name.startswith("optimizer_")]
        main = {name: state.pop("master") for each in states for name, state in each.items() if "master" in state}
    else:
        main, states = {}, [_by_name(names, optimizer) for optimizer in trainer.optimizers]
    trained = {names[id(p)] for optimizer in trainer.optimizers for p in trained_by(optimizer)}
    kept["state_dict"] |= {f"main {name}": found["state_dict"][name] for name in trained}  # also before its first step
    kept["state_dict"] |= {f"main {name}": value for name, value in main.items()}
    kept["optimizers"] = [{name: dict(state) for name, state in each.items() if state} for each in states]
    return kept


def trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Parameters of an optimizer that are trained."""
    return (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad)


def _by_name(names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {names[id(param)]: state for param, state in optimizer.state.items()}


def _joined(predictions: Any) -> dict[str, list[Any]]:
    """Entries of predictions, end to end."""
    found: dict[str, list[Any]] = {}
    for each in predictions or ():
        for name, value in each.items() if each is not None else ():
            found.setdefault(name, []).extend(value.tolist() if isinstance(value, torch.Tensor) else value)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from telling things; other tests of this process read them."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run(
    program: Program,
    folder: Path,
    part: str = "whole",
    *,
    ours: bool = False,
    moved: int | None = None,
    halves: bool = False,
) -> Outcome:
    """Run a program on this rank of the process group, if there is one.

    Args:
        program: the program in its layout.
        folder: a folder that the ranks share, and both parts of a program that stops.
        part: ``"first"`` up to its stop, ``"second"`` from there on, ``"whole"`` without it.
        ours: false for Lightning's strategy.
        moved: a seed to move weights in their last places; see ``LastPlaces``.
        halves: true for a backward of each part of a batch; see ``Halves``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = _Run(program, folder, ours, moved, halves)
    with _quiet():
        try:
            here.part(part)
        except Exception as error:
            refused = isinstance(error, REFUSALS)
            kind = "failed" if not refused else "refused late" if here.record.get("steps") else "refused"
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{'/'.join(Path(place.filename).parts[-3:])}:{place.lineno}"
            return Outcome(here.record, (kind, f"{type(error).__name__}: {error}"[:600], line))
    return Outcome(here.record, stopped=here.stopped)


def _newest(before: Any, after: Any) -> Any:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {**before, **{name: _newest(before.get(name), value) for name, value in after.items()}}


def joined(first: Outcome, second: Outcome) -> Outcome:
    """Outcome of a program from those of its two parts."""
    record = dict(second.record)
    for subject in record.keys() & first.record.keys() - {"checkpoint", "last", "callback_metrics"}:
        record[subject] = _newest(first.record[subject], record[subject])
    return Outcome(record, second.error or first.error)

"""Faults of a job: each kind of trial, and what is to come of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from faulty import BATCH, EVERY, LAYOUTS, PLACES, STEPS, TIMEOUT, VALIDATION, Fault, FaultyJob
from jobs import wait_until

import lightning_megatron
from lightning_megatron import SpikeGuard

Strike = Callable[[FaultyJob, Sequence[BaseProcess]], None]
ENDS, GOES_ON, SAVES = "ends", "goes on", "saves and ends"


@dataclass(frozen=True)
class Trial:
    """A job with its fault, and what is to come of it.

    Attributes:
        kind: row of the table.
        job: job at its begin.
        then: what is to come of it.
        names: patterns, each of which must be found in what the job prints.
        strike: done to the processes from outside; nothing if the fault is the job's own.
        damage: done to the newest checkpoint before the job is resumed.
        signal: that ends it.
        at_step: before which it must end.
    """

    kind: str
    job: FaultyJob
    then: str = ENDS
    names: tuple[str, ...] = ()
    strike: Strike | None = None
    damage: Callable[[Path], None] | None = None
    signal: int = 0
    at_step: int = STEPS


def _place_and_step(dice: random.Random, places: Sequence[str]) -> dict[str, Any]:
    place = dice.choice(places)
    step = dice.randrange(1, STEPS - 2)
    if place == "start":
        step = 0
    elif place == "save":
        step = EVERY * dice.randrange(1, STEPS // EVERY)
    elif place == "validation":
        step = VALIDATION * dice.randrange(1, STEPS // VALIDATION + 1)
    return {"place": place, "step": step}


ACTIONS = {
    "start": r"start|set.?up|configur|begin",
    "data": r"data",
    "forward": r"forward|training_step|\d+F\d+",
    "backward": r"backward|\d+[BIW]\d+",
    "optimizer": r"optimizer",
    "save": r"sav",
    "validation": r"validat",
}


def rank_named(rank: int) -> str:
    return rf"(?i)\brank {rank}\b"


def killed(job: FaultyJob, dice: random.Random) -> Trial:
    if dice.random() < 0.5:
        return Trial("killed", job, names=(rank_named(job.fault.rank),), strike=_strike(signal.SIGKILL, dice))
    fault = replace(job.fault, deed="kill", **_place_and_step(dice, PLACES))
    return Trial("killed", replace(job, fault=fault), names=_names(fault))


def stopped(job: FaultyJob, dice: random.Random) -> Trial:
    if dice.random() < 0.5:
        return Trial("stopped", job, names=(rank_named(job.fault.rank),), strike=_strike(signal.SIGSTOP, dice))
    fault = replace(job.fault, deed="stop", **_place_and_step(dice, PLACES))
    return Trial("stopped", replace(job, fault=fault), names=_names(fault))


def hung(job: FaultyJob, dice: random.Random) -> Trial:
    fault = replace(job.fault, deed="hang", **_place_and_step(dice, PLACES))
    return Trial("hung in its code", replace(job, fault=fault), names=_names(fault))


def raising(job: FaultyJob, dice: random.Random) -> Trial:
    fault = replace(job.fault, deed="raise", **_place_and_step(dice, PLACES))
    return Trial("raising", replace(job, fault=fault), names=(rank_named(fault.rank), f"planted in {fault.place}"))


def leaving(job: FaultyJob, dice: random.Random) -> Trial:
    fault = replace(job.fault, deed="leave", **_place_and_step(dice, PLACES))
    return Trial("leaving", replace(job, fault=fault), names=_names(fault))


def pausing(job: FaultyJob, dice: random.Random) -> Trial:
    place = _place_and_step(dice, PLACES)
    seconds = dice.uniform(1.0, 0.4 * TIMEOUT) / (BATCH if place["place"] == "data" else 1)
    fault = replace(job.fault, deed="nap", seconds=seconds, **place)
    return Trial("pausing", replace(job, fault=fault), GOES_ON)


def with_nan(job: FaultyJob, dice: random.Random) -> Trial:
    deed, place = dice.choice([("nan gradient", "backward"), ("nan loss", "forward"), ("nan parameter", "forward")])
    rank = job.ranks - 1 if deed == "nan loss" else job.fault.rank  # the last rank is on the last stage
    fault = Fault(deed, rank, dice.randrange(1, STEPS - 2), place)
    return Trial("NaN", replace(job, fault=fault), names=(rank_named(rank), "(?i)nan|not finite"))


def spiking(job: FaultyJob, dice: random.Random) -> Trial:
    """A loss that jumps, or a gradient that is not finite, which ``SpikeGuard`` does not let through."""
    deed, place = dice.choice([("spike", "forward"), ("nan gradient", "backward")])
    rank = job.ranks - 1 if deed == "spike" else job.fault.rank
    fault = Fault(deed, rank, dice.randrange(6, STEPS - 1), place)
    guarded = replace(job, fault=fault, callbacks=(SpikeGuard(window=4, warmup=4),))
    return Trial("spike, skipped", guarded, GOES_ON, names=(f"step {fault.step} is skipped", "samples? \\d"))


def slow(job: FaultyJob, dice: random.Random) -> Trial:
    """A rank that is slow from some step on, in its data or in what it computes."""
    place = dice.choice(("data", "forward"))
    seconds = dice.uniform(0.6, 0.8) / (BATCH if place == "data" else 1)
    fault = replace(job.fault, deed="slow", place=place, step=dice.randrange(8, 14), seconds=seconds)
    monitor = lightning_megatron.StragglerMonitor(every=3, windows=3)
    watched = replace(job, fault=fault, callbacks=(monitor,), steps=30)
    what = "waits for its data" if place == "data" else "computes slowly"
    return Trial("slow", watched, GOES_ON, (rf"rank {fault.rank} \(.*\) {what}",))


def disagreeing(job: FaultyJob, dice: random.Random) -> Trial:
    """A rank that was given another setting, which must be told before the first step."""
    name, value = dice.choice([("lr", 0.02), ("hidden_dropout", 0.2), ("norm_epsilon", 1e-3), ("rope_theta", 5e3)])
    fault = replace(job.fault, deed="differ", place="start")
    told = (rank_named(fault.rank), f"(?i){name}", "ConfigError")
    return Trial("disagreeing", replace(job, fault=fault, differing=((name, value),)), names=told, at_step=0)


def damaged(job: FaultyJob, dice: random.Random) -> Trial:
    """Every rank is killed when there are two checkpoints at least; the newest one is then spoilt."""
    how = dice.choice((_cut, _flip, _lose, _empty))
    last = replace(job.fault, deed="kill", place="forward", step=dice.randrange(2 * EVERY + 1, STEPS))
    return Trial("damaged checkpoint", replace(job, fault=last), damage=how(dice))


def full_disk(job: FaultyJob, dice: random.Random) -> Trial:
    fault = replace(job.fault, deed="full disk", place="optimizer", step=dice.randrange(1, STEPS - EVERY))
    return Trial("full disk", replace(job, fault=fault), names=(rank_named(fault.rank), "File too large|No space"))


def stuck_worker(job: FaultyJob, dice: random.Random) -> Trial:
    deed = dice.choice(("hang", "kill", "raise"))
    fault = replace(job.fault, deed=deed, place="data", step=dice.randrange(1, STEPS - 2))
    return Trial("data worker", replace(job, fault=fault, workers=1), names=_names(fault))


def signalled(job: FaultyJob, dice: random.Random) -> Trial:
    number = dice.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    return Trial("signal", job, SAVES, strike=_strike(number, dice, from_start=False), signal=number)


KINDS: list[tuple[int, Callable[[FaultyJob, random.Random], Trial]]] = [
    (4, killed),
    (3, stopped),
    (2, hung),
    (2, raising),
    (1, leaving),
    (1, pausing),
    (3, with_nan),
    (2, spiking),
    *([(1, slow)] if hasattr(lightning_megatron, "StragglerMonitor") else []),
    (1, disagreeing),
    (2, damaged),
    (2, full_disk),
    (2, stuck_worker),
    (2, signalled),
]


def _names(fault: Fault) -> tuple[str, ...]:
    return rank_named(fault.rank), f"(?i){ACTIONS[fault.place]}"


def _strike(number: int, dice: random.Random, from_start: bool = True) -> Strike:
    """A signal at some moment: before or after the start of training, between and inside of steps."""
    early = from_start and dice.random() < 0.25
    after, pause = dice.randrange(STEPS - 5), dice.uniform(0.0, 2.0 if early else 0.05)

    def strike(job: FaultyJob, processes: Sequence[BaseProcess]) -> None:
        if not early:
            wait_until(lambda: len(job.losses()) > after, list(processes), 0.002)
        time.sleep(pause)
        victim = processes[job.fault.rank]
        if victim.is_alive() and victim.pid is not None:
            job.mark.touch()
            os.kill(victim.pid, number)

    return strike


def _biggest(checkpoint: Path, dice: random.Random) -> Path:
    return dice.choice([*sorted(checkpoint.glob("*.distcp")), checkpoint / "meta.pt", checkpoint / ".metadata"])


def _cut(dice: random.Random) -> Callable[[Path], None]:
    share = dice.random()

    def cut(checkpoint: Path) -> None:
        file = _biggest(checkpoint, dice)
        os.truncate(file, int(share * file.stat().st_size))

    return cut


def _flip(dice: random.Random) -> Callable[[Path], None]:
    def flip(checkpoint: Path) -> None:
        file = _biggest(checkpoint, dice)
        content = bytearray(file.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content)

    return flip


def _lose(dice: random.Random) -> Callable[[Path], None]:
    return lambda checkpoint: _biggest(checkpoint, dice).unlink()


def _empty(dice: random.Random) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(_biggest(checkpoint, dice), 0)


def plan(number: int, seed: int, scratch: Path, kinds: Sequence[str], layouts: Sequence[str]) -> Trial:
    """Trial ``number`` of a seed."""
    dice = random.Random(f"{seed}-{number}")
    chosen = [make for weight, make in KINDS for _ in range(weight) if not kinds or make.__name__ in kinds]
    layout = dice.choice([name for name in layouts for _ in range(5 - LAYOUTS[name][0])])  # small ones often
    job = FaultyJob(
        scratch / f"trial-{number}" / "checkpoints",
        layout,
        in_background=dice.random() < 0.5,
        fault=Fault(rank=dice.randrange(LAYOUTS[layout][0])),
        by_torchrun=dice.random() < 0.5,
    )
    return chosen[number % len(chosen)](job, dice)

"""Jobs of two to four ranks in which one does wrong, in every way and at every place; what is promised must come true.

A trial is a job with one fault: a rank killed, stopped, hung, slow, raising or leaving; NaN in its gradient, loss or
parameters; a batch that makes the loss jump; a newest checkpoint that is cut, flipped or lost; a disk that is full; a
data worker that is stuck or dies; a signal. The job must end, or go on, as it is told to, within the timeout and
five seconds; what it prints must name the culprit and where it was; nothing may stay behind; and where it is resumed,
every loss must be that of the run without a fault, bit for bit.

Run: ``python tests/crash/chaos.py [--trials 200] [--seed 0] [--only 17] [--kinds killed,stopped]``. Trial 17 of a seed
is always the same, but for the machine's own moments.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from faulty import LAYOUTS, STEPS, TIMEOUT, Fault, FaultyJob, work
from jobs import PATIENCE, Losses, faults, final_names, start, step_of
from kinds import ENDS, GOES_ON, SAVES, Strike, Trial, plan
from torch.distributed import TCPStore

from lightning_megatron.testing.ports import free_port

GRACE = 5.0
AT_ONCE = 2  # trials at a time


@dataclass
class Outcome:
    """Outcome of a trial: the faults of each promise."""

    wrong: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    resumed: bool = False


# What happens in a job


def run_job(
    job: FaultyJob, strike: Strike | None = None, stays: Sequence[int] = ()
) -> tuple[list[int | None], float, list[str]]:
    """Run a job to its end, by force if need be.

    Args:
        job: job to run.
        strike: strike of the :class:`Trial`.
        stays: ranks that cannot end by themselves.

    Returns:
        Exit codes (``None`` for a rank that did not end), seconds from the fault, or the start if there was none, to
        the end of the last rank, and what was left running.
    """
    store = None
    if job.by_torchrun:
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    job = replace(job, port=store.port if store is not None else free_port())
    with _starting:
        processes = start(work, job, job.ranks, daemon=False)
    begun = time.time()
    if strike is not None:
        strike(job, processes)
    waits = [process for rank, process in enumerate(processes) if rank not in stays]
    latest = begun + PATIENCE
    while any(process.is_alive() for process in waits) and time.time() < latest:
        if job.mark.exists():
            goes_on = job.fault.deed in ("slow", "nap", "spike")
            latest = min(latest, _time_of(job.mark) + (PATIENCE if goes_on else job.timeout + 35))
        time.sleep(0.02)
    ended = time.time()
    since = _time_of(job.mark) if job.mark.exists() else begun
    if job.workers and job.log.exists():  # which fetch samples ahead: they are missed after the last step
        since = max(since, _time_of(job.log))
    codes = [process.exitcode for process in processes]
    for rank in stays:
        processes[rank].kill()
    left = _left_behind(processes)
    for process in processes:
        process.kill()
        process.join()
    return codes, ended - since, left


_starting = threading.Lock()


def _time_of(file: Path) -> float:
    return file.stat().st_mtime


def _left_behind(processes: Sequence[BaseProcess]) -> list[str]:
    """Processes of a job's groups that are still there a few seconds after their rank has ended; they are killed."""
    groups = {process.pid for process in processes}
    end = time.monotonic() + 5.0
    while True:
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                is_ours = process.pid not in groups and os.getpgid(process.pid) in groups
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > end:
            break
        time.sleep(0.1)
    texts = []
    for process in left:
        with suppress(psutil.Error):
            texts.append(" ".join(process.cmdline())[:80] or process.name())
            process.kill()
    return texts


# Verdicts


def judge(trial: Trial, whole: Losses) -> Outcome:
    """Carry a trial out, and compare what came of it with what was promised."""
    job, outcome = trial.job, Outcome()
    culprit = job.fault.rank
    stopped = [culprit] if trial.kind == "stopped" else []
    codes, seconds, left = run_job(job, trial.strike, stopped)
    text = said(job)
    outcome.seconds = seconds
    if not _is_as_told(trial, [code for rank, code in enumerate(codes) if rank not in stopped]):
        outcome.wrong["ended as told"] = f"status {codes}"
    if trial.then != GOES_ON and len(job.losses()) > trial.at_step:
        outcome.wrong["ended as told"] = f"{len(job.losses())} steps were taken"
    if trial.then != GOES_ON and seconds > job.timeout + GRACE:
        outcome.wrong["in time"] = f"{seconds:.1f} s"
    missing = [name for name in trial.names if not re.search(name, text)]
    if missing:
        outcome.wrong["named"] = f"no {missing}"
    if left:
        outcome.wrong["left"] = str(left)
    losses = job.losses()
    if trial.kind == "spike, skipped":
        again = replace(job, folder=job.folder.with_name("again"))
        run_job(again)
        whole = again.losses()
    if losses[:STEPS] != whole[: len(losses)] or (trial.then == GOES_ON and len(losses) < STEPS):
        outcome.wrong["bits"] = f"{_first_difference(losses, whole)}"
    if trial.then != GOES_ON:
        resume(trial, whole, outcome)
    return outcome


def said(job: FaultyJob) -> str:
    """All that the ranks have printed; one that is killed at once has no file."""
    files = [job.output(rank) for rank in range(job.ranks)]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _is_as_told(trial: Trial, codes: list[int | None]) -> bool:
    """True if the processes have ended with the status that they should."""
    if trial.then == GOES_ON:
        return set(codes) == {0}
    if trial.then == SAVES:  # of a job that Lightning has started, rank 0's status counts
        others = 128 + trial.signal if trial.job.by_torchrun else 0
        return codes[0] == 128 + trial.signal and set(codes[1:]) == {others}
    return None not in codes and 0 not in codes


def resume(trial: Trial, whole: Losses, outcome: Outcome) -> None:
    """Go on without the fault."""
    job = trial.job
    if found := faults(job.folder):
        outcome.wrong["left"] = f"damaged: {found}"
    steps = sorted(step_of(job.folder / name) for name in final_names(job.folder) if name.startswith("step="))
    if trial.damage is not None and len(steps) > 1:  # of the only one nothing would be left
        trial.damage(job.folder / f"step={steps.pop()}.ckpt")
    again = replace(job, fault=Fault(), resumes=True, differing=())
    codes, _, left = run_job(again)
    outcome.resumed = True
    if codes != [0] * job.ranks:
        outcome.wrong["resumed"] = f"status {codes}"
        return
    resumed = again.losses()
    if not resumed:
        outcome.wrong["resumed"] = "nothing was left to train"
        return
    newest = max(steps, default=0)
    expected = {newest} if trial.then == ENDS else {len(job.losses()), newest}
    if resumed[0][0] not in expected:
        outcome.wrong["resumed"] = f"from step {resumed[0][0]}, there were {steps}"
    if resumed != whole[resumed[0][0] :]:
        outcome.wrong["bits"] = f"resumed: {_first_difference(resumed, whole)}"
    if left or any((job.folder / ".unfinished").glob("*")):
        outcome.wrong["left"] = f"after resuming: {left or list((job.folder / '.unfinished').glob('*'))}"


def _first_difference(losses: Losses, whole: Losses) -> str:
    known = dict(whole)
    found = next(((step, loss) for step, loss in losses if known.get(step) != loss), None)
    return "none" if found is None else f"step {found[0]}: {float.fromhex(found[1])} for {known.get(found[0])}"


def run(
    numbers: Sequence[int],
    seed: int,
    scratch: Path,
    kinds: Sequence[str] = (),
    layouts: Sequence[str] = tuple(LAYOUTS),
    tell: Callable[[str], None] = print,
    timeout: float = TIMEOUT,
) -> dict[str, list[Outcome]]:
    """All trials; their outcomes by kind."""
    planned = {number: plan(number, seed, scratch, kinds, layouts) for number in numbers}
    trials = {number: replace(trial, job=replace(trial.job, timeout=timeout)) for number, trial in planned.items()}
    outcomes: dict[str, list[Outcome]] = {}

    def undisturbed(layout: str) -> Losses:
        job = FaultyJob(scratch / f"whole {layout}", layout, timeout=timeout)
        codes, *_ = run_job(job)
        assert codes == [0] * job.ranks, (layout, codes, said(job)[-3000:])
        assert [step for step, _ in job.losses()] == list(range(STEPS)), (layout, job.losses())
        return job.losses()

    def one(number: int) -> None:
        trial = trials[number]
        outcome = judge(trial, whole[trial.job.layout])
        outcomes.setdefault(trial.kind, []).append(outcome)
        fault = trial.job.fault
        what = f"{fault.deed} in {fault.place} at step {fault.step}" if fault.deed else "from outside"
        verdict = f"{outcome.seconds:.1f} s {outcome.wrong or 'good'}"
        tell(f"{number}: {trial.kind}, {trial.job.layout}, rank {fault.rank}, {what}: {verdict}")
        if not outcome.wrong:
            shutil.rmtree(trial.job.folder.parent)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        needed = list(dict.fromkeys(trial.job.layout for trial in trials.values()))
        whole = dict(zip(needed, pool.map(undisturbed, needed), strict=True))
        list(pool.map(one, numbers))
    return outcomes


PROMISES = ("ended as told", "in time", "named", "left", "resumed", "bits")


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """A row for each kind: how many trials, how many kept each promise."""
    lines = [f"{'kind':20} {'trials':>7} " + " ".join(f"{promise:>14}" for promise in PROMISES) + "  slowest end"]
    for kind, found in sorted(outcomes.items()):
        kept = [sum(promise not in outcome.wrong for outcome in found) for promise in PROMISES]
        slowest = max((outcome.seconds for outcome in found), default=0.0)
        lines.append(f"{kind:20} {len(found):7} " + " ".join(f"{n:14}" for n in kept) + f"  {slowest:6.1f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of trials")
    parser.add_argument("--kinds", default="", help="names of functions in kinds.py, with commas between")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names, with commas between")
    parser.add_argument("--keep", type=Path, help="folder for what failing trials leave; else it is removed")
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; jobs would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = options.only if options.only else range(options.trials)
    kinds = [kind for kind in options.kinds.split(",") if kind]
    with tempfile.TemporaryDirectory() as scratch:
        print(table(run(numbers, options.seed, options.keep or Path(scratch), kinds, options.layouts.split(","))))


if __name__ == "__main__":
    main()

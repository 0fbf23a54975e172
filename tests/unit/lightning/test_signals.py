"""Handlers of signals, one process: who is noted, who is left alone, who ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from lightning_megatron.lightning.environments.mpi import MPIRanks, MpirunEnvironment
from lightning_megatron.lightning.stopping import signals as module
from lightning_megatron.lightning.stopping.agreement import Agreement
from lightning_megatron.lightning.stopping.requeue import lead_requeued_job, requeue, requeue_signal_of
from lightning_megatron.lightning.stopping.signals import StopSignals, handed_on
from lightning_megatron.lightning.stopping.worker_signals import PatientWorker
from tests.forked import forked

NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test does, others find the handlers as they were."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_requeue_signal_that_the_process_was_started_with_as_ignored_is_heard() -> None:
    """A batch script has torchrun ignore SIGUSR1, and its ranks inherit that."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    left = StopSignals(NAMES)
    left.listen()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN  # of a user, as with nohup
    left.give_back()
    signals = StopSignals(NAMES)
    signals.add(signal.SIGUSR1)
    signals.listen()
    signals.waits = True
    kill(signal.SIGUSR1)
    assert signals.noted == [signal.SIGUSR1]
    signals.give_back()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_the_signal_for_a_requeue_under_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, job = TorchElasticEnvironment(), {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for environment in (elastic, MpirunEnvironment(MPIRanks("Open MPI", 2, 0, 2, 0))):
        assert requeue_signal_of(environment, job) == signal.SIGUSR1
        assert requeue_signal_of(environment, {}) is None
        assert requeue_signal_of(environment, {**job, "SLURM_JOB_NAME": "interactive"}) is None
    assert requeue_signal_of(LightningEnvironment(), job) is None
    assert requeue_signal_of(None, job) is None
    assert requeue_signal_of(SLURMEnvironment(requeue_signal=signal.SIGUSR2)) == signal.SIGUSR2
    assert requeue_signal_of(SLURMEnvironment(auto_requeue=False), job) is None


def test_signals_are_noted_while_they_wait_and_given_back() -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    signals = StopSignals([*NAMES, "SIGNONE"])
    signals.listen()
    signals.waits = True
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        kill(number)
    assert signals.noted == [10, 15, 15, 2, 2]
    signals.give_back()
    assert {name: signal.getsignal(getattr(signal, name)) for name in NAMES} == before


def test_a_handler_of_the_users_runs_also_where_the_process_ends_at_once(tmp_path: Path) -> None:
    def act() -> None:
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "ran").touch())
        signals = StopSignals(NAMES)
        signals.look()
        signals.listen()
        kill(signal.SIGTERM)

    assert forked(act) == -signal.SIGTERM
    assert (tmp_path / "ran").exists()


def test_a_late_signal_is_waited_for_and_an_early_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = StopSignals(NAMES)
    signals.listen()
    signals.waits = True
    threading.Timer(0.1, kill, (signal.SIGTERM,)).start()
    signals.await_own(600.0)
    assert signals.noted == [15], "it has waited for the signal"
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("waits for a signal that has come"))
    signals.await_own(600.0)
    assert signals.noted == [15]


def test_signals_end_the_process_and_its_children_at_once_where_there_is_nothing_to_save(tmp_path: Path) -> None:
    def act(number: int) -> Callable[[], None]:
        def run() -> None:
            StopSignals(NAMES).listen(lambda told: (tmp_path / str(told)).touch())
            kill(number)

        return run

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        assert forked(act(number)) == -number
        assert (tmp_path / str(int(number))).exists()


def test_a_second_press_ends_the_process_at_once_and_the_same_press_twice_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter((10.0, 10.4, 11.5))

    def run() -> None:
        monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
        signals = StopSignals(NAMES)
        signals.listen()
        signals.waits = True
        kill(signal.SIGINT)
        kill(signal.SIGINT)  # torchrun's, which the terminal has sent to it, too
        if signals.noted == [2, 2]:
            kill(signal.SIGINT)

    assert forked(run) == -signal.SIGINT


def test_a_users_handlers_are_left_in_place_or_run_too() -> None:
    heard: list[int] = []
    for name in NAMES:
        signal.signal(getattr(signal, name), lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals(NAMES)
    signals.look()
    signal.signal(signal.SIGTERM, _HandlersCompose([signal.getsignal(signal.SIGTERM)]))  # as Lightning does
    signals.listen()
    signals.waits = True
    assert signal.getsignal(signal.SIGUSR1) is own
    for name in NAMES:
        kill(getattr(signal, name))
    assert heard == [15, 10, 2]
    assert signals.noted == [15]


def test_lightnings_handlers_are_replaced() -> None:
    signal.signal(signal.SIGUSR1, _HandlersCompose([lambda number, frame: pytest.fail("runs in the handler")]))
    signals = StopSignals(["SIGUSR1"])
    signals.listen()
    signals.waits = True
    kill(signal.SIGUSR1)
    assert signals.noted == [10]


def test_a_launcher_hands_sigterm_on_before_it_dies_of_it(tmp_path: Path) -> None:
    def run() -> None:
        with handed_on(lambda number: (tmp_path / "children").write_text(str(number))):
            kill(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with handed_on(lambda number: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert forked(run) == -signal.SIGTERM
    assert (tmp_path / "children").read_text() == "15"


def test_a_worker_outlives_what_goes_to_all_and_not_a_second_sigterm() -> None:
    def run(numbers: tuple[int, ...]) -> Callable[[], None]:
        def act() -> None:
            PatientWorker(None)(0)
            for number in numbers:
                kill(number)

        return act

    assert forked(run((signal.SIGINT, signal.SIGUSR1, signal.SIGTERM))) == 0
    assert forked(run((signal.SIGTERM, signal.SIGTERM))) == -signal.SIGTERM


def test_one_rank_agrees_with_itself_one_question_later() -> None:
    agreement = Agreement(None, torch.device("cpu"))
    assert [agreement.ask(number) for number in (0, 0, 15, 0, 0)] == [0, 0, 0, 15, 0]
    assert agreement.ask_now(0) == 0
    assert agreement.ask(10) == 0
    assert agreement.ask_now(0) == 10
    assert agreement.ask_now(2) == 2


def test_requeueing_says_what_slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert not requeue()
    assert "job 77 was not requeued" in caplog.text
    script = tmp_path / "scontrol"
    script.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\n[ "$2" = 77 ] || {{ echo no such job >&2; exit 1; }}\n'
    )
    script.chmod(0o755)
    assert requeue()
    assert (tmp_path / "words").read_text() == "requeue 77\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert not requeue()
    assert "job 7_3 was not requeued: no such job" in caplog.text
    (tmp_path / "last.ckpt").mkdir()
    for number in (1, 2):
        lead_requeued_job(tmp_path, str(tmp_path / "last.ckpt"))
        assert (tmp_path / f"hpc_ckpt_{number}.ckpt").resolve() == tmp_path / "last.ckpt"

"""The kill switches of a run: they have the signals while it lasts."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_megatron.lightning.callbacks.kill_switch import KillSwitch, attach, detach, kill_switches
from lightning_megatron.lightning.stopping.worker_signals import let_workers_outlive_signals


class RunSwitches:
    """Switches through which all ranks obey a signal together: those of the Trainer's callbacks, and one of our own.

    Args:
        save_on_signal: True if a run whose user has no ``KillSwitch`` gets one.
    """

    def __init__(self, save_on_signal: bool) -> None:
        self._save_on_signal = save_on_signal
        self._own: KillSwitch | None = None
        self._trainer: Trainer | None = None

    @property
    def _all(self) -> list[KillSwitch]:
        return [] if self._trainer is None else kill_switches(self._trainer)

    def open(self, trainer: Trainer | None) -> None:
        """Add a switch to the Trainer's callbacks."""
        self._trainer = trainer
        if trainer is not None and self._save_on_signal:
            self._own = KillSwitch(always_save=False)
            attach(self._own, trainer)

    def listen(self) -> None:
        """Set signal handlers, in the place of those that Lightning has just set."""
        if self._trainer is not None:
            for switch in self._all:
                switch.listen(self._trainer)

    def protect_workers(self, dataloader: object) -> None:
        """Let workers outlive signals that go to all processes of a job."""
        if self._all:
            let_workers_outlive_signals(dataloader)

    def close(self) -> None:
        """Give signals back to Lightning, which gives them back as well."""
        for switch in self._all:
            switch.give_back()
        if self._trainer is not None and self._own is not None:
            detach(self._own, self._trainer)
        self._own = self._trainer = None

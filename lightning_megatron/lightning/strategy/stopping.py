"""A strategy that brings a KillSwitch along, and lets those of its Trainer have the signals while a run lasts."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_megatron.lightning.callbacks.kill_switch import KillSwitch, attach, detach, kill_switches
from lightning_megatron.lightning.stopping.worker_signals import let_workers_outlive_signals
from lightning_megatron.lightning.strategy.checkpoints import CheckpointStrategy


class StoppableStrategy(CheckpointStrategy):
    """Signals that ask a run to end are obeyed by all ranks together."""

    _save_on_signal: bool = True
    _own_switch: KillSwitch | None = None
    _run_of: Trainer | None = None

    @property
    def _switches(self) -> list[KillSwitch]:
        return [] if self._run_of is None else kill_switches(self._run_of)

    def setup_environment(self) -> None:
        """Bring a switch along, where the user has none."""
        super().setup_environment()
        self._run_of = None if self.lightning_module is None else self.lightning_module.trainer
        if self._run_of is not None and self._save_on_signal:
            self._own_switch = KillSwitch(always_save=False)
            attach(self._own_switch, self._run_of)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; right after Lightning has set its signal handlers, set others in their place."""
        super().barrier(name)
        if name == "run-stage" and self._run_of is not None:
            for switch in self._switches:
                switch.listen(self._run_of)

    def process_dataloader(self, dataloader: object) -> object:
        """Let workers outlive signals that go to all processes of a job."""
        dataloader = super().process_dataloader(dataloader)
        if self._switches:
            let_workers_outlive_signals(dataloader)
        return dataloader

    def _end_run(self) -> None:
        """Give signals back to Lightning, which gives them back, too."""
        for switch in self._switches:
            switch.give_back()
        if self._run_of is not None and self._own_switch is not None:
            detach(self._own_switch, self._run_of)
        self._own_switch = self._run_of = None
        super()._end_run()

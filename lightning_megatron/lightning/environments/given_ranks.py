"""A cluster environment for ranks that need neither a launch nor a rendezvous."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment


class GivenRanks(ClusterEnvironment):
    """Base of environments whose ranks are known, by default without a rendezvous address.

    Subclasses implement ``world_size``, ``global_rank``, ``local_rank`` and ``node_rank``.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: the Trainer starts no process."""
        return True

    @property
    def main_address(self) -> str:
        """Placeholder, unless a subclass overrides it."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Placeholder, unless a subclass overrides it."""
        return 0

    @staticmethod
    def detect() -> bool:
        """False, since it is never chosen automatically."""
        return False

    def set_world_size(self, size: int) -> None:
        """Keep the known world size."""

    def set_global_rank(self, rank: int) -> None:
        """Keep the known rank."""

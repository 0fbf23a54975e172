"""A cluster environment for ranks that nobody has to start or to find."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment


class GivenRanks(ClusterEnvironment):
    """Base of environments whose ranks are known, and have no address at which they meet.

    Subclasses have ``world_size``, ``global_rank``, ``local_rank`` and ``node_rank``.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: the Trainer starts no process."""
        return True

    @property
    def main_address(self) -> str:
        """Unused."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Unused."""
        return 0

    @staticmethod
    def detect() -> bool:
        """False, since it is never chosen automatically."""
        return False

    def set_world_size(self, size: int) -> None:
        """Keep the known one."""

    def set_global_rank(self, rank: int) -> None:
        """Keep the known one."""

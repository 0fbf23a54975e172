"""Buffers of a user's modules: rank 0's count, as under ``DistributedDataParallel(broadcast_buffers=True)``."""

from __future__ import annotations

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.broadcast import broadcast_buffers

_OURS = __name__.partition(".")[0]


class BufferSync:
    """Broadcasts buffers when ``DistributedDataParallel`` does: statistics and counters stay equal on all ranks.

    That is at the start of a fit, before the first batch after an optimizer step, of training or validation, and, as in
    Lightning, at the start of a test or another evaluation outside of a fit. If every pipeline stage has a buffer, the
    last stage's value counts, because code behind the model's call runs on that stage alone.

    Metrics are left out, because their states differ until they are computed. So are modules of this package, which
    keep their buffers equal themselves. Without other buffers at the start of the fit, nothing is ever sent.

    Attributes:
        are_sent: False on one rank, and without such buffers.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self._mesh, self._is_due = mesh, False
        metrics: set[nn.Module] = {part for part in module.modules() if isinstance(part, Metric)}
        parts = module.named_modules(metrics) if mesh.is_distributed else ()
        self._parts = [(name, part) for name, part in parts if part is module or not _is_ours(part)]
        self.are_sent = bool(self._buffers())
        if not self.are_sent:
            self._parts.clear()
        self._shared: set[str] = set()  # names of the buffers that every stage has
        if mesh.pp.size > 1:
            self._shared = set.intersection(*map(set, all_gather_object(mesh, list(self._buffers()))))

    def begin(self, sends_gradients: bool) -> None:
        """Broadcast before a training batch or an evaluation, if it is due; every rank must call this.

        Args:
            sends_gradients: True if gradients are averaged in the coming batch, and not accumulated further.
        """
        if self._is_due:
            self.share(from_stage=self._mesh.pp.size - 1)
        self._is_due = sends_gradients

    def share(self, from_stage: int) -> None:
        """Give all ranks the values of the first rank, or those of a pipeline stage; every rank must call this."""
        mesh, buffers = self._mesh, self._buffers()
        # In this order, the values of one rank, the first of that stage, arrive on all.
        shared = [buffer for name, buffer in buffers.items() if name in self._shared]
        broadcast_buffers(shared, mesh.pp, from_stage)
        axes = (mesh.world,) if mesh.pp.size == 1 else (mesh.dp_cp, mesh.tp)
        for axis in (axis for axis in axes if axis.size > 1):
            broadcast_buffers(buffers.values(), axis, 0)

    def _buffers(self) -> dict[str, Tensor]:
        """Present buffers, which a step may have replaced, each under the first of its names."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, part in self._parts:
            for name, buffer in part.named_buffers(recurse=False):
                found.setdefault(id(buffer), (f"{prefix}.{name}", buffer))
        return dict(found.values())


def _is_ours(part: nn.Module) -> bool:
    return type(part).__module__.partition(".")[0] == _OURS

"""NaN and infinity in losses, gradients and parameters: noticed before the optimizer uses them, named on all ranks.

Everything is looked at where it lies, and one number says whether anybody has found something. A CPU's answer is read
at once, so that the step is not taken. That of a device is read in the next step, when it has long been there: no step
waits for it, and parameters may have been spoilt by then, which is why nothing of such a model is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.finite import first_bad_row, not_finite
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.bucket_plan import ALIGNMENT
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.zero import ShardedOptimizer

_SHOWN = 3


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a parameter is NaN or infinite; the text says which, on which rank."""


class _Look(NamedTuple):
    """One tensor that was looked at: what it is, and the names of what lies in its rows."""

    kind: str
    least: Tensor
    row: Tensor
    name_of: Callable[[int], str]


@dataclass(frozen=True, order=True)
class Finding:
    """The finding of one rank; the least of all is where it began.

    Attributes:
        cause: parameters come before losses, losses before gradients of a rank, those before gradients of the step and
            their norm.
        stage: along the pipeline, in the direction in which the bad value would travel.
        place: on the rank, in the same direction.
        rank: of the job.
        kind: ``"parameter"``, ``"loss"`` or ``"gradient"``.
        name: of the parameter.
    """

    cause: int
    stage: int
    place: int
    rank: int
    kind: str
    name: str

    def __str__(self) -> str:
        if not self.name:
            return "the norm of the gradient" if self.kind == "gradient" else f"the loss on rank {self.rank}"
        return f"{'the gradient of ' if self.kind == 'gradient' else 'parameter '}{self.name!r} on rank {self.rank}"


class FiniteCheck:
    """Looks at what a step of one optimizer is made of.

    Args:
        sharded: the optimizer.
        named_params: all parameters of this rank, trained or not, by name and in order of definition.
        mesh: this rank's.
    """

    def __init__(self, sharded: ShardedOptimizer, named_params: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
        self._sharded, self._params, self._mesh = sharded, named_params, mesh
        self._device = mesh.rng.device
        self._losses: list[Tensor] = []
        self._grads: dict[Bucket, _Look] = {}
        self._pending: tuple[int, list[_Look], Callable[[], list[int]]] | None = None
        sharded.on_local_grads(self._see_grads)

    def see_loss(self, loss: Tensor) -> None:
        """Look at the loss of a batch; where it was computed."""
        if loss.is_floating_point():
            self._losses.append(loss.detach())

    def _see_grads(self, bucket: Bucket) -> None:
        """Look at this rank's gradients while they are its own."""
        if bucket not in self._grads:
            self._grads[bucket] = _Look("own", *_looked_at(bucket.grads), _namer(bucket.slots, bucket.start))

    def forget(self) -> None:
        """Somebody else has decided about the step."""
        self._losses.clear()
        self._grads.clear()

    def __call__(self, step: int, norm: Tensor | None = None) -> None:
        """Look, between the last change of the gradients and the step. Every rank must call this.

        Args:
            step: for the text.
            norm: of the gradients as the step will use them, if it is known.

        Raises:
            NonFiniteError: on all ranks, if any of them has found something: in this step on a CPU, else in the last.
        """
        looks = []
        if self._losses:
            losses = torch.stack([loss.reshape(-1).sum().to(self._device) for loss in self._losses])
            looks.append(_Look("loss", *_looked_at(losses), lambda row: ""))
        looks += self._grads.values()
        if norm is not None:
            looks.append(_Look("norm", *_looked_at(norm), lambda row: ""))
        else:
            looks += self._sharded_looks("step")
        at_once = self._device.type == devices.CPU.type
        if not at_once:
            looks += self._sharded_looks("parameter")
        self.forget()
        fine = torch.stack([look.least for look in looks]) if looks else torch.ones(1, device=self._device)
        anybody = all_reduce_max((1 - fine.min()).float(), self._mesh.world).to(torch.int32)
        numbers = torch.stack([anybody, *(n.to(torch.int32) for look in looks for n in (look.least, look.row))])
        self.settle()
        self._pending = step, looks, devices.begin_read(numbers)
        if at_once:
            self.settle()

    def settle(self) -> None:
        """Hear of the last step what nobody has asked for yet. Every rank must call this.

        Raises:
            NonFiniteError: on all ranks.
        """
        if self._pending is None:
            return
        step, looks, read = self._pending
        self._pending = None
        anybody, *numbers = read()
        if not anybody:
            return
        # A device's trained parameters are among the looks: by now a bad step may have spoilt them.
        apart = {n: p for n, p in self._params.items() if self._device.type == devices.CPU.type or not p.requires_grad}
        own = self._findings(looks, numbers[::2], numbers[1::2]) + self._bad_params(apart)
        if all(finding.cause == _NORM for finding in own):
            own += self._bad_grads()
        self._raise_if_any(f"step {step}", own)

    def check_params(self) -> None:
        """Look at all parameters, and wait for it. Every rank must call this.

        Raises:
            NonFiniteError: on all ranks.
        """
        self._raise_if_any("before the first step", self._bad_params(self._params))

    def _raise_if_any(self, when: str, own: list[Finding]) -> None:
        by_rank: list[list[Finding]] = [own] * (self._mesh.world.size if self._mesh.is_distributed else 1)
        if self._mesh.is_distributed:
            dist.all_gather_object(by_rank, own, group=self._mesh.host_group)
        if found := [finding for findings in by_rank for finding in findings]:
            raise NonFiniteError(told(when, found))

    def _sharded_looks(self, kind: str) -> list[_Look]:
        looks = []
        for bucket, part, start in self._sharded.updated_tensors():
            x = part.grad if kind == "step" else part
            if x is not None:
                looks.append(_Look(kind, *_looked_at(x), _namer(bucket.slots, start)))
        return looks

    def _findings(self, looks: Sequence[_Look], fine: Sequence[int], rows: Sequence[int]) -> list[Finding]:
        stage, rank = self._mesh.pp.rank, self._mesh.rank
        found = []
        for place, (look, is_fine, row) in enumerate(zip(looks, fine, rows, strict=True)):
            if not is_fine:
                cause, kind = _CAUSES[look.kind]
                forwards = cause == 0
                found.append(Finding(cause, stage if forwards else -stage, place, rank, kind, look.name_of(row)))
        return found

    def _bad_grads(self) -> list[Finding]:
        """Gradients that somebody has spoilt since they were complete; all of them where clipping came after that."""
        looks = self._sharded_looks("step")
        return self._findings(looks, [int(look.least) for look in looks], [int(look.row) for look in looks])

    def _bad_params(self, candidates: Mapping[str, nn.Parameter]) -> list[Finding]:
        stage, rank = self._mesh.pp.rank, self._mesh.rank
        place = {name: number for number, name in enumerate(candidates)}
        bad = not_finite(candidates.items())
        # What is frozen may be a mask, whose infinities are meant.
        bad = [name for name in bad if candidates[name].requires_grad or candidates[name].isnan().any()]
        return [Finding(0, stage, place[name], rank, "parameter", name) for name in bad]


_NORM = 4
_CAUSES = {
    "parameter": (0, "parameter"),
    "loss": (1, "loss"),
    "own": (2, "gradient"),
    "step": (3, "gradient"),
    "norm": (_NORM, "gradient"),
}


def _looked_at(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as long as what parameters are aligned to, so that each lies in one of them."""
    return first_bad_row(x.reshape(-1), ALIGNMENT)


def _namer(slots: Sequence[Slot], start: int) -> Callable[[int], str]:
    """The name of the parameter in a row of a tensor that begins at an element of the slots' buffer."""

    def name_of(row: int) -> str:
        element = start + row * ALIGNMENT
        return next((slot.owned.name for slot in slots if slot.start <= element < slot.end), slots[-1].owned.name)

    return name_of


def told(when: str, findings: Sequence[Finding]) -> str:
    """The text of the error: where it began, and how far it has come."""
    first, *others = dict.fromkeys(map(str, sorted(findings)))
    text = f"{when}: {first} is NaN or infinite"
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        text += f"; then {', '.join(others[:_SHOWN])}{more}"
    return (
        f"{text}. The run ends before that is saved; the last checkpoint is whole."
        " MegatronStrategy(check_for_nan_in_loss_and_grad=False) goes on all the same"
    )

"""Check of losses, gradients and parameters for NaN and infinity, before the optimizer uses them.

Each rank checks its own tensors, and an all-reduce of one number tells all ranks if any of them has found something. On
a CPU the result is read at once, and a bad step is not taken. On an accelerator it is read in the next step, so that no
step waits for it. By then the parameters may be bad too, so such a model is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.device.finite import first_bad_row, is_finite, not_finite
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.bucket_plan import ALIGNMENT
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.recorder.file_format import Kind

_SHOWN = 3


class NonFiniteError(RuntimeError):
    """A loss, a gradient or a parameter is NaN or infinite; the text says which, on which rank."""


class _Result(NamedTuple):
    """Result of checking one tensor: its kind, finiteness, first bad row, and the parameter's name by row."""

    kind: str
    is_finite: Tensor
    row: Tensor
    name_of: Callable[[int], str]


@dataclass(frozen=True, order=True)
class BadTensor:
    """One bad tensor on one rank. Findings are ordered: the smallest one is the origin.

    Attributes:
        cause: order of the kind: 0 for parameters, then losses, local gradients, gradients of the step, and their norm.
        stage: pipeline stage, negated for gradients, which travel backwards.
        place: position of the tensor among those of the rank.
        rank: global rank.
        kind: ``"parameter"``, ``"loss"`` or ``"gradient"``.
        name: name of the parameter.
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
    """Checks the losses, gradients and parameters of each step of one optimizer.

    Args:
        sharded: the optimizer.
        named_params: all parameters of this rank, trained or not, by name and in order of definition.
    """

    def __init__(self, sharded: ShardedOptimizer, named_params: Mapping[str, nn.Parameter], mesh: ParallelMesh) -> None:
        self._sharded, self._params, self._mesh = sharded, named_params, mesh
        self._device = mesh.rng.device
        self._at_once = self._device.type == devices.CPU.type
        self._losses: list[Tensor] = []
        self._grads: dict[Bucket, list[_Result]] = {}
        self._pending: tuple[int, list[_Result], Callable[[], list[int]]] | None = None
        sharded.on_local_grads(self._add_grads)

    def add_loss(self, loss: Tensor) -> None:
        """Include the loss of a batch in the check; call it on the rank that computed the loss."""
        if loss.is_floating_point():
            self._losses.append(loss.detach())

    def _add_grads(self, bucket: Bucket) -> None:
        """Include this rank's gradients in the check, before they are summed over ranks."""
        if bucket not in self._grads:
            self._grads[bucket] = self._check("own", bucket.grads, _namer(bucket.slots, bucket.start))

    def forget(self) -> None:
        """Discard the collected losses and gradients, for a step that needs no check."""
        self._losses.clear()
        self._grads.clear()

    def __call__(self, step: Callable[[], int], norm: Tensor | None = None) -> None:
        """Run the check, between the last change of the gradients and the step. Every rank must call this.

        Args:
            step: function that returns the number of the step, for the error text.
            norm: norm of the gradients that the step will use, if it is known.

        Raises:
            NonFiniteError: on all ranks, if any has found something: in this step on a CPU, in the previous step on an
                accelerator.
        """
        results = []
        if self._losses:
            losses = [loss.sum().to(self._device) for loss in self._losses]
            results += self._check("loss", torch.stack(losses) if len(losses) > 1 else losses[0], lambda row: "")
        for own in self._grads.values():
            results += own
        if norm is not None:
            results += self._check("norm", norm, lambda row: "")
        else:
            results += self._optimizer_results("step")
        if not self._at_once:
            results += self._optimizer_results("parameter")
        self.forget()
        if self._at_once and not results and self._mesh.world.size == 1:
            return
        found = [torch.stack(each).to(torch.int32) for each in zip(*(result[1:3] for result in results), strict=True)]
        bad = 1 - found[0].min() if found else torch.zeros((), device=self._device)
        anybody = all_reduce_max(bad.float(), self._mesh.world).to(torch.int32)
        numbers = torch.cat([anybody.view(1), *found])
        self.finish()
        self._pending = step(), results, devices.begin_read(numbers)
        if self._at_once:
            self.finish()

    def _check(self, kind: str, x: Tensor, name_of: Callable[[int], str]) -> list[_Result]:
        """The result for a tensor, with rows of ``ALIGNMENT`` elements, so that each lies in one parameter.

        Where no device is waited for, a tensor without a fault has none.
        """
        if self._at_once and bool(is_finite(x)):
            return []
        return [_Result(kind, *first_bad_row(x.reshape(-1), ALIGNMENT), name_of)]

    def finish(self) -> None:
        """Wait for the result of the last check. Every rank must call this.

        Raises:
            NonFiniteError: on all ranks.
        """
        if self._pending is None:
            return
        step, results, read = self._pending
        self._pending = None
        with self._mesh.world.during(Kind.DEVICE):
            anybody, *numbers = read()
        if not anybody:
            return
        # On an accelerator the results include the trained parameters, which the step may have changed since.
        apart = {n: p for n, p in self._params.items() if self._at_once or not p.requires_grad}
        own = self._findings(results, numbers[: len(results)], numbers[len(results) :]) + self._bad_params(apart)
        if all(finding.cause == _NORM for finding in own):
            own += self._bad_grads()
        self._raise_if_any(f"step {step}", own)

    def check_params(self) -> None:
        """Check all parameters and wait for the result. Every rank must call this.

        Raises:
            NonFiniteError: on all ranks.
        """
        self._raise_if_any("before the first step", self._bad_params(self._params))

    def _raise_if_any(self, when: str, own: list[BadTensor]) -> None:
        if found := [finding for findings in all_gather_object(self._mesh, own) for finding in findings]:
            raise NonFiniteError(_error_text(when, found))

    def _optimizer_results(self, kind: str) -> list[_Result]:
        results = []
        for bucket, part, start in self._sharded.updated_tensors():
            x = part.grad if kind == "step" else part
            if x is not None:
                results += self._check(kind, x, _namer(bucket.slots, start))
        return results

    def _findings(self, results: Sequence[_Result], fine: Sequence[int], rows: Sequence[int]) -> list[BadTensor]:
        stage, rank = self._mesh.pp.rank, self._mesh.rank
        found = []
        for place, (result, is_fine, row) in enumerate(zip(results, fine, rows, strict=True)):
            if not is_fine:
                cause, kind = _CAUSES[result.kind]
                forwards = cause == 0
                found.append(BadTensor(cause, stage if forwards else -stage, place, rank, kind, result.name_of(row)))
        return found

    def _bad_grads(self) -> list[BadTensor]:
        """Bad gradients behind a bad norm, finite before their reduction (all of them if clipping spread the value)."""
        results = self._optimizer_results("step")
        return self._findings(
            results, [int(result.is_finite) for result in results], [int(result.row) for result in results]
        )

    def _bad_params(self, candidates: Mapping[str, nn.Parameter]) -> list[BadTensor]:
        stage, rank = self._mesh.pp.rank, self._mesh.rank
        place = {name: number for number, name in enumerate(candidates)}
        bad = not_finite(candidates.items())
        # A frozen parameter may be a mask with infinities on purpose.
        bad = [name for name in bad if candidates[name].requires_grad or candidates[name].isnan().any()]
        return [BadTensor(0, stage, place[name], rank, "parameter", name) for name in bad]


_NORM = 4
_CAUSES = {
    "parameter": (0, "parameter"),
    "loss": (1, "loss"),
    "own": (2, "gradient"),
    "step": (3, "gradient"),
    "norm": (_NORM, "gradient"),
}


def _namer(slots: Sequence[Slot], start: int) -> Callable[[int], str]:
    """Function that names the parameter in a row of a tensor that begins at element ``start`` of the buffer."""

    def name_of(row: int) -> str:
        element = start + row * ALIGNMENT
        return next((slot.owned.name for slot in slots if slot.start <= element < slot.end), slots[-1].owned.name)

    return name_of


def _error_text(when: str, findings: Sequence[BadTensor]) -> str:
    """Error text: the origin first, then the other findings."""
    first, *others = dict.fromkeys(map(str, sorted(findings)))
    text = f"{when}: {first} is NaN or infinite"
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        text += f"; then {', '.join(others[:_SHOWN])}{more}"
    return (
        f"{text}. The run ends before that is saved; the last checkpoint is intact."
        " To continue anyway, set MegatronStrategy(check_for_nan_in_loss_and_grad=False)"
    )

"""A pipeline without Lightning: stages of one matrix each, and the same model under plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers import ColumnParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.pipeline.action import Schedule
from lightning_megatron.pipeline.runtime import PipelineRuntime, evaluation_plan, training_plan
from lightning_megatron.pipeline.schedule import build_schedule

WIDTH = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One schedule."""

    name: str
    pp: int
    vpp: int
    micro_batches: int

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    @property
    def schedule(self) -> Schedule:
        return build_schedule(self.name, self.pp, self.vpp, self.micro_batches)


def layer(stage: int, mesh: ParallelMesh) -> ColumnParallelLinear:
    """The matrix of a stage: the same wherever it is built."""
    built = ColumnParallelLinear(WIDTH, WIDTH, mesh)
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        for param in built.parameters():
            param.normal_(generator=generator)
    return built


def rows(micro_batch: int) -> int:
    """They differ, so that the receiver must know which micro-batch is coming."""
    return 3 + micro_batch % 2


def inputs(micro_batch: int) -> Tensor:
    return torch.randn(rows(micro_batch), WIDTH, generator=torch.Generator().manual_seed(100 + micro_batch))


class Living:
    """Tracker of tensors that still have memory: torch does not count Python's references."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], StorageWeakRef] = {}
        self.most = 0

    def watch(self, stage: int, micro_batch: int, tensor: Tensor) -> None:
        self._storages[stage, micro_batch] = StorageWeakRef(tensor.untyped_storage())
        self.most = max(self.most, self.count())

    def count(self) -> int:
        return sum(not storage.expired() for storage in self._storages.values())


@dataclass
class ToyWork:
    """The stages of one rank, with a book of the activations that live."""

    case: Case
    layers: dict[int, nn.Module]
    losses: list[Tensor] = field(default_factory=list)
    entered: Living = field(default_factory=Living)
    left: Living = field(default_factory=Living)
    left_at_last_backwards: list[int] = field(default_factory=list)

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        x = inputs(microbatch) if hidden is None else hidden
        self.entered.watch(stage, microbatch, x)  # what the gradient of the weight needs
        out: Tensor = self.layers[stage](x)
        if stage == self.case.num_stages - 1:
            loss = out.square().mean() / self.case.micro_batches
            self.losses.append(loss.detach())
            return loss
        self.left.watch(stage, microbatch, out)  # nobody's but the next stage's
        return out

    def hidden_shape(self, microbatch: int) -> tuple[int, ...]:
        return rows(microbatch), WIDTH

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        self.left_at_last_backwards.append(self.left.count())
        yield


@dataclass(frozen=True)
class Outcome:
    """State of a rank after a step."""

    losses: list[Tensor]
    gradients: dict[int, list[Tensor]]
    most_entered: int
    entered_in_the_end: int
    left_at_last_backwards: list[int]


def gradients_of(layers: dict[int, nn.Module]) -> dict[int, list[Tensor]]:
    found = {}
    for stage, module in layers.items():
        assert all(p.grad is not None for p in module.parameters())
        found[stage] = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


def plain(case: Case) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """Losses and gradients by stage under plain autograd, one micro-batch after the other."""
    layers: dict[int, nn.Module] = {stage: layer(stage, ParallelMesh.single()) for stage in range(case.num_stages)}
    losses = []
    for i in range(case.micro_batches):
        x = inputs(i)
        for module in layers.values():
            x = module(x)
        loss = x.square().mean() / case.micro_batches
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients_of(layers)


def engine(case: Case) -> tuple[ParallelMesh, PipelineRuntime, ToyWork]:
    """This rank's mesh, engine and work."""
    if dist.is_initialized():
        mesh = ParallelMesh.create(ParallelLayout(pp=case.pp, vpp=case.vpp), CPU)
    else:
        mesh = ParallelMesh.single()
    mesh.weight_grads.enabled = case.name == "zero-bubble"
    layers: dict[int, nn.Module] = {n: layer(n, mesh) for n in range(mesh.pp.rank, case.num_stages, case.pp)}
    runtime = PipelineRuntime(mesh.pp, case.num_stages, CPU, torch.float32, mesh.weight_grads)
    return mesh, runtime, ToyWork(case, layers)


def train(cases: list[Case]) -> list[Outcome]:
    """One step of each, on a rank."""
    outcomes = []
    for case in cases:
        mesh, runtime, work = engine(case)
        runtime.run(
            training_plan(case.name, case.pp, case.vpp, case.micro_batches, mesh.pp.rank), work, work.last_backward
        )
        outcomes.append(
            Outcome(
                work.losses,
                gradients_of(work.layers),
                work.entered.most,
                work.entered.count(),
                work.left_at_last_backwards,
            )
        )
    return outcomes


def evaluate(case: Case) -> tuple[list[Tensor], int]:
    """Losses of a step of forwards, and how many activations lived at most."""
    mesh, runtime, work = engine(case)
    with torch.inference_mode():
        runtime.run(evaluation_plan(case.pp, case.vpp, case.micro_batches, mesh.pp.rank), work)
    return work.losses, work.entered.most

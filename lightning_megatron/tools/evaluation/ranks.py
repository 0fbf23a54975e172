"""A trained decoder spread over the ranks of a layout, and computations with it on all of them.

A Trainer starts the processes, builds the model and loads the weights, as for any prediction. The work is not a loop
over a loader, since the next computation may depend on the last result. So it runs in the module's first hook, and the
loader is empty.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.checkpoint import CheckpointError, open_checkpoint
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory, refuse_adapter
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.device import best_available
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.families import module_of
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.pretrained.adapter_base import ADAPTER_OF
from lightning_megatron.lightning.pretrained.hugging_face import hf_config
from lightning_megatron.lightning.run_state.hyper_parameters import config_of, module_arguments
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh

T = TypeVar("T")

Batch = Mapping[str, Tensor]
Step = Callable[[GPTModule, Batch], Tensor | dict[str, Tensor]]
"""One forward: a function of the module and a micro-batch, called on every stage; its results have a row a sample."""


@dataclass(frozen=True)
class Spread:
    """Devices and layout that a model is spread over.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        etp: ranks that share one expert; ``None`` for ``tp``.
        device: kind of device; ``None`` for the best there is.
        devices: devices of a machine; ``None`` for as many as one copy of the model takes.
        num_nodes: machines.
        precision: Lightning's name of the precision.
        batch_size: samples of one forward.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    device: str | None = None
    devices: int | None = None
    num_nodes: int = 1
    precision: str = "32-true"
    batch_size: int = 8

    def trainer(self) -> Trainer:
        """A Trainer that predicts, and writes nothing.

        Raises:
            ConfigError: for sizes that cannot work.
        """
        layout = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        strategy = MegatronStrategy(**layout, micro_batch_size=self.batch_size)  # type: ignore[arg-type]
        experts = self.ep * (self.etp or self.tp)
        return Trainer(
            accelerator=self.device or best_available().type,
            devices=self.devices or self.pp * math.lcm(self.tp * self.cp, experts),
            num_nodes=self.num_nodes,
            strategy=strategy,
            precision=self.precision,  # type: ignore[arg-type]  # words of a command line are checked there
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )


class Ranks:
    """The ranks that work together; every rank makes the same calls, and gets the same results."""

    def __init__(self, module: _Working[Any]) -> None:
        strategy = module.megatron_strategy
        assert strategy is not None
        self._module, self._strategy = module, strategy

    @property
    def config(self) -> TransformerConfig:
        """Configuration of the model."""
        return self._module.config

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh of this rank."""
        return self._strategy.mesh

    @property
    def rows(self) -> int:
        """Samples of one forward on each data-parallel replica, times the replicas."""
        return (self._strategy.micro_batch_size or 1) * self.mesh.layout.data_parallel_size

    def run(self, step: Step, batch: Batch) -> dict[str, Tensor]:
        """Run a step on all samples, divided over the replicas; every rank gets all results, on the host.

        The batch has tensors with one row per sample, on the host.

        Returns:
            The step's tensors, by name; ``result`` if it returns one alone.
        """
        dp, replicas = self.mesh.dp, self.mesh.layout.data_parallel_size
        count = len(next(iter(batch.values())))
        share = -(-count // replicas)
        # Replicas that share experts wait for each other: all get the same number of samples, the last one repeated.
        order = torch.arange(share * replicas).clamp_(max=count - 1)
        own = {name: x[order[share * dp.rank : share * (dp.rank + 1)]] for name, x in batch.items()}
        self._module.step = step
        found = self._strategy.predict_step({name: x.to(self._module.device) for name, x in own.items()}, 0)
        found = {"result": found} if isinstance(found, Tensor) else found
        found = {name: x.cpu() for name, x in found.items()}
        if replicas > 1:
            parts = dict(all_gather_object(self.mesh, (dp.rank, found)))
            found = {name: torch.cat([parts[replica][name] for replica in range(replicas)]) for name in found}
        return {name: x[:count] for name, x in found.items()}


Work = Callable[[Ranks], T]


class _Working(GPTModule, Generic[T]):
    """A module that does some work in place of prediction.

    Attributes:
        step: step of the forward that runs now.
        found: result of the work.
    """

    step: Step
    found: T

    def __init__(self, work: Work[T], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._work = work

    def on_predict_start(self) -> None:
        """Do the work; the model is built, loaded and in evaluation mode, and nothing records gradients."""
        self.found = self._work(Ranks(self))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """The step on one micro-batch."""
        return self.step(self, batch)


class _Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


def on_ranks(trainer: Trainer, checkpoint: PathLike, work: Work[T]) -> T | None:
    """Do some work with a checkpoint's model, on all ranks of a Trainer.

    Args:
        trainer: Trainer with a ``MegatronStrategy``.
        checkpoint: checkpoint directory of any layout, or a Hugging Face directory.
        work: function that every rank calls; an error that it raises on all ranks is raised.

    Returns:
        The result of the work; ``None`` in a process that another one has started.

    Raises:
        ConfigError: for a layout that the model cannot have, or a model that is no decoder.
        CheckpointError: if there is no such checkpoint, or it is damaged.
    """
    # Label smoothing belongs to training, and would change the measured loss.
    module: _Working[T] = _Working(work, **decoder_arguments(checkpoint), label_smoothing=0.0)
    loader = DataLoader(_Nothing(), trainer.strategy.micro_batch_size)  # type: ignore[attr-defined]
    trainer.predict(module, loader, return_predictions=False, ckpt_path=os.fspath(checkpoint))
    return module.found if trainer.is_global_zero else None


def decoder_arguments(checkpoint: PathLike) -> dict[str, Any]:
    """Arguments of a :class:`GPTModule` with the model of a checkpoint or of a Hugging Face directory.

    Raises:
        ConfigError: if its model is no decoder.
        CheckpointError: if there is none, it is damaged, does not hold them, holds adapters alone or has one beside it.
    """
    refuse_adapter(checkpoint)
    of_hf = is_hf_directory(checkpoint)
    given = {"config": hf_config(checkpoint)} if of_hf else module_arguments(checkpoint)
    if not of_hf and ADAPTER_OF in open_checkpoint(checkpoint, check="sizes").meta:
        do = "merge them first with `lightning-megatron convert merge`"
        raise CheckpointError(f"{checkpoint} holds adapters alone: {do}")
    config = config_of(given)
    kind = GPTModule if config is None else module_of(config)
    if not issubclass(kind, GPTModule):
        raise ConfigError([Problem("--checkpoint", kind.__name__, "its model is no decoder", ("GPTModule",))])
    return given


def check_decoder(checkpoint: PathLike) -> TransformerConfig | None:
    """The configuration of a decoder's checkpoint, before any process is started; see :func:`decoder_arguments`."""
    return config_of(decoder_arguments(checkpoint))

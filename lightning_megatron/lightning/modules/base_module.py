"""Base class of LightningModules built of parallel layers: access to the mesh, and loading of weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import IO, Any, TypeVar

from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.checkpoint import open_checkpoint
from lightning_megatron.config.layout import ModelShape
from lightning_megatron.lightning import checkpointing, pretrained
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_specs

MegatronModuleT = TypeVar("MegatronModuleT", bound="MegatronModule")


class MegatronModule(LightningModule):
    """LightningModule built of parallel layers.

    Build the model in ``configure_model`` (unless it is built already: Lightning may call it more than once), with
    layers that take :attr:`mesh`. Nothing else differs from an ordinary LightningModule; a module need not even derive
    from this class to use the layers. For pipeline stages it also needs a method ``hidden_shape(batch)``: the shape of
    the activations between stages for a micro-batch. :class:`GPTModule` is an example.

    When ``configure_model`` of a subclass returns, the weights given to :meth:`load_weights` are loaded.

    Attributes:
        splits_context: True if each context-parallel rank takes its shard of the sequences that all of them are given;
            a module that does not is refused with ``cp > 1``.
        sums_over_tokens: True if a loss that ``training_step`` returns together with ``"num_tokens"`` is a sum over
            that many tokens, and not a mean.
    """

    splits_context = False
    sums_over_tokens = True

    _weights: pretrained.PendingWeights | None = None
    _is_built = False
    _outermost: Callable[[Any], None] = LightningModule.configure_model
    _megatron_placement: Placement | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.configure_model is not cls._outermost:  # overridden by the class, or by a base that is no module of ours
            cls._outermost = cls.configure_model = _then_weights(cls.configure_model)  # type: ignore[method-assign,assignment]

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh of the strategy; outside a Trainer with this strategy, a mesh of one rank."""
        strategy = self.megatron_strategy
        return ParallelMesh.single() if strategy is None else strategy.mesh

    @property
    def megatron_strategy(self) -> MegatronStrategy | None:
        """Strategy of the module's Trainer, if it is this package's; otherwise ``None``."""
        if self._fabric is not None or self._trainer is None:
            return None
        strategy = self.trainer.strategy
        return strategy if isinstance(strategy, MegatronStrategy) else None

    @property
    def model_shape(self) -> ModelShape | None:
        """Sizes that layouts are checked against; ``None`` leaves the checks to the layers."""
        return None

    @classmethod
    def load_from_checkpoint(
        cls: type[MegatronModuleT],
        checkpoint_path: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> MegatronModuleT:
        """Module of the class, with hyper-parameters and weights of a checkpoint of any layout.

        If the model is built in ``configure_model``, its weights are loaded then: in the layout of the Trainer that
        gets the module, or, without one, in this process at the first call. Checkpoints of weights alone suffice, for
        example to start a run with the weights of another one.

        Args:
            checkpoint_path: checkpoint directory, or a single file of Lightning's.
            map_location: device for the module; ``None`` for the CPU. A Trainer moves it to its own.
            hparams_file: file of hyper-parameters that replace those of the checkpoint.
            strict: True if a missing or unexpected name is an error; ``None`` for the module's ``strict_loading``.
            weights_only: Lightning's argument, for checkpoints in an open file.
            **kwargs: arguments of the class, which override those of the checkpoint; also ``base``, the path of the
                weights under the adapters of a checkpoint of adapters alone, if they have moved.

        Returns:
            The loaded module.

        Raises:
            CheckpointError: if there is no such checkpoint, or it is damaged.
            ConfigError: for a ``map_location`` that is no device.
        """
        if not isinstance(checkpoint_path, str | os.PathLike):
            options = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, **options, **kwargs
            )
        device = checkpointing.target_device(map_location)
        opened = open_checkpoint(checkpoint_path, check="sizes")
        meta = opened.meta
        base = pretrained.path_of_base(checkpoint_path, meta, kwargs.pop("base", None))
        pretrained.refuse_unfilled_checkpoint(opened)
        module = checkpointing.build_module(cls, meta, checkpoint_path, kwargs, hparams_file)
        pretrained.resume_adapter(checkpoint_path, meta, module, trains=False)
        strict = module.strict_loading if strict is None else strict
        module._load(pretrained.PendingWeights.of(checkpoint_path, strict, meta, base))
        return module.to(device)

    @classmethod
    def from_hf(
        cls: type[MegatronModuleT], path: str | os.PathLike[str], *, weights: bool = True, **arguments: Any
    ) -> MegatronModuleT:
        """A module for a Hugging Face directory, of the class that its ``model_type`` asks for, with its weights.

        Args:
            path: directory of a known family.
            weights: True to load the weights too.
            **arguments: arguments of the class that is chosen.

        Raises:
            CheckpointError: if there is no such directory, or its files are at fault.
            ConfigError: for a model that this package cannot reproduce, or that is none of this class.
        """
        return pretrained.hf_module_class(path, cls).from_hf(path, weights=weights, **arguments)

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load the weights of a checkpoint, in any layout, and nothing else of it.

        If the model is not built yet, the weights are loaded when it is: a call before ``trainer.fit`` loads into the
        layout of the Trainer. If there are several ranks and the model is built, all of them must call this.

        Args:
            path: checkpoint directory, a single file of Lightning's, or a directory of Hugging Face's or Megatron's.
            strict: True if a missing or unexpected name is an error.

        Raises:
            CheckpointError: if there is no such checkpoint, it is damaged, or does not fit.
        """
        self._load(pretrained.PendingWeights.of(path, strict))

    def _load(self, weights: pretrained.PendingWeights) -> None:
        self._weights = weights
        if self._is_built or type(self).configure_model is LightningModule.configure_model:
            self._take_weights()

    def _take_weights(self) -> None:
        weights, self._weights = self._weights, None
        if weights is None:
            return
        strategy = self.megatron_strategy
        mesh = self.mesh if self._megatron_placement is None else self._megatron_placement.mesh
        weights.fill(self, mesh, "hashes" if strategy is None else strategy.load_check)
        if strategy is not None:
            strategy.refresh_main_params()

    def _building(self) -> AbstractContextManager[None]:
        """Context of the outermost ``configure_model``."""
        return nullcontext()

    def decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters in two groups: matrices, which decay, and norms and biases, which do not.

        A pipeline stage of which all parameters are frozen has empty groups, since torch makes no optimizer of none.
        """
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for _, param, spec in named_specs(self):
            if param.requires_grad:
                groups[spec.decay].append(param)
        return [
            {"params": params, "weight_decay": weight_decay if decay else 0.0}
            for decay, params in groups.items()
            if params or (self.mesh.pp.size > 1 and not any(groups.values()))
        ]


def _then_weights(configure_model: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrapper of ``configure_model`` that loads the weights after the outermost override."""

    @wraps(configure_model)
    def build(self: MegatronModule) -> None:
        if type(self).configure_model is not build:
            configure_model(self)
            return
        with self._building():
            configure_model(self)
        self._is_built = True
        self._take_weights()

    return build

"""Loading of other programs' weights into a live model of any layout, to start a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from lightning_megatron.adapters.attach import adapter_of
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.checkpoint.formats.megatron import is_megatron_directory, open_megatron
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import raise_if_any
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.pretrained.adapter_base import base_is_loaded
from lightning_megatron.lightning.pretrained.hugging_face import hf_problems, hf_tensors
from lightning_megatron.lightning.pretrained.megatron import megatron_tensors
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.params import copy_box, named_weights

_Shapes = Mapping[str, tuple[int, ...]]


def is_foreign(path: PathLike) -> bool:
    """True if a path holds weights in a format of another program that can be read."""
    return any(is_of_format(path) for is_of_format, _ in _FORMATS)


def load_foreign_weights(module: nn.Module, path: PathLike, mesh: ParallelMesh) -> None:
    """Fill the model inside a module; all ranks call this, and each reads its own part of the tensors.

    A part of one tensor is in memory at a time beside the model, which must be the only one of this package in the
    module.

    Raises:
        CheckpointError: on every rank, if anything is wrong on any.
    """

    def open_tensors() -> tuple[StagedModel, Mapping[str, LazyTensor]]:
        models = [part for part in module.modules() if isinstance(part, StagedModel)]
        if len(models) != 1:
            raise CheckpointError(f"{type(module).__name__} holds {len(models)} of our models, not one")
        open_format = next((opens for is_of_format, opens in _FORMATS if is_of_format(path)), _open_hf)
        shapes = {name: spec.global_shape for name, _, spec in named_weights(models[0]) if adapter_of(name) is None}
        return models[0], open_format(path, models[0].config, shapes)

    def fill() -> None:
        for name, weight, spec in named_weights(model):
            if adapter_of(name) is None:
                box = spec.local_box(tuple(weight.shape), mesh.shard_ranks)
                copy_box(weight, tensors[name].part(box))

    doing = f"loading {path}"
    model, tensors = on_all_ranks(mesh, doing, open_tensors)
    on_all_ranks(mesh, doing, fill)
    base_is_loaded(module, path, mesh)


def _open_hf(path: PathLike, config: TransformerConfig, shapes: _Shapes) -> Mapping[str, LazyTensor]:
    raise_if_any(hf_problems(path, config))
    return hf_tensors(path, config, shapes)


def _open_megatron(path: PathLike, config: TransformerConfig, shapes: _Shapes) -> Mapping[str, LazyTensor]:
    return megatron_tensors(open_megatron(path), config, shapes)  # pickles are not read


_FORMATS: tuple[
    tuple[Callable[[PathLike], bool], Callable[[PathLike, TransformerConfig, _Shapes], Mapping[str, LazyTensor]]],
    ...,
] = (
    (is_hf_directory, _open_hf),
    (is_megatron_directory, _open_megatron),
)
"""For each format, a test for it, and a function that returns whole tensors by our names."""

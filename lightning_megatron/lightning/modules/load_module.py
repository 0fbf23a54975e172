"""Trained modules and checkpoints without a Trainer: to generate, evaluate, convert or inspect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar, overload

from lightning.pytorch import LightningModule

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.meta import NOTE, refuse_other_writers
from lightning_megatron.checkpoint.loading import open_checkpoint
from lightning_megatron.checkpoint.tensors.keys import model_name
from lightning_megatron.lightning.modules.base_module import MegatronModule
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.run_state.hyper_parameters import build_module, module_arguments, target_device
from lightning_megatron.lightning.run_state.weight_versions import with_repeats

__all__ = ["load_module", "module_arguments", "read_checkpoint"]

ModuleT = TypeVar("ModuleT", bound=LightningModule)


@overload
def load_module(path: str | os.PathLike[str], *, map_location: Any = ..., strict: bool | None = ...) -> GPTModule: ...
@overload
def load_module(
    path: str | os.PathLike[str],
    module_class: type[ModuleT],
    *,
    map_location: Any = ...,
    strict: bool | None = ...,
    **arguments: Any,
) -> ModuleT: ...
def load_module(
    path: str | os.PathLike[str],
    module_class: type[Any] = GPTModule,
    *,
    map_location: Any = None,
    strict: bool | None = None,
    **arguments: Any,
) -> Any:
    """Build a module from the hyper-parameters of a checkpoint and fill it, in this one process.

    Works for any LightningModule, as Lightning's ``load_from_checkpoint`` does for a single file. The layout that the
    checkpoint was saved under does not matter. The module is in fp32 and in evaluation mode. A :class:`GPTModule` can
    be given to a Trainer of any layout.

    Args:
        path: checkpoint directory, or a single file of Lightning's.
        module_class: the module's class; :class:`GPTModule` holds LLaMA too.
        map_location: device for the module; ``None`` for the CPU.
        strict: True if names that only one side has are errors; ``None`` for the module's ``strict_loading``.
        **arguments: arguments of the class, which override those of the checkpoint.

    Returns:
        The module.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or it does not fit the class.
        ConfigError: for a ``map_location`` that is no device.
    """
    device = target_device(map_location)
    if issubclass(module_class, MegatronModule) or Path(path).is_file():
        module = module_class.load_from_checkpoint(path, device, strict=strict, **arguments)
        if isinstance(module, MegatronModule):
            module.configure_model()
        return module.to(device).eval()
    checkpoint = read_checkpoint(path)
    module = build_module(module_class, checkpoint, path, arguments)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    tensors = with_repeats(checkpoint["state_dict"], module)
    try:
        module.load_state_dict(tensors, strict=module.strict_loading if strict is None else strict)
    except RuntimeError as error:
        raise CheckpointError(f"loading {path}: {error}") from None
    return module.to(device).eval()


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint into memory as ``torch.load`` reads a single file of Lightning's, in this one process.

    Tensors are whole and on the CPU, whatever the layout was. Optimizer state is left out: the checkpoint has it under
    the names of parameters, see ``docs/checkpoints.md``.

    Args:
        path: the checkpoint directory.

    Returns:
        Lightning's dictionary: ``state_dict``, ``hyper_parameters``, ``callbacks``, ``loops`` and so on.

    Raises:
        CheckpointError: if there is no such checkpoint, or it is damaged.
    """
    opened = open_checkpoint(path)
    tensors = opened.tensors()
    refuse_other_writers(path, opened.meta)
    names = {key: model_name(key) for key in tensors}
    weights = {name: tensors[key].materialize() for key, name in names.items() if name is not None}
    # A tied weight has all its names, as in a module's state_dict.
    repeats = opened.meta.get(NOTE, {}).get("repeats", {})
    weights |= {name: weights[first] for name, first in repeats.items() if first in weights}
    return {**opened.meta, "state_dict": weights}

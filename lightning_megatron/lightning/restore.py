"""A trained module without a Trainer: to generate, to evaluate, to convert."""

from __future__ import annotations

import os
from typing import Any, TypeVar, overload

from lightning_megatron.checkpoint import CheckpointError, load, local_tensors, model_state
from lightning_megatron.lightning.hugging_face import take_settings
from lightning_megatron.lightning.module import GPTModule, MegatronModule
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import spec_registry

ModuleT = TypeVar("ModuleT", bound=MegatronModule)


def module_arguments(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the module of a checkpoint was built with.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or it does not say.
    """
    arguments = load(path, {}, ParallelMesh.single()).meta.get("hyper_parameters")
    if arguments is None:
        raise CheckpointError(f"{path} holds no hyper-parameters: its module did not call save_hyperparameters")
    # LightningCLI notes for itself which class it built; the class is the caller's choice here, not the file's.
    return {name: value for name, value in arguments.items() if name not in ("_class_path", "_instantiator")}


@overload
def load_module(path: str | os.PathLike[str]) -> GPTModule: ...
@overload
def load_module(path: str | os.PathLike[str], module_class: type[ModuleT]) -> ModuleT: ...
def load_module(path: str | os.PathLike[str], module_class: type[Any] = GPTModule) -> Any:
    """Build a module from the hyper-parameters of a checkpoint and fill it, in this one process.

    The layout that the checkpoint was saved under does not matter. The module is on the CPU, in fp32, in evaluation
    mode; ``.to(...)`` moves it.

    Args:
        path: the checkpoint directory.
        module_class: the module's class; :class:`GPTModule` holds LLaMA too.

    Returns:
        The module.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or it does not fit the class.
    """
    module = module_class(**module_arguments(path))
    module.configure_model()
    mesh = ParallelMesh.single()
    loaded = load(path, model_state(local_tensors(module), spec_registry(module), mesh), mesh)
    take_settings(module, loaded.meta)
    return module.eval()

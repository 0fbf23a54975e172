"""Names of a module's tensors in a single-file checkpoint, and the keys of the state that hold their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.checkpoint import CheckpointError, SavedName, State
from lightning_megatron.checkpoint.formats.lightning_file import MODEL_STATE
from lightning_megatron.checkpoint.tensors.keys import MAIN, MODEL, Key, state_key, version_key
from lightning_megatron.lightning.run_state.weight_versions import is_edited
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec, spec_registry


def trained_version(versions: Mapping[str, Mapping[str, Any]], module: LightningModule) -> str:
    """Key of the version of a model that is trained: not ``MODEL_STATE`` if a callback replaced ``state_dict``."""
    return next((key for key, version in versions.items() if not is_edited(version, module)), MODEL_STATE)


def take_names(
    versions: Mapping[str, Mapping[str, Any]],
    trained: str,
    edited: Collection[str],
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    state: State,
) -> dict[str, list[SavedName]]:
    """Names of each version of a model; the trained one is saved from main values but for what was edited in it."""
    mains = {name: state_key(index, name, MAIN) for index, each in enumerate(optimizers) for name in each.trained_names}
    specs, live = spec_registry(module), module.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(live.items())}

    def saved(version: str, name: str, value: Any) -> SavedName:
        of_first = first.get(id(live.get(name)), name)
        spec = specs.get(of_first) or ParamSpec(tuple(value.shape) if isinstance(value, Tensor) else ())
        key = version_key(MODEL if version == MODEL_STATE else version, spec.tied_with or of_first)
        return SavedName(name, key, spec.padded_shape)

    found: dict[str, list[SavedName]] = {}
    for version, tensors in versions.items():
        names = [saved(version, name, value) for name, value in tensors.items()]
        there = [each for each in names if each.key in state]  # frozen weights beside adapters stay in their files
        if version == trained:
            keys = {each.key: Key.parse(each.key).name for each in there}
            own = {key: mains[name] for key, name in keys.items() if name in mains and name not in edited}
            there = [each._replace(key=own.get(each.key, each.key)) for each in there]
        found[version] = there
    _drop_unnamed(state, found)
    return found


def _drop_unnamed(state: State, named: Mapping[str, Sequence[SavedName]]) -> None:
    families = [MODEL if version == MODEL_STATE else version for version in named]
    needed = {each.key for names in named.values() for each in names}
    for key in [key for key in state if Key.parse(key).family in families and key not in needed]:
        del state[key]


def refuse_unknown_order(optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh) -> None:
    """Raise where no rank knows the order in which optimizers number their parameters.

    Raises:
        CheckpointError: saying how to list them.
    """
    if mesh.pp.size > 1 and not all(optimizer.is_in_order for optimizer in optimizers):
        raise CheckpointError(
            "a single file numbers the optimizers' parameters, and this run's groups list them in another order than"
            " the module's, of which each pipeline stage knows only a part: list them in the order of the module, or"
            " leave out save_distributed_checkpoint=False"
        )

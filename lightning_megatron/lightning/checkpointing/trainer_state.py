"""Lightning's checkpoint dictionary to and from sharded checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import (
    Check,
    CheckpointError,
    Fragment,
    PendingFile,
    PendingSave,
    Progress,
    SaveGuard,
    State,
    local_tensors,
    model_state,
    open_checkpoint,
    optimizer_state,
    refuse_nonfinite,
    regrouped,
    shared_state,
)
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS, read_settings
from lightning_megatron.checkpoint.formats.lightning_file import MODEL_STATE
from lightning_megatron.checkpoint.formats.meta import NOTE, refuse_other_writers
from lightning_megatron.checkpoint.tensors.keys import (
    Key,
    groups_key,
    whole_state_key,
)
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.checkpointing.names_in_file import refuse_unknown_order, take_names, trained_version
from lightning_megatron.lightning.pretrained.adapter_base import base_entry, kept_names, refuse_other_base, wanted
from lightning_megatron.lightning.pretrained.config_check import check_checkpoint
from lightning_megatron.lightning.pretrained.foreign_weights import is_foreign
from lightning_megatron.lightning.pretrained.hugging_face import kept_settings
from lightning_megatron.lightning.pretrained.imported_run import IMPORTED_FROM, fresh_run
from lightning_megatron.lightning.pretrained.load_weights import load_weights, trained_names
from lightning_megatron.lightning.run_state.random_state import random_state
from lightning_megatron.lightning.run_state.weight_versions import (
    copies,
    fill_untrained,
    is_edited,
    take_versions,
    version_state,
    with_repeats,
    without_repeats,
)
from lightning_megatron.lightning.step.finetuning import rejoin, rejoin_groups
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import spec_registry


def save_trainer_checkpoint(
    path: str,
    checkpoint: dict[str, Any],
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    *,
    sharded: bool,
    one_file: bool,
    guard: SaveGuard | None,
    finite: bool,
    progress: Progress | None,
    write: Callable[[PendingSave, ParallelMesh], Callable[[], None]],
) -> None:
    """Write Lightning's checkpoint, every rank its part; all ranks call this.

    Args:
        path: the directory to make.
        checkpoint: Lightning's dictionary. Its ``state_dict`` is saved as the model, also if a callback has replaced
            it; optimizer state is read from the optimizers.
        module: the user's module.
        optimizers: the distributed optimizers.
        mesh: mesh of this rank.
        sharded: True if data-parallel ranks hold different shards of optimizer state.
        one_file: True to write the file of Lightning's one-device strategies in place of a directory.
        guard: checks of the checkpoint before it gets its name.
        finite: True to refuse parameters and optimizer state that are NaN or infinite.
        progress: progress of the run, by which the newest checkpoint of a folder is found; rank 0's counts.
        write: function that writes the checkpoint, or copies it and writes the copy while training goes on. It returns
            a function that waits until optimizer state is copied, too.
    """
    rest = dict(checkpoint)
    tensors = rest.pop("state_dict")
    versions = take_versions(rest, module)
    rest |= kept_settings(module)
    rest[NOTE] = {"versions": list(versions), "edited": is_edited(tensors, module)}
    rest |= base_entry(module)
    state = model_state(kept_names(module, without_repeats(tensors, module)), spec_registry(module), mesh)
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh)
    has_optimizers, action = "optimizer_states" in rest, f"saving {path}"
    of_optimizers, late = _optimizer_states(module, optimizers if has_optimizers or one_file else (), mesh, sharded)
    if has_optimizers:
        rest["optimizer_states"] = []
    state |= {key: value for key, value in of_optimizers.items() if has_optimizers or Key.parse(key).is_main}
    if finite:
        early = {key: value for key, value in state.items() if key not in late}
        on_all_ranks(mesh, action, lambda: refuse_nonfinite(early, trained_names(module)))
    how: dict[str, Any] = {"per_rank": random_state(mesh.rng), "guard": guard, "progress": progress}
    if one_file:
        on_all_ranks(mesh, action, lambda: refuse_unknown_order(optimizers, mesh))
        versions = {MODEL_STATE: tensors, **versions}
        rest[NOTE]["main"] = trained = trained_version(versions, module)
        names = take_names(versions, trained, module, optimizers, state)
        pending: PendingSave = replace(PendingFile.of(path, state, rest, mesh, **how), names=names)
    else:
        pending = PendingSave.of(path, state, rest, mesh, **how)
    finish_copy = write(replace(pending, late=frozenset(late), finite=finite), mesh)
    for optimizer in optimizers:
        optimizer.lend(finish_copy)
        optimizer.drop_initial_state()


def _optimizer_states(
    module: LightningModule, optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh, sharded: bool
) -> tuple[State, set[str]]:
    """State of all optimizers, and the keys of what only steps and loads write."""
    state: State = {}
    late: set[str] = set()
    for index, optimizer in enumerate(optimizers):
        # Before the first step there is no state yet; an empty one keeps the set of keys the same at all times.
        optimizer.init_state()
        part = optimizer_part(index, optimizer, mesh, sharded)
        late |= _apart(part, module) if optimizer.is_flat else set()
        state |= part
    return state, late


def _apart(state: State, module: LightningModule) -> set[str]:
    """Keys of optimizer state in host memory that no tensor of the module shares: only steps and loads write it."""
    tensors = (*module.parameters(), *module.buffers())
    shared = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_cpu}
    fragments = ((key, value) for key, value in state.items() if isinstance(value, Fragment))
    return {
        key
        for key, value in fragments
        if all(c.data.is_cpu and c.data.untyped_storage().data_ptr() not in shared for c in value.chunks)
    }


def load_trainer_checkpoint(
    path: PathLike,
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    *,
    sharded: bool,
    weights_only: bool | None,
    check: Check,
    finite: bool,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fill the model and the optimizers in place from a checkpoint of any layout; all ranks call this.

    A single file of Lightning's one-device strategies can be loaded too. Checkpoints of other programs, and those
    converted from them, hold weights alone: the run begins with these.

    Args:
        path: the directory, or the file; opened or not.
        module: the user's module.
        optimizers: the distributed optimizers; none outside ``fit``.
        mesh: mesh of this rank.
        sharded: True if data-parallel ranks hold different shards of optimizer state.
        weights_only: the argument of ``torch.load``; ``None`` means yes.
        check: extent of the comparison of files with the manifest.
        finite: True to refuse parameters and optimizer state that are NaN or infinite.

    Returns:
        Lightning's dictionary, and the random state to continue with (``None`` where the layout is another one).
    """
    for optimizer in optimizers:
        optimizer.finish_param_gather()
    if is_foreign(path):
        return _begin_with_weights(path, module, optimizers, mesh), None
    opened = open_checkpoint(path, mesh, weights_only=weights_only is not False, check=check)
    meta = opened.meta
    refuse_other_writers(path, meta)
    refuse_other_base(path, meta, module)
    check_checkpoint(path, meta, getattr(module, "model_shape", None))
    if IMPORTED_FROM in meta:
        return _begin_with_weights(opened, module, optimizers, mesh), None
    if optimizers and "optimizer_states" not in meta:
        raise CheckpointError(_weights_alone(str(path), module))
    rejoin_groups(meta, module, optimizers)
    is_in_order = all(optimizer.is_in_order for optimizer in optimizers)
    groups: State = {}
    for index, optimizer in enumerate(optimizers):
        groups |= optimizer_state(index, (), mesh, _groups(optimizer))
    opened.fill(groups, strict=False, is_in_order=is_in_order)
    for index, optimizer in enumerate(optimizers):
        rejoin(groups[groups_key(index)], module, optimizer)
        take_group_settings(optimizer, groups[groups_key(index)])
    target = _target(meta, module, optimizers, mesh, sharded)
    loaded = opened.fill(target.state, strict=module.strict_loading, is_in_order=is_in_order)
    if finite:
        on_all_ranks(mesh, f"loading {path}", lambda: refuse_nonfinite(target.state, trained_names(module)))
    for name in (*loaded.missing, *loaded.unexpected):
        rank_zero_warn(f"{path}: {name} was {'not found' if name in loaded.missing else 'not asked for'}")
    if loaded.per_rank is None:
        rank_zero_info(f"{path} was saved under another layout: random generators start anew from the seed")
    for index, optimizer in enumerate(optimizers):
        continue_optimizer(index, optimizer, target.state)
        if not meta.get("global_step"):
            optimizer.drop_initial_state()
    return _lightning_dictionary(loaded.meta, target, module, optimizers), loaded.per_rank


def _begin_with_weights(
    path: PathLike, module: LightningModule, optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh
) -> dict[str, Any]:
    """Load the weights of another program's checkpoint, or of one converted from it; a new run begins with them."""
    loaded = load_weights(module, path, mesh, strict=module.strict_loading, check="sizes")
    for optimizer in optimizers:
        optimizer.refresh_main()
    meta = fresh_run() | {SETTINGS: read_settings(path)} if loaded is None else loaded.meta
    return {**meta, "state_dict": module.state_dict()}


@dataclass(frozen=True)
class _Target:
    """Memory that the tensors of a run's checkpoint are loaded into.

    Attributes:
        state: fragments of the model, of its versions and of the optimizers.
        edited: memory for a ``state_dict`` that a callback had replaced; ``None`` to load into the module itself.
        versions: memory for other versions of the weights, by key.
    """

    state: State
    edited: dict[str, Any] | None
    versions: dict[str, dict[str, Any]]


def _target(
    meta: Mapping[str, Any],
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    sharded: bool,
) -> _Target:
    note = meta.get(NOTE, {})
    # Main values may be the parameters themselves, so that an edited state_dict must not be loaded in their place.
    edited = copies(module) if optimizers and note.get("edited") else None
    tensors = wanted(module, local_tensors(module) if edited is None else edited, meta)
    state = model_state(tensors, spec_registry(module), mesh)
    versions = {key: copies(module) for key in note.get("versions", ())}
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh)
    for index, optimizer in enumerate(optimizers):
        optimizer.init_state(split=True)
        state |= optimizer_part(index, optimizer, mesh, sharded)
    return _Target(state, edited, versions)


def _lightning_dictionary(
    meta: Mapping[str, Any], target: _Target, module: LightningModule, optimizers: Sequence[ShardedOptimizer]
) -> dict[str, Any]:
    """The dictionary that Lightning's hooks get after a load, with the weights that were saved."""
    if target.edited is not None:
        fill_untrained(module, target.edited, {name for o in optimizers for name in o.trained_names})
    checkpoint = {key: value for key, value in meta.items() if key != NOTE}
    for key, version in target.versions.items():
        checkpoint[key] = with_repeats(version, module)
    edited = target.edited
    checkpoint["state_dict"] = module.state_dict() if edited is None else with_repeats(edited, module)
    return checkpoint


def _weights_alone(path: str, module: LightningModule) -> str:
    name = type(module).__name__
    is_ours = hasattr(module, "load_weights")
    call = f"{name}.load_from_checkpoint({path!r})" if is_ours else f"load_module({path!r}, {name})"
    return (
        f"{path} holds weights alone (save_weights_only: the checkpoint contains only the model), and no run can go on"
        f" from them. To begin a run with the weights, give fit the module {call}, and no ckpt_path"
    )


def optimizer_part(index: int, optimizer: ShardedOptimizer, mesh: ParallelMesh, sharded: bool) -> State:
    """This rank's part of one optimizer, by checkpoint key; all ranks call this."""
    state = optimizer_state(index, optimizer.param_shards(), mesh, _groups(optimizer), sharded=sharded)
    return state | {whole_state_key(index, name): kept for name, kept in optimizer.whole_state().items()}


def _groups(optimizer: ShardedOptimizer) -> list[Mapping[str, Any]]:
    parts = zip(optimizer.group_settings(), optimizer.group_names(), strict=True)
    return [{**settings, "params": names} for settings, names in parts]


def take_group_settings(optimizer: ShardedOptimizer, saved: Sequence[Mapping[str, Any]] | None) -> None:
    """Load the scalars of groups (the next step's learning rate), on which it depends what state there is."""
    scalars, notes = regrouped(saved or (), optimizer.group_names())
    optimizer.load_group_settings(scalars)
    for note in notes:
        rank_zero_warn(note)


def continue_optimizer(index: int, optimizer: ShardedOptimizer, state: State) -> None:
    """Load shared state, and refresh the parameters."""
    optimizer.load_whole_state({name: state[whole_state_key(index, name)] for name in optimizer.whole_state()})
    known = shared_state(state, index)
    for shard in optimizer.param_shards():
        numbers = {name: value for name, value in shard.shared.items() if isinstance(value, int | float)}
        if numbers:
            own = known.get(shard.spec.tied_with or shard.name, {})
            optimizer.load_shard_state(shard, shared={name: own[name] for name in numbers if name in own})
    optimizer.refresh_params()

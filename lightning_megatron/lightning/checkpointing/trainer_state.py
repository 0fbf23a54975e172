"""Lightning's checkpoint dictionary to and from sharded checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_megatron.checkpoint import (
    Check,
    CheckpointError,
    Fragment,
    Loaded,
    OpenCheckpoint,
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
from lightning_megatron.checkpoint.tensors.keys import Key, groups_key, model_key, optimizer_family, whole_state_key
from lightning_megatron.comm.all_ranks import on_all_ranks
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.checkpointing.hook_entries import of_all_stages
from lightning_megatron.lightning.checkpointing.names_in_file import refuse_unknown_order, take_names, trained_version
from lightning_megatron.lightning.compat._private import trainer_of
from lightning_megatron.lightning.pretrained.adapter_base import (
    adapter_entries,
    kept_names,
    refuse_other_base,
    resume_adapter,
    wanted,
)
from lightning_megatron.lightning.pretrained.config_check import check_checkpoint
from lightning_megatron.lightning.pretrained.foreign_weights import is_foreign
from lightning_megatron.lightning.pretrained.hugging_face import kept_settings
from lightning_megatron.lightning.pretrained.imported_run import IMPORTED_FROM, fresh_run
from lightning_megatron.lightning.pretrained.load_weights import load_weights, trained_names
from lightning_megatron.lightning.run_state.random_state import random_state
from lightning_megatron.lightning.run_state.scheduler_groups import SchedulerStates
from lightning_megatron.lightning.run_state.weight_versions import (
    copies,
    edited_names,
    is_edited,
    repeats,
    take_versions,
    version_state,
    with_repeats,
    without_repeats,
)
from lightning_megatron.lightning.step.finetuning import rejoin, rejoin_frozen, rejoin_groups, take_own_groups
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
        optimizers: the distributed optimizers.
        sharded: True if data-parallel ranks hold different shards of optimizer state.
        one_file: True to write the file of Lightning's one-device strategies in place of a directory.
        guard: checks of the checkpoint before it gets its name.
        finite: True to refuse parameters and optimizer state that are NaN or infinite.
        progress: progress of the run, by which the newest checkpoint of a folder is found; rank 0's counts.
        write: function that writes the checkpoint, or copies it and writes the copy while training goes on. It returns
            a function that waits until optimizer state is copied, too.
    """
    rest, action = dict(checkpoint), f"saving {path}"
    tensors = rest.pop("state_dict")
    versions = take_versions(rest, module, mesh)
    rest = of_all_stages(rest, mesh, action)
    rest |= kept_settings(module)
    every = {MODEL_STATE: tensors, **versions}
    trained = trained_version(every, module)
    edited = set().union(*all_gather_object(mesh, edited_names(every[trained], module)))
    rest[NOTE] = {"versions": list(versions), "edited": is_edited(tensors, module), "repeats": repeats(module)}
    rest |= adapter_entries(module)
    kept = kept_names(module, without_repeats(tensors, module))
    state = model_state(kept, spec_registry(module), mesh, saving=True)
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh, saving=True)
    has_optimizers = "optimizer_states" in rest
    schedulers = SchedulerStates(_configs(module), list(rest.get("lr_schedulers", ())))
    saved_ones = optimizers if has_optimizers or one_file else ()
    of_optimizers, late = _optimizer_states(module, saved_ones, mesh, sharded, schedulers)
    if has_optimizers:
        rest["lr_schedulers"] = schedulers.states
        rest["optimizer_states"] = []
    of_optimizers = _without_main(of_optimizers, edited)
    state |= {key: value for key, value in of_optimizers.items() if has_optimizers or Key.parse(key).is_main}
    if finite:
        early = {key: value for key, value in state.items() if key not in late}
        on_all_ranks(mesh, action, lambda: refuse_nonfinite(early, trained_names(module)))
    how: dict[str, Any] = {"per_rank": random_state(mesh.rng), "guard": guard, "progress": progress}
    if one_file:
        on_all_ranks(mesh, action, lambda: refuse_unknown_order(optimizers if has_optimizers else (), mesh))
        rest[NOTE]["main"] = trained
        names = take_names(every, trained, edited, module, optimizers, state)
        pending: PendingSave = replace(PendingFile.of(path, state, rest, mesh, **how), names=names)
    else:
        rest[NOTE]["without_main"] = sorted(edited)
        pending = PendingSave.of(path, state, rest, mesh, **how)
    finish_copy = write(replace(pending, late=frozenset(late & state.keys()), finite=finite), mesh)
    for optimizer in optimizers:
        optimizer.lend(finish_copy)
        optimizer.drop_initial_state()


def _configs(module: LightningModule) -> Sequence[LRSchedulerConfig]:
    trainer = trainer_of(module)
    return () if trainer is None else trainer.lr_scheduler_configs


def _optimizer_states(
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    mesh: ParallelMesh,
    sharded: bool,
    schedulers: SchedulerStates,
) -> tuple[State, set[str]]:
    """State of all optimizers, and the keys of the part that only optimizer steps and loads write.

    The states of the schedulers get the groups of all stages.
    """
    complete_state(optimizers, mesh)
    state: State = {}
    late: set[str] = set()
    for index, optimizer in enumerate(optimizers):
        part = optimizer_part(index, optimizer, mesh, sharded, schedulers)
        key, own = groups_key(index), optimizer.optimizer
        part[key] = schedulers.take(own, part[key], len(own.param_groups))
        late |= _apart(part, module) if optimizer.is_flat else set()
        state |= part
    return state, late


def _without_main(state: State, edited: Collection[str]) -> State:
    """Leave out main values of weights that a callback has edited, from which training goes on."""
    keys = {text: Key.parse(text) for text in state}
    return {text: state[text] for text, key in keys.items() if not key.is_main or key.name not in edited}


def complete_state(optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh) -> None:
    """Allocate state if a part of a parameter has some and another rank's part, without gradients so far, has none."""
    names = [optimizer.names_by_state() for optimizer in optimizers]
    begun, others = (set[str]().union(*(pair[which] for pair in names)) for which in (0, 1))
    if not all(map(any, zip(*all_gather_object(mesh, (bool(begun), bool(others))), strict=True))):
        return
    others = others.union(*all_gather_object(mesh, sorted(others)))
    if any(all_gather_object(mesh, bool(begun & others))):
        for optimizer in optimizers:
            optimizer.init_state()


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


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint whose weights are in the module; its optimizer state is loaded once the optimizers exist.

    Attributes:
        checkpoint: Lightning's dictionary.
        opened: the checkpoint; ``None`` for a new run that starts with its weights.
        randomness: the random state to continue with; ``None`` if the checkpoint has another layout.
    """

    checkpoint: dict[str, Any]
    opened: OpenCheckpoint | None = None
    randomness: dict[str, Any] | None = None


def load_model(
    path: PathLike,
    module: LightningModule,
    mesh: ParallelMesh,
    *,
    fits: bool,
    weights_only: bool | None,
    check: Check,
    finite: bool,
) -> LoadedModel:
    """Fill the model in place from a checkpoint of any layout; all ranks call this.

    A single file of Lightning's one-device strategies can be loaded too. Checkpoints of other programs, and those
    converted from them, hold weights alone: a new run starts with these.

    Args:
        path: the directory, or the file; opened or not.
        fits: True for a fit, which needs the state of optimizers, too.
        weights_only: the argument of ``torch.load``; ``None`` means True.
        check: extent of the comparison of files with the manifest.
        finite: True to refuse parameters that are NaN or infinite.
    """
    if is_foreign(path):
        return _begin_with_weights(path, module, mesh)
    opened = open_checkpoint(path, mesh, weights_only=weights_only is not False, check=check)
    meta = opened.meta
    refuse_other_writers(path, meta)
    refuse_other_base(path, meta, module)
    check_checkpoint(path, meta, module)
    resume_adapter(path, meta, module, trains=fits)
    if IMPORTED_FROM in meta:
        return _begin_with_weights(opened, module, mesh)
    if fits and "optimizer_states" not in meta:
        raise CheckpointError(_weights_alone(str(path), module))
    if fits:
        take_own_groups(opened, module)
    note = meta.get(NOTE, {})
    state = model_state(wanted(module, local_tensors(module), meta), spec_registry(module), mesh)
    versions = {key: copies(module) for key in note.get("versions", ())}
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh)
    loaded = _fill(opened, state, module, finite=finite)
    _load_extra_state(state, module)
    if loaded.per_rank is None:
        rank_zero_info(f"{path} was saved under another layout: random generators restart from the seed")
    checkpoint = {key: value for key, value in meta.items() if key != NOTE}
    checkpoint |= {key: with_repeats(version, module) for key, version in versions.items()}
    checkpoint["state_dict"] = module.state_dict()
    if fits and note.get("edited"):
        # A callback that replaced the model's weights when saving swaps them back when loading: fp32 averages, too.
        shown = copies(module, at_least=torch.float32)
        opened.fill(model_state(wanted(module, shown, meta), spec_registry(module), mesh), strict=False)
        checkpoint["state_dict"] = with_repeats(shown, module)
    return LoadedModel(checkpoint, opened, loaded.per_rank)


def load_optimizers(
    opened: OpenCheckpoint,
    module: LightningModule,
    optimizers: Sequence[ShardedOptimizer],
    *,
    sharded: bool,
    finite: bool,
    lr_schedulers: Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Fill the optimizers, and the parameters from main values; all ranks call this.

    :func:`load_model` has opened the checkpoint. :func:`save_trainer_checkpoint` explains ``sharded`` and ``finite``.

    Args:
        lr_schedulers: states of schedulers in the checkpoint.

    Returns:
        These states for the groups of today.
    """
    mesh, meta, configs = opened.mesh, opened.meta, _configs(module)
    rejoin_groups(meta, module, optimizers)
    is_in_order = all(optimizer.is_in_order for optimizer in optimizers)
    today, schedulers = SchedulerStates.of_today(configs), SchedulerStates(configs, list(lr_schedulers))
    state: State = {}
    for index, optimizer in enumerate(optimizers):
        state |= optimizer_state(index, (), mesh, _groups(optimizer, today))
    opened.fill(state, strict=False, is_in_order=is_in_order)
    alike = {optimizer_family(i) for i, optimizer in enumerate(optimizers) if optimizer.is_like(state[groups_key(i)])}
    for index, optimizer in enumerate(optimizers):
        rejoin(state[groups_key(index)], module, optimizer)
        trained = partial(opened.names_with_state, index, state[groups_key(index)], is_in_order)
        rejoin_frozen(trained, module, optimizer)
        begin_optimizer(optimizer, state[groups_key(index)])
        schedulers.regroup(optimizer.optimizer, state[groups_key(index)] or (), optimizer.group_names())
        state |= optimizer_part(index, optimizer, mesh, sharded, today)
    if edited := meta.get(NOTE, {}).get("without_main"):
        for optimizer in optimizers:
            optimizer.refresh_main()
        state = _without_main(state, edited)
    loaded = _fill(opened, state, module, finite=finite, is_in_order=is_in_order, alike=alike)
    for index, optimizer in enumerate(optimizers):
        continue_optimizer(index, optimizer, state, loaded.not_begun)
    return schedulers.states


def _fill(opened: OpenCheckpoint, state: State, module: LightningModule, *, finite: bool, **how: Any) -> Loaded:
    loaded = opened.fill(state, strict=module.strict_loading, **how)
    if finite:
        names = trained_names(module)
        on_all_ranks(opened.mesh, f"loading {opened}", lambda: refuse_nonfinite(state, names))
    for name in (*loaded.missing, *loaded.unexpected):
        rank_zero_warn(f"{opened}: {name} was {'not found' if name in loaded.missing else 'not asked for'}")
    return loaded


def _load_extra_state(state: State, module: LightningModule) -> None:
    """Give parts of the module what their ``get_extra_state`` returned; tensors are filled in place."""
    keys = {name: model_key(name) for name, value in module.state_dict().items() if not torch.is_tensor(value)}
    if values := {name: state[key] for name, key in keys.items() if key in state}:
        module.load_state_dict(values, strict=False)


def _begin_with_weights(path: PathLike, module: LightningModule, mesh: ParallelMesh) -> LoadedModel:
    """Load the weights of another program's checkpoint, or of one converted from it, for a new run."""
    loaded = load_weights(module, path, mesh, strict=module.strict_loading, check="sizes")
    meta = fresh_run() | {SETTINGS: read_settings(path)} if loaded is None else loaded.meta
    return LoadedModel({"optimizer_states": [], **meta, "state_dict": module.state_dict()})


def _weights_alone(path: str, module: LightningModule) -> str:
    name = type(module).__name__
    is_ours = hasattr(module, "load_weights")
    call = f"{name}.load_from_checkpoint({path!r})" if is_ours else f"load_module({path!r}, {name})"
    return (
        f"{path} holds weights alone (save_weights_only: the checkpoint contains only the model), and no run can go on"
        f" from them. To begin a run with the weights, give fit the module {call}, and no ckpt_path"
    )


def optimizer_part(
    index: int,
    optimizer: ShardedOptimizer,
    mesh: ParallelMesh,
    sharded: bool,
    schedulers: SchedulerStates | None = None,
) -> State:
    """This rank's part of one optimizer, by checkpoint key; all ranks call this."""
    groups = _groups(optimizer, schedulers or SchedulerStates())
    state = optimizer_state(index, optimizer.param_shards(), mesh, groups, sharded=sharded)
    return state | {whole_state_key(index, name): kept for name, kept in optimizer.whole_state().items()}


def _groups(optimizer: ShardedOptimizer, schedulers: SchedulerStates) -> list[dict[str, Any]]:
    parts = zip(optimizer.group_settings(), optimizer.group_names(), strict=True)
    return schedulers.joined(optimizer.optimizer, [{**settings, "params": names} for settings, names in parts])


def begin_optimizer(optimizer: ShardedOptimizer, saved: Sequence[Mapping[str, Any]] | None) -> None:
    """Load the settings of groups (the next step's learning rate and so on), and allocate the state that they need."""
    scalars, notes = regrouped(saved or (), optimizer.group_names())
    optimizer.load_group_settings(scalars)
    for note in notes:
        rank_zero_warn(note)
    optimizer.init_state(split=True)


def continue_optimizer(index: int, optimizer: ShardedOptimizer, state: State, not_begun: Collection[str] = ()) -> None:
    """Load shared state, drop that of the keys that had not begun, and refresh the parameters."""
    optimizer.drop_state({key.name for key in map(Key.parse, not_begun) if key.family == optimizer_family(index)})
    optimizer.load_whole_state({name: state[whole_state_key(index, name)] for name in optimizer.whole_state()})
    known = shared_state(state, index)
    for shard in optimizer.param_shards():
        numbers = {name: value for name, value in shard.shared.items() if isinstance(value, int | float)}
        if numbers:
            own = known.get(shard.spec.tied_with or shard.name, {})
            optimizer.load_shard_state(shard, shared={name: own[name] for name in numbers if name in own})
    optimizer.refresh_params()

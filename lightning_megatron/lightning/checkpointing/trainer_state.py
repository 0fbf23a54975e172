"""Between Lightning's checkpoint dictionary and sharded files: what goes where, and in which order it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import (
    BackgroundWriter,
    Check,
    CheckpointError,
    Draft,
    Progress,
    SaveGuard,
    State,
    complete,
    load,
    local_tensors,
    model_state,
    optimizer_state,
    refuse_nonfinite,
    regrouped,
    shared_state,
)
from lightning_megatron.checkpoint.all_ranks import on_all_ranks
from lightning_megatron.checkpoint.formats.hf.settings import SETTINGS, read_settings
from lightning_megatron.checkpoint.meta import refuse_other_writers
from lightning_megatron.lightning.checkpointing.random_state import random_state, restore_random_state
from lightning_megatron.lightning.checkpointing.weight_versions import (
    NOTE,
    copies,
    fill_untrained,
    is_edited,
    take_versions,
    version_state,
    with_repeats,
    without_repeats,
)
from lightning_megatron.lightning.pretrained.hugging_face import kept_settings
from lightning_megatron.lightning.pretrained.load import fresh_run, is_foreign
from lightning_megatron.lightning.pretrained.saved_shape import compare
from lightning_megatron.lightning.pretrained.weights import IMPORTED_FROM, load_weights, trained_names
from lightning_megatron.lightning.step.finetuning import rejoin_groups
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
    guard: SaveGuard | None,
    finite: bool,
    writer: BackgroundWriter | None,
    progress: Progress | None,
) -> None:
    """Write what Lightning put together, every rank its part; all ranks call this.

    Args:
        path: the directory to make.
        checkpoint: Lightning's dictionary. Its ``state_dict`` is what is saved of the model, also where a callback has
            replaced it; optimizer state comes from where it lies.
        module: the user's.
        optimizers: the distributed optimizers.
        mesh: this rank's.
        sharded: whether data-parallel ranks hold different shares of optimizer state.
        guard: what looks at the checkpoint before it gets its name.
        finite: refuse parameters and optimizer state that are NaN or infinite.
        writer: who writes it, from a copy, while training goes on; ``None`` to write it now.
        progress: of the run, by which the newest checkpoint of a folder is found; rank 0's counts.
    """
    rest = dict(checkpoint)
    tensors = rest.pop("state_dict")
    versions = take_versions(rest, module)
    rest |= kept_settings(module)
    rest[NOTE] = {"versions": list(versions), "edited": is_edited(tensors, module)}
    state = model_state(without_repeats(tensors, module), spec_registry(module), mesh)
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh)
    if "optimizer_states" in rest:
        rest["optimizer_states"] = []
        for index, optimizer in enumerate(optimizers):
            # Before the first step there is no state yet; an empty one keeps the set of keys the same at all times.
            optimizer.init_state()
            state |= optimizer_part(index, optimizer, mesh, sharded)
    if finite:
        on_all_ranks(mesh, f"saving {path}", lambda: refuse_nonfinite(state, trained_names(module)))
    draft = Draft.of(path, state, rest, mesh, per_rank=random_state(mesh.rng), guard=guard, progress=progress)
    if writer is None:
        complete(draft, mesh)
    else:
        writer.begin(draft)
    for optimizer in optimizers:
        optimizer.forget_untrue_state()


def load_trainer_checkpoint(
    path: str,
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

    A single file of Lightning's one-device strategies does as well. What another program wrote, and a checkpoint
    converted from that, give weights alone: the run begins with them.

    Args:
        path: the directory, or the file.
        module: the user's.
        optimizers: the distributed optimizers; none outside ``fit``.
        mesh: this rank's.
        sharded: whether data-parallel ranks hold different shares of optimizer state.
        weights_only: as in ``torch.load``; ``None`` means yes.
        check: the extent to which files are held against what was written.
        finite: refuse parameters and optimizer state that are NaN or infinite.

    Returns:
        Lightning's dictionary, and the random state to continue with (``None`` where the layout is another one).
    """
    for optimizer in optimizers:
        optimizer.finish_param_gather()
    if is_foreign(path):
        load_weights(module, path, mesh)
        for optimizer in optimizers:
            optimizer.refresh_main()
        return fresh_run() | {SETTINGS: read_settings(path), "state_dict": module.state_dict()}, None
    weights_only = weights_only is None or weights_only
    known = load(path, {}, mesh, weights_only=weights_only, check=check).meta
    refuse_other_writers(path, known)
    compare(path, known, getattr(module, "model_shape", None))
    if IMPORTED_FROM in known:
        return _load_imported(path, module, optimizers, mesh), None
    if optimizers and "optimizer_states" not in known:
        raise CheckpointError(_weights_alone(path, module))
    rejoin_groups(known, module, optimizers)
    note = known.get(NOTE, {})
    # Main values may be the parameters themselves, so a model that is not theirs must not be loaded in its place.
    beside = copies(module) if optimizers and note.get("edited") else None
    state = model_state(local_tensors(module) if beside is None else beside, spec_registry(module), mesh)
    versions = {key: copies(module) for key in note.get("versions", ())}
    for key, version in versions.items():
        state |= version_state(key, version, module, mesh)
    for index, optimizer in enumerate(optimizers):
        optimizer.init_state(apart=True)
        state |= optimizer_part(index, optimizer, mesh, sharded)
    loaded = load(path, state, mesh, strict=module.strict_loading, weights_only=weights_only, check="sizes")
    if finite:
        on_all_ranks(mesh, f"loading {path}", lambda: refuse_nonfinite(state, trained_names(module)))
    for name in (*loaded.missing, *loaded.unexpected):
        rank_zero_warn(f"{path}: {name} was {'not found' if name in loaded.missing else 'not asked for'}")
    for index, optimizer in enumerate(optimizers):
        continue_optimizer(index, optimizer, state)
        if not known.get("global_step"):
            optimizer.forget_untrue_state()
    if loaded.per_rank is None:
        rank_zero_info(f"{path} was saved under another layout: random generators start anew from the seed")
    if beside is not None:
        fill_untrained(module, beside, {name for o in optimizers for names in o.group_names() for name in names})
    checkpoint = {key: value for key, value in loaded.meta.items() if key != NOTE}
    for key, version in versions.items():
        checkpoint[key] = with_repeats(version, module)
    checkpoint["state_dict"] = module.state_dict() if beside is None else with_repeats(beside, module)
    return checkpoint, loaded.per_rank


def _weights_alone(path: str, module: LightningModule) -> str:
    name = type(module).__name__
    is_ours = hasattr(module, "load_weights")
    call = f"{name}.load_from_checkpoint({path!r})" if is_ours else f"load_module({path!r}, {name})"
    return (
        f"{path} holds weights alone (save_weights_only), and no run can go on from them. To begin a run with the"
        f" weights, give fit the module {call}, and no ckpt_path"
    )


def _load_imported(
    path: str, module: LightningModule, optimizers: Sequence[ShardedOptimizer], mesh: ParallelMesh
) -> dict[str, Any]:
    """Parameters alone: the checkpoint knows nothing of optimizers, nor of what modules keep beside parameters."""
    loaded = load_weights(module, path, mesh, strict=module.strict_loading, check="sizes")
    assert loaded is not None
    for optimizer in optimizers:
        optimizer.refresh_main()
    return {**loaded.meta, "state_dict": module.state_dict()}


def continue_randomness(state: dict[str, Any], mesh: ParallelMesh) -> None:
    """Set every generator of this process to a saved state."""
    restore_random_state(state, mesh.rng)


def optimizer_part(index: int, optimizer: ShardedOptimizer, mesh: ParallelMesh, sharded: bool) -> State:
    """What a rank holds of one optimizer, as a checkpoint has it; all ranks call this."""
    groups: list[Mapping[str, Any]] = [
        {**settings, "params": names}
        for settings, names in zip(optimizer.group_settings(), optimizer.group_names(), strict=True)
    ]
    state = optimizer_state(index, optimizer.pieces(), mesh, groups, sharded=sharded)
    return state | {_whole_key(index, name): kept for name, kept in optimizer.whole_state().items()}


def _whole_key(index: int, name: str) -> str:
    return f"optimizer_{index}.state.{name}.whole"


def continue_optimizer(index: int, optimizer: ShardedOptimizer, state: State) -> None:
    """Scalars of groups (the learning rate the next step is to use), shared state, and parameters from main values."""
    saved = state[f"optimizer_{index}.param_groups"]
    scalars, notes = regrouped(saved, optimizer.group_names())
    optimizer.load_group_settings(scalars)
    optimizer.load_whole_state({name: state[_whole_key(index, name)] for name in optimizer.whole_state()})
    for note in notes:
        rank_zero_warn(note)
    for piece, *_, shared in optimizer.pieces():
        numbers = {name: value for name, value in shared.items() if isinstance(value, int | float)}
        if numbers:
            known = shared_state(state, index, piece.name)
            optimizer.load_piece_state(piece, scalars={name: known[name] for name in numbers if name in known})
    optimizer.refresh_params()

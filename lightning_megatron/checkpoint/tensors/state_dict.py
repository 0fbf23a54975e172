"""The state of a job as a flat dictionary of fragments under global names.

Its keys are those of :mod:`~lightning_megatron.checkpoint.tensors.keys`. No tensor is copied or sent: a fragment
is a set of views. If several ranks hold the same elements, each rank computes which of them saves these elements, from
names and sizes that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint.tensors.fragment import Fragment
from lightning_megatron.checkpoint.tensors.keys import MAIN, Key, groups_key, model_key, optimizer_family, state_key
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec

State = dict[str, Any]
"""Fragments, and under a few keys other values, by checkpoint key."""


def local_tensors(model: nn.Module) -> dict[str, Any]:
    """The entries of ``model.state_dict()``, each tied tensor once, under the first of its names."""
    live = model.state_dict(keep_vars=True)
    return {name: live[name] for name, first in first_names(live).items() if first == name}


def first_names(live: dict[str, Any]) -> dict[str, str]:
    """The names in a ``state_dict``, each with the first name of the same tensor; equal numbers are not tied."""
    first = {id(value): name for name, value in reversed(list(live.items())) if torch.is_tensor(value)}
    return {name: first.get(id(value), name) for name, value in live.items()}


def model_state(
    tensors: Mapping[str, Any], specs: Mapping[str, ParamSpec], mesh: ParallelMesh, *, saving: bool = False
) -> State:
    """The model's part of a checkpoint.

    What has no spec, buffers and values that are no tensors, may differ between ranks. The first rank of a stage saves
    it, and of several stages that have it the last one, because code behind the model's call runs there alone.

    Args:
        tensors: local parameters and buffers by global name (:func:`local_tensors`, or a callback's version of it);
            other values are saved once and replaced in the dictionary on load.
        specs: specs by the same names; a tensor without one is replicated on all ranks.
        saving: True to leave out, without their names, copies that another rank saves and that may differ. Then every
            rank must call this.

    Raises:
        ValueError: if a tensor cannot be a local shard by its spec.
    """
    known = {name: specs.get(name) or ParamSpec(tuple(t.shape)) for name, t in tensors.items() if torch.is_tensor(t)}
    shards = {name: spec for name, spec in known.items() if name in specs}
    writes = _writers({name: tensors[name].nbytes for name in shards}, shards, mesh, dp_replicates=True)
    is_first = mesh.tp.rank == mesh.dp_cp.rank == 0
    elsewhere = _saved_elsewhere([name for name in tensors if name not in specs], mesh, is_first) if saving else set()
    others = tensors.keys() - known.keys() - elsewhere
    state: State = {model_key(name): value for name, value in tensors.items() if name in others}
    for name, spec in known.items():
        fragment = _fragment(name, tensors[name], spec, mesh, writes=writes.get(name, is_first))
        _add(state, model_key(spec.tied_with or name), replace(fragment, chunks=()) if name in elsewhere else fragment)
    return state


def _fragment(name: str, value: Tensor, spec: ParamSpec, mesh: ParallelMesh, *, writes: bool) -> Fragment:
    try:
        return Fragment.of_local(value, spec, mesh.shard_ranks, writes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _saved_elsewhere(names: Sequence[str], mesh: ParallelMesh, is_first: bool) -> set[str]:
    """Those of the names without a spec that this rank leaves to the first rank of its stage, or of a later one."""
    stages = all_gather_object(mesh, (mesh.pp.rank, list(names))) if mesh.pp.size > 1 else []
    later = {name for stage, held in stages if stage > mesh.pp.rank for name in held}
    return later.intersection(names) if is_first else set(names)


def optimizer_state(
    index: int,
    shards: Iterable[ParamShard],
    mesh: ParallelMesh,
    param_groups: Sequence[Mapping[str, Any]],
    *,
    sharded: bool = True,
) -> State:
    """One optimizer's part of a checkpoint. Every rank must call this, because stages merge their groups.

    State that elements share (``step``) becomes one scalar per parameter. A 0-dim tensor is loaded in place; a number
    can be read after loading with :func:`shared_state`.

    Args:
        index: number of the optimizer in the module.
        shards: this rank's shards, parameter by parameter.
        param_groups: scalars of each group, and under ``"params"`` the global names of all its parameters on this
            stage (not only of those in this rank's shard).
        sharded: True if each rank of ``mesh.dp_cp`` holds a shard, False if each holds everything.
    """
    shards = list(shards)
    names = {shard.name: shard.spec for shard in shards}
    sizes = dict.fromkeys(names, 0)
    for shard in shards:
        sizes[shard.name] += shard.main.nbytes
    writes = _writers(sizes, names, mesh, dp_replicates=not sharded)
    state: State = {}
    for shard in shards:
        spec, write = shard.spec, writes[shard.name]
        saved_name = spec.tied_with or shard.name
        assert MAIN not in shard.state, f"{MAIN!r} is the name of the main values"
        origin = False
        for name, flat in {MAIN: shard.main, **shard.state}.items():
            key = state_key(index, saved_name, name)
            if flat.numel() != shard.end - shard.start:
                raise ValueError(f"{key} has {flat.numel()} elements for a range of {shard.end - shard.start}")
            fragment = Fragment.of_flat(flat, spec, shard.local_shape, mesh.shard_ranks, shard.start, write)
            origin = fragment.writes_origin
            _add(state, key, fragment)
        for name, value in shard.shared.items():
            scalar = value if torch.is_tensor(value) else _scalar(value)
            key = state_key(index, saved_name, name)
            _add(state, key, Fragment.of_local(scalar, ParamSpec(()), mesh.shard_ranks, origin))
    state[groups_key(index)] = _merged(param_groups, mesh)
    return state


def shared_state(state: State, index: int) -> dict[str, dict[str, Any]]:
    """Numbers that all elements of a parameter share (``step``), after loading: by saved name, then by state."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        parsed = Key.parse(key)
        is_number = isinstance(value, Fragment) and value.shape == () and bool(value.chunks)
        if parsed.family == optimizer_family(index) and parsed.state and is_number:
            found.setdefault(parsed.name, {})[parsed.state] = value.chunks[0].data.item()
    return found


def regrouped(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scalars of saved ``param_groups`` for groups that may be divided differently today.

    Args:
        saved: ``optimizer_<i>.param_groups`` of a checkpoint.
        groups: names of the parameters in each group of today.

    Returns:
        The scalars of each group of today, and notes about values that could not be carried over: where parameters of
        one group were in groups that disagree, the value of today stays. A group without parameters takes those of the
        same number.
    """
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, names in enumerate(groups):
        origins = _origins(number, names, home, len(saved))
        scalars: dict[str, Any] = {}
        for key in dict.fromkeys(key for origin in origins for key in saved[origin] if key != "params"):
            values = [saved[origin].get(key) for origin in origins]
            if all(_same(value, values[0]) for value in values):
                scalars[key] = values[0]
            else:
                were = ", ".join(map(repr, values))
                notes.append(f"group {number} joins groups whose {key} was {were}: the value of today stays")
        if names and not origins:
            notes.append(f"group {number} ({names[0]}, ...) is new: its settings stay")
        found.append(scalars)
    return found, notes


def _origins(number: int, names: Sequence[str], home: Mapping[str, int], count: int) -> list[int]:
    """Numbers of the saved groups, ``count`` of them, that had a group's parameters."""
    return sorted({home[name] for name in names if name in home}) if names else list(range(count))[number:][:1]


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else bool(a == b)


def _merged(groups: Sequence[Mapping[str, Any]], mesh: ParallelMesh) -> list[dict[str, Any]]:
    """The groups of all pipeline stages as one list: a stage that lacks some numbers the others differently."""
    own = [dict(group) for group in groups]
    if mesh.pp.size == 1:
        return own
    is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
    merged: list[dict[str, Any]] = []
    trains = is_source and any(group["params"] for group in own)  # else a stage has groups for its optimizer's sake
    for stage in all_gather_object(mesh, own if trains else []):
        for number, group in enumerate(stage):
            alike = [place for place, other in enumerate(merged) if _have_same_settings(group, other)]
            place = min(number, len(merged))
            if place not in (*alike, len(merged)):
                place = min(alike, default=len(merged))
            if place == len(merged):
                merged.append({**group, "params": []})
            merged[place]["params"] += [name for name in group["params"] if name not in merged[place]["params"]]
    return merged or own


def _have_same_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a if key != "params")


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _add(state: State, key: str, fragment: Fragment) -> None:
    state[key] = state[key].joined(fragment) if key in state else fragment


def _writers(
    sizes: Mapping[str, int], specs: Mapping[str, ParamSpec], mesh: ParallelMesh, dp_replicates: bool
) -> dict[str, bool]:
    """True for tensors that this rank saves: largest first, each goes to the replica with the least to write so far."""
    dp, dp_rank = (mesh.dp_cp.size, mesh.dp_cp.rank) if dp_replicates else (1, 0)
    edp, edp_rank = (mesh.edp.size, mesh.edp.rank) if dp_replicates else (1, 0)
    # Replicas of a tensor-parallel shard differ in dp alone, those of a whole tensor in tp too, those of experts in
    # edp. Each kind is divided by itself, so that its list is the same on all ranks that hold its tensors.
    sliced, whole, experts = [0] * dp, [0] * (dp * mesh.tp.size), [0] * edp
    mine: dict[str, bool] = {}
    for name in sorted(specs, key=lambda name: (-sizes[name], name)):
        spec = specs[name]
        if spec.tied_with:
            mine[name] = False
            continue
        if spec.is_expert:
            loads, here = experts, edp_rank
        elif spec.tp_dim is None:
            loads, here = whole, mesh.tp.rank * dp + dp_rank
        else:
            loads, here = sliced, dp_rank
        writer = loads.index(min(loads))
        loads[writer] += sizes[name]
        mine[name] = writer == here
    return mine

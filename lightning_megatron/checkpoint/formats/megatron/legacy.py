"""Megatron's format ``torch``: one pickled file per model-parallel rank, ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``.

``TT`` is the rank on the tensor-parallel axis, ``PPP`` on the pipeline's and ``EEE`` on the experts'; a suffix is left
out where the axis is 1. A file holds ``model``, or ``model0``, ``model1``, ... where a rank has several chunks of the
interleaved pipeline, with layers and experts numbered from 0 in each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.megatron.before_core import QKVOrder, core_names, is_before_core, qkv_order
from lightning_megatron.checkpoint.formats.megatron.names import LAYERS, is_of_model, plain_name
from lightning_megatron.checkpoint.formats.megatron.unpickle import command_line, load_file
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_odd
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.errors import CheckpointError

_FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.(.*)")
_CUT_BY_ROWS = re.compile(
    r"(linear_qkv|linear_fc1)\.(weight|bias)$|(word_embeddings|output_layer)\.weight$|^lm_head\.bias$"
)
_CUT_BY_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")

Place = tuple[int, int, int]
"""Ranks on the tensor-parallel, pipeline and expert axes."""


@dataclass(frozen=True)
class _Shard:
    """A tensor's part in one file; ``reshape`` gives it the shape that it has in the format ``torch_dist``."""

    tensor: Tensor
    reshape: Callable[[Tensor], Tensor]

    def on_meta(self) -> Tensor:
        return self.reshape(self.tensor.to("meta"))

    def value(self) -> Tensor:
        return self.reshape(self.tensor)


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint of Megatron in either format.

    Attributes:
        tensors: tensors of the model by the names of ``names.py``, read and merged when they are materialized.
        arguments: Megatron's command line; ``None`` if it is not there, or was not read.
        is_old: True if it is from before megatron-core.
        qkv_order: order of the rows of queries, keys and values.
    """

    tensors: dict[str, LazyTensor]
    arguments: dict[str, Any] | None
    is_old: bool = False
    qkv_order: QKVOrder = "head"


def read_legacy(directory: Path, *, allow_pickle: bool) -> MegatronCheckpoint:
    """Open a checkpoint of this format.

    Raises:
        CheckpointError: if files are missing or cannot be read, or were saved in a layout that they do not describe.
    """
    files = {folder: load_file(folder / _FILE, allow_pickle=allow_pickle) for folder in _folders(directory)}
    first = next(iter(files))
    arguments = command_line(files[first], first / _FILE)
    _refuse_other_experts(directory, arguments or {})
    models = {folder: _chunks(directory, content) for folder, content in files.items()}
    is_old = any(is_before_core(model) for chunks in models.values() for model in chunks)
    order: QKVOrder = "head"
    if is_old:
        order = qkv_order(files[first], first / _FILE)
        models = {folder: [core_names(model) for model in chunks] for folder, chunks in models.items()}
    for folder, chunks in models.items():
        for model in chunks:
            refuse_odd(folder / _FILE, model)
    ranks = {_place(folder, arguments or {}): chunks for folder, chunks in models.items()}
    _refuse_missing(directory, ranks)
    shards = _shards(ranks)
    tensors = {name: _merged(name, parts, _is_gated(name, shards), order) for name, parts in shards.items()}
    return MegatronCheckpoint(tensors, arguments, is_old, order)


def _refuse_other_experts(directory: Path, arguments: Mapping[str, Any]) -> None:
    etp, tp = (arguments.get(name) for name in ("expert_tensor_parallel_size", "tensor_model_parallel_size"))
    if etp not in (None, tp) and arguments.get("num_experts"):
        raise CheckpointError(
            f"{directory}: etp={etp} differs from tp={tp}, and files of this format do not record that: save the"
            " checkpoint as torch_dist with Megatron"
        )


def _folders(directory: Path) -> list[Path]:
    found = sorted(folder for folder in directory.glob("mp_rank_*") if _FOLDER.fullmatch(folder.name))
    if not found:
        raise CheckpointError(f"{directory} holds no folder such as mp_rank_00")
    return found


def _place(folder: Path, arguments: Mapping[str, Any]) -> Place:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    tp, first, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    # One number after the first is the pipeline's, unless there is no pipeline.
    only_experts = match[3] is None and arguments.get("pipeline_model_parallel_size", 2) == 1
    return (tp, 0, first) if only_experts else (tp, first, second)


def _refuse_missing(directory: Path, ranks: Mapping[Place, Any]) -> None:
    sizes = [max(place[axis] for place in ranks) + 1 for axis in range(3)]
    wanted = {(t, p, e) for t in range(sizes[0]) for p in range(sizes[1]) for e in range(sizes[2])}
    if missing := sorted(wanted - ranks.keys()):
        listed = ", ".join(f"(tp {t}, pp {p}, ep {e})" for t, p, e in missing[:5])
        raise CheckpointError(f"{directory}: files of {len(missing)} ranks are missing: {listed}")


def _shards(chunks: Mapping[Place, Sequence[Mapping[str, Any]]]) -> dict[str, list[_Shard]]:
    """Shards of each whole tensor by its name, in the order of tensor-parallel ranks."""
    stages = sorted({place[1] for place in chunks})
    count = len(chunks[0, 0, 0])
    order = [(v, p) for v in range(count) for p in stages]
    lengths = [_num_layers(chunks[0, p, 0][v]) for v, p in order]
    first_layer = dict(zip(order, accumulate([0, *lengths]), strict=False))
    ep = max(place[2] for place in chunks) + 1
    found: dict[str, dict[int, _Shard]] = {}
    for (t, p, e), models in sorted(chunks.items()):
        for v, model in enumerate(models):
            for name, shard in _named(model, first_layer[v, p], e, ep):
                # Several files may hold a tensor; the first is taken (the first stage's, if embeddings are tied).
                found.setdefault(name, {}).setdefault(t, shard)
    return {name: [parts[t] for t in sorted(parts)] for name, parts in found.items()}


def _chunks(directory: Path, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    numbered = sorted((name for name in content if re.fullmatch(r"model\d+", name)), key=lambda name: int(name[5:]))
    names = ["model"] if "model" in content else numbered
    models: list[Mapping[str, Any]] = [content[name] for name in names if isinstance(content[name], dict)]
    if not models:
        raise CheckpointError(f"{directory}: it holds no model, but {sorted(content)}")
    return models


def _num_layers(model: Mapping[str, Any]) -> int:
    return len({match[1] for name in model if (match := _LAYER.match(plain_name(name)))})


def _named(model: Mapping[str, Any], first_layer: int, ep_rank: int, ep: int) -> Iterator[tuple[str, _Shard]]:
    for given, tensor in model.items():
        if not torch.is_tensor(tensor) or not is_of_model(given):
            continue
        name = plain_name(given)
        if layer := _LAYER.fullmatch(name):
            name = f"{LAYERS}{int(layer[1]) + first_layer}.{layer[2]}"
        before, experts, after = name.partition(".mlp.experts.")
        if not experts:
            yield name, _Shard(tensor, _as_it_is)
            continue
        router = model[given.partition(".mlp.experts.")[0] + ".mlp.router.weight"]
        local = router.shape[0] // ep
        for number, rest, reshape in _experts(after, local, router.shape[1], ep_rank * local):
            yield f"{before}.mlp.experts.{number}.{rest}", _Shard(tensor, reshape)


def _experts(name: str, local: int, hidden: int, first: int) -> Iterator[tuple[int, str, Callable[[Tensor], Tensor]]]:
    """The experts in a tensor of a rank that holds ``local`` of them, in each of Megatron's formats of experts."""
    if one := re.fullmatch(r"local_experts\.(\d+)\.(linear_fc[12]\.\w+)", name):
        yield first + int(one[1]), one[2], _as_it_is
    elif one := re.fullmatch(r"(linear_fc[12])\.(weight|bias)(\d+)", name):  # Transformer Engine's grouped layers
        yield first + int(one[3]), f"{one[1]}.{one[2]}", _as_it_is
    elif one := re.fullmatch(r"local_expert_(\d+)_(linear_fc[12])_(\w+)", name):  # Gaudi's fork: numbers are global
        yield int(one[1]), f"{one[2]}.{one[3]}", _as_it_is
    elif name in ("weight1", "weight2"):  # all experts in one matrix ``[H, local F]`` or ``[local F, H]``
        for number in range(local):
            reshape = partial(_grouped, local, hidden, number, name == "weight1")
            yield first + number, f"linear_fc{name[-1]}.weight", reshape
    else:
        yield first, name, _as_it_is  # unknown: refused by name, as having no place in the model


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _grouped(local: int, hidden: int, number: int, first_layer: bool, x: Tensor) -> Tensor:
    """``[F, H]`` of one expert from ``weight1``, or ``[H, F]`` from ``weight2``."""
    experts = x.reshape(local, hidden, -1) if first_layer else x.reshape(local, -1, hidden)
    return experts[number].t().contiguous()


def _is_gated(name: str, shards: Mapping[str, Sequence[_Shard]]) -> bool:
    """True if the first layer has twice the features that the second one takes: gates, then ups."""
    first, _, rest = name.rpartition("linear_fc1.")
    second = shards.get(f"{first}linear_fc2.weight")
    if not first or not rest or second is None:
        return False
    return shards[name][0].on_meta().shape[0] == 2 * second[0].on_meta().shape[1]


def _merged(name: str, shards: Sequence[_Shard], gated: bool, order: QKVOrder) -> LazyTensor:
    kinds = 3 if order == "kind" and ".linear_qkv." in name else 2 if gated else 1
    joined = _join(name, kinds, [shard.on_meta() for shard in shards])
    return LazyTensor(tuple(joined.shape), joined.dtype, lambda: _join(name, kinds, [each.value() for each in shards]))


def _join(name: str, kinds: int, shards: Sequence[Tensor]) -> Tensor:
    """Join the shards of a tensor, each of which holds ``kinds`` blocks of rows, one after the other."""
    if len(shards) == 1:
        return shards[0]
    if _CUT_BY_COLUMNS.search(name):
        return torch.cat(list(shards), dim=1)
    if not _CUT_BY_ROWS.search(name):
        return shards[0]
    blocks = [shard.tensor_split(kinds) for shard in shards]
    return torch.cat([each[i] for i in range(kinds) for each in blocks])

"""Lightning's single files, as its one-device strategies write them: whole tensors by the module's names."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoint.formats.meta import NOTE
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.manifest import Progress
from lightning_megatron.checkpoint.integrity.unpacked_size import refuse_odd, refuse_packed
from lightning_megatron.checkpoint.tensors.fragment import Fragment, part_of
from lightning_megatron.checkpoint.tensors.keys import (
    MAIN,
    MODEL,
    Key,
    groups_key,
    optimizer_family,
    state_key,
    version_key,
    whole_state_key,
)
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.errors import CheckpointError
from lightning_megatron.params import NO_PARAMETER, Box

MODEL_STATE, OPTIMIZERS = "state_dict", "optimizer_states"
_BLOCK = 1 << 20
Order = Literal["groups", "definition", "unknown"]


@dataclass(frozen=True)
class SingleFile:
    """An opened file; its tensors are memory-mapped, and each rank reads the parts that it needs.

    Attributes:
        tensors: values of the model, by the keys of this package's checkpoints.
        optimizers: state of each optimizer.
        meta: everything but tensors of the model and its optimizers.
        layout: fields of the layout at the save; empty for a file of Lightning's own strategies.
        main: key family of the main values: the model's, or that of a version that the run trains in its place.
        progress: progress of the run at the save; ``None`` if the file does not record it.
    """

    tensors: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]]
    meta: dict[str, Any]
    layout: Mapping[str, Any]
    main: str
    progress: Progress | None = None

    @classmethod
    def open(cls, path: Path, weights_only: bool) -> SingleFile:
        """Read everything but the values of tensors; ``weights_only`` refuses a file that holds objects.

        Raises:
            CheckpointError: if it is no such file.
        """
        refuse_packed(path)
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        except Exception as error:  # it is a pickle: any error may come out of it
            raise CheckpointError(f"the file cannot be read: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get(MODEL_STATE), dict):
            raise CheckpointError("it is a file, but not one of Lightning's: it has no state_dict")
        try:
            return cls._taken_apart(path, content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the file's metadata is damaged: {error!r}") from None

    @classmethod
    def _taken_apart(cls, path: Path, content: dict[str, Any]) -> SingleFile:
        note = content.get(NOTE, {})
        families = {MODEL_STATE: MODEL} | {version: version for version in note.get("versions", ())}
        values: dict[str, Any] = dict(note.pop("per_rank", {}))
        for version, family in families.items():
            tensors = content.pop(version)
            refuse_odd(path, tensors)
            values |= {version_key(family, name): value for name, value in _without_repeats(tensors).items()}
        optimizers = content.get(OPTIMIZERS, ())
        if OPTIMIZERS in content:
            content[OPTIMIZERS] = []
        main = families[note.pop("main", MODEL_STATE)]
        progress = note.pop("progress", None)
        layout = note.pop("layout", {})
        return cls(values, optimizers, content, layout, main, None if progress is None else Progress(*progress))

    def part_for(self, state: State, order: Order = "groups") -> FilePart:
        """Values from which a state can be filled.

        Args:
            state: the state to fill; it gives the true shapes and the parameters of each optimizer.
            order: order of the parameters in the state's groups: the optimizer's own (``"groups"``); for groups merged
                from pipeline stages, that of definition or an unknown one.

        Raises:
            CheckpointError: if the file's optimizers do not fit the state's.
        """
        values = dict(self.tensors)
        for index, saved in enumerate(self.optimizers):
            if state.get(groups_key(index)) is not None:
                values |= self._optimizer_values(index, saved, state, order)
        true = {key: value.shape for key, value in state.items() if isinstance(value, Fragment)}
        return FilePart({key: _stripped(value, true.get(key)) for key, value in values.items()})

    def _optimizer_values(self, index: int, saved: Mapping[str, Any], state: State, order: Order) -> dict[str, Any]:
        """State of an optimizer by parameter name; the file numbers the parameters, in the order of each group."""
        prefix, groups = optimizer_family(index), state[groups_key(index)]
        is_whole = whole_state_key(index, NO_PARAMETER) in state
        has_state = any(key.family == prefix and key.state for key in map(Key.parse, state))
        place = {Key.parse(key).name: number for number, key in enumerate(self.tensors) if Key.parse(key).is_model}
        if len(groups) != len(saved["param_groups"]):
            raise CheckpointError(f"{prefix} has {len(saved['param_groups'])} groups in the file, {len(groups)} today")
        values: dict[str, Any] = {}
        named = []
        for number, (group, today) in enumerate(zip(saved["param_groups"], groups, strict=True)):
            names = _names_of(group, today, place, order, prefix)
            if len(names) != len(group["params"]):
                count = len(group["params"])
                raise CheckpointError(
                    f"{prefix}: group {number} has {count} parameters in the file, {len(names)} today"
                )
            for name, which in zip(names, group["params"], strict=True) if has_state else ():
                whole: Tensor = self.tensors[version_key(self.main, name)]
                kept = saved["state"].get(which, {})  # empty before the parameter's first gradient
                values[state_key(index, name, MAIN)] = whole
                values |= {whole_state_key(index, name): kept} if is_whole else _by_key(index, name, kept, whole)
            named.append({**group, "params": names})
        if is_whole:
            values[whole_state_key(index, NO_PARAMETER)] = _of_no_parameter(saved)
        return values | {groups_key(index): named}


@dataclass(frozen=True)
class FilePart:
    """Values of a file for a state, by the keys of this package's checkpoints."""

    values: Mapping[str, Any]

    @property
    def metadata(self) -> Metadata:
        """Names and shapes, as in the metadata of this package's checkpoints."""
        return Metadata({key: _entry(value) for key, value in self.values.items()})

    def read(self, state: State) -> None:
        """Fill a state in place."""
        for key, value in state.items():
            if not isinstance(value, Fragment):
                state[key] = self.values[key]
                continue
            for chunk in value.chunks:
                chunk.data.copy_(part_of(self.values[key], chunk.box))


def record_faults(path: Path, rank: int, ranks: int) -> list[Fault]:
    """Records of a file with a wrong checksum; ``torch.load`` does not verify it.

    Args:
        path: the file; one that is no zip archive gives no faults here, because opening it fails.
        rank: index of this rank among those that share the reading.
        ranks: number of these ranks.

    Raises:
        CheckpointError: if they are compressed.
    """
    refuse_packed(path)
    if not zipfile.is_zipfile(path):
        return []
    faults = []
    with zipfile.ZipFile(path) as archive:
        records = sorted(archive.infolist(), key=lambda record: -record.file_size)
        # torch writes 0 if it is told not to compute checksums.
        for record in (record for record in records[rank::ranks] if record.CRC):
            try:
                with archive.open(record) as stream:
                    while stream.read(_BLOCK):
                        pass
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
                faults.append(Fault(path.name, f"its record {record.filename} is damaged: the check sum is wrong"))
    return faults


def _without_repeats(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each tied tensor once, under the first of its names."""
    seen: set[object] = set()
    found = {}
    for name, value in tensors.items():
        what = (value.data_ptr(), value.shape) if torch.is_tensor(value) and value.numel() else name
        if what not in seen:
            found[name] = value
        seen.add(what)
    return found


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not torch.is_tensor(value):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [whole])


def _stripped(value: Any, true: tuple[int, ...] | None) -> Any:
    """A tensor without the padding of the vocabulary, which is zero in parameters and in optimizer state."""
    if true is None or not torch.is_tensor(value) or value.dim() != len(true) or tuple(value.shape) == true:
        return value
    if any(size > held for size, held in zip(true, value.shape, strict=True)):
        return value
    inner = part_of(value, Box.whole(true))
    return inner if torch.count_nonzero(value) == torch.count_nonzero(inner) else value


def _by_key(index: int, name: str, kept: Mapping[str, Any], whole: Tensor) -> dict[str, Any]:
    """State of one parameter by the keys of this package's checkpoints."""
    for kind, value in kept.items():
        if torch.is_tensor(value) and value.dim() and value.shape != whole.shape:
            shapes = f"{kind} is {list(value.shape)}, the parameter {list(whole.shape)}"
            prefix = optimizer_family(index)
            raise CheckpointError(f"{prefix}: groups list parameters in another order: {name}: {shapes}")
    return {state_key(index, name, kind): torch.as_tensor(value) for kind, value in kept.items()}


def _of_no_parameter(saved: Mapping[str, Any]) -> dict[str, Any]:
    beside = {key: value for key, value in saved.items() if key != "param_groups"}
    return {**beside, "state": {key: value for key, value in saved["state"].items() if not isinstance(key, int)}}


def _names_of(
    group: Mapping[str, Any], today: Mapping[str, Any], place: Mapping[str, int], order: Order, prefix: str
) -> Sequence[str]:
    """Names for the parameter numbers of a group: the file's own, or today's in the order of the numbers."""
    if (told := group.get("param_names")) and place.keys() >= set(told):
        return told
    if order == "unknown":
        raise CheckpointError(
            f"{prefix} has numbers in place of names, and this run's groups list parameters in an order of their own,"
            " of which each stage knows only a part: load it with pp=1, and save a checkpoint of that run"
        )
    names = [name for name in today["params"] if name in place]
    return sorted(names, key=place.__getitem__) if order == "definition" else names

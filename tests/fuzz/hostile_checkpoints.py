"""Checkpoints of this package and of Lightning, spoiled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_payloads as payloads
import torch
from hostile_case import SOME, SOME_GROWING, SPECIAL, Case, Spoil, some, sparse, writes
from hostile_sources import renew_manifest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex


def _in_checkpoint(name: str, spoil: Spoil, file: str, trick: str, **more: Any) -> Case:
    def and_renew(path: Path) -> None:
        spoil(path)
        if path.is_file() and path.name != "manifest.json":
            renew_manifest(path.parent)

    return Case(name, trick, "run", f"last.ckpt/{file}", and_renew, **more)


def checkpoints(mark: Path) -> Iterator[Case]:
    running, growing = payloads.running(mark), payloads.growing()

    def before(payload: bytes) -> Spoil:
        payload = payload[2:] if payload[:1] == b"\x80" else payload
        return lambda file: file.write_bytes(file.read_bytes()[:2] + payload + b"0" + file.read_bytes()[2:])

    for trick, payload in running.items():
        yield _in_checkpoint(".metadata", before(payload), ".metadata", f"{trick} before")
        yield _in_checkpoint(".metadata", writes(payload + b"."), ".metadata", f"{trick} alone")
    for trick, content in growing.items():
        yield _in_checkpoint(".metadata", writes(content), ".metadata", trick)

    def table(change: Callable[[Any], object]) -> Spoil:
        def edit(file: Path) -> None:
            content = pickle.loads(file.read_bytes())
            change(content)
            file.write_bytes(pickle.dumps(content))

        return edit

    def leads(where: str) -> Spoil:
        index = MetadataIndex("model.model.embedding.word.weight", torch.Size([0, 0]))
        return table(lambda content: content.storage_data.update({index: _StorageInfo(where, 0, 100)}))

    for where in ("../x", "/etc/hostname", "/dev/zero", "a/b", "..", "x\0y", "a\\b"):
        yield _in_checkpoint(".metadata", leads(where), ".metadata", f"names {where!r}")

    def grow(content: Any) -> None:
        for entry in content.state_dict_metadata.values():
            if hasattr(entry, "size"):
                entry.size = torch.Size([1 << 40, *entry.size[1:]])
                entry.chunks[0].sizes = entry.size

    def repeat(content: Any) -> None:
        entry = content.state_dict_metadata["model.model.embedding.word.weight"]
        entry.chunks = entry.chunks * 100_000

    yield _in_checkpoint(".metadata", table(grow), ".metadata", "sizes of 2^40 rows", errs_with="last.ckpt")
    yield _in_checkpoint(
        ".metadata", table(repeat), ".metadata", "a chunk 100000 times", harmless=True, errs_with="last.ckpt"
    )
    for trick, spoil in {**SPECIAL, "sparse": sparse}.items():
        yield _in_checkpoint(".metadata", spoil, ".metadata", trick)
    # meta.pt
    for trick, payload in running.items():
        yield _in_checkpoint("meta.pt", writes(payloads.zipped(b"\x80\x02" + payload + b".")), "meta.pt", trick)
    for trick in ("reduce", "stack-global", "import"):
        yield _in_checkpoint("meta.pt", writes(running[trick] + b"."), "meta.pt", f"{trick} without archive")
    for trick, content in growing.items():
        # An empty dictionary to readers that keep the memo of a pickle in a dictionary, as torch's does.
        is_empty = trick == "huge-memo"
        more = {"harmless": is_empty or trick == "laughs", "errs_with": "last.ckpt" if is_empty else ""}
        yield _in_checkpoint("meta.pt", writes(payloads.zipped(content)), "meta.pt", trick, **more)
    yield _in_checkpoint("meta.pt", lambda file: file.write_bytes(payloads.torchscript(mark)), "meta.pt", "TorchScript")
    yield _in_checkpoint("meta.pt", lambda file: file.write_bytes(payloads.zip_bomb()), "meta.pt", "zip bomb")
    for trick, spoil in {**SPECIAL, "sparse": sparse}.items():
        yield _in_checkpoint("meta.pt", spoil, "meta.pt", trick)

    def meta(change: Callable[[Any], Any]) -> Spoil:
        def edit(file: Path) -> None:
            content = torch.load(file, weights_only=True)
            torch.save(change(content) or content, file)

        return edit

    for entry, value in {
        "hyper_parameters": [1, 2],
        "hyper_parameters.config": {"num_layers": 10**9},
        "hyper_parameters.config.hidden_size": 10**9,
        "hyper_parameters.config.vocab_size": 10**12,
        "loops": 7,
        "callbacks": "x",
        "lr_schedulers": 3,
        "epoch": "many",
        "global_step": [1],
        "pytorch-lightning_version": 7,
        "hugging_face": [1],
        "optimizer_states": 5,
    }.items():

        def change(content: Any, path: str = entry, value: Any = value) -> None:
            *outer, name = path.split(".")
            for part in outer:
                content = content[part]
            last = content.get(name)
            content[name] = {**last, **value} if isinstance(last, dict) and isinstance(value, dict) else value

        trick = f"{entry} = {value!r}"[:60]
        yield _in_checkpoint("meta.pt", meta(change), "meta.pt", trick, harmless=True, errs_with="last.ckpt")
    # Tensors and values
    for trick in ("reduce", "stack-global", "import", "load-bytes", "build-class"):
        content = payloads.zipped(b"\x80\x02" + running[trick] + b".")
        yield _in_checkpoint(".distcp", writes(content * 40), "__0_0.distcp", trick, errs_with="last.ckpt")
        content = running[trick] + b"."
        yield _in_checkpoint(".distcp", writes(content * 400), "__0_0.distcp", f"{trick} bare", errs_with="last.ckpt")
    for trick, spoil in {**SPECIAL, "zeros": writes(bytes(100_000)), "empty": writes(b"")}.items():
        yield _in_checkpoint(".distcp", spoil, "__0_0.distcp", trick, errs_with="last.ckpt")

    def item(content: bytes, key: str = "model.model.embedding.word.weight") -> Spoil:
        """Put an archive at the place of a tensor: at the end of the file, with a table that says so."""

        def edit(file: Path) -> None:
            table_file = file.parent / ".metadata"
            table = pickle.loads(table_file.read_bytes())
            for index, place in table.storage_data.items():
                if index.fqn == key:
                    table.storage_data[index] = type(place)(place.relative_path, file.stat().st_size, len(content))
            table_file.write_bytes(pickle.dumps(table))
            with file.open("ab") as stream:
                stream.write(content)

        return edit

    for trick, tensor in payloads.odd_tensors().items():
        spoil = item(payloads.saved(tensor))
        yield _in_checkpoint(".distcp", spoil, "__0_0.distcp", f"tensor: {trick}", errs_with="last.ckpt")
    yield _in_checkpoint(
        ".distcp", lambda file: item(payloads.torchscript(mark))(file), "__0_0.distcp", "TorchScript",
        errs_with="last.ckpt",
    )  # fmt: skip
    yield _in_checkpoint(
        ".distcp", lambda file: item(payloads.zip_bomb())(file), "__0_0.distcp", "zip bomb", errs_with="last.ckpt"
    )
    # manifest.json
    for trick, content in payloads.json_bombs().items():
        yield _in_checkpoint("manifest.json", writes(content), "manifest.json", trick)
    for trick, spoil in SPECIAL.items():
        yield _in_checkpoint("manifest.json", spoil, "manifest.json", trick, harmless=True, errs_with="last.ckpt")
    yield _in_checkpoint("manifest.json", sparse, "manifest.json", "sparse")

    def names(where: str) -> Spoil:
        def edit(file: Path) -> None:
            from lightning_megatron.checkpoint.integrity.manifest import Manifest

            manifest = Manifest.parse(file.read_text())
            files = {**manifest.files, where: next(iter(manifest.files.values()))}
            file.write_text(Manifest(manifest.layout, files, manifest.torch).render())

        return edit

    for where in ("../x", "/etc/hostname", "/dev/zero", "x\0y", "", "a/b"):
        yield _in_checkpoint("manifest.json", names(where), "manifest.json", f"names {where!r}")


def single_files(mark: Path) -> Iterator[Case]:
    def case(trick: str, spoil: Spoil, **more: Any) -> Case:
        return Case("single file", trick, "single", "one.ckpt", spoil, **more)

    for trick, payload in some(payloads.running(mark), SOME).items():
        yield case(trick, writes(payloads.zipped(b"\x80\x02" + payload + b".")))
    for trick in ("reduce", "stack-global", "import", "load-bytes"):
        yield case(f"{trick} without archive", writes(payloads.running(mark)[trick] + b"."))
    for trick, content in some(payloads.growing(), SOME_GROWING).items():
        yield case(trick, writes(payloads.zipped(content)))
    yield case("TorchScript", lambda file: file.write_bytes(payloads.torchscript(mark)))
    yield case("zip bomb", lambda file: file.write_bytes(payloads.zip_bomb()))
    yield case("sparse", sparse)
    for trick, spoil in SPECIAL.items():
        yield case(trick, spoil)
    for trick, value in payloads.odd_tensors().items():

        def edit(file: Path, value: Any = value) -> None:
            content = torch.load(file, weights_only=True)
            content["state_dict"]["model.embedding.word.weight"] = value
            torch.save(content, file)

        yield case(f"tensor: {trick}", edit)
    for name, value in {"state_dict": 3, "optimizer_states": [{}], "hyper_parameters": 9, "loops": []}.items():

        def put(file: Path, name: str = name, value: Any = value) -> None:
            torch.save({**torch.load(file, weights_only=True), name: value}, file)

        yield case(f"{name} = {value}", put, harmless=True)

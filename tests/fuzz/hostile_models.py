"""Models of other programs, spoiled: Hugging Face directories and checkpoints of Megatron."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_payloads as payloads
import torch
from hostile_case import SOME, SOME_GROWING, SPECIAL, Case, Spoil, becomes, some, sparse, writes


def hugging_face(mark: Path) -> Iterator[Case]:
    for trick, content in payloads.json_bombs().items():
        yield Case("config.json", trick, "hf", "config.json", writes(content))
        yield Case("HF index", trick, "hf-index", "model.safetensors.index.json", writes(content))
        yield Case("generation_config.json", trick, "hf", "generation_config.json", writes(content))
    for trick, spoil in SPECIAL.items():
        yield Case("config.json", trick, "hf", "config.json", spoil, errs_with="hf")
        yield Case("HF index", trick, "hf-index", "model.safetensors.index.json", spoil, errs_with="hf-index")
        yield Case("safetensors", trick, "hf", "model.safetensors", spoil, errs_with="hf")
    values: dict[str, Any] = {
        "num_hidden_layers": (-1, "2", 10**9, 2.5, None, True, [], 10**400),
        "hidden_size": (0, -16, 1 << 62, "x", 10**9),
        "vocab_size": (-1, 1 << 62, None, {}),
        "num_attention_heads": (0, 3, "2"),
        "rope_scaling": ("x", [1], {"rope_type": {"a": 1}}),
        "rope_theta": ("x", float("nan"), float("inf"), -1, []),
        "rms_norm_eps": ("x", float("nan"), -1.0),
        "quantization_config": ("x", 3),
        "model_type": ([], {"a": 1}, "../x", None),
        "tie_word_embeddings": ("no", 7),
        "max_position_embeddings": (-1, "8", 1 << 80),
        "eos_token_id": ({"a": 1}, "x", [[]]),
    }
    for name, wrong in values.items():
        for value in wrong:
            spoil = becomes(lambda content, name=name, value=value: {**content, name: value})
            of_generation = name in ("eos_token_id", "max_position_embeddings", "rope_theta", "rms_norm_eps")
            harmless = of_generation or (name == "num_hidden_layers" and value is True)
            trick = f"{name}={value!r}"[:50]
            yield Case("config.json", trick, "hf", "config.json", spoil, harmless, f"config.json|{name}|")
    auto = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "trust_remote_code": True}
    spoil = becomes(lambda content: {**content, **auto})
    yield Case("config.json", "auto_map", "hf", "config.json", spoil, harmless=True)
    for where in ("../hf/model.safetensors", "/etc/hostname", "/dev/zero", "a/b", "x\0y", "", 7, None, ["a"]):

        def lead(content: Any, where: Any = where) -> Any:
            return {**content, "weight_map": {**content["weight_map"], "model.norm.weight": where}}

        yield Case("HF index", f"names {where!r}", "hf-index", "model.safetensors.index.json", becomes(lead))
    for value in ([], 3, None, "x", {}):
        spoil = becomes(lambda content, value=value: {**content, "weight_map": value})
        yield Case("HF index", f"weight_map={value!r}", "hf-index", "model.safetensors.index.json", spoil,
                   errs_with="hf-index" if value != {} else "|missing")  # fmt: skip
    yield from _safetensors("safetensors", "hf", "model.safetensors")
    name = "pytorch_model.bin"
    for trick, payload in some(payloads.running(mark), SOME).items():
        yield Case(name, trick, "hf-bin", name, writes(payloads.zipped(b"\x80\x02" + payload + b".")))
        yield Case(name, f"{trick} without archive", "hf-bin", name, writes(b"\x80\x02" + payload + b"."))
    legacy = payloads.saved({"x": torch.ones(2)}, _use_new_zipfile_serialization=False)
    for trick in ("reduce", "stack-global", "import", "load-bytes"):
        at = legacy.index(b"}q")  # of one of its pickles
        payload = payloads.running(mark)[trick].removeprefix(b"\x80\x04")
        yield Case(
            name, f"{trick} in the old format", "hf-bin", name, writes(legacy[:at] + payload + b"0" + legacy[at:])
        )
    for trick, content in some(payloads.growing(), SOME_GROWING).items():
        yield Case(name, trick, "hf-bin", name, writes(payloads.zipped(content)))
    for trick, tensor in payloads.odd_tensors().items():

        def edit(file: Path, tensor: Any = tensor) -> None:
            torch.save({**torch.load(file, weights_only=True), "model.norm.weight": tensor}, file)

        yield Case(name, f"tensor: {trick}", "hf-bin", name, edit, errs_with=f"{name}|model.norm.weight")
    yield Case(name, "TorchScript", "hf-bin", name, lambda file: file.write_bytes(payloads.torchscript(mark)))
    yield Case(name, "zip bomb", "hf-bin", name, lambda file: file.write_bytes(payloads.zip_bomb()))
    yield Case(name, "sparse", "hf-bin", name, sparse)


def _safetensors(kind: str, source: str, name: str) -> Iterator[Case]:
    def headed(header: bytes, tail: bytes = b"", length: int | None = None) -> Spoil:
        return writes(struct.pack("<Q", len(header) if length is None else length) + header + tail)

    def entry(**changes: Any) -> bytes:
        return json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}).encode()

    contents = {
        "length 2^60": headed(b"{}", length=1 << 60),
        "length 2^64-1": headed(b"{}", length=(1 << 64) - 1),
        "no JSON": headed(b"}{" * 10),
        "deep": headed(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        "a list": headed(b"[1]"),
        "a number": headed(b"7"),
        "entry a list": headed(b'{"w": [1]}'),
        "entry a number": headed(b'{"w": 7}'),
        "no offsets": headed(b'{"w": {"dtype": "F32", "shape": [2]}}', bytes(8)),
        "dtype": headed(entry(dtype="F3"), bytes(8)),
        "dtype a list": headed(entry(dtype=[]), bytes(8)),
        "F8": headed(entry(dtype="F8_E4M3", shape=[8]), bytes(8)),
        "shape negative": headed(entry(shape=[-2]), bytes(8)),
        "shape 2^63": headed(entry(shape=[1 << 63]), bytes(8)),
        "shape overflows": headed(entry(shape=[1 << 40, 1 << 40]), bytes(8)),
        "shape text": headed(entry(shape="ab"), bytes(8)),
        "offsets outside": headed(entry(data_offsets=[1 << 40, (1 << 40) + 8]), bytes(8)),
        "offsets negative": headed(entry(data_offsets=[-8, 0]), bytes(8)),
        "offsets reversed": headed(entry(data_offsets=[8, 0]), bytes(8)),
        "offsets text": headed(entry(data_offsets="ab"), bytes(8)),
        "offset alone": headed(entry(data_offsets=[]), bytes(8)),
        "not UTF-8": headed(b'{"\xff\xfe": 1}'),
        "empty": writes(b""),
        "short": writes(b"\0\0"),
        "zeros": writes(bytes(4096)),
        "sparse": sparse,
        "pickle": writes(b"cos\nsystem\n(Vtrue\ntR."),
    }
    for trick, spoil in contents.items():
        yield Case(kind, trick, source, name, spoil)


def megatron(mark: Path) -> Iterator[Case]:
    tracker = "latest_checkpointed_iteration.txt"
    for trick, content in {
        "5000 digits": b"9" * 5000,
        "300 digits": b"9" * 300,
        "..": b"../x",
        "absolute": b"/etc",
        "NUL": b"3\0",
        "superscript": "\u00b2".encode(),
        "arabic digits": "\u0663".encode(),
        "negative": b"-3",
        "not UTF-8": b"\xff\xfe",
        "empty": b"",
        "word": b"releases",
    }.items():
        harmless = trick == "arabic digits"
        yield Case("tracker file", trick, "dist", tracker, writes(content), harmless=harmless)
    yield Case("tracker file", "sparse", "dist", tracker, sparse)
    for trick, spoil in SPECIAL.items():
        yield Case("tracker file", trick, "dist", tracker, spoil, errs_with="dist")
    step = "iter_0000003"
    for trick, content in payloads.json_bombs().items():
        yield Case("metadata.json", trick, "dist", f"{step}/metadata.json", writes(content))
    running, growing = some(payloads.running(mark), SOME), some(payloads.growing(), SOME_GROWING)
    for trick, payload in running.items():

        def before(file: Path, payload: bytes = payload) -> None:
            payload = payload[2:] if payload[:1] == b"\x80" else payload
            file.write_bytes(file.read_bytes()[:2] + payload + b"0" + file.read_bytes()[2:])

        yield Case("torch_dist .metadata", f"{trick} before", "dist", f"{step}/.metadata", before, harmless=True)
        yield Case("torch_dist .metadata", trick, "dist", f"{step}/.metadata", writes(payload + b"."))
        in_archive = writes(payloads.zipped(b"\x80\x02" + payload + b"."))
        yield Case("common.pt", trick, "dist", f"{step}/common.pt", in_archive, harmless=True)
        file = f"{step}/mp_rank_00/model_optim_rng.pt"
        yield Case("model_optim_rng.pt", trick, "legacy", file, in_archive)
        spoil = writes(b"\x80\x02" + payload + b".")
        yield Case("model_optim_rng.pt", f"{trick} without archive", "legacy", file, spoil)
    for trick, content in growing.items():
        yield Case("torch_dist .metadata", trick, "dist", f"{step}/.metadata", writes(content))
        in_archive = writes(payloads.zipped(content))
        yield Case("common.pt", trick, "dist", f"{step}/common.pt", in_archive, harmless=True)
        yield Case("model_optim_rng.pt", trick, "legacy", f"{step}/mp_rank_00/model_optim_rng.pt", in_archive)

    def layers(file: Path) -> None:
        table = pickle.loads(file.read_bytes())
        for name, entry in table.state_dict_metadata.items():
            if "decoder.layers." in name and hasattr(entry, "size"):
                entry.size = torch.Size([1 << 40, *entry.size[1:]])
        file.write_bytes(pickle.dumps(table))

    yield Case("torch_dist .metadata", "2^40 layers", "dist", f"{step}/.metadata", layers)
    for name, source, file in (
        ("common.pt", "dist", f"{step}/common.pt"),
        ("model_optim_rng.pt", "legacy", f"{step}/mp_rank_00/model_optim_rng.pt"),
    ):
        harmless = name == "common.pt"
        script: Spoil = lambda path: path.write_bytes(payloads.torchscript(mark))  # noqa: E731
        bomb: Spoil = lambda path: path.write_bytes(payloads.zip_bomb())  # noqa: E731
        yield Case(name, "TorchScript", source, file, script, harmless=harmless)
        yield Case(name, "zip bomb", source, file, bomb, harmless=harmless)
        for trick, spoil in {**SPECIAL, "sparse": sparse}.items():
            yield Case(name, trick, source, file, spoil, harmless=harmless)

    def args(value: Any) -> Spoil:
        def edit(file: Path) -> None:
            content = torch.load(file, weights_only=False)
            torch.save({**content, "args": value}, file)

        return edit

    legacy = f"{step}/mp_rank_00/model_optim_rng.pt"
    for value in (3, "x", [1], {"num_experts": "many"}):
        yield Case("model_optim_rng.pt", f"args={value!r}", "legacy", legacy, args(value), harmless=True)
    for trick, tensor in payloads.odd_tensors().items():

        def put(file: Path, tensor: Any = tensor) -> None:
            content = torch.load(file, weights_only=False)
            content["model"]["decoder.final_layernorm.weight"] = tensor
            torch.save(content, file)

        errs_with = "model_optim_rng.pt|final_layernorm|out.ckpt"
        yield Case("model_optim_rng.pt", f"tensor: {trick}", "legacy", legacy, put, errs_with=errs_with)

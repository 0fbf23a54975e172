"""Sound files of every kind that the package reads, small enough to copy for each hostile one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, record
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.data.preprocessing.train_tokenizer import train_tokenizer
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf
from lightning_megatron.testing.trainer import quiet_trainer

VOCAB, SAMPLE = 300, 8
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
SIZES |= {"ffn_hidden_size": 24, "head_dim": 8, "vocab_size": VOCAB, "vocab_multiple": 4}


def module() -> GPTModule:
    return GPTModule("llama-tiny", lr=1e-2, **SIZES)


def rows(count: int = 4) -> torch.utils.data.DataLoader[Any]:
    tokens = torch.randint(VOCAB, (count, SAMPLE + 1), generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in tokens])  # type: ignore[arg-type]


def renew_manifest(checkpoint: Path) -> None:
    """Let the manifest say that the files are as they were written."""
    manifest = Manifest.parse((checkpoint / MANIFEST).read_text())
    names = sorted(entry.name for entry in checkpoint.iterdir() if entry.is_file() and entry.name != MANIFEST)
    files = {name: record(checkpoint / name) for name in names}
    (checkpoint / MANIFEST).write_text(Manifest(manifest.layout, files, manifest.torch).render())


def build(home: Path) -> None:
    """Make all of them in a folder."""
    torch.manual_seed(3)
    saver = ModelCheckpoint(home / "run", filename="last", save_top_k=1, every_n_train_steps=1)
    options: dict[str, Any] = {"max_steps": 2, "enable_checkpointing": True, "use_distributed_sampler": False}
    quiet_trainer(MegatronStrategy(), callbacks=[saver], **options).fit(module(), rows())
    stock = ModelCheckpoint(home / "single", filename="one", save_top_k=1, every_n_train_steps=1)
    quiet_trainer("auto", callbacks=[stock], **options).fit(module(), rows())
    _tokenizers(home)
    for name, largest in (("hf", 10**9), ("hf-index", 20_000)):
        checkpoint_to_hf(home / "run" / "last.ckpt", home / name, max_shard_size=largest, tokenizer=home / "hf-tok")
        (home / name / "generation_config.json").write_text("{}")
    _pickled(home / "hf", home / "hf-bin")
    _megatron(home)
    with IndexedDatasetWriter(home / "data" / "corpus", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.arange(30) % VOCAB, [30])
    (home / "text").mkdir()
    lines = [json.dumps({"text": f"{n} cats sat on {n * n} mats"}) for n in range(20)]
    (home / "text" / "corpus.jsonl").write_text("\n".join(lines))


def _pickled(source: Path, target: Path) -> None:
    from safetensors.torch import load_file

    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(load_file(source / "model.safetensors"), target / "pytorch_model.bin")


def _megatron(home: Path) -> None:
    from megatron_writer import write_legacy, write_torch_dist  # of tests/unit/checkpoint/formats

    model = module()
    model.configure_model()
    assert model.model is not None
    tensors = {name: tensor.detach() for name, tensor in model.model.state_dict().items()}
    layout = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "experts": "te"}
    write_torch_dist(home / "dist" / "iter_0000003", tensors, model.config, stacked=True, prefix="")
    words = _command_line(model.config)
    torch.save({"args": words, "iteration": 3}, home / "dist" / "iter_0000003" / "common.pt")
    write_legacy(home / "legacy" / "iter_0000003", tensors, model.config, **layout)  # type: ignore[arg-type]
    for file in (home / "legacy").rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)  # just written
        torch.save({**content, "args": argparse.Namespace(**{**vars(content["args"]), **vars(words)})}, file)
    for name in ("dist", "legacy"):
        (home / name / "latest_checkpointed_iteration.txt").write_text("3")
    (home / "config").mkdir()
    (home / "config" / "model.json").write_text(json.dumps(model.hparams["config"]))


def _command_line(config: TransformerConfig) -> argparse.Namespace:
    """Arguments of Megatron that describe the model whole, so that a reader fails by the hostile file alone."""
    return argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=True,
        num_query_groups=config.num_query_groups,
        kv_channels=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        normalization="RMSNorm",
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not config.tie_embeddings,
    )


def _tokenizers(home: Path) -> None:
    for name in ("sp", "hf-tok", "gpt2", "bert"):
        (home / name).mkdir()
    (home / "plain.txt").write_text("\n".join(f"the {n} cats of number {n} sat on {n * n} mats" for n in range(200)))
    train_tokenizer([home / "plain.txt"], home / "sp" / "tok.model", vocab_size=VOCAB)
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "cats", "sat", "on", "mats"])}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(home / "hf-tok" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (home / "hf-tok" / name).write_text(json.dumps(special))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*letters, "ca", "<|endoftext|>"])}
    (home / "gpt2" / "vocab.json").write_text(json.dumps(vocabulary))
    (home / "gpt2" / "merges.txt").write_text("#version: 0.2\nc a\n")
    (home / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cats", "sat", "##s"]))

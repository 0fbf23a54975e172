"""Pairs of token files and JSON lines, each damaged in one way by chance."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_megatron.data import DataError, GPTDataset, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.data.check_sums import sums_path
from lightning_megatron.data.indexed import HEADER

Damage = Callable[[bytearray, random.Random], object]


def flip(content: bytearray, dice: random.Random) -> None:
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def cut(content: bytearray, dice: random.Random) -> None:
    del content[dice.randrange(len(content)) :]


def lengthen(content: bytearray, dice: random.Random) -> None:
    content += bytes(dice.choice((0, 255, dice.randrange(256))) for _ in range(dice.choice((1, 2, 8, 20, 4096))))


def zero(content: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(content))
    content[start : start + dice.choice((1, 4, 8, 512))] = bytes(len(content[start : start + dice.choice((1, 4, 8))]))


def lose(content: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(content))
    del content[start : start + dice.choice((1, 2, 4, 8, 100))]


def repeat(content: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(content))
    content[start:start] = content[start : start + dice.choice((1, 2, 4, 8, 100))]


def swap(content: bytearray, dice: random.Random) -> None:
    size = dice.choice((2, 4, 8))
    a, b = sorted(dice.sample(range(0, len(content) - size, size), 2))
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]


def number(content: bytearray, dice: random.Random) -> None:
    at = dice.randrange(max(1, len(content) - 8))
    content[at : at + 8] = struct.pack("<q", dice.choice((-1, 0, 1, 2**31, 2**63 - 1, dice.randrange(2**40))))


def header(content: bytearray, dice: random.Random) -> None:
    at = dice.randrange(HEADER.size)
    content[at : at + 1] = bytes([dice.randrange(256)])


DAMAGES: tuple[Damage, ...] = (flip, flip, flip, cut, lengthen, zero, lose, repeat, swap, number, header)


def write_pair(prefix: Path, dtype: type, dice: random.Random) -> list[list[int]]:
    """A pair of documents with counted tokens, so that each place has a token of its own."""
    documents, at = [], 0
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for _ in range(30):
            documents.append(list(range(at, at + dice.randrange(40))))
            at += len(documents[-1])
            writer.add_document(documents[-1], [len(documents[-1])])
    return documents


def outcome_of_pair(folder: Path, seed: int, *, has_sums: bool) -> str:
    """``refused``, ``right``, or ``content`` where only the tokens whose own bytes were damaged differ.

    Args:
        folder: folder of the pair.
        seed: seed of its content and damage.
        has_sums: False for a pair of another program, without check sums.

    Raises:
        AssertionError: for anything else, with the damage.
    """
    dice = random.Random(seed)
    dtype = dice.choice((np.uint16, np.int32))
    prefix = folder / f"pair-{seed}"
    documents = write_pair(prefix, dtype, dice)
    damage, half = dice.choice(DAMAGES), dice.choice(("idx", "idx", "bin"))
    if not has_sums:
        sums_path(prefix).unlink()
    elif seed % 9 == 0:
        half = "crc"
    file = Path(f"{prefix}.{half}")
    before = file.read_bytes()
    content = bytearray(before)
    damage(content, dice)
    file.write_bytes(content)
    what = f"seed {seed}: {damage.__name__} of .{half}, {np.dtype(dtype).name}"
    try:
        dataset = IndexedDataset(prefix)
        read = [sequence.tolist() for sequence in dataset[:]]
        samples = GPTDataset(dataset, seq_length=16, cache_dir=folder / f"cache-{seed}") if seed % 5 == 0 else []
        tokens = [int(token) for sample in samples for token in sample["tokens"]]  # type: ignore[attr-defined]
    except DataError as error:
        return "refused" if f"pair-{seed}" in str(error) else f"{what}: the error names no file: {error}"
    assert all(token >= 0 for token in tokens), what
    if read == documents:
        return "right"
    if min(min(sequence, default=0) for sequence in read) < 0:  # where samples are drawn, that is an error
        return "refused"
    assert half == "bin", f"{what}: other tokens in silence"
    assert not has_sums, f"{what}: other tokens in silence"
    assert len(content) == len(before), what
    size = np.dtype(dtype).itemsize
    spoiled = {at // size for at, (a, b) in enumerate(zip(before, content, strict=True)) if a != b}
    flat = [token for sequence in read for token in sequence]
    assert all(at in spoiled or token == at for at, token in enumerate(flat)), f"{what}: other tokens are not in place"
    return "content"


TEXTS = (
    "a b c",
    "it's 12,345 \u00e9t\u00e9s",
    'two\nlines\tand "quotes" \\ slashes',
    "\U0001f600 \u4f60\u597d",
    "",
    "x" * 300,
)


def broken_line(dice: random.Random) -> bytes:
    """A line of JSON with one to three bytes changed, lost or added, and no line break in it."""
    record = {"id": dice.randrange(99), "text": dice.choice(TEXTS), "more": [1, {"text": "no"}]}
    line = bytearray(json.dumps(record, ensure_ascii=dice.random() < 0.5).encode())
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(line))
        new = bytes([dice.choice((*b'"\\{}[]:,u0 ', 0, 0xFF, 0xC3, dice.randrange(256)))])
        line[at : at + dice.randint(0, 1)] = new if dice.random() < 0.8 else b""
    return bytes(line).replace(b"\n", b"?").replace(b"\r", b"?") or b"{"


def text_of_line(line: bytes) -> str | None:
    """The text that a reader must find, by Python's JSON; ``None`` for a broken line."""
    try:
        text = json.loads(line)["text"]
        text.encode("utf-8")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return str(text)

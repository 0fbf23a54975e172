"""Training of a sentencepiece model on the user's text, without a network."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from lightning_megatron.data.preprocessing.textfiles import (
    LONGEST_LINE,
    BrokenLineError,
    Source,
    expand,
    read_lines,
    text_of,
)
from lightning_megatron.data.tokenizers import require
from lightning_megatron.errors import ConfigError, DataError, Problem
from lightning_megatron.files.growing import written_at_once

_LONGEST_LINE = 1 << 16
_SIZE_LIMIT = re.compile(r"value <= (\d+)")


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    model_type: Literal["bpe", "unigram"] = "bpe",
    json_keys: Sequence[str] = ("text",),
    byte_fallback: bool = True,
    unk_id: int = 0,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = -1,
    max_sentences: int = 1_000_000,
    seed: int = 0,
    num_threads: int = 1,
    longest_line: int = LONGEST_LINE,
) -> Path:
    """Train a model and write it in one step; the same input gives the same file.

    Args:
        inputs: files or patterns. Names with ``.json``, ``.jsonl`` or ``.ndjson`` in them, and files that begin with a
            line of JSON with one of the keys, are JSON lines, others plain text; all may be compressed.
        output: the ``.model`` file to write.
        vocab_size: tokens of the model.
        model_type: ``bpe`` as Llama 2, or ``unigram`` as T5.
        json_keys: keys of the values in JSON lines that are text.
        byte_fallback: 256 tokens for single bytes, so that no character is unknown.
        unk_id: id of the unknown token.
        bos_id: id of the begin token, ``-1`` for none.
        eos_id: id of the end token, ``-1`` for none.
        pad_id: id of the padding token, ``-1`` for none.
        max_sentences: lines to train on, drawn at random where there are more.
        seed: seed of that draw.
        num_threads: number of threads; more are faster, but for ``unigram`` may round differently.
        longest_line: bytes of a line at most.

    Returns:
        The path written.

    Raises:
        ConfigError: if the text cannot fill ``vocab_size`` tokens, or another argument cannot work.
        DataError: if a file is faulty or there is no text.
    """
    if model_type not in ("bpe", "unigram"):
        raise ConfigError([Problem("model_type", model_type, "unknown kind of model", ("bpe", "unigram"))])
    sentencepiece = require("sentencepiece", extra=None)
    files = expand(inputs)
    lines = _text_lines(files, json_keys, longest_line)
    first = next(lines, None)
    if first is None:
        named = ", ".join(map(str, files))
        raise DataError.at(named, "no text to train a tokenizer on", do="the corpus is empty: give text or JSON lines")

    faults: list[DataError] = []

    def sentences() -> Iterator[str]:
        yield first
        try:
            yield from lines
        except DataError as error:  # the trainer would hide it in one of its own
            faults.append(error)
            raise

    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=byte_fallback,
            unk_id=unk_id,
            bos_id=bos_id,
            eos_id=eos_id,
            pad_id=pad_id,
            character_coverage=0.9995 if byte_fallback else 1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _LONGEST_LINE,
            input_sentence_size=max_sentences,
            shuffle_input_sentence=True,
            num_threads=num_threads,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if faults:
            raise faults[0] from None
        raise ConfigError([_refused(vocab_size, str(error))]) from error
    target = Path(output)
    with written_at_once(target) as stream:
        stream.write(model.getvalue())
    return target


def _text_lines(files: Sequence[Path], keys: Sequence[str], longest: int) -> Iterator[str]:
    for path in files:
        is_json: bool | None = any(suffix in (".json", ".jsonl", ".ndjson") for suffix in path.suffixes) or None
        for number, line in read_lines(path, longest):
            if is_json is None:
                is_json = _is_record(line, keys)
            if is_json:
                texts = list(_values(path, number, line, keys))
            else:
                texts = [_decoded(path, number, line)]
            for text in texts:
                for piece in re.split(r"\r?\n", text):
                    # The trainer leaves out lines that are too long; in pieces they count.
                    cuts = range(0, len(piece), _LONGEST_LINE)
                    yield from (piece[i : i + _LONGEST_LINE] for i in cuts if piece.strip())


def _is_record(line: bytes, keys: Sequence[str]) -> bool:
    """True for a line of JSON that has text under the keys."""
    try:
        text_of(line, keys)
    except BrokenLineError:
        return False
    return True


def _values(path: Path, number: int, line: bytes, keys: Sequence[str]) -> Iterable[str]:
    try:
        return text_of(line, keys).values()
    except BrokenLineError as error:
        raise Source(path).at(number, error.fault, error.do) from None


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError.at(path, f"not UTF-8 ({error.reason})", line=number, do="convert the file") from None


def _refused(vocab_size: int, reason: str) -> Problem:
    """Reason why the trainer has failed, with the largest possible size if it states one."""
    limit = _SIZE_LIMIT.search(reason)
    if limit:
        text = "the text has too few different pieces for so many tokens; lower it or give more text"
        return Problem("vocab_size", vocab_size, text, (int(limit[1]),))
    return Problem("vocab_size", vocab_size, f"sentencepiece refuses: {reason.splitlines()[-1].strip()}")

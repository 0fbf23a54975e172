"""Text to token ids and back, from local files only."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_megatron.data.special_tokens import (
    SETTINGS_FILES,
    add_tokens,
    flags_of_added,
    settings_of,
    special_tokens,
)
from lightning_megatron.errors import ConfigError, DataError, Problem, how_to_install, nearest_names
from lightning_megatron.files.small import LONGEST, read_json


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer for the rest of the package. A special token that it does not have is ``None``."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one; some ids below it may have no token."""
        ...

    @property
    def eod(self) -> int | None:
        """Token that ends a document in the token files."""
        ...

    @property
    def bos(self) -> int | None:
        """Token that begins a text."""
        ...

    @property
    def eos(self) -> int | None:
        """Token that ends a text."""
        ...

    @property
    def pad(self) -> int | None:
        """Token for padding."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, without special tokens."""
        ...


class _Base:
    settings: Mapping[str, Any] = {}
    """Plain values that tokens depend on beside the vocabulary; a fingerprint has their hash."""

    def __init__(
        self,
        vocab_size: int,
        eod: int | None,
        *,
        bos: int | None = None,
        eos: int | None = None,
        pad: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eod, self.bos, self.eos, self.pad = eod, bos, eos, pad


class SentencePieceTokenizer(_Base):
    """A sentencepiece ``.model`` file; the end of a document is the model's ``</s>``.

    Args:
        model_file: the ``.model`` file.
        add_bos: put the begin token before every text, as Llama 2 was trained.
    """

    def __init__(self, model_file: str | Path, *, add_bos: bool = False) -> None:
        sentencepiece = require("sentencepiece", extra=None)
        path = _existing(model_file)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError.at(path, "not a sentencepiece model", do="give a .model file") from error
        if not self._model.vocab_size():
            raise DataError.at(path, "a sentencepiece model without pieces", do="give a .model file")
        self._add_bos, self.settings = add_bos, {"add_bos": add_bos}
        special = self._model.bos_id(), self._model.eos_id(), self._model.pad_id()
        bos, eos, pad = (i if i >= 0 else None for i in special)
        super().__init__(self._model.vocab_size(), eos, bos=bos, eos=eos, pad=pad)

    def encode(self, text: str) -> list[int]:
        """Token ids; the begin token first if ``add_bos``."""
        ids: list[int] = self._model.encode(text, add_bos=self._add_bos)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text."""
        return str(self._model.decode([int(i) for i in ids]))

    def vocabulary(self) -> dict[str, int]:
        """Ids by piece."""
        return {self._model.id_to_piece(number): number for number in range(self.vocab_size)}


_LARGEST_ID = 1 << 24
"""Our limit: the ``tokenizers`` library allocates a place for each smaller id when it writes a model."""


class FastTokenizer(_Base):
    """Tokenizer of the ``tokenizers`` library that ``file`` describes."""

    def __init__(self, backend: Any, file: Path, *, special_in_text: bool, **special: int | None) -> None:
        backend.no_truncation()  # as transformers does: a text gives all of its tokens, and no others
        backend.no_padding()
        self._backend, self._file = backend, file
        self._model = backend.model
        self._special_in_text = special_in_text
        ids = [*self.vocabulary().values(), *self.encode("")]  # tokens around a text may have other ids
        if max(ids, default=0) > _LARGEST_ID:
            raise DataError.at(file, f"has token id {max(ids)}; the largest that can be written is {_LARGEST_ID}")
        super().__init__(max(ids, default=-1) + 1, **special)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        with _told_by(self._file):
            ids: list[int] = self._backend.encode(text, add_special_tokens=self._special_in_text).ids
        return ids

    def encode_piece(self, piece: str) -> list[int]:
        """Token ids that the model gives a piece: nothing is normalized, split or added.

        Args:
            piece: the piece, as the tokenizer's steps before the model would write it.
        """
        try:  # this is called often, and a `with` takes as long as the call
            return [token.id for token in self._model.tokenize(piece)]
        except BaseException as error:
            with _told_by(self._file):
                raise error

    def encode_spans(self, text: str, spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Token ids of a text that writes its special tokens out, and a mask of those in some of its parts.

        A token belongs to a part if it holds a character of it, or some bytes of one. Where the tokenizer drops the
        first or last character of a part (white space), the part ends with the next one inside it.

        Args:
            text: the text; no special tokens are added to it.
            spans: (begin, end) of the parts, in characters.
        """
        with _told_by(self._file):
            encoding = self._backend.encode(text, add_special_tokens=False)
        inside, offsets = [False] * len(encoding.ids), encoding.offsets
        for begin, end in spans:
            first = next(_tokens_at(encoding, range(begin, end)), None)
            last = next(_tokens_at(encoding, range(end - 1, begin - 1, -1)), None)
            if first is not None and last is not None:
                while last + 1 < len(offsets) and offsets[last + 1][0] < min(end, offsets[last + 1][1]):
                    last += 1  # further tokens of the last character
                inside[first : last + 1] = [True] * (last + 1 - first)
        return encoding.ids, inside

    def decode_whole(self, ids: Iterable[int]) -> str:
        """The text, with special tokens."""
        with _told_by(self._file):
            return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """The text, without special tokens."""
        with _told_by(self._file):
            return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def description(self) -> dict[str, Any]:
        """Content of its ``tokenizer.json``."""
        content: dict[str, Any] = json.loads(self._backend.to_str())
        return content

    def vocabulary(self) -> dict[str, int]:
        """Ids by piece, those of added tokens too."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found


def _tokens_at(encoding: Any, characters: Iterable[int]) -> Iterator[int]:
    """Numbers of the tokens of some characters; those without a token are left out."""
    return (token for token in map(encoding.char_to_token, characters) if token is not None)


@contextmanager
def _told_by(file: Path, fault: str = "the tokenizer that it describes fails") -> Iterator[None]:
    """Name the file in errors of the library: it raises bare ``Exception``, or a Rust panic, a ``BaseException``."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError.at(file, f"{fault} ({error})") from None
        raise


class HuggingFaceTokenizer(FastTokenizer):
    """A Hugging Face tokenizer on this disk; never from a hub.

    Texts get the special tokens that the tokenizer itself adds (Llama 3: the begin token). The end of a document is
    its end token.

    Args:
        path: a directory with ``tokenizer.json``, or that file.

    Attributes:
        special_tokens: special tokens by name, such as ``eos_token``.
    """

    def __init__(self, path: str | Path) -> None:
        tokenizers = require("tokenizers", extra="data")
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        do = "only local files are read: give a directory with tokenizer.json (save_pretrained writes one)"
        _existing(file, do)
        with _told_by(file, "not a tokenizer file"):
            _refuse_cut_table(read_json(file))
            backend = tokenizers.Tokenizer.from_file(str(file))
        beside, older = (file.with_name(name) for name in SETTINGS_FILES)
        settings = settings_of(beside)
        if "added_tokens_decoder" not in settings:  # of an old version, whose file of special tokens counts
            settings |= settings_of(older)
        with _told_by(beside, "not the settings of a tokenizer"):
            add_tokens(backend, settings, tokenizers.AddedToken)
        self.special_tokens = special_tokens(settings)
        self.settings = {"special_tokens": self.special_tokens, "added_tokens": flags_of_added(backend)}
        ids = {name: backend.token_to_id(token) for name, token in self.special_tokens.items()}
        bos, eos, pad = (ids.get(name) for name in ("bos_token", "eos_token", "pad_token"))
        super().__init__(backend, file, special_in_text=True, bos=bos, eos=eos, pad=pad, eod=eos)


class GPT2BPETokenizer(FastTokenizer):
    """GPT-2's byte-level BPE; documents end with ``<|endoftext|>``.

    Args:
        vocab_file: ``vocab.json``.
        merge_file: ``merges.txt``.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        tokenizers = require("tokenizers", extra="data")
        vocab, merges = _existing(vocab_file), _existing(merge_file)
        with _told_by(vocab, f"not a BPE vocabulary, or {merges} does not belong to it"):
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        eod = backend.token_to_id("<|endoftext|>")
        if eod is None:
            raise DataError.at(vocab, "has no <|endoftext|>", do="give GPT-2's vocab.json, or add that token")
        self.settings = {"merges": merges.read_text(encoding="utf-8")}
        super().__init__(backend, vocab, special_in_text=False, bos=eod, eos=eod, eod=eod)


class BertWordPieceTokenizer(FastTokenizer):
    """BERT's word pieces; ``bos`` is [CLS], ``eos`` and ``eod`` are [SEP]. Texts get neither.

    Args:
        vocab_file: ``vocab.txt``, one piece a line.
        lower_case: fold case and strip accents, for the uncased vocabularies.

    Attributes:
        mask: token that replaces a token to predict; ``None`` in a vocabulary without [MASK].
        pieces: ids by piece; one that continues a word begins with ``##``.
    """

    def __init__(self, vocab_file: str | Path, *, lower_case: bool) -> None:
        tokenizers = require("tokenizers", extra="data")
        vocab = _existing(vocab_file)
        with _told_by(vocab, "not BERT's vocab.txt, one piece a line"):
            pieces = tokenizers.models.WordPiece.read_file(str(vocab))  # it knows where a line ends, and a piece
        missing = [piece for piece in ("[UNK]", "[CLS]", "[SEP]", "[PAD]") if piece not in pieces]
        if missing:
            raise DataError.at(vocab, f"has no {', '.join(missing)}", do="give BERT's vocab.txt, one piece a line")
        backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[UNK]"))
        backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        backend.decoder = tokenizers.decoders.WordPiece()
        self.mask, self.pieces, self.settings = pieces.get("[MASK]"), pieces, {"lower_case": lower_case}
        bos, eos, pad = pieces["[CLS]"], pieces["[SEP]"], pieces["[PAD]"]
        super().__init__(backend, vocab, special_in_text=False, bos=bos, eos=eos, pad=pad, eod=eos)


class NullTokenizer(_Base):
    """Tokenizer of texts that are token ids, separated by spaces; the end of a document is one id above the vocabulary.

    Args:
        vocab_size: ids are below this.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError([Problem("vocab_size", vocab_size, "a vocabulary has at least 1 token")])
        super().__init__(vocab_size + 1, eod=vocab_size)
        self._given = vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids in the text.

        Raises:
            DataError: if it contains something else, or an id outside of the vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads token ids separated by spaces ({error})") from None
        bad = [i for i in ids if not 0 <= i < self._given]
        if bad:
            raise DataError(f"token id {bad[0]} is not in a vocabulary of {self._given}, whose ids are below that")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)


_BESIDE = {
    **dict.fromkeys(("GPTSentencePieceTokenizer", "Llama2Tokenizer"), ("tokenizer.model",)),
    "HuggingFaceTokenizer": ("tokenizer.json",),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), ("vocab.txt",)),
    "NullTokenizer": (),
}
"""Default file names of each tokenizer type."""

TOKENIZER_TYPES = tuple(_BESIDE)


def build_tokenizer(
    type: str,
    path: str | Path | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Build a tokenizer by Megatron-LM's name for it.

    Args:
        type: name in ``TOKENIZER_TYPES``.
        path: sentencepiece model, Hugging Face directory, or a directory with ``vocab.json`` and ``merges.txt``
            (GPT-2) or ``vocab.txt`` (BERT).
        vocab_file: vocabulary of GPT-2 or BERT, if not in ``path``.
        merge_file: merges of GPT-2, if not in ``path``.
        vocab_size: size of the vocabulary, for ``NullTokenizer``.

    Raises:
        ConfigError: if the type is unknown or lacks an argument.
        DataError: if a file is missing or is something else.
        ModuleNotFoundError: if an optional package is not installed; the text says what to install.
    """

    def need(argument: str, value: Any, what: str) -> Any:
        if value is None:
            raise ConfigError([Problem(argument, None, f"{type} needs {what}")])
        return value

    def inside(name: str) -> Path | None:
        return None if path is None else Path(path) / name

    if type in ("GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        model = need("tokenizer_model", path, "a sentencepiece model file, named or as tokenizer.model beside the data")
        return SentencePieceTokenizer(model, add_bos=type == "Llama2Tokenizer")
    if type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(need("tokenizer_model", path, "a directory with tokenizer.json"))
    if type == "GPT2BPETokenizer":
        vocab = need("vocab_file", vocab_file or inside("vocab.json"), "vocab.json")
        return GPT2BPETokenizer(vocab, need("merge_file", merge_file or inside("merges.txt"), "merges.txt"))
    if type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        # Megatron takes BERT's file as a vocabulary, others as the model: a plain file is both.
        given = vocab_file or (path if path is not None and Path(path).is_file() else inside("vocab.txt"))
        return BertWordPieceTokenizer(
            need("vocab_file", given, "vocab.txt"), lower_case=type == "BertWordPieceLowerCase"
        )
    if type == "NullTokenizer":
        return NullTokenizer(need("vocab_size", vocab_size, "the number of tokens"))
    reason = f"unknown type; known are {', '.join(TOKENIZER_TYPES)}"
    raise ConfigError([Problem("tokenizer_type", type, reason, nearest_names(type, TOKENIZER_TYPES))])


def tokenizer_beside(type: str, folder: str | Path) -> Path | None:
    """Path of a tokenizer in the folder of its data, for :func:`build_tokenizer`; ``None`` if there is none.

    Args:
        type: name in ``TOKENIZER_TYPES``.
        folder: folder of the token files.
    """
    names = _BESIDE.get(type, ())
    if not names or not all((Path(folder) / name).is_file() for name in names):
        return None
    return Path(folder, *names) if names == ("tokenizer.model",) else Path(folder)


def require(package: str, *, extra: str | None) -> Any:
    """Import an optional package.

    Raises:
        ModuleNotFoundError: with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        command = f"pip install {package}" if extra is None else how_to_install(extra)
        raise ModuleNotFoundError(f"{package} is not installed: {command}", name=package) from error


def _existing(path: str | Path, do: str = "check the path") -> Path:
    if not Path(path).is_file():
        raise DataError.at(path, "no such file", do=do)
    if (size := Path(path).stat().st_size) > LONGEST:
        raise DataError.at(path, f"{size} bytes, and no tokenizer's file is longer than {LONGEST}", do=do)
    return Path(path)


def _refuse_cut_table(content: Any) -> None:
    """Raise if the table of a precompiled normalizer is truncated, since the library would abort the process.

    Raises:
        ValueError: naming it.
    """
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and value.get("type") == "Precompiled":
            table = base64.b64decode(str(value.get("precompiled_charsmap") or ""))
            if table and int.from_bytes(table[:4], "little") > len(table) - 4:
                raise ValueError("the table of its normalizer is cut off")
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

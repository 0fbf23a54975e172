"""Chats of a file as token ids with loss masks, tokenized once and kept beside the file."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.cache import Arrays, cached_arrays, mapped_files, picklable, unpickled
from lightning_megatron.data.chat.conversation import ChatError, Conversation, read_conversations
from lightning_megatron.data.chat.template import ChatTemplate
from lightning_megatron.data.tokenizers import HuggingFaceTokenizer
from lightning_megatron.errors import DataError

_NAMES = ("tokens", "is_answer", "ends", "lines", "learnt")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class ChatEncoder:
    """Template and tokenizer, which together turn conversations into tokens.

    Attributes:
        template: the template.
        tokenizer: the tokenizer.
        description: plain values that differ where the tokens of any conversation may differ.
    """

    template: ChatTemplate
    tokenizer: HuggingFaceTokenizer
    description: Mapping[str, Any]

    @property
    def end_token_id(self) -> int | None:
        """Token that ends an answer; ``None`` where the template lets the assistant write none."""
        messages = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
        try:
            rendered = self.template.render(Conversation(messages))
        except ChatError:
            return None
        begin, end = rendered.spans[-1]
        return self.tokenizer.vocabulary().get(rendered.text[begin:end].rpartition("answer")[2].strip())


class EncodedChats:
    """Token ids of the conversations of one file, with the tokens that the assistant has written.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, arrays: Arrays) -> None:
        self.path = path
        self._tokens, self._is_answer, self._ends, self._lines, self._learnt = (arrays[name] for name in _NAMES)
        self._mapped = mapped_files(arrays.values())

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation."""
        return np.diff(self._ends, prepend=0)

    def line(self, number: int) -> int:
        """One-based line of a conversation."""
        return int(self._lines[number])

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Token ids of a conversation."""
        return self._tokens[self._span(number)].astype(np.int64)

    def is_answer(self, number: int) -> NDArray[np.bool_]:
        """True for each token of a conversation that the assistant has written."""
        return self._is_answer[self._span(number)].astype(np.bool_)

    def learnt(self, longest: int) -> NDArray[np.int64]:
        """Number of tokens to learn in the first ``longest`` tokens of each conversation.

        The first token of a conversation does not count, since nothing predicts it.
        """
        found = np.array(self._learnt)
        for number in np.flatnonzero(self.lengths > longest).tolist():
            found[number] = self.is_answer(number)[1:longest].sum()
        return found

    def _span(self, number: int) -> slice:
        self._mapped.check()
        return slice(int(self._ends[number - 1]) if number else 0, int(self._ends[number]))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "arrays": {name: picklable(getattr(self, f"_{name}")) for name in _NAMES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        EncodedChats.__init__(self, state["path"], {name: unpickled(a) for name, a in state["arrays"].items()})


def encoded_chats(path: Path, encoder: ChatEncoder, cache_dir: Path | None, digest: str) -> EncodedChats:
    """Tokens of the conversations of a file; from the cache if file, template and tokenizer have not changed.

    Args:
        encoder: template and tokenizer.
        cache_dir: folder of the cache; ``None`` for one beside the file.
        digest: hash of the file.

    Raises:
        DataError: naming file and line of the first conversation that cannot be used.
    """
    description = {"class": "EncodedChats", "answers": "by overlap", "file": digest, **encoder.description}
    beside = path.parent / "cache" / "chats"
    arrays = cached_arrays(cache_dir, beside, "chats", _NAMES, description, lambda: _encode(path, encoder))
    return EncodedChats(path, arrays)


def file_digest(path: Path) -> str:
    """Hash of a whole file.

    Raises:
        DataError: if it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DataError.at(path, f"cannot be read ({error.strerror or error})", do="check the path") from None
    return digest.hexdigest()


def _encode(path: Path, encoder: ChatEncoder) -> Arrays:
    tokens, is_answer = array("i"), bytearray()
    ends, lines, learnt = array("q"), array("q"), array("q")
    for chat in read_conversations(path):
        try:
            rendered = encoder.template.render(chat)
        except ChatError as fault:
            raise fault.at(path, chat.line) from None
        ids, answer = encoder.tokenizer.encode_spans(rendered.text, rendered.spans)
        if not (count := sum(answer[1:])):
            do = "check the chat template and the tokenizer"
            raise DataError.at(path, "no token of it is the assistant's", line=chat.line, do=do)
        tokens.extend(ids)
        is_answer.extend(answer)
        ends.append(len(tokens))
        lines.append(chat.line)
        learnt.append(count)
    dtype = np.uint16 if encoder.tokenizer.vocab_size <= 1 << 16 else np.int32
    return {
        "tokens": np.frombuffer(tokens, np.intc).astype(dtype),
        "is_answer": np.frombuffer(is_answer, np.uint8),
        "ends": np.frombuffer(ends, np.int64),
        "lines": np.frombuffer(lines, np.int64),
        "learnt": np.frombuffer(learnt, np.int64),
    }

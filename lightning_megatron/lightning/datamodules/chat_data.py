"""Data module of chats for fine-tuning."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_megatron.arguments import Check, at_least, checked, within
from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.build import Blend, parse_data_path
from lightning_megatron.data.chat.conversation import ChatError, read_conversations
from lightning_megatron.data.chat.encoded import ChatEncoder, EncodedChats, encoded_chats, file_digest
from lightning_megatron.data.chat.packed import PackedChats, Packing
from lightning_megatron.data.chat.selection import LengthRule, Numbers, held_out
from lightning_megatron.data.chat.sources import chat_template
from lightning_megatron.data.fingerprint import Fingerprint, tokenizer_fingerprint
from lightning_megatron.data.tokenizers import HuggingFaceTokenizer
from lightning_megatron.errors import ConfigError, DataError, Problem, problems_of
from lightning_megatron.lightning.datamodules.datamodule import MegatronDataModule
from lightning_megatron.lightning.modules.token_mean import LossReduction
from lightning_megatron.lightning.pretrained.tuned_chat import CHAT

PathLike = str | os.PathLike[str]
ChatFiles = PathLike | Sequence[PathLike | float | Sequence[PathLike | float]]
"""A file, a list of files, or a list of (weight, file)."""

CHAT_NAMES = {
    "micro_batch_size": "it is an argument of the strategy",
    "data_path": "files",
    "train_files": "files",
    "max_length": "seq_length",
    "max_seq_length": "seq_length",
    "template": "chat_template",
    "tokenizer_model": "tokenizer",
    "val_split": "val_share",
    "valid_files": "val_files",
}
"""Arguments of the data module, or advice, by names that other programs use."""


def parse_files(files: ChatFiles, argument: str = "files") -> Blend:
    """Files with their weights, if any have been given.

    Raises:
        ConfigError: if these are neither files nor pairs of weight and file.
    """
    if isinstance(files, (str, os.PathLike)):
        return Blend((os.fspath(files),), None)
    pairs = [item for item in files if isinstance(item, (list, tuple))]
    flat: list[Any] = list(chain.from_iterable(pairs)) if pairs else list(files)
    if any(isinstance(item, (int, float)) and not 0 < item < math.inf for item in flat):
        raise ConfigError([Problem(argument, list(files), "every weight must be a positive number")])
    if not pairs or (len(pairs) == len(files) and all(len(pair) == 2 for pair in pairs)):
        with suppress(ConfigError):  # reported below, in terms of pairs
            parsed = parse_data_path(flat, argument)
            if parsed.weights is not None or not pairs:
                return parsed
    shape = "a file, a list of files, or a list of (weight, file)"
    raise ConfigError([Problem(argument, list(files), f"is not {shape}")])


def _files(argument: str) -> Check:
    return Check(lambda files: [] if files is None else problems_of(parse_files, files, argument))


class ChatDataModule(MegatronDataModule):
    """Conversations for fine-tuning, packed into rows, with a loss on the assistant's tokens only.

    Files hold JSON lines of ``{"messages": [{"role": ..., "content": ...}, ...]}`` or ``{"prompt": ..., "completion":
    ...}``, which is a question and its answer. The chat template makes text of them and marks the assistant's part, as
    ``apply_chat_template(return_assistant_tokens_mask=True)`` of transformers does. Conversations are packed into rows
    of ``seq_length`` tokens, as full as possible; ``segment_ids`` of a batch keep them apart.

    Each epoch reads all rows in an order of its own. The last batch has what is left; where that does not divide by
    the replicas, some rows come twice, fewer than there are replicas. Rows and orders do not depend on the layout, and
    a checkpoint in mid-epoch resumes at the next row with any number of replicas. Tokens and rows are kept in a cache.

    Attributes:
        loss_reduction: kind of mean that modules use by default: over tokens, since rows differ in trained tokens.

    Args:
        files: training data: a file, a list of files, or a list of (weight, file). Weights are the shares of the
            conversations that are drawn from each file: the file with the least weight for its size is read once per
            epoch, and conversations of the others are repeated.
        tokenizer: directory with ``tokenizer.json``, as Hugging Face models have.
        seq_length: tokens of a row.
        batch_size: rows of one batch of one data-parallel replica.
        chat_template: name of a built-in template (``"chatml"``, ``"llama3"``, ``"mistral"``, ``"gemma"``,
            ``"zephyr"``, ``"phi3"``), a ``.jinja`` file, or Jinja text; ``None`` for the tokenizer's own. It must have
            ``{% generation %}`` marks.
        template_variables: further variables of the template, such as ``{"date_string": "26 Jul 2024"}``.
        too_long: treatment of conversations longer than a row: ``"error"``, ``"cut"`` at the end of the row, or
            ``"drop"``. Their number is logged when training starts.
        val_files: validation data, as ``files``.
        val_share: share of the conversations of ``files`` that is kept for validation, drawn with ``seed``.
        test_files: test data, as ``files``.
        seed: seed of draws and orders.
        num_workers: number of processes that load rows.
        cache_dir: directory of tokens and rows; ``None`` means ``cache/chats`` beside each file.
        allow_other_data: let ``fit`` resume a checkpoint that was trained on other data; it skips as many rows as were
            consumed.

    Raises:
        ConfigError: for arguments that cannot work.
        DataError: for files of the tokenizer that cannot be read.
    """

    loss_reduction: ClassVar[LossReduction] = "token"

    @checked(
        CHAT_NAMES,
        files=_files("files"),
        val_files=_files("val_files"),
        test_files=_files("test_files"),
        seq_length=at_least(2),
        batch_size=at_least(1),
        val_share=within(0.0, 1.0),
        num_workers=at_least(0),
        seed=at_least(0),
    )
    def __init__(
        self,
        files: ChatFiles,
        tokenizer: PathLike,
        seq_length: int,
        batch_size: int = 1,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        too_long: Literal["error", "cut", "drop"] = "error",
        val_files: ChatFiles | None = None,
        val_share: float = 0.0,
        test_files: ChatFiles | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: PathLike | None = None,
        allow_other_data: bool = False,
    ) -> None:
        given = {"files": files, "val_files": val_files, "test_files": test_files}
        self.blends = {name: parse_files(value, name) for name, value in given.items() if value is not None}
        self.rule, self.val_share = LengthRule(seq_length, too_long), val_share
        super().__init__(
            list(self.blends["files"].prefixes),
            seq_length,
            batch_size,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=tokenizer,
            allow_other_data=allow_other_data,
        )
        self.encoder = self._encoder(Path(tokenizer), chat_template, template_variables)
        self._digests: dict[str, str] = {}

    def _problems(self) -> list[Problem]:
        if self.val_share and "val_files" in self.blends:
            reason = "validation data have files of their own: give one of val_share and val_files"
            return [Problem("val_share", self.val_share, reason, (0.0,))]
        return []

    def _encoder(self, directory: Path, given: str | None, variables: Mapping[str, Any] | None) -> ChatEncoder:
        tokenizer = self.tokenizer
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        template = chat_template(given, directory if directory.is_dir() else directory.parent, tokenizer, variables)
        text = hashlib.blake2b(template.source.text.encode(), digest_size=16).hexdigest()
        described = {"chat_template": text, "template_variables": template.variables}
        return ChatEncoder(template, tokenizer, {**described, "tokenizer": tokenizer_fingerprint(tokenizer, directory)})

    @property
    def packs_documents(self) -> bool:
        """True: a row holds as many conversations as fit."""
        return True

    def data_problems(self) -> list[Problem]:
        """Files that cannot be read, and faults of the first conversation of each; found before processes start."""
        found = []
        for argument, blend in self.blends.items():
            for name in dict.fromkeys(blend.prefixes):
                try:
                    self._check_first(Path(name))
                except DataError as error:
                    fault = str(error).removeprefix(f"{name}: ").removeprefix(f"{name}, ")
                    found.append(Problem(argument, name, fault))
        return found

    def _check_first(self, path: Path) -> None:
        if not path.is_file():
            raise DataError.at(path, "no such file")
        chat = next(read_conversations(path))
        try:
            self.encoder.template.render(chat)
        except ChatError as fault:
            raise fault.at(path, chat.line) from None

    def setup(self, stage: str) -> None:
        """Open the rows, and log how full they are and what has been left out."""
        super().setup(stage)
        for name, rows in zip(("training", "validation", "test"), self._datasets, strict=True):
            if isinstance(rows, PackedChats):
                rank_zero_info(f"{name} data: {rows.report}")

    @property
    def _paths(self) -> dict[str, Any]:
        return {}  # files are whole, and have no split

    _samples_wanted = None  # an epoch reads all rows of the files

    def _build(self) -> tuple[Any, ...]:
        train = self._encoded("files")
        shares = [held_out(len(chats), self.val_share, self.seed) for chats in train]
        rows = self._rows("files", train, [kept for kept, _ in shares])
        if self.val_share:
            held: PackedChats | None = self._rows("files", train, [out for _, out in shares], weighted=False)
        else:
            held = self._whole("val_files")
        return rows, held, self._whole("test_files")

    def _encoded(self, argument: str) -> list[EncodedChats]:
        cache = None if self.cache_dir is None else Path(self.cache_dir)
        files = self.blends[argument].prefixes
        return [encoded_chats(Path(file), self.encoder, cache, self._digest(file)) for file in files]

    def _digest(self, file: str) -> str:
        if file not in self._digests:
            self._digests[file] = file_digest(Path(file))
        return self._digests[file]

    def _whole(self, argument: str) -> PackedChats | None:
        if argument not in self.blends:
            return None
        chats = self._encoded(argument)
        return self._rows(argument, chats, [held_out(len(one), 0.0, self.seed)[0] for one in chats])

    def _rows(
        self, argument: str, chats: Sequence[EncodedChats], numbers: Sequence[Numbers], *, weighted: bool = True
    ) -> PackedChats:
        assert self.tokenizer is not None
        weights = self.blends[argument].weights if weighted else None
        cache = None if self.cache_dir is None else Path(self.cache_dir)
        pad = self.tokenizer.pad if self.tokenizer.pad is not None else 0
        rows = PackedChats(chats, numbers, Packing(self.rule, weights, self.seed, pad, cache))
        if not len(rows):
            report = rows.report
            fault = f"no conversation is left ({report.dropped} too long, {report.unanswered} without an answer if cut)"
            raise DataError.at(self.blends[argument].prefixes[0], fault, do="raise seq_length")
        return rows

    def _loader(self, dataset: Any, samples: int | None = None, ramp: BatchRamp | None = None) -> Any:
        if dataset is None:
            return []
        return self._reading(dataset, shuffle=True, seed=self.seed, drop_last=False, fill="even")

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the training data: equal for two runs that read the same rows in the same order."""
        if self._fingerprint is None:
            blend = self.blends["files"]
            self._fingerprint = {
                "files": [self._digest(file) for file in blend.prefixes],
                "weights": None if blend.weights is None else list(blend.weights),
                "val_share": self.val_share,
                "seq_length": self.seq_length,
                "too_long": self.rule.too_long,
                "seed": self.seed,
                **self.encoder.description,
            }
        return self._fingerprint

    def facts(self) -> dict[str, Any]:
        """Everything that rows depend on, which must be equal on all ranks of a job."""
        try:
            read: Any = self.fingerprint
            held = {name: [self._digest(file) for file in blend.prefixes] for name, blend in self.blends.items()}
        except (OSError, DataError) as error:
            read, held = f"cannot be read: {type(error).__name__}", {}
        return {"batch_size": self.batch_size, "fingerprint": read, **held}

    def state_dict(self) -> dict[str, Any]:
        """That of every data module, and what an export needs to chat as in training."""
        state = super().state_dict()
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        text = self.encoder.template.text_beside(self.tokenizer.special_tokens)
        return state and {**state, CHAT: {"template": text, "end_token_id": self.encoder.end_token_id}}

    def rows(self, stage: Literal["train", "val", "test"] = "train") -> PackedChats | None:
        """Rows of a split, as data; ``None`` if there is no such split."""
        found: PackedChats | None = self._build()[("train", "val", "test").index(stage)]
        return found

    def example_batch(self, rows: int) -> dict[str, Tensor]:
        """A batch of ``rows`` rows with the shapes of real ones, each of one document."""
        ids = torch.zeros(rows, self.seq_length, dtype=torch.long)
        ones = torch.ones_like(ids)
        return {"tokens": ids, "labels": ids.clone(), "loss_mask": ones.float(), "segment_ids": ones}

"""The work of ``lightning-megatron evaluate``, in a module of its own because it imports torch and Lightning."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.data.preprocessing.textfiles import expand
from lightning_megatron.data.tokenizers import Tokenizer, require
from lightning_megatron.errors import DataError, Problem, raise_if_any
from lightning_megatron.tools.cli.common import below_one
from lightning_megatron.tools.cli.data.tokenizer_options import tokenizer_for
from lightning_megatron.tools.evaluation.corpora import Reader
from lightning_megatron.tools.evaluation.perplexity import Cloze, Perplexity, cloze, perplexity
from lightning_megatron.tools.evaluation.ranks import Ranks, Spread, check_decoder, on_ranks

_LONGEST = 2048
"""Default limit for the tokens of a window: rotary models allow more positions than fit into memory."""

_OF_SPREAD = ("tp", "pp", "cp", "ep", "etp", "device", "devices", "num_nodes", "precision", "batch_size")


@dataclass(frozen=True)
class _Job:
    """All that is evaluated.

    Attributes:
        files: the files.
        reader: reader of the files.
        tokenizer: tokenizer of the model.
        length: tokens of a window.
        stride: tokens by which windows are shifted.
        tasks: names of lm-eval's tasks.
        task_options: further settings of lm-eval.
    """

    files: Sequence[Path]
    reader: Reader
    tokenizer: Tokenizer
    length: int
    stride: int
    tasks: Sequence[str]
    task_options: Mapping[str, Any]

    def __call__(self, ranks: Ranks) -> _Report:
        """The work of all ranks."""
        files = {str(path): self._of_file(ranks, path) for path in self.files}
        return _Report(files, self._of_tasks(ranks) if self.tasks else {})

    def _of_file(self, ranks: Ranks, path: Path) -> Perplexity | Cloze:
        texts = self.reader.read(path, self.tokenizer, ranks.config.vocab_size)
        if self.reader.format == "lambada":
            return cloze(ranks, texts, self.length)
        found = perplexity(ranks, texts, self.length, self.stride)
        if not found.tokens:
            raise DataError.at(path, "no text in it has two tokens", do="add --begin, or check --input")
        return found

    def _of_tasks(self, ranks: Ranks) -> Mapping[str, Any]:
        from lightning_megatron.tools.evaluation.harness import task_results  # imports lm-eval, which may be missing

        return task_results(ranks, self.tokenizer, self.length, self.tasks, **self.task_options)


@dataclass(frozen=True)
class _Report:
    """Results, of each file and of each task.

    Attributes:
        files: results by the name of the file.
        tasks: lm-eval's results by the name of the task.
    """

    files: Mapping[str, Perplexity | Cloze]
    tasks: Mapping[str, Any]

    def as_json(self) -> str:
        """Everything, with all digits."""
        files = {name: {k: getattr(found, k) for k in _numbers_of(found)} for name, found in self.files.items()}
        return json.dumps({"files": files, "tasks": self.tasks}, indent=1, default=str)

    def __str__(self) -> str:
        lines = [f"{name}: {_told(found)}" for name, found in self.files.items()]
        for name, metrics in self.tasks.items():
            shown = {key.removesuffix(",none"): x for key, x in metrics.items() if isinstance(x, int | float)}
            lines.append(f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in shown.items()))
        return "\n".join(lines)


def evaluated(args: argparse.Namespace) -> str | None:
    """Text that the command prints; ``None`` in a process that the first one has started."""
    config = check_decoder(args.checkpoint)
    raise_if_any(_problems(args, config))
    tokenizer = tokenizer_for(args)
    reader = Reader(args.format, args.json_keys, args.begin, args.strict_lambada, args.longest_line)
    files = expand(args.input or ())
    for path in files:
        reader.check(path)
    if args.lm_eval:
        require("lm_eval", extra="eval")
    length = _length(args, config)
    tasks = [name.strip() for name in (args.lm_eval or "").split(",") if name.strip()]
    options = {"path": args.lm_eval_path, "num_fewshot": args.num_fewshot, "limit": args.limit}
    job = _Job(files, reader, tokenizer, length, args.overlapping_eval or length, tasks, options)
    spread = Spread(**{name: getattr(args, name) for name in _OF_SPREAD})
    report = on_ranks(spread.trainer(), args.checkpoint, job)
    if report is None:
        return None
    return report.as_json() if args.json else str(report)


def _length(args: argparse.Namespace, config: TransformerConfig | None) -> int:
    return int(args.seq_length or min(_LONGEST, config.max_position_embeddings if config else _LONGEST))


def _problems(args: argparse.Namespace, config: TransformerConfig | None) -> list[Problem]:
    """Faults of the arguments that no other part checks."""
    found = []
    if not (args.input or args.lm_eval):
        found.append(Problem("--input", None, "name files, or tasks with --lm-eval"))
    found += below_one(args, "seq_length", "overlapping_eval", "devices", "limit")
    length = _length(args, config)
    if config is not None and config.position_embedding == "learned" and length > config.max_position_embeddings:
        longest = config.max_position_embeddings
        found.append(Problem("--seq-length", length, f"the model knows {longest} positions", (longest,)))
    if args.overlapping_eval is not None and args.overlapping_eval > length:
        reason = f"windows of {length} tokens that are shifted by more leave some out"
        found.append(Problem("--overlapping-eval", args.overlapping_eval, reason, (length,)))
    return found


def _numbers_of(found: Perplexity | Cloze) -> Sequence[str]:
    if isinstance(found, Cloze):
        return "passages", "correct", "accuracy", "perplexity"
    own = "texts", "tokens", "words", "num_bytes", "loss", "perplexity", "bits_per_byte"
    return *own, "token_ratio", "word_perplexity"


def _told(found: Perplexity | Cloze) -> str:
    if isinstance(found, Cloze):
        return (
            f"{found.correct} of {found.passages} passages right, accuracy {found.accuracy:.4f}, "
            f"perplexity {found.perplexity:.6g}"
        )
    return (
        f"{found.tokens} tokens, loss {found.loss:.6f}, perplexity {found.perplexity:.6g}, "
        f"{found.bits_per_byte:.6f} bits per byte; by words (x {found.token_ratio:.4f}) {found.word_perplexity:.6g}"
    )

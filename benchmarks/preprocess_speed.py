"""Documents per second of ``preprocess``, against Megatron-LM's method: one tokenizer call per document in a pool.

    python benchmarks/preprocess_speed.py [--workers 2] [--megabytes 40] [--rounds 3] [--only speed memory]

Megatron's method here: a pool whose workers parse a line, call the tokenizer for its text and send back the ids as a
list, 32 lines a task; one process writes. Both read the same file with the same tokenizer (a byte-level BPE of 32,000
tokens with GPT-2's rule, by the ``tokenizers`` library, trained here) and the same number of workers, and must write
the same bytes. The corpora: "docstrings" are those of the standard library and of installed packages, one document for
each module, English with code in it; "words" are synthetic sentences with word frequencies by Zipf's law. Methods take
turns, each round a whole run with the start of its processes: wall seconds, and CPU seconds of all processes.

Memory: peak resident memory of the largest process, for 10^4, 10^5 and 10^6 documents of a few words.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.indexed import optimal_dtype
from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess

VOCABULARY = 32_000
_tokenizer: Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=40, help="of each corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["speed", "memory"], choices=["speed", "memory"])
    parser.add_argument("--folder", type=Path, help="where corpora stay (default: a temporary folder)")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return one_run(*args.run)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        docstrings = write_once(folder / f"docstrings-{args.megabytes}.jsonl", docstring_texts(), args.megabytes)
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.exists():
            train(docstrings, tokenizer)
        if "speed" in args.only:
            words = write_once(folder / f"words-{args.megabytes}.jsonl", word_texts(), args.megabytes)
            for corpus in (docstrings, words):
                compare(corpus, tokenizer, args.workers, args.rounds)
        if "memory" in args.only:
            for method, parts in (("ours", 1), ("ours", 4)):
                print(f"memory of {method}, {parts} partition(s):", *memory(folder, tokenizer, args.workers, parts))
    return None


def docstring_texts() -> Iterator[str]:
    """The docstrings of modules, one text a module."""
    paths = sysconfig.get_paths()
    files = sorted({*Path(paths["stdlib"]).rglob("*.py"), *Path(paths["purelib"]).rglob("*.py")})
    random.Random(0).shuffle(files)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for file in files:
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (ValueError, SyntaxError, OSError, RecursionError):
            continue
        found = [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
        if sum(map(len, found)) > 200:
            yield "\n\n".join(found)


def word_texts() -> Iterator[str]:
    """Texts of words, of which the k-th most frequent is drawn about 1/k as often as the first (Zipf's law)."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(letters[rng.integers(0, 26, rng.integers(2, 11))]) for _ in range(60_000)]
    chances = 1 / np.arange(3, len(words) + 3)
    chances /= chances.sum()
    ends = (". ", ", ", "; ", "? ", ".\n\n", ".\n")
    while True:
        drawn = rng.choice(len(words), 40_000, p=chances)
        for text in np.array_split(drawn, 80):
            parts = []
            for sentence in np.array_split(text, 35):
                line = " ".join(words[number] for number in sentence)
                parts.append(line.capitalize() + ends[int(rng.integers(0, len(ends)))])
            yield "".join(parts).strip()


def write_once(path: Path, texts: Iterator[str], megabytes: int) -> Path:
    if path.exists():
        return path
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            size += file.write(
                json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"
            )
            if size > megabytes * 10**6:
                break
    return path


def train(corpus: Path, target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
    made.train_from_iterator(texts, trainer)
    made.save(str(target))
    (target.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def start(file: str) -> None:
    global _tokenizer
    from tokenizers import Tokenizer

    _tokenizer = Tokenizer.from_file(file)


def encode(line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
    text = json.loads(line)["text"]
    ids = list(_tokenizer.encode(text).ids)
    if ids:
        ids.append(0)
    return {"text": ids}, {"text": [len(ids)] if ids else []}, len(line)


def megatron_method(corpus: str, prefix: str, tokenizer: str, workers: int) -> None:
    with (
        IndexedDatasetWriter(f"{prefix}_text_document", optimal_dtype(VOCABULARY)) as writer,
        multiprocessing.get_context("fork").Pool(workers, start, (tokenizer,)) as pool,
        open(corpus, encoding="utf-8") as lines,
    ):
        for found, lengths, _ in pool.imap(encode, lines, 32):
            for key, ids in found.items():
                writer.add_document(np.array(ids, writer.dtype), lengths[key])


def one_run(method: str, corpus: str, prefix: str, tokenizer: str, workers: str) -> None:
    begun = time.perf_counter()
    name, _, parts = method.partition("-")
    if name == "megatron":
        megatron_method(corpus, prefix, tokenizer, int(workers))
    else:
        spec = TokenizerSpec("HuggingFaceTokenizer", tokenizer)
        options = {"workers": int(workers), "partitions": int(parts or 1), "append_eod": True}
        preprocess([corpus], prefix, spec, log=lambda line: None, **options)  # type: ignore[arg-type]
    passed = time.perf_counter() - begun
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(json.dumps({"seconds": passed, "cpu": cpu, "peaks": [usage.ru_maxrss // 1024 for usage in usages]}))


def run(method: str, corpus: Path, prefix: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--run", method, str(corpus), str(prefix), str(tokenizer), str(workers)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(corpus: Path, tokenizer: Path, workers: int, rounds: int) -> None:
    with corpus.open("rb") as lines:
        documents = sum(1 for _ in lines)
    methods = {
        "megatron": "Megatron's method",
        "ours": "ours, one writer",
        f"ours-{workers}": f"ours, {workers} partitions",
    }
    with tempfile.TemporaryDirectory(dir=corpus.parent) as name:
        found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for _ in range(rounds):
            for method in methods:
                found[method].append(run(method, corpus, Path(name) / method, tokenizer, workers))
        written = {(Path(name) / f"{m}_text_document.bin").read_bytes() for m in methods}
        written |= {(Path(name) / f"{m}_text_document.idx").read_bytes() for m in methods}
        assert len(written) == 2, "all must write the same"
    print(f"{corpus.stem}: {documents:,} documents, {corpus.stat().st_size / 1e6:.0f} MB, {workers} workers")
    for method, text in methods.items():
        seconds, cpu = (statistics.median(each[kind] for each in found[method]) for kind in ("seconds", "cpu"))
        ratios = [
            statistics.median(a[kind] / b[kind] for a, b in zip(found["megatron"], found[method], strict=True))
            for kind in ("seconds", "cpu")
        ]
        told = f"{documents / seconds:,.0f} documents a second, {cpu:.1f} CPU seconds"
        print(f"  {text}: {told}; {ratios[0]:.2f} times as fast by the clock, {ratios[1]:.2f} by CPU seconds")


def memory(folder: Path, tokenizer: Path, workers: int, parts: int) -> Iterator[str]:
    for documents in (10**4, 10**5, 10**6):
        corpus = folder / f"tiny-{documents}.jsonl"
        if not corpus.exists():
            rng = random.Random(0)
            with corpus.open("w") as file:
                for number in range(documents):
                    file.write(json.dumps({"text": f"document {number}: {rng.getrandbits(40):x} of few words"}) + "\n")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            found = run(f"ours-{parts}", corpus, Path(name) / "x", tokenizer, workers)
        own, workers_peak = found["peaks"]
        yield f"{documents:,} documents {own} MB (a worker {workers_peak} MB), {found['seconds']:.1f} s;"


if __name__ == "__main__":
    main()

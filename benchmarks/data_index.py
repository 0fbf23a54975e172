"""Time and memory of the index of a GPT data set, beside the compiled helper of Megatron's package.

    pip install --target /tmp/megatron-core --no-deps megatron-core==0.16.1
    python benchmarks/data_index.py --megatron /tmp/megatron-core [--documents 1000000] [--rounds 9]

Lengths of documents are log-normal, about 1,000 tokens in the mean: 10^9 tokens at 10^6 documents. "Helper" is its C++
(``build_sample_idx_int32``) against ours, which must give the same array; "bounds" is the same as each program calls
it, with its choice of a type and its checks; "index" is all three arrays, with the shuffles by NumPy that both share. A
round of each in turn, in one thread; times are CPU seconds, ratios medians over the rounds. Then a separate process
opens a pair of files of ``--documents`` (with a sparse ``.bin``), builds its data sets with an empty cache, and again
with the full one: seconds, and the peak of resident memory above that of the imports.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.gpt_index import build_gpt_index, document_order, plan_epochs, sample_bounds, sample_order
from lightning_megatron.data.indexed import CODE_OF_DTYPE, HEADER, MAGIC, VERSION

SEQ_LENGTH = 2048
SEED = 1234


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, help="folder that megatron-core was installed into")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open is not None:
        return open_pair(args.open)
    lengths = lengths_of(args.documents)
    print(f"{args.documents:,} documents, {int(lengths.sum(dtype=np.int64)):,} tokens, samples of {SEQ_LENGTH}")
    if args.megatron is not None:
        compare(lengths, helper_of(args.megatron), args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder) / "corpus", lengths)
        command = [sys.executable, __file__, "--open", f"{folder}/corpus"]
        for cache in ("empty", "full"):
            print(f"{cache} cache:", subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    return None


def lengths_of(documents: int) -> np.ndarray[Any, Any]:
    return np.maximum(1, np.random.default_rng(0).lognormal(6.4, 1.0, documents)).astype(np.int32)


def helper_of(folder: Path) -> Any:
    """The compiled helper, without the package around it, which imports torch and more."""
    (file,) = (folder / "megatron" / "core" / "datasets").glob("helpers_cpp*.so")
    spec = spec_from_file_location("helpers_cpp", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(lengths: np.ndarray[Any, Any], helper: Any, rounds: int) -> None:
    tokens = int(lengths.sum(dtype=np.int64))
    sequences = np.arange(len(lengths), dtype=np.int32)
    for wanted in (None, int(2.5 * tokens / SEQ_LENGTH)):
        plan = plan_epochs(tokens, wanted, SEQ_LENGTH)
        order = document_order(sequences, plan, np.random.RandomState(SEED))

        def theirs(order: Any = order, plan: Any = plan) -> Any:
            return helper.build_sample_idx_int32(lengths, order, SEQ_LENGTH, plan.epochs, tokens, True, 1)

        def ours(order: Any = order, plan: Any = plan) -> Any:
            return sample_bounds(lengths, plan.samples, SEQ_LENGTH, order=order)

        def called_theirs(order: Any = order, plan: Any = plan) -> Any:
            sizes = lengths.copy()
            largest = max(len(order), sizes.max())
            bounds = helper.build_sample_idx_int32(sizes, order, SEQ_LENGTH, plan.epochs, tokens, True, 1)
            assert bounds.min() >= 0
            assert bounds.max() <= largest
            return bounds

        def called_ours(order: Any = order, plan: Any = plan) -> Any:
            dtype = np.int64 if max(len(order), lengths.max()) > np.iinfo(np.int32).max else np.int32
            return sample_bounds(lengths, plan.samples, SEQ_LENGTH, order=order, dtype=dtype)

        def whole_theirs(plan: Any = plan) -> Any:
            rng = np.random.RandomState(SEED)
            found = document_order(sequences, plan, rng)
            return found, called_theirs(found, plan), sample_order(plan.samples, plan.separate_after, rng)

        def whole_ours(plan: Any = plan) -> Any:
            return build_gpt_index(lengths, sequences, plan, seq_length=SEQ_LENGTH, seed=SEED)

        assert np.array_equal(theirs(), ours()), "the two must agree"
        found = whole_ours()
        for mine, other in zip((found.documents, found.samples, found.shuffle), whole_theirs(), strict=True):
            assert np.array_equal(mine, other)
        print(f"{plan.epochs} epoch(s), {plan.samples:,} samples")
        pairs = ("helper", ours, theirs), ("bounds", called_ours, called_theirs), ("index", whole_ours, whole_theirs)
        for name, one, other in pairs:
            print(f"  {name}: {paired(one, other, rounds)}")


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> str:
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    return f"ours {mine:.1f} ms, the helper {other:.1f} ms, {ratio:.2f} times as fast"


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def write_pair(prefix: Path, lengths: np.ndarray[Any, Any]) -> None:
    sizes = lengths.astype(np.int64) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[np.dtype("<u2")], len(lengths), len(lengths) + 1))
        for part in (lengths, np.cumsum(sizes) - sizes, np.arange(len(lengths) + 1, dtype=np.int64)):
            file.write(part.tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(sizes.sum()))


def open_pair(prefix: Path) -> None:
    from lightning_megatron.data import build_gpt_datasets

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    train, valid, test = build_gpt_datasets(prefix, seq_length=SEQ_LENGTH)
    passed = time.perf_counter() - begun
    assert train is not None
    assert valid is not None
    assert test is not None
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"three splits of {len(train):,} + {len(valid):,} + {len(test):,} samples in {passed:.2f} s, {grown:.0f} MB")


if __name__ == "__main__":
    main()

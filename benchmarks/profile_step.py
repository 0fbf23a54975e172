"""CPU seconds by operator of a step of ours and of a peer, on the same machine.

    python benchmarks/profile_step.py                                     # llama-tiny in bf16 beside the tuned loop
    python benchmarks/profile_step.py --rows gpt-tiny/fp32/single         # another row of bench.py
    python benchmarks/profile_step.py --peers --checkout ../before        # another checkout of ours

Each contestant trains rounds to warm up, then one on a single thread whose operators are timed in CPU seconds: other
work on the machine hardly disturbs them. With several processes, the operators are those of rank 0. On an accelerator
the seconds are only those of launching kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import start
from contestant import Contestant
from environments import PEERS, ROOT, weights_of
from peers.protocol import Job

KINDS = {
    "products": "mm addmm bmm baddbmm linear _linear_pointwise _grouped_mm convolution mv addmv dot",
    "attention": "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    "optimizer and clipping": "_fused_adamw _foreach_norm _foreach_mul linalg_vector_norm",
    "norms": "native_layer_norm native_layer_norm_backward",
    "copies and casts": "copy clone cat _to_copy fill zero zeros new_zeros",
    "softmax of the loss": "exp logsumexp amax gather scatter_add sub",
    "embedding": "embedding embedding_dense_backward index_select index_add",
}
"""Operators, without a final underscore, by kind of work; all others are elementwise."""


def kind_of(operator: str) -> str:
    """Kind of work of an operator, by its name."""
    name = operator.split(".")[1].removesuffix("_")
    return next((kind for kind, names in KINDS.items() if name in names.split()), "elementwise and views")


def report(contestant: Contestant, lines: int) -> str:
    """A Markdown table of a contestant's kinds of work and its longest operators."""
    rows = contestant.rounds[-1]["operators"]
    whole = sum(row[2] for row in rows)
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, _, seconds, calls in rows:
        kinds[kind_of(name)] += seconds
        names[name][0] += seconds
        names[name][1] += calls
    text = [f"### {contestant.name}: {whole:.2f} s in operators, {contestant.rounds[-1]['cpu']:.2f} s a step", ""]
    text += ["| kind | seconds | share |", "|---|---|---|"]
    text += [f"| {k} | {s:.3f} | {s / whole:.1%} |" for k, s in sorted(kinds.items(), key=lambda item: -item[1])]
    text += ["", "| operator | seconds | calls |", "|---|---|---|"]
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:lines]
    text += [f"| {name} | {seconds:.3f} | {calls:.0f} |" for name, (seconds, calls) in longest]
    text += ["", "| operator | shapes | seconds | calls |", "|---|---|---|---|"]
    for name, shapes, seconds, calls in sorted(rows, key=lambda row: -row[2])[:lines]:
        text.append(f"| {name} | {shapes} | {seconds:.3f} | {calls:.0f} |")
    return "\n".join([*text, ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=["llama-tiny/bf16/single"], help="rows such as gpt-tiny/fp32/single"
    )
    parser.add_argument(
        "--peers", nargs="*", default=["tuned loop"], choices=list(PEERS), help="contestants besides ours"
    )
    parser.add_argument("--checkout", nargs="*", type=Path, default=[], help="other checkouts of ours to compare with")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before the profiled one")
    parser.add_argument("--lines", type=int, default=25, help="operators shown")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="environments and weights")
    args = parser.parse_args(argv)
    cache = args.cache.resolve()
    for row in args.rows:
        model, precision, layout = row.split("/")
        weights = str(weights_of(model, cache / "weights"))
        seq = 256 if model == "mixtral-tiny" else 512
        job = Job(weights, precision, layout, seq, accelerator=args.accelerator)
        begin: list[Callable[[], Contestant]] = [
            partial(start, name, job, cache / "envs") for name in ("ours", *args.peers)
        ]
        begin += [partial(start, "ours", job, cache / "envs", path.resolve()) for path in args.checkout]
        with ExitStack() as stack:
            running = []
            for make in begin:
                running.append(make())
                stack.callback(running[-1].stop)
            for _ in range(args.warm_up + 1):
                for contestant in running:
                    contestant.run()
            print(f"## {row}\n", flush=True)
            for contestant in running:
                contestant.run("profile")
                print(report(contestant, args.lines), flush=True)
                print(f"profiled {contestant.name}", file=sys.stderr)


if __name__ == "__main__":
    main()

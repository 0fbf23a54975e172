"""Graphs and breaks of ``torch.compile`` in a block, the embedding and the head, on simulated HPUs.

    python benchmarks/graphs.py
    python benchmarks/graphs.py --cpu    # collectives may be in graphs, as on CPUs and CUDA devices

Gaudi's software disallows collectives in graphs when it is imported, and so does the simulation. Prints a Markdown
table, and the reasons for breaks as comments. Needs a build of torch for CPUs, and the simulation
(``pip install -e tests/simulated-gaudi``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import simulated_gaudi as hpu

from lightning_megatron.device import CPU, HPU
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.block_graphs import CASES, PARTS, count
from lightning_megatron.testing.workers import WorkerPool


def rows(device: str, pool: WorkerPool) -> Iterable[str]:
    """Lines of the table."""
    for case in CASES:
        try:
            found = pool.run(case.ranks, count, case, device)[0]
        except (AssertionError, ConfigError) as error:
            yield f"| {case.name} | {str(error).splitlines()[-1]} | | |"
            continue
        cells = [f"{counts.graphs} / {sum(counts.breaks.values())}" for counts in found.values()]
        yield f"| {case.name} | {' | '.join(cells)} |"
        for part, counts in found.items():
            for reason in counts.breaks:
                print(f"<!-- {case.name}, {part}: {' '.join(reason.split())[:300]} -->")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, without the simulation")
    args = parser.parse_args()
    if not args.cpu:
        hpu.enable("1.24")
    print(f"| graphs / breaks | {' | '.join(PARTS)} |\n|---|{'---|' * len(PARTS)}")
    with WorkerPool(2, timeout=600, kind=CPU if args.cpu else HPU) as pool:
        for line in rows("cpu" if args.cpu else "hpu", pool):
            print(line, flush=True)


if __name__ == "__main__":
    main()

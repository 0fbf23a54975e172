"""Fit the constants of devices and programs to one half of the published points.

    python benchmarks/plan_fit.py [--anchors FILE] [--write]

The half is chosen by the hash of source and model (``anchors/rows.py``); the other half is only scored. The loss is the
mean of ``|log(predicted / measured)|``, each source weighted by the square root of its number of rows, so that one
large table does not decide alone. Coordinates are searched in turn; nothing is random. ``--write`` puts the constants
of devices into their files and those of programs into ``benchmarks/data/plan_constants.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from anchors.rows import DATA, Anchor, read_rows, translate
from anchors.timing import Constants, base_device, family, tokens_per_second

from lightning_megatron.tools.planning.core.device_file import FOLDER, Efficiency

CONSTANTS = Path(__file__).parent / "data" / "plan_constants.json"
FITTED = (
    "a100-40/bf16",
    "a100-80/bf16",
    "h100/bf16",
    "h100/fp8",
    "h100-500w/bf16",
    "h100-500w/fp8",
    "b200/bf16",
)
"""Devices and formats of which the half for the fit has rows."""
SHARED = {
    "h100-slow-network/bf16": "h100/bf16",
    "h800/bf16": "h100/bf16",
    "h200/bf16": "h100/bf16",
    "gb200/bf16": "b200/bf16",
}
"""Devices that take the constants of another one, of the same chip."""
MEMORY = "h100/bf16"
"""Key whose share of the memory bandwidth all chips use: one chip's rows cannot separate it from a program's passes."""
FIRST = Efficiency(0.75, 0.45, 0.8)
BOUNDS = {"matmul": (0.3, 0.85), "attention": (0.1, 0.7), "memory": (0.6, 0.92)}
"""Plausible values, so that constants of different meaning do not trade places."""
PROGRAM_BOUNDS = {
    "torchtitan/passes": (1.0, 3.0),
    "llm-foundry/passes": (1.0, 3.0),
    "nanotron/passes": (1.0, 3.0),
    "megatron/passes": (0.8, 3.0),
    "megatron/expert_kernels": (30, 300),
    "torchtitan/rowwise": (0.3, 1.0),
    "torchtitan/attention": (0.3, 1.5),
    "llm-foundry/attention": (0.3, 1.5),
    "nanotron/attention": (0.3, 1.5),
    "nanotron/network": (5e9, 50e9),
    "megatron-ci/kernels": (30, 2000),
    "megatron-ci/step": (2e-3, 0.2),
}
"""Constants of programs with their bounds. Attention of NeMo and Megatron (cuDNN's) counts as the device's own."""
PASSES = tuple(name for name in PROGRAM_BOUNDS if name.endswith("/passes"))
STARTS = {
    "megatron/expert_kernels": 60.0,
    "megatron-ci/kernels": 300.0,
    "megatron-ci/step": 0.03,
    "nanotron/network": 25e9,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=Path, default=DATA)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    anchors = [made for made in map(translate, read_rows(args.anchors)) if isinstance(made, Anchor)]
    chosen = [each for each in anchors if each.is_for_the_fit and each.tokens_per_second]
    constants = fit(chosen)
    for key, each in constants.devices.items():
        print(f"{key:16} matmul {each.matmul:.3f}  attention {each.attention:.3f}  memory {each.memory:.3f}")
    print({name: float(f"{value:.3g}") for name, value in constants.programs.items()})
    if args.write:
        write(constants)


def counts(anchor: Anchor) -> bool:
    """False for small models and Megatron-LM's CI, whose step times depend on the host and not on the device."""
    return anchor.job.config.hidden_size >= 768 and anchor.source != "Megatron-LM CI"


def loss_of(anchors: Sequence[Anchor]) -> Callable[[Constants], float]:
    """The loss as a function of the constants."""
    rows = Counter(each.source for each in anchors)
    weights = [rows[each.source] ** -0.5 for each in anchors]
    measured = [each.tokens_per_second or 1.0 for each in anchors]

    known: dict[tuple[object, ...], float] = {}

    def error(number: int, constants: Constants) -> float:
        each = anchors[number]
        device = tuple(constants.devices.get(f"{each.device}/{dtype}") for dtype in ("bf16", "fp8"))
        program = tuple(v for k, v in constants.programs.items() if k.startswith(f"{family(each.program)}/"))
        key = (number, device, program)
        if key not in known:
            known[key] = abs(math.log(tokens_per_second(each, constants) / measured[number]))
        return known[key]

    def loss(constants: Constants) -> float:
        return sum(w * error(n, constants) for n, w in enumerate(weights)) / sum(weights)

    return loss


def fit(anchors: Sequence[Anchor]) -> Constants:
    """Constants of the smallest loss, by a search along one coordinate after another."""
    loss = loss_of(anchors)
    constants = Constants(dict.fromkeys(FITTED, FIRST), {key: STARTS.get(key, 1.0) for key in PROGRAM_BOUNDS})
    constants = share(constants)
    best = loss(constants)
    width = 0.2
    for _ in range(14):
        for change in _changes(width):
            tried = share(change(constants))
            value = loss(tried)
            if value < best - 1e-6:
                constants, best = tried, value
        width *= 0.8
        print(f"loss {best:.4f}, steps of {width:.3f}", flush=True)
    return constants


def _changes(width: float) -> list[Callable[[Constants], Constants]]:
    changes: list[Callable[[Constants], Constants]] = []
    for factor in (1 + width, 1 / (1 + width)):
        for key in FITTED:
            names = ("matmul",) if key.endswith("fp8") else tuple(BOUNDS)
            changes += [_device_change(key, name, factor) for name in names]
        changes += [_program_change(name, factor) for name in PROGRAM_BOUNDS]
        changes.append(_attention_change(factor))
        changes.append(_memory_change(factor))
    return changes


def _device_change(key: str, name: str, factor: float) -> Callable[[Constants], Constants]:
    low, high = BOUNDS[name]

    def change(constants: Constants) -> Constants:
        each = constants.devices[key]
        moved = replace(each, **{name: min(high, max(low, getattr(each, name) * factor))})
        return replace(constants, devices={**constants.devices, key: moved})

    return change


def _program_change(name: str, factor: float) -> Callable[[Constants], Constants]:
    low, high = PROGRAM_BOUNDS[name]

    def change(constants: Constants) -> Constants:
        moved = min(high, max(low, constants.programs[name] * factor))
        return replace(constants, programs={**constants.programs, name: moved})

    return change


def _attention_change(factor: float) -> Callable[[Constants], Constants]:
    """Faster attention of the device, and slower attention of programs by the same factor: their product stays."""
    moves = [_device_change("h100/bf16", "attention", factor)]
    moves += [_program_change(name, 1 / factor) for name in PROGRAM_BOUNDS if name.endswith("/attention")]

    def change(constants: Constants) -> Constants:
        for move in moves:
            constants = move(constants)
        return constants

    return change


def _memory_change(factor: float) -> Callable[[Constants], Constants]:
    """A faster memory of the chip that all share, with as many more passes over it."""
    moves = [_device_change(MEMORY, "memory", factor), *(_program_change(name, factor) for name in PASSES)]

    def change(constants: Constants) -> Constants:
        for move in moves:
            constants = move(constants)
        return constants

    return change


def share(constants: Constants) -> Constants:
    """Constants with those of devices of the same chip; fp8 takes attention and memory of 16-bit values."""
    devices = dict(constants.devices)
    for key in FITTED:
        if key.endswith("bf16"):
            devices[key] = replace(devices[key], memory=devices[MEMORY].memory)
    for key in ("h100-500w/bf16", "h100-500w/fp8"):  # the same kernels; power bounds the products
        devices[key] = replace(devices[key], attention=devices["h100/bf16"].attention)
    for key in FITTED:
        wide = devices.get(key.replace("fp8", "bf16"))
        if key.endswith("fp8") and wide is not None:
            devices[key] = replace(wide, matmul=devices[key].matmul)
    devices |= {key: devices[other] for key, other in SHARED.items() if other in devices}
    # All points of an H200 in fp8 are torchtitan's: the ratio of the two formats of its H100.
    ratio = devices["h100-500w/fp8"].matmul / devices["h100-500w/bf16"].matmul
    devices["h200/fp8"] = replace(devices["h200/bf16"], matmul=min(0.95, devices["h200/bf16"].matmul * ratio))
    # No point of the half for the fit is a Blackwell's in fp8: the ratio of an H100's two formats.
    ratio = devices["h100/fp8"].matmul / devices["h100/bf16"].matmul
    for name in ("b200", "gb200"):
        devices[f"{name}/fp8"] = replace(devices["b200/bf16"], matmul=devices["b200/bf16"].matmul * ratio)
    return replace(constants, devices=devices)


def read(path: Path = CONSTANTS) -> Constants:
    """Constants as written."""
    given = json.loads(path.read_text())
    return Constants({key: Efficiency(**each) for key, each in given["devices"].items()}, given["programs"])


def write(constants: Constants) -> None:
    """Write the constants of devices into their files, and all of them beside the points."""
    rounded = {key: {name: round(getattr(each, name), 3) for name in BOUNDS} for key, each in constants.devices.items()}
    text = {
        "devices": rounded,
        "programs": {key: float(f"{value:.3g}") for key, value in constants.programs.items()},
    }
    CONSTANTS.write_text(json.dumps(text, indent=2) + "\n")
    for key, given in rounded.items():
        name, dtype = key.split("/")
        path = FOLDER / f"{name}.json"
        if path.exists() and dtype in base_device(name).flops:
            spec = json.loads(path.read_text())
            spec["efficiency"][dtype] = given
            path.write_text(json.dumps(spec, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Memory of a conversion: peak resident memory of ``convert`` both ways, against the size of the model.

Makes a LLaMA-shaped directory of random weights, converts it in a process of its own each way, and prints by how much
resident memory grew at most over what the imports take. Linux. Run: ``python benchmarks/hf_convert.py [--layers 16]``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from lightning_megatron.checkpoint.formats.hf.tensors import weight_map
from lightning_megatron.checkpoint.formats.hf.write import write_hf
from lightning_megatron.checkpoint.formats.weight_map import Split, WeightMap
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes, weight_shapes

MB = 1e6

# The kernel's own high-water mark, set back once all is imported: it sees mapped files, and what has been freed again.
CHILD = """
import re, sys
from pathlib import Path
import torch
from lightning_megatron.tools.cli.main import main
import lightning_megatron.tools.cli.convert
def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
assert main(sys.argv[1:]) == 0
print(1024 * (kilobytes("VmHWM") - before))
"""


def random_splits(shapes: dict[str, tuple[int, ...]], weight_map: WeightMap) -> Iterator[Split]:
    """Random weights, made when they are written."""
    tensors = {name: LazyTensor(shape, torch.float32, partial(torch.randn, shape)) for name, shape in shapes.items()}
    return weight_map.to_foreign(tensors)


def growth(*words: str) -> float:
    """Bytes by which resident memory grows at most while a conversion runs."""
    done = subprocess.run([sys.executable, "-c", CHILD, "convert", *words], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16], help="models to convert")
    args = parser.parse_args()
    print("| layers | model, MB | one layer, MB | largest tensor, MB | hf-to-ckpt, MB | ckpt-to-hf, MB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_layers in args.layers:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=1024,
            num_attention_heads=16,
            num_query_groups=4,
            ffn_hidden_size=2816,
            vocab_size=8192,
            max_position_embeddings=2048,
            norm="rmsnorm",
            activation="swiglu",
            position_embedding="rope",
            add_bias_linear=False,
            tie_embeddings=False,
        )
        shapes, family = parameter_shapes(config), FAMILIES["llama"]
        sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
        layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
        with tempfile.TemporaryDirectory() as home:
            hf, ckpt, back = (str(Path(home) / name) for name in ("hf", "a.ckpt", "back"))
            rules = weight_map(family, config, weight_shapes(config))
            write_hf(hf, family.config_to_hf(config), random_splits(shapes, rules))
            there = growth("hf-to-ckpt", hf, ckpt)
            here = growth("ckpt-to-hf", ckpt, back)
        numbers = sum(sizes.values()), layer, max(sizes.values()), there, here
        print(f"| {num_layers} | " + " | ".join(f"{number / MB:.0f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Peak memory of an adapter's training against that of the whole model, and bytes of the adapter's checkpoint.

    python benchmarks/lora_memory.py

Three steps of llama-tiny (58 million parameters) in one process for each row, one sequence of 256 tokens a step; LoRA
of rank 16 on all linear layers. The peak is that of the process's resident memory, minus its peak after all imports and
one step of a small model. Prints a Markdown table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, LENGTH, RANK = 3, 256, 16
ROWS = [(precision, way) for precision in ("32-true", "bf16-mixed") for way in ("full", "LoRA", "DoRA")]
SMALL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 256}


def peak() -> int:
    """Highest resident memory of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fit(module: Any, precision: str, steps: int) -> Any:
    """Train on random tokens, and return the Trainer."""
    import torch
    from torch.utils.data import DataLoader

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.testing.trainer import quiet_trainer

    tokens = torch.randint(256, (steps, LENGTH + 1))
    data = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer = quiet_trainer(MegatronStrategy(), max_steps=steps, precision=precision)
    trainer.fit(module, DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    return trainer


def measure(precision: str, way: str) -> dict[str, Any]:
    """One row, in a process of its own."""
    from lightning_megatron import LlamaModule, LoRA

    fit(LlamaModule("llama-tiny", **SMALL), precision, 1)  # type: ignore[arg-type]
    before = peak()
    lora = None if way == "full" else LoRA(rank=RANK, dora=way == "DoRA")
    module = LlamaModule("llama-tiny", lora=lora)
    trainer = fit(module, precision, STEPS)
    found: dict[str, float] = {
        "peak": peak() - before,
        "trained": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }
    if lora is not None:
        with tempfile.TemporaryDirectory() as folder:
            module.base = {"path": folder, "hash": "0" * 64}  # as if the frozen weights had come from files
            trainer.save_checkpoint(Path(folder) / "a.ckpt", weights_only=True)
            held = sum(param.nbytes for param in module.parameters() if param.requires_grad)
            found["files"] = sum(file.stat().st_size for file in (Path(folder) / "a.ckpt").iterdir()) / held
    return found


def main() -> None:
    """Measure all rows and print the table."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], sys.argv[2])))
        return
    found = {}
    for row in ROWS:
        done = subprocess.run([sys.executable, __file__, *row], capture_output=True, text=True, check=True)
        found[row] = json.loads(done.stdout.splitlines()[-1])
    print("| precision | training | parameters trained | peak, MB | of full | checkpoint over its adapter |")
    print("|---|---|---|---|---|---|")
    for (precision, way), row in found.items():
        ratio = row["peak"] / found[precision, "full"]["peak"]
        files = f"{row['files']:.3f}" if "files" in row else "-"
        print(f"| {precision} | {way} | {row['trained']:,} | {row['peak'] / 1e6:,.0f} | {ratio:.2f} | {files} |")


if __name__ == "__main__":
    main()

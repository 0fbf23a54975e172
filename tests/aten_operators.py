"""ATen operators that trainings call: ``python tests/aten_operators.py`` writes ``aten_operators.txt`` anew.

An operator without a kernel on Gaudi runs on the host, with copies in both directions, in every step. So a new operator
is looked up in the list that Gaudi's bridge publishes, before it is kept here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.ops.registry import SELECTABLE
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

FIXTURES = Path(__file__).parent / "fixtures"
FILE = FIXTURES / "aten_operators.txt"
KNOWN = FIXTURES / "gaudi_operators.txt"
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
LLAMA = {"config": "llama-tiny", "num_query_groups": 2, "ffn_hidden_size": 48}
MIXTRAL = LLAMA | {"config": "mixtral-tiny", "num_experts": 4, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
OFF = dict.fromkeys(SELECTABLE, "off")

# Name: (ranks, model, strategy, precision)
TRAININGS: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "gpt with dropout": (
        1,
        {"config": "gpt-tiny", "hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"micro_batch_size": 2},
        "32-true",
    ),
    "llama bf16-mixed": (1, LLAMA, {}, "bf16-mixed"),
    "llama bf16-true": (1, LLAMA, {}, "bf16-true"),
    "llama, ops off": (1, LLAMA, {"ops": OFF}, "bf16-mixed"),
    "llama, full recompute": (1, LLAMA, {"recompute": "full"}, "bf16-mixed"),
    "llama, tp": (2, LLAMA, {"tp": 2}, "bf16-mixed"),
    "llama, cp and dp": (4, LLAMA, {"cp": 2}, "bf16-mixed"),
    "llama, pp": (2, LLAMA, {"pp": 2, "micro_batch_size": 2}, "bf16-mixed"),
    "mixtral allgather": (1, MIXTRAL | {"moe_token_dispatcher": "allgather"}, {}, "bf16-mixed"),
    "mixtral alltoall": (1, MIXTRAL, {}, "bf16-mixed"),
    "mixtral alltoall, ep": (2, MIXTRAL, {"ep": 2}, "bf16-mixed"),
    "mixtral dynamic, ep": (2, MIXTRAL | {"moe_dynamic": True}, {"ep": 2}, "bf16-mixed"),
    "mixtral capacity": (1, MIXTRAL | {"moe_capacity_factor": 1.0, "moe_pad_to_capacity": True}, {}, "bf16-mixed"),
    "mixtral bins": (1, MIXTRAL | {"moe_capacity_bins": 3, "moe_capacity_bins_alignment": 4}, {}, "bf16-mixed"),
}


class Kernels(TorchDispatchMode):
    """Counts operators that compute: without views, and without memory that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in given)
        if not is_view and not any(word in str(func) for word in ("empty", "_unsafe_view", "promote_types")):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Names of all ATen operators that are called in it, in backward too.

    Attributes:
        names: names as the bridge writes them, such as ``add.Tensor``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(str(func).removeprefix("aten.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def called(name: str, accelerator: str = "cpu", precision: str = "") -> list[str]:
    """Operators of a training of three steps with clipping and validation, on this rank."""
    _, model, strategy, usual = TRAININGS[name]
    seed_everything(11, verbose=False)
    tokens = torch.randint(61, (12, 17), generator=torch.Generator().manual_seed(3))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    trainer = quiet_trainer(
        MegatronStrategy(**strategy),
        accelerator=accelerator,
        max_epochs=1,
        gradient_clip_val=1.0,
        precision=precision or usual,
    )
    with Operators() as operators:
        # No shuffling: it runs on the host, whatever the device.
        trainer.fit(GPTModule(lr=1e-3, **SIZES | model), *(DataLoader(rows, batch_size=4) for _ in range(2)))  # type: ignore[arg-type]
    return sorted(operators.names)


def machine() -> str:
    """What decides which operators are called: torch, the kind of device, and if its bf16 products need fp32."""
    arithmetic = "with" if devices.has_bf16_arithmetic(torch.device("cpu")) else "without"
    return f"# torch {torch.__version__.split('+')[0]}, {kind_in_tests().type}, {arithmetic} bf16 arithmetic"


def kept() -> tuple[str, set[str]]:
    """The machine that has written the file, and the operators in it."""
    head, *names = FILE.read_text().split("\n")
    return head, {name for name in names if name and not name.startswith("#")}


def known() -> dict[str, str]:
    """Operators that run on Gaudi, with the reason where the bridge's list does not name them."""
    lines = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def main() -> None:
    from lightning_megatron.testing.workers import WorkerPool

    with WorkerPool(size=4) as pool:
        found = [pool.run(ranks, called, name) for name, (ranks, *_) in TRAININGS.items()]
    names = sorted({name for training in found for rank in training for name in rank})
    FILE.write_text("\n".join([machine(), *names]) + "\n")


if __name__ == "__main__":
    main()

"""NaN and infinity in losses, gradients, parameters and weights that are loaded: each ends the run, by name.

A case is a small run on a layout, with one bad value put somewhere on one rank. All ranks must end in the same error,
which names the rank and the parameter (or the loss), and no step may have been taken with it.

Run: ``python tests/fuzz/nonfinite_values.py [--trials 100] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy, MixtralModule
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf
from lightning_megatron.optim.finite_check import NonFiniteError
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerPool

STEPS, AT, VOCABULARY = 4, 2, 32
SIZES = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": VOCABULARY}
SIZES |= {"ffn_hidden_size": 24, "head_dim": 8, "vocab_multiple": 2, "max_position_embeddings": 8}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one, micro-batches": (1, {"micro_batch_size": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 whole sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "pp2": (2, {"pp": 2, "micro_batch_size": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    "pp2 zero-bubble": (2, {"pp": 2, "micro_batch_size": 2, "pipeline_schedule": "zero-bubble"}),
    "dp2": (2, {}),
    "dp2 unsharded": (2, {"distributed_optimizer": False}),
    "dp2 late": (2, {"overlap_grad_reduce": False}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 2}),
    "tp2 dp2": (4, {"tp": 2}),
}
PLACES = ("loss", "gradient", "gradient after backward", "parameter", "load_state_dict", "checkpoint", "Hugging Face")


@dataclass(frozen=True)
class Case:
    """One bad value.

    Attributes:
        layout: a key of ``LAYOUTS``.
        place: one of ``PLACES``.
        rank: where it is put.
        which: picks a parameter among those of the rank.
        value: NaN or an infinity.
        precision: precision of the Trainer.
        clips: whether gradients are clipped.
        logs_norm: whether the module logs their norm.
    """

    layout: str
    place: str
    rank: int
    which: float
    value: float
    precision: Any
    clips: bool
    logs_norm: bool

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]


def draw(dice: random.Random, largest: int = 4) -> Case:
    """A case; what makes no sense is not drawn."""
    while True:
        layout = dice.choice([name for name, (ranks, _) in LAYOUTS.items() if ranks <= largest])
        place, ranks = dice.choice(PLACES), LAYOUTS[layout][0]
        rank = dice.randrange(ranks)
        if place == "loss" and "pp2" in layout:
            rank = ranks - 1 - rank % (ranks // 2)  # of the last stage
        if place == "gradient after backward" and ("dp2" in layout or layout in ("cp2", "ep2")):
            continue  # it is on its way to other ranks by then
        if layout == "ep2" and place in ("checkpoint", "Hugging Face"):
            continue  # they are of a model without experts
        value = dice.choice([float("nan"), float("inf"), float("-inf")])
        precision = dice.choice(["32-true", "bf16-mixed"])
        return Case(layout, place, rank, dice.random(), value, precision, dice.random() < 0.5, dice.random() < 0.5)


class Puts(Callback):
    """Puts the value in place, on one rank, once."""

    def __init__(self, case: Case) -> None:
        self.case, self.name = case, ""

    def _param(self, module: Any) -> Tensor:
        known = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.name, param = known[int(self.case.which * len(known))]
        return param

    def _is_due(self, trainer: Any, place: str, step: int = AT) -> bool:
        return place == self.case.place and trainer.global_rank == self.case.rank and trainer.global_step == step

    def put(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.view(-1)[int(self.case.which * x.numel())] = self.case.value
        return x

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_due(trainer, "load_state_dict", 0):
            param = self._param(pl_module)
            pl_module.load_state_dict({**pl_module.state_dict(), self.name: self.put(param.detach().clone())})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_due(trainer, "parameter"):
            self.put(self._param(pl_module).data)
        if self._is_due(trainer, "gradient"):
            self._param(pl_module).register_hook(
                lambda grad: self.put(grad.clone(memory_format=torch.contiguous_format))
            )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._is_due(trainer, "gradient after backward"):
            grad = self._param(pl_module).grad
            assert grad is not None
            self.put(grad)


def module_of(case: Case) -> GPTModule:
    """The module of a layout, whose loss is bad at the moment."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = kind.training_step(self, batch, batch_idx)
        is_due = case.place == "loss" and self.global_rank == case.rank and self.global_step == AT
        return loss * case.value if is_due else loss

    kind: Any = MixtralModule if "ep" in LAYOUTS[case.layout][1] else LlamaModule
    logged = ("lr", "grad_norm") if case.logs_norm else ("lr",)
    own = type("Own", (kind,), {"training_step": step, "logged": logged})
    extra = EXPERTS if kind is MixtralModule else {}
    return own("mixtral-tiny" if extra else "llama-tiny", lr=1e-2, **SIZES, **extra)


def fit(case: Case, *callbacks: Callback, steps: int = STEPS, **options: Any) -> Any:
    seed_everything(5, verbose=False)
    torch.set_num_threads(1)
    strategy = MegatronStrategy(**LAYOUTS[case.layout][1], **options.pop("strategy", {}))
    clip = {"gradient_clip_val": 1.0} if case.clips else {}
    trainer = quiet_trainer(
        strategy,
        max_steps=steps,
        precision=case.precision,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        **clip,
    )
    tokens = torch.randint(VOCABULARY, (STEPS * 4, 9), generator=torch.Generator().manual_seed(2))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    trainer.fit(module_of(case), DataLoader(rows, batch_size=4), **options)
    return trainer


def bad_checkpoint(case: Case, folder: Path) -> tuple[Path, str]:
    """A checkpoint of a model with one bad value, which only a run that looks for none can save."""
    seed_everything(5, verbose=False)
    own = module_of(Case("one", "checkpoint", 0, case.which, case.value, "32-true", False, False))
    trainer = quiet_trainer(MegatronStrategy(check_for_nan_in_loss_and_grad=False), max_steps=0)
    puts = Puts(case)
    trainer.fit(own, DataLoader([{"tokens": torch.zeros(8, dtype=torch.long)}]))  # type: ignore[arg-type]
    puts.put(puts._param(own).data)
    trainer.strategy.refresh_main_params()
    trainer.save_checkpoint(folder / "bad.ckpt")
    return folder / "bad.ckpt", puts.name


def text_of(case: Case, folder: str) -> tuple[str, str, int]:
    """The error of a run, the name of what was spoilt on this rank, and the steps that were taken."""
    puts, path, name = Puts(case), None, ""
    if case.place in ("checkpoint", "Hugging Face"):
        path = Path(folder) / ("hf" if case.place == "Hugging Face" else "bad.ckpt")
        name = (Path(folder) / "name").read_text()
    try:
        trainer = fit(case, puts, ckpt_path=path)
    except (NonFiniteError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}", puts.name or name, -1
    return "ran on", puts.name or name, trainer.global_step


def prepare(case: Case, folder: Path) -> None:
    """Write what is to be loaded."""
    if case.place not in ("checkpoint", "Hugging Face"):
        return
    path, name = bad_checkpoint(case, folder)
    (folder / "name").write_text(name)
    if case.place == "Hugging Face":
        checkpoint_to_hf(path, folder / "hf")


def texts_of(cases: list[tuple[Case, str]]) -> list[tuple[str, str, int]]:
    """Several cases in the processes of one pool."""
    return [text_of(*case) for case in cases]


def fault(case: Case, by_rank: list[tuple[str, str, int]]) -> str | None:
    """Faults in the outcome of a case."""
    texts = {text for text, *_ in by_rank}
    if len(texts) > 1:
        return f"ranks differ: {texts}"
    (text,) = texts
    name = by_rank[case.rank][1]
    wanted = {
        "loss": f"NonFiniteError: step {AT}: the loss on rank {case.rank} is",
        "gradient": f"NonFiniteError: step {AT}: the gradient of {name!r} on rank {case.rank} is",
        "gradient after backward": f"NonFiniteError: step {AT}: the gradient of {name!r} on rank {case.rank} is",
        "parameter": f"NonFiniteError: step {AT}: parameter {name!r} on rank {case.rank} is",
        "load_state_dict": f"NonFiniteError: before the first step: parameter {name!r} on rank {case.rank} is",
    }
    if case.place in wanted:
        return None if text.startswith(wanted[case.place]) else f"{name}: {text}"
    known = f"model.{name}: 1 of" if case.place == "checkpoint" else f"(for {name.removeprefix('model.')}): 1 of"
    return None if text.startswith("CheckpointError") and known in text else f"{name}: {text}"


def check(trials: int, seed: int, run: Callable[..., list[Any]], scratch: Path, largest: int) -> Counter[str]:
    """Run cases; how many there were of each place.

    Args:
        trials: their number.
        seed: seed of the choice.
        run: a pool's, ``run(4, function, *args)``.
        scratch: a folder for what is loaded.
        largest: number of ranks of the largest layout.

    Raises:
        AssertionError: for each case that did not end as it should.
    """
    dice = random.Random(seed)
    cases = []
    for number in range(trials):
        folder = scratch / str(number)
        folder.mkdir()
        cases.append((draw(dice, largest), str(folder)))
        prepare(cases[-1][0], folder)
    wrong, counts = [], Counter[str]()
    for ranks in sorted({case.ranks for case, _ in cases}):
        own = [pair for pair in cases if pair[0].ranks == ranks]
        results = run(ranks, texts_of, own)
        for number, (case, _) in enumerate(own):
            counts[case.place] += 1
            if what := fault(case, [found[number] for found in results]):
                wrong.append(f"{case}\n    {what}")
    assert not wrong, "\n".join(wrong)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, WorkerPool(size=4) as pool:
        counts = check(options.trials, options.seed, pool.run, Path(scratch), largest=4)
    for place, count in counts.most_common():
        print(f"{place:25} {count}")


if __name__ == "__main__":
    main()

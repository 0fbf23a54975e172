"""Adapters trained here and by PEFT in one process: the same frozen weights, adapters, batches and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import GPTModule, LoRA, MegatronStrategy
from lightning_megatron.lightning.pretrained import peft as peft_files
from lightning_megatron.lightning.pretrained.convert_adapter import peft_to_checkpoint
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.families import TINY, VOCABULARY, hf_model

STEPS, BATCH, LENGTH, SEED = 20, 8, 12, 3
LR, DECAY, BETAS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1.0
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Kind:
    """A model and its adapter.

    Attributes:
        family: word of ``config.json``.
        targets: targets of the adapter.
        dora: True for DoRA.
        seed: seed of the adapter's weights; of experts one without near ties in routing.
    """

    family: str
    targets: tuple[str, ...]
    dora: bool = False
    seed: int = 0

    @property
    def lora(self) -> LoRA:
        """Settings of the adapter."""
        return LoRA(rank=4, alpha=8.0, targets=self.targets, dora=self.dora)

    @property
    def config(self) -> dict[str, Any]:
        """Contents of ``config.json``; no loss balances experts, since none does in PEFT's loop."""
        return TINY[self.family] | ({"router_aux_loss_coef": 0.0} if self.family in WITH_EXPERTS else {})


WITH_EXPERTS = ("mixtral", "qwen3_moe")
EVERYTHING = ("all-linear", "embed_tokens", "lm_head")
LLAMA, DORA = Kind("llama", EVERYTHING), Kind("llama", EVERYTHING, dora=True)
MIXTRAL = Kind("mixtral", EVERYTHING, seed=7)


@dataclass(frozen=True)
class Trained:
    """What a run reports: losses and norms by step."""

    losses: list[float]
    norms: list[float]

    def deviation(self, other: Trained) -> float:
        """The largest relative difference of any loss or norm."""
        mine, theirs = self.losses + self.norms, other.losses + other.norms
        assert len(self.losses) == len(self.norms) == len(other.losses) == STEPS
        return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Case:
    """Files that both sides begin with, below one folder.

    Attributes:
        kind: model and adapter.
        folder: folder of ``hf``, ``peft`` and ``first.ckpt``.
    """

    kind: Kind
    folder: Path

    @property
    def hf(self) -> Path:
        """Directory of the frozen weights."""
        return self.folder / "hf"

    @property
    def peft(self) -> Path:
        """Directory of the first adapter."""
        return self.folder / "peft"

    @property
    def first(self) -> Path:
        """The same as a checkpoint of ours."""
        return self.folder / "first.ckpt"

    def samples(self) -> list[dict[str, Tensor]]:
        """All samples; labels are the next tokens."""
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH + 1), generator=generator)
        return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def make(kind: Kind, folder: Path) -> Case:
    """Write the model and an adapter whose every matrix is random, so that all gradients matter from the start."""
    case = Case(kind, folder)
    hf_model(kind.config).save_pretrained(case.hf)
    module = GPTModule.from_hf(case.hf, lora=kind.lora)
    module.configure_model()
    plan = module._plan(kind.lora)
    shapes = peft_files.adapter_shapes(plan, module.config, kind.lora, "default")
    state, generator = module.model.state_dict(), torch.Generator().manual_seed(kind.seed)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("magnitude"):
            return state[name][: shape[0]] * (0.9 + 0.2 * torch.rand(shape, generator=generator))
        return torch.randn(shape, generator=generator) * 0.1

    native = {name: value(name, shape) for name, shape in shapes.items()}
    rules = peft_files.adapter_map(plan, module.config, kind.lora, "default")
    pairs = (zip(rule.foreign, rule.split(native[rule.native]), strict=True) for rule in rules.rules)
    tensors = dict(pair for pairs_of_rule in pairs for pair in pairs_of_rule)
    peft_files.write_adapter(case.peft, peft_files.peft_settings(kind.lora, plan, str(case.hf)), tensors)
    peft_to_checkpoint(case.peft, case.first, base=case.hf)
    return case


def peft_model(case: Case, adapter: Path, *, trains: bool = False) -> Any:
    """transformers' model with an adapter's files, by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.hf)
    return PeftModel.from_pretrained(model, adapter, is_trainable=trains)


def keep_gates_apart(model: Any, rank: int) -> None:
    """Hold the blocks at zero by which PEFT would mix the adapters of an expert's gate and up.

    transformers stores both in one parameter since version 5. PEFT reads the adapters of two linear layers into one of
    twice the rank, whose ``B`` has a block for each; in training it would fill the others, too.
    """
    for name, param in model.named_parameters():
        if name.endswith(".experts.base_layer.lora_B.default.weight"):
            features, experts = param.shape[0] // 2, param.shape[1] // (2 * rank)
            column, row = torch.arange(param.shape[1]) // experts // rank, torch.arange(param.shape[0]) // features
            param.register_hook(lambda grad, own=row[:, None] == column: grad * own)


def by_peft(case: Case) -> Trained:
    """The training in one process, by PEFT and a plain loop."""
    model = peft_model(case, case.peft, trains=True).train()
    keep_gates_apart(model, case.kind.lora.rank)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=BETAS)
    samples, losses, norms = case.samples(), [], []
    order = list(DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=SEED))  # type: ignore[arg-type]
    for step in range(STEPS):
        batch = [samples[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        tokens, labels = (torch.stack([sample[key] for sample in batch]) for key in ("tokens", "labels"))
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, norms)


@dataclass(frozen=True)
class Run:
    """A layout, with further arguments of the strategy."""

    layout: Options
    options: Options = ()
    fields: Options = ()
    micro_batch: int = 2

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes, dp too."""
        return dict(self.layout)

    @property
    def world_size(self) -> int:
        """Its ranks."""
        return self.sizes.get("tp", 1) * self.sizes.get("pp", 1) * self.sizes.get("cp", 1) * self.sizes.get("dp", 1)

    @property
    def name(self) -> str:
        """Name without spaces."""
        words = [f"{axis}{size}" for axis, size in self.layout]
        words += [f"{name}-{value}" for name, value in (*self.options, *self.fields)]
        return "_".join([*words, f"m{self.micro_batch}"]).replace(" ", "").replace("'", "")


def run(fields: Options = (), options: Options = (), micro_batch: int = 2, **layout: int) -> Run:
    """A layout by its axes."""
    return Run(tuple(layout.items()), options, fields, micro_batch)


def train(case: Case, runs: list[Run], out: Path) -> list[Trained]:
    """Train once for each run, in a worker, and save the adapter."""
    return [train_one(case, each, out) for each in runs]


def train_one(case: Case, each: Run, out: Path) -> Trained:
    """Train on one layout, beginning with the checkpoint of the first adapter."""
    seed_everything(SEED, verbose=False)
    layout = {axis: size for axis, size in each.layout if axis != "dp"}
    strategy = MegatronStrategy(micro_batch_size=each.micro_batch, bucket_size=3000, **layout, **dict(each.options))
    how: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "vocab_multiple": 4}
    module = GPTModule.load_from_checkpoint(case.first, **how, **dict(each.fields))
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=CLIP, logger=recorder)
    loader = DataLoader(case.samples(), batch_size=BATCH // each.sizes.get("dp", 1), shuffle=True)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    trainer.save_checkpoint(out / f"{each.name}.ckpt", weights_only=True)
    return Trained(recorder.series("train_loss"), recorder.series("grad_norm"))

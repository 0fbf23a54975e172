"""Our Trainer against a plain Hugging Face loop: the same weights, batches, optimizer and clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import GPTModule, LlamaModule, MegatronHPUStrategy, TransformerConfig
from lightning_megatron.device import hpu_available
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.foreign import to_native, weight_map
from tests.whole_weights import load_full

STEPS, BATCH, LENGTH, VOCABULARY, SEED = 10, 8, 12, 131, 5
LR, DECAY, BETAS, EPS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
MODULES = {"llama": LlamaModule, "gpt2": GPTModule}


@dataclass(frozen=True)
class Run:
    """One point of the grid."""

    tp: int
    sequence_parallel: bool
    dp: int
    distributed_optimizer: bool
    micro_batches: int

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        marks = ["sp"] * self.sequence_parallel + ["zero"] * self.distributed_optimizer
        return "-".join([f"tp{self.tp}", f"dp{self.dp}", f"m{self.micro_batches}", *marks])


@dataclass(frozen=True)
class Curve:
    """Values that a run reports, step by step."""

    losses: list[float]
    norms: list[float]

    def deviation(self, other: Curve) -> float:
        """The largest relative difference of any loss or norm."""
        mine, theirs = self.losses + self.norms, other.losses + other.norms
        assert len(self.losses) == len(self.norms) == STEPS
        return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Case:
    """A model with its initial weights, and all samples: what both sides are given.

    Labels are the next tokens; a sample's last position has none, as in Hugging Face's own loss.
    """

    family: str
    config: TransformerConfig
    tensors: dict[str, Tensor]
    tokens: Tensor

    def samples(self) -> list[dict[str, Tensor]]:
        labels = self.tokens.roll(-1, dims=1)
        labels[:, -1] = -100
        return [{"tokens": t, "labels": y} for t, y in zip(self.tokens, labels, strict=True)]


def hf_model(family: str, tied: bool) -> Any:
    """A tiny model with weights large enough for gradients above the clipping norm."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(17)
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        special = {"bos_token_id": None, "eos_token_id": None}
        common = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "initializer_range": 0.1}
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **special, **common))
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
            rope_parameters=rope,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
    )


def case_of(model: Any) -> Case:
    """The same model and weights in our names, with random text."""
    family = model.config.model_type
    mapping = FAMILIES[family]
    # The vocabulary is padded to a multiple of 4 tp: at tp=4 by 13 rows, which split unevenly over the ranks.
    config = TransformerConfig(**mapping.config_from_hf(model.config.to_dict()), vocab_multiple=4)
    tensors = to_native(weight_map(mapping, config), model.state_dict(), parameter_shapes(config))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)
    return Case(family, config, {name: tensor.clone() for name, tensor in tensors.items()}, tokens)


def reference_curve(model: Any, tokens: Tensor) -> Curve:
    """A plain loop over global batches in one process, in the order in which Lightning reads a training set."""
    order = list(DistributedSampler(tokens, num_replicas=1, rank=0, shuffle=True, seed=SEED))  # type: ignore[arg-type]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step, batch in enumerate(tokens[order].split(BATCH), start=1):
        for group in optimizer.param_groups if hpu_available() else ():
            # FusedAdamW adds eps before it corrects the second moment: as torch's with an eps corrected as well
            group["eps"] = EPS / (1 - BETAS[1] ** step) ** 0.5
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return Curve(losses, norms)


def module_of(case: Case, **options: Any) -> GPTModule:
    """Our module with the weights of the case."""

    class WithWeights(MODULES[case.family]):  # type: ignore[misc]
        def configure_model(self) -> None:
            super().configure_model()
            load_full(self.model, case.tensors, self.mesh.shard_ranks)

    return WithWeights(case.config, **{"lr": LR, "weight_decay": DECAY, "betas": BETAS} | options)


def our_curves(case: Case, runs: Sequence[Run]) -> list[Curve]:
    """Train once for each run, in a worker."""
    return [our_curve(case, run) for run in runs]


def our_curve(case: Case, run: Run) -> Curve:
    seed_everything(SEED, verbose=False)
    size = BATCH // run.dp
    strategy = MegatronHPUStrategy(
        tp=run.tp,
        sequence_parallel=run.sequence_parallel,
        micro_batch_size=size // run.micro_batches,
        distributed_optimizer=run.distributed_optimizer,
        bucket_size=5000,
    )
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_epochs=1, gradient_clip_val=CLIP, logger=recorder)
    trainer.fit(module_of(case), DataLoader(case.samples(), batch_size=size, shuffle=True))
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


class HasWorldSize(Protocol):
    """A layout to train on."""

    @property
    def world_size(self) -> int:
        """Its ranks."""
        ...


R = TypeVar("R", bound=HasWorldSize)


def check_runs(
    ranks: Callable[..., list[Any]],
    curves: Callable[[Sequence[R]], list[Curve]],
    runs: Sequence[R],
    expected: Callable[[R], Curve],
    bound: float,
    record: Callable[[str, Any], None],
) -> None:
    """Train on every layout, and compare what every rank reports.

    Args:
        ranks: the fixture.
        curves: trains once for each run, in a worker.
        runs: the layouts.
        expected: what a layout must report.
        bound: largest relative deviation allowed.
        record: the fixture ``record_property``.
    """
    wrong, worst = [], 0.0
    for size in sorted({run.world_size for run in runs}):
        together = [run for run in runs if run.world_size == size]
        for rank, found in enumerate(ranks(size, curves, together)):
            for run, mine in zip(together, found, strict=True):
                right = expected(run)
                deviation = mine.deviation(right)
                worst = max(worst, deviation)
                if not deviation <= bound:
                    wrong.append(f"{run}, rank {rank}: {deviation:.1e}\n  {mine}\n  {right}")
    record("worst_relative_deviation", worst)
    print(f"worst relative deviation {worst:.1e} over {len(runs)} runs")
    assert not wrong, "\n".join(wrong)

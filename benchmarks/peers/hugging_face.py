"""Hugging Face's model of the same weights, as its users train it in Lightning: one process, or DDP."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor

from peers.lightning_loop import fit
from peers.protocol import BETAS, EPS, LR, WEIGHT_DECAY, Job, job_of


class HuggingFaceModule(L.LightningModule):
    """A causal language model of transformers with the loss over whole logits."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self.model = transformers.AutoModelForCausalLM.from_pretrained(job.weights, dtype=torch.float32)
        self.model.train()
        if job.compiled:
            self.model.compile()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, sync_dist=self._job.devices > 1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = self._job.accelerator != "cpu"
        return torch.optim.AdamW(
            self.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused or None
        )

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any) -> None:
        """As Lightning does it itself, but also of a fused optimizer in bf16, which it refuses on CUDA."""
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


def main(job: Job) -> None:
    module = HuggingFaceModule(job)
    precision = "32-true" if job.precision == "fp32" else "bf16-mixed"
    strategy = "ddp" if job.devices > 1 else "auto"
    vocab = module.model.config.vocab_size
    fit(job, module, vocab, strategy, precision=precision, batches_per_step=job.own_micro_batches)


if __name__ == "__main__":
    main(job_of())

"""A plain torch loop, tuned by hand: the fastest that a user would write for one process.

One fused AdamW, linear layer and cross entropy in chunks with gradients made in the forward pass, freed memory kept by
the allocator of the C library, autocast for bf16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from peers import plain_models
from peers.protocol import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Job, RandomTokens, job_of, train

ROWS = 256  # of logits that exist at a time
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T``, ``[t, h]`` and ``[v, h]``, without whole logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        narrow, total = weight.to(dtype), torch.zeros((), device=hidden.device)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows, goal, out in zip(hidden.split(ROWS), labels.split(ROWS), hidden_grad.split(ROWS), strict=True):
            rows = rows.to(dtype)
            logits = (rows @ narrow.t()).float()  # [ROWS, v]
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += (log_sum - logits.gather(1, goal.unsqueeze(1))).sum()
            probabilities = logits.sub_(log_sum).exp_()
            probabilities[torch.arange(len(goal), device=goal.device), goal] -= 1
            gradient = probabilities.div_(len(labels)).to(dtype)
            out.copy_(gradient @ narrow)
            if dtype == weight.dtype:
                weight_grad.addmm_(gradient.t(), rows)
            else:
                weight_grad += gradient.t() @ rows
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad.mul_(gradients[0]), weight_grad.mul_(gradients[0]), None, None


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks: otherwise every step would cause page faults for its activations again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def main(job: Job) -> None:
    keep_freed_memory()
    model = plain_models.load(job.weights).to(job.accelerator)
    states = torch.compile(model.hidden_states) if job.compiled else model.hidden_states
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    half = job.precision == "bf16"
    data = RandomTokens(model.embed.num_embeddings, job.seq)

    def step(number: int) -> float:
        total = 0.0
        for part in range(job.micro_batches):
            tokens, labels = data.micro_batch(number * job.micro_batches + part, job.micro_batch)
            with torch.autocast(job.accelerator, torch.bfloat16, enabled=half):
                hidden = states(tokens.to(job.accelerator))
            dtype = torch.bfloat16 if half else torch.float32
            rows, goal = hidden.flatten(0, 1), labels.to(job.accelerator).flatten()
            loss = ChunkedLoss.apply(rows, model.head.weight, goal, dtype)
            (loss / job.micro_batches).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total / job.micro_batches

    train(job, step)


if __name__ == "__main__":
    main(job_of())

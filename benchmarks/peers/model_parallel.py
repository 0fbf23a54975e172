"""Hugging Face's LLaMA under Lightning's ModelParallelStrategy: FSDP2 for "dp", a tensor-parallel plan for "tp"."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from peers.hugging_face import HuggingFaceModule
from peers.lightning_loop import fit
from peers.protocol import CLIP, Job, job_of


class ModelParallelModule(HuggingFaceModule):
    """The model, sharded over the device mesh once Lightning has created that."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip the norm over tensor-parallel and whole parameters, which torch does not accept in one call."""
        with_grad = [p for p in self.parameters() if p.grad is not None]
        norms = []
        for kind in (True, False):
            grads = [p.grad for p in with_grad if p.grad is not None and isinstance(p, DTensor) == kind]
            if grads:
                norm = torch.nn.utils.get_total_norm(grads)
                norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.stack(norms).norm()
        for kind in (True, False):
            group = [p for p in with_grad if isinstance(p, DTensor) == kind]
            torch.nn.utils.clip_grads_with_norm_(group, CLIP, total)

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if "tp" in self._job.axes:
            _tensor_parallel(self.model, self.device_mesh["tensor_parallel"])
            return
        mesh = self.device_mesh["data_parallel"]
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy: dict[str, Any] = {} if self._job.precision == "fp32" else {"mp_policy": half}
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(self.model, mesh=mesh, **policy)


def _tensor_parallel(model: Any, mesh: Any) -> None:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)


def main(job: Job) -> None:
    module = ModelParallelModule(job)
    tensor = job.axes.get("tp", 1)
    strategy = ModelParallelStrategy(data_parallel_size=job.devices // tensor, tensor_parallel_size=tensor)
    # FSDP2 casts by its own policy; tensor parallelism in bf16 is autocast.
    precision = "bf16-mixed" if job.precision == "bf16" and tensor > 1 else "32-true"
    vocab = module.model.config.vocab_size
    fit(job, module, vocab, strategy, precision=precision, batches_per_step=job.own_micro_batches)


if __name__ == "__main__":
    main(job_of())

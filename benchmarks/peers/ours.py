"""lightning_megatron in a Lightning Trainer."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW, Optimizer

from lightning_megatron import LlamaModule, MegatronStrategy
from peers.lightning_loop import fit
from peers.protocol import BETAS, EPS, LR, WEIGHT_DECAY, Job, job_of


class Module(LlamaModule):
    """A model of any family with the comparison's AdamW: weight decay on every parameter, fused as in our modules."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


def main(job: Job) -> None:
    axes: dict[str, Any] = {axis: size for axis, size in job.axes.items() if axis != "dp"}
    if "pp" in job.axes:
        axes["pipeline_layout"] = "balanced"
    if "cp" in job.axes and job.accelerator == "cpu":
        axes["cp_comm_type"] = "a2a"  # torch's own attention on whole sequences; parts are merged in fp32
    fields: dict[str, Any] = {"moe_aux_loss_coeff": 0.0} if "mixtral" in job.weights else {}
    module = Module.from_hf(job.weights, **fields)
    strategy = MegatronStrategy(micro_batch_size=job.micro_batch, compile=job.compiled, record_actions=True, **axes)
    precision = "32-true" if job.precision == "fp32" else "bf16-mixed"
    fit(job, module, module.config.vocab_size, strategy, precision=precision, batches_per_step=1)


if __name__ == "__main__":
    main(job_of())

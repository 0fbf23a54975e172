"""torchtitan's own Trainer on LLaMA: FSDP2 for "dp", its tensor and sequence parallelism, its 1F1B pipeline.

It keeps its own chunked loss and fused AdamW. Three settings differ: no recomputation of activations, plain
scaled-dot-product attention, since its masks for packed documents have no backward on a CPU, and no CUDA graphs, which
its pipelines do not support. On a CPU three parts of it are replaced: see :func:`run_on_cpu`, :func:`sum_by_sums` and
:func:`no_new_timeouts`; a pipeline needs :class:`GivenMicroBatches` with the newest release of torch.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from peers.protocol import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Job, RandomTokens, Rounds, free_port, job_of

JOB = job_of()


def run_on_cpu() -> None:
    """Make torchtitan, which falls back to CUDA if it finds no accelerator, train on a CPU.

    Its modules copy these two names when they are imported, so this must run first.
    """
    from torchtitan.tools import utils

    def nothing(*_: Any) -> None:
        """A CPU has nothing to wait for, and no memory of its own."""

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda _=None: "CPU",
        get_device_properties=lambda _=None: SimpleNamespace(total_memory=1),
        memory_stats=lambda _=None: {},
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
    )


if JOB.accelerator == "cpu":
    run_on_cpu()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import CommConfig, CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class NoTokenizer(BaseTokenizer):
    """No tokenizer: tokens are drawn."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Tokens(BaseDataLoader):
    """The comparison's tokens, divided among data-parallel ranks as by torch's ``DistributedSampler``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._data = RandomTokens(config.vocab_size, seq_len)
        self._rank, self._ranks, self._size = dp_rank, dp_world_size, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        number = 0
        while True:
            rows = [self._data[(number + row) * self._ranks + self._rank] for row in range(self._size)]
            number += self._size
            yield {"input": torch.stack([r["tokens"] for r in rows])}, torch.stack([r["labels"] for r in rows])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Loss(MetricsProcessor):
    """Keeps the loss of the last step, and prints nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    last = 0.0

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        self.last = global_avg_loss


class Contestant(Trainer):
    """torchtitan's trainer, a round of steps at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    pp_schedule: Any

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if JOB.accelerator == "cpu":
            sum_by_sums(self.model_parts)
        if "pp" in JOB.axes and "arg_mbs" not in inspect.signature(self.pp_schedule.step).parameters:
            self.pp_schedule = GivenMicroBatches(self.pp_schedule)
        self._rounds = Rounds(JOB)

    def train_step(self, data_iterator: Any) -> None:
        first = (self.step - 1) % JOB.steps == 0
        if first:
            self._rounds.begin()
        super().train_step(data_iterator)
        if self.step % JOB.steps == 0:
            # A pipeline stage that is not the last one has no loss, and reports -1.
            self._rounds.end(self.metrics_processor.last)


class GivenMicroBatches:
    """A schedule that accepts micro-batches, as torchtitan passes them; those of older torch only split a batch."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def step(self, **given: Any) -> None:
        """Run one step of the schedule, by the same calls as torch's own ``step`` after its splitting."""
        stage = self._schedule._stage
        stage.has_backward = True
        stage.clear_runtime_states()
        self._schedule._step_microbatches(**given)


def sum_by_sums(parts: list[nn.Module]) -> None:
    """Make FSDP2 reduce by sums: gloo has no reduction that multiplies before it sums."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def model_of(c: dict[str, Any]) -> ModelSpec:
    """torchtitan's LLaMA of a Hugging Face configuration."""
    hidden, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    scaled = rope.get("rope_type", "default") == "llama3"
    scaling: dict[str, Any] = {"scaling": "llama"} if scaled else {"scaling": "none"}
    if scaled:
        scaling["scaling_factor"] = rope["factor"]
    theta = float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    rotary = ComplexRoPE.Config(dim=hidden // heads, max_seq_len=c["max_position_embeddings"], theta=theta, **scaling)
    init = {"weight": skip_param_init, "bias": skip_param_init}  # weights are read from the directory
    norm = partial(RMSNorm.Config, normalized_shape=hidden, eps=c["rms_norm_eps"], param_init=init)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=hidden,
                n_heads=heads,
                n_kv_heads=c["num_key_value_heads"],
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rotary,
            ),
            feed_forward=make_ffn_config(
                dim=hidden, hidden_dim=c["intermediate_size"], w1_param_init=init, w2w3_param_init=init
            ),
        )
        for _ in range(c["num_hidden_layers"])
    ]
    model = Llama3Model.Config(
        dim=hidden,
        vocab_size=vocab,
        enable_weight_tying=c["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=hidden, param_init=init),
        norm=norm(),
        lm_head=Linear.Config(in_features=hidden, out_features=vocab, param_init=init),
        layers=layers,
    )
    return ModelSpec(
        name="llama3",
        flavor=Path(JOB.weights).name,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def config_of(job: Job, folder: str) -> Contestant.Config:
    """torchtitan's configuration of the training.

    Args:
        job: the training.
        folder: folder for what torchtitan writes.
    """
    c = json.loads((Path(job.weights) / "config.json").read_text())
    pipeline = "pp" in job.axes
    names = {"dp": "data_parallel_shard_degree", "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree"}
    degrees: dict[str, Any] = {names["dp"]: 1} | {names[axis]: size for axis, size in job.axes.items()}
    return Contestant.Config(
        model_spec=model_of(c),
        hf_assets_path=job.weights,
        dump_folder=folder,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=c["vocab_size"])),
        optimizer=default_adamw(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0, min_lr_factor=1.0),
        training=TrainingConfig(
            local_batch_size=job.micro_batch * (job.micro_batches if pipeline else 1),
            global_batch_size=job.micro_batch * job.micro_batches,
            seq_len=job.seq,
            max_norm=CLIP,
            steps=1_000_000,
            mixed_precision_param="float32" if job.precision == "fp32" else "bfloat16",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=job.micro_batch,
            spmd_backend="partial_dtensor",
            **degrees,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, load_only=True, initial_load_path=job.weights, initial_load_in_hf=True
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=job.compiled),
        comm=CommConfig(init_timeout_seconds=3600, train_timeout_seconds=3600, trace_buf_size=0),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(vocab_size=c["vocab_size"]),
        metrics=Loss.Config(log_freq=1),
    )


def main(job: Job) -> None:
    if "RANK" not in os.environ:  # this process is rank 0, and starts the others
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(job.devices)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", "peers.torchtitan_loop", *job.words()]
        for rank in range(1, job.devices):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            subprocess.Popen(command, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if job.accelerator == "cpu":
        distributed.set_pg_timeouts = no_new_timeouts
    with tempfile.TemporaryDirectory() as folder:
        config_of(job, folder).build().train()


def no_new_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """Change nothing: gloo accepts no new timeout for an existing group."""


if __name__ == "__main__":
    main(JOB)

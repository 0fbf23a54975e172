"""One contestant of a comparison: trains a preset on random tokens, a round at a time, on command.

Started by ``compare.py``, which lets the contestants take turns; each round's wall and CPU seconds are reported as one
line of JSON, so that whatever else the machine does hits all contestants alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import peak_memory_bytes, synchronize
from lightning_megatron.models.presets import preset


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Endless seeded tokens; what they say does not matter for speed."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._vocab_size = vocab_size
        self._length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._length + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class HuggingFaceModule(L.LightningModule):
    """``transformers``' LLaMA or GPT-2 of the same shape, as its users train it in Lightning."""

    def __init__(self, model: str, compiled: bool, fused: bool) -> None:
        super().__init__()
        import transformers

        self._fused = fused

        c = preset(model)
        sizes: dict[str, Any] = {"vocab_size": c.vocab_size}
        self.model: Any
        if c.position_embedding == "rope":
            sizes |= {
                "hidden_size": c.hidden_size,
                "intermediate_size": c.ffn_hidden_size,
                "num_hidden_layers": c.num_layers,
                "num_attention_heads": c.num_attention_heads,
                "num_key_value_heads": c.num_query_groups,
                "max_position_embeddings": c.max_position_embeddings,
                "tie_word_embeddings": c.tie_embeddings,
            }
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        else:
            sizes |= {"n_embd": c.hidden_size, "n_layer": c.num_layers, "n_head": c.num_attention_heads}
            sizes |= {"n_positions": c.max_position_embeddings, "activation_function": "gelu"}
            sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        self.model.train()
        if compiled:
            self.model.compile()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self._fused)


class TensorParallelModule(HuggingFaceModule):
    """The same under Lightning's ModelParallelStrategy, parallelized by torch's plan for LLaMA."""

    def configure_model(self) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        assert self.device_mesh is not None
        mesh = self.device_mesh["tensor_parallel"]
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        for layer in self.model.model.layers:
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
            plan |= {name: RowwiseParallel() for name in rows}
            parallelize_module(layer, mesh, plan)
        whole = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self.model, mesh, whole)


class Rounds(L.Callback):
    """Waits for a word before each round of steps and reports after it."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self._steps = steps
        self._tokens = tokens_per_step
        self._begun = (0.0, 0.0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % (self._steps * trainer.accumulate_grad_batches) == 0:
            if trainer.is_global_zero and sys.stdin.readline().strip() != "go":
                trainer.should_stop = True
                os._exit(0)
            trainer.strategy.barrier()
            synchronize(pl_module.device)
            self._begun = (time.perf_counter(), time.process_time())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % (self._steps * trainer.accumulate_grad_batches) == 0 and trainer.is_global_zero:
            synchronize(pl_module.device)
            wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
            loss = float(trainer.callback_metrics["train_loss"])
            peak = peak_memory_bytes(pl_module.device)
            report = {"wall": wall / self._steps, "cpu": cpu / self._steps, "peak_mb": peak / 2**20, "loss": loss}
            report["tokens"] = self._tokens
            print("ROUND " + json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=("ours", "hf", "model-parallel"), required=True)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(max(1, 2 // args.devices))
    L.seed_everything(1, verbose=False)
    module: L.LightningModule
    strategy: Any = "auto"
    batch_size, accumulate = args.micro_batch, args.micro_batches
    on_card = args.accelerator != "cpu"
    if args.peer == "ours":
        module = GPTModule(args.model)
        strategy = MegatronStrategy(tp=args.devices, micro_batch_size=args.micro_batch, compile=args.compile)
        batch_size, accumulate = args.micro_batch * args.micro_batches, 1
    elif args.peer == "hf":
        module = HuggingFaceModule(args.model, args.compile, on_card)
        strategy = "ddp" if args.devices > 1 else "auto"
    else:
        module = TensorParallelModule(args.model, args.compile, on_card)
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=args.devices)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=strategy,
        precision=args.precision,
        max_steps=1000,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Rounds(args.steps, args.seq * args.micro_batch * args.micro_batches)],
    )
    trainer.fit(module, DataLoader(RandomTokens(preset(args.model).vocab_size, args.seq), batch_size=batch_size))


if __name__ == "__main__":
    main()

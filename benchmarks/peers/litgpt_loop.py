"""litgpt's model in its own manner: Fabric, a plain loop, chunked cross entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.model import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import load_file

from peers.protocol import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Job, RandomTokens, job_of, train


def model_of(directory: str) -> GPT:
    """litgpt's model with the weights of a Hugging Face directory."""
    c = json.loads((Path(directory) / "config.json").read_text())
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    sizes: dict[str, Any] = {
        "name": "llama",
        "block_size": c["max_position_embeddings"],
        "vocab_size": c["vocab_size"],
        "padded_vocab_size": c["vocab_size"],
        "n_layer": c["num_hidden_layers"],
        "n_head": c["num_attention_heads"],
        "n_query_groups": c["num_key_value_heads"],
        "n_embd": c["hidden_size"],
        "rotary_percentage": 1.0,
        "rope_base": int(c.get("rope_theta") or rope.get("rope_theta") or 10000),
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": c["rms_norm_eps"],
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": c["intermediate_size"],
    }
    if "num_local_experts" in c:
        sizes |= {"mlp_class_name": "LLaMAMoE", "n_expert": c["num_local_experts"]}
        sizes |= {"n_expert_per_token": c["num_experts_per_tok"]}
    config = Config(**sizes)
    weights: dict[str, Any] = {}
    found = {k: v for file in sorted(Path(directory).glob("*.safetensors")) for k, v in load_file(file).items()}
    copy_weights_hf_llama(config, {}, weights, found)
    model = GPT(config)
    model.load_state_dict(weights)
    return model


def main(job: Job) -> None:
    fabric = Fabric(
        accelerator=job.accelerator, devices=1, precision="32-true" if job.precision == "fp32" else "bf16-mixed"
    )
    model = model_of(job.weights)
    data = RandomTokens(model.config.vocab_size, job.seq)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    model.max_seq_length = job.seq
    if job.compiled:
        model.compile()
    trained, optimizer = fabric.setup(model, optimizer)

    def step(number: int) -> float:
        total = 0.0
        for part in range(job.micro_batches):
            tokens, labels = data.micro_batch(number * job.micro_batches + part, job.micro_batch)
            loss = chunked_cross_entropy(trained(tokens.to(fabric.device)), labels.to(fabric.device))
            fabric.backward(loss / job.micro_batches)
            total += float(loss.detach())
        fabric.clip_gradients(trained, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total / job.micro_batches

    train(job, step)


if __name__ == "__main__":
    main(job_of())

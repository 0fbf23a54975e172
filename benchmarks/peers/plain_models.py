"""LLaMA, GPT-2 and Mixtral in plain torch, without any library's framework around them, for the tuned loop.

Each loads the weights of a Hugging Face directory, and ends with hidden states and the weight of the output layer, so
that the loop may compute the loss as it likes. Shapes: ``[b, s, h]``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


class Llama(nn.Module):
    """LLaMA, or Mixtral where the configuration has experts."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        heads = c["num_attention_heads"]
        self.head_dim = c.get("head_dim") or c["hidden_size"] // heads
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(LlamaLayer(c, self.head_dim) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        if c["tie_word_embeddings"]:
            self.head.weight = self.embed.weight
        rope = c.get("rope_parameters") or {}
        self.theta = float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Output of the final norm, ``[b, s, h]``."""
        frequencies = self.theta ** -(torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), frequencies).repeat(1, 2)
        rotary = (angles.cos(), angles.sin())
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.norm(x)


class LlamaLayer(nn.Module):
    """A transformer layer with grouped-query attention and SwiGLU, dense or of experts."""

    def __init__(self, c: dict[str, Any], head_dim: int) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.head_dim, self.heads, self.groups = head_dim, c["num_attention_heads"], c["num_key_value_heads"]
        self.input_norm, self.post_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * head_dim, bias=False)
        self.out = nn.Linear(self.heads * head_dim, hidden, bias=False)
        ffn = c["intermediate_size"]
        experts = c.get("num_local_experts")
        self.mlp = Experts(hidden, ffn, experts, c["num_experts_per_tok"]) if experts else SwiGLU(hidden, ffn)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        b, s, _ = x.shape
        sizes = [self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim]
        q, k, v = self.qkv(self.input_norm(x)).split(sizes, dim=-1)
        q, k, v = (part.view(b, s, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp(self.post_norm(x))


class SwiGLU(nn.Module):
    """Gate and up projections in one product."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Top-k experts, a product of each over the tokens that chose it."""

    def __init__(self, hidden: int, ffn: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(hidden, ffn) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [t, h]
        weights, chosen = self.router(flat).float().softmax(-1).topk(self.k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        order = chosen.flatten().argsort(stable=True)
        rows = flat.index_select(0, order // self.k)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        done = torch.cat([e(part) for e, part in zip(self.experts, rows.split(counts), strict=True)])
        weighted = done * weights[order].unsqueeze(-1).to(done.dtype)
        return torch.zeros_like(flat, dtype=weighted.dtype).index_add(0, order // self.k, weighted).view_as(x)


class Gpt2(nn.Module):
    """GPT-2: learned positions, LayerNorm, GELU, the output layer tied to the embedding."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed, self.positions = (
            nn.Embedding(c["vocab_size"], c["n_embd"]),
            nn.Embedding(c["n_positions"], c["n_embd"]),
        )
        self.layers = nn.ModuleList(Gpt2Layer(c) for _ in range(c["n_layer"]))
        self.norm = nn.LayerNorm(c["n_embd"], c["layer_norm_epsilon"])
        self.head = nn.Linear(c["n_embd"], c["vocab_size"], bias=False)
        self.head.weight = self.embed.weight

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Output of the final norm, ``[b, s, h]``."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Gpt2Layer(nn.Module):
    """A transformer layer of GPT-2."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = c["n_embd"], c["layer_norm_epsilon"]
        self.heads, self.tanh = c["n_head"], "none" if c["activation_function"] == "gelu" else "tanh"
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.tanh))


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = (part.to(x.dtype) for part in rotary)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def load(directory: str) -> Llama | Gpt2:
    """The model of a Hugging Face directory with its weights, in fp32."""
    c = json.loads((Path(directory) / "config.json").read_text())
    found = {
        name: value.float()
        for f in sorted(Path(directory).glob("*.safetensors"))
        for name, value in load_file(f).items()
    }
    model: Llama | Gpt2 = Gpt2(c) if c["model_type"] == "gpt2" else Llama(c)
    state = _gpt2_names(found, c) if c["model_type"] == "gpt2" else _llama_names(found, c)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"head.weight"}, missing
    return model


def _llama_names(found: dict[str, Tensor], c: dict[str, Any]) -> dict[str, Tensor]:
    state = {"embed.weight": found["model.embed_tokens.weight"], "norm.weight": found["model.norm.weight"]}
    if "lm_head.weight" in found:
        state["head.weight"] = found["lm_head.weight"]
    for i in range(c["num_hidden_layers"]):
        old, new = f"model.layers.{i}", f"layers.{i}"
        state[f"{new}.input_norm.weight"] = found[f"{old}.input_layernorm.weight"]
        state[f"{new}.post_norm.weight"] = found[f"{old}.post_attention_layernorm.weight"]
        state[f"{new}.qkv.weight"] = torch.cat([found[f"{old}.self_attn.{n}_proj.weight"] for n in "qkv"])
        state[f"{new}.out.weight"] = found[f"{old}.self_attn.o_proj.weight"]
        if "num_local_experts" not in c:
            halves = [found[f"{old}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
            state[f"{new}.mlp.gate_up.weight"] = torch.cat(halves)
            state[f"{new}.mlp.down.weight"] = found[f"{old}.mlp.down_proj.weight"]
            continue
        moe = f"{old}.block_sparse_moe"
        state[f"{new}.mlp.router.weight"] = found[f"{moe}.gate.weight"]
        for e in range(c["num_local_experts"]):
            halves = [found[f"{moe}.experts.{e}.w{n}.weight"] for n in (1, 3)]
            state[f"{new}.mlp.experts.{e}.gate_up.weight"] = torch.cat(halves)
            state[f"{new}.mlp.experts.{e}.down.weight"] = found[f"{moe}.experts.{e}.w2.weight"]
    return state


def _gpt2_names(found: dict[str, Tensor], c: dict[str, Any]) -> dict[str, Tensor]:
    found = {name.removeprefix("transformer."): value for name, value in found.items()}
    state = {"embed.weight": found["wte.weight"], "positions.weight": found["wpe.weight"]}
    state |= {f"norm.{n}": found[f"ln_f.{n}"] for n in ("weight", "bias")}
    linear = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for i in range(c["n_layer"]):
        for ours, theirs in {"norm_1": "ln_1", "norm_2": "ln_2"}.items():
            state |= {f"layers.{i}.{ours}.{n}": found[f"h.{i}.{theirs}.{n}"] for n in ("weight", "bias")}
        for ours, theirs in linear.items():  # GPT-2 keeps the weights of linear layers as [in, out]
            state[f"layers.{i}.{ours}.weight"] = found[f"h.{i}.{theirs}.weight"].t().contiguous()
            state[f"layers.{i}.{ours}.bias"] = found[f"h.{i}.{theirs}.bias"]
    return state

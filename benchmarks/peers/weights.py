"""Initial weights of a comparison: a Hugging Face directory of a preset's shape, made once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

SMALL = 1024  # hidden features of models whose weights are kept in fp32


def make(name: str, directory: Path) -> None:
    """Write random weights in Hugging Face's format.

    Args:
        name: key of ``sizes.SIZES``, or a preset of a GPT, LLaMA or Mixtral shape; its family is the name's beginning.
        directory: directory to make.
    """
    import transformers
    from sizes import size_of

    c = size_of(name).config
    torch.manual_seed(1)
    if name.startswith("gpt"):
        sizes: dict[str, Any] = {"vocab_size": c.vocab_size, "n_embd": c.hidden_size, "n_layer": c.num_layers}
        sizes |= {"n_head": c.num_attention_heads, "n_positions": c.max_position_embeddings}
        sizes |= {"activation_function": "gelu", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        sizes = {"vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_hidden_layers": c.num_layers}
        sizes |= {"intermediate_size": c.ffn_hidden_size, "num_attention_heads": c.num_attention_heads}
        sizes |= {"num_key_value_heads": c.num_query_groups, "max_position_embeddings": c.max_position_embeddings}
        sizes |= {"tie_word_embeddings": c.tie_embeddings}
        if c.num_experts:
            sizes |= {"num_local_experts": c.num_experts, "num_experts_per_tok": c.moe_router_topk}
            model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if c.hidden_size > SMALL:
        model.to(torch.bfloat16)  # half as much to write and to read
    model.save_pretrained(directory)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))

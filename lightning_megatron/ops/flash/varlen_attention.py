"""Attention inside of packed documents by one call of torch's flash kernel for sequences of any lengths."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.documents import attend_at_once
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash.flash_attention import beyond_flash

_MODULE = "torch.nn.attention.varlen"


def lacks_varlen() -> str | None:
    """The reason why this torch has no such kernel with windows, scales and grouped heads; ``None`` if it has."""
    if importlib.util.find_spec(_MODULE) is not None:
        taken = inspect.signature(importlib.import_module(_MODULE).varlen_attn).parameters
        if {"scale", "window_size", "enable_gqa"} <= taken.keys():
            return None
    return f"torch {torch.__version__} has no varlen_attn with windows, scales and grouped heads"


@torch.compiler.disable  # lengths differ from batch to batch: each would be a graph of its own
def varlen_documents(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Causal attention inside of each document, by one call for all of them, without dropout and sinks."""
    assert call.causal
    assert call.documents is not None
    varlen_attn: Any = importlib.import_module(_MODULE).varlen_attn
    window = (call.rule.window - 1 if call.rule.window else -1, 0)
    how = {"scale": call.rule.factor(q.shape[-1]), "window_size": window, "enable_gqa": True}

    def kernel(*given: Any) -> Tensor:
        out: Tensor = varlen_attn(*given, **how)
        return out

    return attend_at_once(kernel, q, k, v, call.documents, call.first_query)


def beyond_varlen(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """The reason why :func:`varlen_documents` does not support a call; ``None`` if it does."""
    return beyond_flash(q, k, v, call) if call.sinks is None else "sinks"

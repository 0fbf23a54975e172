"""What ``torch.compile`` of torch 2.11 gets wrong in silence: gradients of autograd functions.

Those are lost whose ``forward`` returns a tensor that an operation has given back, changed in place or as it was
(https://github.com/pytorch/pytorch/issues/180642). Other releases are right: the tests look for the cause.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron import GPTModule
from lightning_megatron.ops.activation import ACTIVATIONS
from lightning_megatron.ops.dropout import dropout

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
FAMILIES = ("gpt", "llama", "mixtral", "bloom", "gemma2", "gpt-oss")


class GivenBack(TorchFunctionMode):
    """Tensors that an operation has returned after it was given them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and any(out is each for each in (*args, *(kwargs or {}).values())):
            self.found.append(out)
        return out


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the package's autograd functions that ran, as in a trace; each result is a tensor of its own."""
    seen: set[str] = set()
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def checked(cls: type, *args: Any) -> Any:
        with GivenBack() as mode:
            out = apply(cls, *args)
        if cls.__module__.startswith("lightning_megatron"):
            seen.add(cls.__name__)
            for each in out if isinstance(out, tuple) else (out,):
                own = all(each is not other for other in mode.found)
                assert own, f"{cls.__name__} returns a tensor that an operation has given back"
        return out

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(checked))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_functions_in_a_model_are_their_own(functions: set[str], family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = GPTModule(f"{family}-tiny", **SIZES)
    module.configure_model()
    tokens = torch.randint(61, (2, 33))
    module.to(dtype).loss({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}).backward()
    assert functions


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_results_of_activations_are_their_own(functions: set[str], name: str) -> None:
    ACTIVATIONS[name](torch.randn(3, 8, requires_grad=True)).sum().backward()


def test_results_of_dropout_are_their_own(functions: set[str]) -> None:
    dropout(torch.ones(3, 8, requires_grad=True), 0.5).sum().backward()
    assert functions == {"_Dropout"}

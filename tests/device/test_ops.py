"""The Gaudi's versions of ops on a simulated one: forward, gradients, counters, the reference where off."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from tiny import tiny_llama
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.config.score_rule import ScoreRule, alibi_slopes
from lightning_megatron.layers.fp8_linear import Fp8Steps, multiply_in_fp8
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.rotary import RotaryEmbedding
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.activation import gelu_tanh, swiglu
from lightning_megatron.ops.adamw import adamw_reference, beyond_fused_adamw
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.fp8 import LINEAR_FP8, Fp8Recipe, reference_kernels
from lightning_megatron.ops.implementation import REFERENCE
from lightning_megatron.ops.registry import OPS, SELECTABLE, Ops, choices_of, op_table
from lightning_megatron.testing.parity import assert_same
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

S, B, N, G, D, H = 16, 2, 6, 3, 8, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
HAS_EXPERT_GRADIENTS = os.environ[hpu.PROFILE] != "1.19"
Inputs = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    hpu.reset_calls()


OPERATORS = {
    "FusedSDPA": "hpu::sdpa",
    "FusedRMSNorm": "hpu::rms_norm",
    "RotaryPosEmbeddingHelperV1": "hpu::rotary_pos_embedding",
    "FusedAdamW": "hpu::optimizer_adamw",
}
"""Operators that each kernel calls."""


def called(name: str) -> int:
    return sum(count for op, count in hpu.calls().items() if OPERATORS.get(name, name) in op)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def run(op: Callable[..., Tensor], shapes: Inputs, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Output and gradients, on the host, of inputs that bf16 can say."""
    leaves = [random(*s, seed=i).bfloat16().to(device, dtype).requires_grad_() for i, s in enumerate(shapes)]
    out = op(*leaves)
    assert out.device.type == device
    assert out.dtype == dtype
    out.backward(random(*out.shape, seed=9).bfloat16().to(device, dtype))
    grads = {f"gradient {i}": x.grad.cpu() for i, x in enumerate(leaves)}
    return {"output": out.detach().cpu(), **grads}


def rotated(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: op(x, *RotaryEmbedding(D).first(S, x.device, x.dtype))


def attending(causal: bool) -> Callable[..., Callable[..., Tensor]]:
    return lambda op: lambda q, k, v: op(q, k, v, AttentionCall(causal=causal))


FULL, GROUPED, ONE = ([(S, B, N, D), (S, B, g, D), (S, B, g, D)] for g in (N, G, 1))
CASES: dict[str, tuple[str, str, Callable[..., Callable[..., Tensor]], Inputs]] = {
    "rms_norm": ("rms_norm", "FusedRMSNorm", lambda op: lambda x, w: op(x, w, 1e-5), [(S, B, H), (H,)]),
    "rope": ("rope", "RotaryPosEmbeddingHelperV1", rotated, [(S, B, N, D)]),
    "causal": ("attention", "FusedSDPA", attending(True), FULL),
    "causal, grouped": ("attention", "FusedSDPA", attending(True), GROUPED),
    "causal, one key": ("attention", "FusedSDPA", attending(True), ONE),
    "all of it": ("attention", "FusedSDPA", attending(False), GROUPED),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_fused_versions_equal_the_references_forward_and_backward(case: str, dtype: torch.dtype) -> None:
    name, kernel, calling, shapes = CASES[case]
    right = run(calling(OPS[name].reference), shapes, torch.float32, "cpu")
    choice = Ops("hpu").choose(name)
    assert choice.implementation == kernel
    assert_same(run(calling(choice.run), shapes, dtype, "hpu"), right, rtol=TOLERANCE[dtype])
    assert called(kernel) >= 1
    assert choice.fallbacks == {}
    hpu.reset_calls()
    by_tensor = run(calling(OPS[name].run), shapes, dtype, "hpu")
    assert called(kernel) >= 1
    hpu.reset_calls()
    off = Ops("hpu", {name: "off"}).choose(name)
    assert off.implementation == REFERENCE
    assert_same(run(calling(off.run), shapes, dtype, "hpu"), right, rtol=TOLERANCE[dtype])
    assert called(kernel) == 0
    assert_same(by_tensor, right, rtol=TOLERANCE[dtype])
    assert Ops("hpu", {name: "require"}).problems() == []


@pytest.mark.parametrize(
    ("mode", "operator"),
    [
        ("auto", "sdpa_recomp_fwd"),
        ("no_recompute", "sdpa_fwd"),
        ("fast_softmax", "sdpa_recomp_fwd"),
        ("fast_softmax_no_recompute", "sdpa_fwd"),
    ],
)
def test_attention_in_every_mode_of_the_kernel(mode: str, operator: str) -> None:
    choice = Ops("hpu", {"attention": mode}).choose("attention")
    right = run(attending(True)(OPS["attention"].reference), GROUPED, torch.float32, "cpu")
    assert_same(run(attending(True)(choice.run), GROUPED, torch.float32, "hpu"), right, rtol=1e-5)
    assert called(f"hpu::{operator}") == 1
    assert called("sdpa") == 2, "forward and backward"
    assert choice.fallbacks == {}


def test_the_fast_softmax_is_recomputed_for_causal_attention_only() -> None:
    choice = Ops("hpu", {"attention": "fast_softmax"}).choose("attention")
    assert choice.implementation == "FusedSDPA, fast softmax"
    right = run(attending(False)(OPS["attention"].reference), GROUPED, torch.float32, "cpu")
    assert_same(run(attending(False)(choice.run), GROUPED, torch.float32, "hpu"), right, rtol=1e-5)
    assert choice.fallbacks == {"recomputation with the fast softmax is causal": "FusedSDPA"}


def test_attention_drops_weights_of_its_own() -> None:
    """Values that are unit vectors show each weight: zero with the probability given, or the reference's / 0.8."""
    q, values = random(S, B, N, S), torch.eye(S).view(S, 1, 1, S).expand(S, B, N, S).contiguous()
    choice, calls = Ops("hpu").choose("attention"), 20
    given = [x.to("hpu") for x in (q, q, values)]
    found = torch.stack([choice.run(*given, AttentionCall(causal=True, dropout=0.2)).cpu() for _ in range(calls)])
    right = OPS["attention"].reference(q, q, values, AttentionCall(causal=True)).expand_as(found)
    is_seen = torch.ones(S, S).tril().bool().view(S, 1, 1, S).expand_as(found)
    is_kept = found != 0
    torch.testing.assert_close(found[is_kept], right[is_kept] / 0.8)
    dropped = (~is_kept)[is_seen].float()
    assert abs(dropped.mean() - 0.2) < 4 * (0.2 * 0.8 / dropped.numel()) ** 0.5
    masks = is_kept.permute(0, 2, 3, 1, 4).flatten(0, 2)  # of each call, sample and head
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == calls * B * N
    assert called("FusedSDPA") >= calls


@pytest.mark.parametrize(
    ("queries", "keys", "head", "reason"), [(4, 16, 8, "decoding with a cache"), (16, 16, 136, "a head of 136")]
)
def test_what_the_kernel_cannot_do_is_done_by_torch_and_noted(queries: int, keys: int, head: int, reason: str) -> None:
    q, k = random(queries, B, N, head), random(keys, B, N, head, seed=1)
    choice = Ops("hpu").choose("attention")
    call = AttentionCall(causal=True, first_query=keys - queries)
    out = choice.run(q.to("hpu"), k.to("hpu"), k.to("hpu"), call)
    assert_same({"out": out.cpu()}, {"out": OPS["attention"].reference(q, k, k, call)}, rtol=1e-5)
    assert called("FusedSDPA") == 0
    ((noted, other),) = choice.fallbacks.items()
    assert reason in noted
    assert other == "torch"


def test_slopes_that_the_kernel_does_not_know_are_computed_block_by_block_and_noted_once() -> None:
    leaves = [random(S, B, N, D, seed=seed) for seed in range(3)]
    choice, call = Ops("hpu").choose("attention"), AttentionCall(causal=True, rule=ScoreRule(slopes=alibi_slopes(N)))
    found = [x.to("hpu").requires_grad_() for x in leaves]
    right = [x.clone().requires_grad_() for x in leaves]
    out, expected = choice.run(*found, call), OPS["attention"].reference(*right, call)
    out.sum().backward()
    expected.sum().backward()
    assert_same({"out": out.detach().cpu()}, {"out": expected.detach()}, rtol=1e-5)
    for mine, theirs in zip(found, right, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert called("FusedSDPA") == 0
    assert choice.fallbacks == {"ALiBi": "block by block"}


def test_positions_of_their_own_are_rotated_without_the_helper() -> None:
    x, positions = random(S, B, N, D), torch.randint(0, 50, (S, B))
    angles = RotaryEmbedding(D)(positions, torch.float32)
    choice = Ops("hpu").choose("rope")
    out = choice.run(x.to("hpu"), *(a.to("hpu") for a in angles))
    assert_same({"out": out.cpu()}, {"out": OPS["rope"].reference(x, *angles)}, rtol=1e-5)
    assert list(choice.fallbacks.values()) == ["few passes"]


def experts(activation: Callable[[Tensor], Tensor]) -> Callable[..., Callable[..., Tensor]]:
    ids = torch.randint(8, (S, 2), generator=torch.Generator().manual_seed(1))

    def calling(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weights, fc1, fc2: op(x, ids.to(x.device), weights, fc1, fc2, activation, 2)

    return calling


def test_experts_by_the_operator_where_it_has_gradients() -> None:
    shapes: Inputs = [(S, H), (S, 2), (3, 2, 24, H), (3, H, 24)]
    right = run(experts(swiglu)(OPS["mixture_of_experts"].reference), shapes, torch.float32, "cpu")
    choice = Ops("hpu").choose("mixture_of_experts")
    assert (choice.implementation == REFERENCE) == (not HAS_EXPERT_GRADIENTS)
    assert_same(run(experts(swiglu)(choice.run), shapes, torch.float32, "hpu"), right, rtol=1e-5)
    assert (called("mixture_of_experts") > 0) == HAS_EXPERT_GRADIENTS
    if HAS_EXPERT_GRADIENTS:
        hpu.reset_calls()
        plain: Inputs = [(S, H), (S, 2), (3, 24, H), (3, H, 24)]
        right = run(experts(gelu_tanh)(OPS["mixture_of_experts"].reference), plain, torch.float32, "cpu")
        assert_same(run(experts(gelu_tanh)(choice.run), plain, torch.float32, "hpu"), right, rtol=1e-5)
        assert called("mixture_of_experts") == 0
        assert list(choice.fallbacks) == ["the operator is for SwiGLU"]
    else:
        assert "gradients" in choice.why


def test_adamw_takes_the_steps_of_torchs() -> None:
    steps = {}
    for device, modes in {"cpu": None, "hpu": "adamw=require"}.items():
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(device)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
        choice = Ops(device, modes).choose("adamw")
        optimizer = choice.run(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-30)
        for seed in range(5):
            model.zero_grad()
            model(random(4, 8, seed=seed).to(device)).square().mean().backward()
            optimizer.step()
        steps[device] = {name: p.detach().cpu() for name, p in model.named_parameters()}
    assert choice.implementation == "FusedAdamW"
    assert called("FusedAdamW") == 2 * 5  # a call a group
    assert_same(steps["hpu"], steps["cpu"], rtol=2e-5)


LLAMA = tiny_llama(num_layers=3)
ALL_OFF = dict.fromkeys(SELECTABLE, "off")


def gradients(model: GPTModel, device: str) -> dict[str, Tensor]:
    tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    loss = model(tokens, labels=tokens)
    loss.backward()
    return {"loss": loss.detach().cpu(), **{name: p.grad.cpu() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("modes", [None, ALL_OFF, "attention=require,rms_norm=require,rope=require"])
def test_a_model_on_the_device_has_the_gradients_of_one_on_a_cpu(modes: str | dict[str, str] | None) -> None:
    torch.manual_seed(1)
    right = gradients(GPTModel(LLAMA), "cpu")
    torch.manual_seed(1)
    model = GPTModel(LLAMA, ops=Ops("hpu", modes)).to("hpu")
    assert_same(gradients(model, "hpu"), right, rtol=1e-4)
    used = [called(kernel) for kernel in ("FusedSDPA", "FusedRMSNorm", "RotaryPosEmbeddingHelperV1")]
    # Three layers: one attention, two norms and one more at the end, queries and keys.
    least = [0, 0, 0] if isinstance(modes, dict) else [3, 7, 6]
    assert all((n >= low) if low else (n == 0) for n, low in zip(used, least, strict=True))
    assert all(not c["fallbacks"] for chosen in choices_of(model).values() for c in chosen)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_fp8_products_of_the_operators_are_those_of_the_reference(kind: type[nn.Module]) -> None:
    found = {}
    selection = LINEAR_FP8.choose("hpu", "require")
    own = selection.run
    assert own is not None
    assert own.arithmetic.mixes_formats == (torch.hpu.get_device_name() == "GAUDI3")
    for device, kernels in (("cpu", reference_kernels(own.arithmetic)), ("hpu", own)):
        torch.manual_seed(1)
        linear = kind(32, 48, bias=True).to(device)
        products = multiply_in_fp8(linear, kernels, Fp8Recipe(stochastic_rounding=False), selection)
        steps = Fp8Steps([linear], ParallelMesh.single())
        for seed in (1, 2):
            linear.zero_grad()
            x = random(16, 2, 32, seed=seed).to(device).requires_grad_()
            out = linear(x)
            out.backward(random(16, 2, 48, seed=seed).to(device))
            steps.after_optimizer_step()
        tensors = {"out": out.detach(), "dx": x.grad, "dw": linear.weight.grad, "scale": products.scale}
        found[device] = {name: value.cpu() for name, value in tensors.items()}
    assert_same(found["hpu"], found["cpu"], rtol=1e-5)
    assert called("cast_to_fp8_v2") > 0
    assert called("fp8_gemm_v2") == 6  # three a step


def test_a_model_in_fp8_keeps_its_first_and_last_layer() -> None:
    torch.manual_seed(1)
    plain = GPTModel(LLAMA).to("hpu", torch.bfloat16)
    torch.manual_seed(1)
    model = GPTModel(LLAMA, ops=Ops("hpu", "linear_fp8=require")).to("hpu", torch.bfloat16)
    right = gradients(plain, "hpu")
    assert called("fp8_gemm_v2") == 0
    ours = gradients(model, "hpu")
    assert called("fp8_gemm_v2") == 3 * 4
    assert ours["loss"].item() == pytest.approx(right["loss"].item(), rel=0.02)
    model.fp8.after_optimizer_step()
    state = copy.deepcopy(model.state_dict())
    assert state["layers.1.mlp.fc1.products.amax_history"][0].min() > 0
    chosen = {name: c["chosen"] for name, found in choices_of(model).items() for c in found if c["op"] == "linear_fp8"}
    assert [chosen[f"layers.{i}.mlp.fc1"] for i in range(3)] == [REFERENCE, "hpu::fp8_gemm_v2", REFERENCE]


def test_the_table_names_the_kernels() -> None:
    chosen = {row["op"]: row["chosen"] for row in op_table(Ops("hpu", "linear_fp8=auto"))}
    assert chosen == {
        "attention": "FusedSDPA",
        "rms_norm": "FusedRMSNorm",
        "layer_norm": "torch's kernel",
        "rope": "RotaryPosEmbeddingHelperV1",
        "mixture_of_experts": "hpu::mixture_of_experts" if HAS_EXPERT_GRADIENTS else REFERENCE,
        "grouped_linear": "a product a group",
        "linear_fp8": "hpu::fp8_gemm_v2",
        "adamw": "FusedAdamW",
    }


def trained(folder: Path, accelerator: str, epochs: int, path: Path | None = None, **strategy: Any) -> list[float]:
    """Losses of a run of so many epochs of three steps; ``last.ckpt`` is what is left of it."""
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "ffn_hidden_size": 64}
    module = GPTModule("llama-tiny", lr=1e-2, eps=1e-20, **sizes)
    tokens = torch.randint(61, (12, 17), generator=torch.Generator().manual_seed(3))
    loader = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=2, **strategy),
        accelerator=accelerator,
        devices=1,
        precision="bf16-mixed",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=[recorder, CSVLogger(folder, name="", version="")],
    )
    trainer.fit(module, loader, ckpt_path=path)
    trainer.save_checkpoint(folder / "last.ckpt")
    return recorder.series("train_loss")


def test_a_run_goes_on_across_devices(tmp_path: Path) -> None:
    """``FusedAdamW`` begins, torch's AdamW on a CPU goes on, and the other way round."""
    whole = trained(tmp_path / "whole", "cpu", 2)
    for first, second in (("hpu", "cpu"), ("cpu", "hpu")):
        folder = tmp_path / first
        begun = trained(folder, first, 1)
        gone_on = trained(folder, second, 2, folder / "last.ckpt")
        # Kernels round bf16 elsewhere, which shows in the third digit.
        assert [*begun, *gone_on] == pytest.approx(whole, rel=0.01)
    assert called("FusedAdamW") >= 2 * 3 * 2  # and where a checkpoint asks what its state looks like
    report = json.loads((tmp_path / "hpu" / "op_report.json").read_text())
    assert report["device"] == "cpu"  # the run that went on there
    report = json.loads((tmp_path / "cpu" / "op_report.json").read_text())
    chosen = {c["op"]: c["chosen"] for found in report["modules"].values() for c in found}
    assert chosen == {
        "adamw": "FusedAdamW",
        "attention": "FusedSDPA",
        "rms_norm": "FusedRMSNorm",
        "rope": "RotaryPosEmbeddingHelperV1",
    }
    assert not any(c["fallbacks"] for found in report["modules"].values() for c in found)


def test_a_run_in_fp8_learns_and_keeps_its_scales(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", "hpu", 2)
    assert called("fp8_gemm_v2") == 0
    mode = {"ops": "linear_fp8=require"}
    ours = trained(tmp_path / "whole", "hpu", 2, **mode)
    assert called("fp8_gemm_v2") == 6 * 2 * 3 * 4
    assert ours == pytest.approx(plain, rel=0.05)
    begun = trained(tmp_path / "parts", "hpu", 1, **mode)
    gone_on = trained(tmp_path / "parts", "hpu", 2, tmp_path / "parts" / "last.ckpt", **mode)
    assert [*begun, *gone_on] == ours
    assert trained(tmp_path / "parts", "cpu", 2, tmp_path / "parts" / "last.ckpt") == []  # loads, and is at its end


def test_weight_decay_that_bf16_would_lose_is_left_to_torch() -> None:
    assert "weight decay" in str(beyond_fused_adamw(torch.bfloat16, "hpu"))
    choice = Ops("hpu").choose("adamw", beyond_fused_adamw(torch.bfloat16, "hpu"))
    assert (choice.run, choice.implementation) == (adamw_reference, REFERENCE)
    assert beyond_fused_adamw(torch.float32, "hpu") is None

"""Blocks that are compiled one by one: gradients of another dtype, decoding, lines about new graphs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from tracing import compiled

from lightning_megatron import device as devices
from lightning_megatron.lightning.compat._private import Recompilation, compiler_counts
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.step.graphs import BlockGraphs, recompilation_line
from lightning_megatron.lightning.validation.slow import warn_of_graphs_without_gain
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.optim.buffers.slot import set_grad_dtype

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32) -> GPTModel:
    torch.manual_seed(3)
    return GPTModel(configuration(f"{family}-tiny", **SIZES)).to(dtype)


def compile_blocks(model: GPTModel) -> GPTModel:
    for block in model.layers.values():
        block.compile(backend="aot_eager", dynamic=False)
    return model


@pytest.mark.skipif(not hasattr(torch.empty(0), "grad_dtype"), reason="torch before 2.10")
def test_a_new_graph_is_made_where_bf16_parameters_have_fp32_gradients() -> None:
    model, plain = (model_of(dtype=torch.bfloat16) for _ in range(2))
    compile_blocks(model)
    for each in (model, plain):
        for param in each.parameters():
            set_grad_dtype(param, torch.float32)

    def both_lengths() -> None:
        for length in (12, 7):
            for each in (model, plain):
                each(TOKENS[:, :length], labels=TOKENS[:, :length]).backward()
                model.eval()
                with torch.no_grad():
                    model(TOKENS[:, :length])
                model.train()

    _, graphs, breaks = compiled(both_lengths)
    assert not breaks
    assert graphs >= 2 * 2, "training and evaluation, two lengths"
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, name
        assert param.grad.dtype == torch.float32
        torch.testing.assert_close(param.grad, other.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_decoding_runs_without_graphs(family: str) -> None:
    model = compile_blocks(model_of(family))
    expected = generate(model_of(family), TOKENS, 4, temperature=0.0)
    found, graphs, _ = compiled(generate, model, TOKENS, 4, temperature=0.0)
    assert found.tolist() == expected.tolist()
    assert not graphs
    _, graphs, _ = compiled(model, TOKENS)
    assert graphs, "other calls are compiled again"


def test_a_model_that_graphs_make_no_faster_on_a_cpu_is_told(recwarn: pytest.WarningsRecorder) -> None:
    for family, kind in (("llama", devices.CPU), ("gpt", devices.CUDA)):
        warn_of_graphs_without_gain(GPTModule(f"{family}-tiny"), kind)
    assert not recwarn
    with pytest.warns(UserWarning, match="compile: blocks with gelu are about as fast without graphs on a CPU"):
        warn_of_graphs_without_gain(GPTModule("gpt-tiny"), devices.CPU)


def test_routers_that_count_make_no_graph_for_each_forward() -> None:
    model = compile_blocks(model_of("mixtral"))

    def steps(seeds: range) -> None:
        for seed in seeds:
            tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(seed))
            model(tokens, labels=tokens).backward()
            for block in model.layers.values():
                block.mlp.router.after_optimizer_step()

    compiled(steps, range(2))
    before = compiler_counts()
    steps(range(2, 8))
    assert compiler_counts().since(before).graphs == 0


def test_a_copy_of_a_compiled_block_runs_as_it_is() -> None:
    model = compile_blocks(model_of())
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(TOKENS), model(TOKENS))


def test_each_cause_of_a_new_graph_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    graphs = BlockGraphs(True, CPU)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        for length in (4, 4, 5, 5, 4):
            with graphs.batch("validation_step", None):
                function(torch.zeros(length))
    lines = [r.getMessage() for r in caplog.records if "new graph" in r.getMessage()]
    assert len(lines) == 1
    why = "torch 2.6" if torch.__version__.startswith("2.6") else "tensor 'x' size mismatch"
    assert f"no earlier one fits: {why}" in lines[0]


def test_a_cause_is_one_line_without_torchs_number() -> None:
    again = Recompilation("3/1", "forward", "3/0: tensor 'x' size mismatch.\n expected 4")
    assert recompilation_line(again).endswith(
        "'forward', since no earlier one fits: tensor 'x' size mismatch. expected 4"
    )

"""Lines of the log against those that Megatron-LM has printed, to the character."""

from __future__ import annotations

from datetime import datetime

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers import padded_vocab_size
from lightning_megatron.lightning.monitoring import megatron_lines as lines
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.optim.lr_schedule import LRSchedule

TRAINED = """\
 iteration       25/73242187 | consumed samples:           50 | elapsed time per iteration (ms): 87.0 | learning rate: 1.638E-08 | global batch size:     2 | lm loss: 1.086954E+01 | loss scale: 4294967296.0 | grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       26/73242187 | consumed samples:           52 | elapsed time per iteration (ms): 86.5 | learning rate: 1.704E-08 | global batch size:     2 | lm loss: 1.086217E+01 | loss scale: 4294967296.0 | grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       27/73242187 | consumed samples:           54 | elapsed time per iteration (ms): 88.4 | learning rate: 1.769E-08 | global batch size:     2 | lm loss: 1.087129E+01 | loss scale: 4294967296.0 | grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   0 |
"""  # noqa: E501
SKIPPED = """\
 iteration        1/  508626 | consumed samples:          288 | elapsed time per iteration (ms): 255940.5 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 4294967296.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
 iteration        2/  508626 | consumed samples:          576 | elapsed time per iteration (ms): 243438.3 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 2147483648.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
 iteration        3/  508626 | consumed samples:          864 | elapsed time per iteration (ms): 243344.4 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 1073741824.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
"""  # noqa: E501


def test_iterations_of_a_run() -> None:
    schedule = LRSchedule(6e-5, 6e-6, warmup=183_105, decay=126_953_125)
    for number, time, loss, line in zip(
        (25, 26, 27), (87.0, 86.5, 88.4), (10.86954, 10.86217, 10.87129), TRAINED.splitlines(), strict=True
    ):
        rate = schedule.learning_rate(2 * number)
        at = lines.Iteration(
            number, 146_484_375 // 2, 2 * number, time, rate, 2, {"lm loss": loss}, 2.0**32, grad_norm=0.0
        )
        assert lines.iteration_line(at) == line


def test_iterations_that_overflow() -> None:
    scale = DynamicLossScale()
    for number, time, line in zip((1, 2, 3), (255940.5, 243438.3, 243344.4), SKIPPED.splitlines(), strict=True):
        scale.update(found_inf=True)
        at = lines.Iteration(
            number, 146_484_375 // 288, 288 * number, time, 0.0, 288, loss_scale=scale.scale, skipped=1
        )
        assert lines.iteration_line(at) == line
        assert lines.scalars(at).keys() == {"learning-rate", "batch-size", "loss-scale", "iteration-time"}


def test_throughput_stands_behind_the_time() -> None:
    at = lines.Iteration(3, 10, 12, 5.04, 1e-3, 4, {"lm loss": 2.0}, grad_norm=0.5, teraflops=123.45, nans=1)
    line = lines.iteration_line(at)
    assert "(ms): 5.0 | throughput per GPU (TFLOP/s/GPU): 123.5 | learning rate: 1.000E-03 |" in line
    end = "| loss scale: 1.0 | grad norm: 0.500 | number of skipped iterations:   0 | number of nan iterations:   1 |"
    assert line.endswith(end)
    found = lines.scalars(at)
    assert (found["lm loss"], found["throughput"], found["grad-norm"]) == (2.0, 123.45, 0.5)


def test_the_start_of_a_run() -> None:
    dump = lines.argument_lines({"adam_beta2": 0.95, "accumulate_allreduce_grads_in_fp32": False, "adam_beta1": 0.9})
    assert dump == [
        "------------------------ arguments ------------------------",
        "  accumulate_allreduce_grads_in_fp32 .............. False",
        "  adam_beta1 ...................................... 0.9",
        "  adam_beta2 ...................................... 0.95",
        "-------------------- end of arguments ---------------------",
    ]
    assert lines.batch_line(288, 288, None) == "setting number of micro-batches to constant 288"
    assert lines.batch_line(1, 1024, (16, 16, 5_000_000)) == (
        "will use batch size rampup starting from global batch size 16 to global batch size 1024 with batch size"
        " increments 16 over 5000000 samples."
    )
    assert lines.vocabulary_line(50257, padded_vocab_size(50257, 8)) == (
        " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)"
    )
    assert lines.parallel_lines({"tensor": 8, "pipeline": 1}, 1234) == [
        "> initializing torch distributed ...",
        "> initialized tensor model parallel with size 8",
        "> initialized pipeline model parallel with size 1",
        "> setting random seeds to 1234 ...",
    ]
    assert lines.started_lines(15.424, datetime(2024, 7, 16, 22, 14, 1)) == [
        "time to initialize megatron (seconds): 15.424",
        "[after megatron is initialized] datetime: 2024-07-16 22:14:01 ",
    ]
    held_out = lines.evaluated_samples(146_484_375 // 288, 1000, 40, 288)
    assert lines.target_lines(146_484_375, *held_out) == [
        "> building train, validation, and test datasets ...",
        " > datasets target sizes (minimum size):",
        "    train:      146484375",
        "    validation: 5863680",
        "    test:       11520",
    ]


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_of_a_rank_of_the_model_with_7_5_billion(rank: int) -> None:
    layout = ParallelLayout(tp=8).resolve(8)
    with torch.device("meta"):
        model = GPTModel(configuration("gpt3-7.5b", vocab_size=50257), ParallelMesh(layout, rank))
    count = sum(p.numel() for p in model.parameters())
    assert lines.parameter_line(rank, 0, count) == (
        f" > number of parameters on (tensor, pipeline) model parallel rank ({rank}, 0): 941594624"
    )

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_megatron.lightning.stopping.agreement import Agreement
from lightning_megatron.mesh import Axis


def ask(numbers: list[list[int]]) -> list[int]:
    agreement = Agreement(Axis("world"), torch.device("cpu"))
    answers = []
    for number in numbers[dist.get_rank()]:
        time.sleep(0.02 * dist.get_rank())
        answers.append(agreement.ask(number))
        dist.all_reduce(torch.ones(3))  # others use the group, too
    return [*answers, agreement.ask_now(0)]


def test_all_ranks_learn_the_greatest_number_in_the_same_step(ranks):
    assert ranks(2, ask, [[0, 0, 0, 0], [0, 15, 15, 0]]) == [[0, 0, 15, 0, 0]] * 2
    assert ranks(2, ask, [[2, 0, 0, 9], [15, 0, 0, 0]]) == [[0, 15, 0, 0, 9]] * 2

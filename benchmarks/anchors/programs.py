"""The programs behind the published points, as data: properties of their kernels and sharding.

``passes`` of a program, the speed of its attention and the kernels of its experts are fitted once for all its rows
(``plan_fit.py``); everything else is what its documentation says. Megatron-LM's grouped products are one kernel for
every expert of the rank (Transformer Engine's).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.tools.planning.time.software import Software


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        software: its kernels.
        fsdp: True if parameters are sharded over data-parallel ranks, and gathered for each layer and micro-batch.
    """

    software: Software
    fsdp: bool = False


MEGATRON = Program(
    Software(
        passes=1.0,
        kernels=30,
        kernels_per_expert=2,
        loss_in_forward=False,
        sum_block=0,
        fused_loss=True,
        fused_ring=True,
        fused_sum=True,
    ),
)
NEMO = Program(
    Software(
        passes=1.0,
        kernels=20,
        kernels_per_expert=2,
        tp_overlap=0.7,
        loss_in_forward=False,
        sum_block=0,
        fused_loss=True,
        fused_ring=True,
        fused_sum=True,
    ),
)
TORCHTITAN = Program(
    Software(passes=1.0, kernels=20, loss_in_forward=False, sum_block=0, fused_ring=True),
    fsdp=True,
)
LLM_FOUNDRY = Program(
    Software(passes=1.0, kernels=40, loss_in_forward=False, sum_block=0),
    fsdp=True,
)
MEGATRON_CI = Program(
    Software(passes=1.5, kernels=300, loss_in_forward=False, sum_block=0, fused_ring=True),
)
"""Deterministic kernels, no fusion of gradient sums: most of a toy model's step is the host's."""
NANOTRON = Program(
    Software(passes=1.5, kernels=40, loss_in_forward=False, sum_block=0),
)

PROGRAMS = {
    "megatron": MEGATRON,
    "megatron-ci": MEGATRON_CI,
    "nemo": NEMO,
    "torchtitan": TORCHTITAN,
    "llm-foundry": LLM_FOUNDRY,
    "nanotron": NANOTRON,
}


def program_name(framework: str) -> str | None:
    """Name of the program of a row, ``None`` for one that is not described here."""
    known = {
        "torchtitan": "torchtitan",
        "llm-foundry": "llm-foundry",
        "nanotron": "nanotron",
        "NeMo AutoModel": "torchtitan",
        "NeMo": "nemo",
        "Megatron Bridge": "nemo",
        "Megatron": "megatron",
    }
    return next((name for start, name in known.items() if framework.startswith(start)), None)

"""Every rule of pipelines that a user can break, told with its own words before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.errors import ConfigError


class Manual(GPTModule):
    def __init__(self, **options: Any) -> None:
        super().__init__("gpt-tiny", **options)
        self.automatic_optimization = False


class Ordinary(LightningModule):
    pass


def gpt(layers: int = 8) -> GPTModule:
    return GPTModule("gpt-tiny", num_layers=layers)


def check(module: LightningModule, batch_size: int = 8, devices: int | None = None, **options: Any) -> None:
    """Checks of the launcher before it spawns."""
    strategy = MegatronStrategy(**options)
    pp, tp = options.get("pp", 1), options.get("tp", 1)
    strategy.parallel_devices = [torch.device("cpu")] * (devices or pp * tp)
    strategy.check(module, DataLoader(range(8), batch_size=batch_size))  # type: ignore[arg-type]


CHUNKS = {"pp": 2, "vpp": 2}
BROKEN: dict[str, tuple[LightningModule, dict[str, Any], str]] = {
    "layers over ranks": (gpt(6), {"pp": 4}, "pp=4: 6 layers (num_layers) do not split over pp x vpp = 4 x 1 stages"),
    "layers over chunks": (gpt(6), CHUNKS, "vpp=2: 6 layers (num_layers) do not split over pp x vpp = 2 x 2 stages"),
    "chunks without a pipeline": (gpt(), {"vpp": 2}, "vpp=2: interleaved chunks need a pipeline, and pp=1 has none"),
    "nothing to interleave": (
        gpt(),
        {"pp": 2, "pipeline_schedule": "interleaved"},
        "vpp=1: there is nothing to interleave with one chunk a rank: raise vpp, or choose '1f1b'",
    ),
    "chunks in 1f1b": (
        gpt(),
        {**CHUNKS, "pipeline_schedule": "1f1b"},
        "pipeline_schedule='1f1b': this schedule runs one chunk a rank and vpp=2 asks for 2",
    ),
    "chunks in gpipe": (
        gpt(),
        {**CHUNKS, "pipeline_schedule": "gpipe"},
        "pipeline_schedule='gpipe': this schedule runs",
    ),
    "unknown schedule": (
        gpt(),
        {"pp": 2, "pipeline_schedule": "1f1bb"},
        "pipeline_schedule='1f1bb': unknown; nearest valid: 1f1b",
    ),
    "first stage too large": (
        gpt(),
        {"pp": 4, "first_stage_layers": 7},
        "first_stage_layers=7: that leaves 1 of 8 layers",
    ),
    "uneven without a pipeline": (gpt(), {"first_stage_layers": 8}, "first_stage_layers=8: there is one stage"),
    "embedding counted in vain": (
        gpt(),
        {"pp": 2, "count_embedding": True},
        "8 layers and 1 counted as layers do not split",
    ),
    "two ways to be uneven": (
        gpt(),
        {"pp": 2, "first_stage_layers": 3, "count_loss": True},
        "count_loss=True: first_stage_layers and last_stage_layers already define",
    ),
    "layout and a number": (
        gpt(),
        {"pp": 2, "pipeline_layout": "Et*4|t*4L", "last_stage_layers": 4},
        "last_stage_layers=4: the layout already defines",
    ),
    "layout with too few layers": (
        gpt(),
        {"pp": 2, "pipeline_layout": "Ett|ttL"},
        "num_layers=8: the layout has 4 layers",
    ),
    "layout with other stages": (
        gpt(),
        {"pp": 2, "pipeline_layout": "E|t*4|t*4L"},
        "3 stages do not split over pp=2 ranks",
    ),
    "layout that cannot be read": (gpt(), {"pp": 2, "pipeline_layout": "Et*4|x4L"}, "'x' means nothing here"),
    "layout without a loss": (gpt(), {"pp": 2, "pipeline_layout": "Et*4|t*4"}, "one L, and it comes last"),
    "micro-batches": (
        gpt(),
        {"pp": 2, "micro_batch_size": 3},
        "micro_batch_size=3: a batch of 8 samples does not split into micro-batches of 3; nearest valid: 2, 4, 1",
    ),
    "devices": (gpt(), {"pp": 4, "devices": 6}, "pp=4: tp x pp x cp = 1 x 4 x 1 = 4 does not divide the world size 6"),
    "manual optimization": (Manual(), {"pp": 2}, "automatic_optimization=False: a pipeline runs forward and backward"),
    "no shape": (Ordinary(), {"pp": 2}, "pp=2: Ordinary has no method hidden_shape(batch)"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_has_its_own_words(rule: str) -> None:
    module, options, text = BROKEN[rule]
    with pytest.raises(ConfigError) as caught:
        check(module, **options)
    assert [str(p) for p in caught.value.problems if text in str(p)], caught.value


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (gpt(), {"pp": 4, "vpp": 2, "pipeline_schedule": "zero-bubble", "micro_batch_size": 1}),
        (gpt(7), {**CHUNKS, "pipeline_layout": "Ett|tt|tt|tL"}),
        (gpt(7), {"pp": 4, "count_embedding": True}),
        (gpt(5), {**CHUNKS, "first_stage_layers": 2, "pipeline_schedule": "interleaved"}),
        (Manual(), {}),
        (Ordinary(), {}),
    ],
)
def test_what_keeps_the_rules_passes(module: LightningModule, options: dict[str, Any]) -> None:
    check(module, **options)

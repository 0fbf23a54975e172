"""Names of lightning-habana and DDP: each is answered with what to write."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron import ConfigError, MegatronPrecision, MegatronStrategy
from lightning_megatron.lightning.registered import HABANA

PAGE = (Path(__file__).parents[3] / "docs" / "migrate-habana.md").read_text()


@pytest.mark.skipif(find_spec("lightning_habana") is not None, reason="lightning-habana registers its own")
@pytest.mark.parametrize("name", HABANA)
def test_a_strategy_of_lightning_habana(name: str) -> None:
    assert name in StrategyRegistry.available_strategies()
    with pytest.raises(ConfigError, match=rf"strategy='{name}': .* write MegatronStrategy\(") as error:
        Trainer(strategy=name, accelerator="cpu", devices=1)
    assert "docs/migrate-habana.md" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ({"find_unused_parameters": True}, "leave it out"),
        ({"ddp_comm_hook": print}, "grad_reduce_dtype"),
        ({"bucket_cap_mb": 25}, "bucket_size, in elements"),
        ({"sharding_strategy": "FULL_SHARD"}, "ZeRO 1"),
        ({"cpu_offload": True}, "tp, pp and recompute"),
    ],
)
def test_an_argument_of_another_strategy(argument: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        MegatronStrategy(**argument)


@pytest.mark.parametrize(("name", "answer"), [("bf16", "'bf16-mixed'"), ("fp8", "ops={'linear_fp8': 'auto'}")])
def test_a_precision_of_lightning_habana(name: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        MegatronPrecision(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HABANA)
def test_the_page_has_every_name(name: str) -> None:
    assert f'`"{name}"`' in PAGE

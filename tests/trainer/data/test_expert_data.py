"""Data that replicas who share experts can and cannot read."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, MegatronStrategy, MixtralModule
from lightning_megatron.errors import DataError
from lightning_megatron.testing.trainer import quiet_trainer

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
SIZES |= {"head_dim": 8, "ffn_hidden_size": 16, "vocab_size": 40, "num_experts": 2, "vocab_multiple": 4}


def predictions(samples: int, ep: int) -> Tensor | str:
    """Logits of the samples this rank has seen, or what was refused."""
    L.seed_everything(2, verbose=False)
    rows = torch.randint(40, (samples, 6), generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(MegatronStrategy(ep=ep))
    try:
        found = trainer.predict(MixtralModule("mixtral-tiny", **SIZES), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    except DataError as error:
        return str(error)
    assert found is not None
    return torch.cat(found)  # type: ignore[arg-type]


def test_replicas_that_share_experts_predict_what_one_process_does(ranks):
    (expected,) = ranks(1, predictions, 8, 1)
    for ep in (1, 2):
        own = ranks(2, predictions, 8, ep)
        torch.testing.assert_close(torch.stack(own, 1).flatten(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_uneven_loaders_are_refused_where_replicas_would_wait_for_each_other(ranks):
    assert [len(own) for own in ranks(2, predictions, 5, 1)] == [3, 2], "no expert is shared: 5 samples are 3 and 2"
    for text in ranks(2, predictions, 5, 2):
        assert text.startswith("the predict data end after 1 batches on rank 1 and after 2 batches on rank 0.")


@pytest.mark.parametrize("length", [7])
def test_sequences_that_do_not_split_over_tp_are_refused_in_training_and_padded_elsewhere(length, ranks):
    for told, shape in ranks(2, odd_sequence, length):
        assert f"seq_length={length}: padding to a multiple of 2 would be routed and counted like tokens" in told
        assert shape == (2, length, 40)


def odd_sequence(length: int) -> tuple[str, tuple[int, ...]]:
    L.seed_everything(2, verbose=False)
    rows = torch.randint(40, (2, length + 1), generator=torch.Generator().manual_seed(1))
    batches = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    module = MixtralModule("mixtral-tiny", **SIZES)
    trainer = quiet_trainer(MegatronStrategy(tp=2), max_steps=1)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, DataLoader(batches, batch_size=2))  # type: ignore[arg-type]
    found = trainer.predict(module, DataLoader(batches, batch_size=2))  # type: ignore[arg-type]
    assert found is not None
    return str(caught.value), tuple(found[0].shape)  # type: ignore[union-attr]

"""Batches of a language model on one process: nothing in them is passed over, and losses are what they say."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron import GPTModule, LlamaModule, MixtralModule
from lightning_megatron.data import GPTDataset, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.lightning.modules.text_batch import nan_where_unknown, without_faults

VOCAB, B, S, H = 40, 3, 8, 16
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "vocab_size": VOCAB}
SIZES |= {"max_position_embeddings": S, "init_std": 0.3}
MODULES = {
    "gpt": (GPTModule, "gpt-tiny", SIZES),
    "llama": (LlamaModule, "llama-tiny", SIZES | {"num_query_groups": 2, "ffn_hidden_size": 24}),
}


def module_of(name: str = "llama") -> GPTModule:
    torch.manual_seed(1)
    kind, preset, sizes = MODULES[name]
    module = kind(preset, **sizes)
    module.configure_model()
    return module


def batch_of(**changes: Any) -> dict[str, Tensor]:
    text = torch.randint(VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(2))
    return {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone()} | changes


def holed(key: str, value: int) -> dict[str, Tensor]:
    batch = batch_of()
    batch[key][1, 5] = value
    return batch


# Ids


@pytest.mark.parametrize("value", [VOCAB, 100, 10**9, -1, -7])
@pytest.mark.parametrize("key", ["tokens", "labels"])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(key: str, value: int) -> None:
    module, batch = module_of(), holed(key, value)
    text = re.escape(f"batch['{key}'][1, 5] is {value}: vocab_size={VOCAB}, so ids are 0 to {VOCAB - 1}")
    for call in (module.loss, module.token_losses, module.hidden):
        with pytest.raises(DataError, match=text):
            call(batch)


def test_what_is_known_is_left_alone() -> None:
    module, batch = module_of(), holed("labels", -100)
    assert module.batch_fault(batch) is None
    assert module.batch_fault([batch["tokens"]]) is None
    assert module.batch_fault({"tokens": torch.zeros(0, S, dtype=torch.int64)}) is None
    module.loss(batch)


def test_a_token_cannot_be_left_out_like_a_label() -> None:
    with pytest.raises(DataError, match=re.escape("batch['tokens'][1, 5] is -100")):
        module_of().loss(holed("tokens", -100))


def test_a_position_beyond_the_learned_ones_is_named() -> None:
    positions = torch.arange(S).expand(B, S).clone()
    positions[2, 0] = S
    with pytest.raises(DataError, match=re.escape(f"batch['position_ids'][2, 0] is {S}: max_position_embeddings={S}")):
        module_of("gpt").loss(batch_of(position_ids=positions))
    module_of("llama").loss(batch_of(position_ids=positions))


def test_a_repaired_batch_can_be_computed_with() -> None:
    batch = holed("tokens", VOCAB)
    batch["labels"][0, 0] = -1
    repaired = without_faults(batch, VOCAB)
    assert module_of().batch_fault(repaired) is None
    assert repaired["tokens"][1, 5] == 0
    assert repaired["labels"][0, 0] == -100
    assert batch["tokens"][1, 5] == VOCAB


def test_where_ids_cannot_be_read_their_loss_is_nan_without_a_gradient() -> None:
    """Ids of the meta device stand for those of any device: they are never read."""
    weight = torch.ones(1, requires_grad=True)

    class OnDevice(Tensor):
        is_cpu = False

    def of(ids: Tensor) -> Tensor:
        out: Tensor = nan_where_unknown(weight * 2, {"tokens": ids.as_subclass(OnDevice)}, VOCAB)
        return out.as_subclass(Tensor)

    assert of(torch.tensor([0, VOCAB - 1])).item() == 2
    bad = of(torch.tensor([0, VOCAB]))
    bad.backward()
    assert bad.isnan()
    assert weight.grad == 0


# Keys


@pytest.mark.parametrize("key", ["attention_mask", "document_ids", "max_seqlen", "input_ids"])
def test_a_key_that_means_something_to_a_model_is_refused(key: str) -> None:
    module, batch = module_of(), batch_of(**{key: torch.ones(B, S, dtype=torch.int64)})
    module.extra_batch_keys = (key,)  # declaring it does not make the model read it
    for call in (module.loss, module.hidden, lambda b: module.predict_step(b, 0)):
        with pytest.raises(ConfigError, match=re.escape(f"batch['{key}']")):
            call(batch)


def test_a_key_of_the_users_own_is_declared() -> None:
    module, batch = module_of(), batch_of(reward=torch.ones(B, S), number=torch.arange(B), name=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"batch\['reward'\].*extra_batch_keys.*position_ids"):
        module.loss(batch)
    module.extra_batch_keys = ("reward",)
    module.loss(batch)


def test_shapes_are_not_stretched() -> None:
    with pytest.raises(ConfigError, match=r"batch\['loss_mask'\]=\[3, 1\].*shape of 'tokens'"):
        module_of().loss(batch_of(loss_mask=torch.ones(B, 1)))
    with pytest.raises(ConfigError, match="has no 'tokens'"):
        module_of().loss({"labels": torch.zeros(B, S, dtype=torch.int64)})


def test_predictions_are_at_the_positions_of_the_batch() -> None:
    module = module_of("gpt").eval()
    positions = torch.arange(S).flip(0).expand(B, S)
    batch = batch_of(position_ids=positions)
    assert torch.equal(module.predict_step(batch, 0), module(batch["tokens"], positions))
    assert not torch.equal(module.predict_step(batch, 0), module(batch["tokens"]))


def test_documents_of_our_own_data_set_are_kept_apart(tmp_path: Path) -> None:
    words = torch.arange(1, 60) % 5
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        writer.add_document(words.numpy().astype(np.uint16), [59])
    how: dict[str, Any] = {"seq_length": S, "eod_id": 0, "reset_position_ids": True}
    text = IndexedDataset(tmp_path / "text")
    sets = [GPTDataset(text, **how, reset_attention_mask=resets) for resets in (True, False)]
    apart, mixed = (torch.utils.data.default_collate([data[0], data[1]]) for data in sets)
    module = module_of().eval()
    assert not torch.equal(module.loss(apart), module.loss(mixed))
    logits, first = module.predict_step(apart, 0)[0], apart["segment_ids"][0] == 2
    alone = module(apart["tokens"][:1, first])[0]
    torch.testing.assert_close(logits[first], alone)


# Labels


def test_labels_that_repeat_their_tokens_are_warned_of_once() -> None:
    module, batch = module_of(), batch_of()
    batch["labels"] = batch["tokens"].clone()
    batch["labels"][:, :2] = -100
    with pytest.warns(UserWarning, match="labels are not shifted"):
        module.loss(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.loss(batch)
        module_of().loss(batch_of())
        ones = torch.ones(B, S, dtype=torch.int64)
        module_of().loss({"tokens": ones, "labels": ones})


# Losses


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-9, 0.3])
def test_a_mask_of_any_size_gives_the_mean(scale: float) -> None:
    module = module_of()
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(4))
    right = module.loss(batch_of(loss_mask=mask))
    torch.testing.assert_close(module.loss(batch_of(loss_mask=mask * scale)), right)


@pytest.mark.parametrize("empty", [{"loss_mask": torch.zeros(B, S)}, {"labels": torch.full((B, S), -100)}])
def test_a_mask_that_keeps_nothing_gives_zero_and_no_gradient(empty: dict[str, Tensor]) -> None:
    module, batch = module_of(), batch_of(**empty)
    loss = module.loss(batch)
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", list(MODULES))
def test_one_forward_gives_hidden_states_and_both_losses_of_torch(name: str) -> None:
    module, batch = module_of(name), holed("labels", -100)
    batch["loss_mask"] = torch.rand(B, S, generator=torch.Generator().manual_seed(4))
    logits = module(batch["tokens"])
    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(B, S)
    weights = batch["loss_mask"] * (batch["labels"] != -100)
    hidden = module.hidden(batch)
    assert hidden.shape == (B, S, H)
    assert module.model is not None
    output = module.model.tied_weight if module.model.head.weight is None else module.model.head.weight
    torch.testing.assert_close((hidden @ output.t())[..., :VOCAB], logits)
    torch.testing.assert_close(module.token_losses(batch), each)
    torch.testing.assert_close(module.token_losses(batch, hidden), each)
    torch.testing.assert_close(module.loss(batch, hidden), (each * weights).sum() / weights.sum())
    right = torch.autograd.grad((each * weights).sum(), list(module.parameters()))
    ours = torch.autograd.grad((module.token_losses(batch, hidden) * weights).sum(), list(module.parameters()))
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_experts_are_balanced_beside_a_loss_of_ones_own_as_beside_ours() -> None:
    torch.manual_seed(1)
    sizes = SIZES | {"num_experts": 4, "moe_aux_loss_coeff": 0.5, "ffn_hidden_size": 16, "num_query_groups": 2}
    module = MixtralModule("mixtral-tiny", **sizes)
    module.configure_model()
    batch, params = batch_of(), list(module.parameters())
    right = torch.autograd.grad(module.loss(batch), params)
    ours = torch.autograd.grad(module.token_losses(batch).mean(), params)
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

"""Documents in one sequence against the same documents one by one, in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import VOCAB, B, Packing, S, batch_of, halves, module_of, one_by_one, packings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron import MixtralModule
from lightning_megatron.documents import Documents
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.moe.layer import MoELayer
from lightning_megatron.moe.tokens import RoutedTokens
from lightning_megatron.ops.attention import attention, attention_reference, documents_by_length
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.testing.parity import assert_same, differences
from tests.families import RECURRENT, TINY, hf_files, hf_model, our_config, our_model, random_model, tokens_of
from tests.tiny import tiny_llama

FEW = [
    Packing(((5, 3, 8), (16,), (1, 2, 3, 4, 6), (7, -2, 7)), 1),
    Packing(((-3, 13), (4, 4, 4, 4), (-16,), (9, 7)), 2, (0, 1, 0, 1)),
]


def packed(model: GPTModel, packing: Packing) -> dict[str, Tensor]:
    """Loss and gradients of whole sequences, as :func:`one_by_one` has them of documents."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in halves(packing.batch(model.config.vocab_size)):
        documents = Documents.of_segments(batch.pop("segment_ids"))
        labels = batch.pop("labels").masked_fill(~documents.tokens(), -100)
        loss = model(**batch, labels=labels, documents=documents) / 2
        loss.backward()
        total += loss.detach()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total} | {name: torch.zeros_like(p) for name, p in model.named_parameters()} | found


# Every family


@pytest.mark.parametrize("family", sorted(TINY.keys() - RECURRENT))
def test_logits_are_those_of_transformers_for_one_document_a_row(family: str) -> None:
    pytest.importorskip("transformers")
    theirs = hf_model(TINY[family])
    ours = our_model(TINY[family], hf_files(theirs))
    tokens = tokens_of(2, 23)
    rows = [(9, 1, 13), (4, 4, 15)]
    segments = torch.stack([torch.repeat_interleave(torch.arange(1, 4), torch.tensor(row)) for row in rows])
    with torch.no_grad():
        logits = ours(tokens, documents=Documents.of_segments(segments))
        for row, ids, found in zip(tokens, segments, logits, strict=True):
            for number in (1, 2, 3):
                expected = theirs(row[ids == number][None]).logits[0]
                assert (found[ids == number] - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("family", sorted(TINY.keys() - RECURRENT))
def test_losses_and_gradients_are_those_of_the_documents(family: str) -> None:
    model = random_model(our_config(TINY[family]))
    for packing in FEW:
        assert_same(packed(model, packing), one_by_one(model, packing), rtol=1e-5)


@cache
def llama() -> GPTModel:
    torch.manual_seed(1)
    return GPTModel(tiny_llama(max_position_embeddings=24, init_std=0.3))


@settings(max_examples=15, derandomize=True)
@given(packings())
def test_any_packing(packing: Packing) -> None:
    assert differences(packed(llama(), packing), one_by_one(llama(), packing), rtol=1e-5) == {}


@pytest.mark.parametrize("depths", [1, 2])
def test_further_tokens_are_predicted_inside_of_a_document(depths: int) -> None:
    """The mean of what is predicted ``k`` tokens further ahead has ``k`` tokens less of each document."""
    weight = 0.3
    model = random_model(our_config(TINY["deepseek_v3"], mtp_num_layers=depths, mtp_loss_scaling_factor=weight))
    params, packing = list(model.parameters()), Packing(((5, 1, 8), (2, 9, -3)), 3)
    batch = packing.batch(model.config.vocab_size)
    documents = Documents.of_segments(batch["segment_ids"])
    labels = batch["labels"].masked_fill(~documents.tokens(), -100)

    def losses(given: dict[str, Any]) -> tuple[Tensor, ...]:
        """Gradients of the main loss, and of what modules add to it; then the losses of modules."""
        found = []
        for trains in (False, True):
            grads = torch.autograd.grad(model.train(trains)(**given), params, materialize_grads=True)
            found.append(torch.cat([grad.flatten() for grad in grads]))
        return found[0], found[1] - found[0], *model.mtp_losses

    whole = losses({"tokens": batch["tokens"], "labels": labels, "documents": documents})
    spans = [(row, *span) for row in range(2) for span in packing.spans(row)]
    expected = [torch.zeros_like(x) for x in whole]
    for row, first, end in spans:
        here = slice(row, row + 1), slice(first, end)
        alone = losses({"tokens": batch["tokens"][here], "labels": labels[here]})
        # Gradients of two modules have weights of their own, and cannot be told apart.
        for i, ahead in enumerate((0, 1, *range(1, depths + 1))):
            share = max(0, end - first - ahead) / sum(max(0, stop - begin - ahead) for _, begin, stop in spans)
            expected[i] += alone[i] * share
    names = ("main", "added", *(f"loss {k}" for k in range(depths)))
    ours, right = (dict(zip(names, x, strict=True)) for x in (whole, expected))
    if depths > 1:
        del ours["added"], right["added"]
    assert_same(ours, right, rtol=1e-5)


# Attention


@pytest.mark.parametrize("rows", [((3, 1, 5),), ((4, 5), (-4, 5)), ((9,), (-9,)), ((-9,), (-9,))])
def test_attention_is_that_of_a_mask_which_is_never_made(rows: tuple[tuple[int, ...], ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    packing = Packing(rows, 0)
    documents = Documents.of_segments(packing.batch(5)["segment_ids"])
    q, k, v = (torch.randn(9, len(rows), n, 4, generator=generator, requires_grad=True) for n in (4, 2, 2))
    out = documents_by_length(attention, q, k, v, AttentionCall(causal=True, documents=documents))
    grad = torch.randn(out.shape, generator=generator)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.zeros_like(out)
    for row in range(len(rows)):
        for first, end in packing.spans(row):
            part = [x[first:end, row : row + 1] for x in (q, k, v)]
            alone = attention_reference(*part, AttentionCall(causal=True))
            expected = expected.index_put((torch.arange(first, end), torch.tensor(row)), alone[:, 0])
    torch.testing.assert_close(out, expected)
    if expected.requires_grad:
        for mine, theirs in zip(ours, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
            torch.testing.assert_close(mine, theirs)
    else:
        assert not any(x.any() for x in ours)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_mask_or_scores_of_whole_sequences_are_made() -> None:
    length = 1024
    model = GPTModel(tiny_llama(max_position_embeddings=length, hidden_size=8, ffn_hidden_size=8, vocab_size=16))
    documents = Documents((tuple((i, i + 16) for i in range(0, length, 16)),), length)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with Largest() as largest:
        model(tokens, labels=tokens, documents=documents).backward()
    assert largest.elements < length * length // 16


def test_sequences_of_one_document_each_are_computed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("lightning_megatron.ops.attention.attend_documents", never)
    module, batch = module_of(), batch_of()
    whole = module.loss(batch)
    assert torch.equal(module.loss(batch | {"segment_ids": torch.full((B, S), 7)}), whole)
    assert torch.equal(module.loss(batch | {"cu_seqlens": torch.tensor([[0, S], [0, S]])}), whole)


# Experts


@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_padding_visits_no_expert_and_counts_nowhere(balancing: str, dispatcher: str) -> None:
    config = our_config(
        TINY["mixtral"],
        moe_load_balancing=balancing,
        moe_token_dispatcher=dispatcher,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.1,
    )
    torch.manual_seed(4)
    layer = MoELayer(config, ParallelMesh.single(), sequence_parallel=False)
    x = torch.randn(11, 2, config.hidden_size)
    present = torch.ones(11, 2, dtype=torch.bool)
    present[7:] = False

    def outcome(x: Tensor, present: Tensor | None) -> dict[str, Tensor]:
        layer.zero_grad()
        layer.router.load.batch.reset()
        out, aux = layer(x, None if present is None else RoutedTokens(present, present, present.sum(0)))
        assert aux is not None
        (out.square().sum() + aux).backward()
        counts, losses, _ = layer.router.load.take(torch.device("cpu"))
        grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        return {"out": out.detach()[:7], "aux": aux.detach(), "counts": counts, **losses, **grads}

    assert not layer(x, RoutedTokens(present, present, present.sum(0)))[0][7:].any()
    layer.router.load.take(torch.device("cpu"))
    assert_same(outcome(x, present), outcome(x[:7], None))
    assert differences(outcome(x, None), outcome(x[:7], None))


def test_experts_of_a_padded_row_are_balanced_as_without_the_padding() -> None:
    module = module_of(MixtralModule, "mixtral-tiny", num_query_groups=2, num_experts=4, ffn_hidden_size=16,
                       moe_aux_loss_coeff=0.5, moe_load_balancing="seq_aux_loss")  # fmt: skip
    batch, segments = batch_of(), torch.ones(B, S, dtype=torch.int64)
    segments[:, 9:] = 0
    params = list(module.parameters())
    ours = torch.autograd.grad(module.loss(batch | {"segment_ids": segments}), params)
    cut = {key: value[:, :9] for key, value in batch.items()}
    right = torch.autograd.grad(module.loss(cut), params)
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


# Generation


@settings(max_examples=10, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.sampled_from([None, 3]))
def test_the_last_document_of_a_prompt_goes_on_alone(lengths: list[int], stop: int | None) -> None:
    module = module_of()
    tokens = tokens_of(4, 7) % VOCAB
    segments = torch.ones(4, 7, dtype=torch.int64)
    for row, length in zip(segments, lengths, strict=True):
        row[7 - length :] = 2
    how: dict[str, Any] = {"temperature": 0.0, "stop": stop}
    found = module.generate(tokens, 5, segment_ids=segments, **how)
    assert torch.equal(found[:, :7], tokens)
    for row, text, length in zip(found, tokens, lengths, strict=True):
        alone = module.generate(text[None, 7 - length :], 5, **how)[0, length:]
        assert row[7 : 7 + len(alone)].tolist() == alone.tolist()
        assert set(row[7 + len(alone) :].tolist()) <= {stop}


def test_caches_go_on_with_one_document_a_row() -> None:
    model = GPTModel(tiny_llama()).eval()
    documents = Documents.of_segments(torch.tensor([[1, 1, 2, 2]]))
    with pytest.raises(ConfigError, match="documents='given': decoding with caches continues one document per row"):
        model(torch.zeros(1, 4, dtype=torch.int64), caches=[KVCache() for _ in model.layers], documents=documents)


def test_a_prompt_that_ends_in_padding_is_refused() -> None:
    segments = torch.tensor([[1, 1, 2], [1, 1, 0]])
    with pytest.raises(ConfigError, match="segment_ids='row 1': a prompt to continue must not end in padding"):
        module_of().generate(torch.zeros(2, 3, dtype=torch.int64), 2, segment_ids=segments)


# Graphs


def test_new_lengths_make_no_new_graphs() -> None:
    plain, compiled = (GPTModel(tiny_llama(init_std=0.3)) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    for layer in compiled.layers.values():
        layer.compile(backend="eager", dynamic=False)
    graphs = []
    for rows in (((5, 11), (16,)), ((1, 2, 13), (-4, 12)), ((8, 8), (3, 13)), ((2, 14), (1, 1, 14))):
        batch = Packing(rows, 0).batch(40)
        documents = Documents.of_segments(batch.pop("segment_ids"))
        torch.testing.assert_close(compiled(**batch, documents=documents), plain(**batch, documents=documents))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1

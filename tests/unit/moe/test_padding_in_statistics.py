"""Statistics of routers over padded batches: Hugging Face's with an attention mask, formulas, texts without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_megatron import MixtralModule
from lightning_megatron.config.moe import MoEConfig
from lightning_megatron.documents import Documents
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.aux_loss import count_tokens
from lightning_megatron.moe.router import Router
from lightning_megatron.moe.tokens import RoutedTokens, up_to_the_last

S, B, H, E, K = 7, 3, 8, 5, 2
LENGTHS = torch.tensor([7, 4, 2])
REAL = torch.arange(S)[:, None] < LENGTHS  # [S, B]
TOKENS = RoutedTokens(REAL, REAL, LENGTHS)


def router_of(**fields: Any) -> tuple[Router, Tensor]:
    torch.manual_seed(0)
    config = MoEConfig(num_experts=E, moe_router_topk=K, **fields)
    return Router(H, config, ParallelMesh.single(), sequence_parallel=False, init_std=1.0), torch.randn(S, B, H)


def logits_of(router: Router, x: Tensor) -> Tensor:
    return F.linear(x, router.weight).detach()


def loss_of(router: Router, x: Tensor, tokens: RoutedTokens | None = None) -> float:
    loss = router(x, tokens).aux_loss
    assert loss is not None
    return loss.item()


def test_the_balance_is_hugging_faces_with_an_attention_mask() -> None:
    router, x = router_of(moe_aux_loss_coeff=0.5)
    by_rows = logits_of(router, x).transpose(0, 1).reshape(-1, E)
    theirs = load_balancing_loss_func((by_rows,), E, K, REAL.t().long())
    assert loss_of(router, x, TOKENS) == pytest.approx(0.5 * float(theirs) / K, rel=1e-6)


def test_the_loss_of_sequences_is_the_mean_over_those_that_have_tokens() -> None:
    router, x = router_of(moe_aux_loss_coeff=1.0, moe_load_balancing="seq_aux_loss")
    alone = [loss_of(router, x[: LENGTHS[b], b : b + 1]) for b in range(B)]
    assert loss_of(router, x, TOKENS) == pytest.approx(sum(alone) / B, rel=1e-6)
    nothing = RoutedTokens(REAL, REAL & torch.tensor([True, True, False]), torch.tensor([7, 4, 0]))
    assert loss_of(router, x, nothing) == pytest.approx(sum(alone[:2]) / 2, rel=1e-6)


def test_the_global_loss_is_the_formula_over_the_tokens_of_the_batch_so_far() -> None:
    router, x = router_of(moe_aux_loss_coeff=1.0, moe_load_balancing="global_aux_loss")
    first = count_tokens(router(x[:5]).experts, E).float()
    probs, experts = logits_of(router, x).softmax(-1)[REAL], logits_of(router, x).topk(K).indices[REAL]
    mean = (first + count_tokens(experts, E)) / 2
    expected = E * (mean * probs.sum(0)).sum() / (K * (mean.sum() / K) ** 2)
    assert loss_of(router, x, TOKENS) == pytest.approx(expected.item(), rel=1e-6)


def test_the_z_loss_is_the_mean_over_tokens_that_count() -> None:
    router, x = router_of(moe_z_loss_coeff=0.5)
    expected = 0.5 * logits_of(router, x).logsumexp(-1)[REAL].square().mean()
    assert loss_of(router, x, TOKENS) == pytest.approx(expected.item(), rel=1e-6)


def test_the_bias_and_the_telemetry_see_tokens_that_count() -> None:
    router, x = router_of(moe_router_score="sigmoid", moe_expert_bias_update_rate=0.125)
    visits = RoutedTokens(torch.ones_like(REAL), REAL, LENGTHS)
    experts = router(x, visits).experts
    assert (experts < E).all(), "tokens that do not count may still visit experts"
    counts = count_tokens(experts.view(S, B, K)[REAL], E)
    assert router.load.take(torch.device("cpu"))[0].tolist() == counts.tolist()
    router.after_optimizer_step()
    assert router.expert_bias.tolist() == (0.125 * (counts.float().mean() - counts.float()).sign()).tolist()


def test_a_batch_without_tokens_costs_nothing() -> None:
    none = torch.zeros_like(REAL)
    for balancing in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        router, x = router_of(moe_aux_loss_coeff=1.0, moe_z_loss_coeff=1.0, moe_load_balancing=balancing)
        assert loss_of(router, x, RoutedTokens(none, none, torch.zeros(B, dtype=torch.int64))) == 0.0


rows = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@settings(derandomize=True)
@given(rows)
def test_tokens_up_to_the_last_of_their_document(row: list[tuple[int, bool]]) -> None:
    """Against a search in each document."""
    segments = torch.tensor([[1 + len({*row[:i]}) * 10 + s if s else 0 for i, (s, _) in enumerate(row)]])
    kept = torch.tensor([[keep for _, keep in row]])
    documents = Documents.of_segments(segments)
    found = up_to_the_last(kept, documents.ends())[0].tolist()
    (spans,) = documents.spans
    for place, is_counted in enumerate(found):
        document = next((span for span in spans if span[0] <= place < span[1]), (0, 0))
        assert is_counted == any(kept[0, place : document[1]].tolist())
    whole = up_to_the_last(kept, None)[0].tolist()
    assert whole == [any(kept[0, place:].tolist()) for place in range(len(row))]


# The model

LENGTH, PADDED = 8, 14
BATCH_KEYS = ("tokens", "labels", "loss_mask")
CASES: dict[str, dict[str, Any]] = {
    "balance": {},
    "sequences": {"moe_load_balancing": "seq_aux_loss"},
    "all replicas": {"moe_load_balancing": "global_aux_loss"},
    "z": {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.3},
    "further tokens": {"mtp_num_layers": 1},
    "sigmoid": {"moe_router_score": "sigmoid", "moe_shared_expert_ffn_hidden_size": 16},
}


def module_of(**fields: Any) -> MixtralModule:
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
    sizes |= {"ffn_hidden_size": 16, "vocab_size": 40, "num_experts": 4, "moe_aux_loss_coeff": 0.5, "init_std": 0.2}
    module = MixtralModule("mixtral-tiny", **sizes | fields)
    module.configure_model()
    return module


def padded(said_by: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two texts with masked prompts, and the same followed by padding, of which ``said_by`` tells."""
    text = torch.randint(1, 40, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH)
    mask[:, :3] = 0.0
    short = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    filled = {key: F.pad(value, (0, PADDED - LENGTH)) for key, value in short.items()}
    if said_by == "labels":
        short.pop("loss_mask")
        filled.pop("loss_mask")
        filled["labels"][:, LENGTH:] = -100
    return short, filled


def gradients(module: MixtralModule, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*module.parameters()], allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("said_by", ["loss_mask", "labels"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_padding(case: str, said_by: str) -> None:
    short, long = padded(said_by)
    module, other = module_of(**CASES[case]), module_of(**CASES[case])
    right, ours = module.loss(short), other.loss(long)
    torch.testing.assert_close(ours, right)
    for mine, expected in zip(gradients(other, ours), gradients(module, right), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


def test_a_last_token_without_a_label_is_text() -> None:
    """As in transformers, where labels are shifted in the model: the loss lacks the last token, the balance has it."""
    short, _ = padded("labels")
    short["labels"][:, -1] = -100
    module, other = module_of(), module_of()
    ours, right = module.loss(short), other.loss(short | {"loss_mask": torch.ones(2, LENGTH)})
    for mine, expected in zip(gradients(module, ours), gradients(other, right), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["balance", "sequences", "all replicas", "z"])
def test_so_are_those_of_a_head_of_ones_own(case: str) -> None:
    """By ``hidden``, whose states are those of all tokens: a head may read any of them."""
    short, long = padded("loss_mask")
    module, other = module_of(**CASES[case]), module_of(**CASES[case])
    right, ours = module.hidden(short), other.hidden(long)
    plain = other.hidden({"tokens": long["tokens"]})
    assert torch.equal(ours, plain)
    given = zip(gradients(other, ours[:, :LENGTH].sum()), gradients(module, right.sum()), strict=True)
    for mine, expected in given:
        # Products of other lengths round otherwise, on AVX2 by 4e-6 of a sum that nearly cancels.
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_padding_takes_no_place_of_an_expert_with_a_capacity() -> None:
    """Padding of one id would fill the experts that it prefers, whose best weights it has."""
    module = module_of(moe_capacity_factor=1.0, moe_aux_loss_coeff=0.0)
    module.eval()
    _, long = padded("loss_mask")
    places = torch.arange(LENGTH, PADDED)
    with torch.no_grad():
        fillings = [{**long, "tokens": long["tokens"].index_fill(1, places, number)} for number in range(1, 12)]
        found = {module.loss(batch).item() for batch in fillings}
    assert len(found) == 1


def test_packed_documents_count_as_each_alone() -> None:
    """Tails without a loss, in the middle of a row too: the load is the sum of the loads of single documents."""
    text = torch.randint(1, 40, (1, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0.0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0]])
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0]])
    row = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    module = module_of()
    routers = [part for part in module.modules() if isinstance(part, Router)]

    def load_of(*batches: dict[str, Tensor]) -> list[list[int]]:
        for batch in batches:
            module.loss(batch)
        return [router.load.take(torch.device("cpu"))[0].tolist() for router in routers]

    together = load_of(row | {"segment_ids": segments})
    assert sum(together[0]) == (3 + 5) * 2
    assert together == load_of(*({key: x[:, a:b] for key, x in row.items()} for a, b in ((0, 5), (5, 11))))

"""The choice of an op's implementation, its report, and fallbacks of calls that it does not support."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest
import torch
from tiny import tiny_llama
from torch import Tensor

from lightning_megatron import MegatronStrategy, ParallelLayout, TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.ops.adamw import adamw_reference, adamw_torch
from lightning_megatron.ops.attention import ATTENTION, attention_reference
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.implementation import Implementation, Op
from lightning_megatron.ops.norm import rms_norm, rms_norm_cpu, rms_norm_reference
from lightning_megatron.ops.registry import OPS, SELECTABLE, Ops, choices_of, parse_op_modes
from lightning_megatron.testing.parity import assert_same
from lightning_megatron.tools.cli.main import main

TINY = tiny_llama(hidden_size=16, ffn_hidden_size=32)


def doubled(x: Tensor) -> Tensor:
    return x + x


def doubled_fast(x: Tensor) -> Tensor:
    return x * 2


def not_long(x: Tensor) -> str | None:
    return "long" if len(x) > 3 else None


LACKING = Implementation("newest", "cpu", lambda: doubled_fast, lambda: "the chip is too old")
SHORT = Implementation("fast", "cpu", lambda: doubled_fast, unsupported=not_long)
PLAIN = Implementation("plain", None, lambda: doubled)


def test_the_best_available_implementation_is_chosen_with_the_reasons():
    op = Op("double", (LACKING, SHORT, PLAIN), run=doubled, reference=doubled)
    choice = op.choose("cpu")
    assert (choice.implementation, choice.why) == ("fast", "newest: the chip is too old")
    assert op.choose("cuda").implementation == "plain"
    assert op.choose("cuda").run is doubled
    assert op.choose("cpu", unless="of this module").implementation == "plain"
    assert "of this module" in op.choose("cpu", unless="of this module").why
    assert op.choose("cpu", "off").run is op.reference
    assert op.choose("cpu", "off").why == "switched off"


def test_an_unsupported_call_goes_to_the_next_implementation_and_is_noted_once():
    choice = Op("double", (SHORT, PLAIN), run=doubled, reference=doubled).choose("cpu")
    for length in (2, 5, 6):
        torch.testing.assert_close(choice.run(torch.ones(length)), torch.full((length,), 2.0))
    assert choice.fallbacks == {"long": "plain"}


def test_a_required_implementation_has_no_fallback():
    with pytest.raises(ConfigError, match=r"double=require.*newest: the chip is too old"):
        Op("double", (LACKING, PLAIN), run=doubled, reference=doubled).choose("cpu", "require")
    with pytest.raises(ConfigError, match=r"there is no implementation of it for cuda"):
        Op("double", (SHORT, PLAIN), run=doubled, reference=doubled).choose("cuda", "require")
    choice = Op("double", (SHORT, PLAIN), run=doubled, reference=doubled).choose("cpu", "require")
    assert choice.run(torch.ones(2)).sum() == 4
    with pytest.raises(ConfigError, match="long"):
        choice.run(torch.ones(5))


def test_a_variant_is_taken_where_it_is_asked_for_and_nowhere_else():
    fast = Implementation(
        "fast", "cpu", lambda: doubled, variant="inexact", unsupported=lambda x: "long" if len(x) > 4 else None
    )
    op = Op("double", (PLAIN, fast), run=doubled, reference=doubled)
    assert op.modes == ("auto", "require", "off", "inexact")
    chosen = {mode: op.choose("cpu", mode).implementation for mode in ("auto", "off", "inexact")}
    assert chosen == {"auto": "plain", "off": "reference", "inexact": "fast"}
    choice = op.choose("cpu", "inexact")
    choice.run(torch.ones(5))
    assert choice.fallbacks == {"long": "plain"}
    assert Ops("cpu", "attention=fast_softmax").choose("attention").implementation == "blocks of queries"
    with pytest.raises(ConfigError, match="attention=fast_softmax"):
        MegatronStrategy(ops="attention=fast")


def test_modes_are_a_mapping_or_text_and_all_faults_are_told_at_once():
    assert parse_op_modes(" attention=off, rope=auto,") == ({"attention": "off", "rope": "auto"}, [])
    assert parse_op_modes({"attention": "off"}) == ({"attention": "off"}, [])
    assert parse_op_modes(None) == ({}, [])
    with pytest.raises(ConfigError) as caught:
        MegatronStrategy(ops={"atention": "off", "rope": "on"}, micro_batch_size=0)
    told = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "'atention'" in told
    assert "nearest valid: attention" in told
    assert "rope=off" in told
    with pytest.raises(ConfigError, match="twice"):
        MegatronStrategy(ops="rope=off,rope=auto")
    with pytest.raises(ConfigError, match=r"ops=\[.rope.\]: must be a mapping or text"):
        MegatronStrategy(ops=["rope"])


def test_a_kernel_that_is_not_there_is_missed_before_any_process_is_started():
    strategy = MegatronStrategy(ops="rope=require,attention=require")
    strategy.parallel_devices = [torch.device("cpu")]
    with pytest.raises(ConfigError, match=r"rope=require.*there is no implementation of it for cpu") as caught:
        strategy.check()
    assert len(caught.value.problems) == 1  # attention has a kernel
    names = {p.value for p in Ops("hpu", dict.fromkeys(SELECTABLE, "require")).problems()}
    assert names >= {f"{op}=require" for op in ("attention", "rms_norm", "rope", "adamw", "mixture_of_experts")}


def test_a_strategy_gives_the_functions_themselves_on_a_cpu_and_without_one_the_tensors_decide():
    assert Ops("cpu").choose("rms_norm").run is rms_norm_cpu
    assert Ops().choose("rms_norm").run is rms_norm
    assert Ops(None, "rms_norm=off").choose("rms_norm").run is rms_norm_reference


def test_every_op_is_a_function_of_tensors_and_the_optimizer_is_chosen_beside_them():
    for name, op in OPS.items():
        assert str(inspect.signature(op.reference).return_annotation) in ("Tensor", "tuple[Tensor, Tensor]"), name
    assert set(SELECTABLE) - set(OPS) == {"adamw", "linear_fp8"}
    choice = Ops("cpu").choose("adamw")
    assert (choice.run, choice.implementation) == (adamw_torch, "torch's fused AdamW")
    for ops in (Ops(), Ops("cpu", "adamw=off")):
        choice = ops.choose("adamw")
        assert (choice.run, choice.implementation) == (adamw_reference, "reference")
    with pytest.raises(ConfigError, match=r"adamw=require.*of this module"):
        Ops("cpu", "adamw=require").choose("adamw", "of this module")


def gradients(ops: Ops, config: TransformerConfig = TINY) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = GPTModel(config, ops=ops)
    tokens = torch.randint(0, 40, (2, 9))
    loss = model(tokens, labels=tokens)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


EXPERTS = TINY.replace(num_experts=4, moe_router_topk=2, moe_dynamic=True)
GPT_2 = TINY.replace(norm="layernorm", position_embedding="learned", add_bias_linear=True, activation="gelu_tanh")


@pytest.mark.parametrize("config", [TINY, GPT_2, EXPERTS, EXPERTS.replace(moe_dynamic=False)], ids=str)
def test_a_model_of_references_has_the_same_loss_and_gradients(config):
    off = gradients(Ops("cpu", dict.fromkeys(SELECTABLE, "off")), config)
    assert_same(gradients(Ops("cpu"), config), off, rtol=1e-5)
    assert_same(gradients(Ops(), config), off, rtol=1e-5)


def test_the_report_names_every_module_with_its_choice():
    model = GPTModel(TINY, ops=Ops("cpu", {"rms_norm": "off"}))
    found = choices_of(model)
    assert {name for name in found} == {
        *(f"layers.{i}.{part}" for i in range(2) for part in ("attention", "attention_norm", "mlp_norm")),
        "head.norm",
    }
    assert [(c["op"], c["chosen"]) for c in found["layers.0.attention"]] == [
        ("rope", "few passes"),
        ("attention", "blocks of queries"),
    ]
    assert found["head.norm"] == [
        {"op": "rms_norm", "chosen": "reference", "why": "switched off", "fallbacks": {}},
    ]


def test_ranks_that_share_a_sequence_say_that_they_attend_in_their_own_way():
    mesh = ParallelMesh(ParallelLayout(cp=2).resolve(2))
    model = GPTModel(TINY, mesh, ops=Ops("cpu"))
    (attention,) = (c for c in choices_of(model)["layers.0.attention"] if c["op"] == "attention")
    assert attention["chosen"] == "block by block"
    with pytest.raises(ConfigError, match="cp_comm_type=p2p"):
        GPTModel(TINY, mesh, ops=Ops("cpu", "attention=require"))
    sharing = ParallelMesh(ParallelLayout(cp=2, cp_comm_type="a2a").resolve(2))
    assert GPTModel(TINY, sharing, ops=Ops("cpu", "attention=require"))


def test_a_model_with_its_choices_can_be_copied_and_sent():
    model = GPTModel(EXPERTS, ops=Ops("hpu"))
    tokens = torch.randint(0, 40, (1, 5))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same({"logits": twin(tokens)}, {"logits": model(tokens)})


def test_the_reference_of_attention_drops_weights():
    q = torch.randn(5, 1, 2, 4)
    torch.manual_seed(0)
    call = AttentionCall(causal=True)
    outs = torch.stack([attention_reference(q, q, q, call._replace(dropout=0.3)) for _ in range(3000)])
    assert not torch.equal(outs[0], outs[1])
    assert (outs.mean(0) - attention_reference(q, q, q, call)).abs().max() < 0.15  # 5 deviations of the mean
    assert ATTENTION.choose("cpu", "off").run is attention_reference


def test_the_command_prints_the_table(capsys):
    assert main(["ops", "--device", "cpu", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)["ops"]}
    assert set(rows) == set(SELECTABLE)
    assert rows["rms_norm"]["chosen"] == "few passes"
    assert rows["rms_norm"]["candidates"] == ["few passes", "torch"]
    assert main(["ops", "--device", "hpu"]) == 0
    assert "FusedSDPA: habana_frameworks is not installed" in capsys.readouterr().out
    assert main(["ops", "--device", "cpu", "--ops", "rope=require"]) == 1
    assert "nothing" in capsys.readouterr().out
    assert main(["ops", "--ops", "rope=perhaps"]) == 2
    assert "rope=require" in capsys.readouterr().err

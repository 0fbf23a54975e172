"""T5 against transformers: logits, losses, gradients, generation, files, and every entry of ``config.json`` changed.

Tolerance: fp32 with sums in another order, 1e-5 of the largest element of each tensor; gradients 1e-4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron import ConfigError, ParallelLayout, T5Module
from lightning_megatron.encoders.t5.answer import answer
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Inputs, T5Model
from lightning_megatron.encoders.t5.parts import relative_buckets
from lightning_megatron.errors import DataError
from lightning_megatron.families import FAMILIES, family_for
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.ops.registry import Ops
from lightning_megatron.testing.parity import differences
from tests.foreign import to_foreign, weight_map
from tests.t5 import TINY, VOCABULARY, hf_files, hf_model, inputs_of, labels_of, our_config, our_model, our_tensors

LOGITS, GRADIENTS = 1e-5, 1e-4
SIZES = [(2, 16, 7), (3, 1, 1), (1, 7, 1), (2, 1, 5), (1, 23, 23), (2, 5, 12)]


@cache
def pair(kind: str) -> tuple[Any, T5Model, dict[str, Tensor]]:
    pytest.importorskip("transformers")
    theirs = hf_model(TINY[kind])
    files = hf_files(theirs)
    return theirs, our_model(TINY[kind], files), files


def of_theirs(model: Any, inputs: T5Inputs, labels: Tensor | None = None) -> Any:
    given = {"input_ids": inputs.tokens, "decoder_input_ids": inputs.decoder_tokens, "labels": labels}
    return model(**given, attention_mask=inputs.padding_mask)


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_losses(kind: str, padded: bool) -> None:
    theirs, ours, _ = pair(kind)
    for sizes in SIZES:
        inputs = inputs_of(*sizes, padded=padded)
        labels = labels_of(inputs)
        with torch.no_grad():
            expected = of_theirs(theirs, inputs, labels)
            assert deviation(ours(inputs), expected.logits) < LOGITS, sizes
            assert float(ours(inputs, labels)) == pytest.approx(float(expected.loss), rel=LOGITS), sizes


@pytest.mark.parametrize("kind", TINY)
def test_gradients_of_all_parameters(kind: str) -> None:
    theirs, ours, _ = pair(kind)
    inputs = inputs_of(3, 17, 11, padded=True)
    labels = labels_of(inputs)
    theirs.zero_grad()
    ours.zero_grad()
    of_theirs(theirs, inputs, labels).loss.backward()
    ours(inputs, labels).backward()
    # Tied tensors are one parameter there, and one of ours.
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    expected = our_tensors(TINY[kind], grads)
    found = {name: param.grad for name, param in ours.named_parameters()}
    assert found.keys() == expected.keys()
    own = {name: grad[: expected[name].shape[0]] for name, grad in found.items() if grad is not None}
    assert not differences(own, expected, rtol=GRADIENTS, atol=GRADIENTS * 1e-2)


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize(("batch", "length", "padded"), [(1, 1, False), (2, 9, False), (3, 9, True)])
def test_greedy_generation_token_by_token(kind: str, batch: int, length: int, padded: bool) -> None:
    theirs, ours, _ = pair(kind)
    inputs = inputs_of(batch, length, 1, padded=padded, seed=4)
    theirs.generation_config.eos_token_id = None
    options = {"max_new_tokens": 25, "do_sample": False, "decoder_start_token_id": 0}
    mask = torch.ones_like(inputs.tokens) if inputs.padding_mask is None else inputs.padding_mask
    expected = theirs.generate(inputs.tokens, attention_mask=mask, **options)
    assert expected.shape == (batch, 26)
    found = answer(ours, inputs.tokens, 25, start=0, padding_mask=inputs.padding_mask, temperature=0.0)
    assert torch.equal(found, expected)
    stop = int(expected[0, 3])
    ended = answer(ours, inputs.tokens[:1], 25, start=0, padding_mask=mask[:1], temperature=0.0, stop=stop)
    assert torch.equal(ended[0], expected[0, : expected[0].tolist().index(stop, 1) + 1])


def test_the_encoder_runs_once_and_keys_of_its_output_are_made_once() -> None:
    ours = T5Model(our_config(TINY["1.0"])).eval()
    calls: list[str] = []
    cut = ours.config.num_encoder_layers
    ours.layers["0"].register_forward_hook(lambda *_: calls.append("encoder"))
    ours.layers[str(cut)].cross.key_value.register_forward_hook(lambda *_: calls.append("keys"))  # type: ignore[union-attr]
    ours.layers[str(cut)].register_forward_hook(lambda *_: calls.append("decoder"))
    answer(ours, inputs_of(2, 9, 1).tokens, 5, start=0)
    assert calls == ["encoder", "keys", *["decoder"] * 5]


@pytest.mark.parametrize("kind", TINY)
def test_files_survive_the_way_there_and_back_bit_for_bit(kind: str) -> None:
    files = pair(kind)[2]
    back = to_foreign(weight_map(FAMILIES["t5"], our_config(TINY[kind])), our_tensors(TINY[kind], files))
    assert back.keys() == files.keys()
    assert all(torch.equal(back[name], files[name]) for name in back)


def test_tables_that_older_files_repeat_or_never_use_are_known() -> None:
    files = pair("1.0")[2]
    older = files | {f"{stack}.embed_tokens.weight": files["shared.weight"] for stack in ("encoder", "decoder")}
    older |= {"lm_head.weight": files["shared.weight"]}
    table = "decoder.block.0.layer.{}.{}.relative_attention_bias.weight"
    older[table.format(1, "EncDecAttention")] = files[table.format(0, "SelfAttention")]
    found, expected = our_tensors(TINY["1.0"], older), our_tensors(TINY["1.0"], files)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match=r"encoder\.embed_tokens\.weight.*values differ"):
        our_tensors(TINY["1.0"], older | {"encoder.embed_tokens.weight": files["shared.weight"] + 1})


# Every entry of config.json, changed

VALUES: dict[str, list[Any]] = {
    "feed_forward_proj": ["gelu", "gelu_new", "gated-gelu", "gated-silu", "gated-relu", "silu", "tanh"],
    "tie_word_embeddings": [True, False],
    "scale_decoder_outputs": [True, False],
    "num_decoder_layers": [1, 5, None],
    "dense_act_fn": ["gelu", "relu"],
    "is_gated_act": [True, False],
    "relative_attention_num_buckets": [4, 16, 7],
    "relative_attention_max_distance": [9, 40, 4],
    "dtype": ["float32"],
    "eos_token_id": [None, 3],
    "pad_token_id": [None, 3],
    "chunk_size_feed_forward": [2],
}


def values_for(name: str, value: Any) -> list[Any]:
    if name in VALUES:
        return VALUES[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, 1]
    if isinstance(value, float):
        return [value * 2 + 0.25]
    if isinstance(value, str):
        return [f"{value}x"]
    return [1] if value is None else []


def mutations(kind: str) -> list[dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    given = {name: value for name, value in TINY[kind].items() if name != "model_type"}
    known = transformers.T5Config(**given).to_dict() | given
    names = [name for name in known if name not in ("model_type", "transformers_version")]
    names += ["n_positions", "no_such_entry", "tie_word_embeddings", "scale_decoder_outputs", "is_decoder"]
    return [{name: value} for name in dict.fromkeys(names) for value in values_for(name, known.get(name))]


def logits_of_theirs(entries: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """transformers' logits and files; ``None`` if it cannot have such a model."""
    try:
        model = hf_model(entries)
        with torch.no_grad():
            return of_theirs(model, inputs_of(2, 12, 9, padded=True)).logits, hf_files(model)
    except Exception:  # whatever it raises
        return None


def fault(kind: str, change: dict[str, Any], seen: dict[str, int]) -> str | None:
    entries = TINY[kind] | change
    try:
        FAMILIES["t5"].config_of(entries)
    except ConfigError as refusal:
        seen["refused"] += 1
        words = {"relative_attention_num_buckets": "relative_buckets"}
        words |= {"relative_attention_max_distance": "relative_distance", "d_kv": "head_dim"}
        named = any(name in str(refusal) or words.get(name, name) in str(refusal) for name in change)
        return None if named else f"{change} is refused without its name: {refusal}"
    theirs = logits_of_theirs(entries)
    if theirs is None:
        seen["impossible"] += 1
        return None
    with torch.no_grad():
        ours = our_model(entries, theirs[1])(inputs_of(2, 12, 9, padded=True))
    seen["equal"] += 1
    found = deviation(ours, theirs[0])
    return None if found < LOGITS else f"{change} is ignored, or means something else: off by {found:.1e}"


@pytest.mark.parametrize("kind", TINY)
def test_no_entry_is_ignored(kind: str) -> None:
    seen = {"equal": 0, "refused": 0, "impossible": 0}
    found = [fault(kind, change, seen) for change in mutations(kind)]
    print(kind, seen)
    assert [each for each in found if each] == []
    assert seen["equal"] > 20


# The parts by themselves


def test_distances_have_the_classes_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-700, 701)
    for buckets, most in ((32, 128), (8, 20), (4, 3), (64, 512)):
        for both_sides in (True, False):
            expected = T5Attention._relative_position_bucket(distances, both_sides, buckets, most)
            assert torch.equal(relative_buckets(distances, buckets, most, both_sides=both_sides), expected)


def test_initial_weights_are_those_of_t5() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "d_model": 256, "d_kv": 16, "d_ff": 512, "num_layers": 1, "num_heads": 8}
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    ours = T5Model(our_config({"model_type": "t5", **sizes}, vocab_multiple=1))
    rules = weight_map(FAMILIES["t5"], ours.config)
    native = to_foreign(rules, {name: param.detach() for name, param in ours.named_parameters()})
    for name, param in theirs.named_parameters():
        assert float(native[name].std()) == pytest.approx(float(param.detach().std()), rel=0.15, abs=1e-9), name


def test_dropout_is_drawn_in_training_alone() -> None:
    config = our_config(TINY["1.0"], hidden_dropout=0.2, attention_dropout=0.2)
    model, inputs = T5Model(config), inputs_of(2, 9, 5, padded=True)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_an_implementation_of_attention_with_biases_is_chosen_and_the_reference_computes_the_same() -> None:
    torch.manual_seed(3)
    config, inputs = our_config(TINY["1.1"]), inputs_of(2, 9, 5, padded=True)
    found = []
    for modes in (None, "attention=off"):
        torch.manual_seed(5)
        model = T5Model(config, ops=Ops("cpu", modes))
        loss = model(inputs, labels_of(inputs))
        loss.backward()
        found.append({"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        chosen = model.layers["0"].attention.attention  # type: ignore[union-attr]
        assert chosen.fallbacks == ({} if modes else {"a bias of the scores": "torch, with a bias"})  # type: ignore[union-attr]
    assert not differences(found[0], found[1], rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    torch.manual_seed(5)
    inputs, module = inputs_of(2, 9, 5, padded=True), T5Module(our_config(TINY["1.1"]))
    batch = dict(zip(T5Inputs._fields, inputs, strict=True)) | {"labels": labels_of(inputs)}
    found = []
    for compiled in (False, True):
        if compiled:
            module.compile_blocks("aot_eager")
        module.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        found.append({"loss": loss.detach()} | {n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    assert not differences(found[1], found[0], rtol=2e-5, atol=1e-6)


def test_flops_are_those_of_the_products() -> None:
    config = T5Config(5, 64, 4, 96, 32, head_dim=8, ffn_hidden_size=128, num_decoder_layers=2, vocab_multiple=1)
    batch, length, decoder = 2, 24, 10
    model = T5Model(config, ops=Ops("cpu", "attention=off"))
    inputs = inputs_of(batch, length, decoder)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    # Half of the decoder's own scores are hidden: they are computed, and not counted.
    hidden = 2 * 2 * batch * config.num_decoder_layers * 4 * 8 * decoder * decoder / 2
    ours = config.flops_per_token(length, decoder) * length * batch / 3
    assert ours == pytest.approx(counter.get_total_flops() - hidden, rel=1e-9)
    module = T5Module(config)
    given = {"tokens": inputs.tokens, "decoder_tokens": inputs.decoder_tokens}
    assert module.batch_flops(given) == pytest.approx(3 * ours)


# Faults


def test_shapes_that_t5_cannot_have_are_named_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"3 problems(.|\n)*norm='layernorm'(.|\n)*num_layers=3(.|\n)*relative_buckets=7"
    ):
        T5Config(3, 32, 4, 61, 32, norm="layernorm", relative_buckets=7, relative_distance=20)
    with pytest.raises(ConfigError, match=r"num_decoder_layers=4.*nearest valid: 3"):
        T5Config(4, 32, 4, 61, 32, num_decoder_layers=4)
    with pytest.raises(ConfigError, match="sliding_window=3: not what T5 computes"):
        T5Config(4, 32, 4, 61, 32, sliding_window=3)
    with pytest.raises(ConfigError, match="rope"):
        T5Config(4, 32, 4, 61, 32, position_embedding="rope")
    assert T5Config(4, 32, 4, 61, 32).replace(num_layers=2).num_decoder_layers == 1
    assert T5Config(4, 32, 4, 61, 32, num_decoder_layers=1).replace(num_layers=6).num_decoder_layers == 1


def test_context_parallelism_is_refused_by_name() -> None:
    (problem,) = PRESETS["t5-base"].layout_problems(ParallelLayout(cp=2))
    assert str(problem).startswith("cp=2: T5's relative positions are added to the scores of whole sequences")
    assert PRESETS["t5-base"].layout_problems(ParallelLayout(tp=2, pp=2)) == []


def test_a_model_of_another_kind_is_not_written_as_t5() -> None:
    family, written = family_for(our_config(TINY["1.1"]))
    assert family.model_type == "t5"
    assert written["tie_word_embeddings"] is False
    with pytest.raises(ConfigError, match="activation='geglu'"):
        family_for(our_config(TINY["1.1"], activation="geglu"))


def test_keys_of_other_programs_are_refused_with_ours_and_ids_are_checked() -> None:
    module = T5Module(our_config(TINY["1.0"]))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    batch = {"tokens": tokens, "decoder_tokens": tokens[:, :3], "labels": tokens[:, :3]}
    assert module.loss(batch).ndim == 0
    more = {"attention_mask": tokens, "decoder_input_ids": tokens, "loss_mask": tokens, "other": tokens}
    with pytest.raises(ConfigError, match="4 problems") as caught:
        module.loss(batch | more)
    for word in ("padding_mask", "decoder_tokens", "batch['loss_mask']", "batch['other']"):
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match="has no 'decoder_tokens'"):
        module.loss({"tokens": tokens, "labels": tokens})
    with pytest.raises(DataError, match=r"decoder_tokens'\]\[0, 1\] is 61: number"):
        module.loss(batch | {"decoder_tokens": torch.tensor([[0, VOCABULARY, 0]])})
    with pytest.raises(DataError, match=r"tokens'\]\[0, 0\] is -1"):
        module.generate(tokens - 1, 4)
    assert module.generate(tokens, 4, temperature=0.0).shape == (1, 5)
    repaired = module.without_faults(batch | {"decoder_tokens": torch.tensor([[0, 99, 0]])})
    assert torch.isfinite(module.loss(repaired))

"""Files such as NVIDIA's BERT-345M: outputs of both heads are those of transformers' ``MegatronBertForPreTraining``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import BertModule, MegatronStrategy
from lightning_megatron.encoders.bert.model import BertModel
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.models.presets import preset
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.convert import convert_command
from tests.megatron_bert import CONFIG, HEADS, HIDDEN, LAYERS, PADDED, POSITIONS, VOCAB, hf_model, write

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bert() -> Any:
    return hf_model()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, types = (torch.randint(n, (3, POSITIONS), generator=generator) for n in (VOCAB, 2))
    lengths = torch.tensor([[POSITIONS], [9], [4]])
    return {"tokens": tokens, "token_types": types, "padding_mask": (torch.arange(POSITIONS) < lengths).long()}


def right(model: Any) -> tuple[Tensor, Tensor]:
    given = batch()
    with torch.no_grad():
        found = model(given["tokens"], given["padding_mask"], given["token_types"])
    assert found.prediction_logits.std() > 1, "a wrong row would show"
    assert found.seq_relationship_logits.std() > 0.1
    return found.prediction_logits[given["padding_mask"].bool()], found.seq_relationship_logits


def outputs(module: BertModule) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = module.eval().predict_step(batch(), 0)
    assert found.next_sentence is not None
    return found.tokens[batch()["padding_mask"].bool()], found.next_sentence


@pytest.mark.parametrize(
    ("version", "layout"),
    [
        (None, {}),
        (0, {"tp": 2, "pp": 2}),
        (1.0, {"tp": 4}),
        (2.0, {"pp": 2}),
        (3.0, {"tp": 2, "newer": True}),
    ],
    ids=str,
)
def test_both_heads_are_those_of_transformers(tmp_path: Path, bert: Any, version: Any, layout: dict[str, Any]) -> None:
    write(tmp_path / "megatron" / "release", bert, version, **layout)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("release")
    megatron_to_checkpoint(tmp_path / "megatron", tmp_path / "a.ckpt", config=CONFIG)
    module = BertModule.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(outputs(module), right(bert), rtol=1e-5, atol=1e-5)


def predicted(path: str, layout: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs in a layout, from the weights of Megatron's own folder."""
    module = BertModule(CONFIG)
    module.load_weights(path)
    loader = DataLoader([{key: x[i] for key, x in batch().items()} for i in range(3)], batch_size=3)  # type: ignore[arg-type]
    (found,) = quiet_trainer(MegatronStrategy(micro_batch_size=3, **layout)).predict(module, loader) or ()
    return found.tokens[batch()["padding_mask"].bool()], found.next_sentence


def test_tensor_parallel_ranks_load_the_files(tmp_path: Path, bert: Any, ranks: Any) -> None:
    write(tmp_path / "release", bert, 1.0)
    for found in ranks(2, predicted, str(tmp_path / "release"), {"tp": 2}):
        torch.testing.assert_close(found, right(bert), rtol=1e-5, atol=1e-5)


def test_a_file_with_fields_of_bert_is_a_configuration(tmp_path: Path, bert: Any) -> None:
    write(tmp_path / "release", bert, 0)
    (tmp_path / "bert.json").write_text(
        f'{{"model_type": "bert", "num_layers": {LAYERS}, "hidden_size": {HIDDEN}, "num_attention_heads": {HEADS},'
        f' "vocab_size": {VOCAB}, "max_position_embeddings": {POSITIONS}, "norm_position": "before",'
        ' "norm_epsilon": 1e-5}'
    )
    words = ["megatron-to-ckpt", str(tmp_path / "release"), str(tmp_path / "a.ckpt")]
    assert convert_command([*words, "--config", str(tmp_path / "bert.json")]) == 0
    module = BertModule.load_from_checkpoint(tmp_path / "a.ckpt")
    torch.testing.assert_close(outputs(module), right(bert), rtol=1e-5, atol=1e-5)


def test_a_command_line_says_which_activation_each_part_has(tmp_path: Path) -> None:
    """The kernel that fuses bias and GELU approximates it in the layers; the head has the exact one."""
    model = hf_model(hidden_act="gelu_new")
    model.cls.predictions.transform.transform_act_fn = torch.nn.GELU()
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "padded_vocab_size": PADDED}
    arguments = Namespace(**sizes, max_position_embeddings=POSITIONS, bias_gelu_fusion=True, openai_gelu=False)
    write(tmp_path / "a", model, 2.0, args=arguments)
    megatron_to_checkpoint(tmp_path / "a", tmp_path / "a.ckpt", allow_pickle=True)
    module = BertModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert module.config.vocab_size == PADDED, "the files do not say how much of it is padding"
    tokens, follows = outputs(module)
    torch.testing.assert_close((tokens[:, :VOCAB], follows), right(model), rtol=1e-5, atol=1e-5)


def test_configurations_of_other_berts_are_refused(tmp_path: Path, bert: Any) -> None:
    write(tmp_path / "a", bert, 2.0)
    for change, words in (
        ({"norm_position": "after"}, "norm_position='after'.*nearest valid: before"),
        ({"next_sentence": False}, r"binary_head\.bias, binary_head\.weight.*unknown"),
        ({"num_token_types": 0}, "tokentype_embeddings.*unknown"),
        ({"tie_embeddings": False}, "tie_embeddings=False.*its output layer is the embedding"),
        ({"num_layers": 3}, "num_layers=3: the checkpoint has 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            megatron_to_checkpoint(tmp_path / "a", tmp_path / "a.ckpt", config=CONFIG.replace(**change))


@pytest.mark.parametrize(("name", "rows"), [("megatron-bert-cased", 29056), ("megatron-bert-uncased", 30592)])
def test_presets_are_the_published_models(name: str, rows: int) -> None:
    """Of transformers' configuration, whose default is BERT-345M; the published files' vocabularies are padded."""
    config = preset(name)
    with torch.device("meta"):
        theirs = transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(vocab_size=rows))
        built = BertModel(config)
    total = sum(p.numel() for p in theirs.parameters())
    assert sum(p.numel() for p in built.parameters()) == total
    assert config.num_parameters() == total - (rows - config.vocab_size) * (config.hidden_size + 1)

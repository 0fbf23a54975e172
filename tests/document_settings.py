"""What stands around a Python block of the documents when it is run, and what is made small in it.

What is too large for one process on a CPU is made small by ``SMALL``; nothing else of a block is changed but what its
:class:`Setting` names. A block without a setting is run as it stands: a new block needs one if it is a fragment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent

from documents import Block

TINY = "num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=300"
QUIET = 'accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False'
SMALL = (
    (r"\b(devices)=\d+", rf"\1=1, {QUIET}"),
    (r"\b(tp|pp|cp|ep)=\d+", r"\1=1"),
    (r"\bseq_length=\d+", "seq_length=16"),
    (r"\bglobal_batch_size=\d+", "global_batch_size=4"),
    (r"\bmax_steps=[\d_]+", "max_steps=4"),
    (r"\bval_check_interval=\d+", "val_check_interval=2"),
    (r'"HuggingFaceTokenizer"', '"GPTSentencePieceTokenizer"'),
    (r'tokenizer_model="Llama-3.1-8B"', 'tokenizer_model="tokenizer.model"'),
    (r'LlamaModule\("llama[\w.-]+"', f'LlamaModule("llama-tiny", {TINY}'),
    (r'MixtralModule\("mixtral-8x7b"', f'MixtralModule("mixtral-tiny", {TINY}'),
)
"""One process, four steps, a model of two layers."""
AROUND = """
import lightning as L, torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from lightning_megatron import *
from lightning_megatron.ops.fp8 import Fp8Recipe
"""
"""The names that every block may use without importing them."""
TRAINER = f"Trainer(strategy=MegatronStrategy(), devices=1, max_steps=2, {QUIET})"
MODEL = f'LlamaModule("llama-tiny", {TINY})'
DATA = 'MegatronDataModule("data/corpus_text_document", seq_length=16)'


@dataclass(frozen=True)
class Setting:
    """Code around a block when it is run.

    Args:
        page: the block's.
        has: words that no other block of the page has.
        code: what is run; ``{block}`` stands for the block, indented as it is.
        small: apply ``SMALL`` to the block.
        change: other words to change in the block.
        not_run: the reason why the block is compiled only.
    """

    page: str
    has: str
    code: str = "{block}"
    small: bool = False
    change: Mapping[str, str] = field(default_factory=dict)
    not_run: str = ""

    def fits(self, block: Block) -> bool:
        return block.page == self.page and self.has in block.text

    def applied(self, text: str) -> str:
        for pattern, value in SMALL if self.small else ():
            text = re.sub(pattern, value, text)
        for old, new in self.change.items():
            assert old in text, old
            text = text.replace(old, new)
        place = re.search(r"^( *)\{block\}", self.code, re.MULTILINE)
        assert place is not None
        return self.code.replace(place[0], indent(text, place[1]))


SETTINGS = (
    Setting(
        "README.md",
        "ModelCheckpoint(",
        small=True,
        code="""
{block}
from pathlib import Path
best = trainer.checkpoint_callback.best_model_path
assert Path(best).parent.name == "run" and Path(best).is_dir(), "the first example keeps its best checkpoint"
assert trainer.checkpoint_callback.best_model_score == trainer.callback_metrics["val_loss"]
assert Path("run/last.ckpt/manifest.json").is_file(), "and its last"
""",
    ),
    Setting(
        "docs/batches.md",
        '"num_tokens"',
        code=f"""
class Mine(LlamaModule):
    {{block}}
trainer = {TRAINER}
trainer.fit(Mine("llama-tiny", {TINY}), {DATA})
""",
    ),
    Setting(
        "docs/batches.md",
        "class WithValues(",
        code=f"""
from torch import nn
{{block}}
trainer = {TRAINER}
trainer.fit(WithValues("llama-tiny", {TINY}), {DATA})
""",
    ),
    Setting(
        "docs/checkpoints.md",
        "export_optimizer_state(",
        change={"other.safetensors": "state.safetensors"},
        code=f"""
class Exchange(Callback):
    {{block}}
trainer = {TRAINER.replace("max_steps", "callbacks=[Exchange()], max_steps")}
trainer.fit({MODEL}, {DATA})
""",
    ),
    Setting(
        "docs/checkpoints.md",
        "load_from_checkpoint(",
        small=True,
        code=f"data = {DATA}\n{{block}}\nassert logits.shape == (1, 6, 300)",
    ),
    Setting(
        "docs/checkpoints.md",
        "class MyData(",
        change={'"corpus"': '"data/corpus_text_document"'},
        code="""
{block}
data = MyData()
data.augmentation = "none"
data.load_state_dict(data.state_dict())
""",
    ),
    Setting(
        "docs/experts.md",
        "MixtralModule(",
        small=True,
        change={"trainer = Trainer(": "trainer = Trainer(max_steps=2, "},
        code=f"data = {DATA}\n{{block}}",
    ),
    Setting("docs/fine-tuning.md", "from_hf(", change={'.from_hf("Llama-3.1-8B-Instruct"': '("llama-tiny"'}),
    Setting(
        "docs/fine-tuning.md",
        "ChatDataModule(",
        change={"seq_length=8192": "seq_length=512"},
        code="{block}\nassert data.rows().report.conversations == 14",
    ),
    Setting("docs/hugging-face.md", "Mxfp4Config(", not_run="transformers' own way, with files of 13 GB"),
    Setting("docs/lora.md", "rank=16", small=True, code=f"trainer = {TRAINER}\ndata = {DATA}\n{{block}}"),
    Setting(
        "docs/lora.md",
        "adapter_off",
        code="""
tokens = torch.randint(300, (2, 8))
batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
{block}
assert module.active_adapter == "code" and torch.equal(module.token_losses(batch), reference)  # not trained yet
""",
    ),
    Setting("docs/hugging-face.md", "from_hf(", small=True, code=f"trainer = {TRAINER}\ndata = {DATA}\n{{block}}"),
    Setting(
        "docs/t5.md",
        "from_hf(",
        change={'T5Module.from_hf("flan-t5-base")': 'T5Module("t5-tiny")'},
        code="tokens, padding_mask = torch.ones(2, 3).long(), torch.ones(2, 3)\n{block}\nassert written.shape[0] == 2",
    ),
    Setting(
        "docs/evaluation.md",
        "lm_eval.simple_evaluate",
        not_run="lm-eval is no part of the environment; tests/trainer/evaluation/test_lm_eval.py makes these calls",
    ),
    Setting(
        "docs/megatron-checkpoints.md",
        "trainer.fit(",
        change={'LlamaModule("llama3.1-8b")': "LlamaModule(json.loads(open('megatron.json').read()))"},
        code=f"""
import json
trainer = {TRAINER}
data = torch.utils.data.DataLoader([{{"tokens": torch.arange(8), "labels": torch.arange(1, 9)}}] * 2)
{{block}}
""",
    ),
    Setting(
        "docs/port-your-module.md",
        "class MLP(",
        code="""
{block}
mlp = MLP(8)
mlp.configure_model()
assert mlp(torch.randn(4, 2, 8)).shape == (4, 2, 8)
""",
    ),
    Setting(
        "docs/recompute.md",
        "recomputed(",
        code="""
class Module(MegatronModule):
    def forward(self, hidden):
        {block}
        return hidden
module = Module()
module.block = torch.nn.Linear(4, 4)
module(torch.ones(2, 4, requires_grad=True)).sum().backward()
assert module.block.weight.grad is not None
""",
    ),
    Setting(
        "docs/simulated-hpu.md", "simulated_gaudi.enable(", not_run="compiles the simulation; tests/device/ runs it"
    ),
    Setting("docs/launching.md", "__main__", small=True),
    Setting("docs/quick-start.md", "__main__", small=True, change={", vocab_size=32000": ""}),
    Setting(
        "docs/ladder.md",
        'accelerator="cpu"',
        small=True,
        change={'accelerator="cpu", devices': "devices", ", num_layers=4": ""},
    ),
    Setting("docs/ladder.md", "llama3.1-8b", small=True),
    Setting("docs/migrate-megatron.md", "MegatronLog", small=True),
    Setting("docs/migrate-nemo.md", "trainer", small=True),
    Setting("docs/migrate-deepspeed.md", "trainer", small=True),
    Setting("docs/migrate-fsdp.md", "trainer", small=True),
)


def setting_of(block: Block) -> Setting:
    found = [setting for setting in SETTINGS if setting.fits(block)]
    assert len(found) <= 1, f"{block} is meant by several settings"
    return found[0] if found else Setting(block.page, "")


def run_python(block: Block) -> None:
    """Run a block in its setting, or compile it where it is not run."""
    setting = setting_of(block)
    if setting.not_run:
        compile(block.text, str(block), "exec")
        return
    text = setting.applied(block.text)
    exec(compile(AROUND + text, str(block), "exec"), {"__name__": "__main__"})

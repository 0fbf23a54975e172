"""The section "A Hugging Face import" of docs/walks.md, held against the calls of a conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from safetensors.torch import save_file

import lightning_megatron.lightning.pretrained.convert  # noqa: F401 - or its imports would be among the calls
from lightning_megatron.families import FAMILIES
from lightning_megatron.tools.cli.convert import convert_command
from tests.walks import PACKAGE, profiled, steps_of

CONFIG = {"model_type": "llama", "vocab_size": 7, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {"model.embed_tokens.weight": (7, 8), "model.norm.weight": (8,), "lm_head.weight": (7, 8)}
SHAPES |= {f"model.layers.0.{name}layernorm.weight": (8,) for name in ("input_", "post_attention_")}
SHAPES |= {f"model.layers.0.self_attn.{name}_proj.weight": (8, 8) for name in "qo"}
SHAPES |= {f"model.layers.0.self_attn.{name}_proj.weight": (4, 8) for name in "kv"}
SHAPES |= {f"model.layers.0.mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
SHAPES["model.layers.0.mlp.down_proj.weight"] = (8, 12)

DECLARED = "lightning/pretrained/parameter_specs.py"
OF_THE_CONFIGURATION = {"checkpoint/formats/hf/__init__.py", "families/__init__.py", "families/llama.py"}
OF_THE_CONFIGURATION |= {f"config/hugging_face/{name}.py" for name in ("family", "passive", "decoder", "rope")}
OF_THE_CONFIGURATION |= {
    f"config/{name}.py"
    for name in ("reader", "transformer", "counts", "layer_spec", "attention", "moe", "rope_scaling")
}
OF_THE_CONFIGURATION |= {"arguments.py", "errors.py", "extensions.py"}
BESIDE_THE_TENSOR = {
    "tools/cli/common.py": "ends by signal",
    "files/small.py": "reads JSON",
    "checkpoint/formats/hf/settings.py": "special tokens and generation",
    "lightning/pretrained/imported_run.py": "Lightning's dictionary",
}


def calls_between_modules(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Caller and callee of every call from one module of the package into another, in order, without repeats.

    Calls of layers that declare names and shapes are left out.
    """
    stack, found = [""], dict[tuple[str, str], None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = Path(frame.f_code.co_filename)
            module = str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else stack[-1]
            if module != stack[-1] and DECLARED not in stack:
                found.setdefault((stack[-1], module))
            stack.append(module)
        elif event == "return" and len(stack) > 1:
            stack.pop()

    profiled(note, run)
    return list(found)


def test_a_tensor_passes_the_modules_of_the_list_and_no_model_is_built_in_memory(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, tmp_path / "hf" / "model.safetensors")
    assert "llama" in FAMILIES  # imports all of them, before the walk
    words = ["hf-to-ckpt", str(tmp_path / "hf"), str(tmp_path / "out.ckpt"), "--dtype", "bf16"]
    calls = calls_between_modules(lambda: convert_command(words))
    walk = [step.module for step in steps_of("A Hugging Face import")]
    assert len(walk) <= 12
    assert {callee for _, callee in calls} >= set(walk)
    assert not [callee for _, callee in calls if callee.startswith(("models/", "layers/", "moe/", "lightning/module"))]

    opening = calls[: [callee for _, callee in calls].index("mesh.py")]  # what follows is the save
    assert {callee for _, callee in opening} - OF_THE_CONFIGURATION - BESIDE_THE_TENSOR.keys() <= set(walk)

    def is_step(caller: str, callee: str) -> bool:
        """True if the tensor goes there: the save has a walk of its own, until it wants values."""
        of_save = caller not in walk or caller == "checkpoint/saving.py"
        return callee in walk and (not of_save or callee == "checkpoint/formats/weight_map.py" or not caller)

    entered = [callee for caller, callee in calls if is_step(caller, callee)]
    entered.append("checkpoint/tensors/lazy_tensor.py")  # by a dataclass's constructor, which is in no file
    assert set(entered) == set(walk)
    assert len(entered) - len(walk) <= 5
    assert len(entered) - len(walk) == 5, "the number of returns that the section tells"

"""A family in another package, known by its entry point, as encoders/ is known by its names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY = """
from dataclasses import dataclass
from pathlib import Path
from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.hugging_face.tensors import Tensors
from lightning_megatron.config.transformer import TransformerConfig

@dataclass(frozen=True)
class MyConfig(TransformerConfig):
    model_type: str = "mine"

FAMILY = Family(
    "mine",
    "MineForTexts",
    lambda reader: {name: reader.required(name) for name in ("num_layers", "hidden_size")}
    | {"num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 8},
    lambda reader: {},
    Tensors((), prefix=""),
    {"mine-tiny": lambda: MyConfig(1, 8, 2, 32, 8)},
    module="my_family:MyModule",
    default_preset="mine-tiny",
    config_class=MyConfig,
    recipes=Path(__file__).parent / "recipes",
    data_paths={"MyData": ("data_path",)},
)

class MyModule: ...
"""
USES = """if True:
    import sys
    sys.modules["torch"] = None
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.families import DEFAULT_PRESETS, family_of, module_of
    from lightning_megatron.models.presets import configuration
    from lightning_megatron.tools.recipes.environment import changes_of
    from lightning_megatron.tools.recipes.names import recipe_files
    assert "my_family" not in sys.modules
    mine = configuration("mine-tiny", num_layers=3)
    assert type(mine).__name__ == "MyConfig" and mine.num_layers == 3
    assert type(configuration({**vars(mine)})) is type(mine)
    assert family_of({"model_type": "mine"}).config_of({"num_layers": 2, "hidden_size": 8}).num_layers == 2
    assert module_of(mine).__name__ == "MyModule"
    assert DEFAULT_PRESETS["MyModule"] == "mine-tiny"
    assert recipe_files("mine-small")[0].name == "mine-small.yaml"
    recipe = {"data": {"class_path": "my_family.MyData"}}
    given = {"LIGHTNING_MEGATRON_DATA_PATH": "x", "LIGHTNING_MEGATRON_VOCAB_FILE": "y"}
    assert changes_of(recipe, given)["data"]["init_args"] == {"data_path": "x"}
"""
OTHERS = """if True:
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.families import DEFAULT_PRESETS, FAMILIES, family_of
    assert {"llama", "bert", "t5"} <= set(FAMILIES)
    assert DEFAULT_PRESETS["LlamaModule"]
    try:
        family_of({"model_type": "mine"})
    except ConfigError as error:
        print(error)
"""
TWICE = """if True:
    from lightning_megatron.families import FAMILIES
    list(FAMILIES)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the packages of a folder."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})


def install(folder: Path, family: str, target: str = "my_family:FAMILY") -> None:
    """A package with one family, as an installer leaves it."""
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "mine-small.yaml").write_text("trainer: {}\n")
    (folder / "my_family.py").write_text(family)
    about = folder / "my_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-family\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[lightning_megatron.families]\nmine = {target}\n")


def test_a_family_of_an_installed_package_is_known_without_torch(tmp_path: Path) -> None:
    """Preset, configuration, module, recipe and paths: each is what the package says."""
    install(tmp_path, FAMILY)
    done = run(USES, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_second_family_of_one_model_type_is_refused(tmp_path: Path) -> None:
    install(tmp_path, FAMILY.replace('"mine",\n', '"llama",\n', 1))
    done = run(TWICE, tmp_path)
    assert "model_type='llama': two families are registered for it" in done.stderr


@pytest.mark.parametrize(
    ("family", "target", "fault"),
    [
        (FAMILY, "my_families:FAMILY", "cannot be loaded (ModuleNotFoundError: No module named 'my_families')"),
        (FAMILY, "my_family:FAMILIES", "cannot be loaded (AttributeError: module 'my_family' has no attribute"),
        ("raise OSError('no libmine.so')", "my_family:FAMILY", "cannot be loaded (OSError: no libmine.so)"),
        (FAMILY, "my_family:MyModule", "is of type, not of Family"),
    ],
    ids=["module", "name", "import", "kind"],
)
def test_a_broken_family_is_named_once_and_the_others_are_found(
    tmp_path: Path, family: str, target: str, fault: str
) -> None:
    install(tmp_path, family, target)
    done = run(OTHERS, tmp_path)
    assert done.returncode == 0, done.stderr
    named = f"the model family 'mine' of my-family 1.0 is left out: its entry point '{target}'"
    assert done.stderr.count(named) == 1
    assert fault in done.stderr
    assert "model_type='mine': no mapping for it" in done.stdout

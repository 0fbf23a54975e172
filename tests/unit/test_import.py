"""Importing the package: nothing heavy before it is needed, and yet every name is known when it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_megatron


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)


def test_a_type_checker_sees_the_names_that_an_importer_gets() -> None:
    tree = ast.parse(Path(lightning_megatron.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == lightning_megatron._MODULE_OF
    assert sorted(seen) == lightning_megatron.__all__
    for name in lightning_megatron.__all__:
        assert getattr(lightning_megatron, name).__name__ == name or name == "MegatronHPUStrategy"
    assert set(lightning_megatron.__all__) <= set(dir(lightning_megatron))


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_megatron' has no attribute 'MegatronTrainer'"):
        _ = lightning_megatron.MegatronTrainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import lightning_megatron",
        "from lightning_megatron.lightning.strategy.megatron import MegatronStrategy",
        "import lightning_megatron, importlib.util; importlib.util.find_spec('lightning.pytorch.trainer')",
    ],
)
def test_the_strategy_is_known_by_name_whichever_is_imported_first(first: str) -> None:
    """With Lightning first, all other tests do so."""
    done = run(f"""if True:
        import sys
        {first}
        from lightning.pytorch import LightningDataModule, Trainer
        import lightning.pytorch
        strategy = Trainer(strategy="megatron", accelerator="cpu", logger=False).strategy
        assert type(strategy).__name__ == "MegatronStrategy"
        from lightning.pytorch.accelerators import AcceleratorRegistry
        assert "hpu" in AcceleratorRegistry
        assert "MegatronDataModule" in [known.__name__ for known in LightningDataModule.__subclasses__()]
        assert type(lightning.pytorch.__spec__.loader) is type(lightning.pytorch.__loader__)
        assert "registration" not in type(lightning.pytorch.__loader__).__module__
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("lightning_megatron")]
    """)
    assert done.returncode == 0, done.stderr


LIGHT = {
    "torch": ["--version", "--help", "schedule --pp 2 --micro-batches 4", "schedule --pp x", "convert", "prepocess"],
    "lightning": ["verify nothere", "ops --device cpu", "doctor", "preprocess --bogus", "generate --help"],
}


@pytest.mark.parametrize("absent", ["torch", pytest.param("lightning", marks=pytest.mark.slow)])
def test_commands_that_need_no_lightning_do_not_wait_for_it(absent: str) -> None:
    done = run(f"""if True:
        import sys
        sys.modules[{absent!r}] = None
        from lightning_megatron.cli.main import main
        for words in {LIGHT[absent]}:
            print(main(words.split()))
    """)
    assert done.returncode == 0, done.stderr

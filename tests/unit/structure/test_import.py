"""Importing the package: nothing heavy before it is needed, and yet every name is known when it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_megatron
import lightning_megatron.data


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("package", [lightning_megatron, lightning_megatron.data])
def test_a_type_checker_sees_the_names_that_an_importer_gets(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted({*seen, *(["DataError"] if package is lightning_megatron.data else [])}) == package.__all__
    for name in package.__all__:
        assert getattr(package, name).__name__ == name or name == "MegatronHPUStrategy"
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_megatron.data.preprocessing.preprocess, lightning_megatron.data.indexed_writer",
        "from lightning_megatron.data import IndexedDataset, build_tokenizer",
        *(
            f"from lightning_megatron.tools.cli.main import main; main(['{command}', '--help'])"
            for command in (
                "convert",
                "evaluate",
                "generate",
                "plan",
                "preprocess",
                "schedule",
                "train-tokenizer",
                "verify",
                "why",
            )
        ),
        "from lightning_megatron.tools.cli.main import main; main(['schedule', '--pp', '4', '--micro-batches', '8'])",
    ],
)
def test_what_needs_no_torch_does_not_wait_for_it(code: str) -> None:
    done = run(f"import sys; sys.modules['torch'] = None\n{code}")
    assert done.returncode == 0, done.stderr


HEAVY = ("torch", "lightning", "transformers", "matplotlib", "jsonargparse", "numpy")
TORCH, LIGHTNING = ["torch"], ["torch", "lightning"]
LOADED = {
    "--help": [],
    "--version": [],
    "convert --help": [],
    "doctor --help": [],
    "evaluate --help": [],
    "generate --help": [],
    "ops --help": [],
    "plan --help": [],
    "plan --model gpt3-1.7b --devices 4 --device h100 --seq-length 2048 --global-batch-size 16": TORCH,
    "plan --recipe llama3.1-8b --device gaudi2": TORCH,
    "preprocess --help": ["numpy"],
    "preprocess --bogus": ["numpy"],
    "schedule --help": [],
    "schedule --pp 2 --micro-batches 4": [],
    "train-tokenizer --help": [],
    "verify --help": [],
    "why --help": ["numpy"],
    "verify nothere": TORCH,
    "ops --device cpu": TORCH,
    "ops --device cpo": TORCH,
    "doctor": TORCH,
    "fit --help": LIGHTNING,
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.slow] if "torch" in heavy else []) for words, heavy in LOADED.items()],
)
def test_what_a_command_imports_of_the_packages_that_take_long(words: str) -> None:
    done = run(f"""if True:
        import sys
        from lightning_megatron.tools.cli.main import main
        main({words.split()})
        print("LOADED", *[name for name in {HEAVY} if name in sys.modules])
    """)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()[1:]
    seen = loaded if "torch" not in loaded else [name for name in loaded if name in LIGHTNING]
    assert seen == LOADED[words]


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
        from lightning.pytorch import Callback, LightningDataModule, Trainer
        import lightning.pytorch
        strategy = Trainer(strategy="megatron", accelerator="cpu", logger=False).strategy
        assert type(strategy).__name__ == "MegatronStrategy"
        from lightning.pytorch.accelerators import AcceleratorRegistry
        assert "hpu" in AcceleratorRegistry
        import lightning.pytorch.cli
        assert "MegatronDataModule" in [known.__name__ for known in LightningDataModule.__subclasses__()]
        assert "SpikeGuard" in [known.__name__ for known in Callback.__subclasses__()]
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
        from lightning_megatron.tools.cli.main import main
        for words in {LIGHT[absent]}:
            print(main(words.split()))
    """)
    assert done.returncode == 0, done.stderr

"""Limits of the package's structure and prose, per folder; ``python tests/structure.py`` prints the measures."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest
from structure import (
    ROOT,
    complex_by_radon,
    complex_functions,
    constructors,
    cycles,
    files,
    fragments,
    in_two_modules,
    metaphors,
    questions,
)

PACKAGE = ROOT / "lightning_megatron"
FOLDERS = sorted({str(path.parent.relative_to(PACKAGE)) for path in files()})
WIDE = {
    "BertDataModule",
    "BertDataset",
    "ChatDataModule",
    "ColumnParallelLinear",
    "GPTDataset",
    "MegatronDataModule",
    "MegatronStrategy",
    "RowParallelLinear",
    "T5DataModule",
    "T5Dataset",
    "TransformerModule",
    "VocabParallelEmbedding",
}
"""Public classes, whose constructors may have more than 8 arguments."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_of_a_folder_keeps_the_rules(folder: str) -> None:
    """No summary line is a question, every entry of Args begins with a noun, and there are no metaphors."""
    paths = [path for path in files() if path.parent == PACKAGE / folder]
    found = [text for path in paths for find in (questions, fragments, metaphors) for text in find(path)]
    assert found == [], "\n".join(found)


def test_prose_of_the_simulated_gaudi_keeps_the_rules() -> None:
    """What users of it read; below its folder site, modules are laid out as Intel's are."""
    paths = sorted((ROOT / "tests" / "simulated-gaudi" / "simulated_gaudi").glob("*.py"))
    found = [text for path in paths for find in (questions, fragments, metaphors) for text in find(path)]
    assert paths
    assert found == [], "\n".join(found)


def test_no_folder_has_more_than_15_files() -> None:
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in files())
    assert {folder: count for folder, count in folders.items() if count > 15} == {}


def test_no_function_is_complex() -> None:
    assert complex_functions(ROOT, 15) == []


def test_no_function_is_complex_by_radon_either() -> None:
    found = complex_by_radon(ROOT, 15)
    assert found == [], "\n".join(found)


def test_only_public_constructors_have_more_than_8_arguments() -> None:
    wide = {name for path in files() for name, count in constructors(path) if count > 8}
    assert wide - WIDE == set()


def test_no_public_name_stands_in_two_modules() -> None:
    assert in_two_modules(ROOT) == {}


def test_no_module_imports_itself_through_others_not_even_for_types() -> None:
    assert cycles(ROOT, of_types=True) == []


def test_the_strategy_is_one_class_of_hooks_and_one_of_arguments() -> None:
    """Both extend only what they say, and no method of the one is defined again in the other."""
    folder = PACKAGE / "lightning" / "strategy"
    trees = [ast.parse((folder / name).read_text()) for name in ("hooks.py", "megatron.py")]
    hooks, arguments = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in hooks.bases + arguments.bases] == ["ParallelStrategy", hooks.name]
    names = [{node.name for node in each.body if isinstance(node, ast.FunctionDef)} for each in (hooks, arguments)]
    assert names[0] & names[1] == {"__init__"}
    inside = re.findall(r"^from lightning_megatron\.lightning\.strategy\.", (folder / "hooks.py").read_text(), re.M)
    assert len(inside) <= 5

"""Rules of the package: imports between layers, names of devices, lengths of files, cost of an import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_megatron
from lightning_megatron.extensions import FAMILIES

PACKAGE = Path(lightning_megatron.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SIMULATION = PACKAGE.parent / "tests" / "simulated-gaudi"


def _table() -> Iterator[tuple[int, list[str], str]]:
    """Rows of the table of layers in docs/design.md: layer, its modules, and what it sees besides the layers below."""
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    for layer, names, sees in re.findall(r"^\| (\d+) \| (.*?) \|.*\| (.*?) ?\|$", page, re.MULTILINE):
        yield int(layer), [name.rstrip("/") for name in re.findall(r"`(.*?)`", names)], sees


LAYERS = {part: layer for layer, modules, _ in _table() for part in modules} | {
    "": 10
}  # "" is the package's own __init__
# Modules that import less than all layers below them: the highest layer that they import.
HIGHEST = {
    part: int(sees.split()[-1]) for _, modules, sees in _table() for part in modules if sees.startswith("layers")
}
NEIGHBOURS = {
    (part, other)
    for _, modules, sees in _table()
    for part in modules
    for other in re.findall(r"`(.*?)`", sees)
    if sees.startswith("also")
}
LIGHTNING_MODULES = {"lightning", "tools", "testing", ""}
WITHOUT_LIGHTNING = ("tools/calibration", "tools/launching", "tools/planning", "tools/recipes")
DEVICE_MODULES = {"device", "ops", "testing"}
DEVICE_WORDS = {"cuda", "hpu", "nccl", "hccl", "gloo"}
ANOTHERS_WORDS = ("from_megatron/flags.py", "from_megatron/variables.py")  # names that another program has given
SCRIPTS = PACKAGE / "tools/cli/from_megatron/words.py"  # names of another program's scripts
PUBLIC_NAMES = (PACKAGE / "__init__.py", PACKAGE / "data/__init__.py")  # imported at their first use, by name


def part_of(module: str) -> str:
    """``lightning_megatron.layers.mlp`` -> ``layers``."""
    return ([*module.split("."), ""])[1]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Every imported module with its line, those inside functions and under ``TYPE_CHECKING`` too."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            # `from lightning_megatron import device` names a module where others name a class.
            modules = {alias.name for alias in node.names if is_module(node.module, alias.name)}
            yield from ((f"{node.module}.{name}", node.lineno) for name in sorted(modules))
            if len(modules) < len(node.names):
                yield node.module, node.lineno


def imports_when_it_runs(path: Path) -> set[str]:
    """Without those that only a type checker follows."""
    for_types = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    lines = {line for node in for_types for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return {module for module, line in imports_of(path) if line not in lines}


@cache
def is_module(package: str, name: str) -> bool:
    folder = PACKAGE.parent.joinpath(*package.split("."))
    return (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()


def may_import(part: str, other: str) -> bool:
    if part == other or (part, other) in NEIGHBOURS:
        return True
    seen = HIGHEST.get(part, LAYERS[part] - 1)
    return LAYERS[other] <= seen and LAYERS[other] < LAYERS[part]


def faults(rule: Callable[[Path], Iterator[str]], paths: Iterable[Path]) -> list[str]:
    """What a rule finds in files; one test for all files of a rule, since each of 650 tests would parse its own."""
    return [f"{path.relative_to(PACKAGE)}:{fault}" for path in paths for fault in rule(path)]


def imports_from_above(path: Path) -> Iterator[str]:
    part = part_of(module_of(path))
    for module, line in imports_of(path):
        if module == "lightning_megatron":  # its modules are looked at one by one; its names are for users
            continue
        if path in PUBLIC_NAMES and module not in imports_when_it_runs(path):
            continue
        home = module.split(".")[0]
        if home == "lightning_megatron" and not may_import(part, part_of(module)):
            yield f"{line}: {part or 'the package'} imports {module}"
        without = part not in LIGHTNING_MODULES or str(path.relative_to(PACKAGE)).startswith(WITHOUT_LIGHTNING)
        if home in ("lightning", "pytorch_lightning", "lightning_fabric") and without:
            yield f"{line}: {part} imports {module}"


def test_files_import_only_from_layers_below():
    assert {part_of(module_of(path)) for path in FILES} <= LAYERS.keys(), "on no layer of docs/design.md"
    assert not faults(imports_from_above, FILES)


def encoders_in(path: Path, source: str) -> Iterator[str]:
    """Lines outside of the encoders that name their modules, or in a tool one of their models."""
    names = r"lightning_megatron\.encoders"
    if part_of(module_of(path)) == "tools" and path != SCRIPTS:
        names = rf"{names}|(?<![a-z0-9])(bert|t5)(?!WordPiece)"
    for number, line in enumerate(source.splitlines(), 1):
        is_typed = path in PUBLIC_NAMES and line.startswith("    from ")  # for type checkers
        is_in_table = path == PACKAGE / "extensions.py" and line.strip(' ",') in FAMILIES
        if re.search(names, line, re.IGNORECASE) and not (is_typed or is_in_table):
            yield f"{number}: {line.strip()}"


def test_encoders_are_reached_by_the_tables_of_names_alone():
    """They stand for a family of another package: what they need of the others, that family gets too."""
    others = [path for path in FILES if part_of(module_of(path)) != "encoders"]
    assert not faults(lambda path: encoders_in(path, path.read_text()), others)


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("layers/mlp.py", "    from lightning_megatron.encoders.t5 import parts"),
        ("__init__.py", "from lightning_megatron.encoders.t5 import parts"),
        ("extensions.py", 'EXTENSIONS = {"mask": "lightning_megatron.encoders.sentences:masking"}'),
        ("tools/planning/plan.py", "if type(config).__name__ == 'BertConfig':"),
    ],
)
def test_another_way_to_the_encoders_is_found(file, planted):
    assert list(encoders_in(PACKAGE / file, planted)) == [f"1: {planted.strip()}"]


def rooms() -> dict[str, dict[str, int]]:
    """Floors inside of folders, from the second table of docs/design.md: floor of each part of a folder.

    The part ``""`` is the folder's own files.
    """
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| (`.*?) \|$", page.split("## Floors inside of folders")[1], re.MULTILINE)
    return {
        room: {
            part.strip("`/").replace("own files", ""): floor
            for floor, names in enumerate(row.split(" < "))
            for part in names.split(", ")
        }
        for room, row in rows
    }


def part_within(room: str, module: str, parts: dict[str, int]) -> str:
    """``checkpoint.formats.hf.write`` -> ``formats/hf``: the longest part that holds a module of a folder."""
    folder = PACKAGE / room
    path = Path(*module.split(".")[2:])
    if not (folder / path).is_dir():
        path = path.parent
    own = "" if str(path) == "." else str(path)
    while own not in parts:
        own = str(Path(own).parent)
    return own


@pytest.mark.parametrize("room", rooms())
def test_a_file_imports_only_from_floors_below_inside_of_its_folder(room):
    parts, found = rooms()[room], []
    for path in (path for path in FILES if path.relative_to(PACKAGE).parts[0] == room):
        if path == PACKAGE / room / "__init__.py":  # the door of the folder, for others
            continue
        part = part_within(room, module_of(path), parts)
        for module, line in imports_of(path):
            if module.startswith(f"lightning_megatron.{room}."):
                other = part_within(room, module, parts)
                if part != other and parts[other] >= parts[part]:
                    found.append(f"{path.relative_to(PACKAGE)}:{line}: {part or 'own files'} imports {module}")
    assert not found, "\n".join(found)


def test_the_second_table_has_every_folder_inside_of_another_and_no_other():
    inside = {path.parent.relative_to(PACKAGE) for path in FILES if len(path.relative_to(PACKAGE).parts) > 2}
    kept = {folder for folder in inside if folder.parts[0] != "testing"}
    table = {Path(room, part) for room, parts in rooms().items() for part in parts if part}
    assert table == kept - {folder for folder in kept if list(PACKAGE.joinpath(folder).glob("*.py")) == []}


def test_the_rules_themselves():
    assert may_import("mesh", "device")
    assert may_import("moe", "layers")
    assert not may_import("layers", "moe")
    assert not may_import("ops", "mesh")
    assert not may_import("ops", "comm")
    assert not may_import("comm", "ops")
    assert not may_import("optim", "layers")
    assert not may_import("optim", "checkpoint")
    assert not may_import("models", "lightning")
    assert may_import("data", "mesh")
    assert {part_of(module_of(path)) for path in FILES} <= LAYERS.keys()


def test_the_page_on_design_has_every_module_and_no_other():
    here = {part_of(module_of(path)) for path in FILES} - {""}
    assert here == LAYERS.keys() - {""}
    assert HIGHEST == {"ops": 2, "pipeline": 4, "optim": 4, "checkpoint": 4, "data": 4}
    assert ("moe", "layers") in NEIGHBOURS


def test_no_module_imports_itself_through_others():
    graph = {module_of(path): imports_when_it_runs(path) for path in FILES}
    edges = {name: sorted(others & graph.keys() - {name}) for name, others in graph.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


COLLECTIVES = re.compile(r"(all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|i?send|i?recv|new_group)")
OF_COMM = ("comm/", "mesh.py", "testing/")
PROGRAMS = ("tools/calibration/worker.py", "tools/cli/doctor/child.py")  # processes of their own, without a mesh


def collectives(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        is_attribute = isinstance(node, ast.Attribute) and COLLECTIVES.match(node.attr)
        if is_attribute and ast.unparse(node.value) in ("dist", "torch.distributed"):
            yield f"{node.lineno}: {node.attr} belongs into comm/"


def test_only_comm_and_the_mesh_call_collectives():
    others = [path for path in FILES if not str(path.relative_to(PACKAGE)).startswith((*OF_COMM, *PROGRAMS))]
    assert len(others) > 500
    assert not faults(collectives, others)


def docstrings(tree: ast.Module) -> set[int]:
    """Ids of the string nodes that are documentation."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def functions_named_as_modules(path: Path) -> Iterator[str]:
    modules = {p.stem for p in path.parent.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    for node in ast.walk(tree_of(path)):
        is_import = isinstance(node, ast.ImportFrom) and node.module != module_of(path)
        if is_import and modules & {alias.asname or alias.name for alias in node.names}:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_package_has_a_function_under_the_name_of_one_of_its_modules():
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert len(packages) > 70
    assert not faults(functions_named_as_modules, packages)


def device_words(path: Path) -> Iterator[str]:
    prose = docstrings(tree_of(path))
    for node in ast.walk(tree_of(path)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        if is_text and DEVICE_WORDS & set(re.findall(r"\w+", node.value)):
            yield f"{node.lineno}: {node.value!r}"
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id == "torch" and node.attr in DEVICE_WORDS:
            yield f"{node.lineno}: torch.{node.attr}"


def test_only_the_device_module_and_ops_name_a_device():
    others = [path for path in FILES if part_of(module_of(path)) not in DEVICE_MODULES]
    assert len(others) > 500
    assert not faults(device_words, [path for path in others if not str(path).endswith(ANOTHERS_WORDS)])


def test_no_file_is_longer_than_450_lines():
    simulated = [path for path in SIMULATION.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert len(simulated) > 60
    assert not [path.name for path in FILES + simulated if len(path.read_text().splitlines()) > 450]


def test_the_package_neither_imports_nor_names_the_simulated_gaudi():
    """It is a distribution of its own, and a Gaudi to everything here."""
    named = re.compile(r"simulated[-_. ](hpu|gaudi)|hpu[-_]sim", re.IGNORECASE)
    assert named.search((SIMULATION / "simulated_gaudi" / "__init__.py").read_text())
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path.name for path in paths if named.search(path.read_bytes().decode(errors="ignore"))]


SPY = """
import json, os, subprocess, sys
runs = []
class Spy(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        runs.append(str(args[0] if args else kwargs.get("args")))
        super().__init__(*args, **kwargs)
subprocess.Popen = Spy
system = os.system
os.system = lambda command: runs.append(command) or system(command)
import torch
try:
    import transformers  # no dependency of ours; where it is installed, torchmetrics loads it
except ImportError:
    pass
import lightning.pytorch
before = set(sys.modules)
import lightning_megatron
added = sorted(set(sys.modules) - before)
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({"added": added, "runs": runs, "modules": sorted(sys.modules)}))
"""


def test_programs_that_this_one_stands_beside_are_not_imported():
    """Neither at import nor inside a function: their formats are read without them."""
    modules = {
        name.split(".")[0]
        for path in FILES
        for node in ast.walk(tree_of(path))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert "torch" in modules
    assert modules & {"megatron", "deepspeed", "apex", "transformer_engine", "nemo", "nltk", "mpi4py"} == set()


@cache
def imported():
    """What happens when the package is imported, and then each module of the core, in a process of its own."""
    core = [name for name in map(module_of, FILES) if part_of(name) not in ("encoders", "tools", "testing")]
    core.remove("lightning_megatron.lightning.classes_for_cli")  # imports all public names, for LightningCLI
    done = subprocess.run([sys.executable, "-c", SPY, *core], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_package_imports_without_a_compiler_and_without_the_bridge():
    found = imported()
    compilers = [run for run in found["runs"] if re.search(r"\b(gcc|g\+\+|cc|c\+\+|clang|nvcc|ninja|make)\b", run)]
    assert not compilers
    assert not [name for name in found["modules"] if name.startswith("habana")]


def test_the_core_imports_neither_encoders_nor_tools():
    loaded = Counter(part_of(name) for name in imported()["modules"] if name.startswith("lightning_megatron."))
    assert loaded["lightning"] > 100
    assert (loaded["encoders"], loaded["tools"]) == (0, 0)


def test_the_package_imports_little_more_than_torch_and_lightning():
    """Modules and not seconds, which depend on the machine: its own, torch's checkpoints and launcher, one package."""
    added = Counter(name.split(".")[0] for name in imported()["added"])
    assert added.pop("lightning_megatron") < 400
    assert added.total() < 150, added
    assert set(added) - sys.stdlib_module_names <= {"torch", "safetensors"}


@pytest.mark.slow
def test_modules_below_lightning_need_no_lightning():
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None\n"
        "import lightning_megatron.models.gpt, lightning_megatron.pipeline.runtime, lightning_megatron.optim.zero\n"
        "import lightning_megatron.checkpoint, lightning_megatron.data\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_of_the_tests_have_names_of_their_own():
    """pytest puts all folders on the path; those of devices are collected in sessions of their own."""
    tests = PACKAGE.parent / "tests"
    apart = {tests / "device", tests / "unit/checkpoint/formats/golden", tests / "unit/data/golden"}
    ours = [path for path in tests.rglob("*.py") if not path.is_relative_to(SIMULATION)]
    names = [path.name for path in ours if path.parent not in apart and path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []

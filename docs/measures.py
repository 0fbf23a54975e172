"""Write docs/measures.md, the measures of the package's structure: ``python docs/measures.py``.

They are watched, and no test holds their values: a bound would only be raised with the code. They follow the structural
review that the redesign of layers began with.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from lightning_megatron import GPTModule, MegatronStrategy, TransformerConfig  # noqa: E402
from lightning_megatron.testing.trainer import quiet_trainer  # noqa: E402
from tests.structure import files, imports  # noqa: E402
from tests.walks import WALKS, steps_of  # noqa: E402

PAGE, PACKAGE = ROOT / "docs" / "measures.md", ROOT / "lightning_megatron"
HOUSES = {"tools": "tools", "encoders": "encoders", "testing": "helpers of tests"}
"""Houses of folders; all others are core."""
FOR_TOOLS = re.compile(r"# (type|noqa|fmt|mypy|ruff)\b")
LAYERS = {
    "the module": "layers",
    "formulas of the configuration": "config/counts.py",
    "memory and time in the planner": "tools/planning/memory",
    "the twin of a parity check": "tools/parity/twin.py",
}
"""Places that describe a layer, each while its file or folder exists."""
REACHED = """
import sys, lightning_megatron
lightning_megatron.MegatronStrategy
print("\\n".join(name for name in sys.modules if name.startswith("lightning_megatron.")))
"""
HEAD = """\
<!-- made from the package by `python docs/measures.py` -->
# Measures of the package

For its developers: numbers to watch when code moves. No test holds them. Lines are those of files, with docstrings and
blank lines.

"""


def house_of(path: Path) -> str:
    """House of a file of the package: core, tools, encoders or helpers of tests."""
    return HOUSES.get(path.relative_to(PACKAGE).parts[0], "core")


def lines_by_house(paths: Iterable[Path]) -> Counter[str]:
    """Lines of each house."""
    found: Counter[str] = Counter()
    for path in paths:
        found[house_of(path)] += len(path.read_text().splitlines())
    return found


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names of attributes, keywords and annotated fields, each time that they occur."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def files_by_field(trees: Mapping[Path, ast.AST], fields: Iterable[str]) -> dict[str, list[Path]]:
    """Files that name each field of the models' configuration."""
    found: dict[str, list[Path]] = {field: [] for field in fields}
    for path, tree in trees.items():
        for name in found.keys() & set(names_in(tree)):
            found[name].append(path)
    return found


def reached() -> list[str]:
    """Modules of the package that importing the strategy loads, in a process of its own."""
    command = [sys.executable, "-c", REACHED]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()


def returns(modules: Iterable[str]) -> int:
    """Steps of a walk that come back to a module which it had left."""
    seen, before, count = set[str](), "", 0
    for module in modules:
        count += module in seen and module != before
        seen.add(module)
        before = module
    return count


def splatted(trees: Iterable[ast.AST]) -> int:
    """Calls with a splatted tuple."""
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(any(isinstance(argument, ast.Starred) for argument in call.args) for call in calls)


def share_of_comments(paths: Iterable[Path]) -> float:
    """Comments for readers, in lines with code."""
    comments, code = 0, set[tuple[Path, int]]()
    silent = {
        tokenize.ENCODING,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.COMMENT,
        tokenize.ENDMARKER,
    }
    for path in paths:
        with path.open("rb") as stream:
            for token in tokenize.tokenize(stream.readline):
                comments += token.type == tokenize.COMMENT and not FOR_TOOLS.match(token.string)
                if token.type not in silent:
                    code.add((path, token.start[0]))
    return comments / len(code)


class _Products(TorchFunctionMode):
    """Notes the own frames from the step of the optimizer to a product of a layer's forward: the most of all."""

    def __init__(self) -> None:
        self.frames = 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            own = [frame.f_code.co_name for frame in _stack(sys._getframe(1)) if _is_own(frame)]
            if "optimizer_step" in own:
                outermost = len(own) - own[::-1].index("optimizer_step")
                self.frames = max(self.frames, outermost)
        return function(*arguments, **options or {})


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_own(frame: FrameType) -> bool:
    return str(PACKAGE) in frame.f_code.co_filename


def frames_to_a_product() -> int:
    """Own frames from the step of the optimizer to a matrix product, in a step of a small GPT on one CPU."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_position_embeddings=8
    )
    rows = [{"tokens": torch.arange(8), "labels": torch.arange(8)}]
    products = _Products()
    with products:
        quiet_trainer(MegatronStrategy(), max_steps=1).fit(GPTModule(config), torch.utils.data.DataLoader(rows))
    return products.frames


def measures() -> dict[str, object]:
    """All of them, by name."""
    paths = [path for path in files(ROOT) if house_of(path) in ("core", "tools", "encoders")]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    fields = [field.name for field in dataclasses.fields(TransformerConfig)]
    named = files_by_field(trees, fields)
    planned = [field for field in fields if any("planning" in path.parts for path in named[field])]
    importers = Counter(name for others in imports(ROOT, of_types=True).values() for name in others)
    loaded = reached()
    of_others = [name for name in loaded if name.split(".")[1] in HOUSES]
    houses = lines_by_house(files(ROOT))
    return {
        **{f"lines of {house}": f"{houses[house]:,}" for house in sorted(houses)},
        "lines of core, tools and encoders": f"{sum(map(houses.__getitem__, ('core', 'tools', 'encoders'))):,}",
        "places that describe a layer": sum((PACKAGE / place).exists() for place in LAYERS.values()),
        "fields of a model's configuration": len(fields),
        "files that name such a field, median": f"{statistics.median(map(len, named.values())):.0f}",
        "fields that `planning` names": len(planned),
        "modules that importing the strategy loads": len(loaded),
        "those of other houses than core": len(of_others),
        "own frames from `optimizer_step` to a matrix product": frames_to_a_product(),
        **{f"returns of the walk {walk!r}": returns(step.module for step in steps_of(walk)) for walk in WALKS},
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "calls with a splatted tuple": splatted(trees.values()),
        "comments in lines of code": f"{share_of_comments(paths):.1%}",
    }


def page() -> str:
    """The page."""
    rows = [f"| {name} | {value} |" for name, value in measures().items()]
    return HEAD + "\n".join(["| measure | now |", "| --- | ---: |", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

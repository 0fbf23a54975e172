"""Measures of the package's structure and prose: ``python tests/structure.py [ROOT]`` prints them.

``tests/unit/structure/test_structure.py`` holds the limits; ROOT is another checkout, to compare with.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTION = re.compile(r"(What|Who|Whose|Whom|Whether|Where|When|Which|Why|How)\b")
FRAGMENT = re.compile(r"(of|like|the same|for|to|from|in|by|with|as)\b")
METAPHOR = re.compile(r"\b(house|room|rooms|wish|wishes|wished|who|whoever|whom)\b", re.IGNORECASE)
Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files(root: Path = ROOT) -> list[Path]:
    """Modules of the package."""
    return sorted((root / "lightning_megatron").rglob("*.py"))


@cache
def docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and text of every docstring of a file, those below constants too."""
    return tuple(_docstrings(path))


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, Owner):
            for before, each in zip([None, *node.body], node.body, strict=False):
                is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                first = each is node.body[0] or isinstance(before, ast.Assign | ast.AnnAssign)
                if is_text and first and isinstance(each.value.value, str):
                    yield each.lineno, each.value.value


def questions(path: Path) -> Iterator[str]:
    """Summary lines that begin as a question does, or end as one."""
    for line, text in docstrings(path):
        summary = text.strip().split("\n\n")[0].split("\n")[0]
        if QUESTION.match(summary) or summary.endswith("?"):
            yield f"{path}:{line}: {summary}"


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of every entry of ``Args`` and ``Attributes``."""
    section, margin = "", 0
    for row in text.split("\n"):
        indent, words = len(row) - len(row.lstrip()), row.strip()
        if words in ("Args:", "Attributes:"):
            section, margin = words, indent
        elif words and indent <= margin:
            section = ""
        elif section and indent == margin + 4 and (found := re.match(r"\*{0,2}(\w+): (.*)", words)):
            yield found[1], found[2]


def fragments(path: Path) -> Iterator[str]:
    """Entries of ``Args`` and ``Attributes`` that begin with a preposition in place of a noun."""
    for line, text in docstrings(path):
        for name, words in entries(text):
            if FRAGMENT.match(words):
                yield f"{path}:{line}: {name}: {words}"


def metaphors(path: Path) -> Iterator[str]:
    """Lines with words for people and houses where the subject is a program."""
    for number, row in enumerate(path.read_text().split("\n"), 1):
        if METAPHOR.search(row):
            yield f"{path}:{number}: {row.strip()}"


def constructors(path: Path) -> Iterator[tuple[str, int]]:
    """Classes and the number of arguments that their ``__init__`` takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield node.name, len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) - 1


def complex_functions(root: Path, limit: int) -> list[str]:
    """Functions of a cyclomatic complexity above the limit."""
    words = ["check", "--isolated", "--select", "C901", "--config", f"lint.mccabe.max-complexity={limit}"]
    command = [str(Path(sys.executable).parent / "ruff"), *words, "--output-format", "concise", "lightning_megatron"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    return [line for line in done.stdout.split("\n") if "C901" in line]


def complex_by_radon(root: Path, limit: int) -> list[str]:
    """Functions above the limit in radon's count, which has comprehensions and boolean operators too."""
    from radon.complexity import add_inner_blocks, cc_visit  # here, since no other measure needs it

    return [
        f"{path.relative_to(root)}:{block.lineno}: {block.fullname} {block.complexity}"
        for path in files(root)
        for block in add_inner_blocks(cc_visit(path.read_text()))
        if block.letter != "C" and block.complexity > limit
    ]


def in_two_modules(root: Path) -> dict[str, list[str]]:
    """Public functions and classes of the same name, and their modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files(root):
        if "testing" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                if is_named and not node.name.startswith("_") and str(path) not in found[node.name]:
                    found[node.name].append(str(path))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def lines(root: Path) -> int:
    """Lines of the package without what it is tested with."""
    return sum(len(path.read_text().splitlines()) for path in files(root) if "testing" not in path.parts)


def imports(root: Path, *, of_types: bool) -> dict[str, set[str]]:
    """Modules that each module imports, with or without imports that only a type checker follows."""
    names = {
        path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in files(root)
    }
    return {name: _imports(path, set(names.values()), of_types) - {name} for path, name in names.items()}


def cycles(root: Path, *, of_types: bool) -> list[str]:
    """Modules that import themselves through others; ``of_types`` as for :func:`imports`."""
    graph = imports(root, of_types=of_types)
    while outside := _outside(graph):
        for name in outside:
            del graph[name]
    return sorted(graph)


def _outside(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import none of the others, or that none of the others imports."""
    imported = set().union(*graph.values()) if graph else set()
    return [name for name, others in graph.items() if not others & graph.keys() or name not in imported]


def _imports(path: Path, known: set[str], of_types: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    skipped = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not of_types
        for each in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            modules = {f"{node.module}.{name.name}" for name in node.names} & known
            found |= modules or {node.module} & known
    return found - {"lightning_megatron"}


def main(root: Path) -> None:
    """Print the measures."""
    paths = files(root)
    lengths = sorted(len(path.read_text().splitlines()) for path in paths)
    folders = Counter(path.parent.relative_to(root) for path in paths)
    folder, most = folders.most_common(1)[0]
    print(f"files: {len(paths)}, lines: {sum(lengths)}")
    tenth = lengths[len(lengths) * 9 // 10]
    print(f"lines a file: median {statistics.median(lengths):.0f}, p90 {tenth}, max {lengths[-1]}")
    print(f"files under 60 lines: {sum(length < 60 for length in lengths)}")
    print(f"files a folder: at most {most} ({folder})")
    for name, of_types in (("when run", False), ("with type-only imports", True)):
        print(f"modules in import cycles, {name}: {len(cycles(root, of_types=of_types))}")
    for name, find in (
        ("summaries that ask", questions),
        ("entries without a noun", fragments),
        ("metaphors", metaphors),
    ):
        print(f"{name}: {sum(len(list(find(path))) for path in paths)}")
    print(f"functions of complexity above 15: {len(complex_functions(root, 15))}")
    print(f"by radon: {len(complex_by_radon(root, 15))}")
    print(f"lines without testing: {lines(root)}")
    print(f"public functions and classes in two modules: {len(in_two_modules(root))}")
    wide = [f"{name} {count}" for path in paths for name, count in constructors(path) if count > 8]
    print(f"constructors of more than 8 arguments: {', '.join(wide)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)

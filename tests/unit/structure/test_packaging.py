"""What is published: versions from tags, wheel and source archive, citation, and the workflows that make them."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_megatron.errors import how_to_install

ROOT = Path(__file__).parents[3]
PACKED = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "lightning_megatron")
READ = {
    ".cff",
    ".cfg",
    ".Dockerfile",
    ".ipynb",
    ".json",
    ".md",
    ".py",
    ".sbatch",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(*words: str, cwd: Path) -> None:
    run("git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false", *words, cwd=cwd)


def version(folder: Path) -> str:
    return run(sys.executable, "-m", "setuptools_scm", cwd=folder).strip()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what is packed, without git."""
    folder = tmp_path / "sources"
    folder.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=leave)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="versions are git's tags")
def test_the_version_is_the_tags(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert version(tmp_path) == "0.1.dev0", "without git"
    git("init", "--quiet", cwd=tmp_path)
    git("add", ".", cwd=tmp_path)
    git("commit", "--quiet", "--message", "a", cwd=tmp_path)
    assert re.fullmatch(r"0\.1\.dev1\+g\w+(\.d\d+)?", version(tmp_path)), "a clone without tags"
    git("tag", "v1.2.3", cwd=tmp_path)
    assert version(tmp_path) == "1.2.3"
    git("commit", "--quiet", "--allow-empty", "--message", "b", cwd=tmp_path)
    assert version(tmp_path).startswith("1.2.4.dev1+g")


def lend_dependencies(environment: Path) -> None:
    """Let an environment import what is installed beside these tests, behind what it has itself.

    Paths that a ``.pth`` file adds are searched last, and their own ``.pth`` files are not read: an editable install of
    this package stays unknown.
    """
    (own,) = environment.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    assert lent
    (own / "lent.pth").write_text("".join(f"{path}\n" for path in lent))


def train_a_recipe(program: Path, folder: Path) -> list[float]:
    """Two steps of a recipe, called by its name, on data that the same program makes.

    Returns:
        The losses in the run's log.
    """
    folder.mkdir()
    run(program, "demo-data", "--output", "demo", "--documents", "200", "--vocab-size", "400", cwd=folder)
    words = ["--data.data_path=demo/corpus_text_document", "--trainer.accelerator=cpu", "--trainer.max_steps=2"]
    words += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"]
    words += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.enable_progress_bar=false"]
    run(program, "fit", "--recipe", "llama-tiny", *words, cwd=folder)
    run(program, "verify", "out/llama-tiny/checkpoints/last.ckpt", cwd=folder)
    (metrics,) = folder.glob("logs/**/metrics.csv")
    with metrics.open() as rows:
        return [float(row["train_loss"]) for row in csv.DictReader(rows) if row["train_loss"]]


@pytest.mark.slow
def test_wheel_and_source_archive(sources: Path, tmp_path: Path) -> None:
    """Both pass the registry's check; the wheel holds the package whole, and trains in an empty environment."""
    git("init", "--quiet", cwd=sources)
    git("add", ".", cwd=sources)
    git("commit", "--quiet", "--message", "a", cwd=sources)
    git("tag", "v1.2.3", cwd=sources)
    dist = tmp_path / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, cwd=sources)
    wheel, archive = dist / "lightning_megatron-1.2.3-py3-none-any.whl", dist / "lightning_megatron-1.2.3.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, archive, cwd=dist)
    here = {str(path.relative_to(sources)) for path in (sources / "lightning_megatron").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if not name.startswith("lightning_megatron-1.2.3.dist-info/")}
    assert names == {name for name in here if not name.endswith(".md")}
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert here | {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    venv.create(tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=dist)
    program = tmp_path / "empty" / "bin" / "lightning-megatron"
    assert run(program, "--version", cwd=dist) == "lightning-megatron 1.2.3\n"
    asked = "from importlib.metadata import metadata; print(metadata('lightning-megatron')['Requires-Python'])"
    assert run(python, "-c", asked, cwd=dist) == ">=3.10\n"
    lend_dependencies(tmp_path / "empty")
    found = run(python, "-c", "import lightning_megatron; print(lightning_megatron.__file__)", cwd=dist)
    assert found.startswith(str(tmp_path / "empty"))
    losses = train_a_recipe(program, tmp_path / "job")
    assert losses == pytest.approx([log(4096)] * 2, rel=0.1), "as many tokens, all alike at first"


USE = """
import torch

def test_that_there_is_a_gaudi():
    assert torch.ones(2, device="hpu").sum().item() == 2
    assert torch.hpu.get_device_name() == "GAUDI3"
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that was built for CUDA can simulate no Gaudi")
def test_the_simulated_gaudi_is_a_distribution_beside_the_package(tmp_path: Path) -> None:
    """Installed from a clone with one command, it is whole, and works from another folder; the bridge stays hidden."""
    sources, program = tmp_path / "simulated-gaudi", tmp_path / "env" / "bin" / "python"
    shutil.copytree(
        ROOT / "tests" / "simulated-gaudi", sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    here = {path.relative_to(sources) for path in (sources / "simulated_gaudi").rglob("*") if path.is_file()}
    venv.create(tmp_path / "env")
    install = ("install", "--no-index", "--no-deps", "--no-build-isolation")
    lend_dependencies(tmp_path / "env")
    run(sys.executable, "-m", "pip", "--python", program, *install, sources, cwd=tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    there = {path.relative_to(site) for path in (site / "simulated_gaudi").rglob("*") if path.is_file()}
    assert {path for path in there if path.suffix != ".pyc"} == here
    assert not (site / "habana_frameworks").exists()
    (site / "clone.pth").write_text(f"{ROOT}\n")
    (tmp_path / "test_use.py").write_text(USE)
    words = ("-q", "-p", "simulated_gaudi.plugin", "--hpu-sim", "1.24", "--hpu-sim-device", "GAUDI3", "test_use.py")
    assert "1 passed" in run(program, "-m", "pytest", *words, cwd=tmp_path)


@pytest.mark.parametrize(
    ("schema", "paths"),
    [("vendor.github-workflows", WORKFLOWS), ("vendor.citation-file-format", [ROOT / "CITATION.cff"])],
    ids=["workflows", "citation"],
)
def test_files_for_others_keep_their_schemas(schema: str, paths: list[Path]) -> None:
    program = shutil.which("check-jsonschema") or Path(sys.executable).with_name("check-jsonschema")
    run(program, "--builtin-schema", schema, *paths, cwd=ROOT)


def settings() -> ConfigParser:
    found = ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def test_what_the_tests_install_holds_every_extra_of_users() -> None:
    """So each run of CI resolves all of them together; a large one has a job of the public tests."""
    listed = settings()["options.extras_require"]
    extras = {name: set(re.findall(r"^[\w-].*$", text, re.MULTILINE)) for name, text in listed.items()}
    apart = {name for name in set(extras) - {"dev", "docs"} if not extras[name] <= extras["dev"]}
    steps = [step.get("run", "") for job in workflow("tests.yml")["jobs"].values() for step in job["steps"]]
    assert apart == set(re.findall(r"pip install .*\.\[(\w+)\]", "\n".join(steps)))


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return found


def test_the_public_tests_begin_at_the_oldest_versions_that_are_promised() -> None:
    matrix = workflow("tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    required = settings()["options"]
    oldest = dict(re.findall(r"^(\w+)>=([\d.]+)", required["install_requires"], re.MULTILINE))
    assert matrix["python"][0] == required["python_requires"].removeprefix(">=")
    assert (matrix["torch"][0], matrix["lightning"][0]) == (oldest["torch"], oldest["lightning"])
    assert "" in matrix["torch"], "the newest torch"
    named = re.findall(r"Python :: (3\.\d+)", settings()["metadata"]["classifiers"])
    assert matrix["python"] == named


NAME = r"['\"]?lightning[-_.]megatron(?!\.\w|[\w/@-])"
BY_NAME = re.compile(
    rf"\b(?:pip3?|uv|pipx|poetry|pdm|conda|mamba)\b[^\n`]*? (?:install|add|download)(?:(?! in a clone)[^\n`])*? {NAME}"
    rf"|(?:\buvx|\buv tool run|\bpipx run|--with|--from)[ =]{NAME}"
    r"|\blightning[-_.]megatron ?(?:\[|[=~<>!]=)"
)
"""A command or a requirement that takes the package from a registry, by its name."""


def by_name(text: str) -> list[str]:
    """Lines that install the package by its name, also where the command goes on in the next line.

    It does so behind a backslash, between two literals of an expression, and in a code span.
    """
    text = re.sub(r"\\\n\s*", " ", text.lower())
    text = re.sub(r"['\"]\s*\n\s*[bfr]*['\"]", "", text)
    text = re.sub(r"(`pip[^`\n]*)\n\s*([^`\n]*`)", r"\1 \2", text)
    return [line for line in text.splitlines() if "megatron" in line and BY_NAME.search(line)]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("pip install 'lightning-megatron[eval]'", True),
        ("uv pip install -U lightning-megatron", True),
        ("Run pip install Lightning_Megatron.", True),
        ("python -m pip install \\\n    --upgrade lightning-megatron", True),
        ('"needs lm-eval: pip install "\n    f"lightning-megatron"', True),
        ("first `pip install\nlightning-megatron`, then", True),
        ("uvx lightning-megatron doctor", True),
        ("pipx run lightning-megatron", True),
        ("uv run --with lightning-megatron train.py", True),
        ("dependencies: lightning-megatron>=0.1", True),
        ("the extra lightning-megatron[eval]", True),
        (how_to_install("eval"), False),
        ("pip install .\nlightning-megatron doctor", False),
        ("pip install -e lightning-megatron/", False),
        ("pip install git+https://example.org/owner/lightning-megatron.git", False),
    ],
)
def test_commands_that_install_by_name_are_found(text: str, is_one: bool) -> None:
    assert bool(by_name(text)) == is_one


def test_nothing_installs_a_name_that_is_not_ours() -> None:
    """No registry holds the package yet, and whoever registers its name would be installed by our own pages.

    All pages, and all docstrings and messages of the package, as they stand in the files.
    """
    folders = ("lightning_megatron", "docs", "examples", "docker", "benchmarks", ".github", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in READ]
    paths += [path for path in ROOT.iterdir() if path.suffix in READ or path.name == "Makefile"]
    assert len(paths) > 700
    found = {str(path.relative_to(ROOT)): by_name(path.read_text()) for path in paths}
    assert {path: commands for path, commands in found.items() if commands} == {}


HOME = "https://example.org/owner/lightning-megatron"


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """What the release's workflow prepares, with a changelog in which 0.1.0 has its date."""
    (tmp_path / "docs").mkdir()
    for name in ("setup.cfg", "README.md", "docs/published.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-01\n")
    return tmp_path


def test_what_is_published_has_the_repositorys_addresses(tagged: Path) -> None:
    """A registry shows the README, where relative links lead nowhere."""
    readme = tagged / "README.md"
    text = "\n[![a](docs/a.png)](docs/plan.md) [b](mailto:b@example.org)\n\n```python\ny = table[0](x)\n```\n"
    readme.write_text(readme.read_text() + text)
    run(sys.executable, "docs/published.py", HOME, "v0.1.0", cwd=tagged)
    found = ConfigParser()
    found.read(tagged / "setup.cfg")
    urls = dict(line.split(" = ") for line in found["metadata"]["project_urls"].strip().splitlines())
    assert urls["Source"] == HOME
    assert urls["Changelog"] == f"{HOME}/blob/v0.1.0/CHANGELOG.md"
    page, _, rest = readme.read_text().partition("\n[![a]")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links)
    for link in links:
        if link.startswith(f"{HOME}/blob/v0.1.0/"):
            assert (ROOT / link.removeprefix(f"{HOME}/blob/v0.1.0/").partition("#")[0]).exists(), link
    assert rest.startswith(f"({HOME}/raw/v0.1.0/docs/a.png)]({HOME}/blob/v0.1.0/docs/plan.md) [b](mailto:b@")
    assert "table[0](x)" in rest, "code is no link"


@pytest.mark.parametrize("heading", ["## 0.1.0 - not yet released", "## 0.1.01 - 2026-12-01", "## Unreleased"])
def test_a_version_without_its_date_in_the_changelog_is_not_published(tagged: Path, heading: str) -> None:
    (tagged / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    before = (tagged / "setup.cfg").read_text()
    with pytest.raises(AssertionError, match=r"no heading `## 0\.1\.0 - YYYY-MM-DD`"):
        run(sys.executable, "docs/published.py", HOME, "v0.1.0", cwd=tagged)
    assert (tagged / "setup.cfg").read_text() == before


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_targets_of_workflows_are_in_the_makefile(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = [step.get("run", "") for job in workflow(path.name)["jobs"].values() for step in job["steps"]]
    assert set(re.findall(r"\bmake ([\w-]+)", "\n".join(steps))) <= set(targets)
    assert all((ROOT / name).is_file() for name in re.findall(r"^(\.ci/[\w-]+)", "\n".join(steps), re.MULTILINE))

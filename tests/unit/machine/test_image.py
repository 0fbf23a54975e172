"""The Gaudi image: its lines run in a plain environment with a made-up torch of Intel's, without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "docker" / "gaudi.Dockerfile").read_text().replace("\\\n", " ")
KEEP = ROOT / "docker" / "keep.py"
TORCH = "2.10.0a0+git009b5f6"
INTELS = {"torch": TORCH, "habana_torch_plugin": "1.24.0.1007", "numpy": "1.26.4"}
"""Packages of an image without torchmetrics and Lightning, as Intel's are since 1.19."""


def distribution(site: Path, name: str, version: str) -> None:
    """An installed distribution without files."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def site(folder: Path, packages: dict[str, str]) -> Path:
    for name, version in packages.items():
        distribution(folder, name, version)
    return folder


def keep(path: Path, *words: str, behind: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``keep.py`` where only the distributions of one folder are installed, and those of another one ``behind`` it."""
    folders = [str(path), *([] if behind is None else [str(behind)])]
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p] + {folders!r}\n"
    code += f"sys.argv[:] = {['keep.py', *words]!r}\n"
    code += f"from runpy import run_path; run_path({str(KEEP)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)


def test_intels_packages_are_constraints(tmp_path: Path) -> None:
    """pip is bound to what Intel has installed, and an image without torch is refused."""
    given = {"torch": "2.6.0+hpu.1.21.0.555", "habana_torch_plugin": "1.21.0.555", "rich": "14.0"}
    done = keep(site(tmp_path / "site", given))
    assert done.stdout.splitlines() == ["habana-torch-plugin==1.21.0.555", "torch==2.6.0+hpu.1.21.0.555"]
    empty = keep(tmp_path / "empty")
    assert empty.returncode != 0
    assert "no torch in this image" in empty.stderr
    assert "usage: keep.py" in keep(tmp_path / "site", "--check").stderr


def test_a_package_that_python_does_not_import_is_no_constraint(tmp_path: Path) -> None:
    """Debian's folder of packages lies behind pip's, and may have another version of one."""
    of_debian = site(tmp_path / "debian", {"numpy": "1.21.5"})
    assert keep(site(tmp_path / "pip", INTELS), behind=of_debian).stdout.splitlines()[1] == "numpy==1.26.4"


def test_the_check_looks_at_packages_that_were_there_before(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(keep(site(tmp_path / "before", INTELS)).stdout)
    more = site(tmp_path / "after", INTELS | {"torchmetrics": "1.9.0"})
    done = keep(more, "--check", str(constraints))
    assert (done.returncode, done.stderr) == (0, "")
    other = site(tmp_path / "other", INTELS | {"torch": "2.13.0"})
    done = keep(other, "--check", str(constraints))
    assert done.returncode == 1
    assert f"torch was {TORCH} and is now 2.13.0" in done.stderr
    without = site(tmp_path / "without", {name: version for name, version in INTELS.items() if name != "numpy"})
    assert "numpy was 1.26.4 and is now gone" in keep(without, "--check", str(constraints)).stderr


def required() -> dict[str, str]:
    """Version of every package that the image installs, by its name: the lowest that fits."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = re.search(r"'\.\[(.*?)\]'", DOCKERFILE)
    assert extras is not None
    lists = [setup["options"]["install_requires"]]
    lists += [setup["options.extras_require"][name] for name in extras[1].split(",")]
    found = re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(lists), re.MULTILINE)
    return {name.replace("-", "_"): version for name, version in found if name not in INTELS}


def wheel(folder: Path, name: str, version: str, requires: str) -> None:
    """A package without modules, for pip."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def built(folder: Path, torch_of_lightning: str) -> subprocess.CompletedProcess[str]:
    """The lines of the Dockerfile, run in an environment like an image of Intel's.

    Args:
        folder: place for the environment and an index of packages.
        torch_of_lightning: the torch that the index's Lightning asks for.
    """
    venv.create(folder / "image")
    (packages,) = (folder / "image" / "lib").glob("python*/site-packages")
    site(packages, INTELS)
    tools = ("setuptools", "setuptools_scm", "vcs_versioning")
    for name in ("pip", *tools, "_distutils_hack", "wheel", "pkg_resources", "packaging"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            (packages / name).symlink_to(Path(spec.origin).parent)
    for commands in (
        found for name in tools for found in Path(setuptools.__file__).parents[1].glob(f"{name}-*.dist-info")
    ):
        (packages / commands.name).symlink_to(commands)
    index = folder / "index"
    index.mkdir()
    for name, version in required().items():
        wheel(index, name, version, f"Requires-Dist: torch{torch_of_lightning}\n" if name == "lightning" else "")
    wheel(index, "torch", "2.13.0", "")
    (folder / "work").mkdir()
    for *sources, target in (words.split() for words in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)):
        for source in sources:
            place = folder / "work" / (target if len(sources) == 1 and target != "./" else source)
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    (command,) = re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)
    environment = {
        "PATH": f"{folder / 'image' / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say true
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        ["sh", "-c", command], cwd=folder / "work", env=environment, capture_output=True, text=True, check=False
    )


def versions(folder: Path) -> dict[str, str]:
    """Version of every distribution in the image."""
    found = (folder / "image" / "lib").glob("python*/site-packages/*.dist-info")
    pairs = (path.stem.split("-", 1) for path in found)
    return {name.lower(): version for name, version in pairs}


@pytest.mark.slow
def test_the_image_is_built_around_intels_torch(tmp_path: Path) -> None:
    done = built(tmp_path, ">=2.1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = versions(tmp_path)
    assert found["torch"] == TORCH
    assert found["lightning_megatron"] == "0.1.dev0", "an image has no git"
    assert found["torchmetrics"] == required()["torchmetrics"]
    assert (tmp_path / "image" / "bin" / "lightning-megatron").exists()


@pytest.mark.slow
def test_a_package_that_needs_another_torch_stops_the_build(tmp_path: Path) -> None:
    done = built(tmp_path, ">=2.12")
    assert done.returncode != 0
    assert "ResolutionImpossible" in done.stderr
    # A machine may have constraints of its own, which pip names beside this one.
    (asked,) = (line for line in done.stdout.splitlines() if "The user requested (constraint) torch" in line)
    assert asked.endswith(f"=={TORCH}")
    assert versions(tmp_path)["torch"] == TORCH

"""Public names stay, or go by the table of deprecations: with a warning, a replacement and a version."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from py_compile import compile as compile_source
from runpy import run_path

import pytest
from packaging.version import Version

from lightning_megatron.deprecation import DEPRECATED, Deprecation
from lightning_megatron.errors import Problem
from lightning_megatron.lazy_exports import exports_of

ROOT = Path(__file__).parents[3]
API = run_path(str(ROOT / "docs" / "api.py"))
PUBLISHED = run_path(str(ROOT / "docs" / "published.py"))


def released() -> Version:
    """Version of the newest release in the changelog; 0 before the first."""
    found = PUBLISHED["releases"]((ROOT / "CHANGELOG.md").read_text())
    return max(map(Version, found), default=Version("0"))


def test_a_name_that_was_public_is_so_or_is_deprecated() -> None:
    kept = {f"{module}.{name}" for module, names in API["kept_names"]().items() for name in names}
    now = {f"{module}.{name}" for module, names in API["public_names"]().items() for name in names}
    assert now - kept == set(), "run `python docs/api.py`"
    assert kept - now == set(DEPRECATED), "a name goes by an entry of lightning_megatron/deprecation.py"
    assert API["KEPT"].read_text() == API["names_page"]()


def faults(name: str, entry: Deprecation, newest: Version) -> list[str]:
    """What is wrong with an entry of the table."""
    since, until = Version(entry.since), Version(entry.until)
    found = [] if until.release[:2] > since.release[:2] else [f"{name} goes in the minor release that warns first"]
    if newest >= until:
        found.append(f"{name} was to go with {until}: take it out of the table and of docs/names.yaml")
    module, _, attribute = entry.replacement.rpartition(".")
    if attribute not in API["public_names"]().get(module, ()):
        found.append(f"{entry.replacement} is not public")
    return found


def test_entries_can_be_kept() -> None:
    assert [fault for name, entry in DEPRECATED.items() for fault in faults(name, entry, released())] == []


@pytest.mark.parametrize(
    ("replacement", "since", "until", "text"),
    [
        ("lightning_megatron.Throughput", "0.3.1", "0.3.9", "goes in the minor release that warns first"),
        ("lightning_megatron.Throughput", "0.1.0", "0.2.0", "was to go with 0.2.0"),
        ("lightning_megatron.tools.cli", "0.3.0", "0.4.0", "lightning_megatron.tools.cli is not public"),
    ],
)
def test_entries_that_cannot_be_kept(replacement: str, since: str, until: str, text: str) -> None:
    (fault,) = faults("a.b", Deprecation(replacement, since, until), Version("0.2.0"))
    assert text in fault


def test_a_name_that_will_go_leads_to_its_replacement_and_warns_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "lightning_megatron_with_old_names"
    old.mkdir()
    (old / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    package = import_module(old.name)
    monkeypatch.delitem(sys.modules, old.name)
    monkeypatch.setitem(sys.modules, old.name, package)
    table = {f"{package.__name__}.Speed": Deprecation("lightning_megatron.ConfigError", "0.2.0", "0.3.0")}
    package.__getattr__, _ = exports_of(package.__name__, table)  # type: ignore[method-assign]
    user = tmp_path / "user.py"
    user.write_text(f"import {package.__name__} as old\nfound = old.Speed\n")
    with pytest.warns(FutureWarning) as caught:
        found = run_path(str(user))["found"]
    assert found is import_module("lightning_megatron").ConfigError
    text = "Speed is deprecated since 0.2.0 and will be removed in 0.3.0: use lightning_megatron.ConfigError"
    assert text in str(caught[0].message)
    assert (Path(caught[0].filename), caught[0].lineno) == (user, 2)
    with pytest.warns(FutureWarning):  # again: a name of the table is not kept in the package
        _ = package.Speed
    with pytest.raises(AttributeError, match="no attribute 'Speeds'"):
        _ = package.Speeds


def test_names_are_found_in_an_installation_without_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (package := tmp_path / "lightning_megatron_compiled").mkdir()
    source = package / "__init__.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "from lightning_megatron.lazy_exports import exports_of\n"
        "if TYPE_CHECKING:\n    from lightning_megatron.errors import ConfigError, Problem\n"
        "__getattr__, __dir__ = exports_of(__name__)\n"
    )
    compile_source(str(source), str(package / "__init__.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    found = import_module(package.name)
    monkeypatch.delitem(sys.modules, package.name)
    monkeypatch.setitem(sys.modules, package.name, found)
    assert found.Problem is Problem
    assert "ConfigError" in dir(found)

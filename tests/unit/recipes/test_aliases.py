"""YAML files whose aliases multiply: refused by name, at once; ordinary aliases are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_megatron.data.blend_file import read_blend
from lightning_megatron.errors import ConfigError
from lightning_megatron.files.small import read_yaml
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.recipes.words import config_words
from lightning_megatron.tools.recipes.contents import contents_of

LISTS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
MAPPINGS = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 25))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
ITSELF = "a: &a [*a]\n"
MULTIPLIED = {"lists": LISTS, "mappings": MAPPINGS, "merges": MERGES, "itself": ITSELF}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_file_whose_aliases_multiply_is_refused(name: str, tmp_path: Path) -> None:
    """By each reader of YAML: a recipe's contents, a command's words, another file of LightningCLI's."""
    file = tmp_path / "bomb.yaml"
    file.write_text(MULTIPLIED[name])
    for read in (
        lambda: contents_of([file]),
        lambda: config_words(["fit", "--config", str(file)], {}),
        lambda: config_words(["fit", f"--trainer={file}"], {}),
    ):
        with pytest.raises(
            ConfigError, match=r"bomb.yaml.*its aliases \(\*name\) multiply to more than 1,000,000 values"
        ):
            read()
    with pytest.raises(ConfigError, match="multiply"):
        read_blend(str(file), "data_path")
    assert main(["plan", "--config", str(file), "--device", "h100"]) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &x {p: 1}\nb: *x\nc: {<<: *x, q: 2}", {"a": {"p": 1}, "b": {"p": 1}, "c": {"p": 1, "q": 2}}),
        ("", None),
        ("[1, 2.5, yes, '&a', null]", [1, 2.5, True, "&a", None]),
    ],
)
def test_ordinary_yaml_is_read_as_by_pyyaml(text: str, value: object) -> None:
    assert read_yaml(text) == value

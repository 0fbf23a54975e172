"""Manifests as YAML in which scripts keep their lines."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """A dumper without anchors, which writes texts of several lines as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(contents: Any) -> str:
    """A manifest as text."""
    return yaml.dump(contents, Dumper=_Dumper, sort_keys=False, width=120)

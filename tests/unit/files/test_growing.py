"""Files that get their names at once: what is on the disk when, which a crash of the machine would show."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron.files.growing import written_at_once


def publish_with_links(path: Path, patch: pytest.MonkeyPatch, keep_equal: bool) -> None:
    with written_at_once(path, keep_equal=keep_equal) as stream:
        stream.write(b"tokens")


def publish_without_links(path: Path, patch: pytest.MonkeyPatch, keep_equal: bool) -> None:
    def link(*_: object) -> None:
        raise OSError("no links here")

    patch.setattr(os, "link", link)
    publish_with_links(path, patch, keep_equal)


@pytest.mark.parametrize("publish", [publish_with_links, publish_without_links])
@pytest.mark.parametrize("keep_equal", [False, True])
@pytest.mark.skipif(os.name != "posix", reason="elsewhere a folder cannot be opened")
def test_bytes_reach_the_disk_before_their_name_and_the_name_before_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    publish: Callable[[Path, pytest.MonkeyPatch, bool], None],
    keep_equal: bool,
) -> None:
    path, fsync, seen = tmp_path / "corpus.bin", os.fsync, list[tuple[str, bool]]()

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        assert not is_folder or os.path.samestat(found, tmp_path.stat())
        assert is_folder or found.st_size == len(b"tokens")
        seen.append(("folder" if is_folder else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", synced)
    publish(path, monkeypatch, keep_equal)
    assert path.read_bytes() == b"tokens"
    assert seen[0] == ("file", False)
    assert seen[-1] == ("folder", True)

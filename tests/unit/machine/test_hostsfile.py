from __future__ import annotations

from pathlib import Path

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.machine.hostsfile import Host, read_hosts, slots_of


def written(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text)
    return folder / "hosts"


def test_every_spelling(tmp_path: Path) -> None:
    text = "# machines\n10.0.0.1 slots=8\n\nnode-2.cluster slots=8 max_slots=16  # the second\n"
    text += "node3:8\n[fe80::1] slots=8\n"
    hosts = read_hosts(written(tmp_path, text))
    names = ["10.0.0.1", "node-2.cluster", "node3", "[fe80::1]"]
    assert hosts == [Host(name, 8) for name in names]
    assert slots_of(hosts, 32, "hosts") == 8
    assert read_hosts(written(tmp_path, "a\nb\n")) == [Host("a"), Host("b")]
    assert slots_of([Host("a"), Host("b")], 8, "hosts") == 4


@pytest.mark.parametrize("character", list("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r"))
def test_a_comment_goes_on_to_the_newline(character: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(f"a slots=8\r\n# without{character}b slots=8\r\nc slots=8".encode())
    assert read_hosts(tmp_path / "hosts") == [Host("a", 8), Host("c", 8)]


def test_all_faults_at_once_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "a slots=8\nb slots=eight\na slots=8\nc:0\n-x\nd gpus=8\n")
    with pytest.raises(ConfigError) as error:
        read_hosts(path)
    said = {problem.argument.rsplit(":", 1)[1]: problem.reason for problem in error.value.problems}
    assert set(said) == {"2", "3", "4", "5", "6"}
    assert "line 1 names a, too" in said["3"]
    assert "without slots" in said["4"]
    with pytest.raises(ConfigError, match="names no machine"):
        read_hosts(written(tmp_path, "# nobody\n"))


@pytest.mark.parametrize(
    ("hosts", "ranks", "said"),
    [
        ([Host("a", 8), Host("b", 4)], 12, "equally many"),
        ([Host("a", 8), Host("b", 8)], 8, "2 machines with 8 slots are 16 ranks, but the job has 8"),
        ([Host("a"), Host("b")], 7, "are 6 ranks"),
    ],
)
def test_slots_that_do_not_fit_the_job(hosts: list[Host], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slots_of(hosts, ranks, "hosts")

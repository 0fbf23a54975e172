"""Device files: figures of the datasheets, constants, faults, and the way through a file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.planning.core.device_file import DTYPES, FOLDER, device_names, load_device, read_device

NAMES = ("a100-40", "a100-80", "b200", "cpu", "gaudi2", "gaudi3", "gb200", "h100", "h200")


def test_every_device_of_the_command_line_has_a_file() -> None:
    assert tuple(device_names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_device_has_sources_and_at_most_three_constants_a_format(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.sources
    assert set(device.flops) == set(device.efficiency) <= set(DTYPES)
    given = json.loads((FOLDER / f"{name}.json").read_text())["efficiency"]
    assert all(len(constants) == 3 for constants in given.values())
    assert all(0 < value <= 1 for constants in given.values() for value in constants.values())


def test_figures_of_datasheets() -> None:
    h100, a100, gaudi3 = load_device("h100"), load_device("a100-80"), load_device("gaudi3")
    assert h100.peak("bf16") == 989e12
    assert h100.peak("fp8") == 1979e12
    assert a100.memory_bandwidth == 2.039e12
    assert gaudi3.peak("bf16") == 1835e12
    assert h100.within_node.bandwidth == 450e9  # one way of 900 GB/s


def test_a_format_that_a_device_lacks_is_the_next_wider_one() -> None:
    a100 = load_device("a100-80")
    assert a100.peak("fp8") == a100.peak("bf16")
    assert a100.constants("fp8") == a100.constants("bf16")


def test_an_unknown_device_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"device='h10': unknown device; nearest valid: h100"):
        load_device("h10")


def test_a_device_goes_through_a_file(tmp_path) -> None:
    device = replace(load_device("h100"), name="mine", kernel_seconds=7e-6)
    device.write(tmp_path / "mine.json")
    assert read_device(tmp_path / "mine.json") == device
    assert load_device(str(tmp_path / "mine.json")) == device


def test_all_faults_of_a_file_come_at_once(tmp_path) -> None:
    given = json.loads((FOLDER / "h100.json").read_text())
    given["memory_bytes"] = -1
    given["flops"] = {"int3": 1.0}
    given["between_nodes"]["bandwidth"] = 0.0
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as caught:
        read_device(path)
    assert {problem.argument for problem in caught.value.problems} == {"memory_bytes", "flops", "bandwidth"}
    del given["flops"]
    given["speed"] = 3
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=r"speed(.|\n)*flops"):
        read_device(path)
    path.write_text("no JSON")
    with pytest.raises(ConfigError, match="cannot be read as a device file"):
        read_device(path)

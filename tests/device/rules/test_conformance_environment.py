"""Steps, ranks and cards, graphs, and how the simulation comes into a process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import card
import pytest
import torch
from habana_frameworks.torch import core
from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu
from habana_frameworks.torch.utils.internal import is_lazy
from torch import nn

from lightning_megatron.device import hpu_available


def test_steps_are_counted_and_said_once_to_do_nothing():
    card.reset_calls()
    seen = []
    core.add_step_closure(seen.append, args=(1,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert core.mark_step() is None
        core.mark_step("", sync=True)
        core.iter_mark_step()
    card.assert_calls({"mark_step": 3})
    assert seen == [1]
    assert len(caught) <= (0 if is_lazy() else 1)


NAMES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "HLS_MODULE_ID",
    "ID",
    "HABANA_VISIBLE_MODULES",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture
def no_ranks(monkeypatch):
    """An environment without ranks; what a test leaves in it is taken away again."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return monkeypatch


def test_ranks_that_are_given_are_written(no_ranks):
    assert initialize_distributed_hpu(4, 3, 1) == (4, 3, 1)
    assert [os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")] == ["4", "3", "1"]
    assert (os.environ["HLS_MODULE_ID"], os.environ["ID"]) == ("1", "3")


def test_a_card_is_chosen_once(no_ranks):
    no_ranks.setenv("HABANA_VISIBLE_MODULES", "5,7")
    initialize_distributed_hpu(2, 1, 1)
    assert os.environ["HLS_MODULE_ID"] == "7"
    initialize_distributed_hpu(2, 0, 0)
    assert os.environ["HLS_MODULE_ID"] == "7"  # a child that inherits it shares its parent's card


def test_one_process_needs_no_card(no_ranks):
    initialize_distributed_hpu(1, 0, 0)
    assert "HLS_MODULE_ID" not in os.environ


def test_too_few_cards(no_ranks):
    no_ranks.setenv("HABANA_VISIBLE_MODULES", "0")
    with card.refuses(AssertionError, match="There is not enough devices\n available for training"):
        initialize_distributed_hpu(2, 1, 1)


def test_all_cards_are_counted_whatever_the_variable_says(no_ranks):
    before = torch.hpu.device_count()
    no_ranks.setenv("HABANA_VISIBLE_MODULES", "0,1")
    assert torch.hpu.device_count() == before


def test_cards_are_numbers(no_ranks):
    no_ranks.setenv("HABANA_VISIBLE_MODULES", "all")
    with card.refuses(ValueError, match="invalid literal for int"):
        torch.hpu.set_device(0)


def test_ranks_of_mpi(no_ranks):
    for name, value in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        no_ranks.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert initialize_distributed_hpu() == (2, 1, 1)
    assert os.environ["MASTER_ADDR"] == "localhost"


def test_ranks_of_the_launcher_come_before_those_of_mpi(no_ranks):
    for name, value in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        no_ranks.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}.items():
        no_ranks.setenv(name, value)
    assert initialize_distributed_hpu() == (4, 3, 3)


def test_a_process_that_nobody_has_numbered_is_alone_and_has_an_address(no_ranks):
    assert initialize_distributed_hpu() == (1, -1, -1)
    assert [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == ["localhost", "12345"]
    assert not {"ID", "HLS_MODULE_ID", "WORLD_SIZE"} & set(os.environ)


def test_an_address_that_is_given_stays(no_ranks):
    no_ranks.setenv("MASTER_ADDR", "node-1")
    no_ranks.setenv("MASTER_PORT", "29500")
    initialize_distributed_hpu()
    assert [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == ["node-1", "29500"]


def test_a_rank_that_is_alone_has_an_id_and_no_card_of_its_own(no_ranks):
    initialize_distributed_hpu(1, 0, 0)
    assert os.environ["ID"] == "0"
    assert not {"HLS_MODULE_ID", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)


def test_graphs_are_not_recorded_but_refuse_what_they_cannot_hold():
    try:
        from habana_frameworks.torch.hpu import ModuleCacher, wrap_in_hpu_graph
    except ImportError as error:
        pytest.skip(f"graphs are a matter of the lazy mode here: {error}")
    model = nn.Linear(2, 2)
    assert ModuleCacher(max_graphs=3)(model=model, inplace=True) is model
    assert wrap_in_hpu_graph(model) is model

    class Loose(nn.Module):
        def forward(self, *args):
            return args

    with card.refuses(AssertionError, match="Unsupported argument type : "):
        ModuleCacher()(Loose())


def test_forked_generators_are_the_devices():
    before = torch.hpu.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.hpu.manual_seed(1)
    assert torch.equal(torch.hpu.get_rng_state(), before)


def test_the_package_takes_it_for_a_gaudi():
    assert hpu_available()


CHILD = "import sys, torch; print(torch.ones(2, device='hpu').sum().item(), 'habana_frameworks' in sys.modules)"


@card.simulation
def test_children_find_it_at_their_first_import_of_torch():
    if is_lazy():
        pytest.skip("the lazy mode has to be imported by name")
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2.0", "True"], done.stderr


WITHOUT_BRIDGE = """
import sys, torch
assert "habana_frameworks.torch" not in sys.modules and not torch.accelerator.is_available()
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(1)
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
torch.optim.AdamW([weight], lr=0.5, weight_decay=0).step()
import habana_frameworks.torch
print(round(weight.sum().item(), 3), torch.ones(2, device="hpu").sum().item(), torch.accelerator.current_accelerator())
"""


@card.simulation
def test_there_is_no_device_until_the_bridge_is_imported():
    environment = {**os.environ, "PT_HPU_AUTOLOAD": "0"}  # which lazy mode does not need
    command = [sys.executable, "-c", WITHOUT_BRIDGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1.0", "2.0", "hpu"], done.stderr


@card.simulation
def test_it_is_not_importable_where_it_was_not_asked_for():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_MEGATRON_HPU_SIM")}
    command = [sys.executable, "-c", "import habana_frameworks.torch"]
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "the simulated HPU is off" in done.stderr


UNUSED = """
import torch, habana_frameworks.torch
before = [torch.hpu._initialized, torch.hpu.is_initialized()]
print(*before, torch.hpu.device_count() > 0, torch.hpu.is_available(), torch.hpu._initialized)
torch.hpu.get_device_name()
print(torch.hpu._initialized, torch.hpu.is_initialized())
"""


@card.simulation
def test_the_device_is_initialized_by_the_first_function_that_needs_it():
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False", "True", "True", "False", "True", "True"], done.stderr


@card.simulation
def test_facts_about_products_are_those_of_the_simulation(monkeypatch):
    from simulated_hpu.settings import PRODUCTS, Settings, settings

    told = {name: (fact.hbm_bytes, fact.largest_e4m3, fact.multiplies_two_formats) for name, fact in PRODUCTS.items()}
    ours = {name: (fact.memory, fact.largest_e4m3, fact.multiplies_two_formats) for name, fact in card.PRODUCTS.items()}
    assert told == ours
    assert {name: memory // 2**30 for name, (memory, *_) in ours.items()} == {"GAUDI2": 96, "GAUDI3": 128}
    assert torch.hpu.get_device_name() == settings().device_name
    assert torch.hpu.device_count() == settings().devices
    assert torch.hpu.mem_get_info()[1] == card.product().memory
    for name in card.PRODUCTS:
        monkeypatch.setattr(torch.hpu, "settings", lambda name=name: Settings("1.24", 8, name))
        assert torch.hpu.get_device_name() == name


@card.simulation
@pytest.mark.parametrize(("profile", "lazy"), [("1.19", True), ("1.21", True), ("1.22", False), ("1.24", False)])
def test_versions_before_22_are_lazy_by_default(monkeypatch, profile, lazy):
    from simulated_hpu.settings import Settings

    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    assert Settings(profile, 8, "GAUDI2").is_lazy == lazy
    for asked in (True, False):
        monkeypatch.setenv("PT_HPU_LAZY_MODE", str(int(asked)))
        assert Settings(profile, 8, "GAUDI2").is_lazy == asked


@card.simulation
@pytest.mark.parametrize(
    ("fault", "lazy", "error", "text"),
    [
        ("version", "0", AssertionError, "Compile-time major/minor PyTorch version 1.0.0 differs from run-time"),
        ("no-local-version", "0", AttributeError, "has no attribute 'startswith'"),
        ("stock", "1", AssertionError, "is not supported in Lazy mode"),
        ("library", "0", OSError, "libhabana_pytorch2_plugin.so"),
        ("library", "1", OSError, "libhabana_pytorch_plugin.so"),
    ],
)
def test_the_import_asserts_on_its_torch_and_its_library(monkeypatch, fault, lazy, error, text):
    from habana_frameworks.torch import requirements
    from simulated_hpu.settings import Settings

    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    monkeypatch.setattr(requirements, "settings", lambda: Settings("1.24", 8, "GAUDI2", frozenset({fault})))
    with pytest.raises(error, match=text):
        requirements.check()


@card.simulation
def test_the_file_of_the_required_version_is_read(monkeypatch, tmp_path):
    from habana_frameworks.torch import requirements

    requirements.check()
    monkeypatch.setattr(requirements, "REQUIRED_VERSION", tmp_path / "required_version.txt")
    requirements.REQUIRED_VERSION.write_text("1.13.0a0+git1\n")
    with pytest.raises(AssertionError, match=r"version 1\.13\.0a0\+git1 differs from run-time"):
        requirements.check()


@pytest.mark.parametrize(
    ("release", "known"),
    [
        ("1.18.0", "1.19"),
        ("1.19.0.561", "1.19"),
        ("1.20.1", "1.19"),
        ("1.23.0", "1.22"),
        ("1.24.1+g1", "1.24"),
        ("2.0", "1.24"),
    ],
)
def test_rules_are_those_of_the_nearest_older_version(release, known):
    assert card.nearest(release) == known

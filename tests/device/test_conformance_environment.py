"""Steps, ranks and cards, graphs, and how the simulation comes into a process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from habana_frameworks.torch import core
from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu
from habana_frameworks.torch.hpu import ModuleCacher, wrap_in_hpu_graph
from habana_frameworks.torch.utils.internal import is_lazy
from torch import nn

from lightning_megatron.device import hpu_available
from lightning_megatron.testing import hpu


def test_steps_are_counted_and_said_once_to_do_nothing():
    hpu.reset_calls()
    seen = []
    core.add_step_closure(seen.append, args=(1,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert core.mark_step() is None
        core.mark_step("", sync=True)
        core.iter_mark_step()
    assert hpu.calls()["mark_step"] == 3
    assert seen == [1]
    assert len(caught) <= (0 if is_lazy() else 1)


NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "HLS_MODULE_ID", "ID", "HABANA_VISIBLE_MODULES", "MASTER_ADDR")


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
    with pytest.raises(AssertionError, match="There is not enough devices\n available for training"):
        initialize_distributed_hpu(2, 1, 1)


def test_ranks_of_mpi(no_ranks):
    for name, value in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        no_ranks.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert initialize_distributed_hpu() == (2, 1, 1)
    assert os.environ["MASTER_ADDR"] == "localhost"


def test_graphs_are_not_recorded_but_refuse_what_they_cannot_hold():
    model = nn.Linear(2, 2)
    assert ModuleCacher(max_graphs=3)(model=model, inplace=True) is model
    assert wrap_in_hpu_graph(model) is model

    class Loose(nn.Module):
        def forward(self, *args):
            return args

    with pytest.raises(AssertionError, match="Unsupported argument type : "):
        ModuleCacher()(Loose())


def test_forked_generators_are_the_devices():
    before = torch.hpu.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.hpu.manual_seed(1)
    assert torch.equal(torch.hpu.get_rng_state(), before)


def test_the_package_takes_it_for_a_gaudi():
    assert hpu.enabled()
    assert hpu_available()


CHILD = "import sys, torch; print(torch.ones(2, device='hpu').sum().item(), 'habana_frameworks' in sys.modules)"


def test_children_find_it_at_their_first_import_of_torch():
    if is_lazy():
        pytest.skip("the lazy mode has to be imported by name")
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2.0", "True"], done.stderr


WITHOUT_BRIDGE = """
import sys, torch
assert "habana_frameworks.torch" not in sys.modules and torch.accelerator.current_accelerator() is None
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(1)
weight = torch.nn.Parameter(torch.ones(2))
weight.sum().backward()
torch.optim.AdamW([weight], lr=0.5, weight_decay=0).step()
import habana_frameworks.torch
print(round(weight.sum().item(), 3), torch.ones(2, device="hpu").sum().item(), torch.accelerator.current_accelerator())
"""


def test_there_is_no_device_until_the_bridge_is_imported():
    environment = {**os.environ, "PT_HPU_AUTOLOAD": "0"}  # which lazy mode does not need
    command = [sys.executable, "-c", WITHOUT_BRIDGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1.0", "2.0", "hpu"], done.stderr


def test_it_is_not_importable_where_it_was_not_asked_for():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTNING_MEGATRON_HPU_SIM")}
    command = [sys.executable, "-c", "import habana_frameworks.torch"]
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "the simulated HPU is off" in done.stderr

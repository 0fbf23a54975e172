"""Random streams and what is asked of a device, on a CPU and on doubles of torch's device modules."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import pytest
import torch

from lightning_megatron import device as devices
from lightning_megatron.lightning.validation.accelerators import accelerator_problems
from lightning_megatron.rng import RNGStreams

CPU = torch.device("cpu")


def inside(streams: RNGStreams) -> float:
    with streams.tensor_parallel():
        return torch.rand(()).item()


def test_a_stream_moves_the_default_generator_by_one_number_whatever_is_drawn_inside():
    streams = RNGStreams()
    streams.place(tp_rank=0)
    following = []
    for length in (1, 1000):
        torch.manual_seed(1)
        with streams.tensor_parallel():
            torch.rand(length)
        following.append(torch.get_rng_state())
    torch.manual_seed(1)
    assert not torch.equal(torch.get_rng_state(), following[0])
    assert torch.equal(*following)


def test_streams_differ_between_ranks_stages_and_seeds():
    drawn = set()
    for seed in (1, 2000):
        for tp_rank in range(4):
            for stage in range(3):
                torch.manual_seed(seed)
                streams = RNGStreams()
                streams.place(tp_rank=tp_rank)
                streams.begin_stage(stage)
                drawn |= {inside(streams), torch.rand(()).item()}
    assert len(drawn) == 24 + 6


def test_tokens_differ_over_cp_alone_in_one_stream_and_over_tp_too_in_the_other():
    drawn = {}
    for tp_rank in range(3):
        for cp_rank in range(3):
            streams = RNGStreams()
            streams.place(tp_rank=tp_rank, cp_rank=cp_rank)
            torch.manual_seed(1)
            both = inside(streams)
            with streams.context_parallel():
                drawn[tp_rank, cp_rank] = both, torch.rand(()).item()
    assert len({both for both, _ in drawn.values()}) == 9
    assert {drawn[tp_rank, 1][1] for tp_rank in range(3)} == {drawn[0, 1][1]}
    assert len({tokens for _, tokens in drawn.values()}) == 3


def test_a_stream_goes_on_and_is_restored_even_after_an_error():
    streams = RNGStreams()
    streams.place(tp_rank=1)
    first, second = inside(streams), inside(streams)
    assert first != second
    torch.manual_seed(1)
    inside(streams)
    default = torch.get_rng_state()
    torch.manual_seed(1)
    with suppress(KeyError), streams.tensor_parallel():
        torch.rand(())
        raise KeyError
    assert torch.equal(torch.get_rng_state(), default)


def test_both_streams_continue_where_their_state_was_taken():
    streams = RNGStreams()
    streams.place(tp_rank=0)
    inside(streams)
    state = streams.state_dict()
    expected = [inside(streams), torch.rand(()).item(), inside(streams)]
    other = RNGStreams()
    other.place(tp_rank=0)
    other.load_state_dict(state)
    assert [inside(other), torch.rand(()).item(), inside(other)] == expected


def test_without_a_place_there_is_one_stream():
    streams = RNGStreams()
    assert set(streams.state_dict()) == {"default"}
    torch.manual_seed(2)
    expected = torch.rand(2).tolist()
    torch.manual_seed(2)
    assert [inside(streams), torch.rand(()).item()] == expected


class FakeModule:
    """A device module with one generator, like Gaudi's: no generator objects."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(99)

    def get_rng_state(self, device: object) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def test_a_device_without_generator_objects_is_seeded_alone(monkeypatch):
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    host = torch.get_rng_state()
    devices.seed_generator(5, torch.device("hpu"))
    assert torch.equal(module.generator.get_state(), torch.Generator().manual_seed(5).get_state())
    assert torch.equal(torch.get_rng_state(), host)


def test_kinds_of_device_and_their_backends():
    backends = {name: devices.kind_of(name).backend for name in ("cpu", "cuda:1", "hpu")}
    assert backends == {"cpu": "gloo", "cuda:1": "nccl", "hpu": "hccl"}
    with pytest.raises(ValueError, match="device type 'mps' is not supported; supported: cpu, cuda, hpu"):
        devices.kind_of("mps")


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", 989e12),
        ("cuda", "NVIDIA H100 PCIe", 756e12),  # the longer name decides
        ("cuda", "NVIDIA GeForce 256", None),
        ("hpu", "GAUDI2", 432e12),
        ("hpu", "GAUDI3", 1835e12),
    ],
)
def test_peak_flops_go_by_the_longest_name_that_fits(monkeypatch, device, name, expected):
    module = type("Module", (), {"get_device_name": staticmethod(lambda device: name)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.peak_flops(torch.device(device)) == expected
    assert devices.peak_flops(CPU) is None


def test_lazy_mode_is_gaudis_and_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    assert not devices.is_lazy(torch.device("hpu"))
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    assert devices.is_lazy(torch.device("hpu"))
    assert not devices.is_lazy(CPU)
    devices.mark_step(CPU)
    devices.synchronize(CPU)


def test_only_nccl_gets_device_ids_for_a_barrier():
    gpu, gaudi = torch.device("cuda", 3), torch.device("hpu", 0)
    assert [devices.barrier_device_ids(d) for d in (gpu, gaudi, CPU)] == [[3], None, None]


def test_memory_of_a_cpu_process_is_what_it_held_at_most():
    assert devices.peak_memory_bytes(CPU) > 50 << 20


def test_compiled_recipes_are_kept_in_the_jobs_folder_unless_the_user_names_one(monkeypatch, tmp_path):
    gaudi, name = torch.device("hpu"), "PT_HPU_RECIPE_CACHE_CONFIG"
    monkeypatch.setenv(name, "x")  # so that the variable is put back as it was
    monkeypatch.delenv(name)
    assert devices.keep_recipes(CPU, str(tmp_path)) is None
    assert devices.keep_recipes(gaudi, "s3://bucket/run") is None
    assert name not in os.environ
    folder = devices.keep_recipes(gaudi, str(tmp_path))
    assert folder == str(tmp_path / "recipes" / socket.gethostname())
    assert os.environ[name] == f"{folder},false,8192"
    assert devices.keep_recipes(gaudi, str(tmp_path / "other")) is None
    assert os.environ[name] == f"{folder},false,8192"


def test_weight_sharing_is_refused_in_lazy_mode(monkeypatch: pytest.MonkeyPatch):
    gaudi, refused = torch.device("hpu", 0), {}
    for mode in ("0", "1"):
        for shares in ("0", "1"):
            monkeypatch.setenv("PT_HPU_LAZY_MODE", mode)
            monkeypatch.setenv("PT_HPU_WEIGHT_SHARING", shares)
            refused[mode, shares] = [problem.argument for problem in accelerator_problems(gaudi)]
    assert refused == {("0", "0"): [], ("0", "1"): [], ("1", "0"): [], ("1", "1"): ["PT_HPU_WEIGHT_SHARING"]}

"""torch's own operations on the device, bit for bit the CPU's on the simulation, and the functions of ``torch.hpu``."""

from __future__ import annotations

import copy
import io
import pickle

import card
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # an engine's thread of the device sums in as many parts as the host's
    yield
    torch.set_num_threads(before)


def views(device):
    x = torch.randn(4, 6).to(device)
    y = x[1:3, ::2]
    y.add_(1)
    x.view(24)[3] = 9
    x.transpose(0, 1).mul_(2)
    torch.split(x, 2, 1)[0].zero_()
    return [x, y, x.t().reshape(3, 8), x.view(torch.int32), x.unfold(1, 2, 1)]


def in_place(device):
    x = torch.arange(12.0, device=device).view(3, 4)
    x.index_add_(0, torch.tensor([0, 2], device=device), torch.ones(2, 4, device=device))
    x[x > 9] = 0
    x.scatter_(1, torch.zeros(3, 1, dtype=torch.long, device=device), 7.0)
    host_index = torch.tensor([0, 1])  # torch takes indices from the host
    return [x, x[host_index], torch.where(x > 1, x, torch.tensor(0.0)), x.nonzero(), x.unique(), x.sort()[0]]


def random(device):
    x = torch.randn(100, device=device)
    odds = torch.full((5,), 0.5, device=device)
    return [
        x, F.dropout(x, 0.3), torch.native_dropout(x, 0.5, True)[0], odds.bernoulli(),
        torch.ones(10, device=device).multinomial(5), torch.randperm(10, device=device),
        torch.randint(9, (5,), device=device),
    ]  # fmt: skip


def attention(device):
    q, k, v = (torch.randn(2, 3, 8, 16).to(device).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.square().sum().backward()
    return [out, q.grad, k.grad, v.grad]


def cross_entropy(device):
    embedding, linear = nn.Embedding(50, 16).to(device), nn.Linear(16, 50).to(device)
    tokens = torch.randint(50, (4, 7)).to(device)
    loss = F.cross_entropy(linear(embedding(tokens)).flatten(0, 1), tokens.flatten(), label_smoothing=0.1)
    loss.backward()
    return [loss, embedding.weight.grad, linear.weight.grad]


def recomputed(device):
    layers = nn.Sequential(nn.Linear(8, 8, device=device), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(8, device=device))
    found = []
    for use_reentrant in (False, True):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        out = checkpoint(layers, x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        found += [out, x.grad]
    return found


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def custom_function(device):
    x = torch.randn(4).to(device).requires_grad_()
    y = Cube.apply(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return [y, grad]


def adamw(device):
    found = []
    for foreach in (False, True):
        layer = nn.Linear(8, 8).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-2, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(2, 8).to(device)).square().sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            optimizer.step()
        found += [layer.weight, layer.bias]
    return found


def bf16(device):
    a = torch.randn(32, 48).to(device, torch.bfloat16)
    b = torch.randn(48, 16).to(device).bfloat16()
    return [a @ b, torch.bmm(a[None], b[None]), F.linear(a, b.t(), b[0]), F.layer_norm(a, (48,)), F.rms_norm(a, (48,))]


def autocast(device):
    layer = nn.Linear(8, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        out = layer(torch.randn(2, 8).to(device))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    return [out, layer.weight.grad]


def complex_numbers(device):
    return [torch.view_as_real(torch.polar(torch.ones(3, device=device), torch.arange(3.0, device=device)) * 1j)]


PROGRAMS = [
    views, in_place, cross_entropy, custom_function, adamw, bf16, autocast, complex_numbers,
    pytest.param(random, marks=card.simulation),  # whose generator gives the host's numbers
    pytest.param(recomputed, marks=card.simulation),
]  # fmt: skip


def on_both(program):
    found = []
    for device in ("cpu", "hpu"):
        torch.manual_seed(0)  # the device too
        found.append([tensor.detach().cpu() for tensor in program(device)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_results_are_the_hosts(program):
    for right, ours in on_both(program):
        card.same(ours, right)


def test_attention_is_the_hosts():
    for right, ours in on_both(attention):  # by another kernel, in torch 2.6
        card.close(ours, right, 1e-5 if card.SIMULATED else card.product().tolerance[torch.float32])


def test_what_is_computed_stays_on_the_device():
    x = torch.tensor([1.0, 2.0], device="hpu")
    assert {t.device.type for t in (x + 1, x @ x, x.sort()[0], torch.cat([x, x]))} == {"hpu"}
    assert x.device == torch.device("hpu", 0)
    with card.refuses(TypeError, match="can't convert hpu:0 device type tensor to numpy"):
        x.numpy()


@pytest.mark.parametrize("mix", [torch.add, torch.matmul, torch.dot, lambda a, b: torch.cat([a, b])])
def test_devices_do_not_mix(mix):
    with card.refuses(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        mix(torch.ones(2, device="hpu"), torch.ones(2))


def test_a_number_on_the_host_mixes_as_everywhere_in_torch():
    assert (torch.ones(2, device="hpu") * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_a_process_has_one_device():
    with card.refuses(RuntimeError, match="a process has one HPU, of index 0"):
        torch.ones(2, device="hpu:1")


@pytest.mark.parametrize("place", [None, "cpu", "hpu", "hpu:0"])
def test_files_come_back_to_where_they_shall(place):
    state = nn.Linear(3, 3, device="hpu").state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    back = torch.load(file, weights_only=True, map_location=place)
    assert back["weight"].device.type == torch.device(place or "hpu").type
    assert torch.equal(back["weight"].cpu(), state["weight"].cpu())


def test_copies():
    parameter = nn.Parameter(torch.randn(3, device="hpu"))
    for other in (pickle.loads(pickle.dumps(parameter)), copy.deepcopy(parameter)):
        assert isinstance(other, nn.Parameter)
        assert other.device.type == "hpu"
        assert torch.equal(other, parameter)
        assert other.data_ptr() != parameter.data_ptr()
    moved = torch.ones(3).to("hpu", non_blocking=True)
    assert moved.to("cpu", non_blocking=True).tolist() == [1.0, 1.0, 1.0]
    assert nn.Linear(2, 2, device="meta").to_empty(device="hpu").weight.device.type == "hpu"


def test_outputs_and_storages_are_resized():
    out = torch.empty(0, device="hpu")
    torch.mm(torch.ones(3, 2, device="hpu"), torch.ones(2, 3, device="hpu"), out=out)
    assert out.tolist() == [[2.0] * 3] * 3
    storage = out.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0


KEYS = [
    "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize", "TotalSystemAllocs",
    "TotalSystemFrees", "TotalActiveAllocs",
]  # fmt: skip


def test_memory_is_counted_under_the_bridges_keys():
    found = torch.hpu.memory_stats()
    card.note("memory", found)
    assert list(found) == KEYS
    assert 0 < found["Limit"] <= card.product().memory
    assert not hasattr(torch.hpu, "empty_cache")


@card.simulation
def test_memory_of_tensors_is_counted_to_the_byte():
    assert torch.hpu.memory_stats()["Limit"] == card.product().memory
    before = torch.hpu.memory_allocated()
    torch.hpu.reset_peak_memory_stats()
    x = torch.empty(1024, device="hpu")
    assert torch.hpu.memory_allocated() - before == 4096
    y = x @ torch.ones(1024, 8, device="hpu")
    del x, y
    assert torch.hpu.memory_allocated() == before
    assert torch.hpu.max_memory_allocated() - before == 4096 + 4 * 8 * 1024 + 4 * 8
    free, limit = torch.hpu.mem_get_info()
    assert limit - free == before
    assert torch.hpu.memory_reserved() == torch.hpu.memory_stats()["Limit"] == limit


def test_the_generator_is_its_own():
    torch.manual_seed(3)
    assert torch.equal(torch.hpu.get_rng_state(), torch.get_rng_state())
    torch.rand(1)
    assert not torch.equal(torch.hpu.get_rng_state(), torch.get_rng_state())
    state = torch.hpu.get_rng_state()
    first = torch.rand(3, device="hpu")
    torch.hpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="hpu"), first)
    assert len(torch.hpu.get_rng_state_all()) == 1
    with card.refuses(RuntimeError, match="hpu get_rng_state supports only device 0"):
        torch.hpu.get_rng_state(1)


def test_functions_of_the_device():
    assert torch.hpu.is_available()
    assert 1 <= torch.hpu.device_count() <= 8
    assert torch.hpu.current_device() == 0
    assert torch.hpu.get_device_name() in card.PRODUCTS
    assert torch.hpu.is_bf16_supported()
    torch.hpu.synchronize()
    with card.refuses(TypeError):
        torch.hpu.synchronize("hpu:0")


def test_streams_keep_the_order_of_calls_honest():
    event = torch.hpu.Event(enable_timing=True)
    stream = torch.hpu.Stream()
    with torch.hpu.stream(stream):
        assert torch.hpu.current_stream() is stream
        stream.record_event(event)
    stream.wait_event(event)
    end = torch.hpu.Event(enable_timing=True)
    end.record()
    assert event.elapsed_time(end) >= 0


@card.simulation
def test_an_event_that_was_not_recorded_is_not_waited_for():
    with pytest.raises(RuntimeError, match="before it was recorded"):
        torch.hpu.Stream().wait_event(torch.hpu.Event())


def test_autocast_is_switched_under_the_bridges_names():
    assert not torch.hpu.is_autocast_hpu_enabled()
    with torch.autocast("hpu", torch.bfloat16):
        assert torch.hpu.is_autocast_hpu_enabled()
        a = torch.randn(4, 4, device="hpu")
        assert [(a @ a).dtype, (a @ a).softmax(-1).dtype] == [torch.bfloat16, torch.float32]


def test_it_is_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("hpu")
    assert torch.get_device_module("hpu") is torch.hpu

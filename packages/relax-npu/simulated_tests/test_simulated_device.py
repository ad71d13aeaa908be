"""The simulated NPU behaves as a device: memory of its own, one device per operator, no CUDA."""

import copy
import io
from importlib import import_module

import pytest
import torch
from relax_npu.simulation import MixedDevicesError, StrayCudaError, executed
from torch import nn

TRANSFER = "torch_npu.contrib.transfer_to_npu"


def test_a_model_trains_as_on_the_cpu(npu: torch.device) -> None:
    torch.manual_seed(1)
    layers = (nn.Embedding(10, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 10))
    host = nn.Sequential(*layers)
    device = copy.deepcopy(host).to(npu)
    ids = torch.tensor([1, 5, 2, 7])
    losses = []
    for model, tokens in ((host, ids), (device, ids.to(npu))):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    # Round-off only: on the CPU torch has a linear of its own, elsewhere it is an addmm.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for a, b in zip(host.parameters(), device.parameters(), strict=True):
        assert b.device == npu
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, h: x @ h.mT,
        lambda x, h: torch.cat((x, h)),
        lambda x, h: torch.where(h > 0, x, x),
        lambda x, h: x.index_select(0, torch.tensor([0])),
        lambda x, h: torch.ops.npu.npu_rms_norm(x, h[0]),
        lambda x, h: x.add_(h),
    ],
    ids=["matmul", "cat", "where", "index", "npu operator", "in place"],
)
def test_tensors_of_two_devices_do_not_meet(mix, npu: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"same device|npu:0"):
        mix(torch.ones(3, 4, device=npu), torch.ones(3, 4))


def test_the_mix_is_told_by_our_kernel_where_torch_has_no_check(npu: torch.device) -> None:
    with pytest.raises(MixedDevicesError, match=r"shape \(1,\).*\.to\(device\)"):
        torch.ones(3, device=npu).index_select(0, torch.tensor([0]))


def test_a_number_in_a_tensor_may_come_from_the_host(npu: torch.device) -> None:
    assert (torch.ones(2, device=npu) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_views_and_swapped_data_share_memory(npu: torch.device) -> None:
    buffer = torch.arange(8.0, device=npu)
    parameter = nn.Parameter(torch.zeros(2, 2, device=npu))
    parameter.data = buffer[4:].view(2, 2)
    buffer.mul_(2)
    assert parameter.tolist() == [[8.0, 10.0], [12.0, 14.0]]
    buffer[::2] = -1.0
    assert parameter.tolist() == [[-1.0, 10.0], [-1.0, 14.0]]


def test_saved_tensors_come_back_on_the_host(npu: torch.device) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device=npu)}, file)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_the_host_may_go_on_meanwhile(npu: torch.device, waits: bool) -> None:
    """As torch's checkpoint writer asks for it; the real device has pinned memory for that."""
    x = torch.arange(6.0, device=npu).view(2, 3)
    copied = x.to("cpu", torch.float64, non_blocking=not waits)
    x.zero_()
    assert copied.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert (copied.dtype, copied.device.type) == (torch.float64, "cpu")
    assert x.half().device == npu


def test_reading_a_value_is_counted_as_waiting(npu: torch.device) -> None:
    x = torch.ones(2, device=npu)
    before = executed["npu.synchronize"]
    assert x.sum().item() == 2.0
    assert executed["npu.synchronize"] == before + 1


def test_random_numbers_are_the_devices_own(npu: torch.device) -> None:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.rand(4, device=npu)
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device=npu), first)
    state = torch.npu.get_rng_state()
    second = torch.rand(4, device=npu)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=npu), second)


def test_a_stray_cuda_call_is_refused(npu: torch.device) -> None:
    import_module(TRANSFER)

    with pytest.raises(StrayCudaError, match=r"test_simulated_device calls Tensor\.cuda\(\)"):
        torch.ones(2).cuda()
    with pytest.raises(StrayCudaError, match=r"Module\.cuda\(\)"):
        nn.Linear(2, 2).cuda()
    assert not torch.cuda.is_available()


def test_megatrons_cuda_calls_mean_the_npu(npu: torch.device) -> None:
    import_module(TRANSFER)

    told = {"__name__": "megatron.core.made_up", "torch": torch}
    exec(
        "index = torch.cuda.current_device()\n"
        "made = torch.zeros(2, device='cuda')\n"
        "moved = torch.ones(2).cuda()\n"
        "seen = moved.is_cuda, torch.cuda.is_available()\n",
        told,
    )
    assert told["index"] == 0
    assert told["made"].device == told["moved"].device == npu
    assert told["seen"] == (True, True)
    assert not told["made"].is_cuda, "only megatron is told so"

"""Payloads of weights for each tensor-parallel rank: made on the sender, compared with the rank's die.

The fake is SGLang 0.5.15's module and torch_npu's function as far as a payload goes: the device stands at the
seventh of fifteen places, and SGLang puts the rank's own device there.
"""

import base64
import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from relax_npu.sglang import PLUGINS
from relax_npu.sglang.ipc import PayloadError, payload, per_rank
from relax_npu.upstream.fix import FixMismatchError, _applied

(PLUGIN,) = (plugin for plugin in PLUGINS if plugin.name == "sglang-ipc-payloads")
REDUCTIONS = "torch_npu.multiprocessing.reductions"
PLACES = 15


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """torch_npu's part: what a tensor is sent as, and what is opened from it."""
    reductions = types.ModuleType(REDUCTIONS)
    opened: list[int] = []

    def rebuild_npu_tensor(*arguments):
        assert len(arguments) == PLACES
        opened.append(arguments[6])
        return f"memory of device {arguments[6]}"

    rebuild_npu_tensor.__module__ = REDUCTIONS
    rebuild_npu_tensor.__qualname__ = rebuild_npu_tensor.__name__
    reductions.rebuild_npu_tensor = rebuild_npu_tensor
    reductions.opened = opened
    monkeypatch.setitem(sys.modules, REDUCTIONS, reductions)
    monkeypatch.setitem(
        sys.modules, "torch_npu.multiprocessing", types.ModuleType("torch_npu.multiprocessing")
    )
    reducers = ForkingPickler._extra_reducers
    monkeypatch.setitem(
        reducers,
        torch.Tensor,
        lambda x: (reductions.rebuild_npu_tensor, (0, 1, 2, 3, 4, 5, x.device.index, *range(7, PLACES))),
    )
    return reductions


@pytest.fixture
def sglang(torch_npu, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A rank of a server, with SGLang's own handling of payloads."""
    _applied.clear()
    module = types.ModuleType(PLUGIN.module)
    module.SGLANG_TP_RANK = None
    module._REDUCE_TENSOR_ARG_DEVICE_INDEX = 6

    def register_sgl_tp_rank(rank):
        module.SGLANG_TP_RANK = rank

    def npu_verl_to_sglang(device):
        assert module.SGLANG_TP_RANK is not None
        return module.SGLANG_TP_RANK

    def rebuild(*arguments):
        own = module.npu_verl_to_sglang(arguments[6])
        return torch_npu.original(*arguments[:6], own, *arguments[7:])

    rebuild.__module__, rebuild.__qualname__ = REDUCTIONS, "rebuild_npu_tensor"
    module.register_sgl_tp_rank, module.npu_verl_to_sglang = register_sgl_tp_rank, npu_verl_to_sglang
    module.rebuild = rebuild
    for depth in range(1, 4):
        parent = ".".join(PLUGIN.module.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, PLUGIN.module, module)
    yield module
    _applied.clear()


def receive(sglang, torch_npu, text: str, rank: int):
    """As a scheduler of SGLang opens a payload."""
    sglang.register_sgl_tp_rank(rank)
    if not hasattr(torch_npu, "original"):
        torch_npu.original, torch_npu.rebuild_npu_tensor = torch_npu.rebuild_npu_tensor, sglang.rebuild
    return pickle.load(io.BytesIO(base64.b64decode(text)))


def sent(index: int, visible: list[int]) -> str:
    return payload([("a.weight", torch.ones(2, device=f"npu:{index}"))], visible)


def test_a_payload_of_another_die_is_refused(sglang, torch_npu, monkeypatch) -> None:
    """Trainer and server both see NPUs 2 and 5; the payload of 5 comes to the rank on 2."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,5")
    text = sent(0, [5])
    assert receive(sglang, torch_npu, text, rank=0) == [("a.weight", "memory of device 0")], (
        "upstream's fault"
    )
    PLUGIN.install(version="0.5.15")
    with pytest.raises(PayloadError, match="rank on NPU 2 was given the payload of NPU 5"):
        receive(sglang, torch_npu, text, rank=0)
    assert receive(sglang, torch_npu, text, rank=1) == [("a.weight", "memory of device 1")]


def test_sender_and_server_may_number_dies_in_their_own_ways(sglang, torch_npu, monkeypatch) -> None:
    """The die is the sender's first and the server's second."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,7")
    PLUGIN.install(version="0.5.15")
    receive(sglang, torch_npu, sent(0, [7]), rank=1)
    assert torch_npu.opened == [1]
    with pytest.raises(PayloadError, match="does not see"):
        receive(sglang, torch_npu, sent(0, [4]), rank=1)


def test_a_payload_before_the_ranks_device_is_known_is_refused(sglang, torch_npu, monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    PLUGIN.install(version="0.5.15")
    with pytest.raises(PayloadError, match="before the rank's device was known"):
        receive(sglang, torch_npu, sent(0, [0]), rank=None)


def test_tensors_of_the_host_are_sent_as_torch_sends_them() -> None:
    text = payload([("a", "no tensor")], [0])
    assert pickle.loads(base64.b64decode(text)) == [("a", "no tensor")]


def test_another_torch_npu_is_refused(torch_npu, monkeypatch) -> None:
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, lambda x: (print, (1, 2)))
    with pytest.raises(FixMismatchError, match="2 values instead of 15"):
        sent(0, [0])


def test_payloads_are_put_in_the_order_of_the_ranks() -> None:
    assert per_rank({5: "five", 2: "two", 3: "three"}, [2, 5]) == ["two", "five"]


@pytest.mark.parametrize("dies", [[2, 4], [2, 2]])
def test_a_rank_without_a_payload_of_its_own_is_refused(dies: list[int]) -> None:
    with pytest.raises(PayloadError, match="the server's ranks are on NPUs"):
        per_rank({2: "two", 3: "three"}, dies)

"""Work that a device records. A host records none: what it launched is noted here and launched again."""

import pytest
import torch
from relax_rollout import tensor_digest
from relax_rollout.weights import recorded
from relax_rollout.weights.bucket import views
from relax_rollout.weights.ipc import IpcReceiver
from relax_rollout.weights.packing import Packing
from relax_rollout.weights.receiver import Receiver
from relax_rollout.weights.recorded import Recorded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    """Notes every kernel and the memory that it writes, as a graph of CUDA does."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        self.noted.append((function, arguments, keywords or {}, result))
        return result

    def replay(self):
        for function, arguments, keywords, result in self.noted:
            again = function(*arguments, **keywords)
            if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)


@pytest.fixture
def graphs(monkeypatch):
    """The records made so far. One that cannot be made raises as CUDA does."""
    made = []

    def record(work):
        with Launches() as launches:
            result = work()
        made.append(launches)
        return launches.replay, result

    monkeypatch.setitem(recorded.RECORDERS, "cpu", record)
    return made


def test_work_is_done_then_recorded_then_done_by_its_record(graphs):
    calls, x = [], torch.zeros(3)

    def work():
        calls.append(1)
        return (x + 1).mul_(2)

    doing = Recorded(CPU, work)
    for value in (0.0, 5.0, 7.0, 9.0):
        x.fill_(value)
        assert doing().tolist() == [2 * value + 2] * 3
    assert (len(calls), len(graphs)) == (2, 1)


def test_what_cannot_be_recorded_is_done_piece_by_piece_and_says_so(monkeypatch, caplog):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(recorded.RECORDERS, "cpu", refuse)
    count = iter(range(9))
    doing = Recorded(CPU, lambda: next(count))
    assert [doing() for _ in range(4)] == [0, 1, 2, 3]
    assert caplog.text.count("not permitted when stream is capturing") == 1


def tensors_of(buckets, receiver):
    found = {}
    for bucket in buckets:
        buffer = receiver.open(bucket.handle, CPU)
        found |= dict(zip((e.name for e in bucket.entries), views(bucket.entries, buffer), strict=True))
    return found


@pytest.mark.parametrize("records", [False, True])
def test_weights_are_converted_and_packed_anew_in_the_same_memory(graphs, records):
    qkv, norm = torch.randn(12, 4), torch.randn(5)
    asked = []

    def export():
        asked.append(1)
        yield {"q": torch.cat([qkv[:2], qkv[6:8]]), "k": torch.cat([qkv[2:6], qkv[8:]])}
        yield {"norm": norm}

    packing, receiver, handles = Packing(CPU, recorded=records), IpcReceiver(), set()
    for version in range(4):
        qkv += version
        norm -= version
        buckets = packing(export, {"norm": "bfloat16"})
        wanted = {name: tensor for part in export() for name, tensor in part.items()}
        wanted["norm"] = norm.bfloat16()
        found = tensors_of(buckets, receiver)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert {e.name: e.digest for b in buckets for e in b.entries} == {
            name: tensor_digest(tensor) for name, tensor in wanted.items()
        }
        handles |= {bucket.handle for bucket in buckets}
    assert len(handles) == 2
    assert len(graphs) == int(records)
    # Once a version for what is wanted, and for the packing as long as it is not recorded.
    assert len(asked) == 4 + (2 if records else 4)
    packing.close()


def test_a_record_that_fails_midway_loses_no_weight_and_no_memory(monkeypatch):
    def refuse(work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(recorded.RECORDERS, "cpu", refuse)
    packing, receiver, handles = Packing(CPU, recorded=True), IpcReceiver(), set()
    for version in range(3):
        sent = {"a": torch.full((4,), float(version)), "b": torch.full((9,), float(version))}
        buckets = packing(lambda sent=sent: ({n: t} for n, t in sent.items()), {})
        found = tensors_of(buckets, receiver)
        assert found.keys() == sent.keys()
        assert all(torch.equal(found[name], sent[name]) for name in sent)
        handles |= {bucket.handle for bucket in buckets}
    assert len(handles) == 2
    packing.close()


def test_weights_that_engines_want_in_another_dtype_are_recorded_anew(graphs):
    """An engine without its draft has no dtype for that; one that was started anew has a draft again."""
    weight = torch.arange(3.0)
    packing, receiver, packed = Packing(CPU, recorded=True), IpcReceiver(), []
    for dtypes in [{}] * 3 + [{"w": "bfloat16"}] * 3:
        weight.add_(1)
        buckets = packing(lambda: [{"w": weight}], dtypes)
        found = tensors_of(buckets, receiver)["w"]
        assert torch.equal(found.float(), weight)
        packed.append((found.dtype, len(graphs)))
    assert packed == [(torch.float32, n) for n in (0, 1, 1)] + [(torch.bfloat16, n) for n in (1, 2, 2)]
    packing.close()


def test_what_is_computed_when_weights_are_asked_for_is_recorded(graphs):
    """Merged adapters are: a record that began behind it would read memory that is long free."""
    weight = torch.zeros(3)
    packing, receiver = Packing(CPU, recorded=True), IpcReceiver()

    def export():
        merged = weight + 1
        return iter([{"w": merged}])

    for version in range(4):
        weight.fill_(version)
        (bucket,) = packing(export, {})
        assert tensors_of([bucket], receiver)["w"].tolist() == [version + 1.0] * 3
    packing.close()


class Model(nn.Module):
    """q and k in one matrix in another dtype; the head a copy."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
        self.embed = nn.Parameter(torch.zeros(5, 3))
        self.head = nn.Parameter(torch.zeros(5, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "embed":
                self.embed.data.copy_(tensor)
                self.head.data.copy_(tensor)
            else:
                self.qk.data.narrow(0, 4 if name == "k" else 0, len(tensor)).copy_(tensor)


SHAPES = {name: (shape, torch.float32) for name, shape in {"q": (4, 4), "k": (2, 4), "embed": (5, 3)}.items()}


def test_loading_is_recorded_until_the_model_or_the_memory_moves(graphs):
    model = Model()
    receiver, opened = Receiver({"target": model}, SHAPES, CPU), IpcReceiver()
    sent = {name: torch.randn(shape) for name, (shape, _) in SHAPES.items()}
    packing, records = Packing(CPU), []
    for version in range(8):
        for tensor in sent.values():
            tensor.add_(1)
        if version == 4:
            model.head.data = torch.zeros(5, 3)
        if version == 6:
            packing = Packing(CPU)
        receiver.begin(str(version), version)
        buckets = packing(lambda: [sent], {})
        for place, bucket in enumerate(buckets):
            receiver.receive(str(version), place, bucket, opened.source(bucket.handle))
        digests = receiver.commit(str(version), len(buckets))["digests"]
        assert digests == {n: tensor_digest(t.bfloat16() if n in "qk" else t) for n, t in sent.items()}
        assert torch.equal(model.head, sent["embed"])
        assert torch.equal(model.qk, torch.cat([sent["q"], sent["k"]]).bfloat16())
        records.append(len(graphs))
    assert records == [0, 1, 1, 1, 1, 2, 2, 3]


def test_a_module_that_took_the_place_of_another_is_loaded(graphs):
    model = nn.Module()
    model.inner = Model()
    model.load_weights = model.inner.load_weights
    receiver, opened, packing = Receiver({"target": model}, SHAPES, CPU), IpcReceiver(), Packing(CPU)
    sent = {name: torch.randn(shape) for name, (shape, _) in SHAPES.items()}
    for version in range(5):
        if version == 3:
            model.inner = Model()
        receiver.begin(str(version), version)
        (bucket,) = packing(lambda: [sent], {})
        receiver.receive(str(version), 0, bucket, opened.source(bucket.handle))
        receiver.commit(str(version), 1)
        assert torch.equal(model.inner.embed, sent["embed"])

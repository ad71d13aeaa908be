"""A rank's share in place of the whole: loaded where the whole would go, or refused."""

import pytest
import torch
from relax_rollout import tensor_digest
from relax_rollout.weights.bucket import Bucket, Entry, Share, pack, plan
from relax_rollout.weights.receiver import Receiver, ShareRefusedError
from relax_rollout.weights.regions import View, copy_all
from torch import nn

WHOLE = {"q": (8, 6), "k": (4, 6), "out": (6, 8), "conv": (8, 1, 3), "norm": (6,), "experts": (2, 8, 3)}


class Rank(nn.Module):
    """One of two tensor-parallel ranks: q over k fused by rows, out by columns, conv by channels."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.qk = nn.Parameter(torch.zeros(6, 6))
        self.out = nn.Parameter(torch.zeros(6, 4))
        self.conv = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.Parameter(torch.zeros(6))
        self.experts = nn.Parameter(torch.zeros(2, 4, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            at = self.rank
            if name == "q":
                self.qk.data[:4].copy_(tensor[4 * at : 4 * at + 4])
            elif name == "k":
                self.qk.data[4:].copy_(tensor.narrow(0, 2 * at, 2))
            elif name == "out":
                self.out.data.copy_(tensor[:, 4 * at : 4 * at + 4])
            elif name == "conv":
                self.conv.data.copy_(tensor.squeeze(1)[4 * at : 4 * at + 4])
            elif name == "experts":
                self.experts.data.copy_(tensor[:, 4 * at : 4 * at + 4])
            else:
                self.norm.data.copy_(tensor)


CUTS = {"q": 0, "k": 0, "out": 1, "conv": 0, "experts": 1}


def shares(tensors, rank, ranks=2):
    """What a trainer's rank holds of each, and where it lies in the whole."""
    held, told = {}, {}
    for name, tensor in tensors.items():
        axis = CUTS.get(name)
        if axis is None:
            held[name] = tensor
            continue
        size = tensor.shape[axis] // ranks
        held[name] = tensor.narrow(axis, rank * size, size).contiguous()
        told[name] = Share(axis, ((rank * size, size),), tuple(tensor.shape))
    return held, told


class Memory:
    stays = True

    def __init__(self, buffer):
        self.buffer = buffer

    def fetch(self, nbytes, device):
        return self.buffer


def send(receiver, held, told, version):
    entries, nbytes = plan(held, {n: tensor_digest(t) for n, t in held.items()})
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    pack(held, entries, buffer)
    listed = tuple(
        Entry.from_json(Entry(e.name, e.dtype, e.shape, e.offset, e.digest, told.get(e.name)).to_json())
        for e in entries
    )
    receiver.begin(str(version), version)
    receiver.receive(str(version), 0, Bucket(listed, nbytes, handle="here"), Memory(buffer))
    return receiver.commit(str(version), 1)


def weights(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in WHOLE.items()}


def make(rank):
    shapes = {name: (shape, torch.float32) for name, shape in WHOLE.items()}
    model = Rank(rank)
    return model, Receiver({"target": model}, shapes, torch.device("cpu"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_goes_where_the_whole_would_have_gone(rank):
    (model, receiver), (expected, whole) = make(rank), make(rank)
    for version in (1, 2):
        sent = weights(version)
        held, told = shares(sent, rank)
        result = send(receiver, held, told, version)
        send(whole, sent, {}, version)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other)
        assert result["digests"] == {name: tensor_digest(tensor) for name, tensor in held.items()}
    # Whole tensors after shares are whole again.
    assert send(receiver, sent, {}, 3)["digests"] == {n: tensor_digest(t) for n, t in sent.items()}


def test_the_share_of_another_rank_is_refused_and_nothing_changes():
    model, receiver = make(0)
    held, told = shares(weights(0), 1)
    with pytest.raises(ShareRefusedError, match=r"not enough: q, k, out, conv, experts; .* places 0 to 4"):
        send(receiver, held, told, 1)
    assert all(not parameter.any() for parameter in model.parameters())


def test_a_flipped_bit_of_a_share_in_the_model_is_named(monkeypatch):
    model, receiver = make(1)
    held, told = shares(weights(0), 1)

    def spoil(pairs):
        copy_all(pairs)
        model.qk.data.view(torch.int32)[5, 0] ^= 1

    monkeypatch.setattr("relax_rollout.weights.loading.copy_all", spoil)
    digests = send(receiver, held, told, 1)["digests"]
    assert [name for name, tensor in held.items() if digests[name] != tensor_digest(tensor)] == ["k"]


def test_what_is_read_across_the_cut_is_refused():
    share = Share(0, ((0, 4),), (8, 6))
    assert View(6, (2, 6), (6, 1)).of_share(share, (8, 6)) == View(6, (2, 6), (6, 1))
    with pytest.raises(LookupError, match="another order"):
        View(0, (12,), (1,)).of_share(share, (8, 6))
    with pytest.raises(LookupError, match="places 3 to 5"):
        View(18, (2, 6), (6, 1)).of_share(share, (8, 6))
    # Ranges that touch are one: a head and its gate, for instance.
    assert Share(0, ((0, 2), (2, 2), (6, 1)), (8, 6)).ranges == ((0, 4), (6, 1))
    # Two ranges that lie one behind the other in the share.
    parts = Share(0, ((0, 2), (6, 2)), (8, 6))
    assert View(36, (2, 6), (6, 1)).of_share(parts, (8, 6)) == View(12, (2, 6), (6, 1))

"""Receiving weights into a model that fuses, splits, shares and caches what it loads."""

import pytest
import torch
from relax_rollout import tensor_digest
from relax_rollout.weights.bucket import Bucket, Entry, pack, plan
from relax_rollout.weights.files import BucketFiles, FileSource
from relax_rollout.weights.receiver import Receiver, UpdateRefusedError
from relax_rollout.weights.regions import copy_all
from torch import nn

SHAPES = {
    "q": ((4, 6), torch.float32),
    "k": ((2, 6), torch.float32),
    "norm": ((6,), torch.float32),
    "embed": ((8, 6), torch.float32),
    "conv": ((3, 1, 4), torch.float32),
    "mtp.fc": ((6, 6), torch.float32),
}


class Target(nn.Module):
    """q and k in one matrix, the head a copy of the embedding, the convolution kept transposed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(6))
        self.embed = nn.Parameter(torch.zeros(8, 6))
        self.head = nn.Parameter(torch.zeros(8, 6))
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(torch.zeros(3, 1, 4))
        self.conv.cache_t = torch.zeros(4, 3)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "q":
                self.qk.data[:4].copy_(tensor)
            elif name == "k":
                self.qk.data.narrow(0, 4, 2).copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "embed":
                self.embed.data.copy_(tensor)
                self.head.data.copy_(tensor)
            elif name == "conv":
                self.conv.weight.data.copy_(tensor)


class Draft(nn.Module):
    def __init__(self, embed: nn.Parameter) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6, bias=False)
        self.embed = embed

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "mtp.fc":
                self.fc.weight.data.copy_(tensor)
            elif name == "embed":
                self.embed.data.copy_(tensor)


def conv_rule(module):
    return module.weight[:, 0].t()


@pytest.fixture
def target():
    return Target()


def make_receiver(target, **options):
    models = {"target": target, "draft": Draft(target.embed)}
    return Receiver(models, SHAPES, torch.device("cpu"), {"cache_t": conv_rule}, **options)


@pytest.fixture
def receiver(target):
    return make_receiver(target)


@pytest.fixture
def files(tmp_path):
    found = BucketFiles(tmp_path)
    yield found
    found.close()


def tensors(seed=0):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def send(receiver, files, sent, update="u", bucket=0, spoil=None):
    entries, nbytes = plan(sent, {name: tensor_digest(t) for name, t in sent.items()})
    path, buffer = files.create(nbytes)
    pack(sent, entries, buffer)
    if spoil is not None:
        buffer[spoil] ^= 1
    told = Bucket(tuple(entries), nbytes, file=path)
    return entries, receiver.receive(update, bucket, told, FileSource(path))


def test_what_the_loader_does_is_found_without_changing_the_model(receiver, target):
    assert all(bool((p == 0).all()) for p in target.parameters())
    manifest = receiver.manifest()
    assert manifest["q"] == ["bfloat16", [4, 6], ["target"]]
    assert manifest["embed"][2] == ["target", "draft"]
    assert manifest["mtp.fc"][2] == ["draft"]


@pytest.mark.parametrize("replay", [False, True])
def test_after_a_commit_every_digest_is_that_of_what_was_sent(files, target, replay):
    receiver, sent = make_receiver(target, replay=replay), tensors()
    receiver.begin("u", 7)
    names = list(sent)
    for n in range(3):
        _, arrived = send(receiver, files, {name: sent[name] for name in names[n::3]}, bucket=n)
        assert arrived == {name: tensor_digest(sent[name]) for name in names[n::3]}
    assert bool((target.norm == 0).all())
    result = receiver.commit("u", 3)
    assert (result["version"], result["stale"], receiver.version) == (7, [], 7)
    served = {name: t.bfloat16() if name in "qk" else t for name, t in sent.items()}
    assert result["digests"] == {name: tensor_digest(t) for name, t in served.items()}
    assert torch.equal(target.conv.cache_t, sent["conv"][:, 0].t())
    assert torch.equal(target.head, sent["embed"])
    assert receiver.commit("u", 3) is result


def test_copies_are_replayed_without_the_loader(files, target):
    receiver = make_receiver(target, replay=True)
    for module in (target, receiver._models[1].module):
        module.load_weights = None
    for version in (1, 2):
        sent = tensors(seed=version)
        receiver.begin(str(version), version)
        send(receiver, files, sent, update=str(version))
        digests = receiver.commit(str(version), 1)["digests"]
        assert digests["mtp.fc"] == tensor_digest(sent["mtp.fc"])
        assert digests["q"] == tensor_digest(sent["q"].bfloat16())


class Memory:
    """A bucket that stays in the same memory from update to update, as device memory of another process."""

    stays = True

    def __init__(self, nbytes):
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)

    def fetch(self, nbytes, device):
        return self.buffer


def test_new_values_in_the_same_memory_are_loaded_anew(target):
    receiver = make_receiver(target, replay=True)
    entries, nbytes = plan(tensors(), {})
    memory = Memory(nbytes)
    for version in (1, 2, 3):
        sent = tensors(seed=version)
        pack(sent, entries, memory.buffer)
        if version == 3:
            target.norm.data = torch.zeros(6)  # the model keeps it elsewhere from here on
        receiver.begin(str(version), version)
        receiver.receive(str(version), 0, Bucket(tuple(entries), nbytes, handle="memory"), memory)
        digests = receiver.commit(str(version), 1)["digests"]
        assert digests == {n: tensor_digest(t.bfloat16() if n in "qk" else t) for n, t in sent.items()}
        assert torch.equal(target.norm, sent["norm"])


def test_what_was_sent_by_file_is_let_go_of(receiver, files):
    receiver.begin("u", 1)
    send(receiver, files, tensors())
    receiver.commit("u", 1)
    assert not receiver._known
    assert receiver._loading is None


def test_a_lost_acknowledgement_changes_nothing(receiver, files):
    sent = tensors()
    receiver.begin("u", 1)
    send(receiver, files, sent)
    receiver.begin("u", 1)
    send(receiver, files, sent)
    assert receiver.commit("u", 1)["digests"]["norm"] == tensor_digest(sent["norm"])


def test_a_missing_bucket_and_another_update_are_refused(receiver, files):
    with pytest.raises(UpdateRefusedError, match="open is: none"):
        receiver.commit("u", 1)
    receiver.begin("u", 1)
    send(receiver, files, tensors())
    with pytest.raises(UpdateRefusedError, match="lacks bucket 1 of 2"):
        receiver.commit("u", 2)
    with pytest.raises(UpdateRefusedError, match="update v is not open here; open is: u"):
        send(receiver, files, tensors(), update="v")


def test_a_flipped_byte_on_the_way_shows_in_the_digests(receiver, files):
    receiver.begin("u", 1)
    entries, arrived = send(receiver, files, tensors(), spoil=5)
    assert [e.name for e in entries if arrived[e.name] != e.digest] == ["q"]


@pytest.fixture(params=[False, True], ids=["loaders", "copies"])
def loaded(request, monkeypatch):
    """Makes a receiver of this way to load, in which something happens after the last model has been loaded.

    The tensors of `left_out`, and their places in that model, are left out.
    """

    def make(models, then=lambda: None, left_out=()):
        receiver = Receiver(models, SHAPES, torch.device("cpu"), {"cache_t": conv_rule}, replay=request.param)
        places = {tensor.data_ptr() for tensor in dict(left_out).values()}
        last = receiver._models[-1].module
        loads = last.load_weights

        def load(weights):
            loads([(name, tensor) for name, tensor in weights if name not in left_out])
            then()

        def copy(pairs):
            copy_all([pair for pair in pairs if pair[0].data_ptr() not in places])
            if request.param:
                then()

        last.load_weights = load
        monkeypatch.setattr("relax_rollout.weights.loading.copy_all", copy)
        return receiver

    return make


@pytest.mark.parametrize("name", ["q", "k", "norm", "embed", "mtp.fc"])
def test_a_value_that_is_not_what_was_sent_shows_in_its_digest(loaded, files, target, name):
    draft = Draft(target.embed)
    spoilt = {
        "q": lambda: target.qk.data[3].view(torch.int16),
        "k": lambda: target.qk.data[4].view(torch.int16),
        "norm": lambda: target.norm.data.view(torch.int32),
        "embed": lambda: target.head.data.view(torch.int32)[7],
        "mtp.fc": lambda: draft.fc.weight.data.view(torch.int32)[2],
    }
    sent = tensors()

    def spoil():
        spoilt[name]()[0] ^= 1

    receiver = loaded({"target": target, "draft": draft}, spoil)
    receiver.begin("u", 1)
    send(receiver, files, sent)
    digests = receiver.commit("u", 1)["digests"]
    held = {n: tensor_digest(t.bfloat16() if n in "qk" else t) for n, t in sent.items()}
    assert [n for n in sent if digests[n] != held[n]] == [name]


def test_a_frozen_cache_with_a_rule_is_named(receiver, files, target):
    receiver._models[0].derived.rebuild = lambda: None
    receiver.begin("u", 1)
    send(receiver, files, tensors())
    assert receiver.commit("u", 1)["stale"] == ["target: conv.cache_t"]


def test_an_unknown_frozen_cache_is_named_too(files, target):
    receiver = Receiver({"target": target}, SHAPES, torch.device("cpu"))
    receiver.begin("u", 1)
    send(receiver, files, tensors())
    assert receiver.commit("u", 1)["stale"] == ["target: conv.cache_t"]


def test_a_frozen_draft_is_named(loaded, files, target):
    draft = Draft(target.embed)
    receiver = loaded({"target": target, "draft": draft}, left_out={"mtp.fc": draft.fc.weight})
    receiver.begin("u", 1)
    sent = tensors()
    send(receiver, files, sent)
    digests = receiver.commit("u", 1)["digests"]
    assert [n for n in ("mtp.fc", "norm") if digests[n] != tensor_digest(sent[n])] == ["mtp.fc"]


def test_a_draft_with_an_old_copy_of_a_shared_tensor_is_named(loaded, files, target):
    draft = Draft(nn.Parameter(torch.zeros(8, 6)))
    receiver = loaded({"target": target, "draft": draft}, left_out={"embed": draft.embed})
    receiver.begin("u", 1)
    sent = tensors()
    send(receiver, files, sent)
    digests = receiver.commit("u", 1)["digests"]
    assert digests["mtp.fc"] == tensor_digest(sent["mtp.fc"])
    assert digests["embed"] == tensor_digest(torch.zeros(8, 6))


def test_a_loader_that_computes_new_tensors_is_refused():
    class Doubling(Target):
        def load_weights(self, weights):
            super().load_weights([(name, tensor * 2) for name, tensor in weights])

    with pytest.raises(RuntimeError, match="not part of the checkpoint's"):
        Receiver({"target": Doubling()}, SHAPES, torch.device("cpu"))


class OneHead(nn.Module):
    """Of a rank with one of two heads: numbers that are one element here are filled in, as SGLang does."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.table = nn.Parameter(torch.ones(4, 2))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "table":
                self.table.data[:3].copy_(tensor)
                self.table[3:].data.fill_(0)
            else:
                part = tensor[1:] if name == "A_log" else tensor
                getattr(self, name).data.fill_(part.item())


@pytest.mark.parametrize("replay", [False, True])
def test_a_tensor_of_one_element_that_is_filled_in_is_found_and_loaded(files, replay):
    model = OneHead()
    shapes = {
        "A_log": ((2,), torch.float32),
        "scale": ((1,), torch.float32),
        "table": ((3, 2), torch.float32),
    }
    receiver = Receiver({"target": model}, shapes, torch.device("cpu"), replay=replay)
    assert {name: served[0] for name, served in receiver.manifest().items()} == {
        "A_log": "float32", "scale": "bfloat16", "table": "float32"
    }  # fmt: skip
    assert (model.A_log.item(), model.scale.item()) == (0, 0)
    sent = {"A_log": torch.tensor([3.0, 5.0]), "scale": torch.tensor([7.0]), "table": torch.ones(3, 2)}
    receiver.begin("u", 1)
    send(receiver, files, sent)
    digests = receiver.commit("u", 1)["digests"]
    assert digests == {n: tensor_digest(t.bfloat16() if n == "scale" else t) for n, t in sent.items()}
    assert (model.A_log.item(), model.scale.item()) == (5, 7)


def test_a_place_and_a_larger_one_that_begins_with_it_are_both_written():
    held, sent = torch.zeros(4), torch.arange(4.0)
    copy_all([(held[:2], sent[:2]), (held, sent)])
    assert torch.equal(held, sent)


def test_a_bucket_file_that_is_short_is_refused(tmp_path):
    path = tmp_path / "bucket"
    path.write_bytes(b"x" * 10)
    with pytest.raises(ValueError, match="has 10 bytes; 64 were announced"):
        FileSource(str(path)).fetch(64, torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot be read"):
        FileSource(str(tmp_path / "none")).fetch(64, torch.device("cpu"))


def test_entries_survive_a_message():
    entry = Entry("a", "bfloat16", (2, 3), 64, "ff")
    told = Entry.from_json(entry.to_json())
    assert (told, told.digest) == (entry, "ff")
    assert entry.nbytes == 12

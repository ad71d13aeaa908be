"""Buckets in device memory. Without a device, a table of addresses stands for what the driver shares."""

import json
import subprocess
import sys

import pytest
import torch
from relax_rollout.weights import ipc
from relax_rollout.weights.bucket import views
from relax_rollout.weights.ipc import IpcReceiver, IpcSender


@pytest.fixture
def driver(monkeypatch):
    """Buffers by handle, and the handles opened so far."""
    shared, opened = {}, []

    def handle_of(buffer):
        shared[f"memory-{len(shared)}"] = buffer
        return f"memory-{len(shared) - 1}"

    def open_handle(handle, device):
        opened.append(handle)
        return shared[handle]

    monkeypatch.setattr(ipc, "handle_of", handle_of)
    monkeypatch.setattr(ipc, "open_handle", open_handle)
    return opened


def fetch(receiver, buckets):
    found = {}
    for bucket in buckets:
        buffer = receiver.source(bucket.handle).fetch(0, torch.device("cpu"))
        found |= dict(
            zip((entry.name for entry in bucket.entries), views(bucket.entries, buffer), strict=True)
        )
    return found


def test_views_of_lent_memory_are_opened_in_place_and_the_rest_is_packed(driver):
    flat = torch.arange(24.0)
    sent = {"a": flat[6:18].view(3, 4), "t": flat[6:18].view(3, 4).T, "b": flat[:2], "own": torch.ones(5)}
    buckets = IpcSender([flat[:1]]).buckets(sent, {"b": "digest"})
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [["a", "b"], ["t", "own"]]
    assert [entry.digest for entry in buckets[0].entries] == [None, "digest"]
    found = fetch(IpcReceiver(), buckets)
    assert {name: bool(torch.equal(found[name], sent[name])) for name in sent} == dict.fromkeys(sent, True)
    flat += 1
    assert torch.equal(found["a"], sent["a"])
    assert not torch.equal(found["t"], sent["t"])


def test_buffers_are_written_anew_only_after_the_update_and_opened_once(driver):
    sender, receiver = IpcSender(), IpcReceiver()
    first = sender.buckets({"x": torch.ones(4)}, {}), sender.buckets({"y": torch.zeros(4)}, {})
    assert first[0][0].handle != first[1][0].handle
    sender.release()
    again = sender.buckets({"x": torch.full((4,), 7.0)}, {})
    assert again == first[0]
    assert fetch(receiver, first[0] + again)["x"].tolist() == [7.0] * 4
    assert driver == [first[0][0].handle]
    assert sender.buckets({"z": torch.ones(400)}, {})[0].handle not in (
        first[0][0].handle,
        first[1][0].handle,
    )


def test_memory_of_this_process_alone_has_no_handle():
    with pytest.raises(ValueError, match="one process's own"):
        ipc.handle_of(torch.ones(3))


OPEN = """
import sys, torch
from relax_rollout.weights.ipc import open_handle
tensor = open_handle(sys.argv[1], torch.device("cpu"))
print(int(tensor[:3].sum()))
tensor[0] = 90
"""


def test_memory_of_the_host_opens_in_another_process_and_goes_with_its_sender():
    sender = IpcSender()
    (bucket,) = sender.buckets({"x": torch.tensor([5, 6, 7], dtype=torch.uint8)}, {})
    handle = bucket.handle
    command = [sys.executable, "-c", OPEN, handle]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "18\n"
    here = IpcReceiver().open(handle, torch.device("cpu"))
    assert views(bucket.entries, here)[0].tolist() == [90, 6, 7]
    sender.close()
    assert here[0] == 90
    with pytest.raises(ValueError, match="cannot be opened"):
        IpcReceiver().open(handle, torch.device("cpu"))


def test_memory_that_took_the_place_of_other_memory_is_opened_anew():
    """It has the same number of the process and of the file."""
    receiver, found = IpcReceiver(), []
    for value in (1.0, 2.0):
        sender = IpcSender()
        buckets = sender.buckets({"x": torch.full((4,), value)}, {})
        found.append(fetch(receiver, buckets)["x"].tolist())
        sender.close()
    assert found == [[1.0] * 4, [2.0] * 4]


def test_later_memory_is_not_opened_by_the_handle_of_earlier_one():
    sender = IpcSender()
    (bucket,) = sender.buckets({"x": torch.zeros(4)}, {})
    earlier = json.loads(bucket.handle)
    earlier["file"] -= 1
    with pytest.raises(OSError, match="not the sender's memory any more"):
        ipc.open_handle(json.dumps(earlier), torch.device("cpu"))
    sender.close()


def test_a_file_that_took_the_place_of_the_memory_is_not_opened(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(other)
    handle = json.dumps({"rebuild": "host memory", "path": str(tmp_path / "link"), "size": 6, "file": 1})
    with pytest.raises(OSError, match="not the sender's memory any more"):
        ipc.open_handle(handle, torch.device("cpu"))
    with pytest.raises(ValueError, match="no memory of cuda"):
        ipc.open_handle(handle, torch.device("cuda", 0))


def test_a_handle_names_the_function_that_opens_it():
    with pytest.raises(ValueError, match=r"'os\.system' opens no device memory"):
        ipc.open_handle('{"rebuild": "os.system"}', torch.device("cuda", 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_handle_opens_in_another_process():
    sent = torch.arange(100, device="cuda")
    handle = ipc.handle_of(sent.view(torch.uint8))
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_total, args=(there, handle))
    child.start()
    assert here.recv() == 4950
    child.join()


def _total(pipe, handle):
    opened = ipc.open_handle(handle, torch.device("cuda", 0)).view(torch.int64)
    pipe.send(int(opened.sum()))

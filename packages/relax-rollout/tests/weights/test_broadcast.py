"""Buckets by a collective, one behind the other, between two processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from relax_rollout.weights.broadcast import BroadcastGroup, BroadcastSender, BroadcastSource, Meeting
from relax_rollout.weights.bucket import bucket_bytes, plan, views

CPU = torch.device("cpu")


def bucket(n):
    """Sizes go up and down, so that buffers are used again and outgrown."""
    generator = torch.Generator().manual_seed(n)
    count = (300, 10, 400, 200, 500)[n % 5]
    return {"a": torch.randn(count, generator=generator), "b": torch.randn(3, 2, generator=generator)}


def receive(pipe, port):
    torch.set_num_threads(1)
    group = BroadcastGroup(("127.0.0.1", port), 1, 2, "gloo", 300.0, "test")
    group.join()
    right = []
    for n in range(10):
        entries, nbytes = plan(bucket(n), {})
        found = views(entries, BroadcastSource(group).fetch(nbytes, CPU))
        right.append(all(torch.equal(x, y) for x, y in zip(found, bucket(n).values(), strict=True)))
    pipe.send(right)


def test_buckets_arrive_in_order_though_their_tensors_change_at_once():
    group = BroadcastGroup(("127.0.0.1", 0), 0, 2, "gloo", 300.0, "test")
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=receive, args=(there, group.port), daemon=True)
    child.start()
    group.join()
    sender = BroadcastSender(group, CPU)
    for n in range(10):
        tensors = bucket(n)
        entries, nbytes = plan(tensors, {})
        assert nbytes == bucket_bytes(entries)
        sender.send(tensors, entries)
        for tensor in tensors.values():
            tensor.zero_()
    sender.finish()
    assert here.recv() == [True] * 10
    child.join(10)


def test_whoever_waits_is_told_that_another_will_not_come():
    group = BroadcastGroup(("127.0.0.1", 0), 0, 3, "gloo", 300.0, "test")
    meeting = Meeting("127.0.0.1", group.port, 3, "gloo", 300.0, "test")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(group.join), pool.submit(meeting.join, 1)]
        meeting.give_up()
        for one in waiting:
            with pytest.raises(RuntimeError, match="one of the processes has ended"):
                one.result(100)


def test_waiting_for_a_group_has_an_end():
    with pytest.raises(RuntimeError, match=r"not all 2 processes came within 0:00:00\.1"):
        BroadcastGroup(("127.0.0.1", 0), 0, 2, "gloo", 0.1, "test").join()

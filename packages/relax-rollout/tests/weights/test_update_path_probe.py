"""Whether memory and files are shared is tried."""

import json

import pytest
import torch
from relax_rollout.weights.probe import FileProbe, MemoryProbe, sees

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "file"])
def probe(request, tmp_path):
    found = MemoryProbe(CPU) if request.param == "memory" else FileProbe(tmp_path)
    yield found
    found.close()


def test_what_is_offered_is_seen(probe):
    assert sees(probe.handle, CPU)


def test_other_bytes_are_not_what_was_offered(probe):
    kind, where, word = json.loads(probe.handle)
    assert not sees(json.dumps([kind, where, word[::-1]]), CPU)


def test_what_was_taken_back_is_not_seen(probe):
    probe.close()
    assert not sees(probe.handle, CPU)


def test_memory_of_a_host_is_not_seen_on_a_device():
    probe = MemoryProbe(CPU)
    assert not sees(probe.handle, torch.device("cuda", 0))
    probe.close()

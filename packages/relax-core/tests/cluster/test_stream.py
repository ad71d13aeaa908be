"""Samples through TransferQueue, where that is installed."""

from importlib.util import find_spec

import pytest
from relax_core.cluster.config import ClusterConfig
from relax_core.cluster.errors import ClusterError
from relax_core.cluster.stream import open_stream

INSTALLED = find_spec("transfer_queue") is not None


@pytest.mark.skipif(INSTALLED, reason="transferqueue is installed")
def test_without_the_package_it_says_what_to_install():
    with pytest.raises(ClusterError, match=r"pip install 'relax-core\[transfer_queue\]', or set"):
        open_stream(ClusterConfig(mode="ray", stream="transfer_queue"))


@pytest.mark.skipif(not INSTALLED, reason="transferqueue is not installed")
def test_samples_through_transfer_queue_train_to_the_same_bits(small_run, finish, same_results, killing):
    two = {"run": {"steps": 2}}
    expected = finish(small_run(**two), "inline")
    killed = killing({2: ("rank", 0)})
    found = finish(small_run(**two, cluster={"mode": "ray", "stream": "transfer_queue"}), "queue")
    same_results(found, expected)
    assert len(killed) == 1

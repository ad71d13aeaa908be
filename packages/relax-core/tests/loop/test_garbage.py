import gc

import pytest
from relax_core.loop import run
from relax_core.loop.garbage import collection_paused, resume_collection
from relax_core.loop.rl import RlLoop
from relax_core.run import RunDirectory


class Node:
    """Refers to itself, so that only the collector can free it."""

    freed = 0

    def __init__(self):
        self.own = self

    def __del__(self):
        Node.freed += 1


@pytest.fixture(autouse=True)
def nothing_freed():
    gc.collect()
    Node.freed = 0


def make_garbage(nodes):
    for _ in range(nodes):
        Node()


def test_nothing_is_collected_until_the_pause_ends():
    with collection_paused():
        make_garbage(20_000)
        assert Node.freed == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert Node.freed == 20_000


def test_after_resuming_only_objects_made_later_are_collected():
    with collection_paused():
        make_garbage(10)
        resume_collection()
        make_garbage(5)
        gc.collect()
        assert Node.freed == 5


def test_a_failed_start_leaves_collection_on():
    with pytest.raises(ValueError, match="no such directory"), collection_paused():
        raise ValueError("no such directory")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with collection_paused():
            resume_collection()
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_steps_run_with_collection_on(small_run, tmp_path, monkeypatch):
    seen = []

    def noting(loop, *args, after):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return after(loop, *args)

    for name in ("begin", "step"):
        after = getattr(RlLoop, name)
        monkeypatch.setattr(RlLoop, name, lambda loop, *a, after=after: noting(loop, *a, after=after))
    config = small_run(run={"steps": 2})
    with RunDirectory.create(tmp_path / "run", config) as directory, collection_paused():
        run(config, directory, resume=False)
    assert seen == [(False, False), (True, True), (True, True)]

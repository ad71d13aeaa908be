"""Batches made ahead: the stream's own order, its state after what was taken, and nothing left running."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from relax_core.data import ExampleStream
from relax_core.loop.batches import BatchesAhead

_PATIENCE = 120


@dataclass(frozen=True)
class _Example:
    id: str
    ids: np.ndarray
    prompt_text: str = ""


def _stream():
    return ExampleStream([_Example(str(n), np.asarray([n], np.int32)) for n in range(7)], seed=3)


def _names(examples):
    return [example.id for example in examples]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_and_states_are_those_of_the_stream_itself(ahead):
    plain, batches = _stream(), BatchesAhead(_stream(), _names, 3, ahead=ahead)
    for _ in range(6):
        assert batches.state_dict() == plain.state_dict()
        assert batches.take() == _names(plain.take(3))
    # Begun again from the state in between, the next batch is the next batch.
    again = BatchesAhead(_stream(), _names, 3, ahead=ahead)
    again.load_state_dict(batches.state_dict())
    assert again.take() == batches.take() == _names(plain.take(3))
    batches.close()
    again.close()


def test_the_next_batch_is_made_while_the_first_is_used():
    made = threading.Semaphore(0)

    def make(examples):
        made.release()
        return _names(examples)

    batches = BatchesAhead(_stream(), make, 2, ahead=1)
    batches.take()
    assert made.acquire(timeout=_PATIENCE)
    assert made.acquire(timeout=_PATIENCE), "the second one, which nobody has asked for yet"
    batches.close()
    assert not made.acquire(blocking=False), "and no more than one ahead"


def test_an_error_comes_with_its_own_batch_and_no_thread_is_left():
    def make(examples):
        if "5" in _names(examples):
            raise OSError("picture 5 is gone")
        return _names(examples)

    plain, batches = _stream(), BatchesAhead(_stream(), make, 1, ahead=3)
    while (wanted := _names(plain.take(1))) != ["5"]:
        assert batches.take() == wanted
    with pytest.raises(OSError, match="picture 5 is gone"):
        batches.take()
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]

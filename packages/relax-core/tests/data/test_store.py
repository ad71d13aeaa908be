"""Examples in a file: what comes back, and how much of them memory holds."""

import errno
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from relax_core.data import DataConfig, DataError, Sample, load_samples, store
from relax_core.data import load as loading
from relax_core.data.length import LengthRule
from relax_core.data.picture_maker import PictureMaker
from relax_core.data.pictures import KeptPicture, SamplePicture
from relax_core.data.store import ExampleFile

TOKENS = 50_000


def sample(number, tokens=TOKENS, **more):
    ids = np.full(tokens, number, dtype=np.int32)
    return Sample(f"rows:{number}", ids, np.arange(tokens) > 0, f"prompt {number}", **more)


class Big:
    """Samples of 250 kB each."""

    length = LengthRule(None, "refuse")

    def draft(self, row):
        return [row.fields["n"]]

    def finish(self, drafts):
        yield from map(sample, drafts)


@pytest.fixture
def peak():
    """The most memory that a call needs, in MB."""

    def measure(call):
        tracemalloc.start()
        try:
            result = call()
            return result, tracemalloc.get_traced_memory()[1] / 1e6
        finally:
            tracemalloc.stop()

    return measure


@pytest.mark.parametrize("documents", [False, True])
def test_a_data_set_takes_less_memory_than_its_tokens(write_rows, tokenizer, monkeypatch, peak, documents):
    """400 samples of 250 kB; chunks of 4 rows, an example in the making and a block of them are in memory."""
    monkeypatch.setattr(loading, "_CHUNK_ROWS", 4)
    monkeypatch.setattr(store, "_HELD", 2**20)
    monkeypatch.setattr(loading, "SampleBuilder", lambda *_: Big())
    monkeypatch.setattr(loading, "TextBuilder", lambda *_: Big())
    path = write_rows(*({"n": n, "text": "x"} for n in range(400)))
    more = {"text_key": "n", "block_tokens": TOKENS} if documents else {}

    def use():
        data = load_samples(DataConfig(path=path, eval_fraction=0.1, **more), tokenizer, seed=0)
        stream = data.stream()
        return {int(stream.take(1)[0].ids[-1]) for _ in range(len(data.train))} | {
            int(one.ids[-1]) for one in data.held_out
        }

    seen, megabytes = peak(use)
    assert seen == set(range(400))
    assert megabytes < 10


@pytest.mark.parametrize("held", [0, 700, 10**6], ids=["in a file", "in both", "in memory"])
def test_views_of_a_file_are_sequences(monkeypatch, held):
    monkeypatch.setattr(store, "_HELD", held)
    file = ExampleFile()
    first = file.keep(sample(n, 3) for n in range(5))
    second = file.keep(sample(n, 2) for n in range(5, 7))
    numbers = lambda examples: [int(one.ids[0]) for one in examples]  # noqa: E731
    assert numbers(first.followed_by([second])) == list(range(7))
    assert numbers(first.chosen([True, False, True, False, True])) == [0, 2, 4]
    assert numbers(first[1:3]) == numbers(first[1:][:2]) == [1, 2]
    assert (len(first), len(second), len(second[5:])) == (5, 2, 0)
    assert not second[5:]
    assert first[-1].id == "rows:4"
    assert (bool(file._held), file._file is not None) == (held > 0, held < 10**6)
    again = first[2]
    again.ids[:] = 9
    assert numbers(first[2:3]) == [2], "what is read belongs to the reader"
    with pytest.raises(IndexError):
        first[5]


def test_the_maker_of_all_pictures_is_written_once(tmp_path):
    class Processor:
        merge_size = 2

        def to_dict(self):
            return {"weight": "x" * 5000}

    maker = PictureMaker(Processor(), DataConfig(path="x"))
    kept = KeptPicture("key", tmp_path / "a.npz", (1, 2, 2), 2, "a.png", maker)
    file = ExampleFile()
    examples = file.keep([sample(1, 2, pictures=(SamplePicture(kept, 0),))] * 2)
    back = [one.pictures[0].kept for one in examples]
    assert [(one.key, one.source, one.grid) for one in back] == [("key", "a.png", (1, 2, 2))] * 2
    assert back[0].maker is back[1].maker is maker


def test_a_full_disk_is_named_with_its_cure():
    file = ExampleFile()
    file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115
    with pytest.raises(DataError, match=r"No space left on device. Set the environment's TMPDIR") as caught:
        file.keep([sample(1)])
    assert caught.value.__cause__.errno == errno.ENOSPC

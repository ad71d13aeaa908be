"""Continued pre-training: every token of every document is a target exactly once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_core.data import DataConfig, DataError, Sample, load_samples, load_tokenizer
from relax_core.data.text import blocks_of_each, blocks_of_joined

END = 99


def _document(number, tokens):
    ids = np.asarray([END, *tokens, END], dtype=np.int32)
    return Sample(f"rows:{number}", ids, np.arange(len(ids)) > 0, "")


def _load(path, tokenizer, **changes):
    return load_samples(DataConfig(path=path, text_key="text", **changes), tokenizer, seed=0)


DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=6)


@given(texts=DOCUMENTS, tokens=st.integers(2, 12))
def test_joined_blocks_are_the_text_with_every_token_a_target_once(texts, tokens):
    blocks = list(blocks_of_joined((_document(n, text) for n, text in enumerate(texts)), tokens))
    whole = [END] + [token for text in texts for token in (*text, END)]
    targets = [token for block in blocks for token in block.ids[block.loss_mask].tolist()]
    assert targets == whole[1:]
    assert all(len(block.ids) == tokens for block in blocks[:-1])
    assert 2 <= len(blocks[-1].ids) <= tokens
    # What predicts a block's first target is the token in front of it in the text.
    at = 0
    for block in blocks:
        assert block.ids[0] == whole[at]
        at += len(block.ids) - 1
    assert len({block.id for block in blocks}) == len(blocks)


@given(texts=DOCUMENTS, tokens=st.integers(2, 12))
def test_blocks_apart_hold_one_document_each_and_the_same_targets(texts, tokens):
    blocks = list(blocks_of_each([_document(n, text) for n, text in enumerate(texts)], tokens))
    for number, text in enumerate(texts):
        own = [block for block in blocks if block.id.startswith(f"rows:{number}+")]
        assert [t for block in own for t in block.ids[block.loss_mask].tolist()] == [*text, END]
        assert own[0].ids[0] == END


def test_three_documents_by_hand():
    documents = [_document(1, [1, 2]), _document(2, [3]), _document(3, [4, 5, 6])]
    # 99 1 2 99 3 99 4 5 6 99
    joined = list(blocks_of_joined(documents, 5))
    assert [block.ids.tolist() for block in joined] == [[END, 1, 2, END, 3], [3, END, 4, 5, 6], [6, END]]
    assert [block.id for block in joined] == ["rows:1+0", "rows:2+1", "rows:3+3"]
    assert all(block.loss_mask.tolist() == [False] + [True] * (len(block.ids) - 1) for block in joined)
    apart = list(blocks_of_each(documents, 4))
    assert [block.ids.tolist() for block in apart] == [
        [END, 1, 2, END],
        [END, 3, END],
        [END, 4, 5, 6],
        [6, END],
    ]


def test_rows_of_text_become_blocks_in_their_order(tokenizer, write_rows):
    path = write_rows({"text": "1 plus 2"}, {"text": "3"}, {"text": "4 + 5"})
    data = _load(path, tokenizer, block_tokens=6)
    text = "".join(tokenizer.decode(block.ids[block.loss_mask]) for block in data.train)
    assert text == "1 plus 2<|im_end|>3<|im_end|>4 + 5<|im_end|>"
    assert data.train[0].ids[0] == tokenizer.eos_token_id
    named = _load(path, tokenizer, end_of_text="<|im_start|>", documents="apart")
    assert [tokenizer.decode(block.ids) for block in named.train] == [
        f"<|im_start|>{text}<|im_start|>" for text in ("1 plus 2", "3", "4 + 5")
    ]


def test_documents_are_held_out_whole_and_mixed_by_weight(tokenizer, write_rows):
    one = write_rows(*({"text": f"{n} plus {n}"} for n in range(10, 20)), name="one.jsonl")
    other = write_rows(*({"text": str(n)} for n in range(30, 40)), name="other.jsonl")
    data = _load(one, tokenizer, mixture={other: 3.0}, eval_fraction=0.2, block_tokens=4, documents="apart")
    documents = lambda blocks: {block.id.split("+")[0] for block in blocks}  # noqa: E731
    assert len(documents(data.held_out)) == 4
    assert not documents(data.train) & documents(data.held_out)
    drawn = data.stream().take(80)
    assert sum(block.id.startswith(other) for block in drawn) == 60


def test_a_stream_of_blocks_resumes_and_sees_another_cut(tokenizer, write_rows):
    path = write_rows(*({"text": f"{n} plus {n}"} for n in range(10, 30)))
    stream = _load(path, tokenizer, block_tokens=8).stream()
    stream.take(7)
    state = stream.state_dict()
    wanted = [block.ids.tolist() for block in stream.take(20)]
    again = _load(path, tokenizer, block_tokens=8).stream()
    again.load_state_dict(state)
    assert [block.ids.tolist() for block in again.take(20)] == wanted
    with pytest.raises(DataError, match=r"the saved data cursor has size|data have changed"):
        _load(path, tokenizer, block_tokens=9).stream().load_state_dict(state)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"prompt": "1"}, {}, "text is missing: a document is text"),
        ({"text": ""}, {}, "text is empty"),
        ({"text": [1]}, {}, "text is a list"),
        ({"text": "\ud800"}, {}, "half a surrogate pair"),
        ({"text": "1"}, {"end_of_text": "1 + 1"}, r"'1 \+ 1' is \d tokens: give the text of one special"),
    ],
)
def test_what_is_no_document_is_refused(tokenizer, write_rows, row, settings, words):
    with pytest.raises(DataError, match=words):
        _load(write_rows(row), tokenizer, **settings)


def test_a_tokenizer_without_an_end_of_text_token_must_be_told_one(tokenizer_folder, write_rows):
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"name one in data\.end_of_text"):
        _load(write_rows({"text": "1"}), tokenizer)

import json
import logging

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from relax_core.data import DataConfig, DataError, ExampleStream, load_prompts, load_samples, load_tokenizer

ROWS = [{"prompt": f"{n} + {n}", "answer": str(2 * n)} for n in range(10, 30)]


def _load(tokenizer, path, seed=0, **changes):
    return load_prompts(DataConfig(path=path, **changes), tokenizer, seed=seed)


def test_jsonl_and_parquet_give_the_same_prompts(tokenizer, write_rows, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    one, other = (_load(tokenizer, path).train for path in (write_rows(*ROWS), f"{tmp_path}/rows.parquet"))
    assert [(p.prompt_ids, p.answer) for p in one] == [(p.prompt_ids, p.answer) for p in other]
    assert [p.id.rsplit(":", 1)[1] for p in one] == [p.id.rsplit(":", 1)[1] for p in other]


def test_more_rows_than_one_chunk_keep_their_order(tokenizer, write_rows):
    rows = [{"prompt": str(n), "answer": n} for n in range(2500)]
    prompts = _load(tokenizer, write_rows(*rows)).train
    assert [prompt.answer for prompt in prompts] == [str(n) for n in range(2500)]


def test_too_many_bad_rows_are_refused_with_the_first_listed(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in ROWS]
    file.write_text("\n".join([good[0], "{", "[]", *['{"x": 1}'] * 5, good[1]]))
    with pytest.raises(DataError) as caught:
        _load(tokenizer, str(file), max_bad_rows=6)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{file}: 7 bad rows, above data.max_bad_rows = 6: correct them, or raise the limit to skip them."
    )
    assert lines[1].startswith(f"  {file}:2: not JSON: ")
    assert lines[2] == f"  {file}:3: a row must be an object, not a list"
    assert lines[3].startswith(f"  {file}:4: no prompt nor messages (the row has x); ")
    assert lines[-1] == "  ... and 2 more"
    assert len(lines) == 7


def test_bad_rows_within_the_limit_are_skipped_and_named(tokenizer, tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([json.dumps(ROWS[0]), "{", json.dumps(ROWS[1])]))
    with caplog.at_level(logging.WARNING):
        data = _load(tokenizer, str(file), max_bad_rows=1)
    assert [prompt.id for prompt in data.train] == [f"{file}:1", f"{file}:3"]
    assert [row.place for row in data.bad_rows] == [f"{file}:2"]
    assert "skipped 1 bad row" in caplog.text
    assert f"{file}:2: not JSON" in caplog.text


def test_nothing_left_is_refused(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n")
    with pytest.raises(DataError, match="gives no example"):
        _load(tokenizer, str(file))


def test_the_limit_counts_the_first_rows(tokenizer, write_rows):
    assert [p.prompt_text for p in _load(tokenizer, write_rows(*ROWS), limit=2, chat=False).train] == [
        "10 + 10",
        "11 + 11",
    ]


def test_a_fraction_is_held_out_by_seed(tokenizer, write_rows):
    path = write_rows(*ROWS)
    one = _load(tokenizer, path, eval_fraction=0.25)
    assert (len(one.train), len(one.held_out)) == (15, 5)
    assert not {p.prompt_text for p in one.train} & {p.prompt_text for p in one.held_out}
    ids = lambda data: [p.id for p in data.held_out]  # noqa: E731
    assert ids(one) == ids(_load(tokenizer, path, eval_fraction=0.25))
    assert ids(one) != ids(_load(tokenizer, path, seed=1, eval_fraction=0.25))


def test_the_datas_own_seed_takes_the_place_of_the_runs(tokenizer, write_rows):
    path = write_rows(*ROWS)
    draws = [
        [p.id for p in load_prompts(DataConfig(path=path, seed=own), tokenizer, seed=run).stream().take(20)]
        for own, run in [(None, 3), (3, 8), (8, 3)]
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_held_out_file_is_read_whole_and_overlap_is_said(tokenizer, write_rows, caplog):
    train, held_out = write_rows(*ROWS, name="t.jsonl"), write_rows(*ROWS[:2], {"prompt": "1", "answer": 1})
    with caplog.at_level(logging.WARNING):
        data = _load(tokenizer, train, eval_path=held_out, limit=5)
    assert (len(data.train), len(data.held_out)) == (5, 3)
    assert "2 of 3 held-out prompts are trained on as well" in caplog.text


def test_left_out_and_cut_examples_are_counted(tokenizer, write_rows, caplog):
    path = write_rows({"prompt": "123", "answer": 1}, {"prompt": "1", "answer": 1})
    with caplog.at_level(logging.WARNING):
        _load(tokenizer, path, chat=False, max_tokens=2, overlong="skip")
    assert "1 examples above data.max_tokens left out, 0 cut" in caplog.text


def test_without_shuffling_the_stream_follows_the_file(tokenizer, write_rows):
    stream = _load(tokenizer, write_rows(*ROWS), shuffle=False).stream()
    assert [p.answer for p in stream.take(22)] == [row["answer"] for row in [*ROWS, *ROWS[:2]]]


def test_a_stream_resumes_in_the_middle_of_an_epoch_and_over_its_end(tokenizer, write_rows):
    data = _load(tokenizer, write_rows(*ROWS))
    whole = [p.id for p in data.stream().take(50)]
    first = data.stream()
    begun = [p.id for p in first.take(13)]
    state = json.loads(json.dumps(first.state_dict()))
    second = data.stream()
    second.load_state_dict(state)
    assert begun + [p.id for p in second.take(37)] == whole
    assert (second.epoch, second.drawn) == (2, 50)


def test_a_moved_file_resumes_and_changed_data_do_not(tokenizer, write_rows):
    state = _load(tokenizer, write_rows(*ROWS)).stream().state_dict()
    moved = _load(tokenizer, write_rows(*ROWS, name="moved.jsonl")).stream()
    moved.load_state_dict(state)
    for change in ({"prompt": "99 + 99", "answer": "20"}, {"prompt": "10 + 10", "answer": "21"}):
        changed = _load(tokenizer, write_rows(change, *ROWS[1:], name="changed.jsonl")).stream()
        with pytest.raises(DataError, match="the training data have changed"):
            changed.load_state_dict(state)
    fewer = _load(tokenizer, write_rows(*ROWS[1:], name="fewer.jsonl")).stream()
    with pytest.raises(DataError, match="size 20, this run has 19"):
        fewer.load_state_dict(state)


def test_a_changed_loss_mask_is_changed_data(tokenizer, write_rows):
    (sample,) = load_samples(
        DataConfig(path=write_rows({"prompt": "1", "completion": "2"})), tokenizer, seed=0
    ).train
    state = ExampleStream([sample], seed=0).state_dict()
    sample.loss_mask[:] = np.roll(sample.loss_mask, 1)
    with pytest.raises(DataError, match="have changed"):
        ExampleStream([sample], seed=0).load_state_dict(state)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path, content):
    if content:
        (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=f"no tokenizer can be read from {tmp_path}"):
        load_tokenizer(tmp_path)

"""Mixtures of sources: shares, order, resuming."""

from collections import Counter

import pytest
from pydantic import ValidationError
from relax_core.data import DataConfig, DataError, load_prompts


@pytest.fixture
def config(write_rows):
    """Three sources whose prompts begin with their letter; b is drawn three times as often as a, c half."""

    def rows(letter, count):
        many = [{"prompt": f"{letter}{i}", "answer": "1"} for i in range(count)]
        return write_rows(*many, name=f"{letter}.jsonl")

    return DataConfig(path=rows("a", 5), mixture={rows("b", 4): 3.0, rows("c", 50): 0.5}, chat=False)


def letters(prompts):
    return [prompt.prompt_text[0] for prompt in prompts]


def test_sources_are_drawn_in_their_shares_at_every_moment(config, tokenizer):
    data = load_prompts(config, tokenizer, seed=0)
    assert len(data.train) == 59
    drawn = letters(data.stream().take(90))
    assert Counter(drawn) == {"a": 20, "b": 60, "c": 10}
    # Shares 2/9, 6/9, 1/9: never off by more than the number of sources.
    for n in range(1, 91):
        counts = Counter(drawn[:n])
        assert all(abs(counts[x] - n * s / 9) <= 3 for x, s in {"a": 2, "b": 6, "c": 1}.items())


def test_each_source_keeps_epochs_of_its_own(config, tokenizer):
    stream = load_prompts(config, tokenizer, seed=0).stream()
    drawn = [p.prompt_text for p in stream.take(45) if p.prompt_text[0] == "a"]
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == ["a0", "a1", "a2", "a3", "a4"]
    assert (stream.epoch, stream.drawn) == (0, 45)


def test_a_mixture_resumes_at_the_very_next_example(config, tokenizer):
    data = load_prompts(config, tokenizer, seed=0)
    stream, again = data.stream(), data.stream()
    stream.take(17)
    again.load_state_dict(stream.state_dict())
    assert [p.id for p in again.take(30)] == [p.id for p in stream.take(30)]
    other = config.model_copy(update={"mixture": dict.fromkeys(config.mixture, 1.0)})
    with pytest.raises(DataError, match=r"in shares \[0.2"):
        load_prompts(other, tokenizer, seed=0).stream().load_state_dict(stream.state_dict())


def test_a_share_of_every_source_is_held_out(config, tokenizer):
    data = load_prompts(config.model_copy(update={"eval_fraction": 0.2}), tokenizer, seed=0)
    assert Counter(letters(data.held_out)) == {"a": 1, "b": 1, "c": 10}


@pytest.mark.parametrize(
    ("mixture", "reason"), [({"a": 1.0}, "which is path already"), ({"b": 0.0}, "greater")]
)
def test_impossible_mixtures_are_refused(mixture, reason):
    with pytest.raises(ValidationError, match=reason):
        DataConfig(path="a", mixture=mixture)


@pytest.mark.parametrize("other", ["../{name}/a.jsonl", "./"])
def test_a_file_of_two_sources_is_refused(write_rows, tokenizer, tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    write_rows({"prompt": "1", "answer": "1"}, name="a.jsonl")
    other = other.format(name=tmp_path.name)
    config = DataConfig(path="a.jsonl", mixture={other: 1.0}, chat=False)
    with pytest.raises(DataError, match=rf"a\.jsonl is in a\.jsonl and in {other}: give each file to one"):
        load_prompts(config, tokenizer, seed=0)

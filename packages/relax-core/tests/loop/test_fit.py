import numpy as np
import pytest
from relax_core.data import DataError, Prompt
from relax_core.loop.fit import refuse_unfit


def prompts(*rows):
    return [Prompt(f"rows.jsonl:{n}", np.array(ids, np.int32), "") for n, ids in enumerate(rows, start=1)]


def test_prompts_that_fill_vocabulary_and_context_exactly_fit():
    refuse_unfit(prompts([9], [0] * 6), vocab_size=10, context=8, new_tokens=2)
    refuse_unfit(prompts([9] * 1000), vocab_size=10)


def test_a_token_that_the_model_lacks_is_refused_with_its_row():
    with pytest.raises(
        DataError, match=r"1 of 2 examples .* vocabulary of 10(.|\n)*rows.jsonl:2: token id 10"
    ):
        refuse_unfit(prompts([9], [0, 10]), vocab_size=10)


def test_prompts_beyond_the_context_are_refused_with_the_cure():
    with pytest.raises(DataError) as caught:
        refuse_unfit(prompts([1], *[[0] * 7] * 8), vocab_size=10, context=8, new_tokens=2)
    text = str(caught.value)
    assert "8 of 9 prompts, with 2 new tokens behind them, exceed the model's context of 8 tokens" in text
    assert "set data.max_tokens to at most 6" in text
    assert "rows.jsonl:2: 7 tokens" in text
    assert text.endswith("... and 3 more")


def test_new_tokens_beyond_the_context_are_the_fault_themselves():
    with pytest.raises(DataError, match=r"lower rollout\.max_new_tokens"):
        refuse_unfit(prompts([1]), vocab_size=10, context=8, new_tokens=8)

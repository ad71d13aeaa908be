import json
from types import SimpleNamespace

import pytest
from relax_core.loop.stop_tokens import stop_token_ids


@pytest.fixture
def tokens(tmp_path):
    """Stop tokens of a directory with this generation config, beside a tokenizer with this end token."""

    def of(content, eos=None):
        if content is not None:
            (tmp_path / "generation_config.json").write_text(content)
        return stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=eos), vocab_size=10)

    return of


def test_the_end_tokens_of_generation_config_and_tokenizer_are_joined(tokens):
    assert tokens(json.dumps({"eos_token_id": [7, 2]}), eos=3) == (2, 3, 7)
    assert tokens(json.dumps({"eos_token_id": 0})) == (0,)


def test_the_tokenizers_end_token_is_enough(tokens):
    assert tokens(None, eos=3) == (3,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "names no end-of-text token"),
        ("{", "generation_config.json cannot be read"),
        ("[1]", "holds list, not an object"),
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id \['</s>'\]: it must be an id from 0 to 9"),
        ('{"eos_token_id": [2, 10]}', r"eos_token_id \[2, 10\]: it must be"),
        ('{"eos_token_id": {"a": 1}}', "it must be an id"),
    ],
)
def test_what_names_no_token_of_the_model_is_refused(tokens, content, words):
    with pytest.raises(ValueError, match=words):
        tokens(content)

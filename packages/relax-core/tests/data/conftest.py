import json

import pytest
from relax_core.data import load_tokenizer
from relax_core.data.arithmetic_tokenizer import write_arithmetic_tokenizer

# As the shipped template, but without {% generation %}.
UNMARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_arithmetic_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def unmarked(tmp_path):
    """A file with a template that marks nothing."""
    file = tmp_path / "unmarked.jinja"
    file.write_text(UNMARKED)
    return file


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows to a JSON Lines file and returns its path as text."""

    def write(*rows, name="rows.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write

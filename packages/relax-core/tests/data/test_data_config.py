import subprocess
import sys

import pytest
from pydantic import ValidationError
from relax_core.data import DataConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_path": "e.jsonl", "eval_fraction": 0.1}, "both choose held-out rows"),
        ({"eval_fraction": 1.0}, "less than 1"),
        ({"prompt_key": None, "messages_key": None}, "name the key that holds the prompt"),
        ({"overlong": "skip"}, "no effect while max_tokens is null"),
        ({"chat": False, "system_prompt": "x"}, "system_prompt has no effect while chat is false"),
        ({"chat": False, "template_args": {"a": 1}}, "template_args has no effect while chat is false"),
        ({"text_key": "text", "max_tokens": 9}, "max_tokens has no effect while text_key is set"),
        ({"text_key": "text", "system_prompt": "x"}, "system_prompt has no effect while text_key is set"),
        ({"block_tokens": 9}, "block_tokens has no effect while text_key is null"),
        ({"max_bad_rows": -1}, "greater than or equal to 0"),
        ({"overlong": "cut"}, "'refuse', 'skip' or 'truncate'"),
        ({"path": ""}, "at least 1 character"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(settings, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**{"path": "rows.jsonl", **settings})


def test_the_path_must_be_given():
    with pytest.raises(ValidationError, match="path\n  Field required"):
        DataConfig()


def test_a_written_config_reads_back_the_same():
    config = DataConfig(path="a", metadata_keys=("x",), template_args={"enable_thinking": False, "n": 1})
    assert DataConfig.model_validate_json(config.model_dump_json(), strict=True) == config


def test_every_field_has_a_meaning():
    fields = DataConfig.model_json_schema()["properties"]
    assert all(field.get("description") for field in fields.values())


def test_the_settings_import_quickly_and_nothing_here_imports_torch():
    code = (
        "import sys, relax_core.data\n"
        "assert not {'torch', 'transformers', 'megatron', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "[getattr(relax_core.data, name) for name in relax_core.data.__all__]\n"
        "assert not {'torch', 'transformers', 'megatron', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_no_attribute():
    import relax_core.data as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing

"""What every section of the config promises, whoever owns it."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter
from relax_core.config import RelaxConfig
from relax_core.config.fields import field_rows, section_at

ROWS = field_rows(RelaxConfig)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_field_says_what_it_means_and_allows(row):
    assert row.doc, "the field has no doc"
    assert row.doc.split(" [")[0].endswith("."), "the doc is one sentence or more"
    assert row.allowed
    assert row.kind != "VALUE"


@pytest.mark.parametrize("row", [row for row in ROWS if not row.required], ids=lambda row: row.name)
def test_every_default_is_allowed(row):
    section = section_at(RelaxConfig, row.path[:-1])
    info = section.model_fields[row.path[-1]]
    TypeAdapter(info.rebuild_annotation()).validate_python(row.default)


def test_sections_load_without_torch():
    code = (
        "import sys, relax_core.config.root, relax_core.recipes; print([m for m in sys.modules if m in "
        "('torch', 'transformers', 'numpy', 'ray', 'megatron')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

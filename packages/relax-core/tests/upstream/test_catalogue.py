"""The list of corrections, for the doctor."""

import importlib.util
import re
from pathlib import Path

import pytest
from relax_core.upstream import (
    Correction,
    UnsupportedUpstreamError,
    correction,
    install_corrections,
    list_corrections,
)

REPOSITORY = Path(__file__).parents[4]


def test_every_correction_says_what_is_wrong_and_names_a_test_that_exists():
    names = [c.name for c in list_corrections()]
    assert len(set(names)) == len(names) == 7
    for c in list_corrections():
        assert len(c.wrong) > 40
        path, test = c.test.split("::")
        assert re.search(rf"def {test}\(", (REPOSITORY / path).read_text()), c.test


def test_all_are_installed_once_where_transformer_engine_is_missing():
    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed: the corrections are not needed")
    assert install_corrections() == list_corrections() == install_corrections()


def test_another_upstream_version_is_refused(monkeypatch):
    monkeypatch.setattr(correction.importlib.metadata, "version", lambda name: "0.17.0")
    c = Correction(
        "a", "some.module", "it is wrong", ">=0.16.1,<0.17", lambda module: lambda: None, test="t::t"
    )
    with pytest.raises(
        UnsupportedUpstreamError, match=r"'a' was made for megatron-core .* 0\.17\.0 is installed"
    ):
        c.install()
    assert not c.installed


def test_an_optional_one_is_left_out_in_another_upstream_version(monkeypatch):
    monkeypatch.setattr(correction.importlib.metadata, "version", lambda name: "0.17.0")
    c = Correction(
        "c", "json", "it is slow", ">=0.16.1,<0.17", lambda module: lambda: None, test="t::t", optional=True
    )
    c.install()
    assert not c.installed


def test_what_a_process_does_not_need_is_left_out():
    c = Correction(
        "b", "json", "it is wrong", "==0", lambda module: lambda: None, test="t::t", needed=lambda: False
    )
    c.install()
    assert not c.installed

import pytest
from relax_core.loop.changes import RESUMABLE, ChangedSettingsError, refuse_changes

BEFORE = {"run": {"steps": 3, "seed": 0, "name": "a"}, "data": {"path": "x", "template_args": {"a": 1}}}


def changed(**sections):
    return {name: {**values, **sections.get(name, {})} for name, values in BEFORE.items()}


def test_length_and_places_may_change_and_newer_settings_are_passed_over():
    refuse_changes(BEFORE, changed(run={"steps": 9, "name": "b", "new": 1}, data={"path": "y"}), where="c")
    assert "run.steps" in RESUMABLE


def test_everything_else_is_named_with_both_values():
    with pytest.raises(ChangedSettingsError) as caught:
        refuse_changes(
            BEFORE, changed(run={"seed": 1}, data={"template_args": {"a": 2}}), where="config.yaml"
        )
    text = str(caught.value)
    assert text.startswith("config.yaml has changed since the checkpoint was written")
    assert "run.seed: 0 is now 1" in text
    assert "data.template_args: {'a': 1} is now {'a': 2}" in text


def test_another_layout_is_allowed_and_said(caplog):
    before = {"parallel": {"tensor": 2, "context": 1}, "trainer": {"lr": 1.0, "micro_batch_tokens": 8}}
    now = {"parallel": {"tensor": 1, "context": 2}, "trainer": {"lr": 1.0, "micro_batch_tokens": 9}}
    refuse_changes(before, before, where="c")
    assert not caplog.records
    refuse_changes(before, now, where="c")
    assert (
        "another layout, equal to rounding and not to the bit: parallel.tensor: 2 is now 1; " in caplog.text
    )
    assert "trainer.micro_batch_tokens: 8 is now 9" in caplog.text

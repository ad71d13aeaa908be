import dataclasses
import sys

import pytest
from relax_core.algorithms import AlgorithmConfig, algorithm_names, get_algorithm, register_algorithm
from relax_core.algorithms import __all__ as exported
from relax_core.algorithms import registry as registry_module


def test_the_built_in_algorithms_declare_what_they_need():
    assert set(algorithm_names()) >= {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "sft"}
    assert [name for name in algorithm_names() if get_algorithm(name).level == "sequence"] == ["dpo", "gspo"]
    assert get_algorithm("sft").loop == "sft"
    assert get_algorithm("grpo").min_group_size == 2
    assert get_algorithm("reinforce_plus_plus").min_group_size == 1
    assert get_algorithm("rloo").on_policy
    assert get_algorithm("dapo").needs_dynamic_sampling


def test_an_algorithm_that_samples_needs_its_formulas():
    with pytest.raises(ValueError, match="give it an advantage and a policy_loss"):
        dataclasses.replace(get_algorithm("grpo"), advantage=None)


def test_what_no_loop_reads_is_refused():
    with pytest.raises(ValueError, match="nothing reads its advantage and policy_loss"):
        dataclasses.replace(get_algorithm("grpo"), loop="sft")


def test_an_algorithm_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(
        "import dataclasses\nfrom relax_core.algorithms import get_algorithm\n"
        "MINE = dataclasses.replace(get_algorithm('grpo'), name='mine', clip=(0.5, 0.5))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert AlgorithmConfig(name="own_algorithm:MINE").clip_range == (0.5, 0.5)


def test_declared_settings_are_fields_of_the_config():
    for name in algorithm_names():
        assert get_algorithm(name).settings <= set(AlgorithmConfig.model_fields)


def test_a_new_algorithm_brings_its_own_refusals(monkeypatch):
    monkeypatch.setattr(registry_module, "_REGISTRY", dict(registry_module._REGISTRY))
    register_algorithm(
        dataclasses.replace(get_algorithm("grpo"), name="mine", settings=frozenset({"clip_low"}))
    )
    assert AlgorithmConfig(name="mine", clip_low=0.1).algorithm.name == "mine"
    with pytest.raises(ValueError, match=r"clip_high 0\.1 has no effect with algorithm 'mine'"):
        AlgorithmConfig(name="mine", clip_high=0.1)


def test_a_name_can_be_taken_only_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_algorithm(get_algorithm("grpo"))


def test_a_default_reduction_must_be_one_of_the_reductions():
    with pytest.raises(ValueError, match="default reduction 'group_mean' is not among"):
        dataclasses.replace(get_algorithm("sft"), default_reduction="group_mean")


def test_every_public_name_can_be_imported():
    import relax_core.algorithms as package

    for name in exported:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("X = 3", "is a int: it must be a relax_core.algorithms.Algorithm"),
        ("Y = 3", "has no attribute 'X'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_in_words(tmp_path, monkeypatch, source, words):
    (tmp_path / "of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    with pytest.raises(ValueError, match=words):
        get_algorithm("of_a_user:X")


def test_a_relative_module_is_refused_in_words():
    with pytest.raises(ValueError, match="cannot be imported: TypeError"):
        get_algorithm("..a:b")

"""MindSpeed by a fake with its semantics: import acts, argv is parsed, later specs see what came before."""

import sys
import types
from argparse import Namespace
from dataclasses import MISSING, Field, field
from importlib import metadata

import pytest
from relax_npu.upstream import mindspeed
from relax_npu.upstream.fix import Fix, FixMismatchError, _applied


class Core:
    """megatron-core's module, whose class MindSpeed replaces when context parallelism is on."""

    class Usual:
        pass

    class Parallel:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """The packages that MindSpeed consists of, as far as `load` uses them."""
    _applied.clear()
    monkeypatch.setattr(mindspeed, "_last", None)

    def module(name: str, **names) -> types.ModuleType:
        created = types.ModuleType(name)
        created.__spec__ = types.SimpleNamespace(name=name)
        vars(created).update(names)
        monkeypatch.setitem(sys.modules, name, created)
        return created

    module("mindspeed")
    core = module("megatron.core.made_up", Attention=Core.Usual)
    full = Namespace()
    module("mindspeed.core")
    module("mindspeed.core.megatron_basic")

    def transformer_config_init_subclass(cls, **kwargs):
        # As upstream writes it: one loop variable for all factories.
        for key, value in vars(full).items():
            if isinstance(value, list | dict):
                setattr(cls, key, field(default_factory=lambda: value))  # noqa: B023

    arguments = module(
        "mindspeed.core.megatron_basic.arguments_basic",
        transformer_config_init_subclass=transformer_config_init_subclass,
        get_full_args=lambda: full,
    )
    log: list = []

    def repatch(args):
        log.append(("repatch", dict(args.items())))
        core.Attention = Core.Parallel if args.get("context_parallel_size", 1) > 1 else Core.Usual

    def importing(name):
        if name == mindspeed.ADAPTOR:
            log.append(("argv", list(sys.argv[1:])))
            return module(name, repatch=repatch)
        return sys.modules[name]

    monkeypatch.setattr(mindspeed.importlib, "import_module", importing)
    monkeypatch.setattr(mindspeed.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: "0.16.0")
    return types.SimpleNamespace(core=core, log=log, full=full, arguments=arguments, module=module)


@pytest.mark.parametrize("kind", [dict, Namespace])
def test_repatch_takes_a_dict_or_a_namespace(fake, kind) -> None:
    mindspeed.load(kind(context_parallel_size=2), initialised=False)
    assert fake.log[-1] == ("repatch", {"context_parallel_size": 2})
    assert fake.core.Attention is Core.Parallel


def test_the_command_line_is_hidden_and_comes_back(fake, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["relax-train", "--profile", "x", "trainer.lr=1"])
    mindspeed.load({}, initialised=False)
    assert ("argv", []) in fake.log
    assert sys.argv[1:] == ["--profile", "x", "trainer.lr=1"]


def test_loading_twice_repatches_once(fake) -> None:
    first = mindspeed.load({"context_parallel_size": 2}, initialised=False)
    assert mindspeed.load({"context_parallel_size": 2}, initialised=True) is first
    assert [entry[0] for entry in fake.log].count("repatch") == 1


def test_a_spec_built_before_keeps_the_old_class_so_late_switches_are_refused(fake) -> None:
    mindspeed.load({}, initialised=False)
    spec = fake.core.Attention
    with pytest.raises(mindspeed.MindSpeedOrderError, match="before initialise"):
        mindspeed.load({"context_parallel_size": 2}, initialised=True)
    assert spec is fake.core.Attention is Core.Usual


def test_nothing_happens_without_mindspeed(fake, monkeypatch) -> None:
    monkeypatch.setattr(mindspeed.importlib.util, "find_spec", lambda name: None)
    assert mindspeed.load({}, initialised=True) is None
    assert not fake.log


def test_containers_of_omegaconf_become_plain(fake) -> None:
    class ListConfig:
        def __iter__(self):
            return iter((1, 2))

    ListConfig.__module__ = "omegaconf.listconfig"
    mindspeed.load({"sizes": ListConfig(), "nested": {"x": 1}}, initialised=False)
    assert fake.log[-1][1] == {"sizes": [1, 2], "nested": {"x": 1}}


def defaults_of(cls: type) -> dict:
    made = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
    assert all(value.default_factory is not MISSING for value in made.values())
    return {name: value.default_factory() for name, value in made.items()}


def test_each_mutable_default_is_its_own(fake) -> None:
    fake.full.first, fake.full.second = [1], {"two": 2}
    before = type("Config", (), {})
    fake.arguments.transformer_config_init_subclass(before)
    assert defaults_of(before) == {"first": {"two": 2}, "second": {"two": 2}}, "upstream's fault"
    mindspeed.LATE_DEFAULT.install()
    after = type("Config", (), {})
    fake.arguments.transformer_config_init_subclass(after)
    assert defaults_of(after) == {"first": [1], "second": {"two": 2}}
    defaults_of(after)["first"].append(3)
    assert defaults_of(after)["first"] == [1]


def kernel(*warps: int, keys: tuple[str, ...] = ("D",)):
    return types.SimpleNamespace(
        configs=[types.SimpleNamespace(num_warps=count) for count in warps], keys=list(keys)
    )


def test_the_l2_norm_is_not_tuned(fake) -> None:
    module = fake.module("mindspeed.ops.triton.l2norm", forward=kernel(1, 2, 4, 8), backward=kernel(1, 2))
    mindspeed.L2NORM_AUTOTUNE.install()
    assert [c.num_warps for c in module.forward.configs] == [4]
    assert [c.num_warps for c in module.backward.configs] == [1]


def test_options_are_no_reason_to_tune_again(fake) -> None:
    keys = ("H", "K", "USE_G", "IS_VARLEN")
    module = fake.module("mindspeed.ops.triton.chunk_delta_h", backward=kernel(1, keys=keys))
    mindspeed.DELTA_AUTOTUNE_KEY.install()
    assert module.backward.keys == ["H", "K"]


def test_another_mindspeed_is_refused(fake, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    with pytest.raises(FixMismatchError, match=r"made for mindspeed 0\.16\.0, found 0\.17\.0"):
        mindspeed.load({}, initialised=False)
    assert not fake.log


def test_a_fix_refuses_an_interface_that_it_does_not_know(fake) -> None:
    fake.module("made.up", act=lambda first, other: None)
    expecting = Fix("x", "mindspeed", ("0.16.0",), "made.up", {"act": ("first", "second")}, "", print, "")
    with pytest.raises(FixMismatchError, match=r"takes \('first', 'other'\)"):
        expecting.install()
    with pytest.raises(FixMismatchError, match=r"has no gone"):
        Fix("x", "mindspeed", ("0.16.0",), "made.up", {"gone": ()}, "", print, "").install()

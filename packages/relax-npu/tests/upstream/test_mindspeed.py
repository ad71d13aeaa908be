"""MindSpeed by a fake with its semantics: import acts, argv is parsed, later specs see what came before."""

import sys
import types
from argparse import Namespace
from dataclasses import MISSING, Field, field
from importlib import metadata

import pytest
from relax_npu.upstream import mindspeed, mindspeed_fixes, mindspeed_use
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
        # As upstream does it: what the class has stays, each other switch is annotated and set, and the
        # factories share the loop's variable, so that they give whatever came last, of any type.
        for key, value in {**vars(full), **kwargs}.items():
            if hasattr(cls, key):
                continue
            cls.__annotations__[key] = type(value)
            is_mutable = type(value) in (list, dict, set, bytearray)
            setattr(cls, key, field(default_factory=lambda: value) if is_mutable else value)  # noqa: B023

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
    monkeypatch.setattr(
        mindspeed.importlib.util, "find_spec", lambda name: object() if name == "mindspeed" else None
    )
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
    fake.full.first, fake.full.second, fake.full.third, fake.full.kept = [1], {"two": 2}, 7, [5]

    def config(name: str) -> type:
        return type(name, (), {"__annotations__": {}, "kept": "of the class"})

    before = config("Before")
    fake.arguments.transformer_config_init_subclass(before)
    assert defaults_of(before) == {"first": [5], "second": [5]}, "upstream's fault"
    mindspeed_fixes.LATE_DEFAULT.install()
    after = config("After")
    fake.arguments.transformer_config_init_subclass(after, given=[9])
    assert defaults_of(after) == {"first": [1], "second": {"two": 2}, "given": [9]}
    assert (after.third, after.kept) == (7, "of the class")
    assert after.__annotations__["first"] is list
    defaults_of(after)["first"].append(3)
    assert defaults_of(after)["first"] == [1]
    child = type("Child", (after,), {"__annotations__": {}})
    fake.arguments.transformer_config_init_subclass(child)
    assert not defaults_of(child), "what a class inherits stays as it is"


def kernel(*warps: int, keys: tuple[str, ...] = ("D",), rows: tuple[int, ...] = ()):
    """An autotuned kernel: each number of warps, with each number of rows if the kernel takes several."""
    configs = [
        types.SimpleNamespace(num_warps=count, kwargs={"BT": number} if number else {})
        for count in warps
        for number in rows or (0,)
    ]
    return types.SimpleNamespace(configs=configs, keys=list(keys), fn=None)


def test_the_l2_norm_is_not_tuned(fake) -> None:
    module = fake.module(
        "mindspeed.ops.triton.l2norm",
        forward=kernel(1, 2, 4, 8, rows=(8, 16, 32, 64)),
        row=kernel(1, 2, 4),
        backward=kernel(1, 2),
    )
    mindspeed_fixes.L2NORM_AUTOTUNE.install()
    assert [(c.num_warps, c.kwargs) for c in module.forward.configs] == [(4, {"BT": 32})]
    assert [c.num_warps for c in module.row.configs] == [4]
    assert [c.num_warps for c in module.backward.configs] == [1]


def test_options_are_no_reason_to_tune_again(fake) -> None:
    """MindSpeed's kernels are autotuned inside of `triton.heuristics`, which has no keys of its own."""
    tuned = kernel(1, keys=("H", "K", "USE_G", "IS_VARLEN"))
    heuristics = types.SimpleNamespace(fn=tuned, values={})
    fake.module("mindspeed.ops.triton.chunk_delta_h", backward=heuristics)
    mindspeed_fixes.DELTA_AUTOTUNE_KEY.install()
    assert tuned.keys == ["H", "K"]


@pytest.mark.parametrize("triton", [True, False])
def test_loading_corrects_the_kernels_where_they_can_be_imported(fake, monkeypatch, triton: bool) -> None:
    norm = fake.module("mindspeed.ops.triton.l2norm", forward=kernel(1, 2, 4))
    rule = fake.module("mindspeed.ops.triton.chunk_delta_h", backward=kernel(1, keys=("H", "USE_G")))
    there = {"mindspeed", "triton"} if triton else {"mindspeed"}
    monkeypatch.setattr(
        mindspeed.importlib.util, "find_spec", lambda name: object() if name in there else None
    )
    mindspeed.load({}, initialised=False)
    assert len(norm.forward.configs) == (1 if triton else 3)
    assert rule.backward.keys == (["H"] if triton else ["H", "USE_G"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ("", None),
        ("0", None),
        ("1", {}),
        ('{"use-ascend-mc2": true, "--moe-zero-memory": "level0"}',
         {"use_ascend_mc2": True, "moe_zero_memory": "level0"}),
    ],
)  # fmt: skip
def test_the_variable_says_whether_and_with_which_switches(text, wanted) -> None:
    assert mindspeed_use.switches(text) == wanted


@pytest.mark.parametrize("text", ["yes", "true", "2", "[1]", "{"])
def test_another_value_is_refused(text: str) -> None:
    with pytest.raises(mindspeed_use.MindSpeedSettingError, match="allowed: 0, 1, or a JSON object"):
        mindspeed_use.switches(text)


def test_mindspeed_that_is_asked_for_and_not_there_is_an_error(fake, monkeypatch) -> None:
    monkeypatch.setattr(mindspeed.importlib.util, "find_spec", lambda name: None)
    mindspeed_use.load_if_asked({})
    monkeypatch.setenv(mindspeed_use.VARIABLE, "1")
    with pytest.raises(mindspeed_use.MindSpeedSettingError, match="not installed"):
        mindspeed_use.load_if_asked({})


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

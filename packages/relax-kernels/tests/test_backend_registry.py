import logging
from collections.abc import Callable
from typing import Any

import pytest
import relax_kernels as rk
import torch
from relax_kernels import registry
from relax_kernels.contract import Call


class Toy:
    """A backend whose answers a test can tell apart: swiglu gives `value` everywhere."""

    def __init__(
        self, name: str, priority: int, value: float, devices: set[str] | None, refuses: str | None
    ) -> None:
        self.name, self.priority, self.value, self.refuses = name, priority, value, refuses
        self.device_types = None if devices is None else frozenset(devices)
        self.operators = frozenset({"swiglu"})

    def refusal(self, call: Call) -> str | None:
        return self.refuses

    def implementation(self, op: str) -> Callable[..., Any]:
        return lambda x: torch.full((x.shape[0], x.shape[1] // 2), self.value)

    def describe(self, call: Call) -> str:
        return f"toy of {self.value}"


class Point:
    group = "relax_kernels.backends"

    def __init__(self, name: str, factory: Callable[[], Any]) -> None:
        self.name, self.value, self.load = name, f"toys:{name}", lambda: factory


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Adds backends beside the installed ones."""
    installed = list(registry.entry_points(group=Point.group))

    def add(*backends: Toy, **failing: Callable[[], Any]) -> None:
        points = [Point(b.name, lambda b=b: b) for b in backends]
        points += [Point(name, factory) for name, factory in failing.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: [*installed, *points])
        registry._load.cache_clear()
        registry._logged.clear()

    yield add
    monkeypatch.undo()
    registry._load.cache_clear()
    registry._logged.clear()


def toy(name: str = "toy", priority: int = 50, value: float = 7.0, devices=("cpu",), refuses=None) -> Toy:
    return Toy(name, priority, value, None if devices is None else set(devices), refuses)


X = torch.zeros(2, 4)


def served_by_toy(**kwargs) -> bool:
    return bool((rk.swiglu(X, **kwargs) == 7.0).all())


def test_the_reference_is_installed() -> None:
    assert "torch" in [backend.name for backend in rk.backends()]
    assert rk.explain("swiglu", X, backend="torch").chosen == "torch"


def test_the_highest_priority_that_serves_wins(install) -> None:
    install(toy(priority=50), toy("weak", priority=1, value=1.0))
    assert served_by_toy()
    install(toy(priority=50, devices=("npu",)), toy("weak", priority=-1, value=1.0))
    assert not served_by_toy()


def test_the_argument_is_binding(install) -> None:
    install(toy(priority=-1), toy("cannot", refuses="F = 2 is too small"))
    assert served_by_toy(backend="toy")
    with pytest.raises(rk.NoBackend, match="swiglu: backend 'cannot' F = 2 is too small"):
        rk.swiglu(X, backend="cannot")
    with pytest.raises(
        rk.NoBackend, match=r"asks for 'typo': no such backend is installed; available: .*torch"
    ):
        rk.swiglu(X, backend="typo")
    with pytest.raises(rk.NoBackend, match="backend 'toy' does not have this operator"):
        rk.output_gate(X, X, backend="toy")


def test_the_environment_chooses_per_operator(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(toy(priority=50))
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "torch")
    assert not served_by_toy()
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "toy")
    assert served_by_toy()
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "typo")
    with pytest.raises(rk.NoBackend, match="the environment variable RELAX_KERNELS_SWIGLU asks for 'typo'"):
        rk.swiglu(X)


def test_a_stand_in_is_logged_once(
    install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(toy(refuses="F = 2 is too small"))
    with caplog.at_level(logging.WARNING, "relax_kernels.registry"):
        for _ in range(3):
            rk.swiglu(X)
    assert [record.message for record in caplog.records] == [
        "swiglu: torch stands in (toy: F = 2 is too small)"
    ]


def test_a_choice_is_logged_once(
    install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(toy())
    with caplog.at_level(logging.INFO, "relax_kernels.registry"):
        for _ in range(3):
            rk.swiglu(X)
            rk.swiglu(X, backend="torch")
            monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "torch")
            rk.swiglu(X)
            monkeypatch.delenv("RELAX_KERNELS_SWIGLU")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "swiglu: torch by argument"),
        ("INFO", "swiglu: torch by RELAX_KERNELS_SWIGLU"),
    ]


def test_bad_input_reaches_no_backend(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(toy())
    asked = []
    monkeypatch.setattr(Toy, "refusal", lambda self, call: asked.append(call))
    monkeypatch.setattr(Toy, "implementation", lambda self, op: asked.append(op))
    with pytest.raises(rk.InvalidInput, match=r"swiglu: gate_up has 3 features"):
        rk.swiglu(torch.zeros(2, 3), backend="toy")
    assert not asked


def test_a_backend_for_another_device_needs_no_stand_in(install, caplog: pytest.LogCaptureFixture) -> None:
    install(toy(devices=("npu",)))
    rk.set_strict(True)
    rk.swiglu(X)
    assert not caplog.records


@pytest.mark.parametrize("how", ["set_strict", "environment"])
def test_strict_forbids_a_stand_in(install, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    install(toy(refuses="F = 2 is too small"))
    if how == "set_strict":
        rk.set_strict(True)
    else:
        monkeypatch.setenv("RELAX_KERNELS_STRICT", "1")
    with pytest.raises(
        rk.NoBackend, match=r"torch would stand in, which strict forbids \(toy: F = 2 is too small\)"
    ):
        rk.swiglu(X)
    rk.swiglu(X, backend="torch")


def test_strict_forbids_passing_over_the_environment(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(toy(devices=("npu",)))
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "toy")
    assert not served_by_toy()
    rk.set_strict(True)
    with pytest.raises(rk.NoBackend, match="runs on npu, not on cpu"):
        rk.swiglu(X)


def test_explain_names_the_chosen_one_and_why_not_the_others(install) -> None:
    def absent() -> None:
        raise rk.BackendUnavailable("libtoy is not installed")

    install(
        toy(), toy("elsewhere", 90, devices=("npu",)), toy("picky", 80, refuses="no varlen"), absent=absent
    )
    explanation = rk.explain("swiglu", X)
    assert explanation.chosen == "toy"
    assert explanation.detail == "toy of 7.0"
    reasons = dict(explanation.others)
    assert reasons["elsewhere"] == "runs on npu, not on cpu"
    assert reasons["picky"] == "no varlen"
    assert reasons["absent"] == "not usable here: libtoy is not installed"
    assert reasons["torch"] == "would serve it, priority 0"
    assert str(explanation).splitlines()[0] == "swiglu: toy (toy of 7.0)"
    assert rk.explain("swiglu", X, device_type="npu").chosen == "elsewhere"


def test_explain_runs_nothing_and_needs_no_data() -> None:
    x = torch.empty(10, 1, 64, device="meta")
    cu = rk.CuSeqlens.from_lengths((4, 6))
    explanation = rk.explain(
        "gated_delta_rule", x, x, x, x[..., 0], x[..., 0], cu_seqlens=cu, device_type="cpu"
    )
    assert explanation.chosen is not None


def test_explain_refuses_what_the_operator_would() -> None:
    with pytest.raises(rk.InvalidInput, match="gate_up has 3 features"):
        rk.explain("swiglu", torch.zeros(2, 3))
    with pytest.raises(rk.InvalidInput, match="no operator 'swish'; there are adamw_step, adamw_steps, "):
        rk.explain("swish", X)


def test_an_unservable_call_says_why(install) -> None:
    install(toy())
    explanation = rk.explain("swiglu", X, backend="absent")
    assert explanation.chosen is None
    assert "no such backend is installed" in explanation.detail


def test_a_wrong_entry_point_is_a_programming_error(install) -> None:
    install(broken=object)
    with pytest.raises(TypeError, match="entry point broken = toys:broken does not give a Backend"):
        rk.backends()


def test_a_failing_entry_point_is_named(install) -> None:
    def broken() -> None:
        raise OSError("libtoy.so: cannot open shared object file")

    install(broken=broken)
    with pytest.raises(OSError, match="libtoy") as failure:
        rk.backends()
    assert failure.value.__notes__ == [
        "while loading the entry point broken = toys:broken of relax_kernels.backends"
    ]


def test_two_entry_points_of_one_name_are_refused(install) -> None:
    install(toy(), toy(value=1.0))
    with pytest.raises(TypeError, match=r"two entry points of relax_kernels.backends have the name toy"):
        rk.backends()


@pytest.mark.parametrize(("value", "strict"), [("TRUE", True), ("1", True), ("0", False), ("False", False)])
def test_strict_reads_what_is_usually_written(
    install, monkeypatch: pytest.MonkeyPatch, value: str, strict: bool
) -> None:
    install(toy(refuses="F = 2 is too small"))
    monkeypatch.setenv("RELAX_KERNELS_STRICT", value)
    assert registry.is_strict() == strict
    monkeypatch.setenv("RELAX_KERNELS_STRICT", "yes please")
    with pytest.raises(rk.InvalidInput, match="RELAX_KERNELS_STRICT must be 1, true, 0 or false, given 'yes"):
        rk.swiglu(X)


def test_strict_that_says_nothing_is_refused_where_nothing_stands_in(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(toy())
    monkeypatch.setenv("RELAX_KERNELS_STRICT", "maybe")
    with pytest.raises(rk.InvalidInput, match=r"RELAX_KERNELS_STRICT must be .*, given 'maybe'"):
        rk.swiglu(X)


def test_a_variable_that_names_no_operator_is_told(
    install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RELAX_KERNELS_SWIGLOO", "torch")
    monkeypatch.setenv("RELAX_KERNELS_SWIGLU", "torch")
    install(toy())
    with caplog.at_level(logging.WARNING, "relax_kernels.registry"):
        rk.swiglu(X)
    assert [record.message for record in caplog.records] == [
        "the environment variable RELAX_KERNELS_SWIGLOO names no operator"
    ]


def test_explain_refuses_arguments_the_operator_does_not_have() -> None:
    with pytest.raises(rk.InvalidInput, match="swiglu does not take these arguments: missing a required"):
        rk.explain("swiglu")
    x, cu = torch.zeros(2, 1, 4), rk.CuSeqlens.from_lengths((2,))
    given = (x, x, x, x[..., 0], x[..., 0])
    for op, more in (("gated_delta_rule", {"cu_seqlens": cu}), ("gated_delta_rule_step", {})):
        state = (torch.zeros(2, 1, 4, 4),) if op == "gated_delta_rule_step" else ()
        assert rk.explain(op, *given, *state, **more).chosen is not None
        with pytest.raises(rk.InvalidInput, match="got an unexpected keyword argument 'bogus'"):
            rk.explain(op, *given, *state, **more, bogus=1)


def test_autocast_does_not_change_what_an_operator_computes() -> None:
    torch.manual_seed(0)
    x, head, target = torch.randn(8, 2, 4), torch.randn(5, 4), torch.arange(8) % 5
    cu = rk.CuSeqlens.from_lengths((5, 3))
    g = -torch.rand(8, 2)

    def all_of_them() -> list[torch.Tensor]:
        return [
            rk.gated_delta_rule(x, x, x, g, g.exp(), cu_seqlens=cu)[0],
            rk.attention(x, x, x, cu_seqlens_q=cu),
            rk.linear_logprob(x[:, 0], head, target).logprob_T,
        ]

    expected = all_of_them()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, all_of_them(), expected))


def test_every_operator_can_be_explained_and_has_a_reference() -> None:
    from relax_kernels.explanation import CALLS

    (reference,) = (backend for backend in rk.backends() if backend.name == "torch")
    assert set(CALLS) == reference.operators
    for op in CALLS:
        assert callable(getattr(rk, op))
        assert callable(reference.implementation(op))

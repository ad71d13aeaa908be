"""Every call of an NPU operator fits its frozen schema, in each release that registers the operator."""

import json
from importlib.resources import files

import pytest
from relax_npu.operators.table import BY_TORCH, CAPABILITIES
from relax_npu.schema import (
    CallSite,
    Schema,
    SchemaMismatchError,
    Snapshot,
    call_sites,
    calls_in,
    snapshot,
    snapshots,
)

SITES = call_sites()
PINNED = (
    ("torch_npu", "2.9.0.post4", "22891d91"),
    ("torch_npu", "2.9.0.post9", "0986e124"),
    ("fla_npu", "v26.1.0", "6e491560"),
    ("fla_npu", "v26.6.0", "39bbde7c"),
)
# Bound only where it is there: without it the gradients are our own.
OPTIONAL = {("npu_causal_conv1d_bwd", "v26.1.0")}


@pytest.mark.parametrize(("package", "release", "commit"), PINNED)
def test_a_release_is_frozen_with_the_commit_of_its_sources(package: str, release: str, commit: str) -> None:
    frozen = snapshot(package, release)
    assert frozen.commit.startswith(commit)
    assert set(frozen.schemas) <= frozen.names


def test_there_are_call_sites_of_both_packages() -> None:
    called = {site.operator for site in SITES}
    assert {"npu_fusion_attention", "npu_grouped_matmul", "npu_chunk_bwd_dqkwg"} <= called


@pytest.mark.parametrize("frozen", snapshots(), ids=lambda s: f"{s.package}-{s.release}")
def test_every_call_fits_every_release(frozen: Snapshot) -> None:
    own = {name for s in snapshots() if s.package == frozen.package for name in s.schemas}
    for site in SITES:
        if site.operator in own and (site.operator, frozen.release) not in OPTIONAL:
            assert site.operator in frozen.schemas, f"{site} is not in {frozen.release}"
            frozen.schemas[site.operator].check(site.places, site.names)


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.line}")
def test_a_call_names_an_operator_of_some_release_and_hides_no_argument(site: CallSite) -> None:
    assert any(site.operator in frozen.schemas for frozen in snapshots())
    assert not site.spread


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: c.operator)
def test_a_capability_needs_operators_that_its_releases_have(capability) -> None:
    for name in capability.needs:
        assert any(name in frozen.names for frozen in snapshots()), name
        assert any(site.operator == name for site in SITES), f"{name} is needed and never called"


def test_no_operator_is_both_ours_and_the_references() -> None:
    assert not {capability.operator for capability in CAPABILITIES} & set(BY_TORCH)


SCHEMA = Schema.parse(
    'npu_x(Tensor a, int[]? ends=None, *, Tensor? b=None, str mode="half", int c) -> Tensor'
)


def test_a_schema_is_read() -> None:
    told = [(a.name, a.kind, a.keyword_only, a.required) for a in SCHEMA.arguments]
    assert told == [
        ("a", "Tensor", False, True),
        ("ends", "int[]?", False, False),
        ("b", "Tensor?", True, False),
        ("mode", "str", True, False),
        ("c", "int", True, True),
    ]


@pytest.mark.parametrize(
    ("places", "names", "told"),
    [
        (3, {"c"}, "takes 2 arguments by place, given 3"),
        (1, {"c", "activation"}, "no argument 'activation'"),
        (2, {"c", "ends"}, "by place and by name"),
        (1, set(), "needs c"),
        (0, {"c"}, "needs a"),
    ],
)
def test_a_call_that_does_not_fit_is_told(places: int, names: set, told: str) -> None:
    with pytest.raises(SchemaMismatchError, match=told):
        SCHEMA.check(places, frozenset(names))


def test_a_call_that_fits() -> None:
    SCHEMA.check(1, frozenset({"c"}))
    SCHEMA.check(2, frozenset({"c", "b", "mode"}))


def test_calls_are_found_in_source() -> None:
    source = "y = torch.ops.npu.npu_x(a, *rest, c=1)\nz = torch.ops.aten.add(a, b)\nnpu.npu_x(a)\n"
    (site,) = calls_in(source, "f.py")
    assert (site.operator, site.line, site.names) == ("npu_x", 1, frozenset({"c"}))


def test_what_changed_between_the_releases_is_known() -> None:
    """The operators that a newer torch_npu adds and that no call here may rely on."""
    new = snapshot("torch_npu", "2.9.0.post9").names - snapshot("torch_npu", "2.9.0.post4").names
    assert "npu_chunk_gated_delta_rule" in new
    assert not {site.operator for site in SITES} & new


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no snapshot of torch_npu 1\.0; there are: 2\.9\.0\.post4"):
        snapshot("torch_npu", "1.0")


def test_snapshots_hold_what_is_called_and_no_more() -> None:
    called = {site.operator for site in SITES}
    for path in (files("relax_npu") / "schemas").iterdir():
        data = json.loads(path.read_text())
        assert set(data["schemas"]) == called & set(data["names"]), "run scripts/npu_schemas.py"

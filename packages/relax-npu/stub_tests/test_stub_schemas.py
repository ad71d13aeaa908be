"""The frozen schemas against the registry of the real torch_npu, and every call of ours against that."""

import inspect

import pytest
import torch
from host_execution import RELEASE
from relax_npu.operators.table import CAPABILITIES
from relax_npu.schema import call_sites, snapshot

FROZEN = snapshot("torch_npu", RELEASE)
_OURS = {f"npu::{name}" for name in snapshot("fla_npu", "v26.6.0").names}


def full_name(schema: torch.FunctionSchema) -> str:
    name = schema.name.removeprefix("npu::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


LIVE = {
    full_name(schema): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("npu::") and schema.name not in _OURS
}
SITES = [site for site in call_sites() if site.operator in FROZEN.schemas]


def test_the_frozen_release_names_every_operator_that_the_real_one_registers() -> None:
    named = {name for name in LIVE if name.startswith("npu_")}
    assert named - FROZEN.names == set()
    assert FROZEN.names - named == set()


@pytest.mark.parametrize("name", FROZEN.schemas)
def test_a_frozen_schema_is_the_registered_one(name: str) -> None:
    # Both read by torch, which writes numbers and quotes in one way.
    assert str(torch._C.parse_schema(f"npu::{FROZEN.schemas[name].text}")) == str(LIVE[name])


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.line}")
def test_a_call_of_ours_binds_to_the_registered_schema(site) -> None:
    arguments = LIVE[site.operator].arguments
    by_place = [argument for argument in arguments if not argument.kwarg_only]
    assert site.places <= len(by_place)
    given = {argument.name for argument in by_place[: site.places]} | site.names
    assert site.names <= {argument.name for argument in arguments}
    assert not [a.name for a in arguments if not a.has_default_value() and a.name not in given]


@pytest.mark.parametrize("name", FROZEN.schemas)
def test_an_operator_that_is_called_has_a_kernel_and_a_meta_function(name: str) -> None:
    for key in ("PrivateUse1", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", key), key


def test_which_operators_have_a_derivative_of_their_own() -> None:
    """grouped_matmul has none, so that ours is needed; the others' are compared with ours."""
    found = {
        name
        for name in FROZEN.schemas
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "AutogradPrivateUse1")
    }
    assert found == {
        *("npu_fusion_attention", "npu_moe_token_unpermute", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu")
    }


def test_the_backend_finds_its_operators_under_torch_ops() -> None:
    from relax_npu.operators.backend import has_operator

    needed = {name for capability in CAPABILITIES for name in capability.needs}
    assert not [name for name in needed if name in FROZEN.names and not has_operator(name)]
    assert not has_operator("npu_chunk_gated_delta_rule"), "of a later release"


def test_a_payload_of_shared_memory_has_its_device_where_relax_npu_puts_the_die() -> None:
    from relax_npu.sglang.ipc import ARGUMENTS, DEVICE_PLACE
    from torch_npu.multiprocessing import reductions

    names = list(inspect.signature(reductions.rebuild_npu_tensor).parameters)
    assert len(names) == ARGUMENTS
    assert names[DEVICE_PLACE] == "storage_device"

"""A backend of another distribution, found by entry point, against the parity suite: passing and failing.

It does what the Ascend one must: its library wants [channels, length] of one sequence, padded to a multiple,
takes no initial state and has a backward pass of its own.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relax_kernels import registry
from relax_kernels.__main__ import main

MODULE = """
import torch
import torch.nn.functional as F

FAULT = {fault!r}


class Outside:
    name, device_types, priority = "outside", frozenset({{"cpu"}}), 50
    operators = frozenset({{"causal_conv1d"}})

    def refusal(self, call):
        return "its library takes no initial state" if call.options["has_initial_state"] else None

    def implementation(self, op):
        return causal_conv1d

    def describe(self, call):
        return "outside's library"


def causal_conv1d(
    x_TC, weight_CW, bias_C=None, *, cu_seqlens, activation, initial_state_NCW, output_final_state
):
    assert initial_state_NCW is None
    (T, C), W, outputs, states = x_TC.shape, weight_CW.shape[1], [x_TC[:0]], []
    weight_CW = weight_CW.detach() if FAULT == "no weight gradient" else weight_CW
    bounds = [0, T] if FAULT == "one sequence" else cu_seqlens.host
    for start, end in zip(bounds, bounds[1:]):
        length = end - start
        seen_CT = F.pad(x_TC[start:end].T, (W - 1, -length % 8))
        if FAULT == "padding unset":
            seen_CT = torch.cat((torch.empty_like(seen_CT[:, : W - 1]), seen_CT[:, W - 1 :]), 1)
        if length or FAULT == "crash":
            outputs.append(F.conv1d(seen_CT[None], weight_CW[:, None], bias_C, groups=C)[0].T[:length])
        states.append(seen_CT[:, length : length + W - 1])
    y_TC = torch.cat(outputs)
    y_TC = F.silu(y_TC) if activation == "silu" else y_TC
    y_TC = y_TC.float() if FAULT == "dtype" else y_TC
    return y_TC, torch.stack(states) if output_final_state else None


def create():
    return Outside()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts the distribution, with a fault, where Python looks for distributions."""

    def put(fault: str = "") -> None:
        (tmp_path / "outside.py").write_text(MODULE.format(fault=fault))
        info = tmp_path / "outside-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[relax_kernels.backends]\noutside = outside:create\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry._load.cache_clear()

    yield put
    sys.modules.pop("outside", None)
    monkeypatch.undo()
    registry._load.cache_clear()


SUITE = ("check", "--backend", "outside", "--only", "causal_conv1d-")


def test_it_is_listed(install, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  outside: cpu, priority 50" in lines
    (line,) = (line for line in lines if line.startswith("causal_conv1d "))
    assert "outside" in line


def test_it_passes_where_it_serves(install, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    assert main(SUITE) == 0
    out = capsys.readouterr().out
    assert "outside on cpu: 4 passed, 0 failed" in out
    assert (
        "not served  causal_conv1d-lengths-63: causal_conv1d: "
        "backend 'outside' its library takes no initial state"
    ) in out


FAULTS = {
    "one sequence": "no-states: y: off by",
    "padding unset": "no-states: y: off by nan",
    "no weight gradient": "no-states: dweight is missing",
    "dtype": "no-states-bfloat16: ",
    "crash": "no-states: Calculated padded input size",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_fails_where_it_is_wrong(install, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    install(fault)
    assert main(SUITE) == 1
    assert f"FAILED  causal_conv1d-{FAULTS[fault]}" in capsys.readouterr().out

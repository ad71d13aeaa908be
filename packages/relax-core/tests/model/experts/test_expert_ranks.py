"""A mixture of experts in every layout of four ranks against a loop over tokens, in float64."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SCRIPT = Path(__file__).with_name("expert_cases.py")
PLAN = runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What every rank got, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(PLAN["WORLD"])]


def expected(case):
    """Output and gradients by a loop over tokens and experts, as the published model defines them."""
    allowed, top_k = PLAN["CASES"][case]
    x_TD, upstream_TD = PLAN["tokens_of"](case)
    x_TD.requires_grad_()
    w = {name: weight.requires_grad_() for name, weight in PLAN["weights_of_the_block"]().items()}
    rows = []
    for x_D in x_TD:
        p_E = (w["router.weight"] @ x_D).softmax(0)
        chosen = p_E.argsort(descending=True)[:top_k].tolist()
        assert set(chosen) <= set(allowed)
        gate, up = (w["shared_experts.linear_fc1.weight"] @ x_D).chunk(2)
        y_D = w["shared_experts.linear_fc2.weight"] @ (F.silu(gate) * up)
        y_D = y_D * (w["shared_experts.gate_weight"] @ x_D).sigmoid()
        for e in chosen:
            gate, up = (w["experts.linear_fc1.weight"][e] @ x_D).chunk(2)
            y = w["experts.linear_fc2.weight"][e] @ (F.silu(gate) * up)
            y_D = y_D + p_E[e] / p_E[chosen].sum() * y
        rows.append(y_D)
    out_TD = torch.stack(rows)
    out_TD.backward(upstream_TD)
    return out_TD.detach(), x_TD.grad, {name: weight.grad for name, weight in w.items()}


@pytest.mark.parametrize("case", PLAN["CASES"])
@pytest.mark.parametrize("layout", PLAN["LAYOUTS"])
def test_every_layout_gives_the_numbers_of_the_published_formula(measured, layout, case):
    out_TD, dx_TD, gradients = expected(case)
    parts = [rank[layout, case][0] for rank in measured]
    # Sums of up to a hundred float64 terms, taken in another order.
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([part["out"] for part in parts]), out_TD, **close)
    torch.testing.assert_close(torch.cat([part["dx"] for part in parts]), dx_TD, **close)
    for name, want in gradients.items():
        got = torch.zeros_like(want)
        for part in parts:
            gradient, place = part["gradients"][name]
            got[torch.meshgrid(*place, indexing="ij")] += gradient
        # Every rank has tokens of its own, so the whole gradient is the plain sum; shares of the shared
        # expert see the tokens of all tensor-parallel ranks.
        torch.testing.assert_close(got, want, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", PLAN["LAYOUTS"])
def test_an_expert_without_tokens_gets_exactly_no_gradient(measured, layout):
    for rank in measured:
        gradient, (experts, *_) = rank[layout, "an expert without tokens"][0]["gradients"][
            "experts.linear_fc1.weight"
        ]
        idle = experts == 3
        assert gradient[~idle].flatten(1).any(1).all()
        assert not gradient[idle].any()


@pytest.mark.parametrize("layout", PLAN["LAYOUTS"])
def test_a_second_run_gives_the_same_bits(measured, layout):
    for rank in measured:
        for case in PLAN["CASES"]:
            first, second = rank[layout, case]
            assert torch.equal(first["out"], second["out"])
            assert torch.equal(first["dx"], second["dx"])
            for name, (gradient, _place) in first["gradients"].items():
                assert torch.equal(gradient, second["gradients"][name][0]), name


@pytest.mark.parametrize("layout", PLAN["LAYOUTS"])
def test_the_shared_expert_is_queued_before_the_host_waits_for_sizes(measured, layout):
    whole = layout in ("data 4", "tensor 2, expert tensor 1")
    for rank in measured:
        wanted = ["shared expert"] if whole else ["sizes sent", "shared expert", "sizes read"]
        assert rank[layout, "order"] == wanted


def test_a_checkpoint_of_one_layout_reads_in_others(measured):
    read = {key[1:] for key in measured[0] if key[0] == "read"}
    assert len(read) > 15
    assert {layout for pair in read for layout in pair} == set(PLAN["LAYOUTS"])
    for rank in measured:
        assert not [key for key, same in rank.items() if key[0] == "read" and not same]

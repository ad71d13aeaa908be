import math

import pytest
import relax_kernels as rk
import torch
from relax_kernels.testing import NotServed, Target, assert_near, grads_of, tolerance


def run(target: Target, *args):
    try:
        return target.run("rotary", *args)
    except NotServed as reason:
        pytest.skip(str(reason))


def test_angles_by_hand() -> None:
    cos, sin = rk.rotary_cos_sin(torch.tensor([0, 3]), dim=4, base=100.0)
    # Pair 0 turns by p, pair 1 by p / 10.
    angles = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 0.3, 3.0, 0.3]])
    assert_near(cos, angles.cos(), 1e-6)
    assert_near(sin, angles.sin(), 1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_equals_the_functions_of_transformers(target: Target, rows: int) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = pytest.importorskip("transformers").Qwen3_5TextConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
        },
    )
    position = torch.randint(0, 5000, (rows, 33), generator=torch.Generator().manual_seed(0)).to(
        target.device
    )
    x = target.normal(33, 2, 64, seed=1)
    module = theirs.Qwen3_5TextRotaryEmbedding(config).to(target.device)
    their_cos, their_sin = module(x, position[:, None] if rows == 3 else position)
    given = position if rows == 3 else position[0]
    cos, sin = rk.rotary_cos_sin(given, dim=32, base=1e7, sections=(6, 5, 5))
    # Angles of thousands of radians carry their float32 rounding into the cosine.
    assert_near(cos, their_cos[0], 1e-3)
    assert_near(sin, their_sin[0], 1e-3)
    y = run(target, x, their_cos[0], their_sin[0])
    expected, _ = theirs.apply_rotary_pos_emb(x[None], x[None], their_cos, their_sin, unsqueeze_dim=2)
    assert_near(y, expected[0], tolerance(torch.float32, target.device))
    for mine, other in zip(grads_of((y,), (x,)), grads_of((expected[0],), (x,)), strict=True):
        assert_near(mine, other, tolerance(torch.float32, target.device))


def test_sections_take_rows_in_turn() -> None:
    """Of 8 pairs, rows 1 and 2 serve every third one, three and two times; the others are row 0's."""
    position = torch.tensor([[1], [10], [100]])
    cos, _ = rk.rotary_cos_sin(position, dim=16, base=1.0, sections=(3, 3, 2), dtype=torch.float64)
    expected = [1, 10, 100, 1, 10, 100, 1, 10]
    assert_near(cos[0, :8], torch.tensor([math.cos(p) for p in expected], dtype=torch.float64), 1e-12)


def test_equal_rows_are_one_row() -> None:
    position = torch.arange(50)
    one = rk.rotary_cos_sin(position, dim=32, base=1e4)
    three = rk.rotary_cos_sin(position.expand(3, -1), dim=32, base=1e4, sections=(6, 5, 5))
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])


def test_scores_depend_on_the_distance_only(target: Target) -> None:
    q, k = target.normal(1, 1, 64, seed=1), target.normal(1, 1, 64, seed=2)

    def score(i: int, j: int) -> torch.Tensor:
        turned = []
        for x, place in ((q, i), (k, j)):
            cos, sin = rk.rotary_cos_sin(torch.tensor([place], device=target.device), dim=16, base=1e4)
            turned.append(run(target, x, cos, sin))
        return (turned[0] * turned[1]).sum()

    assert_near(score(7, 3), score(104, 100), 1e-4)


def test_gradients_of_the_reference_are_those_of_finite_differences() -> None:
    x = Target("torch", "cpu").normal(3, 2, 6, seed=1, dtype=torch.float64)
    cos, sin = rk.rotary_cos_sin(torch.arange(3), dim=4, base=1e2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rk.rotary(x, cos, sin, backend="torch"), (x,))


def test_bad_inputs_are_refused_by_name() -> None:
    place = torch.arange(3)
    with pytest.raises(rk.InvalidInput, match="dim must be even, given 3"):
        rk.rotary_cos_sin(place, dim=3, base=1e4)
    with pytest.raises(rk.InvalidInput, match="sections must be three numbers, given None"):
        rk.rotary_cos_sin(place.expand(3, -1), dim=8, base=1e4)
    with pytest.raises(rk.InvalidInput, match=r"must be \[T\] or \[3, T\]"):
        rk.rotary_cos_sin(place.expand(2, -1), dim=8, base=1e4)
    with pytest.raises(rk.InvalidInput, match="position_ids must be one of int32, int64"):
        rk.rotary_cos_sin(place.float(), dim=8, base=1e4)
    cos, sin = rk.rotary_cos_sin(place, dim=8, base=1e4)
    with pytest.raises(rk.InvalidInput, match="R = 8; it must be even and at most D = 6"):
        rk.rotary(torch.zeros(3, 1, 6), cos, sin)
    with pytest.raises(rk.InvalidInput, match=r"cos_TR has shape \(3, 8\)"):
        rk.rotary(torch.zeros(4, 1, 16), cos, sin)
    with pytest.raises(rk.InvalidInput, match="get no gradient"):
        rk.rotary(torch.zeros(3, 1, 16), cos.clone().requires_grad_(), sin)

"""Each transform against rows counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_bridge.transforms import Concat, GroupedDeltaNet, GroupedQkv, Identity


def labelled(*names: str) -> torch.Tensor:
    """One row a name; each row holds the character codes of its name, so rows can be read back."""
    return torch.tensor([[ord(c) for c in name] for name in names])


def read(x: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in x.tolist()]


def test_gated_qkv_puts_queries_gates_key_and_value_of_each_group_together():
    # Four heads in two groups, head dim 1: Hugging Face interleaves query and gate head by head.
    q_proj = labelled("q0", "g0", "q1", "g1", "q2", "g2", "q3", "g3")
    k_proj, v_proj = labelled("k0", "k1"), labelled("v0", "v1")
    fused = GroupedQkv(2, 2, 1, gate=True).forward([q_proj, k_proj, v_proj])
    assert read(fused) == ["q0", "q1", "g0", "g1", "k0", "v0", "q2", "q3", "g2", "g3", "k1", "v1"]


def test_gated_qkv_keeps_the_rows_of_a_head_in_order():
    q_proj = labelled("qa", "qb", "ga", "gb", "Qa", "Qb", "Ga", "Gb")
    fused = GroupedQkv(1, 2, 2, gate=True).forward([q_proj, labelled("ka", "kb"), labelled("va", "vb")])
    assert read(fused) == ["qa", "qb", "Qa", "Qb", "ga", "gb", "Ga", "Gb", "ka", "kb", "va", "vb"]


def test_plain_qkv_has_no_gates():
    q_proj = labelled("q0", "q1", "q2", "q3")
    fused = GroupedQkv(2, 2, 1, gate=False).forward([q_proj, labelled("k0", "k1"), labelled("v0", "v1")])
    assert read(fused) == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]


def test_the_delta_net_concat_is_in_the_order_of_its_parts():
    fused = Concat((3, 1, 1)).forward([labelled("q0", "k0", "v0"), labelled("z0"), labelled("b0")])
    assert read(fused) == ["q0", "k0", "v0", "z0", "b0"]


def test_qwen3_next_groups_by_key_head_and_megatron_by_kind():
    # Two key heads, two value heads each, all dims 1.
    qkvz = labelled("q0", "k0", "v0", "v1", "z0", "z1", "q1", "k1", "v2", "v3", "z2", "z3")
    ba = labelled("b0", "b1", "a0", "a1", "b2", "b3", "a2", "a3")
    fused = GroupedDeltaNet(2, 2, 1, 1).forward([qkvz, ba])
    flat = ["q0", "q1", "k0", "k1", "v0", "v1", "v2", "v3", "z0", "z1", "z2", "z3"]
    assert read(fused) == [*flat, "b0", "b1", "b2", "b3", "a0", "a1", "a2", "a3"]


SIZES = st.integers(1, 3)


@given(groups=SIZES, per_group=SIZES, dim=SIZES, hidden=SIZES, gate=st.booleans())
def test_qkv_inverse_undoes_forward(groups, per_group, dim, hidden, gate):
    transform = GroupedQkv(groups, per_group, dim, gate)
    q_rows, kv_rows = groups * per_group * dim * (2 if gate else 1), groups * dim
    check_inverse(transform, [(q_rows, hidden), (kv_rows, hidden), (kv_rows, hidden)])


@given(heads=SIZES, ratio=SIZES, key=SIZES, value=SIZES, hidden=SIZES)
def test_grouped_delta_net_inverse_undoes_forward(heads, ratio, key, value, hidden):
    transform = GroupedDeltaNet(heads, ratio, key, value)
    check_inverse(transform, [(heads * 2 * (key + ratio * value), hidden), (2 * heads * ratio, hidden)])


@given(rows=st.lists(SIZES, min_size=1, max_size=4), tail=st.lists(SIZES, max_size=2))
def test_concat_inverse_undoes_forward(rows, tail):
    check_inverse(Concat(tuple(rows)), [(r, *tail) for r in rows])


def test_identity_returns_the_same_object():
    x = torch.ones(2)
    assert Identity().forward([x]) is x
    assert Identity().inverse(x)[0] is x


def check_inverse(transform, shapes):
    parts, start = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        parts.append(torch.arange(start, start + size).reshape(shape))
        start += size
    fused = transform.forward(parts)
    assert tuple(fused.shape) == transform.fused_shape(shapes)
    assert sorted(fused.flatten().tolist()) == list(range(start)), "an element is lost or doubled"
    for part, back in zip(parts, transform.inverse(fused), strict=True):
        assert torch.equal(part, back)


def test_a_wrong_number_of_parts_is_not_accepted():
    with pytest.raises(ValueError, match="unpack"):
        Identity().forward([torch.ones(1), torch.ones(1)])

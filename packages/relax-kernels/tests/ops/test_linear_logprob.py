import math
from datetime import timedelta
from pathlib import Path

import pytest
import relax_kernels as rk
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from relax_kernels.testing import Case, NotServed, Target, assert_near, grads_of, parity_cases, tolerance
from torch.overrides import TorchFunctionMode


def run(target: Target, *args, **kwargs):
    try:
        return target.run("linear_logprob", *args, **kwargs)
    except NotServed as reason:
        pytest.skip(str(reason))


def tokens(target: Target, T: int, V: int) -> torch.Tensor:
    return torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(7)).to(target.device)


def test_uniform_logits_by_hand(target: Target) -> None:
    hidden = torch.zeros(3, 64, device=target.device)
    weight = target.normal(50, 64, seed=1)
    target_T = torch.tensor([0, 49, -1], device=target.device)
    logprob, entropy, *_ = run(target, hidden, weight, target_T, with_entropy=True)
    expected = torch.tensor([-math.log(50.0), -math.log(50.0), 0.0])
    assert_near(logprob.cpu(), expected, 1e-6)
    assert entropy is not None
    assert_near(entropy.cpu(), -expected, 1e-6)


@pytest.mark.parametrize("fixed", [False, True], ids=["trained-head", "fixed-head"])
def test_a_nearly_certain_token_keeps_its_digits(target: Target, fixed: bool) -> None:
    # Logits 30 and 22: log(1 + exp(-8)) is a hundred times what rounding may take of 30 in float32.
    hidden = (torch.ones(1, 16, device=target.device) / 16).requires_grad_()
    weight = torch.tensor([[30.0], [22.0]], device=target.device).repeat(1, 16).requires_grad_(not fixed)
    token_T = torch.zeros(1, dtype=torch.int64, device=target.device)
    logprob, *_ = run(target, hidden.bfloat16(), weight.bfloat16(), token_T)
    assert logprob.item() == pytest.approx(-math.log1p(math.exp(-8)), rel=1e-3)


def test_a_target_of_none_belies_all_targets() -> None:
    hidden, weight, token_T = torch.ones(2, 4), torch.ones(3, 4), torch.tensor([2, -1])
    with pytest.raises(rk.InvalidInput, match=r"\[0, 3\), given values from -1 to 2; all_targets says"):
        rk.linear_logprob(hidden, weight, token_T, all_targets=True)


def test_equals_cross_entropy_of_torch(target: Target) -> None:
    hidden, weight = target.normal(40, 64, seed=1), target.normal(300, 64, seed=2)
    token_T = tokens(target, 40, 300)
    logprob, entropy, *_ = run(target, hidden, weight, token_T)
    expected = -torch.nn.functional.cross_entropy(hidden @ weight.T, token_T, reduction="none")
    assert entropy is None
    assert_near(logprob, expected, tolerance(torch.float32, target.device))


def test_the_largest_by_hand(target: Target) -> None:
    # Logits are the shares 1/16, 8/16, 2/16, 5/16 of the one feature; 16-fold so that backends have a tile.
    share = torch.tensor([1.0, 8.0, 2.0, 5.0], device=target.device) / 16
    weight, hidden = share.log()[:, None].repeat(1, 16), torch.ones(2, 16, device=target.device) / 16
    result = run(target, hidden, weight, torch.tensor([0, -1], device=target.device), top_k=3)
    assert result.topk_index_TK.tolist() == [[1, 3, 2], [-1, -1, -1]]
    expected = torch.tensor([[math.log(8 / 16), math.log(5 / 16), math.log(2 / 16)], [0.0] * 3])
    assert_near(result.topk_logprob_TK.cpu(), expected, 1e-6)


def test_the_largest_equal_topk_of_torch(target: Target) -> None:
    hidden, weight = (target.normal(*s, seed=1, dtype=torch.bfloat16) for s in ((40, 64), (300, 64)))
    result = run(target, hidden, weight, tokens(target, 40, 300), top_k=20, temperature=0.7)
    expected = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, -1).topk(20)
    assert_near(result.topk_logprob_TK, expected.values, 1e-5)
    assert torch.equal(result.topk_index_TK, expected.indices)
    assert not result.topk_logprob_TK.requires_grad


def test_results_are_float32_for_bfloat16(target: Target) -> None:
    hidden, weight = (target.normal(*s, seed=1, dtype=torch.bfloat16) for s in ((4, 64), (50, 64)))
    logprob, entropy, *_ = run(target, hidden, weight, tokens(target, 4, 50), with_entropy=True)
    assert logprob.dtype == torch.float32
    assert entropy is not None
    assert entropy.dtype == torch.float32


def test_tokens_without_target_do_not_matter_at_all(target: Target) -> None:
    hidden, weight = target.normal(20, 64, seed=1), target.normal(300, 64, seed=2)
    token_T = tokens(target, 20, 300)
    token_T[5:15] = -1
    clean = run(target, hidden, weight, token_T, with_entropy=True)
    spoilt = hidden.detach().clone()
    spoilt[5:15] = torch.nan
    spoilt.requires_grad_()
    again = run(target, spoilt, weight, token_T, with_entropy=True)
    for a, b in zip(clean[:2], again[:2], strict=True):
        assert torch.equal(a, b)
    dhidden, dweight = grads_of(again, (spoilt, weight))
    assert torch.equal(dhidden[5:15], torch.zeros_like(dhidden[5:15]))
    assert_near(dweight, grads_of(clean, (hidden, weight))[1], 1e-6)


def test_the_chunk_changes_nothing(target: Target) -> None:
    hidden, weight = target.normal(33, 64, seed=1), target.normal(300, 64, seed=2)
    token_T = tokens(target, 33, 300)
    whole = run(target, hidden, weight, token_T, with_entropy=True, top_k=5)
    expected = grads_of(whole[:2], (hidden, weight))
    allowed = tolerance(torch.float32, target.device)
    for chunk in (1, 7, 33, 1000):
        parts = run(target, hidden, weight, token_T, with_entropy=True, top_k=5, chunk_tokens=chunk)
        for mine, other in zip(parts, whole, strict=True):
            assert_near(mine, other, allowed)
        for mine, other in zip(grads_of(parts[:2], (hidden, weight)), expected, strict=True):
            assert_near(mine, other, allowed)


class _Largest(TorchFunctionMode):
    """Remembers the most elements that any tensor had."""

    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_of_all_tokens_never_exist(target: Target) -> None:
    T, V = 256, 512
    hidden, weight = target.normal(T, 64, seed=1), target.normal(V, 64, seed=2)
    token_T = tokens(target, T, V)
    with _Largest() as seen:
        result = run(target, hidden, weight, token_T, with_entropy=True, top_k=5, chunk_tokens=64)
        torch.autograd.grad(result.logprob_T.sum() + result.entropy_T.sum(), (hidden, weight))
    assert seen.elements == 64 * V


def test_runs_give_equal_bits(target: Target) -> None:
    hidden, weight = target.normal(33, 64, seed=1), target.normal(300, 64, seed=2)
    first, second = (
        run(target, hidden, weight, tokens(target, 33, 300), with_entropy=True, top_k=5) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(
        grads_of(first[:2], (hidden, weight)), grads_of(second[:2], (hidden, weight)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("entropy", [True, False])
def test_gradients_of_the_reference_are_those_of_finite_differences(entropy: bool, top_k: int | None) -> None:
    on, f64 = Target("torch", "cpu"), torch.float64
    token_T = torch.tensor([0, -1, 3, 6, 2, -1])

    def function(hidden, weight):
        result = rk.linear_logprob(
            hidden,
            weight,
            token_T,
            temperature=0.7,
            with_entropy=entropy,
            top_k=top_k,
            chunk_tokens=2,
            backend="torch",
        )
        return tuple(result[:2]) if entropy else result.logprob_T

    assert torch.autograd.gradcheck(
        function, (on.normal(6, 4, seed=1, dtype=f64), on.normal(7, 4, seed=2, dtype=f64))
    )


def _vocabulary_parallel_rank(rank: int, folder: Path, reduce_here: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        on = Target("torch", "cpu")
        hidden, weight = on.normal(9, 16, seed=1), on.normal(20, 16, seed=2)
        token_T = tokens(on, 9, 20)
        token_T[3] = -1
        part = weight.detach()[10 * rank : 10 * rank + 10].clone().requires_grad_()
        settings = {"temperature": 0.7, "with_entropy": True, "chunk_tokens": 4}
        group = {"process_group": dist.group.WORLD, "reduce_hidden_grad": reduce_here}
        result = rk.linear_logprob(hidden, part, token_T, **settings, **group)
        dhidden, dpart = grads_of(result, (hidden, part))
        if not reduce_here:
            dist.all_reduce(dhidden)
        whole = rk.linear_logprob(hidden, weight, token_T, **settings)
        expected_dhidden, expected_dweight = grads_of(whole, (hidden, weight))
        assert_near(result.logprob_T, whole.logprob_T, 1e-6)
        assert_near(result.entropy_T, whole.entropy_T, 1e-6)
        assert_near(dhidden, expected_dhidden, 1e-5)
        assert_near(dpart, expected_dweight[10 * rank : 10 * rank + 10], 1e-5)
        # More than the ten entries of one rank, and fewer.
        for top_k in (15, 3):
            parts = rk.linear_logprob(hidden, part, token_T, **settings, **group, top_k=top_k)
            both = rk.linear_logprob(hidden, weight, token_T, **settings, top_k=top_k)
            assert torch.equal(parts.topk_index_TK, both.topk_index_TK)
            assert_near(parts.topk_logprob_TK, both.topk_logprob_TK, 1e-6)
        # Logits of hundreds: the ranks' sums of exponentials have no common range.
        far = rk.linear_logprob(hidden * 60, part, token_T, process_group=dist.group.WORLD)
        assert_near(far.logprob_T, rk.linear_logprob(hidden * 60, weight, token_T).logprob_T, 1e-5)
        # A token that is nearly certain, beside a logit whose own rounding is 2e-6.
        certain = torch.full((10, 1), 16.0)
        certain[4] += 14 * (rank == 0)
        certain.requires_grad_()
        sure = rk.linear_logprob(torch.ones(1, 1), certain, torch.tensor([4]), process_group=dist.group.WORLD)
        others = 19 * math.exp(-14)
        assert float(sure.logprob_T) == pytest.approx(-math.log1p(others), abs=1.5e-7)
        sure.logprob_T.sum().backward()
        if rank == 0:
            assert float(certain.grad[4]) == pytest.approx(others / (1 + others), abs=1.5e-7)
        with pytest.raises(rk.InvalidInput, match=r"\[0, 20\)"):
            rk.linear_logprob(hidden, part, token_T + 20, process_group=dist.group.WORLD)
        with pytest.raises(rk.InvalidInput, match="top_k must be a whole number from 1 to V = 20"):
            rk.linear_logprob(hidden, part, token_T, process_group=dist.group.WORLD, top_k=21)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduce_here", [True, False])
def test_vocabulary_over_two_ranks(tmp_path: Path, reduce_here: bool) -> None:
    # Processes forked after a backward pass on a CUDA device cannot take one.
    how = "spawn" if torch.cuda.is_initialized() else "fork"
    mp.start_processes(_vocabulary_parallel_rank, (tmp_path, reduce_here), nprocs=2, start_method=how)


def test_bad_inputs_are_refused_by_name() -> None:
    hidden, weight, token_T = torch.zeros(3, 8), torch.zeros(5, 8), torch.tensor([0, -1, 4])
    rk.linear_logprob(hidden, weight, token_T)
    with pytest.raises(rk.InvalidInput, match=r"weight_VD has shape \(5, 7\)"):
        rk.linear_logprob(hidden, torch.zeros(5, 7), token_T)
    with pytest.raises(rk.InvalidInput, match="target_T must be one of int64, given int32"):
        rk.linear_logprob(hidden, weight, token_T.int())
    with pytest.raises(
        rk.InvalidInput, match=r"target_T must lie in \[0, 5\) or be -1, given values from -1 to 5"
    ):
        rk.linear_logprob(hidden, weight, torch.tensor([0, -1, 5]))
    with pytest.raises(rk.InvalidInput, match="temperature must be positive, given 0"):
        rk.linear_logprob(hidden, weight, token_T, temperature=0)
    for top_k in (0, -1, 6, 2.0, True):
        with pytest.raises(rk.InvalidInput, match=f"from 1 to V = 5, given {top_k}"):
            rk.linear_logprob(hidden, weight, token_T, top_k=top_k)
    with pytest.raises(rk.InvalidInput, match="weight_VD is torch"):
        rk.linear_logprob(hidden, weight.bfloat16(), token_T)


LOGPROB_CASES = [case for case in parity_cases() if case.op == "linear_logprob"]


@pytest.mark.parametrize("case", LOGPROB_CASES, ids=lambda case: case.name)
def test_where_targets_cannot_be_looked_at_the_reference_gives_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_kernels.torch_backend.logprob.on_host", lambda x: False)
    case.check(Target("torch", "cpu"))


def test_where_targets_cannot_be_looked_at_tokens_without_one_do_not_matter_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_kernels.torch_backend.logprob.on_host", lambda x: False)
    test_tokens_without_target_do_not_matter_at_all(Target("torch", "cpu"))
    test_the_chunk_changes_nothing(Target("torch", "cpu"))

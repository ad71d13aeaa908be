import torch
from relax_kernels import CuSeqlens, gated_delta_rule
from relax_kernels.testing import Target, assert_near, grads_of
from relax_kernels.torch_backend.delta_chunks import sums_within_chunks
from relax_kernels.torch_backend.delta_step import naive_gated_delta_rule


def test_sum_and_rest_are_the_sum() -> None:
    g = torch.tensor([-1000.0, -0.001, -1000.0, -0.001, -0.001])
    G, rest = sums_within_chunks(g)
    exact = g.double().cumsum(-1)
    assert G.dtype == rest.dtype == torch.float32
    assert (G.double() - exact).abs().max() > 1e-5
    assert (G.double() + rest.double() - exact).abs().max() < 1e-10
    assert torch.equal(sums_within_chunks(g.double())[0], exact)


def test_small_decays_beside_large_ones_keep_their_digits() -> None:
    """A gate that closes now and then (g of -1000) must not blur the open ones; sums alone lose 1e-3."""
    on, cu = Target("torch", "cpu"), CuSeqlens.from_lengths((200,))
    closed = on.uniform(200, 2, low=0.0, high=1.0, seed=4).detach() < 0.3
    g = torch.where(closed, -1000.0, -0.001).requires_grad_()
    q, k, v = (on.normal(200, 2, 16, seed=seed) for seed in (1, 2, 3))
    beta = on.uniform(200, 2, low=0.0, high=1.0, seed=5)
    x = [q, k, v, g, beta]
    o, _ = gated_delta_rule(*x, cu_seqlens=cu, backend="torch")
    exact = [y.detach().double().requires_grad_() for y in x]
    expected, _ = naive_gated_delta_rule(*exact, cu_seqlens=cu)
    assert_near(o, expected, 2e-6)
    for mine, other in zip(grads_of((o,), x), grads_of((expected,), exact), strict=True):
        assert_near(mine, other, 2e-6)


def test_gradients_of_strong_decays_keep_their_digits() -> None:
    """Where little is remembered dg is small beside a token's terms with itself, which must not enter."""
    on, cu = Target("torch", "cpu"), CuSeqlens.from_lengths((96, 54))
    q, k, v = (on.normal(150, 2, 32, seed=seed) for seed in (1, 2, 3))
    g = on.uniform(150, 2, low=-14.0, high=-7.0, seed=4)
    beta = on.uniform(150, 2, low=0.3, high=0.7, seed=5)
    x = [q, k, v, g, beta]
    o, _ = gated_delta_rule(*x, cu_seqlens=cu, backend="torch")
    exact = [y.detach().double().requires_grad_() for y in x]
    expected, _ = naive_gated_delta_rule(*exact, cu_seqlens=cu)
    dg, expected_dg = (grads_of((o,), (g,))[0], grads_of((expected,), (exact[3],))[0])
    largest = expected_dg.abs().max().item()
    assert largest < 1e-2
    assert_near(dg / largest, expected_dg / largest, 2e-6)


def test_the_gradient_of_a_gate_that_closes_now_and_then_keeps_its_digits() -> None:
    """Little passes a closed gate, much passes the open ones beside it, whose rounding must not enter.

    An error there counts times g in the gradient of A_log: it was a tenth of it at g = -1000.
    """
    on, cu = Target("torch", "cpu"), CuSeqlens.from_lengths((20, 96, 34))
    q, k, v = (on.normal(150, 2, 32, seed=seed) for seed in (1, 2, 3))
    closed = on.uniform(150, 2, low=0.0, high=1.0, seed=4).detach() < 0.3
    beta, initial = on.uniform(150, 2, low=0.3, high=0.7, seed=5), on.normal(3, 2, 32, 32, seed=6)
    for gate, passing in ((-8.0, 1e-3), (-20.0, 1e-8), (-1000.0, 0.0)):
        x = [q, k, v, torch.where(closed, gate, -0.01).requires_grad_(), beta]
        exact = [y.detach().double().requires_grad_() for y in x]
        settings = {"cu_seqlens": cu, "output_final_state": True}
        results = gated_delta_rule(*x, initial_state_NUKV=initial, **settings, backend="torch")
        expected = naive_gated_delta_rule(*exact, initial_state_NUKV=initial.double(), **settings)
        dg, expected_dg = grads_of(results, (x[3],))[0], grads_of(expected, (exact[3],))[0]
        assert_near(dg, expected_dg, 2e-6)
        largest = expected_dg[closed].abs().max().item()
        assert largest <= 20 * passing
        if largest:
            assert_near(dg[closed] / largest, expected_dg[closed] / largest, 5e-6)
        else:
            assert not dg[closed].any()

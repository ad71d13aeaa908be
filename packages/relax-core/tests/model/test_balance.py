"""The balance loss against transformers' formula, and what must not change it: packing, padding, recompute.

Axes: T tokens, E experts, K experts of each token.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_core.device import get_device, initialise, seed_all, shutdown
from relax_core.model import LoadBalance, MtpConfig, Qwen35Config, build_model
from relax_core.packing import PackedLayout

EXPERTS, TOP_K = 6, 2
TRUNK = (0, 1)


@pytest.fixture(scope="module", autouse=True)
def _world():
    shutdown()
    initialise("cpu", seed=7)
    yield
    shutdown()


def routed(logits_TE):
    weight_TK, expert_TK = logits_TE.softmax(-1).topk(TOP_K, dim=-1)
    return weight_TK, expert_TK


def balance_of(micro_batches, coefficient, place=TRUNK):
    """(LoadBalance after a step, gradients): micro_batches are (lengths, padding multiple, logits_TE)."""
    lengths = [n for own, *_ in micro_batches for n in own]
    tokens = [sum(lengths), sum(n - 1 for n in lengths)]
    balance = LoadBalance([place], EXPERTS, TOP_K, tokens, coefficient)

    def forward():
        weights = []
        for lengths, multiple, logits_TE in micro_batches:
            layout = PackedLayout.build(lengths, pad_to_multiple=multiple)
            one = balance.begin(layout, None)
            weight_TK, expert_TK = routed(logits_TE)
            weights.append(one.record(place, logits_TE, expert_TK, weight_TK))
        return weights

    if coefficient:
        with torch.no_grad():
            forward()
        balance.fix_frequencies()
    leaves = [logits_TE for *_, logits_TE in micro_batches]
    loss = sum(0 * weight_TK.sum() for weight_TK in forward())
    return balance, torch.autograd.grad(loss, leaves)


def read(balance):
    return {name: float(value) for name, value in balance.metrics().items()}


def test_loss_and_gradient_are_those_of_transformers():
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

    torch.manual_seed(0)
    logits_TE = torch.randn(40, EXPERTS, dtype=torch.float64, requires_grad=True)
    balance, (gradient,) = balance_of([((40,), 1, logits_TE)], 0.3)
    theirs = load_balancing_loss_func((logits_TE,), EXPERTS, TOP_K) / TOP_K
    (wanted,) = torch.autograd.grad(0.3 * theirs, logits_TE)
    # transformers takes the experts' frequencies in float32.
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-10)
    assert float(balance.metrics()["balance_loss"]) == pytest.approx(theirs.item(), rel=1e-6)


def test_even_use_costs_one_and_one_expert_for_all_costs_as_many_as_there_are():
    even_TE = torch.zeros(6, EXPERTS, dtype=torch.float64)
    even_TE[torch.arange(6), torch.arange(6)] = even_TE[torch.arange(6), (torch.arange(6) + 1) % 6] = 1e-9
    values = read(balance_of([((6,), 1, even_TE.requires_grad_())], 1.0)[0])
    assert values["balance_loss"] == pytest.approx(1)
    assert values["experts_load_max"] == values["experts_load_mean"] == 1
    assert values["experts_idle"] == 0
    same_TE = torch.full((5, EXPERTS), -50.0, dtype=torch.float64)
    same_TE[:, :TOP_K] = 0
    values = read(balance_of([((5,), 1, same_TE.requires_grad_())], 1.0)[0])
    assert values["balance_loss"] == pytest.approx(EXPERTS / TOP_K)
    assert values["experts_load_max"] == EXPERTS / TOP_K
    assert values["experts_idle"] == pytest.approx(4 / 6)


def test_without_a_coefficient_there_are_counts_and_no_gradient():
    logits_TE = torch.randn(9, EXPERTS, requires_grad=True)
    balance, (gradient,) = balance_of([((9,), 1, logits_TE)], 0.0)
    assert not gradient.any()
    assert balance.metrics().keys() == {"experts_load_max", "experts_load_mean", "experts_idle"}


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.lists(st.integers(1, 5), min_size=8, max_size=8),
    st.sets(st.integers(1, 7)),
    st.integers(0, 1),
)
def test_packing_padding_and_micro_batches_change_nothing(lengths, multiples, cuts, ahead):
    place = (ahead, 1)
    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [torch.randn(n, EXPERTS, generator=generator, dtype=torch.float64) for n in lengths]
    whole, (expected_TE,) = balance_of([(lengths, 1, torch.cat(samples).requires_grad_())], 0.7, place)

    edges = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    micro_batches = []
    for (start, end), multiple in zip(pairwise(edges), multiples, strict=False):
        own = lengths[start:end]
        padding = PackedLayout.build(own, pad_to_multiple=multiple).padded_total - sum(own)
        strange = torch.randn(padding, EXPERTS, generator=generator, dtype=torch.float64) * 9
        logits_TE = torch.cat([*samples[start:end], strange]).requires_grad_()
        micro_batches.append((own, multiple, logits_TE))
    split, gradients = balance_of(micro_batches, 0.7, place)
    assert read(split) == pytest.approx(read(whole), rel=1e-12)
    got_TE = torch.cat([g[: sum(own)] for g, (own, *_) in zip(gradients, micro_batches, strict=True)])
    torch.testing.assert_close(got_TE, expected_TE, rtol=1e-10, atol=1e-14)
    for gradient, (own, *_) in zip(gradients, micro_batches, strict=True):
        assert not gradient[sum(own) :].any()


def step_of_a_model(config, recompute, mtp=None):
    """(metrics, gradients) of two micro-batches of one step, balance loss alone."""
    seed_all(get_device("cpu"), 2)
    model = build_model(Qwen35Config.from_hf(config), recompute=recompute, mtp=mtp).double()
    model.train()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        # Draft layers of the same weights, however many.
        for layer in model.mtp.layers[1:] if model.mtp_depths else ():
            layer.load_state_dict(model.mtp.layers[0].state_dict())
    batches = [((5, 9), torch.arange(14) * 7 % 96), ((3, 1), torch.arange(4) * 5 % 96)]
    balance = LoadBalance.of(
        Qwen35Config.from_hf(config), [5, 9, 3, 1], depths=model.mtp_depths, coefficient=0.5, device="cpu"
    )

    def forward(lengths, tokens_T):
        layout = PackedLayout.build(lengths)
        hidden_TD = model(tokens_T, layout, balance=balance)
        ahead_T = [layout.shift(tokens_T, depth + 1) for depth in range(model.mtp_depths)]
        drafts = model.mtp_hidden(hidden_TD, ahead_T, layout, balance=balance)
        return sum((0 * one).sum() for one in (hidden_TD, *drafts))

    with torch.no_grad():
        for batch in batches:
            forward(*batch)
    balance.fix_frequencies()
    # Every token that counts at a layer was counted there, once for each expert it chose.
    assert all(float(share_E.sum()) == pytest.approx(1) for share_E in balance.frequency.values())
    # Both forward passes first, as a pipeline does: what is computed again belongs to the earlier one.
    losses = [forward(*batch) for batch in batches]
    for loss in losses:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return read(balance), gradients


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_counts_nothing_twice(moe_config_of, recompute):
    config = moe_config_of(mtp_num_hidden_layers=1)
    metrics, gradients = step_of_a_model(config, "none")
    again, recomputed = step_of_a_model(config, recompute)
    assert again == metrics
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_repeated_draft_layer_counts_as_several_of_its_weights_do(moe_config_of, recompute):
    metrics, gradients = step_of_a_model(moe_config_of(mtp_num_hidden_layers=3), recompute)
    repeated = MtpConfig(repeated=3)
    again, shared = step_of_a_model(moe_config_of(mtp_num_hidden_layers=1), recompute, repeated)
    assert again == metrics
    name = "mtp.layers.{}.transformer_layer.mlp.router.weight"
    wanted = sum(gradients[name.format(depth)] for depth in range(3))
    torch.testing.assert_close(shared[name.format(0)], wanted, rtol=1e-9, atol=1e-12)


def test_the_draft_layers_balance_moves_nothing_but_them(moe_config_of):
    with_drafts = step_of_a_model(moe_config_of(mtp_num_hidden_layers=1), "none")[1]
    without = step_of_a_model(moe_config_of(), "none")[1]
    draft = {name for name in with_drafts if name.startswith("mtp.")}
    assert "mtp.layers.0.transformer_layer.mlp.router.weight" in draft
    assert with_drafts.keys() - draft == without.keys()


def test_the_router_computes_in_float32_under_bfloat16(moe_config_of, monkeypatch):
    from relax_core.model.moe import MixtureOfExperts

    torch.manual_seed(1)
    model = build_model(Qwen35Config.from_hf(moe_config_of(hidden_size=256)), dtype=torch.bfloat16)
    block = model.decoder.layers[0].mlp
    assert isinstance(block, MixtureOfExperts)
    seen = {}
    block.router.register_forward_hook(lambda _m, _i, logits: seen.update(logits=logits))
    finish = block.experts.finish
    monkeypatch.setattr(block.experts, "finish", lambda s, w: seen.update(weights=w) or finish(s, w))
    x_T1D = torch.randn(50, 1, 256, dtype=torch.bfloat16) * 4
    out_T1D, _bias = block(x_T1D)
    exact_TE = x_T1D.squeeze(1).double() @ block.router.weight.double().T
    assert seen["logits"].dtype is seen["weights"].dtype is torch.float32
    assert out_T1D.dtype is torch.bfloat16
    # bfloat16 would be off by up to 2^-9 of the logits' size.
    torch.testing.assert_close(
        seen["logits"].double(), exact_TE, rtol=0, atol=1e-6 * float(exact_TE.abs().max())
    )
    exact_TK = exact_TE.softmax(-1).topk(2, dim=-1).values
    exact_TK = exact_TK / exact_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(seen["weights"].double(), exact_TK, rtol=1e-5, atol=1e-6)

"""Recomputed activations give the gradients that kept ones give, and take less memory."""

import pytest
import torch
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.packing import PackedLayout

LAYOUT = PackedLayout.build((70, 3, 20))


def gradients(config, recompute, detach, saved=None):
    model = build_model(
        Qwen35Config.from_hf(config),
        recompute=recompute,
        mtp=MtpConfig(detach_embedding=detach, detach_trunk=detach),
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens_T = torch.randint(0, 96, (LAYOUT.total,), generator=generator)

    def keep(tensor):
        if saved is not None:
            saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TD = model(tokens_T, LAYOUT)
        drafts = model.mtp_hidden(
            hidden_TD, [LAYOUT.shift(tokens_T, k + 1) for k in range(model.mtp_depths)], LAYOUT
        )
    (hidden_TD.square().sum() + sum(draft.square().sum() for draft in drafts)).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "joined"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_equal(cpu_world, config_of, recompute, detach):
    config = config_of(mtp_num_hidden_layers=2)
    kept = gradients(config, "none", detach)
    again = gradients(config, recompute, detach)
    assert kept.keys() == again.keys()
    assert any(name.startswith("mtp.layers.1") for name in kept)
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_less_is_kept(cpu_world, config_of):
    config, kept = config_of(mtp_num_hidden_layers=1), {}
    for recompute in ("none", "selective", "full"):
        kept[recompute] = []
        gradients(config, recompute, True, kept[recompute])
    total = {name: sum(sizes) for name, sizes in kept.items()}
    assert total["full"] < 0.2 * total["none"]
    assert total["full"] < total["selective"] < 0.5 * total["none"]

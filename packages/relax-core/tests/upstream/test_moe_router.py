"""Megatron's router linear without Transformer Engine."""

import pytest
import torch
from relax_core.upstream import install_corrections
from relax_core.upstream.moe_router import ROUTER_GEMM


def test_the_router_runs_without_transformer_engine():
    install_corrections()
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    inputs, weight = torch.randn(3, 4), torch.randn(2, 4)
    with ROUTER_GEMM.suspended(), pytest.raises(NameError, match="te_general_gemm"):
        router_gating_linear(inputs, weight, None, torch.float32)
    out = router_gating_linear(inputs, weight, None, torch.float32)
    torch.testing.assert_close(out, inputs @ weight.T)

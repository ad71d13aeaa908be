"""Megatron's recompute that discards an output, without Transformer Engine."""

import pytest
import torch
from relax_core.upstream.recompute import NORM_RECOMPUTE


def test_norms_are_recomputed_without_transformer_engine(cpu_world):
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    def norm(x):
        return x / x.norm()

    x = torch.randn(3, requires_grad=True)
    with NORM_RECOMPUTE.suspended(), pytest.raises(NameError, match="FP8"):
        CheckpointWithoutOutput().checkpoint(norm, x)
    piece = CheckpointWithoutOutput()
    y = piece.checkpoint(norm, x)
    out = y * y
    piece.discard_output_and_register_recompute(out)
    out[0].backward()
    expected = torch.autograd.grad((norm(x) ** 2)[0], x)[0]
    torch.testing.assert_close(x.grad, expected)

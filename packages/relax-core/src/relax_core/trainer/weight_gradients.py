"""Gradients of linear weights, added where Megatron sums them up instead of passing through a tensor.

Megatron's linear layers can do that (`gradient_accumulation_fusion`) with products from Apex, for CUDA alone;
here they come from torch, for every device. A bfloat16 gradient of its own would also round what each
micro-batch adds to a float32 sum.
"""

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn


class WeightGradients:
    """What Megatron expects under the name of Apex's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TD: Tensor, grad_TF: Tensor, sum_FD: Tensor) -> None:
        """Adds grad^T input to a float32 sum; bfloat16 products are not rounded on CUDA."""
        if input_TD.dtype != sum_FD.dtype and sum_FD.is_cuda:
            torch.addmm(sum_FD, grad_TF.t(), input_TD, out_dtype=torch.float32, out=sum_FD)
        elif input_TD.dtype != sum_FD.dtype:
            sum_FD.add_(grad_TF.t() @ input_TD)
        else:
            sum_FD.addmm_(grad_TF.t(), input_TD)

    @staticmethod
    def wgrad_gemm_accum_fp16(input_TD: Tensor, grad_TF: Tensor, sum_FD: Tensor) -> None:
        """Adds grad^T input to a sum of the same half precision."""
        sum_FD.addmm_(grad_TF.t(), input_TD)


def fuse_weight_gradients(model: nn.Module) -> None:
    """Lets the linear layers of a model add to `main_grad`, which each weight must have by now."""
    layers.fused_weight_gradient_mlp_cuda = WeightGradients
    for module in model.modules():
        if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear) and _served(module):
            module.gradient_accumulation_fusion = True


def _served(linear: nn.Module) -> bool:
    total = getattr(linear.weight, "main_grad", None)
    return isinstance(total, Tensor) and total.dtype in (torch.float32, torch.bfloat16)

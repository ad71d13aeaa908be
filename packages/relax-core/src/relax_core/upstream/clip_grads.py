"""Megatron's gradient norm and clipping without Transformer Engine or Apex: one tensor at a time."""

from types import ModuleType
from typing import Any

import torch

from relax_core.upstream.correction import Correction, Undo
from relax_core.upstream.distributed_optimizer import uses_torch_adam


def _norm(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """float32 [1]: the norm of all tensors together, without waiting for the device."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.stack(norms).float().norm().view(1), None


def _scale(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], scale: float) -> None:
    """Writes scale times the first tensors to the second ones."""
    sources, targets = tensor_lists
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))


def _all_at_once(module: ModuleType) -> Undo:
    before = {name: getattr(module, name) for name in ("l2_norm_impl", "multi_tensor_scale_impl")}
    vars(module).update(l2_norm_impl=_norm, multi_tensor_scale_impl=_scale)
    return lambda: vars(module).update(before)


GRADIENT_PASSES = Correction(
    name="clip-grads-passes",
    module="megatron.core.optimizer.clip_grads",
    wrong="The norm copies one number per parameter to the host, each time waiting for the device, and "
    "clipping makes a second copy of every gradient.",
    versions=">=0.16.1,<0.17",
    apply=_all_at_once,
    test="packages/relax-core/tests/upstream/test_clip_grads.py::test_the_norm_stays_on_the_device",
    needed=uses_torch_adam,
)

"""Stands in for SGLang's compiled kernels in CPU server processes; see ``relax_rollout.engines.sglang.cpu``.

This folder is on the path of those processes only, so it can never hide the real package.
"""

from typing import Any

import torch
from relax_rollout.engines.sglang.cpu import ops

_names: Any = torch.ops.sgl_kernel
# No ``convert_weight_packed``: by its absence SGLang takes it that there is no AMX, and packs no weights.
_names.fused_gdn_gating_cpu = ops.fused_gdn_gating
_names.fused_sigmoid_gating_delta_rule_update_cpu = ops.fused_sigmoid_gating_delta_rule_update
_names.fused_qk_gemma_rmsnorm_cpu = ops.fused_qk_gemma_rmsnorm
_names.fused_qk_gemma_rmsnorm_with_gate_cpu = ops.fused_qk_gemma_rmsnorm_with_gate
_names.fused_sigmoid_mul_cpu = ops.fused_sigmoid_mul

"""Qwen3.5 on megatron-core: our modules, plugged into Megatron's block and layer through specs."""

from relax_core.model.build import build_model
from relax_core.model.config import Qwen35Config, UnsupportedModelError
from relax_core.model.head import TokenLogProbs
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.qwen35 import Qwen35Model

__all__ = [
    "MtpConfig",
    "Qwen35Config",
    "Qwen35Model",
    "TokenLogProbs",
    "UnsupportedModelError",
    "build_model",
]

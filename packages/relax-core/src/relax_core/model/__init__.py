"""Qwen3.5 on megatron-core: our modules, plugged into Megatron's block and layer through specs.

Importing this package must stay free of torch and Megatron: `relax-train --help` reads its config sections.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names

if TYPE_CHECKING:
    from relax_core.model.balance import LoadBalance
    from relax_core.model.build import build_model
    from relax_core.model.config import Qwen35Config, UnsupportedModelError
    from relax_core.model.mtp_config import MtpConfig
    from relax_core.model.placement import named_weights
    from relax_core.model.qwen35 import Qwen35Model
__all__ = [
    "LoadBalance",
    "MtpConfig",
    "Qwen35Config",
    "Qwen35Model",
    "UnsupportedModelError",
    "build_model",
    "named_weights",
]

__getattr__ = lazy_names(
    __name__,
    {
        "LoadBalance": "balance",
        "MtpConfig": "mtp_config",
        "Qwen35Config": "config",
        "Qwen35Model": "qwen35",
        "UnsupportedModelError": "config",
        "build_model": "build",
        "named_weights": "placement",
    },
)

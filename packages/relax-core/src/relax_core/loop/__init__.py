"""The run loop: sample, score, train, update, evaluate, save.

Importing this package must stay free of torch: `relax-train --help` reads its config sections.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names
from relax_core.loop.config import (
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TeacherConfig,
)

if TYPE_CHECKING:
    from relax_core.loop.start import run

__all__ = [
    "CheckpointConfig",
    "CriticConfig",
    "EvalConfig",
    "RewardConfig",
    "RolloutConfig",
    "SftConfig",
    "TeacherConfig",
    "run",
]

__getattr__ = lazy_names(__name__, {"run": "start"})

"""The run loop: sample, score, train, update, evaluate, save.

Importing this package must stay free of torch: `relax-train --help` reads its config sections.
"""

from relax_core.loop.config import CheckpointConfig, EvalConfig, RewardConfig, RolloutConfig, SftConfig

__all__ = ["CheckpointConfig", "EvalConfig", "RewardConfig", "RolloutConfig", "SftConfig"]

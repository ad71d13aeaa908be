"""The run loop: sample, score, train, update, evaluate, save.

Importing this package must stay free of torch: `relax-train --help` reads its config sections.
"""

from typing import TYPE_CHECKING, Any

from relax_core.loop.config import CheckpointConfig, EvalConfig, RewardConfig, RolloutConfig, SftConfig

if TYPE_CHECKING:
    from relax_core.loop.start import run

__all__ = ["CheckpointConfig", "EvalConfig", "RewardConfig", "RolloutConfig", "SftConfig", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relax_core.loop.start import run

    return run

"""Sampling for reinforcement learning: engines, weight receiving, rewards, filters."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from relax_rollout.engine import (
    EngineError,
    EngineStateError,
    Health,
    PackedLoading,
    RolloutEngine,
    SharesRefusedError,
    TransferError,
    WeightsLostError,
    WeightUpdateError,
)
from relax_rollout.registry import available_engines, create_engine
from relax_rollout.requests import (
    SEED_LIMIT,
    Completion,
    DraftCounts,
    FinishReason,
    InvalidRequestError,
    PauseMode,
    Request,
    SamplingParams,
)
from relax_rollout.seeds import derive_seed

if TYPE_CHECKING:
    from relax_rollout.digest import tensor_digest

__version__ = version("relax-rollout")

__all__ = [
    "SEED_LIMIT",
    "Completion",
    "DraftCounts",
    "EngineError",
    "EngineStateError",
    "FinishReason",
    "Health",
    "InvalidRequestError",
    "PackedLoading",
    "PauseMode",
    "Request",
    "RolloutEngine",
    "SamplingParams",
    "SharesRefusedError",
    "TransferError",
    "WeightUpdateError",
    "WeightsLostError",
    "available_engines",
    "create_engine",
    "derive_seed",
    "tensor_digest",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: rewards start without it."""
    if name == "tensor_digest":
        from relax_rollout.digest import tensor_digest

        return tensor_digest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

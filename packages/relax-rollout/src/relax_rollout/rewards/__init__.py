"""Rewards: judging completions by rule, symbolically, or with the user's own function."""

from relax_rollout.rewards.load import load_reward
from relax_rollout.rewards.results import Messages, Reward, RewardInput, RewardResult
from relax_rollout.rewards.runner import RewardLimits, RewardRunner

__all__ = [
    "Messages",
    "Reward",
    "RewardInput",
    "RewardLimits",
    "RewardResult",
    "RewardRunner",
    "load_reward",
]

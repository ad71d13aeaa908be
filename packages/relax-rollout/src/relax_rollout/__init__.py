"""Sampling for reinforcement learning: engines, weight receiving, rewards, filters."""

from importlib.metadata import version

__version__ = version("relax-rollout")

"""The embedded engine, on a model of the transformers library."""

from relax_rollout.engines.transformers.config import ModelDtype, TransformersConfig
from relax_rollout.engines.transformers.engine import TransformersEngine, create

__all__ = ["ModelDtype", "TransformersConfig", "TransformersEngine", "create"]

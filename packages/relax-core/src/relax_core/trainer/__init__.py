"""The trainer: one model, its optimizer, and the update of one batch.

Importing this package must stay free of torch: `relax-train --help` reads `TrainerConfig`.
"""

from relax_core.trainer.config import TrainerConfig

__all__ = ["TrainerConfig"]

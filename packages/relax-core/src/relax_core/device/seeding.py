"""Seeds the host's generators."""

import random

import numpy as np
import torch


def seed_host(seed: int) -> None:
    """Seeds python, numpy (legacy generator) and torch's CPU generator; 0 <= seed < 2**32."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

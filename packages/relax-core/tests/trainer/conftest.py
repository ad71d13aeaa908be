"""A trainer of the small model."""

import pytest
import torch
from relax_core.device import get_device, seed_all
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import Sample
from relax_core.trainer.trainer import Trainer


@pytest.fixture
def make_trainer(cpu_world, config_of, moe_config_of):
    """Makes trainers with the same random weights; keywords are settings of `TrainerConfig`."""

    def make(
        *, mtp_layers: int = 1, steps: int = 10, mtp: MtpConfig | None = None, moe: bool = False, **settings
    ) -> Trainer:
        seed_all(get_device("cpu"), 5)
        sizes = Qwen35Config.from_hf((moe_config_of if moe else config_of)(mtp_num_hidden_layers=mtp_layers))
        mtp = mtp or MtpConfig()
        config = TrainerConfig(**{"lr": 1e-2, "precision": "fp32", **settings})
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        model = build_model(sizes, mtp=mtp, recompute=config.recompute, dtype=dtype)
        return Trainer(model, config, mtp, device=torch.device("cpu"), optimizer_steps=steps)

    return make


@pytest.fixture
def samples() -> list[Sample]:
    """Ragged samples with uneven masks: one has no target, one a single token."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, targets in ((9, 4), (1, 0), (17, 16), (5, 0), (12, 3)):
        mask_L = torch.zeros(length)
        mask_L[length - targets :] = 1
        made.append(Sample(torch.randint(3, 96, (length,), generator=generator), mask_L, len(made)))
    return made

"""Trains the rows that are named on a CUDA device; prints where in a step the host waits for the device.

A process of its own: the cpu device answers torch.cuda's calls in the process that it was initialised in.
"""

import json
import sys
import traceback

import torch
from relax_core.device import initialise
from relax_core.testing import Row
from relax_core.testing.task import step_samples
from relax_core.testing.training import make_objective, make_trainer

world = initialise("cuda", seed=7)
for settings in json.loads(sys.argv[1]):
    row = Row(**settings)
    trainer, _ = make_trainer(row, world)
    samples, objective = step_samples(row)[0], make_objective(row)
    # The first steps make what is kept for later ones.
    for _ in range(2):
        trainer.step(samples, objective)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(samples, objective)
    except RuntimeError as wait:
        print(row.name, wait, *traceback.extract_tb(wait.__traceback__)[-3:], flush=True)
    torch.cuda.set_sync_debug_mode("default")
print("done")

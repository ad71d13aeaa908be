"""What every process of a cluster does first."""

import logging
import os
import sys

from relax_core.config.root import RelaxConfig


def prepare_process(config: RelaxConfig, threads: int) -> None:
    """Threads as in a run of one process, and a log that Ray keeps beside its own.

    Args:
        config: the run's.
        threads: of torch's operators.
    """
    import torch

    logging.basicConfig(stream=sys.stderr, level=config.run.log_level.upper())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)

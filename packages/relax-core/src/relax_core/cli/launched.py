"""`relax-train` under torchrun: every rank runs the command, the first one speaks and writes."""

import os
import sys
import time
import traceback
from collections.abc import Sequence

from relax_core.config.root import RelaxConfig

# A launcher ends all ranks as soon as one has failed, and the first has to say why.
_FIRST_SPEAKS_S = 10.0


def launched_ranks() -> int:
    """Ranks that a launcher started, this process among them; 1 if none did."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def launched_rank() -> int:
    """This process among them."""
    return int(os.environ.get("RANK", "0")) if launched_ranks() > 1 else 0


def with_launched_ranks(flags: Sequence[str]) -> list[str]:
    """The flags with `cluster.mode torchrun` and the number of ranks, where they say nothing else."""
    if launched_ranks() == 1:
        return list(flags)
    said = {flag.partition("=")[0] for flag in flags}
    added = {"--cluster.mode": "torchrun", "--cluster.trainer_ranks": str(launched_ranks())}
    return [*flags, *(part for name, value in added.items() if name not in said for part in (name, value))]


def follow(config: RelaxConfig) -> int:
    """One of the other ranks, until the run ends; the exit code."""
    import logging

    # What all ranks have to say, the first one says.
    logging.disable(logging.WARNING)
    try:
        from relax_core.loop.launched import follow as follow_calls

        follow_calls(config)
    except (ValueError, OSError):
        return fail(1)
    except Exception:
        print(f"rank {launched_rank()}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return fail(1)
    return 0


def fail(code: int) -> int:
    """`code`, after the first rank had time to say what failed."""
    time.sleep(_FIRST_SPEAKS_S)
    return code

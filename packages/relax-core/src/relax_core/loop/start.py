"""`run`: one run of `relax-train`, from a resolved config and a locked directory to its end."""

from typing import Literal

from relax_core.config.root import RelaxConfig
from relax_core.loop.drive import drive, last_checkpoint
from relax_core.loop.rl import open_rl
from relax_core.loop.session import open_session
from relax_core.loop.sft import open_sft
from relax_core.run import Recorder, RunDirectory


def run(config: RelaxConfig, directory: RunDirectory, *, resume: bool) -> Literal["finished", "interrupted"]:
    """Trains as `config` says and leaves everything in `directory`.

    Args:
        config: the resolved config.
        directory: the run's, locked by the caller.
        resume: go on from the newest checkpoint there, or from the start if there is none yet.

    Raises:
        ValueError: a checkpoint, the data or a setting cannot be used; the text says what to do.
    """
    step = last_checkpoint(directory) if resume else 0
    with open_session(config) as session:
        recorder = Recorder(directory, config, resume_step=step if resume else None)
        open_loop = open_sft if config.algorithm.algorithm.loop == "sft" else open_rl
        with recorder, open_loop(config, session, recorder) as loop:
            return drive(loop, config, session, directory, recorder, resume_step=step)

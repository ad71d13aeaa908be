"""`run`: one run of `relax-train`, from a resolved config and a locked directory to its end."""

from contextlib import nullcontext
from typing import Literal

from relax_core.config.root import RelaxConfig
from relax_core.loop.drive import drive, last_checkpoint
from relax_core.loop.interruption import Interruption
from relax_core.loop.rl import open_rl
from relax_core.loop.session import open_session
from relax_core.loop.sft import open_sft
from relax_core.run import Recorder, RunDirectory
from relax_core.trainer.checkpoint import load_checkpoint


def run(
    config: RelaxConfig, directory: RunDirectory, *, resume: bool, interruption: Interruption | None = None
) -> Literal["finished", "interrupted"]:
    """Trains as `config` says and leaves everything in `directory`.

    Args:
        config: the resolved config.
        directory: the run's, locked by the caller.
        resume: go on from the newest checkpoint there, or from the start if there is none yet.
        interruption: entered by the caller; one of the run's own if None.

    Raises:
        ValueError: a checkpoint, the data or a setting cannot be used; the text says what to do.
        KeyboardInterrupt: the run was asked to end while it started, or asked twice.
    """
    step = last_checkpoint(directory) if resume else 0
    recorder = Recorder(directory, config, resume_step=step if resume else None)
    open_loop = open_sft if config.algorithm.algorithm.loop == "sft" else open_rl
    with (
        Interruption() if interruption is None else nullcontext(interruption) as asked,
        open_session(config) as session,
        open_loop(config, session, recorder) as loop,
    ):
        path = directory.checkpoints / f"step_{step}"
        loop.begin(step, load_checkpoint(path, session.trainer) if step else None)
        # What cannot be resumed has been refused by now: only from here on is an earlier run changed.
        with recorder:
            if resume:
                directory.reopen(config)
            return drive(loop, config, session, directory, recorder, asked, resume_step=step)

"""`run`: one run of `relax-train`, from a resolved config and a locked directory to its end."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from relax_core.config.root import RelaxConfig
from relax_core.loop.changes import refuse_changes
from relax_core.loop.drive import Loop, drive, last_checkpoint, settings
from relax_core.loop.interruption import Interruption
from relax_core.loop.memory import memory_errors
from relax_core.loop.mfu import peak_flops
from relax_core.loop.pairs import open_pairs
from relax_core.loop.policy import Policy
from relax_core.loop.rl import open_rl
from relax_core.loop.session import Session, open_session
from relax_core.loop.sft import open_sft
from relax_core.run import Recorder, RunDirectory
from relax_core.trainer.folders import tidy_checkpoints


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
    if step > config.run.steps:
        raise ValueError(
            f"run.steps is {config.run.steps}, but {directory.path} has done {step} steps: give that or more"
        )
    recorder = Recorder(directory, config, resume_step=step if resume else None)
    openers: dict[str, Callable[..., AbstractContextManager[Loop]]] = {
        "rl": open_rl,
        "sft": open_sft,
        "pairs": open_pairs,
    }
    open_loop = openers[config.algorithm.algorithm.loop]
    with (
        Interruption() if interruption is None else nullcontext(interruption) as asked,
        memory_errors(),
        _open_session(config) as session,
        open_loop(config, session, recorder) as loop,
    ):
        loop.begin(step, _load(directory, step, config, session) if step else None)
        # What cannot be resumed has been refused by now: only from here on is an earlier run changed.
        recorder.peak_flops = peak_flops(config, session.policy.chip)
        with recorder:
            if resume:
                directory.reopen(config)
                tidy_checkpoints(directory.checkpoints, keep=config.checkpoint.keep)
            return drive(loop, config, session, directory, recorder, asked, resume_step=step)


def _load(
    directory: RunDirectory, step: int, config: RelaxConfig, session: Session[Policy]
) -> Mapping[str, Any]:
    state = session.policy.load(directory.checkpoints / f"step_{step}")
    refuse_changes(state["settings"], settings(config, directory), where=str(directory.config))
    return state


def _open_session(config: RelaxConfig) -> AbstractContextManager[Session[Any]]:
    if config.cluster.mode == "inline":
        return open_session(config)
    if config.cluster.mode == "torchrun":
        from relax_core.loop.launched import open_launched_session

        return open_launched_session(config)
    from relax_core.cluster.environment import set_environment, with_address

    config = config.model_copy(update={"cluster": with_address(config.cluster)})
    set_environment(config.cluster)
    from relax_core.cluster.session import open_cluster_session

    return open_cluster_session(config)

"""What this machine must have before a run may make or change anything: device, checkpoint, data, reward."""

from collections.abc import Iterator
from pathlib import Path

from relax_core.assets import locate
from relax_core.cli.launched import launched_ranks
from relax_core.cli.plan import shape_refusals
from relax_core.config.problems import ConfigError, Problem
from relax_core.config.root import RelaxConfig
from relax_core.data.problems import DataError
from relax_core.data.sources import find_files, refuse_shared_files
from relax_core.run.trackers import missing_package, wanted_trackers


def refuse_unready(config: RelaxConfig) -> None:
    """Looks for what the settings name, all of it, without reading models or rows.

    Raises:
        ConfigError: with everything that is not there.
    """
    problems = [
        *_processes(config),
        *_device(config),
        *_models(config),
        *shape_refusals(config),
        *_data(config),
        *_reward(config),
        *_trackers(config),
    ]
    if problems:
        raise ConfigError(problems)


def _processes(config: RelaxConfig) -> Iterator[Problem]:
    started, mode = launched_ranks(), config.cluster.mode
    wanted = config.cluster.trainer_ranks if mode == "torchrun" else 1
    if started != wanted:
        yield Problem(
            ("cluster", "trainer_ranks") if mode == "torchrun" else ("cluster", "mode"),
            f"a launcher started {started} processes" if started > 1 else "no launcher started this process",
            given=str(wanted) if mode == "torchrun" else mode,
            origin=f"WORLD_SIZE={started}" if started > 1 else None,
            allowed=f"torchrun --nproc-per-node {wanted} -m relax_core ..."
            if mode == "torchrun"
            else "torchrun, or relax-train without a launcher",
        )


def _device(config: RelaxConfig) -> Iterator[Problem]:
    wanted = config.run.device
    if wanted in ("auto", "cpu"):
        return
    from relax_core.device import UnknownDeviceError, get_device

    try:
        if get_device(wanted).available():
            return
    except UnknownDeviceError as error:
        why = str(error)
    else:
        doctor = "relax-npu doctor" if wanted == "npu" else "relax-train --doctor"
        why = f"this machine has no {wanted} device that works; `{doctor}` tells more"
    yield Problem(("run", "device"), why, given=wanted, allowed="auto or cpu")


def _models(config: RelaxConfig) -> Iterator[Problem]:
    for name in ("path", "reference_path"):
        given = getattr(config.model, name)
        if given is None:
            continue
        try:
            found = locate(given).is_dir()
            why = "there is no such directory, and nothing is downloaded"
        except ValueError as error:
            found, why = False, str(error)
        if not found:
            yield Problem(
                ("model", name),
                why,
                given=given,
                allowed="a Hugging Face directory with config.json, safetensors and tokenizer",
            )


def _data(config: RelaxConfig) -> Iterator[Problem]:
    data = config.data
    named = (
        (("data", "path"), data.path),
        (("data", "eval_path"), data.eval_path),
        *((("data", "mixture"), given) for given in data.mixture),
        *((("eval", "sets", name), given) for name, given in config.eval.sets.items()),
    )
    complete = True
    for place, given in named:
        try:
            if given is not None:
                find_files(given)
        except DataError as error:
            complete = False
            yield Problem(place, str(error), given=given)
    if complete:
        try:
            refuse_shared_files((data.path, *data.mixture))
        except DataError as error:
            yield Problem(("data", "mixture"), str(error))
    template: Path | None = data.chat_template
    if template is not None and not template.expanduser().is_file():
        yield Problem(("data", "chat_template"), "there is no such file", given=str(template))


def _reward(config: RelaxConfig) -> Iterator[Problem]:
    if config.algorithm.algorithm.loop != "rl":
        return
    from relax_rollout.rewards import load_reward

    try:
        load_reward(config.reward.function)
    except ValueError as error:
        yield Problem(("reward", "function"), str(error), given=config.reward.function)


def _trackers(config: RelaxConfig) -> Iterator[Problem]:
    for name in wanted_trackers(config.run):
        missing = missing_package(name)
        if missing is None:
            continue
        if name in config.run.trackers:
            yield Problem(("run", "trackers"), missing, given=name)
        else:
            yield Problem((), f"{missing}; or unset the key", origin="WANDB_API_KEY")

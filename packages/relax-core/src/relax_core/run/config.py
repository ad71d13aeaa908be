"""Settings of the run itself: name, place, length, device and what is logged."""

from pathlib import Path
from typing import Annotated, Literal

from relax_core.config.plugin import PluginName
from relax_core.config.section import Section, setting


class RunConfig(Section):
    """Where a run lives, how long it is and on what it runs."""

    name: str | None = setting(
        None,
        "Name of the run directory; null makes one of the recipe's name and the time.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    dir: Path = setting(Path("runs"), "Folder that holds the run directories.")
    steps: int = setting(100, "Steps of the run: batches trained on.", unit="steps", ge=1)
    seed: int = setting(0, "Seed of everything random in the run.", ge=0, lt=2**32)
    device: Annotated[str, PluginName("relax_core.devices", "auto", "cpu", "cuda", "npu")] = setting(
        "auto", "Device that trains and samples; auto takes npu, then cuda, then cpu."
    )
    deterministic: bool = setting(
        False,
        "The same bits from run to run on accelerators too, by slower kernels; the CPU gives them anyway.",
    )
    threads: int = setting(
        0, "CPU threads of torch's operators; 0 takes every core.", unit="threads", ge=0, le=1024
    )
    progress: Literal["auto", "live", "plain", "none"] = setting(
        "auto", "Progress on the terminal; auto is live on a terminal and plain lines elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe messages that reach log.txt; the terminal shows warnings and errors."
    )
    samples_per_step: int = setting(
        16, "Completions written to samples.jsonl each step.", unit="completions", ge=0
    )
    trace: bool = setting(
        False,
        "Writes trace.json, the timeline of steps, phases, rewards and weight updates for ui.perfetto.dev.",
    )
    profile_from: int = setting(
        0,
        "First step under the device's profiler on every trainer rank, which writes profile/step_<n>.json "
        "(npu: a folder step_<n>_...); 0 is off.",
        ge=0,
    )
    profile_steps: int = setting(1, "Steps under the profiler.", unit="steps", ge=1, le=100)
    memory_from: int = setting(
        0,
        "First step whose allocations are written to memory/step_<n>.pickle, for pytorch.org/memory_viz "
        "(cuda, npu); 0 is off.",
        ge=0,
    )
    memory_steps: int = setting(1, "Steps whose allocations are written.", unit="steps", ge=1, le=100)
    memory_snapshot: bool = setting(
        False,
        "Keeps who allocated what all the time, and writes memory/out_of_memory.pickle when the trainer's "
        "memory runs out (cuda, npu); costs some per cent of speed.",
    )
    trackers: tuple[
        Annotated[str, PluginName("relax_core.trackers", "wandb", "clearml", "prometheus")], ...
    ] = setting(
        (),
        "Where the numbers of each step go beside TensorBoard; wandb is added where WANDB_API_KEY is set.",
    )
    tracker_project: str = setting("relax", "Project of Weights & Biases and ClearML.", min_length=1)
    prometheus_host: str = setting(
        "127.0.0.1", "Address that the endpoint of the tracker prometheus listens on.", min_length=1
    )
    prometheus_port: int = setting(9464, "Port of that endpoint; 0 takes a free one.", ge=0, lt=2**16)

"""Which way weights take to the engines, as far as settings tell; a run tries it and logs what it found."""

from pathlib import Path

from relax_core.config.root import RelaxConfig

TRANSPORTS = {"auto": "auto", "ipc": "local", "host": "files", "broadcast": "broadcast", "disk": "files"}
"""`rollout.update_path` as relax_rollout's engine sglang calls it."""


def update_folder(config: RelaxConfig) -> Path:
    """Where the path disk leaves its files."""
    given = config.rollout.update_folder
    return Path(config.run.dir).absolute() / ".weights" if given is None else Path(given)


def expected_path(config: RelaxConfig) -> str:
    """What will most likely happen, and why, in words."""
    rollout, cluster = config.rollout, config.cluster
    if cluster.mode != "ray" and rollout.engine == "transformers":
        return "weights stay in the process, of which the engine is a part"
    asked = rollout.update_path
    if asked == "disk":
        return f"weights travel by disk, as asked for: files in {update_folder(config)}"
    if asked in ("host", "broadcast"):
        return f"weights travel by {asked}, as asked for"
    if cluster.mode == "ray":
        where, why = _on_ray(config)
    elif rollout.urls:
        where, why = "ipc, else broadcast", "a run tries whether the servers of rollout.urls see its memory"
    elif config.run.device == "cpu":
        where, why = "ipc", "trainer and servers share this host's memory"
    elif config.sglang.tensor == 1:
        where, why = "ipc", "trainer and servers are on one device, whose memory they share"
    else:
        where, why = "ipc", "trainer and servers share this host's memory, which reaches all of their devices"
    return f"weights travel by {where}: {why}"


def _on_ray(config: RelaxConfig) -> tuple[str, str]:
    cluster = config.cluster
    if config.run.device != "cpu" and cluster.placement == "colocate":
        return "ipc", "engines and ranks are on the same devices, whose memory they share"
    if cluster.address is None:
        return "ipc", "a Ray of the run's own has one host, whose memory all share"
    return "ipc, else broadcast", "a run finds out whether Ray puts all on one host"

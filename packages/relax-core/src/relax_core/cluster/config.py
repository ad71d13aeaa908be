"""Settings of the cluster: which processes there are, and where."""

from typing import Literal, Self

from pydantic import model_validator

from relax_core.config.section import Section, SettingError, setting


class ClusterConfig(Section):
    """Processes of a run and where they run."""

    mode: Literal["inline", "torchrun", "ray"] = setting(
        "inline",
        "Everything in one process; ranks that a launcher started, the first of which samples; or trainer "
        "ranks, engines and rewards as Ray actors. Under torchrun it is torchrun by itself.",
    )
    placement: Literal["colocate", "async", "hybrid"] = setting(
        "colocate",
        "colocate: engines and trainer take turns on the same devices. async: each has devices of its own, "
        "and sampling goes on while the trainer trains. hybrid: as async, and the trainer's devices sample "
        "too until it needs them.",
    )
    address: str | None = setting(
        None,
        "Address of a Ray cluster to join, such as auto or host:6379; null joins the one that RAY_ADDRESS "
        "names, as in a job of Ray, or starts a Ray of the run's own on this machine and ends it with the "
        "run.",
        min_length=1,
    )
    trainer_ranks: int = setting(
        1, "Processes that train one model together; parallel says how.", unit="ranks", ge=1, le=16_384
    )
    engines: int = setting(1, "Engines, each a process that samples.", unit="engines", ge=1, le=16_384)
    max_staleness: int = setting(
        1,
        "Versions that the weights which drew a completion's first token may be older than those trained; "
        "with placement colocate nothing is stale.",
        unit="versions",
        ge=1,
    )
    stream: Literal["ray", "transfer_queue"] = setting(
        "ray",
        "How samples get to the trainer ranks: through Ray's shared memory, or through the storage units of "
        "the package transferqueue, which spread them over the hosts of a cluster.",
    )
    max_restarts: int = setting(
        3, "Times that one call starts dead processes anew before the run gives up.", unit="restarts", ge=0
    )
    engine_timeout_s: float = setting(
        300.0,
        "Time in which an engine must answer any call but sampling; it is asked while it samples too. One "
        "that does not is taken to hang and started anew. Longer than its longest forward pass and the "
        "loading of one bucket of weights; it may take six times as long to start.",
        unit="seconds",
        gt=0,
        le=1e6,
    )
    rank_timeout_s: float = setting(
        1800.0,
        "Time in which every trainer rank must answer a call, such as an optimizer step or the scores of a "
        "batch. Ranks that do not are taken to hang, and the trainer starts anew from its last step. Longer "
        "than the longest step; starting, loading, saving and exporting may take six times as long.",
        unit="seconds",
        gt=0,
        le=1e6,
    )
    object_store_gib: float | None = setting(
        None,
        "Shared memory of a Ray of the run's own; null takes what two copies of the weights need.",
        unit="GiB",
        gt=0.07,
    )

    @model_validator(mode="after")
    def _only_ray_has_engines_of_its_own(self) -> Self:
        if self.mode == "ray":
            return self
        only_ray = ("placement", "address", "engines", "stream", "object_store_gib")
        for name in (*only_ray, *(("trainer_ranks",) if self.mode == "inline" else ())):
            given, default = getattr(self, name), type(self).model_fields[name].default
            if given != default:
                why = {
                    "inline": "one process does everything",
                    "torchrun": "the launcher's ranks train and the first one samples",
                }[self.mode]
                idle = "null" if default is None else str(default)
                raise SettingError(
                    name,
                    f"{name} is {given!r} and mode is {self.mode}: {why}; set mode to ray, "
                    f"or {name} to {idle}",
                    given=given,
                    allowed=f"{idle}, or mode ray",
                    nearest=default,
                )
        return self

    @model_validator(mode="after")
    def _own_ray_has_a_store(self) -> Self:
        if self.address is not None and self.object_store_gib is not None:
            raise SettingError(
                "object_store_gib",
                "object_store_gib is set and address too: a Ray that is joined has its memory already; set "
                "object_store_gib to null",
                given=self.object_store_gib,
                allowed="null, or address null",
                nearest=None,
            )
        return self

    @model_validator(mode="after")
    def _hybrid_has_engines_of_both_kinds(self) -> Self:
        if self.placement == "hybrid" and self.engines <= self.trainer_ranks:
            raise SettingError(
                "placement",
                f"placement is hybrid with {self.engines} engines and {self.trainer_ranks} trainer ranks: "
                "the first engines share the trainer's devices, one each, and none is left with a device of "
                f"its own; set engines to {self.trainer_ranks + 1} or more, or placement to colocate",
                given="hybrid",
                allowed=f"colocate or async, or engines {self.trainer_ranks + 1} or more",
                nearest="colocate",
            )
        return self

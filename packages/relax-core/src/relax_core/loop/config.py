"""Settings of the run loop: sampling, rewards, evaluation, supervised batches and checkpoints."""

import re
from typing import Annotated, Literal, Self

from pydantic import model_validator

from relax_core.config.plugin import PluginName
from relax_core.config.section import Section, SettingError, setting


class RolloutConfig(Section):
    """How completions are sampled for one step."""

    engine: Annotated[str, PluginName("relax_rollout.engines", "transformers")] = setting(
        "transformers", "Engine that samples."
    )
    prompts_per_step: int = setting(
        32, "Prompts whose groups make one batch.", unit="prompts", ge=1, le=65_536
    )
    samples_per_prompt: int = setting(
        8, "Completions sampled for each prompt: the size of a group.", unit="completions", ge=1, le=4096
    )
    max_new_tokens: int = setting(1024, "Length at which a completion is cut.", unit="tokens", ge=1)
    temperature: float = setting(1.0, "Sampling temperature; 0 takes the likeliest token.", ge=0)
    top_p: float = setting(
        1.0,
        "Samples from the smallest set of tokens of this total probability; 1 is off. Log-probs and "
        "importance weights stay those of the whole distribution.",
        gt=0,
        le=1,
    )
    top_k: int = setting(
        0,
        "Samples from this many likeliest tokens; 0 is off. Log-probs stay those of the whole distribution.",
        unit="tokens",
        ge=0,
        lt=2**31,
    )
    max_batch_size: int = setting(
        256, "Sequences one engine decodes together at most.", unit="sequences", ge=1
    )
    servers: int = setting(1, "Servers that the engine sglang starts.", unit="servers", ge=1)
    urls: tuple[str, ...] = setting(
        (), "Servers of the engine sglang that run already, by URL; none are started then."
    )
    router: str | None = setting(
        None,
        "sglang-router in front of the servers of the engine sglang: start, or the URL of one that runs; "
        "null shares requests out without one.",
    )
    draft_tokens: int = setting(
        0,
        "Tokens that the checkpoint's MTP layer drafts per step of the engine sglang; 0 is off.",
        unit="tokens",
        ge=0,
        le=16,
    )
    update_path: Literal["auto", "ipc", "host", "broadcast", "disk"] = setting(
        "auto",
        "How weights come to the engines. ipc: through memory that both share, a device's or a host's. "
        "host: through the host's memory, slower, where a device has no room for whole weights beside. "
        "broadcast: by a collective across devices and hosts. disk: by files in update_folder. auto: the "
        "first of ipc and broadcast that works; the log and --plan say which, and why.",
    )
    update_folder: str | None = setting(
        None,
        "Folder of update_path disk, on a file system that trainer and engines see under this name; null "
        "is one in run.dir.",
        min_length=1,
    )
    dynamic_sampling: bool = setting(
        False, "Drops groups whose rewards are all equal and samples new prompts in their place (DAPO)."
    )
    over_sampling: float = setting(
        1.0,
        "Prompts sampled per prompt wanted, in each round of dynamic sampling or with early_abort.",
        ge=1,
        le=100,
    )
    early_abort: Literal["off", "restart", "continue"] = setting(
        "off",
        "Stops the other prompts of over_sampling once enough groups are whole. They come first in the next "
        "step: begun anew (restart), or going on under its weights with the tokens they have (continue: "
        "partial rollouts). What is stopped depends on time, and so do the bits of the run.",
    )
    partial_versions: int = setting(
        2,
        "With early_abort continue, versions that the oldest token of a partial rollout may be older than "
        "the weights that go on; it is begun anew otherwise.",
        unit="versions",
        ge=0,
    )
    request_timeout_s: float | None = setting(
        None,
        "Time after which one turn of a completion is ended, as if it were cut; null is no limit.",
        unit="seconds",
        gt=0,
        le=1e6,
    )
    group_timeout_s: float | None = setting(
        None,
        "Time after which the completions of one prompt, or of prompts sampled together, are ended.",
        unit="seconds",
        gt=0,
        le=1e6,
    )
    max_refills: int = setting(
        8,
        "Rounds of dynamic sampling after which a step goes on with the groups it has.",
        unit="rounds",
        ge=0,
    )
    warn_logprob_gap: float | None = setting(
        0.1,
        "Mean absolute difference between trainer and rollout log-probs above which a step warns; null is "
        "off.",
        unit="nats",
        gt=0,
    )
    max_logprob_gap: float | None = setting(
        None,
        "Mean absolute difference between trainer and rollout log-probs above which the run stops; null is "
        "off.",
        unit="nats",
        gt=0,
    )
    max_logprob_gap_of_token: float | None = setting(
        None, "The same for the token that differs most; null is off.", unit="nats", gt=0
    )
    max_rollout_kl: float | None = setting(
        None,
        "Mean KL divergence of the engine's distribution from the trainer's above which the run stops; null "
        "is off.",
        unit="nats",
        gt=0,
    )

    @model_validator(mode="after")
    def _only_sglang_has_servers(self) -> Self:
        given = {
            "servers": self.servers > 1,
            "urls": bool(self.urls),
            "router": self.router is not None,
            "draft_tokens": self.draft_tokens > 0,
        }
        unused = [name for name, there in given.items() if there]
        if unused and self.engine == "transformers":
            raise SettingError(
                "engine",
                f"{', '.join(unused)} cannot be used by the engine transformers: set engine to sglang, or "
                "leave out what belongs to it",
                given="transformers",
                allowed=f"sglang, or without {', '.join(unused)}",
                nearest="sglang",
            )
        return self

    @model_validator(mode="after")
    def _servers_that_run_are_named_alone(self) -> Self:
        wrong = [url for url in self.urls if not re.match(r"https?://[^/]", url)]
        if wrong:
            raise SettingError(
                "urls",
                f"urls has {', '.join(map(repr, wrong))}: give http://host:port",
                given=self.urls,
                allowed="http://host:port of each server",
                nearest=tuple(url for url in self.urls if url not in wrong),
            )
        if self.urls and self.servers > 1:
            raise SettingError(
                "servers",
                f"servers is {self.servers} and urls names {len(self.urls)} that run already, so none is "
                "started: set servers to 1, or leave urls out",
                given=self.servers,
                allowed="1, or urls []",
                nearest=1,
            )
        return self

    @model_validator(mode="after")
    def _only_disk_has_a_folder(self) -> Self:
        if self.update_folder is not None and self.update_path != "disk":
            raise SettingError(
                "update_folder",
                f"update_folder is {self.update_folder!r} and update_path {self.update_path}: weights go by "
                "files only with update_path disk; set it, or update_folder to null",
                given=self.update_folder,
                allowed="null, or update_path disk",
                nearest=None,
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_needs_a_choice(self) -> Self:
        if self.over_sampling > 1 and not self.dynamic_sampling and self.early_abort == "off":
            raise SettingError(
                "over_sampling",
                f"over_sampling {self.over_sampling:g} has no effect while dynamic_sampling is false and "
                "early_abort off: set one of them, or over_sampling to 1",
                given=self.over_sampling,
                allowed="1, or dynamic_sampling true, or early_abort restart or continue",
                nearest=1,
            )
        if self.early_abort != "off" and self.over_sampling == 1:
            raise SettingError(
                "early_abort",
                f"early_abort {self.early_abort} has nothing to stop while over_sampling is 1: set it above "
                "1",
                given=self.early_abort,
                allowed="off, or over_sampling above 1",
                nearest="off",
            )
        usual = type(self).model_fields["partial_versions"].default
        if self.early_abort != "continue" and self.partial_versions != usual:
            raise SettingError(
                "partial_versions",
                f"partial_versions is {self.partial_versions} and early_abort {self.early_abort}: only with "
                f"continue are there partial rollouts; set it, or partial_versions to {usual}",
                given=self.partial_versions,
                allowed=f"{usual}, or early_abort continue",
                nearest=usual,
            )
        return self


class RewardConfig(Section):
    """How a completion is scored."""

    function: str = setting(
        "math", "Reward: math, exact_match or your own function as module:function.", min_length=1
    )
    timeout_s: float = setting(
        10.0, "Time after which scoring one completion counts as failed.", unit="seconds", gt=0, le=1e6
    )
    concurrency: int = setting(4, "Completions scored at the same time.", unit="completions", ge=1)
    failed_score: float = setting(0.0, "Reward of a completion whose scoring failed.", ge=-1e30, le=1e30)
    overlong_tokens: int = setting(
        0,
        "Tokens before rollout.max_new_tokens over which a completion loses up to overlong_penalty of its "
        "reward, linearly (DAPO's soft punishment); only advantages see it. 0 is off.",
        unit="tokens",
        ge=0,
    )
    overlong_penalty: float = setting(1.0, "What a completion of full length loses.", gt=0, le=1e30)

    @model_validator(mode="after")
    def _penalty_needs_a_zone(self) -> Self:
        if self.overlong_tokens == 0 and self.overlong_penalty != 1.0:
            raise SettingError(
                "overlong_penalty",
                f"overlong_penalty {self.overlong_penalty:g} has no effect while overlong_tokens is 0: set "
                "overlong_tokens, or leave overlong_penalty at 1",
                given=self.overlong_penalty,
                allowed="1, or overlong_tokens above 0",
                nearest=1,
            )
        return self


class EvalConfig(Section):
    """How held-out prompts are evaluated."""

    every: int = setting(
        0, "Steps between evaluations while training; 0 evaluates before and after only.", unit="steps", ge=0
    )
    before: bool = setting(True, "Evaluates before the first step.")
    after: bool = setting(True, "Evaluates after the last step.")
    max_prompts: int | None = setting(
        None, "Held-out prompts evaluated, from the first on; null takes all.", unit="prompts", ge=1
    )
    sets: dict[str, str] = setting(
        {},
        "Further sets by names of yours, each given as data.path is; their metrics are eval_<name>_accuracy "
        "and so on.",
    )
    samples_per_prompt: int = setting(
        1, "Completions for each held-out prompt, averaged.", unit="completions", ge=1
    )
    pass_at: tuple[int, ...] = setting(
        (),
        "Numbers k for which pass@k is estimated (without bias): the probability that one of k completions "
        "is correct.",
    )
    temperature: float = setting(0.0, "Sampling temperature; 0 takes the likeliest token.", ge=0)
    top_p: float = setting(
        1.0, "Samples from the smallest set of tokens of this total probability; 1 is off.", gt=0, le=1
    )
    max_new_tokens: int | None = setting(
        None, "Length at which a completion is cut; null takes rollout.max_new_tokens.", unit="tokens", ge=1
    )

    @model_validator(mode="after")
    def _sets_have_names(self) -> Self:
        wrong = [name for name in self.sets if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
        if wrong:
            raise ValueError(
                f"sets has the names {wrong}: they become names of metrics, so take lower-case letters, "
                "digits and _, a letter first"
            )
        return self

    @model_validator(mode="after")
    def _pass_at_has_samples(self) -> Self:
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise SettingError(
                "pass_at",
                f"pass_at has {wrong} and samples_per_prompt is {self.samples_per_prompt}: pass@k needs k "
                "completions of each prompt; set samples_per_prompt to at least the largest k",
                given=self.pass_at,
                allowed=f"numbers from 1 to {self.samples_per_prompt}",
                nearest=tuple(k for k in self.pass_at if k not in wrong),
            )
        if self.samples_per_prompt > 1 and self.temperature == 0 and self.pass_at:
            raise SettingError(
                "pass_at",
                "pass_at at temperature 0: the completions of a prompt are all equal; set eval.temperature "
                "above 0",
                given=self.pass_at,
                allowed="nothing, or temperature above 0",
                nearest=(),
            )
        return self


class SftConfig(Section):
    """The batch of what learns from given completions (`algorithm.name: sft` or `dpo`)."""

    samples_per_step: int = setting(
        64, "Conversations (sft) or pairs (dpo) that make one batch.", unit="samples", ge=1, le=131_072
    )


class CriticConfig(Section):
    """The critic (`algorithm.name: ppo`): the policy's trunk with a value head, trained beside it."""

    path: str | None = setting(
        None, "Checkpoint of the trunk that the critic starts from; null takes model.path."
    )
    lr: float = setting(1e-5, "Peak learning rate; the schedule is the policy's.", gt=0, le=1e6)
    warmup_steps: int = setting(
        0, "First steps of the run in which the critic learns and the policy does not.", unit="steps", ge=0
    )


class TeacherConfig(Section):
    """The teacher (`algorithm.name: on_policy_distillation`): in the trainer, or in servers."""

    path: str | None = setting(
        None, "Checkpoint that the trainer's own ranks score with; its tokenizer is the policy's."
    )
    urls: tuple[str, ...] = setting(
        (), "SGLang servers of the teacher, by URL; they must run, and rollout.temperature be 1."
    )

    @model_validator(mode="after")
    def _one_teacher(self) -> Self:
        if self.path is not None and self.urls:
            raise SettingError(
                "urls",
                f"path {self.path!r} and urls {', '.join(self.urls)} both name a teacher: leave one out",
                given=self.urls,
                allowed="[], or path null",
                nearest=(),
            )
        return self


class CheckpointConfig(Section):
    """When the state of a run is saved, and what is kept."""

    every: int = setting(
        50, "Steps between checkpoints; 0 saves at the end and on interruption only.", unit="steps", ge=0
    )
    asynchronous: bool = setting(
        False,
        "Writes checkpoints while training goes on; until one is whole, the one before it counts.",
    )
    keep: int = setting(2, "Newest checkpoints kept; older ones are deleted.", unit="checkpoints", ge=1)
    export: Literal["end", "never"] = setting(
        "end", "When the model is written to hf/ as a Hugging Face directory."
    )

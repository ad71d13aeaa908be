"""Rules of the sampling engines and their servers."""

from collections.abc import Iterator

from relax_core.cluster.config import ClusterConfig
from relax_core.config.problems import Problem
from relax_core.config.rules.rule import Check
from relax_core.config.yaml_text import show
from relax_core.loop.config import RolloutConfig
from relax_core.loop.sglang_config import SglangSettings
from relax_core.model.lora_config import LoraConfig
from relax_core.run.config import RunConfig


def _server_settings_have_servers(rollout: RolloutConfig, sglang: SglangSettings) -> Iterator[Problem]:
    """Settings of SGLang's servers do nothing in another engine, or for servers that run already."""
    if rollout.engine == "sglang" and not rollout.urls:
        return
    why = (
        "rollout.urls names servers that run already, with settings of their own"
        if rollout.urls
        else f"the engine {rollout.engine} has no servers"
    )
    for name, info in SglangSettings.model_fields.items():
        given = getattr(sglang, name)
        if given != info.default:
            allowed = f"its default {show(info.default)}, or rollout.engine sglang without rollout.urls"
            yield Problem(
                ("sglang", name), why, given=show(given), allowed=allowed, nearest=show(info.default)
            )


def _hybrid_models_keep_no_radix_cache_on_npu(
    run: RunConfig, rollout: RolloutConfig, sglang: SglangSettings
) -> Iterator[Problem]:
    """On an NPU SGLang's prefix cache does not keep the recurrent states that a delta net goes on from."""
    if run.device == "npu" and rollout.engine == "sglang" and not rollout.urls and sglang.radix_cache:
        yield Problem(
            ("sglang", "radix_cache"),
            "on NPUs SGLang's prefix cache lacks the recurrent states of a hybrid model",
            given="true",
            allowed="false",
            nearest="false",
        )


def _attention_is_the_devices(run: RunConfig, sglang: SglangSettings) -> Iterator[Problem]:
    """Ascend's attention runs on NPUs alone, and nothing else does there."""
    ascend = sglang.attention == "ascend"
    if sglang.attention is None or run.device == "auto" or ascend == (run.device == "npu"):
        return
    yield Problem(
        ("sglang", "attention"),
        f"{sglang.attention} does not run on {run.device}",
        given=sglang.attention,
        allowed="ascend" if run.device == "npu" else "null or another backend than ascend",
        nearest="ascend" if run.device == "npu" else "null",
    )


def _graphs_reach_the_largest_batch(rollout: RolloutConfig, sglang: SglangSettings) -> Iterator[Problem]:
    """A batch without a recorded graph decodes several times slower."""
    if sglang.graph_batches and max(sglang.graph_batches) < rollout.max_batch_size:
        yield Problem(
            ("sglang", "graph_batches"),
            f"up to {rollout.max_batch_size} sequences decode together (rollout.max_batch_size), and the "
            f"largest recorded batch has {max(sglang.graph_batches)}: larger ones run without a graph",
            given=str(list(sglang.graph_batches)),
            allowed=f"a largest of at least {rollout.max_batch_size}, or a smaller rollout.max_batch_size",
            nearest=str([*sglang.graph_batches, rollout.max_batch_size]),
        )


def _graph_batches_ascend(sglang: SglangSettings) -> Iterator[Problem]:
    """Batch sizes are positive and listed once, from the smallest on."""
    given = sglang.graph_batches
    if given and (min(given) < 1 or list(given) != sorted(set(given))):
        yield Problem(
            ("sglang", "graph_batches"),
            "batch sizes of recorded graphs ascend, each once",
            given=str(list(given)),
            allowed="ascending positive integers",
            nearest=str(sorted({size for size in given if size > 0})),
        )


STATES_WITH_PREFIXES = 3
"""That SGLang reckons with for a running sequence where its prefix cache keeps states too."""


def _every_sequence_has_a_state(rollout: RolloutConfig, sglang: SglangSettings) -> Iterator[Problem]:
    """A sequence that is decoded holds a recurrent state, and SGLang's prefix cache two more for it; with
    fewer it decodes fewer sequences together (`ModelRunnerKVCacheMixin._resolve_max_num_reqs`)."""
    each = STATES_WITH_PREFIXES if sglang.radix_cache else 1
    wanted = each * rollout.max_batch_size
    if sglang.states is not None and sglang.states < wanted:
        kept = "3 recurrent states, as prefixes keep theirs" if sglang.radix_cache else "a recurrent state"
        yield Problem(
            ("sglang", "states"),
            f"{rollout.max_batch_size} sequences are to be decoded together (rollout.max_batch_size), each "
            f"with {kept}",
            given=str(sglang.states),
            allowed=f"an integer, at least {wanted}, or null",
            nearest=str(wanted),
        )


def _the_cache_holds_a_completion(rollout: RolloutConfig, sglang: SglangSettings) -> Iterator[Problem]:
    """A sequence whose keys and values exceed the cache never ends."""
    if sglang.max_tokens is not None and sglang.max_tokens <= rollout.max_new_tokens:
        yield Problem(
            ("sglang", "max_tokens"),
            f"one completion may take {rollout.max_new_tokens} tokens and its prompt",
            given=str(sglang.max_tokens),
            allowed=f"an integer, above {rollout.max_new_tokens}, or null",
            nearest="null",
        )


def _one_server_an_engine_of_a_cluster(cluster: ClusterConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """On Ray every engine starts one server on its own devices."""
    if cluster.mode == "ray" and rollout.servers > 1:
        yield Problem(
            ("rollout", "servers"),
            "on Ray each engine has devices of its own and starts one server there",
            given=str(rollout.servers),
            allowed=f"1, and cluster.engines {cluster.engines * rollout.servers}",
            nearest="1",
        )


def _servers_belong_to_one_engine(cluster: ClusterConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Servers that run already are shared by nobody: two engines would both change their weights."""
    if rollout.urls and cluster.engines > 1:
        yield Problem(
            ("cluster", "engines"),
            "every engine would join all servers of rollout.urls, and change their weights",
            given=str(cluster.engines),
            allowed="1, which shares requests out among all of them",
            nearest="1",
        )


def _colocated_engines_have_devices(
    cluster: ClusterConfig, rollout: RolloutConfig, sglang: SglangSettings, run: RunConfig
) -> Iterator[Problem]:
    """Engines that take turns with the trainer have no more devices than it has."""
    devices = sglang.tensor if rollout.engine == "sglang" else 1
    wanted = cluster.engines * devices
    if cluster.placement == "colocate" and run.device != "cpu" and wanted > cluster.trainer_ranks:
        fitting = cluster.trainer_ranks // devices
        message = (
            f"{cluster.engines} engines of {devices} devices share those of {cluster.trainer_ranks} ranks"
        )
        if fitting:
            yield Problem(
                ("cluster", "engines"),
                message,
                given=str(cluster.engines),
                allowed=f"at most {fitting}, or cluster.placement async",
                nearest=str(fitting),
            )
        else:
            yield Problem(
                ("sglang", "tensor"),
                message,
                given=str(devices),
                allowed=f"at most {cluster.trainer_ranks}, or cluster.placement async",
                nearest=f"{cluster.trainer_ranks} --cluster.engines 1",
            )


def _every_engine_has_prompts(cluster: ClusterConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """The completions of a prompt stay on one engine."""
    if cluster.engines > rollout.prompts_per_step:
        yield Problem(
            ("cluster", "engines"),
            f"a step has {rollout.prompts_per_step} prompts, and the completions of one stay on one engine: "
            "the others would idle",
            given=str(cluster.engines),
            allowed=f"at most {rollout.prompts_per_step}, or more rollout.prompts_per_step",
            nearest=str(rollout.prompts_per_step),
        )


def _weights_have_a_way(cluster: ClusterConfig, rollout: RolloutConfig, run: RunConfig) -> Iterator[Problem]:
    """A path of weights that was asked for must exist between the trainer and the engines."""
    asked = rollout.update_path
    if asked == "auto":
        return
    if cluster.mode != "ray" and rollout.engine != "sglang":
        if asked != "ipc":
            yield Problem(
                ("rollout", "update_path"),
                f"the engine {rollout.engine} is in the trainer's own process and reads its tensors there",
                given=asked,
                allowed="auto or ipc; rollout.engine sglang or cluster.mode ray have engines elsewhere",
                nearest="auto",
            )
        return
    shares = cluster.placement != "async" if cluster.mode == "ray" else not rollout.urls
    if asked == "broadcast" and shares and run.device in ("cuda", "npu"):
        yield Problem(
            ("rollout", "update_path"),
            "engines share devices with the trainer, and a collective takes one process a device",
            given=asked,
            allowed="auto or ipc, or devices of their own: cluster.placement async, or rollout.urls",
            nearest="auto",
        )
    if asked == "disk" and cluster.address is not None and rollout.update_folder is None:
        yield Problem(
            ("rollout", "update_folder"),
            "the hosts of a cluster that is joined must see the files under one name",
            given="null",
            allowed="a folder on a file system that all of them share",
        )


def _engines_serve_merged_adapters(lora: LoraConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """SGLang 0.5.15 serves an adapter of Qwen3.5 only in part, and not beside the checkpoint's drafts.

    Its Qwen3.5 classes adapt qkv, o, out_proj, in_proj_qkvz, gate_up and down (`supported_lora_modules`), and
    not in_proj_ba, the delta net's gates, which an adapter of in_proj changes too: completions would be of
    another policy than is trained. It takes adapters under other names of in_proj_qkv than checkpoints have,
    and refuses them beside the NEXTN drafts of an MTP layer (`check_lora_server_args`).
    """
    if lora.sync == "merge":
        return
    if rollout.engine != "sglang":
        why = f"the engine {rollout.engine} is given whole weights"
    elif "in_proj" in lora.targets:
        why = (
            "SGLang 0.5.15 adapts no gates of the delta net (in_proj_ba), which lora.targets in_proj changes"
        )
    elif rollout.draft_tokens:
        why = "SGLang 0.5.15 serves no adapters beside the drafts of an MTP layer"
    else:
        why = "Relax sends no adapters to SGLang yet: 0.5.15 serves those of Qwen3.5 only in part"
    yield Problem(("lora", "sync"), why, given="adapter", allowed="merge", nearest="merge")


RULES = (
    Check(("rollout", "sglang"), _server_settings_have_servers),
    Check(("run", "rollout", "sglang"), _hybrid_models_keep_no_radix_cache_on_npu),
    Check(("run", "sglang"), _attention_is_the_devices),
    Check(("rollout", "sglang"), _graphs_reach_the_largest_batch),
    Check(("sglang",), _graph_batches_ascend),
    Check(("rollout", "sglang"), _every_sequence_has_a_state),
    Check(("rollout", "sglang"), _the_cache_holds_a_completion),
    Check(("cluster", "rollout", "run"), _weights_have_a_way),
    Check(("lora", "rollout"), _engines_serve_merged_adapters),
    Check(("cluster", "rollout"), _one_server_an_engine_of_a_cluster),
    Check(("cluster", "rollout"), _servers_belong_to_one_engine),
    Check(("cluster", "rollout", "sglang", "run"), _colocated_engines_have_devices),
    Check(("cluster", "rollout"), _every_engine_has_prompts),
)

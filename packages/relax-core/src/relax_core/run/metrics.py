"""The metrics of a step: their names in `metrics.jsonl`, what they mean, and how views group them.

A record is `{"step": n, <metric>: number, ..., "time": {...}}`. Everything but `time` is the same for
the same seed on the same machine; `time` holds what a clock or the operating system gave. Step 0 is the
evaluation before training. A loop may add metrics of its own: views put unknown names last.
"""

import re
from dataclasses import dataclass

PHASES: tuple[str, ...] = ("rollout", "reward", "logprob", "train", "update", "eval", "checkpoint")


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: its key in `metrics.jsonl`.
        label: its name for people.
        group: the chart it belongs to; also its folder in TensorBoard and W&B.
        doc: its meaning.
        unit: what it counts, or "" for plain numbers.
    """

    name: str
    label: str
    group: str
    doc: str
    unit: str = ""


METRICS: tuple[Metric, ...] = (
    Metric("reward", "reward", "reward", "Mean reward of the completions sampled in the step."),
    Metric("reward_std", "spread in group", "reward", "Mean standard deviation of rewards inside a group."),
    Metric("eval_reward", "held out", "reward", "Mean reward of the held-out completions."),
    Metric("accuracy", "sampled", "accuracy", "Share of sampled completions whose answer is correct."),
    Metric("eval_accuracy", "held out", "accuracy", "Share of held-out completions that are correct."),
    Metric("loss", "loss", "loss", "The whole loss, averaged over the optimizer steps of the step."),
    Metric("policy_loss", "policy", "loss", "The clipped policy loss."),
    Metric("kl_loss", "KL", "loss", "The KL term before its coefficient.", "nats"),
    Metric("entropy_loss", "entropy", "loss", "The entropy term before its coefficient.", "nats"),
    Metric("eval_loss", "held out", "loss", "Negative log-likelihood of held-out tokens.", "nats"),
    Metric("eval_perplexity", "held out", "perplexity", "Perplexity of held-out tokens."),
    Metric("sft_loss", "supervised", "loss", "Negative log-likelihood of the tokens to learn.", "nats"),
    Metric("dpo_loss", "preferences", "loss", "Mean loss of the pairs.", "nats"),
    Metric("preference_margin", "margin", "preferences", "Mean margin of the better completion."),
    Metric("preference_accuracy", "better preferred", "accuracy", "Share of pairs with a positive margin."),
    Metric("entropy", "entropy", "entropy", "Mean entropy of the policy over completion tokens.", "nats"),
    Metric("kl", "from reference", "KL", "Mean KL divergence from the reference policy.", "nats"),
    Metric("teacher_kl", "from teacher", "KL", "Mean KL divergence from the teacher.", "nats"),
    Metric("policy_kl", "of the update", "KL", "Mean KL divergence from the policy before the step.", "nats"),
    Metric("grad_norm", "gradient norm", "gradient norm", "Global gradient norm before clipping."),
    Metric("value_loss", "critic", "critic", "Loss of the critic."),
    Metric("value", "mean value", "critic", "Mean value that the critic gives the tokens."),
    Metric("explained_variance", "explained variance", "critic", "Share of the returns' variance foreseen."),
    Metric(
        "value_clip_fraction", "value clipped", "fractions", "Share of tokens whose value the loss clipped."
    ),
    Metric("critic_grad_norm", "critic", "gradient norm", "The critic's gradient norm before clipping."),
    Metric("critic_lr", "critic", "learning rate", "The critic's learning rate."),
    Metric("lr", "learning rate", "learning rate", "Learning rate of the last optimizer step."),
    Metric("mtp_loss", "all depths", "MTP loss", "Mean loss of the draft layers.", "nats"),
    Metric(
        "mtp_acceptance",
        "all depths",
        "MTP acceptance",
        "Share of tokens that the draft layers predict, given the true ones before.",
    ),
    Metric(
        "draft_acceptance",
        "while sampling",
        "MTP acceptance",
        "Share of the drafted tokens that the engine's verification let stand.",
    ),
    Metric(
        "draft_length",
        "tokens per step",
        "draft length",
        "Tokens per verification of the engine: the drafts that stood and one of the model's own.",
        "tokens",
    ),
    Metric(
        "logprob_gap_mean",
        "mean",
        "log-prob gap",
        "Mean absolute difference between trainer and rollout log-probs of the sampled tokens.",
        "nats",
    ),
    Metric("logprob_gap_max", "max", "log-prob gap", "The largest such difference.", "nats"),
    Metric(
        "rollout_kl",
        "engine from trainer",
        "KL",
        "Mean KL divergence of the engine from the trainer.",
        "nats",
    ),
    Metric("response_length_mean", "mean", "response length", "Mean length of completions.", "tokens"),
    Metric("response_length_max", "max", "response length", "Length of the longest completion.", "tokens"),
    Metric("turns_mean", "mean", "turns", "Mean turns of the model in a completion.", "turns"),
    Metric(
        "reply_tokens_mean",
        "replies",
        "response length",
        "Mean length of an environment's replies.",
        "tokens",
    ),
    Metric("truncated_fraction", "cut off", "fractions", "Share of completions cut at a limit."),
    Metric("clip_fraction", "clipped", "fractions", "Share of tokens whose ratio the loss clipped."),
    Metric("dual_clip_fraction", "dual-clipped", "fractions", "Share of tokens held by the dual clip."),
    Metric(
        "correction_fraction",
        "weight capped",
        "fractions",
        "Share of tokens whose importance weight was capped or dropped.",
    ),
    Metric("ratio", "ratio", "ratios", "Mean ratio of the policy to the one before the step."),
    Metric("importance_weight", "importance", "ratios", "Mean importance weight of trainer over rollout."),
    Metric("groups_dropped", "dropped groups", "filter", "Groups dropped for want of spread.", "groups"),
    Metric("reward_failures", "failed rewards", "filter", "Completions whose scoring failed.", "completions"),
    Metric("staleness_mean", "mean", "staleness", "Mean age of the sampled tokens' weights.", "versions"),
    Metric("staleness_max", "max", "staleness", "Age of the oldest token's weights.", "versions"),
    Metric("mixed_fraction", "of several versions", "fractions", "Completions drawn by several versions."),
    Metric("train_tokens", "trained", "tokens", "Tokens of the forward and backward passes.", "tokens"),
    Metric(
        "train_flops", "trained", "operations", "Operations that training needs (MFU's numerator).", "FLOP"
    ),
    Metric("rollout_tokens", "sampled", "tokens", "Tokens sampled for training.", "tokens"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}
_HELD_OUT = re.compile(r"eval_((?P<set>[a-z][a-z0-9_]*?)_)?(?P<what>accuracy|reward|pass_at_\d+)")
_MTP = re.compile(r"mtp_(loss|acceptance)_(\d+)")


def describe(name: str) -> Metric:
    """What is known of a metric: draft depths (`mtp_loss_<k>`, `mtp_acceptance_<k>`) and strangers too."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    held_out = _HELD_OUT.fullmatch(name)
    if held_out is not None:
        return _held_out(name, held_out["set"], held_out["what"])
    draft = _MTP.fullmatch(name)
    if draft is None:
        return Metric(name, name.replace("_", " "), "other", "A metric of the loop's own.")
    kind, depth = draft.groups()
    if kind == "loss":
        return Metric(
            name, f"depth {depth}", "MTP loss", f"Loss of the draft layer of depth {depth}.", "nats"
        )
    doc = f"Share of tokens that draft depth {depth} predicts, given the true ones before."
    return Metric(name, f"depth {depth}", "MTP acceptance", doc)


def _held_out(name: str, of: str | None, what: str) -> Metric:
    """A metric of a held-out set."""
    where = f"held out, {of}" if of else "held out"
    if what in ("accuracy", "reward"):
        return Metric(name, where, what, f"Mean {what} of the completions of the set {of}.")
    k = what.removeprefix("pass_at_")
    doc = f"Probability that one of {k} completions of a held-out prompt is correct, estimated without bias."
    return Metric(name, f"{where}, k = {k}", "pass@k", doc)

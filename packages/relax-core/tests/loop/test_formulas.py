"""Loss and gradient of every algorithm against its paper's formula, written out token by token in float64.

The batches are uneven on purpose: groups of one to four, one group whose rewards are all equal, completions
of one token and of none, masks with holes, ratios exactly on a bound of the clip. They are split into
optimizer steps, micro-batches and two context-parallel ranks, of which no formula knows.
"""

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

import pytest
import torch
from relax_core.algorithms import AlgorithmConfig, Sequences, algorithm_names
from relax_core.loop.advantages import with_advantages, with_value_targets
from relax_core.loop.learning import split_groups
from relax_core.loop.objectives import PolicyObjective, SftObjective
from relax_core.loop.preferences import PreferenceObjective
from relax_core.loop.values import ValueObjective
from relax_core.loss import LossReducer
from relax_core.trainer.sample import Sample
from relax_kernels import LogProbs

LONGEST = 6
GROUPS = (4, 3, 1, 2, 4)
"""Completions of each prompt; those of the fourth have equal rewards."""
FLAT = 3
BOUND = 0.25
"""Some ratios are exactly exp of this, or of its negative: the bounds of the clip below."""
CLIP = {
    "clip_low": 1 - float(torch.tensor(-BOUND).double().exp()),
    "clip_high": float(torch.tensor(BOUND).double().exp()) - 1,
}


@dataclass
class Text:
    """One completion as the formulas see it: a number for each of its tokens."""

    group: int
    reward: float
    mask: list[bool]
    new: torch.Tensor
    values: dict[str, list[float]]
    advantage: list[float] = field(default_factory=list)

    def __len__(self):
        return len(self.new)


def text(group, reward, generator):
    """A completion whose numbers are exact in float32."""
    length = int(torch.randint(0, LONGEST + 1, (), generator=generator))
    mask = (torch.rand(length, generator=generator) > 0.2).tolist()
    count = sum(mask)

    def draw(scale, shift=0.0):
        return torch.randn(count, generator=generator) * scale + shift

    old = draw(0.5, -2).mul(64).round() / 64  # so that adding BOUND is exact
    new = (old + draw(0.4)).double()
    place = torch.randint(0, 3, (count,), generator=generator)
    new = torch.where(place == 0, old + BOUND, torch.where(place == 1, old - BOUND, new)).float()
    columns = {
        "old_logprob": old,
        "rollout_logprob": old + draw(0.5),
        "ref_logprob": old + draw(0.5),
        "teacher_logprob": old + draw(0.5),
        "value": draw(1.0),
        "entropy": draw(1.0).abs(),
        "new_value": draw(1.0),
    }
    new = new.double().requires_grad_()
    return Text(group, reward, mask, new, {name: x.double().tolist() for name, x in columns.items()})


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(sum(GROUPS), generator=generator).double().tolist()
    made = []
    for group, size in enumerate(GROUPS):
        for _ in range(size):
            reward = 0.1 if group == FLAT else rewards[len(made)]
            made.append(text(group, reward, generator))
    return made


# The formulas.


def kl(kind, d):
    """Of one token, from the log-prob's distance to the reference."""
    k3 = math.exp(-d) - 1 + d if isinstance(d, float) else (-d).exp() - 1 + d
    low_var = min(max(k3, -10.0), 10.0) if isinstance(d, float) else k3.clamp(-10, 10)
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var": low_var}[kind]


def set_advantages(texts, cfg):
    """From the rewards, as each paper says."""
    for one in texts:
        old, ref = one.values["old_logprob"], one.values["ref_logprob"]
        penalty = [cfg.kl_reward_coef * kl(cfg.kl_estimator, a - b) for a, b in zip(old, ref, strict=True)]
        one.rewards = [-p for p in penalty]
        if penalty:
            one.rewards[-1] += one.reward
        one.total = one.reward - sum(penalty)
    for one in texts:
        same = [other.total for other in texts if other.group == one.group]
        scale = 1.0
        if cfg.name == "on_policy_distillation":
            pairs = zip(one.values["teacher_logprob"], one.values["old_logprob"], strict=True)
            one.advantage = [teacher - old for teacher, old in pairs]
            continue
        if cfg.name == "ppo":
            gae(one, cfg)
            continue
        if cfg.name == "reinforce_plus_plus":
            one.advantage = [sum(one.rewards[t:]) for t in range(len(one))]
            continue
        if cfg.name == "rloo":
            others = (sum(same) - one.total) / (len(same) - 1) if len(same) > 1 else one.total
            one.advantage = [one.total - others] * len(one)
            continue
        if cfg.name not in ("dr_grpo", "reinforce_plus_plus_baseline"):
            scale = (stdev(same) if len(same) > 1 else 0.0) + cfg.advantage_eps
        one.advantage = [(one.total - fmean(same)) / scale] * len(one)
    if cfg.name.startswith("reinforce") or (cfg.name == "ppo" and cfg.whiten_advantages):
        every = [a for one in texts for a in one.advantage]
        mean, std = fmean(every), stdev(every)
        for one in texts:
            one.advantage = [(a - mean) / std for a in one.advantage]


def gae(one, cfg):
    """Schulman et al. 2015, equation 16: the sum over l of (gamma lambda)^l delta_(t+l)."""
    value, count = [*one.values["value"], 0.0], len(one)
    delta = [one.rewards[t] + cfg.gae_gamma * value[t + 1] - value[t] for t in range(count)]
    factor = cfg.gae_gamma * cfg.gae_lambda
    one.advantage = [sum(factor ** (s - t) * delta[s] for s in range(t, count)) for t in range(count)]
    one.target = [a + v for a, v in zip(one.advantage, value, strict=False)]


def weights(texts, cfg):
    """What one token of each completion counts: DAPO's, GRPO's, Dr. GRPO's mean, and so on."""
    filled = [one for one in texts if len(one)]
    tokens = sum(map(len, filled))
    groups = {one.group for one in filled}
    of_group = {g: sum(len(one) for one in filled if one.group == g) for g in groups}
    return [
        {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / len(one) / len(filled),
            "group_mean": 1 / of_group[one.group] / len(groups),
            "sequence_sum": 1 / len(filled),
            "fixed_length": 1 / LONGEST / len(filled),
        }[cfg.token_reduction]
        if len(one)
        else 0.0
        for one in texts
    ]


def trusts(one, cfg):
    """Importance weight of trainer over engine, of each token."""
    if cfg.correction_in_use == "none":
        return [1.0] * len(one)
    gaps = [a - b for a, b in zip(one.values["old_logprob"], one.values["rollout_logprob"], strict=True)]
    of = {"sequence": sum(gaps), "geometric": fmean(gaps) if gaps else 0.0}
    ratios = [math.exp(of.get(cfg.correction_level_in_use, gap)) for gap in gaps]
    if cfg.correction == "truncated":
        return [min(ratio, cfg.correction_high or 2.0) for ratio in ratios]
    low, high = cfg.correction_low or 0.5, cfg.correction_high or 5.0
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


def kept(texts, cfg):
    """M2PO, algorithm 1: drops the largest until the mean of those left is small enough."""
    trusted = []
    for number, one in enumerate(texts):
        for t, advantage in enumerate(one.advantage):
            distance = float(one.new[t].detach()) - one.values["rollout_logprob"][t]
            if (advantage > 0 and distance > 0) or (advantage < 0 and distance < 0):
                trusted.append((distance**2, number, t))
    dropped = set()
    while trusted and fmean(square for square, *_ in trusted) > cfg.second_moment_limit:
        largest = max(trusted)
        trusted.remove(largest)
        dropped.add(largest[1:])
    return dropped


def policy_loss(texts, cfg):
    """The sum over all tokens of weight x trust x loss, with KL and entropy."""
    dropped = kept(texts, cfg) if cfg.name == "m2po" else set()
    low, high = 1 - cfg.clip_range[0], 1 + cfg.clip_range[1]
    total = torch.zeros((), dtype=torch.float64)
    for number, (one, weight) in enumerate(zip(texts, weights(texts, cfg), strict=True)):
        old = torch.tensor(one.values["old_logprob"], dtype=torch.float64)
        whole = (one.new - old).mean().exp()
        # Trust that differs among tokens needs GSPO's equation 13; otherwise its equation 7 says the same.
        by_token = cfg.correction_in_use != "none" and cfg.correction_level_in_use == "token"
        for t, trust in enumerate(trusts(one, cfg)):
            advantage, new = one.advantage[t], one.new[t]
            ratio = (new - old[t]).exp()
            if cfg.name == "gspo":
                ratio = whole.detach() * (new - new.detach()).exp() if by_token else whole
            if cfg.name == "m2po":
                ratio = (new - one.values["rollout_logprob"][t]).exp()
                loss = -ratio * advantage * ((number, t) not in dropped)
            elif cfg.name == "rloo":
                loss = -advantage * new
            elif cfg.name == "cispo":
                loss = -min(max(float(ratio.detach()), low), high) * advantage * new
            elif cfg.name == "sapo":
                tau = cfg.gate_positive if advantage > 0 else cfg.gate_negative
                loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
            else:
                loss = -ratio * advantage
                if advantage > 0 and float(ratio.detach()) > high:
                    loss = torch.tensor(-high * advantage)
                if advantage < 0 and float(ratio.detach()) < low:
                    loss = torch.tensor(-low * advantage)
                if cfg.dual_clip and advantage < 0 and float(ratio.detach()) > cfg.dual_clip:
                    loss = torch.tensor(-cfg.dual_clip * advantage)
            total = total + weight * trust * loss
            if cfg.kl_loss_coef:
                distance = new - one.values["ref_logprob"][t]
                total = total + weight * cfg.kl_loss_coef * kl(cfg.kl_estimator, distance)
            total = total - weight * cfg.entropy_coef * one.values["entropy"][t]
    return total


# The same batches as the trainer sees them.


def sample(one, prompt=2):
    """A prompt of two tokens, and the completion; what the mask leaves out holds garbage."""
    mask_L = torch.tensor([False] * prompt + one.mask)
    columns = {name: torch.full(mask_L.shape, math.nan) for name in one.values}
    for name, column in columns.items():
        column[mask_L] = torch.tensor(one.values[name], dtype=torch.float32)
    return Sample(torch.arange(len(mask_L)), mask_L.float(), one.group, columns)


def micro_batches(count, generator):
    """The samples in another order, in parts of one to four."""
    order = torch.randperm(count, generator=generator).tolist()
    while order:
        size = int(torch.randint(1, 5, (), generator=generator))
        yield order[:size]
        order = order[size:]


def trained_loss(objective, samples, scored, generator):
    """Sum of the shares of all micro-batches and of two ranks that share each of them.

    Args:
        objective: the trainer's.
        samples: of one optimizer step.
        scored: (log-probs, entropies) of each of them.
        generator: draws the split.
    """
    scores = [torch.zeros(len(s.mask_L)) for s in samples]
    for score, (logprob_S, _), s in zip(scores, scored, samples, strict=True):
        score[s.mask_L > 0] = logprob_S.detach().float()
    prepared = objective.prepare(samples, torch.cat(scores) if objective.needs_scores else None)
    lengths = [len(s.mask_L) for s in samples]
    made = {name: torch.split(column_B, lengths) for name, column_B in prepared.batch_columns.items()}
    samples = [
        s.with_columns(**{name: column[place] for name, column in made.items()})
        for place, s in enumerate(prepared.samples)
    ]
    reducer = LossReducer(prepared.denominators)
    total = torch.zeros((), dtype=torch.float64)
    for members in micro_batches(len(samples), generator):
        chosen = [samples[i] for i in members]
        whole = {
            name: torch.cat([s.columns[name][s.mask_L > 0] for s in chosen]).double()
            for name in chosen[0].columns
        }
        whole["index"] = torch.cat([torch.full((len(scored[i][0]),), n) for n, i in enumerate(members)])
        whole["scored"], whole["entropy"] = (torch.cat([scored[i][k] for i in members]) for k in (0, 1))
        own = torch.rand(len(whole["index"]), generator=generator) > 0.5
        ranks = [{name: column[mine] for name, column in whole.items()} for mine in (own, ~own)]
        # What each rank would send is what it adds up when it is alone.
        sent = [[], []]
        for part, told in zip(ranks, sent, strict=True):
            share(
                objective, reducer, part, len(members), lambda sum_N, told=told: told.append(sum_N) or sum_N
            )
        for part, others in zip(ranks, map(iter, reversed(sent)), strict=True):
            add = lambda sum_N, others=others: sum_N + next(others)  # noqa: E731
            total = total + share(objective, reducer, part, len(members), add)
    return total


def share(objective, reducer, part, count, add):
    """The loss of one rank's part of a micro-batch of `count` samples."""
    scored = LogProbs(part["scored"], part["entropy"])
    terms = objective.terms(scored, part, Sequences(part["index"], count, add))
    return reducer.reduce(terms.terms)[0]


def gradients(loss, texts):
    leaves = [one.new for one in texts if len(one)]
    # Where every token is clipped nothing has a gradient.
    found = torch.autograd.grad(loss + 0 * leaves[0].sum(), leaves, allow_unused=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)])


def assert_equal(ours, wanted, texts):
    """The columns of samples are float32: a few roundings of 6e-8."""
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(gradients(ours, texts), gradients(wanted, texts), rtol=2e-6, atol=2e-7)


ANY = ("token_mean", "sequence_mean", "group_mean", "fixed_length")
CLIPPED = [{}, CLIP, {**CLIP, "dual_clip": 1.2}]
TRUST = [
    {},
    {"correction": "none"},
    {"correction": "icepop"},
    {"correction_level": "sequence", "correction_high": 1.5},
    {"correction": "icepop", "correction_level": "geometric", "correction_low": 0.9, "correction_high": 1.1},
    {"correction_level": "token"},
]
KL = [{}, {"kl_loss_coef": 0.3, "kl": "k3"}, {"kl_loss_coef": 0.3, "kl": "k2", "entropy_coef": 0.01}]
PENALTY = [*KL, {"kl_reward_coef": 0.2}, {"kl_reward_coef": 0.2, "kl": "low_var"}]
MEANS = [{"reduction": name} for name in ANY]
AXES = {
    "grpo": [CLIPPED, TRUST, PENALTY, MEANS],
    "dr_grpo": [CLIPPED, TRUST, PENALTY, [{}, *MEANS]],
    "dapo": [CLIPPED, TRUST, PENALTY, [{}, *MEANS]],
    "gspo": [[{}, *CLIPPED[1:], {"clip_low": 0.01, "clip_high": 0.01}], TRUST, PENALTY],
    "cispo": [[{}, CLIP], TRUST, PENALTY, [{}, *MEANS]],
    "sapo": [[{}, {"gate_positive": 3.0, "gate_negative": 5.0}], TRUST, PENALTY, [{}, *MEANS]],
    "rloo": [TRUST, PENALTY, [{}, *MEANS]],
    "reinforce_plus_plus": [CLIPPED, TRUST, PENALTY, [{}, *MEANS]],
    "reinforce_plus_plus_baseline": [CLIPPED, TRUST, KL, [{}, *MEANS]],
    "m2po": [[{}, {"second_moment_limit": 0.2}, {"second_moment_limit": 1e-9}], PENALTY, [{}, *MEANS]],
    "ppo": [
        CLIPPED,
        TRUST,
        PENALTY,
        [{}, *MEANS],
        [{}, {"gae_gamma": 0.9, "gae_lambda": 0.8}, {"whiten_advantages": False, "gae_lambda": 0.0}],
        [{}, {"value_clip": None}, {"value_clip": 0.5}],
    ],
    "on_policy_distillation": [CLIPPED, TRUST, KL, [{}, *MEANS]],
}
SEEDS = range(6)


def settings(name, seed):
    """A choice from each axis; over the seeds every choice is taken, in changing company."""
    chosen = {}
    for place, axis in enumerate(AXES[name]):
        chosen |= axis[(seed + place * (seed // len(axis))) % len(axis)]
    return AlgorithmConfig(name=name, **chosen)


def test_every_algorithm_has_its_formula_here():
    assert set(AXES) | {"dpo", "sft"} == set(algorithm_names())
    for name, axes in AXES.items():
        taken = [settings(name, seed).model_dump() for seed in SEEDS]
        assert all(any(choice.items() <= one.items() for one in taken) for axis in axes for choice in axis)


def test_the_batches_hold_what_is_rare():
    texts = [one for seed in SEEDS for one in batch(seed)]
    assert {len(one) for one in texts} == set(range(LONGEST + 1))
    assert any(True in one.mask[one.mask.index(False) :] for one in texts if False in one.mask)
    ratios = {r for one in texts for r in (one.new - torch.tensor(one.values["old_logprob"])).exp().tolist()}
    assert {1 - CLIP["clip_low"], 1 + CLIP["clip_high"]} <= ratios


@pytest.mark.parametrize("name", AXES)
def test_policy_loss_and_gradient_are_the_papers(name):
    for seed in SEEDS:
        cfg, texts = settings(name, seed), batch(seed)
        set_advantages(texts, cfg)
        samples = with_advantages([sample(one) for one in texts], [one.reward for one in texts], cfg)
        objective = PolicyObjective(cfg, temperature=1.0, max_new_tokens=LONGEST, on_policy=False)
        generator = torch.Generator().manual_seed(seed)
        places = {id(s): one for s, one in zip(samples, texts, strict=True)}
        for step in split_groups(samples, 1 + seed % 2):
            members = [places[id(s)] for s in step]
            scored = [(one.new, torch.tensor(one.values["entropy"]).double()) for one in members]
            ours = trained_loss(objective, step, scored, generator)
            assert_equal(ours, policy_loss(members, cfg), members)


def test_the_critics_loss_and_gradient_are_the_papers():
    for seed in SEEDS:
        cfg, texts = settings("ppo", seed), batch(seed)
        set_advantages(texts, cfg)
        samples = with_value_targets([sample(one) for one in texts], [one.reward for one in texts], cfg)
        wanted = torch.zeros((), dtype=torch.float64)
        for one, weight in zip(texts, weights(texts, cfg), strict=True):
            for value, old, target in zip(one.new, one.values["value"], one.target, strict=True):
                loss = (value - target) ** 2 / 2
                if cfg.value_clip is not None and abs(float(value.detach()) - old) > cfg.value_clip:
                    bounded = old + math.copysign(cfg.value_clip, float(value.detach()) - old)
                    # The larger of the two errors counts.
                    error = torch.tensor((bounded - target) ** 2 / 2, dtype=torch.float64)
                    loss = error if error > loss else loss
                wanted = wanted + weight * loss
        scored = [(one.new, one.new.detach()) for one in texts]
        objective = ValueObjective(cfg, max_new_tokens=LONGEST)
        ours = trained_loss(objective, samples, scored, torch.Generator().manual_seed(seed))
        assert_equal(ours, wanted, texts)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpos_loss_and_gradient_are_the_papers(beta):
    cfg = AlgorithmConfig(name="dpo", preference_beta=beta)
    for seed in SEEDS:
        texts = batch(seed)
        for place, one in enumerate(texts):
            one.group = place // 2
        margins = [one.new.sum() - sum(one.values["ref_logprob"]) for one in texts]
        pairs = zip(margins[::2], margins[1::2], strict=True)
        wanted = -sum(torch.nn.functional.logsigmoid(beta * (better - worse)) for better, worse in pairs) / (
            len(texts) / 2
        )
        scored = [(one.new, one.new.detach()) for one in texts]
        samples = [sample(one) for one in texts]
        ours = trained_loss(PreferenceObjective(cfg), samples, scored, torch.Generator().manual_seed(seed))
        # A pair without a token has the loss log 2 and no place to put it.
        for one, other in zip(texts[::2], texts[1::2], strict=True):
            if not len(one) + len(other):
                wanted = wanted - math.log(2) / (len(texts) / 2)
        assert_equal(ours, wanted, texts)


@pytest.mark.parametrize("reduction", [None, "token_mean", "sequence_mean"])
def test_the_likelihood_of_supervised_fine_tuning(reduction):
    cfg = AlgorithmConfig(name="sft", reduction=reduction)
    for seed in SEEDS:
        texts = batch(seed)
        wanted = -sum(w * one.new.sum() for w, one in zip(weights(texts, cfg), texts, strict=True))
        scored = [(one.new, one.new.detach()) for one in texts]
        samples = [sample(one) for one in texts]
        ours = trained_loss(SftObjective(cfg), samples, scored, torch.Generator().manual_seed(seed))
        assert_equal(ours, wanted, texts)

"""Whole steps of the loop against GRPO, GSPO, CISPO, SAPO and RLOO written here anew: transformers' model on
padded rows, plain autograd, torch's AdamW. The engine and the reward are scripted, so that both sides see the
same completions.

Tolerances: both sides run the model in float32. One step agrees to 1e-6 in losses and in every gradient;
Adam then carries round-off into the weights, and these into the next step. It divides a gradient g by |g| +
eps: with eps = 1e-4 an error e in a gradient near 0 moves a weight by at most e lr / eps = 40 e, where the
default eps of 1e-8 would let the sign of noise move it by lr. So: gradients to 5e-4 of their norm, weights
to 1e-5 where three steps move them by 1e-2, metrics to 1e-4.

Axes: N sequences of a mini-batch, L places of the longest, D hidden, V vocabulary.
"""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean, mean, stdev
from types import SimpleNamespace

import pytest
import torch
from relax_bridge import Checkpoint, write_checkpoint
from relax_core.algorithms import get_algorithm
from relax_core.loop.rl import RlLoop, open_task
from relax_core.loop.rollout import Rollout
from relax_core.loop.session import open_session
from relax_rollout import Completion, tensor_digest
from relax_rollout.rewards import RewardResult
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

PROMPTS = ["7", "12 + 3", "1 plus 2", "9 + 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1 + 1234567890"]
LENGTHS = (1, 4, 2, 33, 1, 1, 70, 9, 3, 12, 5, 1)
"""Of the completions of a step: some of one token, and beyond the 64 tokens of a delta-rule chunk."""
REWARDS = (0, 1, 0.5, 1, 1, 1, 0, 0, 1, 0.25, 1, 0)
"""The second group has no spread."""
SPLITS = {(4, 1): [4], (4, 2): [2, 2], (4, 4): [1, 1, 1, 1], (3, 2): [1, 2]}
"""Groups of each optimizer step, by the groups of the batch and the optimizer steps."""
TEMPERATURE = 0.7


@dataclass
class Sequence:
    """What the scripted engine and reward made of one request."""

    prompt: tuple[int, ...]
    completion: list[int]
    group: int
    reward: float
    rollout: list[float]
    advantage: float = 0.0
    old: torch.Tensor | None = None
    ref: torch.Tensor | None = None

    @property
    def ids(self):
        return [*self.prompt, *self.completion]


class Draft(nn.Module):
    """The draft layer, from transformers' parts under the names of the checkpoint's `mtp.*` tensors."""

    def __init__(self, config):
        super().__init__()
        size, eps, full = config.hidden_size, config.rms_norm_eps, config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def forward(self, next_embedding_NLD, hidden_NLD):
        joined = [self.pre_fc_norm_embedding(next_embedding_NLD), self.pre_fc_norm_hidden(hidden_NLD)]
        x_NLD = self.fc(torch.cat(joined, -1))
        length = x_NLD.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self.rotary(x_NLD, torch.arange(length)[None])
        return self.norm(self.layers[0](x_NLD, position_embeddings=angles, attention_mask=mask))


class Oracle:
    """The policy, its reference and its optimizer."""

    def __init__(self, path, reference_path, config):
        def load(path):
            return Qwen3_5ForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager")

        self.config, self.steps = config, 0
        self.policy, self.reference = load(path), load(reference_path)
        self.draft = Draft(self.policy.config)
        drafts = {n: Checkpoint.open(path).tensor(n) for n in Checkpoint.open(path).names if "mtp." in n}
        self.draft.load_state_dict({name.removeprefix("mtp."): tensor for name, tensor in drafts.items()})
        self.named = dict(self.policy.named_parameters())
        self.named |= {f"mtp.{name}": parameter for name, parameter in self.draft.named_parameters()}
        trainer = config.trainer
        matrices = [p for p in self.named.values() if p.ndim > 1]
        vectors = [p for p in self.named.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": trainer.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
        )

    def forward(self, model, sequences):
        """(log-probs of the next token [N, L - 1, V], the trunk's hidden states, ids), rows padded."""
        longest = max(len(s.ids) for s in sequences)
        ids_NL = torch.tensor([s.ids + [0] * (longest - len(s.ids)) for s in sequences])
        mask_NL = torch.tensor([[1] * len(s.ids) + [0] * (longest - len(s.ids)) for s in sequences])
        hidden_NLD = model.model(ids_NL, attention_mask=mask_NL, use_cache=False).last_hidden_state
        logprob_NLV = (model.lm_head(hidden_NLD[:, :-1]).double() / TEMPERATURE).log_softmax(-1)
        return logprob_NLV, hidden_NLD, ids_NL

    def pick(self, logprob_NLV, ids_NL, sequences, lead=1):
        """Log-probs of each completion's tokens; `lead` leading places of a row are not predicted."""
        picked_NL = logprob_NLV.gather(-1, ids_NL[:, lead:, None])[..., 0]
        return [
            row_L[max(len(s.prompt) - lead, 0) : len(s.ids) - lead]
            for row_L, s in zip(picked_NL, sequences, strict=True)
        ]

    @torch.no_grad()
    def score(self, model, sequences):
        logprob_NLV, _, ids_NL = self.forward(model, sequences)
        return self.pick(logprob_NLV, ids_NL, sequences)

    def batch(self, sequences):
        """One step of the loop: the metrics of its optimizer steps, averaged."""
        algorithm, parts = self.config.algorithm, self.config.trainer.optimizer_steps_per_batch
        olds = self.score(self.policy, sequences)
        refs = self.score(self.reference, sequences)
        for s, old, ref in zip(sequences, olds, refs, strict=True):
            s.old, s.ref = old, ref
        rewards = {id(s): s.reward for s in sequences}
        if algorithm.kl_reward_coef:
            for s in sequences:
                rewards[id(s)] -= algorithm.kl_reward_coef * float(kl(algorithm.kl, s.old, s.ref).sum())
        groups = sorted({s.group for s in sequences})
        for group in groups:
            members = [s for s in sequences if s.group == group]
            values = [rewards[id(s)] for s in members]
            for s in members:
                s.advantage = rewards[id(s)] - mean(values)
                if algorithm.name == "rloo":
                    s.advantage = rewards[id(s)] - (sum(values) - rewards[id(s)]) / (len(values) - 1)
                elif algorithm.name != "dr_grpo":
                    s.advantage /= stdev(values) + algorithm.advantage_eps
        found = []
        for size in SPLITS[len(groups), parts]:
            part, groups = groups[:size], groups[size:]
            found.append(self.step([s for s in sequences if s.group in part]))
        return {name: fmean(one[name] for one in found) for name in found[0]}

    def step(self, sequences):
        algorithm, trainer = self.config.algorithm, self.config.trainer
        logprob_NLV, hidden_NLD, ids_NL = self.forward(self.policy, sequences)
        news = self.pick(logprob_NLV, ids_NL, sequences)
        entropy_NL = -(logprob_NLV.exp() * logprob_NLV).sum(-1)
        counts = [len(s.completion) for s in sequences]
        sums = dict.fromkeys(("policy", "kl", "entropy"), 0.0)
        told = {name: [] for name in ("clip", "dual", "weight", "capped", "gap", "ratio", "from")}
        for row_L, new, s in zip(entropy_NL, news, sequences, strict=True):
            group = sum(c for c, other in zip(counts, sequences, strict=True) if other.group == s.group)
            weight = {
                "token_mean": 1 / sum(counts),
                "sequence_mean": 1 / len(s.completion) / len(sequences),
                "group_mean": 1 / group / len({other.group for other in sequences}),
                "sequence_sum": 1 / len(sequences),
                "fixed_length": 1 / self.config.rollout.max_new_tokens / len(sequences),
            }[algorithm.token_reduction]
            before = new.detach() if trainer.optimizer_steps_per_batch == 1 else s.old
            whole_ratio = (new - before).mean().exp()
            gap = s.old - torch.tensor(s.rollout, dtype=torch.float64)
            of_all = {"sequence": gap.sum(), "geometric": gap.mean()}
            low_trust, high_trust = algorithm.correction_band
            for i in range(len(new)):
                ratio = (new[i] - s.old[i]).exp()
                trust = float(of_all.get(algorithm.correction_level_in_use, gap[i]).clamp(-20, 20).exp())
                if trainer.optimizer_steps_per_batch == 1:
                    ratio = (new[i] - new[i].detach()).exp()
                capped = not low_trust <= trust <= high_trust
                trust = (high_trust if algorithm.correction == "truncated" else 0.0) if capped else trust
                low, high = 1 - algorithm.clip_range[0], 1 + algorithm.clip_range[1]
                loss, clipped, dual = token_loss(
                    algorithm, (low, high), s.advantage, ratio, whole_ratio, new[i]
                )
                sums["policy"] += weight * trust * loss
                if algorithm.kl_loss_coef:
                    sums["kl"] += weight * kl(algorithm.kl, new[i], s.ref[i])
                sums["entropy"] += weight * row_L[len(s.prompt) - 1 + i]
                values = (clipped, dual, trust, capped, abs(float(gap[i])), float(ratio))
                for name, value in zip(told, (*values, kl("k3", -gap[i], 0)), strict=True):
                    told[name].append(float(value))
        draft, acceptance = self.drafts(hidden_NLD, ids_NL, news, sequences)
        loss = sums["policy"] + algorithm.kl_loss_coef * sums["kl"] - algorithm.entropy_coef * sums["entropy"]
        loss = loss + self.config.mtp.loss_coefficient * draft
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.named.values(), trainer.clip_grad)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = trainer.lr * min(1.0, self.steps / trainer.warmup_steps)
        self.optimizer.step()
        return {
            "loss": float(loss),
            **{f"{name}_loss": float(value) for name, value in sums.items() if name != "kl" or value},
            "grad_norm": float(norm),
            "mtp_loss": float(draft),
            "mtp_acceptance": acceptance,
            "clip_fraction": mean(told["clip"]),
            "dual_clip_fraction": mean(told["dual"]),
            "importance_weight": mean(told["weight"]),
            "correction_fraction": mean(told["capped"]),
            "logprob_gap_mean": mean(told["gap"]),
            "rollout_kl": mean(told["from"]),
            "ratio": mean(told["ratio"]),
        }

    def drafts(self, hidden_NLD, ids_NL, news, sequences):
        """Loss and acceptance: from the trunk at place t and the token at t + 1 to the token at t + 2."""
        embedding_NLD = self.policy.model.embed_tokens(ids_NL).detach()
        draft_NLD = self.draft(embedding_NLD[:, 1:-1], hidden_NLD[:, :-2].detach())
        logits_NLV = draft_NLD @ self.policy.lm_head.weight.detach().T / TEMPERATURE
        picked = self.pick(logits_NLV.double().log_softmax(-1), ids_NL, sequences, lead=2)
        # A prompt of one token leaves the completion's first token without a draft.
        trunks = [new[len(new) - len(own) :] for new, own in zip(news, picked, strict=True)]
        draft, trunk = torch.cat(picked), torch.cat(trunks).detach()
        return -draft.mean(), float((draft.detach() - trunk).exp().clamp(max=1).mean())


def token_loss(algorithm, band, advantage, ratio, whole_ratio, logprob):
    """(loss of one token, whether it is clipped, whether dually so) by the algorithm's paper."""
    low, high = band
    if algorithm.name == "rloo":
        return -advantage * logprob, False, False
    if algorithm.name == "cispo":
        weight = min(max(float(ratio), low), high)
        return -weight * advantage * logprob, weight != float(ratio), False
    if algorithm.name == "sapo":
        tau = algorithm.gate_positive if advantage > 0 else algorithm.gate_negative
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * advantage, False, False
    if algorithm.name == "gspo":
        ratio = whole_ratio
    clipped = float(ratio) > high if advantage > 0 else float(ratio) < low and advantage < 0
    dual = bool(algorithm.dual_clip) and advantage < 0 and float(ratio) > algorithm.dual_clip
    factor = high if advantage > 0 else low
    return -(factor if clipped else algorithm.dual_clip if dual else ratio) * advantage, clipped, dual


def kl(kind, logprob, ref):
    d = logprob - ref
    k3 = (-d).exp() - 1 + d
    return {"k1": d, "k2": d**2 / 2, "k3": k3, "low_var": k3.clamp(-10, 10)}[kind]


class Script:
    """An engine and a reward that make up completions, and keep the weights they are sent."""

    def __init__(self, oracle):
        self.oracle, self.weights, self.sequences = oracle, {}, []
        self.generator = torch.Generator().manual_seed(11)

    async def generate(self, requests):
        vocabulary = self.oracle.policy.config.vocab_size
        self.sequences = [
            Sequence(
                request.prompt_ids,
                torch.randint(0, vocabulary, (length,), generator=self.generator).tolist(),
                index // 3,
                reward,
                [],
            )
            for index, (request, length, reward) in enumerate(zip(requests, LENGTHS, REWARDS, strict=True))
        ]
        for s, logprob in zip(
            self.sequences, self.oracle.score(self.oracle.policy, self.sequences), strict=True
        ):
            # An engine whose log-probs are off by more than any real one's, so that the caps act.
            noise = torch.randn(len(logprob), generator=self.generator) * 0.5
            s.rollout = (logprob + noise).float().tolist()
        return [
            Completion(r.id, tuple(s.completion), tuple(s.rollout), (0,) * len(s.completion), "length")
            for r, s in zip(requests, self.sequences, strict=True)
        ]

    async def score(self, inputs):
        return [RewardResult(s.reward) for s in self.sequences]

    async def begin_update(self, version, kept=()):
        self.weights = {}
        return dict.fromkeys(self.oracle.named, "float32")

    async def load(self, bucket):
        self.weights |= {name: tensor.clone() for name, tensor in bucket.items()}

    async def end_update(self):
        return {name: tensor_digest(tensor) for name, tensor in self.weights.items()}


CASES = {
    "two optimizer steps, sequence means, k3": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"kl": "k3", "kl_loss_coef": 0.3},
    },
    "two optimizer steps, token means, low_var": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"reduction": "token_mean", "kl": "low_var", "kl_loss_coef": 0.3},
    },
    "four optimizer steps of one group, group means, k2": {
        "trainer": {"optimizer_steps_per_batch": 4},
        "algorithm": {"reduction": "group_mean", "kl": "k2", "kl_loss_coef": 0.3},
    },
    "three of four groups kept, in steps of one and two": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "rollout": {"dynamic_sampling": True, "max_refills": 0},
    },
    "on policy, KL in the reward": {"algorithm": {"kl": "k1", "kl_reward_coef": 0.05}},
    "GSPO": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {
            "name": "gspo",
            "clip_low": 0.002,
            "clip_high": 0.003,
            "dual_clip": 1.002,
            "correction_high": 1.02,
        },
    },
    "CISPO": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"name": "cispo", "kl": "k3", "kl_loss_coef": 0.3},
    },
    "SAPO": {"trainer": {"optimizer_steps_per_batch": 2}, "algorithm": {"name": "sapo"}},
    "RLOO": {"algorithm": {"name": "rloo"}},
    "Dr. GRPO, IcePop": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"name": "dr_grpo", "correction": "icepop"},
    },
    "truncated weights of whole completions": {
        "trainer": {"optimizer_steps_per_batch": 2},
        "algorithm": {"correction_level": "sequence", "correction_high": 1.5},
    },
    "on policy, completions masked by their geometric mean": {
        "algorithm": {
            "correction": "icepop",
            "correction_level": "geometric",
            "correction_low": 0.9,
            "correction_high": 1.1,
        },
    },
}


@pytest.fixture
def reference_path(small_model, tmp_path):
    """Another checkpoint: the first with noise."""
    source, generator = Checkpoint.open(small_model), torch.Generator().manual_seed(5)
    tensors = {name: source.tensor(name) for name in source.names}
    tensors = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    return write_checkpoint(tmp_path / "reference", tensors, like=source)


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_three_steps_equal_grpo_in_plain_torch(small_run, small_model, reference_path, tmp_path, sections):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in PROMPTS))
    algorithm = {
        "entropy_coef": 0.02, "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.04,
        **sections.get("algorithm", {}),
    }  # fmt: skip
    used = get_algorithm(algorithm.get("name", "grpo")).settings | {"name"}
    algorithm = {name: value for name, value in algorithm.items() if name in used}
    needs_reference = {"kl_loss_coef", "kl_reward_coef"} & algorithm.keys()
    trainer = {
        "lr": 4e-3, "warmup_steps": 2, "weight_decay": 0.1, "clip_grad": 0.1, "eps": 1e-4,
        "micro_batch_tokens": 150, **sections.get("trainer", {}),
    }  # fmt: skip
    config = small_run(
        model={"path": str(small_model)}
        | ({"reference_path": str(reference_path)} if needs_reference else {}),
        data={"path": str(rows), "eval_path": None, "chat": False, "shuffle": False},
        trainer=trainer,
        algorithm=algorithm,
        rollout={"samples_per_prompt": 3, "max_new_tokens": 80, "temperature": TEMPERATURE}
        | sections.get("rollout", {}),
    )
    oracle = Oracle(small_model, reference_path, config)
    script = Script(oracle)
    recorder = SimpleNamespace(phase=lambda name: nullcontext(), gather=lambda spans: None)
    seen = []
    with open_session(config) as session, asyncio.Runner() as runner:
        rollout = Rollout(script, script, runner)
        loop = RlLoop(config, session, recorder, rollout, open_task(config, session))
        loop.begin(0, None)
        policy = session.policy
        start = {name: tensor.clone() for name, tensor in script.weights.items()}
        for step in (1, 2, 3):
            metrics = loop.step(step).metrics
            kept = script.sequences
            if config.rollout.dynamic_sampling:
                kept = [s for s in kept if s.group != 1]
                assert metrics["groups_dropped"] == 1
            expected = oracle.batch(kept)
            assert {len(s.prompt) for s in script.sequences} >= {1, 28}
            for name, value in expected.items():
                assert metrics[name] == pytest.approx(value, rel=1e-4, abs=2e-6), (step, name)
            gradients = {n: p.main_grad for n, p in policy.trainer.model.named_parameters()}
            # The optimizer scales what it reads and leaves the gradients as they are.
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            assert norm > trainer["clip_grad"]
            gradients = {n: g * (trainer["clip_grad"] / norm) for n, g in gradients.items()}
            for name, gradient in policy.weights.export_tensors(gradients):
                wanted = oracle.named[name].grad
                assert (gradient - wanted).norm() <= 5e-4 * wanted.norm() + 1e-8, (step, name)
            for name, weight in script.weights.items():
                torch.testing.assert_close(
                    weight, oracle.named[name].detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
            seen.append(metrics)
    assert all(not torch.equal(start[name], weight) for name, weight in script.weights.items())
    # Nothing that was compared was idle.
    off_policy = config.trainer.optimizer_steps_per_batch > 1
    for kind, setting in (("clip_fraction", "clip_low"), ("dual_clip_fraction", "dual_clip")):
        clips = off_policy and setting in config.algorithm.algorithm.settings
        # Completions hit the dual clip in some steps only.
        every = any if clips and config.algorithm.name == "gspo" else all
        assert every((m[kind] > 0) is clips for m in seen), kind
    assert all(m["correction_fraction"] > 0 and m["grad_norm"] > trainer["clip_grad"] for m in seen)
